"""A node's complete cache tiers without Ray: driven by the tier actor, tests and simulations.

Combines the state (catalog, moves, pending deletes), reads, stores, and one guard per tier. No method waits
for a medium while it holds the lock, and a lookup never touches one at all. Independent of tokens, models
and processes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    TIERS,
    TOP_TIER,
    Address,
    Clear,
    ExtentHeader,
    LoadSource,
    Placement,
    TierError,
    TierName,
    is_of,
)
from samovar.cache_tiers.catalog import Catalog, Clears, Reach, no_fault
from samovar.cache_tiers.forecast import (
    Forecast,
    Forecaster,
    Predictor,
    PredictorFile,
    TurnLearner,
    TypeKm,
    fast_clock,
)
from samovar.cache_tiers.forecast import learner as predictor_file
from samovar.cache_tiers.media import Breaker, GuardedTier, Tier
from samovar.cache_tiers.messages import (
    BadReport,
    Cleared,
    ExtentRequest,
    Fetch,
    Fetched,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    NodeGlance,
    NodeStats,
    SampleRequest,
    SessionHeld,
    StoreReply,
    StoreRequest,
    TierStats,
    TurnEnded,
)
from samovar.cache_tiers.node.clears import NodeClears
from samovar.cache_tiers.node.drain import NodeDrain
from samovar.cache_tiers.node.peers import NodePeers, covers
from samovar.cache_tiers.node.resumption import NodePrefetch, NodeResumption
from samovar.cache_tiers.node.scan import RescanCoalescer, TierScans
from samovar.cache_tiers.node.state import NodeState, PendingDeletes
from samovar.cache_tiers.node.store import CallFor, NodeStores
from samovar.cache_tiers.node.transfer import LentRoom, NodeReads, NodeSamples, TransferRunner
from samovar.cache_tiers.policy import IdleSessions, Prefetcher, ShadowLru, make_policy
from samovar.cache_tiers.pricing import TierMeter, TierPrice
from samovar.cache_tiers.transport import LazyLink, PeerCalls
from samovar.configs.sections import TierSettings

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Keys

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeMedia:
    """A node's tiers that work, and why the others are `off`; the bytes that each may hold, if it is set up.

    `pending_path`: file of the pending clears and deletes; None: no directory is ours, nothing is kept.
    `late_pending_path`: that file, if its directory is waited for (`Tier.why_not_ours`); it is read then.
    `keys`: of records, where they are encrypted. `unopened`: those that are off though they may hold records.
    """

    tiers: dict[TierName, Tier] = field(default_factory=dict)
    bytes_max: dict[TierName, int] = field(default_factory=dict)
    off: dict[TierName, str] = field(default_factory=dict)
    pending_path: Path | None = None
    late_pending_path: Path | None = None
    keys: Keys | None = None
    unopened: set[TierName] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Which node, and in which life. `incarnation`: never used before; `restarts`: lives before it."""

    node_id: str
    incarnation: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class NodePorts:
    """What a node has of the world outside: time, replicas' records, other nodes, fault points.

    `clock`: monotonic seconds; `wall_clock`: Unix seconds. `peer_calls`: calls to other nodes, `link`: to
    their memory; without the first there are no other nodes.
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    call_for: CallFor
    reach: Reach = no_fault
    peer_calls: PeerCalls | None = None
    link: LazyLink | None = None
    catalog: Callable[..., Catalog] = Catalog


def guarded(
    media: NodeMedia, settings: TierSettings, clock: Callable[[], float]
) -> dict[TierName, GuardedTier]:
    """Wrap each tier in its guard, in the order of `TIERS`."""
    return {
        name: GuardedTier(
            media.tiers[name],
            bytes_max=media.bytes_max[name],
            breaker=Breaker(
                settings.breaker_failures, settings.breaker_open_s, settings.breaker_open_s_max, clock
            ),
            meter=TierMeter(clock=clock),
            threads=settings.io_threads,
            clock=clock,
        )
        for name in TIERS
        if name in media.tiers
    }


def tier_stats(
    state: NodeState,
    off: Mapping[TierName, str],
    bytes_max: Mapping[TierName, int],
    listed_ago_s: Callable[[TierName], float | None],
) -> tuple[TierStats, ...]:
    """Return rows in the order of `TIERS`, also for tiers that are `off`, with the reason."""
    rows = []
    for name in TIERS:
        guard = state.guards.get(name)
        if guard is not None:
            rows.append(replace(_row(state, guard), listed_ago_s=listed_ago_s(name)))
        else:
            why = off.get(name, "not configured")
            rows.append(TierStats(name, f"off: {why}", bytes_max=bytes_max.get(name, 0)))
    return tuple(rows)


def _row(state: NodeState, guard: GuardedTier) -> TierStats:
    with state.lock:
        usage = state.catalog.usage(guard.name)
    try:
        held = guard.tier.bytes_held()
    except TierError:
        held = usage.bytes_accounted
    counts, found = guard.counts, guard.tier.bad_found()
    bad = Counter({name.removeprefix("bad:"): n for name, n in counts.items() if name.startswith("bad:")})
    return TierStats(
        guard.name,
        guard.state,
        bytes_held=held,
        bytes_max=guard.bytes_max,
        extents=usage.extents,
        blocks=usage.blocks,
        tokens=usage.tokens,
        hits_blocks=counts.get("hits_blocks", 0),
        read_bytes=counts.get("read_bytes", 0),
        written_bytes=counts.get("written_bytes", 0),
        read_errors=counts.get("read_errors", 0),
        write_errors=counts.get("write_errors", 0),
        verify_failures=dict(bad + found.kinds),
        quarantined=counts.get("quarantined", 0) + found.quarantined,
        evicted_extents=counts.get("evicted_extents", 0),
        breaker_opened=guard.opened,
        price=guard.price(),
        medium_free_bytes=guard.tier.medium_free_bytes(),
    )


class NodeSessions:
    """Lists a node's lineages, and demotes one at a hint. See `SessionHeld`.

    They are identified by tenant tag and lineage tag; the tag of a whole session stands for all of them. A
    hint only queues copies; what does not fit into the queue stays where it is. Promotion: `resumption.py`.
    """

    def __init__(self, state: NodeState, stores: NodeStores) -> None:
        self._state = state
        self._stores = stores

    def sessions(self, limit: int) -> list[SessionHeld]:
        """Return up to `limit` lineages, last used first; walks all extents, so not per request."""
        with self._state.lock:
            return self._state.catalog.sessions(limit)

    def session_bytes(self, tenant: bytes, sessions: Sequence[bytes]) -> dict[bytes, dict[str, int]]:
        """Return the bytes by tier of each of `sessions`; empty where nothing is held."""
        with self._state.lock:
            catalog = self._state.catalog
            return {session: catalog.session(tenant, session).nbytes for session in sessions}

    def tenant_bytes(self, tenant: bytes) -> dict[str, int]:
        """Return the bytes that a tenant takes in each tier, with what is reserved for it."""
        with self._state.lock:
            return {tier: self._state.catalog.tenant_bytes(tier, tenant) for tier in self._state.guards}

    def demote(self, tenant: bytes, session: bytes) -> int:
        """Demote a session from main memory to the lowest allowed tier; return extents dropped or queued.

        What other sessions share stays; so does what no lower tier can take.
        """
        state, done = self._state, 0
        with state.lock:
            above = [
                extent
                for extent in state.catalog.extents_of(tenant, session)
                if TOP_TIER in extent.tiers and all(is_of(tag, session) for tag in extent.sessions)
            ]
        for extent in above:
            target = self._lowest(extent.placement)
            if target is None:
                continue
            if target not in extent.tiers:
                done += self._stores.copy(extent.address, target, sinks_from=TOP_TIER, is_urgent=True)
                continue
            with state.lock:
                is_safe = target in state.catalog.copies(extent.address)
                eviction = state.catalog.lose(extent.address, TOP_TIER) if is_safe else None
            if eviction is not None:
                state.drop([eviction])
                done += 1
        return done

    def _lowest(self, placement: Placement) -> TierName | None:
        for tier in reversed(TIERS[1:]):
            guard = self._state.guards.get(tier)
            if guard is not None and guard.is_writable and placement.allows(tier):
                return tier
        return None


def build_resumption(
    settings: TierSettings,
    state: NodeState,
    stores: NodeStores,
    sessions: IdleSessions,
    *,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    file: Path | None,
    make: Callable[[], Forecaster] | None,
    peers: NodePeers,
) -> NodeResumption:
    """Build the resumption part (`resumption.py`) from the settings.

    `clock`: of sessions, see `fast_clock`; `wall_clock`: runs in real time. `file`: where the predictor is
    kept. `make`: see `TierNode`. `peers`: tell what they know of a session's turns.
    """
    predictor, policy = settings.predictor, settings.policy

    def make_predictor() -> Forecaster:
        return TypeKm(predictor) if policy.name == "type-km" else Predictor(predictor)

    prefetch = NodePrefetch(
        state,
        stores,
        sessions,
        Prefetcher(settings.prefetch),
        clock=clock,
        is_demand_busy=lambda: state.fetches > 0 or stores.has_stores,
        lead_s=policy.horizon_s_min,
        stays_s=policy.horizon_s_max,
    )
    learner = TurnLearner(
        make or make_predictor, queue_max=predictor.queue_max, clock=wall_clock, file=_kept_in(file, settings)
    )
    resumption = NodeResumption(
        state,
        sessions,
        learner,
        prefetch,
        ShadowLru({name: guard.bytes_max for name, guard in state.guards.items()}, clock),
        clock=clock,
        rate=predictor.clock_rate,
        sessions_max=predictor.sessions_max,
    )
    peers.moved = resumption.moved_here
    return resumption


def predictor_path(settings: TierSettings, pending_path: Path | None) -> Path | None:
    """Return the predictor's file: as set, else beside `pending_path`; None: it is not kept."""
    if settings.predictor.file is not None:
        return settings.predictor.file
    return None if pending_path is None else pending_path.with_name(predictor_file.FILE_NAME)


