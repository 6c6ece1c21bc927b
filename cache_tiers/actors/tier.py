"""The tier actor: a node's cache tiers as a detached Ray actor, which outlives every replica.

A thin wrapper around `TierNode`. Lookups, reads and control have their own threads, so that a slow disk
delays no lookup. When the actor dies, Ray restarts it with a new incarnation: main memory is empty then, the
other tiers hold what they held. Callers treat its absence as a miss. When no replica lives on the node any
more, it ends for good (`node/drain.py`); a later replica creates a new one.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.actors.cluster_watch import ClusterWatch, SpotWatch, drain_this_node
from samovar.cache_tiers.actors.rpc import PeerActors
from samovar.cache_tiers.actors.staging import hand_over
from samovar.cache_tiers.blocks import Bytes, Record, SumsSetup, TierError, compile_sums
from samovar.cache_tiers.media import memory
from samovar.cache_tiers.messages import Lookup, LookupResult, NodeStats, PushRequest
from samovar.cache_tiers.node import (
    START_SCAN_S_MAX,
    STARTS_FILE,
    TICK_S,
    KillPoint,
    NodeIdentity,
    NodeLeave,
    NodePorts,
    NodeResumption,
    NodeSessions,
    PeerExports,
    TierNode,
    build_link,
    build_tiers,
    count_start,
)
from samovar.cache_tiers.socket.server import (
    BroughtRecords,
    SocketLimits,
    SocketOpener,
    TierSocket,
    call_brought,
)
from samovar.cache_tiers.transport import PeerError
from samovar.configs.imports import OWN_PYTHON, keep_collections_short
from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.sections import TierSettings
from samovar.configs.telemetry import open_tracer, set_up_logs

logger = logging.getLogger(__name__)

Part = TypeVar("Part")
Params = ParamSpec("Params")
Result = TypeVar("Result")

CONTROL_THREADS = 2
RETURNS_THREADS = 2
FETCH_THREADS_MAX = 256
SPARE_THREADS = 2
"""Threads beyond `fetch_max`, so that one fetch too many is refused instead of waiting."""


def actor_name(node_id: str) -> str:
    return f"tiers:{node_id}"


def tier_actor(
    settings: TierSettings,
    node_id: str,
    nvme_dir: Path,
    tenant_shares: Mapping[bytes, float] | None = None,
    telemetry: TelemetrySettings | None = None,
    sums: SumsSetup | None = None,
) -> Any:
    """Return the handle of the node's tier actor, creating it if needed; does not wait until it is ready.

    `tenant_shares`: tenant tag -> share of each tier, where it is not `settings.tenant_share` (the actor
    does not know tenant names). `sums`: None = numpy computes checksums. All but `node_id` only count when
    the actor is created.
    """
    actor = ray.remote(
        concurrency_groups={
            "lookup": settings.lookup_threads,
            "io": min(settings.fetch_max, FETCH_THREADS_MAX) + SPARE_THREADS,
            "control": CONTROL_THREADS,
            # Peer calls have their own threads and never call another node themselves, so two nodes that call
            # each other cannot deadlock.
            "peer_lookup": settings.lookup_threads,
            "peer_io": settings.io_threads,
            # Except in a drain, where the taking node fetches from the draining one.
            "take": settings.io_threads,
            # Sometimes waits for the predictor.
            "returns": RETURNS_THREADS,
        },
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
    )(TierActor)
    own = os.environ.get(OWN_PYTHON)
    return actor.options(
        name=actor_name(node_id),
        **({} if own is None else {"runtime_env": {"py_executable": own}}),
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(settings, node_id, nvme_dir, dict(tenant_shares or {}), telemetry or TelemetrySettings(), sums)


def served(
    group: str,
    method: Callable[Concatenate[Part, Params], Result],
    part: Callable[[TierNode], Part],
    *,
    is_use: bool = False,
) -> Callable[Concatenate[TierActor, Params], Result]:
    """Return a method of the actor: `method` of a part of its node, in the threads of `group`.

    `is_use`: the call shows that a replica lives on this node. A call for a traced request is a span.
    """

    def call(self: TierActor, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if is_use:
            self._used()
        if self._tracer is None:
            return method(part(self._node), *args, **kwargs)
        with self._tracer.begin(f"tier {method.__name__}", trace_of(args)):
            return method(part(self._node), *args, **kwargs)

    # No `functools.wraps`: Ray looks for the group on the innermost function.
    ray.method(concurrency_group=group)(call)
    return call


def trace_of(args: Sequence[object]) -> str:
    """Return the context in a call's first argument, a message or several of one request; empty: none."""
    first = next(iter(args), None)
    if isinstance(first, list):
        first = next(iter(first), None)
    trace = getattr(first, "trace", "")
    return trace if isinstance(trace, str) else ""


