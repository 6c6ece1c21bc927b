"""Lineages of sessions and where their blocks may be: the table behind every copy of the session directory.

Hints, never trusted for correctness: a wrong row costs a load or a recompute. Copies of the table (one in
each ingress, one in the directory's actor) exchange rows in any order, twice or late, and converge: of two
rows of a lineage the newer stays, by creation time and generation. Pure.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Generic, Literal, TypeVar

from samovar.cache_tiers.blocks import session_of
from samovar.cache_tiers.messages import SessionHeld
from samovar.cache_tiers.sessions.quotas import Use
from samovar.cache_tiers.sessions.shelf import Item

NODES_MAX = 3
"""Nodes remembered per lineage, latest first: an older copy has gone cold."""

SessionState = Literal["idle", "typing", "tool", "closed"]
Key = tuple[bytes, bytes]
Place = tuple[float, bytes, bytes]
"""When it was last used, its tag, its tenant: sessions are listed in that order."""
Entry = TypeVar("Entry", bound=Hashable)
LOG_SPARE = 64


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One lineage of a session (`tenant`, `session`: tags, the latter the lineage's: `blocks/extent.py`).

    `home`: id of the replica that served the last turn, empty if unknown. `nodes`: nodes whose tiers may
    hold its blocks, latest first. `tokens`: length of its chain after the last turn. `state` and
    `returns_unix_s`: what the client has hinted since. Wall-clock times are for people and for clears.
    """

    tenant: bytes
    session: bytes
    generation: int
    home: str = ""
    nodes: tuple[str, ...] = ()
    tokens: int = 0
    turns: int = 0
    created_unix_s: float = 0.0
    used_unix_s: float = 0.0
    state: SessionState = "idle"
    returns_unix_s: float | None = None

    @property
    def key(self) -> Key:
        return self.tenant, self.session

    def beats(self, other: SessionRow) -> bool:
        """Return whether this row replaces `other`: a total order, so that all copies decide alike.

        What was only found in a tier loses against what an ingress has seen. The later created row is the
        newer, whatever its generation: the other is from before a clear.
        """
        return self._rank() > other._rank()

    def _rank(self) -> tuple[object, ...]:
        returns_s = -1.0 if self.returns_unix_s is None else self.returns_unix_s
        return (
            *(self.generation > 0, self.created_unix_s, self.generation, self.used_unix_s, self.turns),
            *(self.tokens, self.home, self.nodes, self.state, returns_s),
        )


@dataclass(frozen=True, slots=True)
class SessionsCleared:
    """Clears all sessions of `tenant`, or this one with all its lineages, that began up to `unix_s`."""

    tenant: bytes
    session: bytes | None
    unix_s: float


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session as people see it: its lineages, the latest used first."""

    rows: tuple[SessionRow, ...]

    @property
    def tenant(self) -> bytes:
        return self.rows[0].tenant

    @property
    def session(self) -> bytes:
        """Return the tag of the whole session."""
        return session_of(self.rows[0].session)

    @property
    def main(self) -> SessionRow:
        """Return the conversation's lineage: the latest used of those that went on after their first turn."""
        return max(self.rows, key=lambda row: (row.turns > 1, row.used_unix_s, row.tokens, row.session))

    @property
    def living(self) -> tuple[SessionRow, ...]:
        """Return the lineages that went on after their first turn, latest first; the main one if none has."""
        return tuple(row for row in self.rows if row.turns > 1) or (self.main,)

    @property
    def used_unix_s(self) -> float:
        return self.rows[0].used_unix_s


def _place(one: SessionRow | SessionView) -> Place:
    return one.used_unix_s, one.session, one.tenant


def _place_of_use(row: SessionRow) -> Place:
    """Return the place that a lineage's use gives to its whole session."""
    return row.used_unix_s, session_of(row.session), row.tenant


class ChangeLog(Generic[Entry]):
    """Entries by the number of their last change, so that those behind a number are found without the others.

    What changed again, or is gone, stays in the log until that is twice as long as it need be.
    """

    def __init__(self) -> None:
        self.numbers: dict[Entry, int] = {}
        self._log: list[tuple[int, Entry]] = []

    def put(self, entry: Entry, number: int) -> None:
        """Note a change; numbers grow."""
        self.numbers[entry] = number
        self._log.append((number, entry))
        if len(self._log) > 2 * len(self.numbers) + LOG_SPARE:
            self._log = list(self._live(0))

    def remove(self, entry: Entry) -> None:
        del self.numbers[entry]

    def after(self, number: int) -> Iterator[tuple[int, Entry]]:
        """Iterate over number and entry of the changes behind `number`, oldest first."""
        return self._live(bisect_right(self._log, number, key=itemgetter(0)))

    def _live(self, begin: int) -> Iterator[tuple[int, Entry]]:
        return (one for one in islice(self._log, begin, None) if self.numbers.get(one[1]) == one[0])


