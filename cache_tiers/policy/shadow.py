"""What least recently used would have had: a shadow of the tiers, of keys and sizes only.

A sampled shadow is biased: sessions are too large against a sample, and running ones do not shrink with it.
So this one is whole, and small: a row is a run of a chain's blocks, of which it has 8 bytes of the first key
and one byte of each block. All tiers share one order of use, and each has a hand at its longest unused row,
so a use is one move in a linked list of integers, whatever the number of tiers.

The real tiers' lookups, stores and losses are replayed, in their order. A turn's blocks go where their
placement says; what a tier has no room for goes down to the next one, if no lower one has a copy; what is
used is up again; and what the real tiers had and the shadow had not is computed and stored again, as it would
have been. It knows no profiles' `min_ttl_s`, no shares of tenants and no pins: plain least recently used.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from samovar.cache_tiers.blocks import KEY_BYTES, TIERS, BlockShape, Placement, TierName
from samovar.cache_tiers.messages import BlockRange, LruStats

FIRST_BYTES: Final = 8
"""Of the key of a row's first block; the byte behind them stands for each block of a chain."""

LOG_MAX: Final = 1024
"""Events that may wait to be replayed; of more the oldest are not counted. About a second's."""

_MANY_TIERS: Final = 5
_ALL: Final = (1 << _MANY_TIERS) - 1
_BUCKETS: Final = 64
_TICKS: Final = 1e6
"""A stamp is a time of use in microseconds, or one more than the latest: no two rows have the same."""


class ShadowedCopy(Protocol):
    """An extent's record in one tier."""

    @property
    def nbytes(self) -> int: ...


class ShadowedExtent(Protocol):
    """An extent as the catalog has it. `keys`: of its full blocks, joined."""

    @property
    def keys(self) -> bytes: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def shape(self) -> BlockShape: ...
    @property
    def last_used_s(self) -> float: ...
    @property
    def copies(self) -> Mapping[TierName, ShadowedCopy]: ...