def whole(node: TierNode) -> TierNode:
    return node


def lookup_for_peer(node: TierNode, lookup: Lookup) -> LookupResult:
    return replace(node.lookup_here(lookup), history=node.resumption.history(lookup))


class TierActor:
    """Exposes `TierNode` as Ray methods; messages in `messages.py`, arguments in `tier_actor`."""

    def __init__(
        self,
        settings: TierSettings,
        node_id: str,
        nvme_dir: Path,
        tenant_shares: dict[bytes, float],
        telemetry: TelemetrySettings,
        sums: SumsSetup | None,
    ) -> None:
        set_up_logs(telemetry)
        keep_collections_short()
        if sums is not None:
            compile_sums(sums)
        self._tracer = open_tracer(telemetry, "tiers")
        actor_id = ray.get_runtime_context().get_actor_id()
        incarnation = f"{actor_id[:8]}-{uuid.uuid4().hex}"
        keys = None
        if settings.encryption_key_file is not None:
            from samovar.cache_tiers.actors.keys import cluster_keys

            backoff_s_max = settings.node.restart_backoff_s_max
            keys = cluster_keys(settings.encryption_key_file, nvme_dir, backoff_s_max)
        built = build_tiers(
            settings, nvme_dir, make_cpu=memory.ObjectStoreTier, wall_clock=time.time, keys=keys
        )
        if built.pending_path is not None:
            starts, self._bad_files = count_start(nvme_dir / STARTS_FILE, actor_id)
        else:
            starts = 1 + int(ray.get_runtime_context().was_current_actor_reconstructed)
            self._bad_files = 0
        ports = NodePorts(
            clock=time.monotonic,
            wall_clock=time.time,
            call_for=CallClient(settings.store_s_max),
            reach=KillPoint(settings.faults, starts),
            peer_calls=PeerActors(actor_name),
            link=build_link(settings.peer, f"{node_id}:{incarnation}", ray.util.get_node_ip_address()),
        )
        if telemetry.kv_events is not None:
            from samovar.cache_tiers.catalog import announced_catalog
            from samovar.cache_tiers.events.publisher import publisher_at

            feed = publisher_at(telemetry.kv_events, is_replica=False).feed
            ports = replace(ports, catalog=partial(announced_catalog, feed))
        self._node = TierNode(
            settings,
            built,
            NodeIdentity(node_id, incarnation, restarts=starts - 1),
            ports,
            tenant_share=lambda tenant: tenant_shares.get(tenant, settings.tenant_share or 1.0),
        )
        self._node.start(START_SCAN_S_MAX)
        self._leave = NodeLeave(settings.node.idle_timeout_s, time.monotonic())
        self._cluster_watch = ClusterWatch(
            self._node, node_id, settings.peer.drain_s, self._leave, end=partial(end_for_good, node_id)
        )
        self._cluster_watch.start()
        # The first store names a replica's actor, whose class is of Serve: .4 CPU-s of imports, for which the
        # lookup of the next turn would wait. Nothing else has to be done while the replica loads its weights.
        threading.Thread(
            target=importlib.import_module, args=("ray.serve",), name="tiers-imports", daemon=True
        ).start()
        if settings.node.spot_notice == "aws":
            self._spot_watch = SpotWatch(settings.node, partial(drain_this_node, node_id, "spot notice"))
            self._spot_watch.start()
        self._socket: SocketOpener | None = None
        if settings.socket is not None:
            listen = partial(
                TierSocket,
                self._node,
                settings.socket.expanduser(),
                data_of=partial(data_of, timeout_s=settings.load_s_max),
                used=self._used,
                limits=SocketLimits.of(settings),
            )
            self._socket = SocketOpener(listen)
            self._socket.open()
        self._stopped = threading.Event()
        threading.Thread(target=self._tick, name="tiers-tick", daemon=True).start()

    # What replicas call.
    lookup = served("lookup", TierNode.lookup, whole, is_use=True)
    offer = served("lookup", TierNode.offer, whole, is_use=True)
    fetch = served("io", TierNode.fetch, whole, is_use=True)
    turn_over = served("returns", TierNode.turn_over, whole, is_use=True)
    report = served("control", TierNode.report, whole)
    clear = served("control", TierNode.clear, whole)
    ping = served("lookup", TierNode.ping, whole)
    sample = served("control", TierNode.sample, whole, is_use=True)
    measured = served("control", TierNode.measured, whole)

    @ray.method(concurrency_group="lookup")  # type: ignore[untyped-decorator]
    def stats(self) -> NodeStats:
        stats = self._node.stats()
        return replace(stats, bad_files=stats.bad_files + self._bad_files)

    # What the session directory and the command line call.
    hint = served("returns", NodeResumption.hint, lambda node: node.resumption)
    likely = served("returns", NodeResumption.likely, lambda node: node.resumption)
    glance = served("lookup", TierNode.glance, whole)
    sessions = served("control", NodeSessions.sessions, lambda node: node.sessions)
    session_bytes = served("lookup", NodeSessions.session_bytes, lambda node: node.sessions)
    tenant_bytes = served("lookup", NodeSessions.tenant_bytes, lambda node: node.sessions)
    demote = served("control", NodeSessions.demote, lambda node: node.sessions)
    flush = served("control", TierNode.flush, whole)
    drain = served("control", TierNode.drain, whole)
    check_integrity = served("control", TierNode.check_integrity, whole)

    @ray.method(concurrency_group="lookup")  # type: ignore[untyped-decorator]
    def promote(self, tenant: bytes, session: bytes) -> int:
        return self._node.resumption.prefetch.promote(tenant, session, "hint")

    # What other nodes' tier actors call: see `PeerCalls`.
    peer_lookup = served("peer_lookup", lookup_for_peer, whole)
    peer_export = served("peer_io", PeerExports.export, lambda node: node.peers.exports)
    peer_release = served("peer_lookup", PeerExports.release, lambda node: node.peers.exports)
    peer_read = served("peer_io", PeerExports.read, lambda node: node.peers.exports)
    peer_check = served("peer_io", PeerExports.check, lambda node: node.peers.exports)
    peer_learned = served("peer_io", NodeResumption.learned, lambda node: node.resumption)

    @ray.method(concurrency_group="take")  # type: ignore[untyped-decorator]
    def peer_take(self, take: PushRequest) -> str:
        if self._leave.stage != "staying":
            return "failed:leaving"
        return self._node.peers.take(take)

    def _used(self) -> None:
        """Note a replica's call, or of an engine at the socket: at least one lives on this node."""
        if self._leave.used(time.monotonic()):
            self._node.drain_over()

    def _tick(self) -> None:
        while not self._stopped.wait(TICK_S):
            try:
                self._node.tick()
                if self._socket is not None:
                    self._socket.open()
            except Exception:  # logged; retry at the next tick
                logger.exception("a tick failed")