class SessionTable:
    """At most `sessions_max` rows, the least recently used dropped first; and as many clears.

    Of one session at most `lineages_max`: of those that have not gone on after their first turn the least
    recently used gives way, else of all.
    """

    def __init__(self, sessions_max: int, lineages_max: int = 32) -> None:
        self._sessions_max = sessions_max
        self._lineages_max = lineages_max
        self._rows: OrderedDict[Key, SessionRow] = OrderedDict()  # least recently used first
        self._of_tenant: dict[bytes, dict[bytes, SessionRow]] = {}  # of each, least recently used first
        self._of_session: dict[Key, dict[bytes, None]] = {}  # (tenant, session's tag) -> lineages' tags
        self._cleared: OrderedDict[tuple[bytes, bytes | None], SessionsCleared] = OrderedDict()
        self._used: dict[Key, Place] = {}  # (tenant, session's tag) -> when a lineage of it was last used
        self._by_use: dict[bytes, list[Place]] = {}  # of each tenant, sorted
        self._changed: ChangeLog[Key] = ChangeLog()  # rows
        self._cleared_at: ChangeLog[tuple[bytes, bytes | None]] = ChangeLog()
        self.seq = 0
        """Number of the last change."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SessionRow]:
        return iter(list(self._rows.values()))

    @property
    def sessions(self) -> int:
        """Sessions of which a lineage is known."""
        return len(self._of_session)

    def get(self, tenant: bytes, session: bytes) -> SessionRow | None:
        return self._rows.get((tenant, session))

    def lineages(self, tenant: bytes, session: bytes) -> list[SessionRow]:
        """Return the rows of a session's lineages, in no order; `session`: its tag, or any lineage's."""
        tags = self._of_session.get((tenant, session_of(session)), ())
        return [self._rows[tenant, tag] for tag in tags]

    def view(self, tenant: bytes, session: bytes) -> SessionView | None:
        """Return a whole session; None if it is unknown."""
        rows = self.lineages(tenant, session)
        return SessionView(tuple(sorted(rows, key=_place, reverse=True))) if rows else None

    def of(self, tenant: bytes | None) -> list[SessionRow]:
        """Return a copy of a tenant's rows, or all (None), in no order (see `page`)."""
        return list(self._rows.values() if tenant is None else self._of_tenant.get(tenant, {}).values())

    def page(self, tenant: bytes | None, count: int, after: SessionView | None = None) -> list[SessionView]:
        """Return the `count` most recently used sessions of a tenant, or of all (None), latest first.

        `after`: only those that follow it. It looks at no others.
        """
        lists = self._by_use.values() if tenant is None else [self._by_use.get(tenant, [])]

        def down(places: list[Place]) -> Iterator[Place]:
            end = len(places) if after is None else bisect_left(places, _place(after))
            return (places[at] for at in range(end - 1, -1, -1))

        merged = heapq.merge(*map(down, lists), reverse=True)
        views = (self.view(owner, session) for _, session, owner in islice(merged, count))
        return [view for view in views if view is not None]

    def recent(self, tenant: bytes | None, count: int) -> list[SessionView]:
        """Return the `count` sessions of a tenant, or of all (None), that changed last, latest first.

        Unlike `page` it goes by changes.
        """
        rows = self._rows if tenant is None else self._of_tenant.get(tenant, {})
        found: dict[Key, None] = {}
        for row in reversed(rows.values()):
            found[row.tenant, session_of(row.session)] = None
            if len(found) >= count:
                break
        seen = [self.view(*key) for key in found]
        return [view for view in seen if view is not None]

    def turn(
        self, tenant: bytes, session: bytes, *, home: str, node: str, tokens: int, now_unix_s: float
    ) -> SessionRow:
        """Record a turn computed by replica `home` on `node`, where the lineage now lives."""
        old = self._rows.get((tenant, session)) or self._newborn(tenant, session, now_unix_s)
        nodes = tuple(dict.fromkeys((node, *old.nodes)))[:NODES_MAX] if node else old.nodes
        row = replace(
            old,
            generation=old.generation + 1,
            home=home,
            nodes=nodes,
            tokens=tokens,
            turns=old.turns + 1,
            used_unix_s=max(now_unix_s, old.used_unix_s),
            state="idle",
            returns_unix_s=None,
        )
        self._put(row)
        return row

    def hint(
        self, tenant: bytes, session: bytes, state: SessionState, returns_unix_s: float | None
    ) -> SessionRow | None:
        """Record a client's hint about an idle session; None if it is unknown."""
        old = self._rows.get((tenant, session))
        if old is None:
            return None
        row = replace(old, generation=old.generation + 1, state=state, returns_unix_s=returns_unix_s)
        self._put(row)
        return row

    def held(
        self, node: str, sessions: Iterable[SessionHeld], now_unix_s: float, there: Collection[str] = ()
    ) -> None:
        """Record what a node's tiers were found to hold: adds what was unknown, changes nothing else.

        `there`: the nodes that exist. Where a lineage's row is full, those that do not make room: a node that
        left has given its blocks to others.
        """
        for one in sessions:
            old = self._rows.get((one.tenant, one.session))
            if old is None:
                used_s = now_unix_s - one.idle_s
                row = SessionRow(
                    one.tenant,
                    one.session,
                    0,
                    nodes=(node,),
                    tokens=one.tokens,
                    created_unix_s=used_s,
                    used_unix_s=used_s,
                )
                self._take(row)
                continue
            nodes = old.nodes
            if len(nodes) == NODES_MAX:
                nodes = tuple(name for name in nodes if name in there) if there else nodes
            if node not in nodes and len(nodes) < NODES_MAX:
                self._put(replace(old, nodes=(*nodes, node), generation=old.generation + 1))

    def merge(self, rows: Iterable[SessionRow]) -> int:
        """Merge rows of another copy; return how many of them were new."""
        return sum(self._take(row) for row in rows)

    def clear(self, cleared: SessionsCleared) -> int:
        """Forget what began before this clear, also if it is reported again; return how many rows went."""
        if cleared.session is not None:
            cleared = replace(cleared, session=session_of(cleared.session))
        place = cleared.tenant, cleared.session
        known = self._cleared.get(place)
        if known is not None and known.unix_s >= cleared.unix_s:
            return 0
        self._cleared[place] = cleared
        self._cleared.move_to_end(place)
        self.seq += 1
        self._cleared_at.put(place, self.seq)
        while len(self._cleared) > self._sessions_max:
            oldest, _ = self._cleared.popitem(last=False)
            self._cleared_at.remove(oldest)
        if cleared.session is not None:
            keys = [row.key for row in self.lineages(cleared.tenant, cleared.session)]
        else:
            keys = [(cleared.tenant, session) for session in self._of_tenant.get(cleared.tenant, ())]
        gone = [key for key in keys if self._is_cleared(self._rows[key])]
        for key in gone:
            self._remove(key)
        return len(gone)

    def changes(self, since: int, rows_max: int) -> tuple[list[SessionRow], list[SessionsCleared], int]:
        """Return rows and clears after change `since`, oldest first, and the number to continue from."""
        changed = ((number, self._rows[key]) for number, key in self._changed.after(since))
        cleared = ((number, self._cleared[place]) for number, place in self._cleared_at.after(since))
        numbered: Iterator[tuple[int, SessionRow | SessionsCleared]]
        numbered = heapq.merge(changed, cleared, key=itemgetter(0))
        part = list(islice(numbered, rows_max))
        seq = self.seq if next(numbered, None) is None else part[-1][0]
        rows = [change for _, change in part if isinstance(change, SessionRow)]
        return rows, [change for _, change in part if isinstance(change, SessionsCleared)], seq

    def cleared_unix_s(self, tenant: bytes, session: bytes) -> float:
        """Return when a lineage's session was last cleared, by itself or with its tenant; -inf: never."""
        clears = (self._cleared.get((tenant, of)) for of in (session_of(session), None))
        return max((cleared.unix_s for cleared in clears if cleared is not None), default=-math.inf)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._rows) <= self._sessions_max, "too many sessions are remembered"
        assert set(self._changed.numbers) == set(self._rows), "the log of changes is of other sessions"
        assert set(self._cleared_at.numbers) == set(self._cleared), "the log of clears is of other clears"
        numbers = [number for number, _ in self._changed.after(0)]
        assert numbers == sorted(set(numbers)), "changes are out of order"
        assert sorted(self._changed.numbers.values()) == numbers, "a change is not in the log"
        used = {key: max(map(_place_of_use, self.lineages(*key))) for key in self._of_session}
        assert self._used == used, "a session has another place in its tenant's list"
        assert self._by_use == {
            tenant: sorted(place for (owner, _), place in used.items() if owner == tenant)
            for tenant in {owner for owner, _ in used}
        }, "a tenant's list is of other sessions"
        assert all(number <= self.seq for number in numbers), "a change has a number to come"
        listed = {
            (tenant, session): row for tenant, of in self._of_tenant.items() for session, row in of.items()
        }
        assert listed == dict(self._rows), "the tenants' lists differ from the rows"
        assert sum(map(len, self._of_session.values())) == len(self._rows), "a lineage is listed twice"
        assert all(0 < len(tags) <= self._lineages_max for tags in self._of_session.values()), (
            "too many lineages"
        )
        for key, row in self._rows.items():
            assert row.key == key, "a row is in another's place"
            assert key[1] in self._of_session[key[0], session_of(key[1])], "a lineage is not its session's"
            assert not self._is_cleared(row), "a cleared session is there"
            assert len(row.nodes) <= NODES_MAX, "too many nodes"
            assert len(set(row.nodes)) == len(row.nodes), "a node is there twice"

    def _take(self, row: SessionRow) -> bool:
        old = self._rows.get(row.key)
        if self._is_cleared(row) or (old is not None and not row.beats(old)):
            return False
        self._put(row)
        return True

    def _put(self, row: SessionRow) -> None:
        self.seq += 1
        self._rows[row.key] = row
        self._rows.move_to_end(row.key)
        self._changed.put(row.key, self.seq)
        of_tenant = self._of_tenant.setdefault(row.tenant, {})
        of_tenant.pop(row.session, None)
        of_tenant[row.session] = row
        of_session = self._of_session.setdefault((row.tenant, session_of(row.session)), {})
        of_session[row.session] = None
        self._note_use(row.tenant, session_of(row.session))
        if len(of_session) > self._lineages_max:
            others = [self._rows[row.tenant, tag] for tag in of_session if tag != row.session]
            self._remove(min(others, key=lambda other: (other.turns > 1, *_place(other))).key)
        while len(self._rows) > self._sessions_max:
            self._remove(next(iter(self._rows)))

    def _remove(self, key: Key) -> None:
        del self._rows[key]
        self._changed.remove(key)
        of_tenant = self._of_tenant[key[0]]
        del of_tenant[key[1]]
        if not of_tenant:
            del self._of_tenant[key[0]]
        session = key[0], session_of(key[1])
        del self._of_session[session][key[1]]
        if not self._of_session[session]:
            del self._of_session[session]
        self._note_use(*session)

    def _note_use(self, tenant: bytes, session: bytes) -> None:
        """Put a session to its place among its tenant's."""
        key, tags = (tenant, session), self._of_session.get((tenant, session), ())
        new = max((_place_of_use(self._rows[tenant, tag]) for tag in tags), default=None)
        old = self._used.get(key)
        if new == old:
            return
        places = self._by_use.setdefault(tenant, [])
        if old is not None:
            del places[bisect_left(places, old)]
        if new is not None:
            insort(places, new)
            self._used[key] = new
            return
        del self._used[key]
        if not places:
            del self._by_use[tenant]

    def _newborn(self, tenant: bytes, session: bytes, now_unix_s: float) -> SessionRow:
        """Return a row created after all its clears, even if the clock was set back since."""
        born_s = max(now_unix_s, math.nextafter(self.cleared_unix_s(tenant, session), math.inf))
        return SessionRow(tenant, session, 0, created_unix_s=born_s)

    def _is_cleared(self, row: SessionRow) -> bool:
        return row.created_unix_s <= self.cleared_unix_s(row.tenant, row.session)