class ShadowRows:
    """Rows of block runs by their first key, in order of use, with the tiers that have each. Pure.

    A row's number is stable until it is removed; 0 is no row, and the two ends of the order.
    """

    def __init__(self) -> None:
        self._first = array("Q", [0])
        self._chained = array("i", [0])  # next row of the same bucket
        self._older = array("i", [0])
        self._newer = array("i", [0])
        self.stamps = array("Q", [0])
        self.sizes = array("I", [0])  # bytes
        self.flags = array(
            "H", [0]
        )  # bits of tiers: those that have it, those it is stored in, all it may be in
        self._marks: list[bytes] = [b""]  # a byte for each block
        self._buckets = array("i", bytes(4 * _BUCKETS))
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._marks) - 1 - len(self._free)

    @property
    def oldest(self) -> int:
        return self._newer[0]

    @property
    def newest(self) -> int:
        return self._older[0]

    def older(self, row: int) -> int:
        """Return the row used last before this one; 0: it is the oldest."""
        return self._older[row]

    def newer(self, row: int) -> int:
        """Return the row used next after this one; 0: it is the newest."""
        return self._newer[row]

    def blocks(self, row: int) -> int:
        return len(self._marks[row])

    def walk(self, keys: bytes) -> tuple[list[tuple[int, int]], int]:
        """Return the rows a chain begins with, each with how many of its blocks are shared, and their sum."""
        marks, at, found = keys[FIRST_BYTES::KEY_BYTES], 0, []
        buckets, firsts, of, chained = self._buckets, self._first, self._marks, self._chained
        last, blocks = len(buckets) - 1, len(marks)
        while at < blocks:  # written out: this is most of the shadow's cost
            begin = at * KEY_BYTES
            first = int.from_bytes(keys[begin : begin + FIRST_BYTES], "little")
            row, best, most = buckets[first & last], 0, 0
            while row:
                if firsts[row] == first:
                    mine = of[row]
                    shared = len(mine) if marks.startswith(mine, at) else _shared(mine, marks, at)
                    if shared > most:
                        best, most = row, shared
                row = chained[row]
            if not best:
                break
            found.append((best, most))
            at += most
        return found, at

    def at(self, keys: bytes, at: int) -> list[int]:
        """Return the rows that begin with the block `at` of a chain."""
        first, found = _first_of(keys, at), []
        row = self._buckets[first & (len(self._buckets) - 1)]
        while row:
            if self._first[row] == first:
                found.append(row)
            row = self._chained[row]
        return found

    def add(self, keys: bytes, nbytes: int, flags: int, stamp: int) -> int:
        """Add a row of these blocks as the newest, and return it."""
        return self._new(_first_of(keys, 0), keys[FIRST_BYTES::KEY_BYTES], nbytes, flags, stamp, self.newest)

    def split(self, row: int, blocks: int, keys: bytes, at: int) -> None:
        """Cut a row behind its first `blocks`; its rest, which begins with block `at` of `keys`, is older."""
        marks, size, older = self._marks[row], self.sizes[row], self._older[row]
        rest_bytes = size * (len(marks) - blocks) // len(marks)
        self._marks[row], self.sizes[row] = marks[:blocks], size - rest_bytes
        stamp = max(self.stamps[row] - 1, self.stamps[older])
        self._new(_first_of(keys, at), marks[blocks:], rest_bytes, self.flags[row], stamp, older)

    def use(self, rows: Iterable[int], stamp: int) -> int:
        """Make these rows the newest, the last of them before all; return its stamp, from `stamp` + 1 on."""
        older, newer, stamps = self._older, self._newer, self.stamps
        for row in rows:
            stamp += 1
            before, after = older[row], newer[row]
            newer[before], older[after] = after, before
            newest = older[0]
            older[row], newer[row] = newest, 0
            newer[newest] = older[0] = row
            stamps[row] = stamp
        return stamp

    def remove(self, row: int) -> None:
        """Remove a row that no tier has."""
        self._unlink(row)
        bucket, at = self._first[row] & (len(self._buckets) - 1), 0
        while (following := self._chained[at] if at else self._buckets[bucket]) != row:
            at = following
        if at:
            self._chained[at] = self._chained[row]
        else:
            self._buckets[bucket] = self._chained[row]
        self._marks[row], self.flags[row] = b"", 0
        self._free.append(row)

    def in_order(self) -> list[int]:
        """Return all rows, the longest unused first."""
        found, row = [], self.oldest
        while row:
            found.append(row)
            row = self._newer[row]
        return found

    def sort(self) -> None:
        """Bring the rows into the order of their stamps, and make these differ."""
        last = 0
        for row in sorted(self.in_order(), key=lambda row: self.stamps[row]):
            last = self.use((row,), max(self.stamps[row] - 1, last))

    def _new(self, first: int, marks: bytes, nbytes: int, flags: int, stamp: int, older: int) -> int:
        if len(self) >= len(self._buckets):
            self._grow()
        nbytes = min(nbytes, 0xFFFFFFFF)
        if self._free:
            row = self._free.pop()
            self._first[row], self.stamps[row], self.sizes[row] = first, stamp, nbytes
            self.flags[row], self._marks[row] = flags, marks
        else:
            row = len(self._marks)
            for column in (self._older, self._newer, self._chained):
                column.append(0)
            self._first.append(first)
            self.stamps.append(stamp)
            self.sizes.append(nbytes)
            self.flags.append(flags)
            self._marks.append(marks)
        bucket = first & (len(self._buckets) - 1)
        self._chained[row], self._buckets[bucket] = self._buckets[bucket], row
        self._link(row, older)
        return row

    def _link(self, row: int, older: int) -> None:
        newer = self._newer[older]
        self._older[row], self._newer[row] = older, newer
        self._newer[older] = self._older[newer] = row

    def _unlink(self, row: int) -> None:
        older, newer = self._older[row], self._newer[row]
        self._newer[older], self._older[newer] = newer, older

    def _grow(self) -> None:
        self._buckets = array("i", bytes(8 * len(self._buckets)))
        last = len(self._buckets) - 1
        for row in self.in_order():
            bucket = self._first[row] & last
            self._chained[row], self._buckets[bucket] = self._buckets[bucket], row

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        rows = self.in_order()
        assert len(rows) == len(set(rows)) == len(self), "a row is lost, or twice in the order"
        stamps = [self.stamps[row] for row in rows]
        assert stamps == sorted(stamps), "the order is not that of the stamps"
        for row in rows:
            at = self._buckets[self._first[row] & (len(self._buckets) - 1)]
            while at != row:
                assert at, "a row cannot be found"
                at = self._chained[at]
            assert self._marks[row], "a row without blocks"
            assert self.flags[row] & _ALL, "a row that no tier has"


def _first_of(keys: bytes, at: int) -> int:
    return int.from_bytes(keys[at * KEY_BYTES : at * KEY_BYTES + FIRST_BYTES], "little")


