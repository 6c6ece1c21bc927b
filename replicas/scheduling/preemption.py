"""Which running sequence gives up its pages, and what happens to its blocks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Literal, Protocol

from cache_tiers.pricing import BURST_EXTENTS, Doubt, PrefillPrice, TierPrice, swap_or_drop
from replicas.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Sequence
    how: Literal["drop", "swap"]


class PreemptionPolicy(Protocol):
    """Decides which sequence is preempted and what happens to its blocks.

    `drop` frees the victim's pages and computes them again later; `swap` copies the blocks out and back in:
    `swap_or_drop` computes which is cheaper.
    """

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        """Choose one of `candidates` (running, oldest first, never empty) to give up its pages."""
        ...


class DropNewest:
    """Preempts the newest sequence: it loses least service and delays no earlier one."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "drop")


class SwapPrices(Protocol):
    """What swapping takes (`SwapSpace`)."""

    def price(self) -> TierPrice:
        """Return the price of one direction between pages and memory."""
        ...

    @property
    def bytes_max(self) -> int: ...


class NewestByPrice:
    """Preempts the newest sequence, by swap or drop, whichever is cheaper."""

    def __init__(
        self, prefill: Callable[[], PrefillPrice], swap: SwapPrices, block_bytes: int, block_tokens: int
    ) -> None:
        self._prefill = prefill
        self._swap = swap
        self._doubt = Doubt(swap.bytes_max // BURST_EXTENTS)
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        victim = candidates[-1]
        nbytes = -(-victim.computed // self._block_tokens) * self._block_bytes
        copy = self._swap.price()
        self._doubt.decided(nbytes)
        how = swap_or_drop(victim.computed, nbytes, copy, self._prefill())
        if how == "drop" and nbytes and self._doubt.tries(nbytes, copy):
            how = "swap"
        return Preemption(victim, how)


class SwapNewest:
    """Preempts the newest sequence and always swaps its blocks out if there is room."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "swap")


def preemption_policy(
    name: str, prefill: Callable[[], PrefillPrice], swap: SwapPrices, block_bytes: int, block_tokens: int
) -> PreemptionPolicy:
    """Return the policy of `engine.preemption`."""
    if name == "drop":
        return DropNewest()
    if name == "swap":
        return SwapNewest()
    return NewestByPrice(prefill, swap, block_bytes, block_tokens)
