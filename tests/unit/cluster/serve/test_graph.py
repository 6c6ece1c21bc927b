"""What Serve is told of the replicas, without Ray running."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from samovar.cluster.engines import VllmPython
from samovar.cluster.serve import graph, preflight
from samovar.cluster.serve.preflight import StartFailed, check_gpus
from samovar.configs.cluster import AutoscalingSettings, ClusterSettings
from samovar.configs.imports import OWN_PYTHON
from samovar.configs.settings import EngineSettings, Settings
from samovar.replicas.messages import ModelRefused
from tests.support.inside import deployment_of


def settings_of(ranks: int, device: str = "cuda", **cluster: Any) -> Settings:
    engine = EngineSettings(tensor_parallel=ranks, kv_groups=ranks, device=device)
    return Settings(engine=engine, cluster=ClusterSettings(**cluster))


def placed(settings: Settings) -> Any:
    """What Serve makes of the deployment: it refuses what does not fit together."""
    deployment = deployment_of(graph.build_model_app(settings, None, 2))
    return deployment._replica_config


def test_a_replica_on_one_gpu_has_no_placement_group() -> None:
    config = placed(settings_of(1, replicas_per_node_max=3))
    assert config.placement_group_bundles is None
    assert (config.max_replicas_per_node, config.ray_actor_options["num_gpus"]) == (3, 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("scaling", [False, True])
def test_a_replica_on_several_gpus_reserves_them_all_on_one_node(ranks: int, scaling: bool) -> None:
    settings = settings_of(
        ranks,
        replica_cpus=3,
        replica_resources={"kv_nvme": 1.0},
        replicas_per_node_max=3,  # as `samovar up` says it
        autoscaling=AutoscalingSettings(enabled=scaling),
    )
    config = placed(settings)
    assert config.placement_group_bundles == [{"GPU": 1.0, "CPU": 3.0, "kv_nvme": 1.0}] + [{"GPU": 1.0}] * (
        ranks - 1
    )
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.max_replicas_per_node is None
    assert config.ray_actor_options["num_gpus"] == 1


@pytest.mark.parametrize(("cpus", "each"), [(0, graph.RANK_CPUS), (2, 2)])
def test_ranks_without_gpus_reserve_cpus(cpus: float, each: float) -> None:
    config = placed(settings_of(2, "cpu", replica_cpus=cpus))
    assert config.placement_group_bundles == [{"CPU": each}, {"CPU": each}]


def test_gpus_are_counted_not_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpus_seen", lambda *of: 4)
    check_gpus(settings_of(2, replicas=2))
    check_gpus(settings_of(1, replicas=4))
    with pytest.raises(StartFailed, match=r"replicas=3 needs 6 GPUs \(engine.tensor_parallel=2\).* has 4"):
        check_gpus(settings_of(2, replicas=3))
    with pytest.raises(StartFailed, match="replicas=5 needs as many GPUs, but this machine has 4"):
        check_gpus(settings_of(1, replicas=5))
    monkeypatch.setattr(preflight, "gpus_seen", lambda *of: 0)
    with pytest.raises(ModelRefused, match="torch sees no CUDA device"):
        check_gpus(settings_of(1, replicas=1))


def test_a_replica_of_vllm_has_its_interpreter_and_all_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts its ranks itself: one actor, no bundles. What that starts is told which Python is ours."""
    found = VllmPython(Path("/v/bin/python"), Path("/v/path"), "0.32.0", "2.60.0")
    monkeypatch.setattr(graph, "vllm_python", lambda settings: found)
    monkeypatch.setattr(preflight, "chosen_python", lambda settings: found.python)
    asked = list[object]()
    monkeypatch.setattr(preflight, "gpus_seen", lambda *of: 7 + len([asked.append(of)]))
    settings = Settings.model_validate({"engine": {"kind": "vllm", "tensor_parallel": 4}})
    config = placed(settings)
    assert config.placement_group_bundles is None
    assert config.ray_actor_options["num_gpus"] == 4
    environment = config.ray_actor_options["runtime_env"]
    assert environment["py_executable"] == "/v/bin/python"
    assert environment["env_vars"] == {"PYTHONPATH": "/v/path", OWN_PYTHON: sys.executable}
    assert asked == [(found.python,)], "its torch is asked, not ours"
    assert "runtime_env" not in placed(Settings()).ray_actor_options
