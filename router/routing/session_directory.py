"""This ingress's copy of the session table: its own turns at once, other ingresses' soon after.

A background task synchronises the copy with the directory's actor. No request waits for that actor; if it
is down, the ingress continues with its copy.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from samovar.cache_tiers.blocks import Clear, lineage_tag, session_of
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import Cleared, NodeGlance
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.cache_tiers.sessions import (
    Item,
    Kind,
    Move,
    Recalled,
    SessionRow,
    SessionsCleared,
    SessionState,
    SessionTable,
    Sync,
    Synced,
    Use,
)
from samovar.configs.settings import RouterSettings
from samovar.replicas.messages import Route
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.score import Outcome

logger = logging.getLogger(__name__)

ROWS_MAX = 2000


class DirectoryLost(Exception):
    """The directory's actor does not answer. Only the current call fails."""


class DirectoryLink(Protocol):
    """Calls to the directory's actor. Every method raises `DirectoryLost`."""

    async def sync(self, sync: Sync) -> Synced: ...

    async def held(self, tenant: bytes, sessions: tuple[bytes, ...]) -> dict[bytes, dict[str, int]]: ...

    async def tenant_held(self, tenant: bytes) -> dict[str, int]: ...

    async def likely(
        self, tenant: bytes, sessions: tuple[bytes, ...], horizon_s: float
    ) -> dict[bytes, float]: ...

    async def glance(
        self, owners: tuple[bytes, ...], at_s: tuple[float, ...], with_stats: bool
    ) -> dict[str, NodeGlance]: ...

    async def move(self, tenant: bytes, session: bytes, how: Move) -> int: ...

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> int: ...

    async def clear(self, clear: Clear) -> dict[str, Cleared | None]: ...

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int: ...

    async def recall(self, tenant: bytes, session: bytes) -> Recalled: ...

    async def kept(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None: ...

    async def discard(self, tenant: bytes, kind: Kind, name: bytes) -> bool: ...

    async def forget(self, clears: tuple[SessionsCleared, ...]) -> int: ...

    async def allow(
        self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use
    ) -> bool | None: ...


class IngressReport(Protocol):
    """What this ingress reports about itself at each synchronisation, and learns about the others."""

    ingress: str
    asked: int

    @property
    def told(self) -> int: ...

    def uses(self) -> Mapping[bytes, Use]: ...

    def heard(self, ingresses: int) -> None: ...


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn computed by `replica`; `tokens`: length of its lineage's chain after it. `session`: that tag.

    `is_replayed`: it was only told again; who asked first has recorded it, unless that ingress died.
    """

    tenant: bytes
    session: bytes
    replica: str
    tokens: int
    is_replayed: bool = False


class SessionDirectory:
    """Locations of sessions, for routing. `tracker`: nodes of the replicas. `wall_clock`: unix seconds.

    `quiet_s`: the longest time between two synchronisations while neither side has news, and there is no
    other ingress and no other node to hear of; own news wait for `router.sync_s` at most.
    """

    def __init__(
        self,
        link: DirectoryLink | None,
        tracker: ReplicaLoadTracker,
        settings: RouterSettings,
        wall_clock: Callable[[], float] = time.time,
        quiet_s: float = 0.0,
    ) -> None:
        self.table = SessionTable(settings.sessions_max, settings.lineages_max)
        self.link = link
        self.report: IngressReport | None = None
        """Of this ingress; None: it shares no limits."""
        self._tracker = tracker
        self._trackers = [tracker]  # its own first, then those of the directories beside it
        self._settings = settings
        self._wall_clock = wall_clock
        self._quiet_s = quiet_s
        self._is_quiet = False  # neither side had news when they last met
        self._incarnation, self._since = "", 0
        self._sent_seq = 0  # sequence number of our last change that the directory has
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    def beside(self, tracker: ReplicaLoadTracker) -> SessionDirectory:
        """Return this directory as another model's requests see it: `tracker` has that model's replicas.

        Sessions are the same. It is synchronised, and counts, with this one: do not start it.
        """
        if tracker not in self._trackers:
            self._trackers.append(tracker)
        other = copy.copy(self)
        other._tracker, other._trackers = tracker, [tracker]
        return other

    def alone(self) -> SessionDirectory:
        """Return this directory as its own model's requests see it, without those beside it."""
        return self.beside(self._tracker)

    def lineage(
        self, tenant: bytes, session: bytes, prompt: Sequence[int], *, key: bytes, begin_tokens: int
    ) -> bytes:
        """Return the tag of the session's lineage that a prompt belongs to; see `lineage_tag`."""
        known = [row.session for row in self.table.lineages(tenant, session)]
        return lineage_tag(session, prompt, known, key=key, begin_tokens=begin_tokens)

    def route(self, tenant: bytes, session: bytes) -> Route:
        """Return what is known of where a lineage's blocks are.

        One that begins goes where its session was last: there is what it shares with others. Where it was
        last with another model, it goes where it was with this one.
        """
        row = self.table.get(tenant, session)
        if row is None:
            beside = self.table.view(tenant, session)
            if beside is None:
                return Route()
            at_home = (one for one in beside.rows if one.home in self._tracker.nodes)
            return replace(self._route(next(at_home, beside.rows[0])), cached_tokens=0)
        return self._route(row)

    def _route(self, row: SessionRow) -> Route:
        node = self._tracker.nodes.get(row.home, "")
        return Route(
            home=row.home if node else "",  # else the replica is gone; its node has what it stored
            node=node or (row.nodes[0] if row.nodes else ""),
            cached_tokens=row.tokens,
            peers=row.nodes,
        )

    def turn_began(self, tenant: bytes, session: bytes) -> None:
        """Record that a lineage's next turn came: the tool that it waited for is done."""
        row = self.table.get(tenant, session)
        if row is not None and row.state == "tool":
            self.table.hint(tenant, session, "idle", None)

    def turn_ended(self, end: TurnEnd) -> bool:
        """Record the turn's replica as its lineage's home; return whether it was not recorded before."""
        row = self.table.get(end.tenant, end.session)
        if end.is_replayed and row is not None and row.tokens >= end.tokens:
            return False
        self.table.turn(
            end.tenant,
            end.session,
            home=end.replica,
            node=self._tracker.nodes.get(end.replica, ""),
            tokens=end.tokens,
            now_unix_s=self._wall_clock(),
        )
        return True

    def hint(
        self, tenant: bytes, session: bytes, state: SessionState, return_in_s: float | None
    ) -> SessionRow | None:
        """Record a client's hint about an idle lineage; return its row, None if it is unknown."""
        returns_unix_s = None if return_in_s is None else self._wall_clock() + return_in_s
        return self.table.hint(tenant, session, state, returns_unix_s)

    def forget(self, tenant: bytes, session: bytes | None) -> SessionsCleared:
        """Forget one session or all of a tenant. Other copies follow at their next sync."""
        cleared = SessionsCleared(tenant, session, self._wall_clock())
        self.table.clear(cleared)
        return cleared

    def prefill_price(self, replica: str) -> PrefillPrice | None:
        """Return what computing takes on a replica; None if it has not reported that yet, or is gone."""
        return self._tracker.prefill.get(replica)

    @property
    def ingress(self) -> str:
        """This ingress's name, by which replicas and the directory know it."""
        return self._tracker.ingress

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """Requests by routing outcome since the start, of all models."""
        return {
            outcome: sum(one.outcomes[outcome] for one in self._trackers) for outcome in get_args(Outcome)
        }

    @property
    def nodes(self) -> dict[str, str]:
        """Replica -> node, of the replicas that exist now, of all models."""
        return {name: node for one in self._trackers for name, node in one.nodes.items()}

    def counts(self) -> tuple[dict[Outcome, int], dict[SessionState, int], int]:
        """Return requests by routing outcome, sessions by state, and changes not synchronised yet."""
        hinted = {
            (row.tenant, session_of(row.session)): row.state for row in self.table if row.state != "idle"
        }
        states: dict[SessionState, int] = {"idle": 0, "typing": 0, "tool": 0, "closed": 0}
        states |= Counter(hinted.values())
        states["idle"] = self.table.sessions - len(hinted)
        return self.outcomes, states, self.table.seq - self._sent_seq

    def start(self) -> None:
        """Start the synchronisation on the running event loop."""
        if self._task is None and self.link is not None:
            self._task = asyncio.create_task(self._sync_forever(self.link))

    async def stop(self) -> None:
        """Stop the synchronisation."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def sync(self, link: DirectoryLink) -> bool:
        """Synchronise once; return whether either side has more to send. Raises `DirectoryLost`."""
        rows, clears, sent = self.table.changes(self._sent_seq, ROWS_MAX)
        had_all = sent == self.table.seq
        wanted = Sync(self._incarnation, self._since, tuple(rows), tuple(clears))
        if self.report is not None:
            own = self.report
            wanted = replace(
                wanted, ingress=own.ingress, asked=own.asked, uses=own.uses(), ingresses=own.told
            )
        reply = await link.sync(wanted)
        if self.report is not None:
            self.report.heard(reply.ingresses)
        is_agreed = (
            self._is_alone(reply.ingresses) and wanted.ingresses == reply.ingresses and not wanted.uses
        )
        is_new = reply.incarnation != self._incarnation
        if is_new and self._incarnation:
            logger.warning("the session directory was restarted: sending it all known sessions")
        self._sent_seq = 0 if is_new and self._incarnation else sent
        for cleared in reply.clears:
            self.table.clear(cleared)
        self.table.merge(reply.rows)
        self._incarnation, self._since = reply.incarnation, reply.seq
        for tracker in self._trackers:
            tracker.leaving_nodes = frozenset(reply.draining)
        self._is_quiet = is_agreed and not (rows or clears or reply.rows or reply.clears or reply.draining)
        return not (had_all and reply.is_all and self._sent_seq == sent)

    async def _sync_forever(self, link: DirectoryLink) -> None:
        while True:
            more = self._is_quiet = False
            try:
                more = await self.sync(link)
                if self._is_lost:
                    logger.warning("the session directory answers again")
                self._is_lost = False
            except DirectoryLost as error:
                if not self._is_lost:
                    logger.warning("the session directory does not answer: %s", error)
                self._is_lost = True
            except Exception:  # the next exchange may succeed; requests are not affected
                logger.exception("a synchronisation with the session directory failed")
            await asyncio.sleep(0 if more else self._settings.sync_s)
            waited_s = self._settings.sync_s
            while not more and waited_s < self._quiet_s and not self._has_news():
                await asyncio.sleep(self._settings.sync_s)
                waited_s += self._settings.sync_s

    def _is_alone(self, ingresses: int) -> bool:
        """Whether nothing here must be known soon: sessions of other ingresses, nodes that leave."""
        return (self.report is None or ingresses == 1) and len(set(self.nodes.values())) <= 1

    def _has_news(self) -> bool:
        """Whether the directory should hear of something here, or of what may have happened there."""
        has_uses = self.report is not None and bool(self.report.uses())
        return not self._is_quiet or has_uses or self.table.seq != self._sent_seq
