"""What runs in the place of Ray's agents: it ends with the raylet, and only agents are replaced."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ray._private import node as ray_node
from ray._private import ray_constants
from ray._private import services as ray_services

from samovar.cluster.serve import ray_cluster
from samovar.cluster.serve.ray_cluster import AGENT_PORTS, WAIT_FOR_RAYLET, EnvironmentNode, ServingNode

WITHIN_S = 60.0

AGENTS = ServingNode.waiting


def test_what_waits_ends_with_the_pipe_that_the_raylet_holds() -> None:
    command = [*WAIT_FOR_RAYLET, "/ray/dashboard/agent.py", "--node-id=1"]  # as Ray puts it together
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdin is not None
        assert waiting.stdout is not None
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.2)
        waiting.stdin.close()
        assert waiting.wait(WITHIN_S) == 0
        assert waiting.stdout.read() == b""
    assert not any(" " in word or '"' in word for word in WAIT_FOR_RAYLET[1:])


@pytest.mark.parametrize("kind", [ServingNode, EnvironmentNode])
def test_only_agents_are_replaced_and_only_while_the_raylet_starts(
    kind: type[ServingNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = ray_services._build_python_executable_command_memory_profileable
    kept: dict[str, int] = {}
    seen: dict[str, Any] = {}

    def start_raylet(_node: object, *args: object, **options: object) -> None:
        seen.update(args=args, options=options, ports=dict(kept), pipe=os.environ.get(pipe))
        for component in (*AGENTS, ray_constants.PROCESS_TYPE_DASHBOARD):
            build = ray_services._build_python_executable_command_memory_profileable
            seen[component] = build(component, str(tmp_path))
        raise RuntimeError("planted")

    pipe = ray_cluster.AGENTS_HOLD_A_PIPE
    monkeypatch.setenv(pipe, "0")
    monkeypatch.setattr(ray_node.Node, "start_raylet", start_raylet)
    monkeypatch.setattr(
        ray_cluster, "persist_port", lambda _dir, _node, name, port: kept.update({name: port})
    )
    node = object.__new__(kind)
    node._session_dir, node._node_id = str(tmp_path), "a node"
    with pytest.raises(RuntimeError, match="planted"):
        node.start_raylet("plasma", object_store_memory=1)
    assert (seen["args"], seen["options"]) == (("plasma",), {"object_store_memory": 1})
    assert seen["ports"].keys() == (AGENT_PORTS if kind is EnvironmentNode else ServingNode.ports).keys()
    assert seen["pipe"] == "1"
    for component in (*AGENTS, ray_constants.PROCESS_TYPE_DASHBOARD):
        is_real = component not in kind.waiting
        assert seen[component] == (builder(component, str(tmp_path)) if is_real else WAIT_FOR_RAYLET)
    assert ray_services._build_python_executable_command_memory_profileable is builder