class CallClient:
    """`CallFor` of what brings its records, at the socket, and of replicas over Ray.

    A replica's record becomes an object owned by this actor, so it survives the replica. `source`: handle of
    the actor whose staging buffer holds the tickets, in a list of one; or `BroughtRecords`.
    """

    def __init__(self, call_s_max: float) -> None:
        self._call_s_max = call_s_max

    def __call__(self, source: object, ticket: int) -> Record:
        if isinstance(source, BroughtRecords):
            return call_brought(source, ticket)
        (handle,) = cast(Sequence[Any], source)
        try:
            ref = rpc.start(handle.__ray_call__, hand_over, ticket)
            data: Bytes = rpc.answer(ref, self._call_s_max)
        except PeerError as error:
            raise TierError(f"the replica did not hand over: {error}") from error
        return Record(data, owned=ref)


def data_of(ref: object, timeout_s: float) -> Bytes:
    """Return the bytes of an object in Ray's store. Raises `TierError`."""
    try:
        data: Bytes = rpc.answer(ref, timeout_s)
    except PeerError as error:
        raise TierError(f"not in the object store: {error}") from error
    return data


def end_for_good(node_id: str) -> None:
    """Kill the calling actor without a restart.

    Returns before it ends; may raise if GCS is unavailable.
    """
    ray.kill(ray.get_actor(actor_name(node_id)), no_restart=True)


def tier_actors() -> dict[str, Any]:
    """Return node id -> tier actor handle; replicas created the actors in Serve's namespace."""
    prefix = actor_name("")
    named = [row for row in list_named_actors(all_namespaces=True) if row["name"].startswith(prefix)]
    found = {}
    for row in named:
        try:
            found[row["name"].removeprefix(prefix)] = ray.get_actor(row["name"], row["namespace"])
        except ValueError:
            logger.info("the tier actor %s has ended", row["name"])
    return found
