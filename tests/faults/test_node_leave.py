"""The life of a node's tiers in a real Ray of two raylets: they leave, come again, flee, die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import state as gcs_state
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from samovar.cache_tiers.actors.tier import actor_name, tier_actor
from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.messages import Lookup, LookupResult
from samovar.cache_tiers.node.drain import inhabited
from samovar.configs.sections import (
    MIB,
    CpuTierSettings,
    NodeSettings,
    NvmeTierSettings,
    PeerSettings,
    TierSettings,
)
from samovar.replicas.offload.ray_link import RayLink
from tests.support.nodes.node_harness import TENANT, Sample
from tests.support.services.metadata_server import MetadataServer
from tests.support.services.service import until
from tests.support.services.two_nodes import Node, start_node, two_raylets

pytestmark = pytest.mark.timeout(300)

IDLE_TIMEOUT_S = 3.0
NOTICE_S = 30
LATE_S = 3.0
"""Two cores for all of it."""
BEHIND = Placement(write_behind=("nvme",), min_ttl_s=0.0)


class Town:
    """A head, which has tiers and a replica, and a worker, whose replicas come and go."""

    def __init__(self, cluster: Any, metadata: MetadataServer, folder: Path) -> None:
        self.cluster = cluster
        self.metadata = metadata
        self.settings = TierSettings(
            cpu=CpuTierSettings(bytes_max=64 * MIB),
            nvme=NvmeTierSettings(bytes_max=64 * MIB, durability="none"),
            peer=PeerSettings(lookup_s_max=5.0, pull_s_max=30.0, drain_s=60.0),
            node=NodeSettings(idle_timeout_s=IDLE_TIMEOUT_S),
        )
        asking = NodeSettings(
            idle_timeout_s=IDLE_TIMEOUT_S, spot_notice="aws", spot_notice_url=metadata.url, spot_poll_s=0.5
        )
        self.on_worker = self.settings.model_copy(update={"node": asking})
        self.folder = folder
        head, self.raylet = sorted(cluster.list_all_nodes(), key=lambda node: not node.is_head())
        self.head = start_node(head, self.settings, folder / "head")

    def move_in(self) -> Node:
        """A replica comes to the worker."""
        return start_node(self.raylet, self.on_worker, self.folder / "worker")

    def has_actor(self) -> bool:
        try:
            ray.get_actor(actor_name(self.raylet.node_id))
        except ValueError:
            return False
        return True

    def is_idle(self) -> bool:
        """As Ray's autoscaler sees it."""
        status = get_cluster_status(self.cluster.address)
        return self.raylet.node_id in {node.node_id for node in status.idle_nodes}

    def find(self) -> Any:
        return tier_actor(self.on_worker, self.raylet.node_id, self.folder / "worker")


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with MetadataServer() as metadata, two_raylets() as cluster:
        yield Town(cluster, metadata, tmp_path_factory.mktemp("town"))


def lookup_of(wanted: Sample) -> Lookup:
    return Lookup(wanted.header.namespace, wanted.chain, TENANT, wanted.header.session)


def here(node: Node, wanted: Sample) -> str:
    """The tier that has all of it; "" for none."""
    spans = node.look(wanted).spans
    return spans[0].tier if spans else ""


@ray.remote(num_cpus=0)
class SlowStart:
    """A replica that loads its model until `done` is there."""

    def __init__(self, begun: Path, done: Path) -> None:
        begun.touch()
        until("it is loaded", done.exists, 120.0)

    def ready(self) -> bool:
        return True


def test_a_replica_that_still_loads_its_model_lives_there(town: Town, tmp_path: Path) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"
    on_it = NodeAffinitySchedulingStrategy(town.raylet.node_id, soft=False)

    def homes() -> set[str]:
        return inhabited(gcs_state.actor_table(None).values())

    assert town.raylet.node_id not in homes()
    slow = SlowStart.options(scheduling_strategy=on_it).remote(begun, done)  # type: ignore[attr-defined]
    until("it has begun", begun.exists, 60.0)
    assert town.raylet.node_id in homes()
    done.touch()
    assert ray.get(slow.ready.remote(), timeout=60)
    ray.kill(slow)
    until("it has gone", lambda: town.raylet.node_id not in homes())


