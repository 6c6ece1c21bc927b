"""What a pod does before Kubernetes stops it, in a real Ray: its blocks are saved, or time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import state as gcs_state

from samovar.cluster.manifests.prestop import leave, still_here
from samovar.configs.sections import MIB, CpuTierSettings, NvmeTierSettings, PeerSettings, TierSettings
from tests.support.services.service import until
from tests.support.services.two_nodes import ROOT, Node, start_node, two_raylets

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Node, Node]]:
    """The cluster, the head's node and the worker's; on each a replica lives, a `Stand`."""
    folder: Path = tmp_path_factory.mktemp("prestop")
    settings = TierSettings(
        cpu=CpuTierSettings(bytes_max=64 * MIB),
        nvme=NvmeTierSettings(bytes_max=0),
        # Two cores for all of it: what is late here is not what is tested.
        peer=PeerSettings(lookup_s_max=20.0, pull_s_max=30.0),
    )
    with two_raylets() as cluster:
        head, worker = sorted(cluster.list_all_nodes(), key=lambda node: not node.is_head())
        nodes = [start_node(one, settings, folder / one.node_id) for one in (head, worker)]
        yield cluster, nodes[0], nodes[1]


def test_f27_a_pod_waits_for_its_replica_and_its_blocks(world: Any) -> None:
    _, head, worker = world
    assert still_here("ab" * 28) == "", "a node that nobody lives on"
    wanted = worker.store(1)
    until("it is stored", lambda: worker.look(wanted).spans)
    with ThreadPoolExecutor() as pool:
        left = pool.submit(leave, worker.node_id, 120.0)
        until("Serve and the tiers can see it", lambda: worker.node_id in gcs_state.get_draining_nodes())
        until("the blocks are on the other node", lambda: head.look(wanted).spans, 60.0)
        assert still_here(worker.node_id) == "Stand"
        assert not left.done(), "a replica that finishes its answers is waited for"
        late = worker.store(2)  # what it hands over is the last that it does
        until("it is stored, or saved already", lambda: worker.look(late).spans)
        ray.kill(worker.stand)
        assert left.result(timeout=60)
        assert head.look(late).spans
    assert still_here(worker.node_id) == ""
    assert worker.stats().drained["left"] == 0
    head.check()


def test_its_time_is_bounded_and_ray_is_asked_from_within_the_pod(world: Any) -> None:
    cluster, head, _ = world
    done = subprocess.run(
        [sys.executable, "-m", "samovar.cluster.manifests.prestop", "2"],
        env={**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "waiting for Stand" in done.stderr
    assert "the node is stopped as it is" in done.stderr
    assert head.node_id in gcs_state.get_draining_nodes()


def test_without_a_head_it_ends_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "samovar.cluster.manifests.prestop", "2"],
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGALRM
