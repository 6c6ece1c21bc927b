"""What stays and what goes: the order in which a tier gives up its copies.

Pure: sees copies as plain data, moves nothing, keeps no books. Pinned copies and quotas are the
directory's concern; a policy is asked only about what could go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache_tiers.extent import TierName
from cache_tiers.residency import Resident


class ResidencyPolicy(Protocol):
    """Ranks copies. Called under the node's lock with a few dozen candidates: no I/O, well under 1 ms."""

    def order(self, candidates: Sequence[Resident], tier: TierName, now_s: float) -> list[int]:
        """Indices of `candidates`, each once, the first to go first. `now_s`: the clock of `last_used_s`."""
        ...


class LeastRecentlyUsed:
    """Least recently used first, with three refinements.

    Copies used within their `keep_s` go after all others; within either class those that a lower tier
    holds as well go before those that would be lost; and of equal use the deeper one goes first, because a
    block is useless without its parents.
    """

    def order(self, candidates: Sequence[Resident], tier: TierName, now_s: float) -> list[int]:
        """See `ResidencyPolicy.order`."""

        def rank(index: int) -> tuple[bool, bool, float, int]:
            copy = candidates[index]
            is_kept = max(0.0, now_s - copy.last_used_s) < copy.keep_s
            return is_kept, not copy.is_clean, copy.last_used_s, -copy.first_block

        return sorted(range(len(candidates)), key=rank)
