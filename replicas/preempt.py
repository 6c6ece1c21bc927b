"""Who makes room when the pages run out, and what becomes of its blocks. Pure.

`drop` forgets the victim's pages and computes them again later; `swap` copies the blocks out and back
in. Which of the two is cheaper is `cost.swap_or_drop`'s arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Literal, Protocol

from cache_tiers.cost import PrefillPrice, swap_or_drop
from cache_tiers.messages import TierPrice
from replicas.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Sequence
    how: Literal["drop", "swap"]


class PreemptionPolicy(Protocol):
    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        """One of `candidates` (running, oldest first, never empty) gives up its pages."""
        ...


class DropNewest:
    """The newest loses least service and delays nobody who came before it."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "drop")


class NewestByPrice:
    """The newest goes, and its blocks the cheaper way. `copy`: one direction between pages and memory."""

    def __init__(
        self, prefill: Callable[[], PrefillPrice], copy: TierPrice, block_bytes: int, block_tokens: int
    ) -> None:
        self._prefill = prefill
        self._copy = copy
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        victim = candidates[-1]
        nbytes = -(-victim.computed // self._block_tokens) * self._block_bytes
        return Preemption(victim, swap_or_drop(victim.computed, nbytes, self._copy, self._prefill()))


class SwapNewest:
    """The newest goes, and its blocks are always kept aside where there is room."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "swap")
