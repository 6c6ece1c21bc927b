"""What is gone: what was cleared, by count, by time and as a set, and why blocks are in no tier. Pure.

What comes too late does not bring back what was cleared. A turn that computes blocks again can say why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Generic, TypeVar

from samovar.cache_tiers.blocks import KEY_BYTES, Clear, TenantRows, session_of
from samovar.cache_tiers.catalog.index import ChainIndex, HeldExtent
from samovar.cache_tiers.catalog.types import EvictReason
from samovar.cache_tiers.messages import AbsentRun, BlockRange


class SteadyClock:
    """Seconds of `clock`; if that jumps back, time continues from its last value."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now_s = self._last_s = clock()

    def __call__(self) -> float:
        clock_s = self._clock()
        self._now_s += max(0.0, clock_s - self._last_s)  # never back, not even by rounding
        self._last_s = clock_s
        return self._now_s


class Clears:
    """The clears of this node: which stores they forbid, which pulls from other nodes, and which are known.

    Stores: a store begun before a clear is refused, however late it comes. That goes by a count of clears,
    not by time: the last clear of each tenant and session leaves a tombstone. A store follows a lookup: a
    session that was never looked up and holds nothing has no store in flight, and its clear leaves none.
    When there are too many, the tenant with the most loses its oldest, and its stores begun before that
    clear are refused; no other tenant's are.

    Pulls: a clear reaches the nodes one after the other. In between, what is gone here still exists
    elsewhere, and a fetch would bring it back. After `grace_s` every node has cleared it, or the clear was
    reported as failed. A tenant that had too many clears counts as wholly cleared until those are old.

    Clears are of whole sessions: of a lineage's tag, only the session counts here.

    At most `clears_max` of each. `clock`: monotonic seconds. Not thread-safe.
    """

    def __init__(self, clears_max: int, grace_s: float, clock: Callable[[], float]) -> None:
        if clears_max < 1:
            raise ValueError(f"at least one clear must have room, not {clears_max}")
        self.seq = 0  # grows with every clear
        self._clears_max = clears_max
        self._grace_s = grace_s
        self._now_s = SteadyClock(clock)
        self._tombstones: TenantRows[int] = TenantRows(clears_max)
        self._floors: dict[bytes, int] = {}  # tenant -> its latest clear whose tombstone was dropped
        self._floor = 0  # for tenants dropped from `_floors`
        self._asked: TenantRows[bool] = TenantRows(clears_max)
        # Tenants with a lookup that was dropped from `_asked`; None: any tenant.
        self._unsure: set[bytes] | None = set()
        self._cleared_s: TenantRows[float] = TenantRows(clears_max)
        self._all_since_s: TenantRows[float] = TenantRows(clears_max)  # tenants with too many clears

    @property
    def tombstones(self) -> int:
        return len(self._tombstones)

    def asked(self, tenant: bytes, session: bytes) -> None:
        """Record a lookup of this session, which may store what it computes afterwards."""
        lost = self._asked.put(tenant, session_of(session), True)
        if lost is not None and self._unsure is not None:
            self._unsure.add(lost[0])
            if len(self._unsure) > self._clears_max:
                self._unsure = None

    def may_store(self, tenant: bytes, session: bytes | None) -> bool:
        """Return whether this session (None: any of the tenant) was, or may have been, looked up."""
        if self._unsure is None or tenant in self._unsure:
            return True
        if session is None:
            return self._asked.has(tenant)
        return self._asked.get(tenant, session_of(session)) is not None

    def add(self, clear: Clear, *, is_held: bool) -> None:
        """Record a clear. `is_held`: something of it was held, or on its way."""
        self.seq += 1
        lost_s = self._cleared_s.put(clear.tenant, clear.session, self._now_s())
        if lost_s is not None:
            self._all_since_s.put(lost_s[0], None, lost_s[1])
        if is_held or self.may_store(clear.tenant, clear.session):
            lost = self._tombstones.put(clear.tenant, clear.session, self.seq)
            if lost is not None:
                self._raise_floor(*lost)

    def knows(self, clear: Clear) -> bool:
        """Return whether this very clear was made here, as far as is remembered."""
        return self._cleared_s.get(clear.tenant, clear.session) is not None

    def forbids_store(self, tenant: bytes, session: bytes, clear_seq: int) -> bool:
        """Return whether a store of this session, begun after `clear_seq` clears, may be cleared since."""
        of_tenant = self._tombstones.get(tenant, None)
        of_session = self._tombstones.get(tenant, session_of(session))
        return clear_seq < max(self._floor, self._floors.get(tenant, 0), of_tenant or 0, of_session or 0)

    def forbids_pull(self, tenant: bytes, session: bytes) -> bool:
        """Return whether what this session made may be cleared here but not yet elsewhere."""
        return (
            self._is_recent(self._all_since_s, tenant, None)
            or self._is_recent(self._cleared_s, tenant, None)
            or self._is_recent(self._cleared_s, tenant, session_of(session))
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        for rows in (self._tombstones, self._cleared_s, self._all_since_s, self._asked):
            rows.check_integrity()
        assert len(self._floors) <= self._clears_max, "too many floors"
        assert self._unsure is None or len(self._unsure) <= self._clears_max, "too many to be unsure of"
        for tenant in self._tombstones.tenants():
            seqs = self._tombstones.values(tenant)
            assert seqs == sorted(set(seqs)), "tombstones are out of order"
            assert self._floors.get(tenant, 0) < seqs[0], "a tombstone is older than what was forgotten"
            assert seqs[-1] <= self.seq, "a tombstone comes from the future"
        for tenant in self._cleared_s.tenants():
            times = self._cleared_s.values(tenant)
            assert times == sorted(times), "clears are out of order"

    def _raise_floor(self, tenant: bytes, seq: int) -> None:
        """Refuse a tenant's stores begun before a clear whose tombstone was dropped."""
        self._floors[tenant] = max(self._floors.get(tenant, 0), seq)
        if len(self._floors) > self._clears_max:
            self._floor = max(self._floor, self._floors.pop(next(iter(self._floors))))

    def _is_recent(self, rows: TenantRows[float], tenant: bytes, session: bytes | None) -> bool:
        cleared_s = rows.get(tenant, session)
        return cleared_s is not None and self._now_s() - cleared_s < self._grace_s


class ClearSet:
    """A bounded set of clears; one of several sessions is added one by one (`Clear.each`).

    Above `clears_max`, the tenant with the most counts as cleared as a whole: too much of its own data
    is forgotten then, nothing of other tenants. Pure; not thread-safe.
    """

    def __init__(self, clears_max: int) -> None:
        self._clears_max = clears_max
        self._rows: dict[bytes, dict[bytes | None, int]] = {}  # tenant -> session -> number of its entry
        self._size = 0
        self._last = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Clear]:
        for tenant, sessions in self._rows.items():
            for session in sessions:
                yield Clear(tenant, session)

    def __contains__(self, clear: Clear) -> bool:
        return clear.session in self._rows.get(clear.tenant, ())

    def add(self, clear: Clear) -> int | None:
        """Add a clear; return its entry number for `discard`, or None: no room, too many tenants."""
        rows = self._rows.setdefault(clear.tenant, {})
        self._size += clear.session not in rows
        self._last += 1
        rows[clear.session] = self._last
        if self._size <= self._clears_max:
            return self._last
        most = max(self._rows, key=lambda tenant: len(self._rows[tenant]))
        if len(self._rows[most]) > 1:
            self._size -= len(self._rows[most]) - 1
            self._rows[most] = {None: self._last}
            return self._last
        self.discard(clear)
        return None

    def covers(self, tenant: bytes, session: bytes) -> bool:
        """Return whether what this session made was forgotten."""
        rows = self._rows.get(tenant)
        return rows is not None and (None in rows or session_of(session) in rows)

    def discard(self, clear: Clear, number: int | None = None) -> None:
        """Remove a clear that is no longer needed. With `number`: unless it was added again since."""
        rows = self._rows.get(clear.tenant, {})
        if clear.session not in rows or number not in (None, rows[clear.session]):
            return
        del rows[clear.session]
        self._size -= 1
        if not rows:
            del self._rows[clear.tenant]

    def number(self, clear: Clear) -> int:
        """Return a clear's entry number. Raises `KeyError`."""
        return self._rows[clear.tenant][clear.session]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._size == sum(map(len, self._rows.values())), "clears are miscounted"
        assert self._size <= self._clears_max, "too many clears"
        assert all(self._rows.values()), "a tenant without clears is remembered"


_GONE: Mapping[EvictReason, str] = {
    "room": "evicted",
    "quota": "evicted",
    "expired": "expired",
    "lost": "lost",
    "placement": "lost",
    "differs": "lost",
}


ADOPTED_MAX = 65_536


class AbsentBlocks:
    """Why blocks that this node was given are in none of its tiers. `blocks_max`: that are remembered.

    `log`: what was stored, and what is gone under any policy, for `policy/shadow.py`, which puts in its own.
    `adopted`: what scans have found, until it is taken.
    """

    def __init__(self, blocks_max: int) -> None:
        self.log: deque[tuple[Any, ...]] = deque(maxlen=0)
        self.adopted: deque[HeldExtent] = deque(maxlen=ADOPTED_MAX)
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
        if reason in ("cleared", "expired", "lost"):
            self.log.append((extent.keys,))

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