def test_an_empty_node_gives_its_blocks_away_and_becomes_idle(town: Town) -> None:
    worker = town.move_in()
    wanted = worker.store(1, placement=BEHIND)
    until("it is in a file, too", lambda: worker.stats().moves.get("cpu>nvme:committed"))
    time.sleep(2 * IDLE_TIMEOUT_S)  # nothing may happen in this time: a replica lives here, and says nothing
    assert town.has_actor()
    assert not town.is_idle()
    ray.kill(worker.stand)
    began_s = time.monotonic()
    until("the tiers have left", lambda: not town.has_actor(), 60.0)
    left_s = time.monotonic() - began_s
    assert left_s > IDLE_TIMEOUT_S - 0.1, "the replica might have been replaced by another"
    assert here(town.head, wanted) == "cpu"
    until("Ray sees the node as idle", town.is_idle, 30.0)
    print(f"\nleft {left_s:.1f} s after its replica, idle for Ray after {time.monotonic() - began_s:.1f} s")
    town.head.check()
    assert town.head.stats().drained == {}, "the head stays"


def test_who_comes_later_finds_the_files(town: Town) -> None:
    until("nobody is there", lambda: not town.has_actor(), 60.0)
    worker = town.move_in()
    stats = worker.stats()
    assert stats.restarts == 0, "a new actor, not the old one again"
    assert stats.tiers[0].extents == 0
    assert stats.tiers[1].extents == 1
    ray.kill(worker.stand)


@pytest.mark.parametrize(
    ("number", "early_s"),
    [pytest.param(2, 0.6, marks=pytest.mark.slow), (3, 0.2), pytest.param(4, 0.0, marks=pytest.mark.slow)],
)
def test_who_comes_while_it_leaves_is_served(town: Town, number: int, early_s: float) -> None:
    """Around the moment when it decides: by the old actor, which stays, or by a new one."""
    link = RayLink(town.find, None, town.settings)
    lookup = lookup_of(town.head.store(number))

    def answered() -> LookupResult | None:
        return link.lookup(lookup)

    first = until("it answers", answered, 60.0)
    assert isinstance(first, LookupResult)
    until("it begins to leave", partial(is_over, time.monotonic() + 2 * IDLE_TIMEOUT_S + 1.5 - early_s), 20.0)
    found = until("somebody answers", answered, 60.0)
    assert isinstance(found, LookupResult)
    actor = ray.get_actor(actor_name(town.raylet.node_id))
    ray.get(actor.check_integrity.remote(), timeout=30)
    assert ray.get(actor.ping.remote(), timeout=30) == found.incarnation


def is_over(at_s: float) -> bool:
    return time.monotonic() >= at_s


def test_a_spot_notice_saves_the_blocks_before_the_deadline(town: Town) -> None:
    worker = town.move_in()
    wanted = [worker.store(number) for number in range(10, 14)]
    until("all are stored", lambda: all(here(worker, one) for one in wanted))
    began_s = time.monotonic()
    town.metadata.announce("terminate", datetime.now(UTC) + timedelta(seconds=NOTICE_S))
    until("the node is to go", lambda: worker.node_id in gcs_state.get_draining_nodes(), 20.0)
    seen_s = time.monotonic() - began_s
    until("all are on the other node", lambda: all(here(town.head, one) for one in wanted), NOTICE_S)
    saved_s = time.monotonic() - began_s
    print(f"\nspot notice: draining after {seen_s:.1f} s, saved after {saved_s:.1f} s of {NOTICE_S} s")
    assert saved_s < NOTICE_S
    deadline_ms = gcs_state.get_draining_nodes()[worker.node_id]
    assert abs(deadline_ms / 1000 - time.time() - (NOTICE_S - saved_s)) < LATE_S
    assert worker.stats().draining
    assert worker.stats().drained.get("failed", 0) == 0
    assert town.has_actor(), "whoever still works there has its tiers"


def test_a_node_that_dies_costs_others_their_deadline_and_then_nothing(town: Town) -> None:
    gone = town.raylet.node_id
    wanted = town.head.store(20)
    absent = lookup_of(wanted)
    absent = Lookup(absent.namespace, bytes(len(absent.keys)), absent.tenant, absent.session, (gone,))

    def look() -> float:
        began_s = time.monotonic()
        ray.get(town.head.actor.lookup.remote(absent), timeout=60)
        return time.monotonic() - began_s

    def is_left_alone() -> bool:
        took_s.append(look())
        return bool(town.head.stats().peers[gone].state == "open")

    look()
    town.cluster.remove_node(town.raylet, allow_graceful=False)
    took_s = [look()]
    until("it is left alone", is_left_alone, 60.0)
    assert max(took_s) < town.settings.peer.lookup_s_max + LATE_S
    shut_s = look()
    print(f"\na dead node: lookups of {', '.join(f'{s:.3f}' for s in took_s)} s, then {shut_s:.3f} s")
    assert shut_s < LATE_S
    town.head.check()
