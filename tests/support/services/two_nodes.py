"""Two raylets on this machine, a tier actor on each, and something to store records from."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from samovar.cache_tiers.actors.staging import StagingBuffer, open_outbox
from samovar.cache_tiers.actors.tier import tier_actor
from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import TAG_BYTES, BlockShape, Bytes, Placement
from samovar.cache_tiers.messages import (
    BlockRange,
    Fetch,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    NodeStats,
    StoreRequest,
)
from samovar.configs.sections import MIB, TierSettings
from tests.support.inside import link_of
from tests.support.nodes.node_harness import TENANT, Sample, sample

ROOT = Path(__file__).resolve().parents[3]
GET_S = 60.0


def session_of(number: int) -> bytes:
    """Each sample is a session of its own."""
    return number.to_bytes(TAG_BYTES, "little")


def big(number: int, nbytes: int = MIB, placement: Placement | None = None) -> Sample:
    """A record of about `nbytes`, in 4 blocks."""
    shape = BlockShape(layers=2, layer_bytes=nbytes // 8, block_tokens=4)
    placement = placement or Placement(write_behind=())
    return sample(number, blocks=4, shape=shape, placement=placement, session=session_of(number))


def break_link(actor: Any) -> None:
    """Runs in a tier actor's process: its link cannot work there any more."""
    link_of(actor._node.peers).get().close()


@ray.remote(num_cpus=0)
class Stand:
    """What a replica does, on its node: stage records, ask the tier actor, read what it hands out."""

    def __init__(self) -> None:
        self._outbox = StagingBuffer(512 * MIB, keep_s=600)
        open_outbox(self._outbox)

    def stage(self, number: int, nbytes: int, placement: Placement | None) -> int | None:
        return self._outbox.put(big(number, nbytes, placement).record)

    def offer(self, actor: Any, offers: list[StoreRequest]) -> Any:
        me = ray.get_runtime_context().current_actor
        return ray.get(actor.offer.remote(offers, [me]), timeout=GET_S)

    def fetch(self, actor: Any, fetch: Fetch) -> tuple[Fetched | FetchFailed, bytes]:
        """The answer, and a digest of the bytes (they stay on the node)."""
        reply = ray.get(actor.fetch.remote(fetch), timeout=GET_S)
        if isinstance(reply, FetchFailed):
            return reply, b""
        data: Bytes = reply.data if reply.data is not None else ray.get(reply.ref[0], timeout=GET_S)
        return Fetched(reply.first, None, [], reply.tier, reply.is_kept), digest(data)

    def timed(self, actor: Any, fetches: list[Fetch]) -> tuple[float, list[bytes | FetchFailed]]:
        """Fetch all at once: seconds until the last can be read, and the digest of each, or why it failed."""
        began_s = time.perf_counter()
        replies = ray.get([actor.fetch.remote(fetch) for fetch in fetches], timeout=GET_S)
        came = [
            reply
            if isinstance(reply, FetchFailed)
            else reply.data
            if reply.data is not None
            else ray.get(reply.ref[0], timeout=GET_S)
            for reply in replies
        ]
        took_s = time.perf_counter() - began_s
        return took_s, [data if isinstance(data, FetchFailed) else digest(data) for data in came]


def digest(data: Bytes) -> bytes:
    return codec.xxh3_128(np.ascontiguousarray(data)).digest()


def nixl_cpu_share(actor: Any) -> float:
    """Runs in a tier actor's process: share of a core that its threads which are not Python's burn, Ray's
    among them: an upper bound of NIXL's."""
    process, python = psutil.Process(), {thread.native_id for thread in threading.enumerate()}

    def burnt_s() -> float:
        return sum(t.user_time + t.system_time for t in process.threads() if t.id not in python)

    before_s, window_s = burnt_s(), 3.0
    threading.Event().wait(window_s)  # the window of the measurement
    return (burnt_s() - before_s) / window_s


@dataclass
class Node:
    """One raylet with its tier actor."""

    node_id: str
    raylet: Any
    actor: Any
    stand: Any

    def look(self, wanted: Sample, *peers: str) -> LookupResult:
        lookup = Lookup(wanted.header.namespace, wanted.chain, TENANT, wanted.header.session, peers)
        found: LookupResult = ray.get(self.actor.lookup.remote(lookup), timeout=GET_S)
        return found

    def store(self, number: int, nbytes: int = MIB, placement: Placement | None = None) -> Sample:
        wanted = big(number, nbytes, placement)
        found = self.look(wanted)
        ticket = ray.get(self.stand.stage.remote(number, nbytes, placement), timeout=GET_S)
        offer = StoreRequest(ticket, wanted.header, wanted.record.nbytes, found.incarnation, found.clear_seq)
        reply = ray.get(self.stand.offer.remote(self.actor, [offer]), timeout=GET_S)
        assert reply.outcomes == ("taken",)
        return wanted

    def fetch(
        self, wanted: Sample, span: BlockRange, deadline_s: float = 30.0
    ) -> tuple[Fetched | FetchFailed, bytes]:
        header = wanted.header
        fetch = Fetch(
            *(header.namespace, header.tenant, span.extent_id, span.offset, span.blocks, span.tier),
            deadline_s=deadline_s,
            node=span.node,
        )
        reply: tuple[Fetched | FetchFailed, bytes] = ray.get(
            self.stand.fetch.remote(self.actor, fetch), timeout=GET_S
        )
        return reply

    def stats(self) -> NodeStats:
        stats: NodeStats = ray.get(self.actor.stats.remote(), timeout=GET_S)
        return stats

    def check(self) -> None:
        ray.get(self.actor.check_integrity.remote(), timeout=GET_S)


@contextlib.contextmanager
def two_raylets(object_store_bytes: int = 256 * MIB) -> Iterator[Cluster]:
    """A head and a second raylet; this process is connected to them."""
    raylet = {"num_cpus": 2, "object_store_memory": object_store_bytes, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=raylet)
    try:
        with contextlib.chdir(ROOT):  # Ray's workers find `tests` there
            cluster.add_node(**{name: value for name, value in raylet.items() if name != "include_dashboard"})
            ray.init(
                address=cluster.address,
                namespace="samovar-test",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_node(raylet: Any, settings: TierSettings, folder: Path) -> Node:
    """The tier actor of a raylet, ready."""
    node_id = raylet.node_id
    on_it = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = tier_actor(settings, node_id, folder)
    stand = Stand.options(scheduling_strategy=on_it).remote()
    ray.get(actor.ping.remote(), timeout=GET_S)
    return Node(node_id, raylet, actor, stand)