def _shared(row: bytes, chain: bytes, at: int) -> int:
    """Return how many of a row's blocks a chain goes on with at `at`.

    A key commits to all before it: behind the first difference everything differs.
    """
    low, high = 0, min(len(row), len(chain) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if chain.startswith(row[:middle], at):
            low = middle
        else:
            high = middle - 1
    return low


class ShadowLru:
    """The shadow of a node's tiers, see the module, and what it has counted. Thread-safe.

    `budgets`: bytes a tier may hold. `clock`: the extents'. `log`: events to replay, which those who make
    them append in their order: `(keys, spans)` of a lookup that began a turn, `(extent, nbytes)` of what was
    stored, `(keys,)` of what expired, was cleared or lost.
    """

    def __init__(self, budgets: Mapping[TierName, int], clock: Callable[[], float]) -> None:
        self.log: deque[tuple[Any, ...]] = deque(maxlen=LOG_MAX)
        self._clock = clock
        self._tiers = [tier for tier in TIERS if budgets.get(tier)][:_MANY_TIERS]
        self._budgets = [budgets[tier] for tier in self._tiers]
        self._held = [0] * len(self._tiers)
        self._hands = [0] * len(self._tiers)  # a row that is not newer than any that the tier has; 0: none
        self._rows = ShadowRows()
        self._stamp = 0
        self._usual = _flags(self._tiers, Placement())
        self._block_tokens = 0
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._lru: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def work(self) -> None:
        """Replay what the log has."""
        with self._lock:
            self._stamp = max(self._stamp, int(self._clock() * _TICKS))
            while self.log:
                event = self.log.popleft()
                if len(event) == 1:
                    self._gone(*event)
                elif isinstance(event[0], bytes):
                    self._looked_up(*event)
                else:
                    self._stored(*event)

    def seed(self, found: Iterable[ShadowedExtent]) -> None:
        """Take in what the tiers have found in their media, by its last use."""
        with self._lock:
            for extent in found:
                self._block_tokens = extent.shape.block_tokens
                nbytes = {tier: copy.nbytes for tier, copy in extent.copies.items()}
                _, blocks = self._rows.walk(extent.keys)
                if blocks * KEY_BYTES >= len(extent.keys):
                    continue
                flags, size = _flags(self._tiers, extent.placement), max(nbytes.values(), default=0)
                size -= size * blocks * KEY_BYTES // len(extent.keys)
                stamp = max(0, int(extent.last_used_s * _TICKS))
                row = self._rows.add(extent.keys[blocks * KEY_BYTES :], size, flags & ~_ALL, stamp)
                for at, tier in enumerate(self._tiers):
                    if tier in nbytes:
                        self._rows.flags[row] |= 1 << at
                        self._held[at] += size
                if not self._rows.flags[row] & _ALL:
                    self._rows.remove(row)
            self._rows.sort()
            self._stamp = max(self._stamp, self._rows.stamps[self._rows.newest])
            self._hands = [self._rows.oldest] * len(self._tiers)
            self._trim()

    def stats(self) -> LruStats:
        """Return what was counted, with what waits in the log."""
        self.work()
        with self._lock:
            tokens = self._block_tokens
            return LruStats(
                lookups=self._counts["lookups"],
                asked_tokens=self._counts["asked"] * tokens,
                gained_tokens=self._counts["gained"] * tokens,
                regretted_tokens=self._counts["regretted"] * tokens,
                regrets=self._counts["regrets"],
                found_tokens={tier: self._found[tier] * tokens for tier in self._tiers},
                lru_tokens={tier: self._lru[tier] * tokens for tier in self._tiers},
            )

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            self._rows.check_integrity()
            order = self._rows.in_order()
            for at, tier in enumerate(self._tiers):
                has = [row for row in order if self._rows.flags[row] & 1 << at]
                assert self._held[at] == sum(self._rows.sizes[row] for row in has), f"{tier}: wrong bytes"
                assert self._held[at] <= self._budgets[at], f"{tier}: more than it may hold"
                assert not has or order.index(has[0]) >= order.index(self._hands[at]), (
                    f"{tier}: hand is newer"
                )

    # -- events ----------------------------------------------------------------------------

    def _looked_up(self, keys: bytes, spans: Sequence[BlockRange]) -> None:
        rows, counts = self._rows, self._counts
        found, had = rows.walk(keys)
        real = nbytes = 0
        for span in spans:
            if span.first > real or span.tier not in self._tiers:
                break
            self._found[span.tier] += span.first + span.blocks - real
            real, last = span.first + span.blocks, real
            nbytes += span.nbytes * max(0, real - max(had, last)) // span.blocks
        counts["lookups"] += 1
        counts["asked"] += len(keys) // KEY_BYTES
        counts["gained"] += max(0, real - had)
        counts["regretted"] += max(0, had - real)
        counts["regrets"] += had > real
        at = 0
        for row, shared in found:
            self._lru[self._cheapest(row)] += shared
            if at < real < at + shared:  # what is stored next begins there
                self._cut(row, real - at, keys, real)
            at += shared
        if real > had:
            self._add(keys[had * KEY_BYTES : real * KEY_BYTES], nbytes, self._usual)
        self._use(found)
        for row, _ in found:
            if not rows.flags[row] & 1:
                self._join(row, 0)
        self._trim()

    def _stored(self, extent: ShadowedExtent, nbytes: int) -> None:
        if not extent.keys:
            return
        self._block_tokens = extent.shape.block_tokens
        self._usual = _flags(self._tiers, extent.placement)
        found, had = self._rows.walk(extent.keys)
        rest = extent.keys[had * KEY_BYTES :]
        if rest:
            self._add(rest, nbytes * len(rest) // len(extent.keys), self._usual)
        self._use(found)
        self._trim()

    def _gone(self, keys: bytes) -> None:
        for at in range(len(keys) // KEY_BYTES):
            for row in self._rows.at(keys, at):
                for tier in range(len(self._tiers)):
                    self._leave(row, tier)
                self._remove(row)

    # -- rows and tiers --------------------------------------------------------------------

    def _cheapest(self, row: int) -> TierName:
        has = self._rows.flags[row] & _ALL
        return self._tiers[(has & -has).bit_length() - 1]

    def _add(self, keys: bytes, nbytes: int, flags: int) -> None:
        self._stamp += 1
        row = self._rows.add(keys, nbytes, flags & ~_ALL, self._stamp)
        for tier in range(len(self._tiers)):
            if flags >> _MANY_TIERS & 1 << tier:
                self._join(row, tier)
        if not self._rows.flags[row] & _ALL:
            self._remove(row)

    def _cut(self, row: int, blocks: int, keys: bytes, at: int) -> None:
        was = [at for at, hand in enumerate(self._hands) if hand == row]
        self._rows.split(row, blocks, keys, at)
        for tier in was:  # the rest is older
            self._hands[tier] = self._rows.older(row)

    def _use(self, found: Sequence[tuple[int, int]]) -> None:
        """Make the rows of a chain the newest, its beginning before all: it goes from its end."""
        if not found:
            return
        used = [row for row, _ in reversed(found)]
        moved = set(used)
        for tier, hand in enumerate(self._hands):
            while hand in moved:
                hand = self._rows.newer(hand)
            self._hands[tier] = hand or used[0]
        self._stamp = self._rows.use(used, self._stamp)

    def _pass(self, row: int) -> None:
        """Move hands off a row that leaves its place."""
        for tier, hand in enumerate(self._hands):
            if hand == row:
                self._hands[tier] = self._rows.newer(row)

    def _remove(self, row: int) -> None:
        self._pass(row)
        self._rows.remove(row)

    def _join(self, row: int, tier: int) -> None:
        rows, bit = self._rows, 1 << tier
        if rows.flags[row] & bit or not rows.flags[row] >> 2 * _MANY_TIERS & bit:
            return
        rows.flags[row] |= bit
        self._held[tier] += rows.sizes[row]
        hand = self._hands[tier]
        if not hand or rows.stamps[row] < rows.stamps[hand]:
            self._hands[tier] = row

    def _leave(self, row: int, tier: int) -> None:
        if self._rows.flags[row] & 1 << tier:
            self._rows.flags[row] &= ~(1 << tier)
            self._held[tier] -= self._rows.sizes[row]

    def _trim(self) -> None:
        """Let each tier's longest unused go down, or away, until all are within their budgets."""
        for tier, budget in enumerate(self._budgets):
            while self._held[tier] > budget:
                row = self._hands[tier]
                if not self._rows.flags[row] & 1 << tier:
                    self._hands[tier] = self._rows.newer(row)
                    continue
                self._leave(row, tier)
                if not self._rows.flags[row] & _ALL >> tier + 1 << tier + 1:
                    for below in range(tier + 1, len(self._tiers)):
                        if self._rows.flags[row] >> 2 * _MANY_TIERS & 1 << below:
                            self._join(row, below)
                            break
                if not self._rows.flags[row] & _ALL:
                    self._remove(row)


def _flags(tiers: Sequence[TierName], placement: Placement) -> int:
    """Return the bits of a row that no tier has yet: where it is stored, and where it may be."""
    may = [tier for tier in tiers if placement.allows(tier)]
    first = placement.first if placement.first in may else next(iter(may), None)
    goes = [tier for tier in may if tier == first or tier in placement.write_behind]
    bits = [sum(1 << tiers.index(tier) for tier in some) for some in (goes, may)]
    return bits[0] << _MANY_TIERS | bits[1] << 2 * _MANY_TIERS
