"""What the tiers have of a prompt: on every rank of the engine, or it is not there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from samovar.cache_tiers.blocks import LoadSource
from samovar.cache_tiers.messages import BlockRange, LookupResult
from samovar.cache_tiers.pricing import TierPrice

KEYS_MAX = 20_000
ARRIVES_S = 5.0
"""A store is in the tiers so soon after it began; if not, a later turn stores it again."""


class CommonRun(NamedTuple):
    """Blocks `[first, first + blocks)` that every rank has. `nbytes`: of all; `tier`: the slowest."""

    first: int
    blocks: int
    nbytes: int
    tier: LoadSource


def spans_behind(spans: Sequence[BlockRange], first: int, end: int) -> list[BlockRange]:
    """Return what there is of blocks `[first, end)` from the first on, without a gap, cut to it."""
    found: list[BlockRange] = []
    for span in sorted(spans, key=lambda one: one.first):
        last = min(span.first + span.blocks, end)
        if last <= first:
            continue
        if span.first > first:
            break
        found.append(
            BlockRange(
                span.extent_id,
                span.tenant,
                first,
                span.offset + first - span.first,
                last - first,
                span.tier,
                span.nbytes * (last - first) // span.blocks,
                span.node,
            )
        )
        first = last
    return found


def kept_front(found: Sequence[LookupResult]) -> int:
    """Return how many blocks from the chain's beginning the tiers had of every rank, without a gap."""
    return min((_end(spans_behind(one.spans, 0, 1 << 62), 0) for one in found), default=0)


def segments(
    found: Sequence[LookupResult], first: int, end: int, prices: Mapping[LoadSource, TierPrice]
) -> list[CommonRun]:
    """Return what every rank has of blocks `[first, end)` from the first on, cut where a rank's is cut."""
    ranks = [spans_behind(one.spans, first, end) for one in found]
    end = min((_end(spans, first) for spans in ranks), default=first)
    cuts = {min(span.first + span.blocks, end) for spans in ranks for span in spans}
    made: list[CommonRun] = []

    def load_s(one: BlockRange) -> float:
        return prices[one.tier].seconds(one.nbytes) if one.tier in prices else 0.0

    for cut in sorted(cuts - {first}):
        parts = [one for spans in ranks for one in spans_behind(spans, first, cut)]
        nbytes = sum(one.nbytes for one in parts)
        made.append(CommonRun(first, cut - first, nbytes, max(parts, key=load_s).tier))
        first = cut
    return made


def _end(spans: Sequence[BlockRange], first: int) -> int:
    return spans[-1].first + spans[-1].blocks if spans else first


class RecentStores:
    """Keys of blocks with the time at which their store began: those of requests that ran side by side.

    In one life of the tiers: what a restart has left of them its own lookups say.
    """

    def __init__(self) -> None:
        self._began_s: dict[bytes, float] = {}
        self._incarnation = ""

    def add(self, keys: Iterable[bytes], now_s: float, incarnation: str) -> None:
        """Record that the blocks are being stored by tiers of this life."""
        if incarnation != self._incarnation:
            self._began_s.clear()
            self._incarnation = incarnation
        for key in keys:
            self._began_s.pop(key, None)
            self._began_s[key] = now_s
        while len(self._began_s) > KEYS_MAX:
            del self._began_s[next(iter(self._began_s))]

    def held(self, keys: Sequence[bytes], held: int, looked_up_s: float, incarnation: str) -> int:
        """Return how many leading blocks there are, of which `held` were found by a lookup at that time."""
        if incarnation != self._incarnation:
            return held
        while held < len(keys) and self._began_s.get(keys[held], float("-inf")) > looked_up_s - ARRIVES_S:
            held += 1
        return held
