"""The session directory as a detached Ray actor, shared by all ingresses.

A thin wrapper around `SessionTable`, and the one place that asks all nodes' tier actors about a session.
When it dies, Ray restarts it: the tiers report which sessions they hold, and ingresses resend their rows as
soon as they see the new incarnation. It is never on a request's path.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import ray
from ray._private.state import state as gcs_state

from samovar.cache_tiers.actors import rpc, tier_actors
from samovar.cache_tiers.blocks import TIERS, Clear
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import Cleared, NodeGlance
from samovar.cache_tiers.sessions.quotas import Quotas, Use
from samovar.cache_tiers.sessions.session_table import (
    Move,
    Recalled,
    SessionRow,
    SessionsCleared,
    SessionTable,
    Sync,
    Synced,
)
from samovar.cache_tiers.sessions.shelf import Item, ItemBounds, ItemStore, Kind, NotErased
from samovar.configs.imports import keep_collections_short
from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.sections import NodeSettings
from samovar.configs.telemetry import set_up_logs

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import SessionSealer

logger = logging.getLogger(__name__)


NAME = "sessions"
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's head-node resource: an actor placed there is not lost with a drained or failed worker."""

WATCH_S, ALONE_WATCH_S = 1.0, 5.0
"""Between two looks at the cluster; and where one node's tiers are all there are, and have been asked."""
ASK_S_MAX = 5.0
GLANCE_S_MAX = 1.0
ROWS_MAX = 2000
"""Maximum rows of one exchange; the rest follows in the next."""
REBUILD_SESSIONS_MAX = 100_000


INGRESS_SILENT_S = 3.0
"""An ingress that was not heard of for so long is dead."""


def session_actor(
    sessions_max: int,
    lineages_max: int,
    clear_s_max: float,
    telemetry: TelemetrySettings | None = None,
    kept: ItemBounds | None = None,
    ingress_silent_s: float = INGRESS_SILENT_S,
) -> Any:
    """Return the handle of the cluster's session directory, creating the actor if needed.

    Does not wait for it to be ready.
    """
    actor = ray.remote(
        concurrency_groups={"sync": 2, "ask": 4, "kept": 2},
        num_cpus=0,
        resources=ON_HEAD,
        max_restarts=-1,
        max_task_retries=0,
    )(SessionActor)
    return actor.options(name=NAME, lifetime="detached", get_if_exists=True).remote(
        sessions_max, lineages_max, clear_s_max, telemetry, kept, ingress_silent_s
    )