def _kept_in(path: Path | None, settings: TierSettings) -> PredictorFile | None:
    """Return the file for a trained network only: counts by kind are quickly rebuilt."""
    if path is None or settings.policy.name == "type-km":
        return None

    def restore(predictor: Forecaster) -> str | None:
        return predictor_file.restore(path, predictor) if isinstance(predictor, Predictor) else None

    def save(predictor: Forecaster) -> None:
        if isinstance(predictor, Predictor):
            predictor_file.save(path, predictor)

    return PredictorFile(restore, save, settings.predictor.save_s)


START_SCAN_S_MAX = 5.0
"""A disk of 10,000 extents is scanned in it; with more the node answers first, the disk is up later."""

CLOSE_S_MAX = 5.0


class TierNode:
    """A node's cache tiers. Thread-safe. In its own process it is what replicas call (`TierLink`).

    `tenant_share`: tenant tag -> share of each tier; by default that of the settings. `make_predictor`: by
    default what the policy needs. `workers`: threads that carry out stores and copies; 0: `work` does.
    """

    def __init__(
        self,
        settings: TierSettings,
        media: NodeMedia,
        identity: NodeIdentity,
        ports: NodePorts,
        *,
        tenant_share: Callable[[bytes], float] | None = None,
        make_predictor: Callable[[], Forecaster] | None = None,
        workers: int | None = None,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._off, self._bytes_max = dict(media.off), dict(media.bytes_max)
        self._workers_max = settings.io_threads if workers is None else workers
        self._workers: list[threading.Thread] = []
        clock = ports.clock
        self._guards = guarded(media, settings, clock)
        sessions = IdleSessions(settings.predictor.sessions_max)
        replay_clock = fast_clock(clock, settings.predictor.clock_rate)
        catalog = ports.catalog(
            {name: media.bytes_max[name] for name in self._guards},
            make_policy(settings.policy),
            clock=replay_clock,
            tenant_share=tenant_share or (lambda _tenant: settings.tenant_share or 1.0),
            clears=Clears(settings.tombstones_max, max(settings.store_s_max, settings.load_s_max), clock),
            transfers_max=settings.store_queue_max + settings.transfer_queue_max + settings.fetch_max,
            sessions=sessions,
            settings=settings.policy,
        )
        state = self._state = NodeState(
            self._guards,
            catalog,
            PendingDeletes(media.pending_path, settings.tombstones_max),
            reach=ports.reach,
            clock=clock,
            delete_s_max=min(settings.load_s_max, settings.store_s_max),
            late_pending_path=media.late_pending_path,
        )
        runner = TransferRunner(state, settings.store_s_max)
        self._scans = TierScans(state, ports.wall_clock, settings)
        self._looks = RescanCoalescer(self._scans.look, self._scans.listings, clock)
        self.peers = NodePeers(
            state,
            runner,
            settings,
            ports.peer_calls,
            ports.link or LazyLink(None, "not configured"),
            node_id=identity.node_id,
            incarnation=identity.incarnation,
            look_again=self._look_again,
        )
        self._samples = NodeSamples(state, runner)
        self._reads = NodeReads(state, runner, fetch_max=settings.fetch_max, from_peer=self.peers.fetch)
        self._stores = NodeStores(
            state,
            runner,
            settings,
            call_for=ports.call_for,
            incarnation=identity.incarnation,
            sessions=sessions,
            session_clock=replay_clock,
        )
        self.resumption = build_resumption(
            settings,
            state,
            self._stores,
            sessions,
            clock=replay_clock,
            wall_clock=clock,
            file=predictor_path(settings, media.pending_path),
            make=make_predictor,
            peers=self.peers,
        )
        self._clears = NodeClears(state, self._scans, settings, self.resumption.clear, media)
        self.sessions = NodeSessions(state, self._stores)
        self._drain = NodeDrain(state, self._stores, ports.peer_calls, identity.node_id, settings)

    @property
    def incarnation(self) -> str:
        return self._identity.incarnation

    def ping(self) -> str:
        """Return the incarnation."""
        return self._identity.incarnation

    def start(self, scan_s_max: float = math.inf) -> None:
        """Scan the tiers and start the workers; S3, and what takes longer, is scanned in the background."""
        self._scans.start(scan_s_max)
        if self._workers_max:
            self.resumption.start()
        for number in range(self._workers_max):
            worker = threading.Thread(
                target=self._stores.work_until_stopped, name=f"tiers-{number}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def lookup(self, lookup: Lookup) -> LookupResult:
        """Return what the tiers hold of a chain, and what the nodes named in `lookup` hold besides.

        Raises `ValueError` if `keys` is not a row of keys.
        """
        self.resumption.asked(lookup)
        own = self.lookup_here(lookup)
        self.resumption.looked_up(lookup, own)
        return self.peers.lookup(lookup, own)

    def lookup_here(self, lookup: Lookup) -> LookupResult:
        """Return what this node's tiers hold of a chain, without asking peers. Raises as `lookup`."""
        state = self._state
        with state.lock:
            unlisted = self._scans.unlisted()  # first: what is taken in meanwhile is found
            spans, tails = state.catalog.find(lookup, state.up())
            absent = state.catalog.absent(lookup, spans)
            clear_seq = state.catalog.clears.seq
        prices: dict[LoadSource, TierPrice] = {name: guard.price() for name, guard in self._guards.items()}
        state.catalog.prices.loads(prices)
        if unlisted and covers(spans, len(lookup.keys) // KEY_BYTES):
            unlisted = ()
        own = self._identity.incarnation
        return LookupResult(own, clear_seq, spans, tails, prices, unlisted, absent=absent)

    def _look_again(self, lookup: Lookup, silent: Mapping[str, bool]) -> LookupResult:
        """See `NodePeers`. Waits half a lookup's time; the rest went to the nodes that did not answer.

        Looks without a rescan, too: another lookup's may have ended since this one asked the first time.
        """
        self._looks.after(silent, min(lookup.wait_s, self._settings.lookup_s_max) / 2)
        return self.lookup_here(lookup)

    def fetch(self, fetch: Fetch, room: LentRoom | None = None) -> Fetched | FetchFailed:
        """Fetch blocks within the deadline, in the caller's thread. Never raises for a tier's failure."""
        return self._reads.fetch(fetch, room)

    def offer(self, offers: Sequence[StoreRequest], source: object = None) -> StoreReply:
        """Decide on each offer at once; accepted records are called for later (`CallFor`, `source`)."""
        return StoreReply(tuple(self._stores.offer(offer, source) for offer in offers))

    def sample(self, ask: SampleRequest) -> tuple[ExtentHeader, ...]:
        """Put records into a tier to measure its road with; see `NodeSamples.put`. `measured` ends it."""
        return self._samples.put(ask)

    def measured(self, prices: Mapping[TierName, TierPrice], samples: Sequence[ExtentHeader] = ()) -> None:
        """Take over what a replica's start has measured of the way from each tier into its pages.

        `samples`: are deleted.
        """
        for tier, price in prices.items():
            if tier in self._guards:
                self._guards[tier].measured(price)
        self._samples.drop(samples)

    def report(self, bad: Sequence[BadReport] = (), loads: Sequence[LoadReport] = ()) -> None:
        """Quarantine bad records, so that the next lookup does not find them; learn from loads."""
        for load in loads:
            if load.tier == "peer":
                self.peers.took(load.nbytes, load.seconds)
            elif load.tier in self._guards:
                self._guards[load.tier].observe(load.nbytes, load.seconds)
        for one in bad:
            address = Address(one.tenant, one.namespace, one.extent_id)
            if one.tier == "peer":  # verified on arrival: our own copy may be bad
                self.peers.exports.check(ExtentRequest(address, self._settings.load_s_max))
            else:
                self._state.bad(address, one.tier, one.kind)

    def turn_over(self, over: TurnEnded) -> Forecast | None:
        """See `NodeResumption`."""
        return self.resumption.turn_over(over)

    def clear(self, clear: Clear) -> Cleared:
        """See `NodeClears`."""
        return self._clears.clear(clear)

    def flush(self, deadline_s: float) -> dict[str, int]:
        """Save what only main memory holds, before a stop; return extents: written, failed, left."""
        return self._stores.flush(deadline_s)

    def drain(self, deadline_s: float, peers: Sequence[str]) -> dict[str, int]:
        """Drain before the node goes away: see `NodeDrain`."""
        return self._drain.drain(deadline_s, peers)

    def drain_over(self) -> None:
        """End the drain: the node stays."""
        self._drain.over()

    def work(self) -> bool:
        """Carry out one store or copy in this thread; False if none waits. For nodes without workers."""
        return self._stores.work()

    def tick(self) -> None:
        """Run periodic work: expiry, trials of broken tiers, pending deletes, failed scans, sinking."""
        state = self._state
        with state.lock:
            expired = state.catalog.expired()
        state.drop(expired)
        for guard in self._guards.values():
            guard.probe(self._settings.load_s_max)
        state.retry_deletes()
        self._clears.go_on()
        self._scans.retry()
        is_peer_lost = self.peers.lost.is_set()
        self.peers.lost.clear()
        self._scans.rescan(now=is_peer_lost)
        self._stores.sink()
        self.resumption.tick()

    def stats(self) -> NodeStats:
        """Return the node's counters, with one row per tier in the order of `TIERS`, also if it is off."""
        state = self._state
        with state.lock:
            moves, stores, misses = (
                dict(state.catalog.transfers.reached),
                dict(state.stores),
                dict(state.misses),
            )
            queue = len(self._stores)
            pending, forgotten = len(state.pending), state.pending.forgotten
        return NodeStats(
            self._identity.node_id,
            self._identity.incarnation,
            self._identity.restarts,
            tier_stats(state, self._off, self._bytes_max, self._scans.listed_ago_s),
            moves=moves,
            stores=stores,
            misses=misses,
            queue=queue,
            peers=self.peers.stats(),
            transport=self.peers.transport,
            **self._drain.stats(),
            returns=self.resumption.stats(),
            bad_files=int(state.pending.read_failed),
            pending_deletes=pending,
            forgotten_deletes=forgotten,
        )

    def glance(self, owners: Sequence[bytes], at_s: Sequence[float], with_stats: bool) -> NodeGlance:
        """Return what people who watch see; `owners`, `at_s`: see `NodeResumption.glance`."""
        return NodeGlance(self.resumption.glance(owners, at_s), self.stats() if with_stats else None)

    def close(self) -> None:
        """Release everything; waiting stores are dropped. See `flush`."""
        self._scans.stop(CLOSE_S_MAX)
        self._clears.stop()
        self._stores.stop()
        for worker in self._workers:
            worker.join(CLOSE_S_MAX)
        self.resumption.close()
        self._state.save_pending()
        self.peers.close()
        for guard in self._guards.values():
            guard.tier.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the accounting is inconsistent."""
        self._state.check_integrity()
        self._stores.check_integrity()
        self.peers.check_integrity()
        self._looks.check_integrity()
        self.resumption.check_integrity()
