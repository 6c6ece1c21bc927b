"""What was cleared, and when: so that nothing which was under way then comes back afterwards.

Bounded: when there are too many, the oldest is forgotten by refusing everything that is as old as it,
whoever made it. Pure; "when" is a count of clears, no time.
"""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """The last clear of each tenant and session, `tombstones_max` of them."""

    def __init__(self, tombstones_max: int) -> None:
        if tombstones_max < 1:
            raise ValueError(f"at least one tombstone must have room, not {tombstones_max}")
        self._tombstones_max = tombstones_max
        self._seqs: OrderedDict[tuple[bytes, bytes | None], int] = OrderedDict()  # the oldest first
        self._floor = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, tenant: bytes, session: bytes | None, seq: int) -> None:
        """The clear number `seq` (they grow) forgot this session, or with None the whole tenant."""
        self._seqs[tenant, session] = seq
        self._seqs.move_to_end((tenant, session))
        if len(self._seqs) > self._tombstones_max:
            _, self._floor = self._seqs.popitem(last=False)

    def forbids(self, tenant: bytes, session: bytes, clear_seq: int) -> bool:
        """What this session made, by one who knew of `clear_seq` clears, may have been cleared since."""
        last = max(self._floor, self._seqs.get((tenant, None), 0), self._seqs.get((tenant, session), 0))
        return clear_seq < last

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._seqs) <= self._tombstones_max, "more tombstones than there is room for"
        seqs = list(self._seqs.values())
        assert seqs == sorted(set(seqs)), "tombstones are out of order"
        assert not seqs or self._floor < seqs[0], "a tombstone is older than what was forgotten"
