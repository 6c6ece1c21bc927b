"""Blocks between two raylets of one machine: over NIXL, by Ray where that is broken, from S3 at the end.

With Ray's variables for TLS in the environment (`test_two_nodes_tls.py`) TLS of our own takes NIXL's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.messages import Fetched, FetchFailed
from samovar.configs.sections import MIB, CpuTierSettings, NvmeTierSettings, PeerSettings, TierSettings
from samovar.configs.tls import node_tls
from tests.support.nodes.node_harness import TENANT
from tests.support.services.rclone import s3_server
from tests.support.services.service import until
from tests.support.services.two_nodes import (
    GET_S,
    Node,
    break_link,
    digest,
    nixl_cpu_share,
    session_of,
    start_node,
    two_raylets,
)

pytestmark = pytest.mark.timeout(300)
WAY = "nixl" if node_tls() is None else "tls"
WITH_NIXL = pytest.mark.skipif(WAY != "nixl", reason="UCX has no TLS, so NIXL is left out")
DRAIN_REASON = 2  # DRAIN_NODE_REASON_PREEMPTION: is always accepted


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Node]]]:
    """The cluster and its two nodes, the head's first."""
    folder: Path = tmp_path_factory.mktemp("two")
    with s3_server(folder / "s3") as s3, two_raylets() as cluster:
        settings = TierSettings(
            cpu=CpuTierSettings(bytes_max=64 * MIB),
            nvme=NvmeTierSettings(bytes_max=0),
            s3=s3,
            # Two cores for all of it: what is late here is not what is tested.
            peer=PeerSettings(lookup_s_max=20.0, pull_s_max=30.0),
        )
        raylets = sorted(cluster.list_all_nodes(), key=lambda node: not node.is_head())
        yield cluster, [start_node(one, settings, folder / f"kv{n}") for n, one in enumerate(raylets)]


def bring(taker: Node, giver: Node, number: int, nbytes: int = MIB) -> None:
    wanted = giver.store(number, nbytes)
    (span,) = until("it is stored", lambda: taker.look(wanted, giver.node_id).spans)
    assert (span.tier, span.node) == ("peer", giver.node_id)
    reply, came = taker.fetch(wanted, span)
    assert isinstance(reply, Fetched), reply
    assert reply.tier == "peer"
    assert reply.is_kept
    assert came == digest(wanted.record), "other bytes arrived than were stored"
    assert taker.look(wanted, giver.node_id).spans[0].tier == "cpu"
    taker.check()
    giver.check()


def test_blocks_come_in_both_directions_at_once(world: Any) -> None:
    _, (first, second) = world
    bring(second, first, 1)
    bring(first, second, 2, 4 * MIB)
    for taker, giver in ((second, first), (first, second)):
        stats = taker.stats()
        assert stats.transport == WAY
        assert stats.peers[giver.node_id].pulls == {WAY: 1}
        assert stats.peers[giver.node_id].bad == {}
        assert stats.moves["peer>cpu:committed"] == 1


def test_what_was_cleared_here_does_not_come_back_from_there(world: Any) -> None:
    _, (first, second) = world
    wanted = first.store(3)
    (span,) = until("it is stored", lambda: second.look(wanted, first.node_id).spans)
    ray.get(second.actor.clear.remote(Clear(TENANT, session_of(3))), timeout=GET_S)
    reply, _ = second.fetch(wanted, span)
    assert isinstance(reply, FetchFailed)
    assert second.look(wanted).spans == ()


def test_sessions_are_told(world: Any) -> None:
    _, (first, _) = world
    wanted = first.store(4)
    until("it is stored", lambda: first.look(wanted).spans)
    rows = ray.get(first.actor.sessions.remote(1), timeout=GET_S)
    assert [(row.tenant, row.session) for row in rows] == [(TENANT, session_of(4))]
    held = ray.get(first.actor.session_bytes.remote(TENANT, [session_of(4), session_of(99)]), timeout=GET_S)
    assert held == {session_of(4): rows[0].nbytes, session_of(99): {}}
    assert held[session_of(4)]["cpu"] > MIB


@WITH_NIXL
def test_idle_nodes_burn_no_core_in_nixl(world: Any) -> None:
    """Both have their links open from the tests before."""
    _, nodes = world
    for node in nodes:
        assert node.stats().transport == "nixl"
        share = ray.get(node.actor.__ray_call__.remote(nixl_cpu_share), timeout=GET_S)
        assert share < 0.03, f"{share:.1%} of a core"


def test_f10_where_the_link_breaks_ray_carries_the_blocks(world: Any) -> None:
    _, (first, second) = world
    ray.get(second.actor.__ray_call__.remote(break_link), timeout=GET_S)
    bring(second, first, 5)
    stats = second.stats()
    assert stats.peers[first.node_id].pulls["ray"] == 1
    assert stats.transport.startswith("ray: ")


def test_f27_a_node_that_is_drained_saves_its_blocks_and_they_outlive_it(world: Any) -> None:
    cluster, (first, second) = world
    wanted = second.store(6)
    until("it is stored", lambda: second.look(wanted).spans)
    GcsClient(cluster.address).drain_node(second.node_id, DRAIN_REASON, "a test", 0)
    stats = until("the drain is over", lambda: drained(second))
    assert stats.draining
    assert stats.drained["s3"] >= 1
    assert stats.drained.get("failed", 0) == stats.drained["left"] == 0
    cluster.remove_node(second.raylet, allow_graceful=False)

    def in_s3() -> Any:
        """Looking for it there shows, some day, that the node is gone; then S3 is looked through."""
        return [span for span in first.look(wanted, second.node_id).spans if span.tier == "s3"]

    (span,) = until("S3 was looked through", in_s3, 60.0)
    reply, came = first.fetch(wanted, span)
    assert isinstance(reply, Fetched), reply
    assert came == digest(wanted.record)
    first.check()


def drained(node: Node) -> Any:
    stats = node.stats()
    return stats if "left" in stats.drained else None
