"""What is remembered of blocks that are in no tier, within a bound: why, so that a turn that computes them
again can say so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Generic, TypeVar

from samovar.cache_tiers.blocks import KEY_BYTES
from samovar.cache_tiers.directory.index import ChainIndex, HeldExtent
from samovar.cache_tiers.directory.types import EvictReason
from samovar.cache_tiers.messages import AbsentRun, BlockRange

_GONE: Mapping[EvictReason, str] = {
    "room": "evicted",
    "quota": "evicted",
    "expired": "expired",
    "lost": "lost",
    "placement": "lost",
    "differs": "lost",
}


class AbsentBlocks:
    """Why blocks that this node was given are in none of its tiers. `blocks_max`: that are remembered."""

    def __init__(self, blocks_max: int) -> None:
        self._why: BlockMemory[str] = BlockMemory(blocks_max)

    def reserved(self, extent: HeldExtent) -> None:
        """Record that an extent that no tier has is being stored."""
        self._why.put(extent.block_keys(), "being stored")

    def left(self, extent: HeldExtent, reason: EvictReason | None) -> None:
        """Record that no tier has an extent any more; None: it was never written.

        Of what was cleared nothing is remembered.
        """
        if reason == "cleared":
            self._why.drop(extent.block_keys())
        else:
            self._why.put(extent.block_keys(), "not written" if reason is None else _GONE[reason])

    def of(
        self, joined_keys: bytes, spans: Iterable[BlockRange], held: ChainIndex | None
    ) -> tuple[AbsentRun, ...]:
        """Return what is known of a chain's blocks that are in none of `spans`. O(keys) at most.

        `held`: the index that they would be in: what it has all the same is in a tier that is down.
        """
        if held is None and not self._why:
            return ()
        runs: list[AbsentRun] = []
        for first, end in _gaps(spans, len(joined_keys) // KEY_BYTES):
            ends = range((first + 1) * KEY_BYTES, (end + 1) * KEY_BYTES, KEY_BYTES)
            keys = [joined_keys[at - KEY_BYTES : at] for at in ends]
            reasons = self._why.of(keys)
            down = () if held is None else held.which(keys)
            for one in down:
                reasons[one] = "down"
            at = first
            for reason, same in groupby(reasons):
                blocks = sum(1 for _ in same)
                if reason is not None:
                    runs.append(AbsentRun(at, blocks, reason))
                at += blocks
        return tuple(runs)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._why.check_integrity()


def _gaps(spans: Iterable[BlockRange], blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the blocks of a chain that are in none of `spans`, which are in order."""
    end = 0
    for span in spans:
        if span.first > end:
            yield end, span.first
        end = max(end, span.first + span.blocks)
    if end < blocks:
        yield end, blocks


Value = TypeVar("Value")

_NAME_BYTES = 8
"""Of a block's key: enough to tell blocks apart where a mistake costs a wrong word, not a wrong block."""


class BlockMemory(Generic[Value]):
    """A true value for each of the latest blocks: at most `blocks_max`, at least the last half of that.

    Two halves, of which the older one goes as a whole: no order is kept, so a block costs one entry.
    """

    def __init__(self, blocks_max: int) -> None:
        self._half = max(1, blocks_max // 2)
        self._new: dict[bytes, Value] = {}
        self._old: dict[bytes, Value] = {}

    def __len__(self) -> int:
        """Return the number of entries; a block that was put twice may have two."""
        return len(self._new) + len(self._old)

    def put(self, keys: Iterable[bytes], value: Value) -> None:
        """Remember `value` of these blocks, instead of what was remembered before."""
        for key in keys:
            self._new[key[:_NAME_BYTES]] = value
            if len(self._new) >= self._half:
                self._old, self._new = self._new, {}

    def of(self, keys: Iterable[bytes]) -> list[Value | None]:
        """Return what is remembered of each of these blocks."""
        new, old = self._new, self._old
        names = [key[:_NAME_BYTES] for key in keys]
        if not old:
            return list(map(new.get, names))
        return [new.get(name) or old.get(name) for name in names]

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget these blocks."""
        for key in keys:
            self._new.pop(key[:_NAME_BYTES], None)
            self._old.pop(key[:_NAME_BYTES], None)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._new) < self._half, "more blocks are remembered than may be"
        assert len(self._old) <= self._half, "more old blocks are remembered than may be"
