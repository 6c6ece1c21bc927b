"""Remembers what became of computed blocks, so that computing them again has a reason. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.cache_tiers.directory import BlockMemory
from samovar.replicas.kv import session_owner

STORED: Final = frozenset({"taken", "held"})
"""What became of blocks that the tiers took; all else is why they did not."""

CLEARS_MAX: Final = 4096
"""Clears that are remembered; of what was cleared longer ago no reason is known."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of blocks at the end of a turn.

    `outcome`: as `StoreResults` counts it, `storing` until that is known, or `cleared`. `detail`: the prices
    behind it, in words. `owner`: whose turn it was; `clears`: how many clears there had been.
    """

    outcome: str
    detail: str
    owner: bytes
    clears: int

    @property
    def is_stored(self) -> bool:
        """Whether the tiers took the blocks."""
        return self.outcome in STORED


CLEARED = Fate("cleared", "", b"", 0)


class BlockFates:
    """The fates of the latest blocks; `blocks_max`: how many are remembered."""

    def __init__(self, blocks_max: int) -> None:
        self._fates: BlockMemory[Fate] = BlockMemory(blocks_max)
        self._cleared: OrderedDict[bytes, int] = OrderedDict()  # tag -> which clear it was; oldest first
        self._clears = 0

    def became(self, keys: Sequence[bytes], outcome: str, owner: bytes, detail: str = "") -> None:
        """Record what became of an owner's blocks."""
        self._fates.put(keys, Fate(outcome, detail, owner, self._clears))

    def left_alone(self, keys: Sequence[bytes], outcome: str, owner: bytes) -> None:
        """Record why an owner's blocks were not offered; those that the tiers took before stay taken."""
        known = self.of(keys)
        new = [key for key, fate in zip(keys, known, strict=True) if fate is None or not fate.is_stored]
        self.became(new, outcome, owner)

    def cleared(self, tags: Collection[bytes]) -> None:
        """Record a clear of these owners, sessions or tenants."""
        self._clears += 1
        for tag in tags:
            self._cleared[tag] = self._clears
            self._cleared.move_to_end(tag)
        while len(self._cleared) > CLEARS_MAX:
            self._cleared.popitem(last=False)

    def of(self, keys: Sequence[bytes]) -> list[Fate | None]:
        """Return what is known of each of a chain's blocks."""
        found: list[Fate | None] = []
        before: Fate | None = None
        for fate in self._fates.of(keys):
            if fate is not None and fate is before:
                found.append(found[-1])  # of the same extent
                continue
            before = fate
            found.append(CLEARED if fate is not None and self._is_cleared(fate) else fate)
        return found

    def _is_cleared(self, fate: Fate) -> bool:
        """Return whether its owner was cleared since."""
        tags = fate.owner, session_owner(fate.owner), fate.owner[:TAG_BYTES]
        return any(self._cleared.get(tag, 0) > fate.clears for tag in tags)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._fates.check_integrity()
        assert len(self._cleared) <= CLEARS_MAX, "too many clears are remembered"
