"""From a chain of block keys to the extents that hold its blocks. One namespace of one tenant.

A key names a block together with all before it, so an extent that has a key has the right blocks up to
there, and a lookup is one dict access a block, whatever is held. Extents may overlap (conversations
with a common beginning, cut differently). A partial tail block is found by its parent, never by its key:
only who has the tokens at hand can tell whether it is theirs. Knows no bytes, clocks or sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from cache_tiers.extent import TIERS, TierName
from cache_tiers.held_extent import HeldExtent
from cache_tiers.keys import ROOT
from cache_tiers.messages import Span, Tail

ROW_SCAN_MAX = 64
"""Extents looked at for one block, the newest first: any of them will do, so that a beginning which
thousands of extents have in common does not make a lookup slow."""

TAILS_MAX = 64
"""Tails in one answer: the asker hashes each of them."""


@dataclass(frozen=True, slots=True)
class Match:
    """`seen`: extents with blocks of the chain -> is every block of it in the chain?"""

    spans: tuple[Span, ...]
    seen: dict[HeldExtent, bool]
    tails: tuple[Tail, ...]
    tail_extents: tuple[HeldExtent, ...]


class _Rows:
    """key -> extents. Most keys have one extent, which then stands there without a container."""

    def __init__(self) -> None:
        self._rows: dict[bytes, HeldExtent | dict[HeldExtent, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: bytes, extent: HeldExtent) -> None:
        row = self._rows.setdefault(key, extent)
        if isinstance(row, dict):
            row[extent] = None
        elif row is not extent:
            self._rows[key] = {row: None, extent: None}

    def remove(self, key: bytes, extent: HeldExtent) -> None:
        row = self._rows.get(key)
        if isinstance(row, dict):
            row.pop(extent, None)
            if len(row) == 1:
                self._rows[key] = next(iter(row))
        elif row is extent:
            del self._rows[key]

    def at(self, key: bytes) -> Sequence[HeldExtent]:
        """The newest `ROW_SCAN_MAX` of the row."""
        row = self._rows.get(key)
        if row is None:
            return ()
        return list(islice(reversed(row), ROW_SCAN_MAX)) if isinstance(row, dict) else (row,)

    def pairs(self) -> Iterator[tuple[bytes, HeldExtent]]:
        for key, row in self._rows.items():
            for extent in row if isinstance(row, dict) else (row,):
                yield key, extent

    def check_integrity(self) -> None:
        for row in self._rows.values():
            assert not isinstance(row, dict) or len(row) > 1, "a row of the index is longer than its extents"


class ChainIndex:
    """All extents of one namespace and tenant that some tier holds."""

    def __init__(self) -> None:
        self._blocks = _Rows()
        self._tails = _Rows()

    def __len__(self) -> int:
        """Keys indexed."""
        return len(self._blocks) + len(self._tails)

    def add(self, extent: HeldExtent) -> None:
        """O(blocks)."""
        for key in extent.block_keys():
            self._blocks.add(key, extent)
        if extent.tail is not None:
            self._tails.add(extent.tail_parent, extent)

    def remove(self, extent: HeldExtent) -> None:
        """O(blocks)."""
        for key in extent.block_keys():
            self._blocks.remove(key, extent)
        if extent.tail is not None:
            self._tails.remove(extent.tail_parent, extent)

    def find(self, keys: Sequence[bytes], up: Collection[TierName]) -> Match:
        """What tiers in `up` hold of the chain `keys`. O(keys), however much is held."""
        spans, tiers = self._spans(keys, up)
        tails, tail_extents = self._tails_of(keys, up)
        seen = {extent: _is_whole(extent, keys) for extent in tiers}
        return Match(tuple(spans), seen, tuple(tails), tuple(tail_extents))

    def _spans(
        self, keys: Sequence[bytes], up: Collection[TierName]
    ) -> tuple[list[Span], dict[HeldExtent, TierName | None]]:
        """From the last block to the first, because what an extent shares with a chain is its beginning.

        A block comes from the cheapest tier that has it; of equal ones from the extent that is being
        used already, else from the one that reaches back furthest. Also: every extent met, with its tier.
        """
        spans: list[Span] = []
        tiers: dict[HeldExtent, TierName | None] = {}
        current: HeldExtent | None = None
        end = 0  # of the current span
        for at in range(len(keys) - 1, -1, -1):
            key = keys[at]
            row = self._blocks.at(key)
            if current is not None and len(row) == 1 and row[0] is current:
                continue  # nothing to choose from
            best: HeldExtent | None = None
            best_rank = (len(TIERS), 0)
            for extent in row if current is None else (current, *row):
                if not extent.has_block(at - extent.first_block, key):
                    continue  # not this far, or its header lies about its place in the chain
                if extent not in tiers:
                    tiers[extent] = extent.cheapest(up)
                tier = tiers[extent]
                if tier is None:
                    continue
                rank = TIERS.index(tier), -1 if extent is current else extent.first_block
                if rank < best_rank:
                    best, best_rank = extent, rank
            if best is not current:
                if current is not None:
                    spans.append(_span(current, at + 1, end, tiers[current]))
                current, end = best, at + 1
        if current is not None:
            spans.append(_span(current, 0, end, tiers[current]))
        spans.reverse()
        return spans, tiers

    def _tails_of(
        self, keys: Sequence[bytes], up: Collection[TierName]
    ) -> tuple[list[Tail], list[HeldExtent]]:
        tails: list[Tail] = []
        extents: list[HeldExtent] = []
        for at in range(len(keys), -1, -1):
            for extent in self._tails.at(keys[at - 1] if at else ROOT):
                tier = extent.cheapest(up)
                if tier is None or extent.tail is None or extent.first_block + extent.full_blocks != at:
                    continue
                key, tokens = extent.tail
                tails.append(Tail(key, tokens, extent.span(at, extent.full_blocks, 1, tier)))
                extents.append(extent)
                if len(tails) == TAILS_MAX:
                    return tails, extents
        return tails, extents

    def check_integrity(self, extents: Collection[HeldExtent]) -> None:
        """Raises `AssertionError` when anything but exactly `extents` is indexed."""
        self._blocks.check_integrity()
        self._tails.check_integrity()
        blocks = {(key, extent) for extent in extents for key in extent.block_keys()}
        assert set(self._blocks.pairs()) == blocks, "blocks in the index are not those of the extents held"
        tails = {(extent.tail_parent, extent) for extent in extents if extent.tail is not None}
        assert set(self._tails.pairs()) == tails, "tails in the index are not those of the extents held"


def _span(extent: HeldExtent, first: int, end: int, tier: TierName | None) -> Span:
    assert tier is not None
    return extent.span(first, first - extent.first_block, end - first, tier)


def _is_whole(extent: HeldExtent, keys: Sequence[bytes]) -> bool:
    last = extent.full_blocks - 1
    at = extent.first_block + last
    return extent.tail is None and at < len(keys) and extent.has_block(last, keys[at])