Move = Literal["promote", "demote"]


@dataclass(frozen=True, slots=True)
class Sync:
    """Changes from an ingress. `incarnation`, `since`: of the directory, as in its last reply.

    `ingress`: its name; empty: it shares no limits. `uses`: what tenants (tags) have open there, and `asked`:
    how often it had asked for more before it counted that. `ingresses`: among how many it shares limits; 0:
    it was never told. `actor`: the id of its Ray actor.
    """

    incarnation: str
    since: int
    rows: tuple[SessionRow, ...] = ()
    clears: tuple[SessionsCleared, ...] = ()
    ingress: str = ""
    uses: Mapping[bytes, Use] = field(default_factory=dict)
    asked: int = 0
    ingresses: int = 0
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Synced:
    """Changes from the directory. `is_all`: nothing was left over. `draining`: node ids.

    `ingresses`: among how many ingresses it shares limits now; 0: that is not known yet.
    """

    incarnation: str
    seq: int
    is_all: bool
    rows: tuple[SessionRow, ...] = ()
    clears: tuple[SessionsCleared, ...] = ()
    draining: tuple[str, ...] = ()
    ingresses: int = 0


@dataclass(frozen=True, slots=True)
class Recalled:
    """What an ingress learns about a session that it does not know: replies, the latest last, and rows."""

    replies: tuple[Item, ...] = ()
    rows: tuple[SessionRow, ...] = ()
