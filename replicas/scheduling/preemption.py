"""Which running sequence gives up its pages, and what happens to its blocks. Pure.

Preempting costs less the less an answer would still hold: how long answers become is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Literal, Protocol

from samovar.cache_tiers.pricing import BURST_EXTENTS, Doubt, PrefillPrice, TierPrice, swap_or_drop
from samovar.replicas.scheduling.sequence import Sequence

BUCKETS = 24
"""Of lengths: [1, 2), [2, 4), ... tokens."""
FADE = 0.999
"""What an answer counts for when the next has ended: about the last thousand count."""
PRIOR_TOKENS = 256
"""How long answers count as before any has ended."""


class AnswerLengths:
    """A fading histogram of answers' lengths, in powers of two."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._counts[_bucket(PRIOR_TOKENS)] = 1.0

    def ended(self, tokens: int) -> None:
        """Count an answer of so many tokens."""
        self._counts = [FADE * count for count in self._counts]
        self._counts[_bucket(tokens)] += 1.0

    def left(self, tokens: int, tokens_max: int) -> float:
        """Return how many more an answer of `tokens` is expected to get, of at most `tokens_max`; at least 1.

        The mean of those that became longer, a bucket counted at its middle; as long again, if none did.
        """
        weight = total = 0.0
        for bucket, count in enumerate(self._counts):
            low, high = 2**bucket, 2 ** (bucket + 1)
            if high > tokens + 1:
                part = count * (high - max(low, tokens + 1)) / (high - low)
                weight += part
                total += part * ((max(low, tokens + 1) + high) / 2 - tokens)
        more = total / weight if weight else float(max(1, tokens))
        return max(1.0, min(more, float(tokens_max)))


def _bucket(tokens: int) -> int:
    return min(BUCKETS - 1, int(math.log2(max(1, tokens))))


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Sequence
    how: Literal["drop", "swap"]


class PreemptionPolicy:
    """Decides which sequence is preempted and what happens to its blocks.

    The victim is of the worst priority; among those, where prices are known, what is cheapest to bring back
    for what it would hold on (`held`); else, and of equals, the newest: it loses least service and delays no
    earlier one. `drop` frees its pages and computes them again later; `swap` copies the blocks out and in.
    """

    def __init__(self) -> None:
        self.lengths = AnswerLengths()

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        """Choose one of `candidates` (running, oldest first, never empty) to give up its pages."""
        yielding = [one for one in candidates if not one.is_due] or candidates
        worst = max(one.priority for one in yielding)
        victim = min(reversed([one for one in yielding if one.priority == worst]), key=self.price)
        return Preemption(victim, self.how(victim))

    def price(self, sequence: Sequence) -> float:
        """Return what preempting a sequence costs for what it frees; 0: it is not known."""
        return 0.0

    def how(self, victim: Sequence) -> Literal["drop", "swap"]:
        """Return what becomes of a victim's blocks."""
        return "drop"

    def held(self, sequence: Sequence) -> float:
        """Return how much a sequence would still hold: pages times expected steps."""
        steps = self.lengths.left(sequence.output_tokens, sequence.tokens_left)
        return max(1, len(sequence.pages)) * steps * sequence.forks


class DropNewest(PreemptionPolicy):
    """Preempts the newest sequence of the worst priority, whose blocks are computed again."""


class SwapPrices(Protocol):
    """What swapping takes (`SwapSpace`)."""

    def price(self) -> TierPrice:
        """Return the price of one direction between pages and memory."""
        ...

    @property
    def bytes_max(self) -> int: ...


class ByPrice(PreemptionPolicy):
    """Preempts what is cheapest to bring back for what it holds, by swap or drop, whichever is cheaper."""

    def __init__(
        self, prefill: Callable[[], PrefillPrice], swap: SwapPrices, block_bytes: int, block_tokens: int
    ) -> None:
        super().__init__()
        self._prefill = prefill
        self._swap = swap
        self._doubt = Doubt(swap.bytes_max // BURST_EXTENTS)
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens

    def price(self, sequence: Sequence) -> float:
        """Return the seconds to bring a sequence back, for each page and step that it would hold on."""
        copy, seconds = self._swap.price(), self._prefill().seconds(sequence.computed, 0)
        if copy.is_up:
            seconds = min(seconds, 2 * copy.seconds(self._nbytes(sequence)))
        return seconds / self.held(sequence)

    def how(self, victim: Sequence) -> Literal["drop", "swap"]:
        """Return what is cheaper, or a swap, to learn what that takes."""
        nbytes, copy = self._nbytes(victim), self._swap.price()
        self._doubt.decided(nbytes)
        how = swap_or_drop(victim.computed, nbytes, copy, self._prefill())
        if how == "drop" and nbytes and self._doubt.tries(nbytes, copy):
            return "swap"
        return how

    def _nbytes(self, sequence: Sequence) -> int:
        return -(-sequence.computed // self._block_tokens) * self._block_bytes


class SwapNewest(PreemptionPolicy):
    """Preempts the newest sequence of the worst priority; always swaps its blocks out if there is room."""

    def how(self, victim: Sequence) -> Literal["drop", "swap"]:
        """Return that they are swapped."""
        return "swap"


def preemption_policy(
    name: str, prefill: Callable[[], PrefillPrice], swap: SwapPrices, block_bytes: int, block_tokens: int
) -> PreemptionPolicy:
    """Return the policy of `engine.preemption`."""
    if name == "drop":
        return DropNewest()
    if name == "swap":
        return SwapNewest()
    return ByPrice(prefill, swap, block_bytes, block_tokens)