class SessionActor:
    """Serves `SessionTable` to all ingresses and forwards session calls to the nodes' tier actors.

    `sessions_max`, `lineages_max`: see `SessionTable`; `clear_s_max`: how long a clear waits for the nodes.
    `telemetry`: how it logs. `kept`: bounds of what ingresses keep here; None: the default ones.
    `ingress_silent_s`: see `Quotas`. They only count when the actor is created.
    """

    def __init__(
        self,
        sessions_max: int,
        lineages_max: int,
        clear_s_max: float,
        telemetry: TelemetrySettings | None = None,
        kept: ItemBounds | None = None,
        ingress_silent_s: float = INGRESS_SILENT_S,
    ) -> None:
        set_up_logs(telemetry or TelemetrySettings())
        keep_collections_short()
        self._clear_s_max = clear_s_max
        self._table = SessionTable(sessions_max, lineages_max)
        self._lock = threading.Lock()
        self._quotas = Quotas(ingress_silent_s, time.monotonic)
        self._deaths = IngressDeaths(self._is_dead, self._bury)
        kept = kept or ItemBounds()
        self._kept = ItemStore(kept, self._cleared_at, sealer=_sealer(kept))
        self._incarnation = uuid.uuid4().hex
        self._draining: tuple[str, ...] = ()
        self._actors: dict[str, Any] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="sessions-watch", daemon=True).start()

    @ray.method(concurrency_group="sync")  # type: ignore[untyped-decorator]
    def sync(self, sync: Sync) -> Synced:
        """Merge an ingress's updates and return what changed since its last sync."""
        for cleared in sync.clears:
            self._forget(cleared)
        with self._lock:
            self._table.merge(sync.rows)
            since = sync.since if sync.incarnation == self._incarnation else 0
            rows, clears, seq = self._table.changes(since, ROWS_MAX)
            ingresses = 0
            if sync.ingress:
                ingresses = self._quotas.report(
                    sync.ingress, sync.uses, sync.asked, sync.ingresses, sync.actor
                )
            return Synced(
                self._incarnation,
                seq,
                seq == self._table.seq,
                tuple(rows),
                tuple(clears),
                self._draining,
                ingresses,
            )

    @ray.method(concurrency_group="kept")  # type: ignore[untyped-decorator]
    def allow(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        """Return whether an ingress may have `wanted` of a tenant open; None: not known yet (`Quotas.ask`).

        Before a refusal it is made sure that those whose requests fill the limit live.
        """
        for may_look in (True, False):
            with self._lock:
                answer = self._quotas.ask(ingress, asked, tenant, wanted, limit)
                actors = self._quotas.actors
            if answer or not may_look or not self._deaths.look(actors):
                break
        return answer

    @ray.method(concurrency_group="kept")  # type: ignore[untyped-decorator]
    def keep(self, items: Sequence[Item], rows: Sequence[SessionRow]) -> int:
        """Keep what a turn has left, and where its session is now; return how many items are kept."""
        with self._lock:
            self._table.merge(rows)
        return self._kept.put(items)

    @ray.method(concurrency_group="kept")  # type: ignore[untyped-decorator]
    def recall(self, tenant: bytes, session: bytes) -> Recalled:
        """Return a session's replies, and where its lineages are."""
        with self._lock:
            rows = tuple(self._table.lineages(tenant, session))
        return Recalled(tuple(self._kept.replies(tenant, session)), rows)

    @ray.method(concurrency_group="kept")  # type: ignore[untyped-decorator]
    def kept(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None:
        """Return what was kept under a name; None if there is nothing."""
        return self._kept.get(tenant, kind, name)

    @ray.method(concurrency_group="kept")  # type: ignore[untyped-decorator]
    def discard(self, tenant: bytes, kind: Kind, name: bytes) -> bool:
        """Erase what was kept under a name; return whether there was something. Raises `NotErased`."""
        return self._kept.delete(tenant, kind, name)

    @ray.method(concurrency_group="kept")  # type: ignore[untyped-decorator]
    def forget(self, clears: Sequence[SessionsCleared]) -> int:
        """Erase what was kept of sessions or tenants; return how many items. Raises `NotErased`."""
        erased = 0
        for cleared in clears:
            with self._lock:
                self._table.clear(cleared)
            erased += self._kept.clear(cleared.tenant, cleared.session, cleared.unix_s)
        return erased

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def held(self, tenant: bytes, sessions: Sequence[bytes]) -> dict[bytes, dict[str, int]]:
        """Return the bytes per tier that all answering nodes hold, by lineage or whole session."""
        held: dict[bytes, Counter[str]] = {session: Counter() for session in sessions}
        for answer in self._ask_all("session_bytes", tenant, tuple(sessions)).values():
            for session, nbytes in answer.items():
                held[session].update(nbytes)
        return {session: dict(nbytes) for session, nbytes in held.items()}

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def tenant_held(self, tenant: bytes) -> dict[str, int]:
        """Return the bytes per tier that a tenant takes on all answering nodes; what all see counts once."""
        held: Counter[str] = Counter()
        for answer in self._ask_all("tenant_bytes", tenant).values():
            for tier, nbytes in answer.items():
                held[tier] = max(held[tier], nbytes) if tier in TIERS.shared else held[tier] + nbytes
        return dict(held)

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def likely(self, tenant: bytes, sessions: Sequence[bytes], horizon_s: float) -> dict[bytes, float]:
        """Return P(resumes within `horizon_s`) of the lineages that an answering node knows."""
        found: dict[bytes, float] = {}
        for answer in self._ask_all("likely", tenant, tuple(sessions), horizon_s).values():
            found |= {session: max(one, found.get(session, 0.0)) for session, one in answer.items()}
        return found

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def glance(
        self, owners: Sequence[bytes], at_s: Sequence[float], with_stats: bool
    ) -> dict[str, NodeGlance]:
        """Return what each answering node shows of lineages (tenant's tag and own joined), and of itself."""
        return self._ask_all("glance", tuple(owners), tuple(at_s), with_stats, timeout_s=GLANCE_S_MAX)

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def move(self, tenant: bytes, session: bytes, how: Move) -> int:
        """Promote or demote a lineage's blocks on all nodes that hold it; return the number of extents."""
        with self._lock:
            row = self._table.get(tenant, session)
        nodes = None if row is None else row.nodes
        return sum(self._ask_all(how, tenant, session, nodes=nodes).values())

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> int:
        """Pass a client's hint to the nodes holding a lineage; return how many know it."""
        with self._lock:
            row = self._table.get(tenant, session)
        nodes = None if row is None else row.nodes
        answers = self._ask_all("hint", tenant, session, event, expected_return_s, nodes=nodes)
        return sum(answers.values())

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def clear(self, clear: Clear) -> dict[str, Cleared | None]:
        """Clear on every node's tiers; the value is None for a node that did not answer in time."""
        actors = self._tier_actors()
        done = self._ask_all("clear", clear, timeout_s=self._clear_s_max)
        return {node: done.get(node) for node in actors}

    @ray.method(concurrency_group="ask")  # type: ignore[untyped-decorator]
    def check_integrity(self) -> int:
        """Return the number of sessions; raise `AssertionError` if the accounting is inconsistent."""
        self._kept.check_integrity()
        with self._lock:
            self._quotas.check_integrity()
            self._table.check_integrity()
            return len(self._table)

    def _cleared_at(self, tenant: bytes, session: bytes) -> float:
        with self._lock:
            return self._table.cleared_unix_s(tenant, session)

    def _is_dead(self, actor: str) -> bool:
        state: str | None = gcs_state.actor_table(actor).get("State")
        return state == "DEAD"

    def _bury(self, ingress: str) -> None:
        logger.info("ingress %s is dead: what its requests took of limits is free", ingress[:8])
        with self._lock:
            self._quotas.bury(ingress)

    def _forget(self, cleared: SessionsCleared) -> None:
        """Apply an ingress's clear, which it has asked for by `forget` too, unless that did not get here."""
        with self._lock:
            self._table.clear(cleared)
        try:
            self._kept.clear(cleared.tenant, cleared.session, cleared.unix_s)
        except NotErased as error:
            logger.error("what was to be forgotten is still on disk: %s", error)

    def _watch(self) -> None:
        """Learn what the tiers hold, then watch for draining nodes; in a thread, because GCS may hang."""
        asked: set[str] = set()
        while not self._stopped.is_set():
            is_settled = False
            try:
                self._draining = tuple(sorted(gcs_state.get_draining_nodes()))
                actors = tier_actors()
                if self._actors.keys() - actors.keys():
                    asked = set()  # a node is gone: others may have taken its blocks
                self._actors = actors
                asked = (asked & actors.keys()) | self._learn(actors.keys() - asked)
                is_settled = len(asked) == len(actors) == 1
            except Exception:  # GCS unavailable, a node just lost: retry at the next look
                logger.exception("the session directory could not read the cluster's state")
            self._stopped.wait(ALONE_WATCH_S if is_settled else WATCH_S)

    def _learn(self, nodes: Set[str]) -> set[str]:
        """Return which of the nodes have reported what their tiers hold; asks all at the same time."""
        answers = self._ask_all("sessions", REBUILD_SESSIONS_MAX, nodes=nodes)
        for node, held in answers.items():
            with self._lock:
                self._table.held(node, held, time.time(), self._actors)
        return set(answers)

    def _tier_actors(self) -> dict[str, Any]:
        self._actors = self._actors or tier_actors()
        return self._actors

    def _ask_all(
        self,
        method: str,
        *args: object,
        nodes: Collection[str] | None = None,
        timeout_s: float = ASK_S_MAX,
    ) -> dict[str, Any]:
        """Return the nodes' answers, leaving out those that failed or were late."""
        actors = self._tier_actors().items()
        asked = {node: actor for node, actor in actors if nodes is None or node in nodes}
        return rpc.ask_all(asked, method, *args, timeout_s=timeout_s)


def _sealer(kept: ItemBounds) -> SessionSealer | None:
    """Return what seals the items of the file; None: they are not sealed."""
    if kept.path is None or kept.sealed_by is None:
        return None
    from samovar.cache_tiers.actors import cluster_keys
    from samovar.cache_tiers.encryption import SessionSealer

    return SessionSealer(cluster_keys(kept.sealed_by, kept.path.parent, NodeSettings.restart_backoff_s_max))


WAIT_S = 0.1
"""How long a question of an ingress waits for the cluster's answer."""
PAUSE_S = 0.1
"""After a look there is none for so long: a tenant that asks in vain must not keep the cluster busy."""


class IngressDeaths:
    """Looks for dead ingresses, in a thread, because GCS may hang. Thread-safe.

    `is_dead`: of an actor, may raise and hang. `bury`: called in the thread for each one that is dead.
    """

    def __init__(
        self,
        is_dead: Callable[[str], bool],
        bury: Callable[[str], None],
        *,
        wait_s: float = WAIT_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._is_dead = is_dead
        self._bury = bury
        self._wait_s = wait_s
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._looked: threading.Event | None = None
        self._began_s = 0.0
        self._looks_again_s = 0.0
        self._found = False

    def look(self, actors: Mapping[str, str]) -> bool:
        """Return whether one of the ingresses was found dead just now. `actors`: name -> its actor."""
        now_s = time.monotonic()
        with self._lock:
            looked = self._looked
            if looked is None:
                if not actors or now_s < self._looks_again_s:
                    return False
                looked = self._looked = threading.Event()
                self._began_s = now_s
                threading.Thread(
                    target=self._look, args=(dict(actors), looked), name="ingress-deaths", daemon=True
                ).start()
            left_s = self._wait_s - (now_s - self._began_s)
        return looked.wait(max(0.0, left_s)) and self._found

    def _look(self, actors: dict[str, str], looked: threading.Event) -> None:
        found = False
        for ingress, actor in actors.items():
            try:
                if self._is_dead(actor):
                    self._bury(ingress)
                    found = True
            except Exception:  # GCS unavailable: it is forgotten when it was silent for long
                logger.exception("it is not known whether ingress %s lives", ingress[:8])
        with self._lock:
            self._found = found
            self._looked = None
            self._looks_again_s = time.monotonic() + self._pause_s
        looked.set()
