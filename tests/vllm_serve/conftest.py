"""A real service of two replicas, each a real vLLM on one core, in float32."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.test_rollout import Rolling
from tests.support.services.tier_service import ADMIN_KEY, MIB

ENVIRONMENT = os.environ.get("TESTS_VLLM_SERVE")
collect_ignore_glob = [] if ENVIRONMENT else ["test_*.py"]
"""`make test-vllm-serve` names the environment's Python; other targets leave these files out."""

KEYS = {name: f"key-of-tenant-{name}" for name in ("red", "green")}
POOL_BYTES = 80 * MIB
"""About 1,800 tokens of SmolLM2-135M in float32: one long prompt overruns it."""


def flags(**more: object) -> dict[str, object]:
    """Settings of a service of vLLM replicas, small enough for two cores."""
    own = {
        "model.dtype": "float32",
        "engine.kind": "vllm",
        "engine.vllm.python": ENVIRONMENT,
        "engine.vllm.options": json.dumps({"enforce_eager": True}),
        "engine.threads": 1,
        "engine.sequences-max": 8,
        "engine.pool-bytes-max": POOL_BYTES,
        "tiers.cpu.bytes-max": 512 * MIB,
        "cluster.replicas": 2,
        "router.heartbeat-s": 1,
        "router.stall-s": 10,
        "server.start-timeout-s": 600,
    }
    return own | more


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1500))  # a service starts within the first test


class VllmService(Rolling):
    """A service of vLLM replicas, with two tenants."""

    def core_pids(self) -> list[int]:
        """The processes in which vLLM's engines compute."""
        return self.pids_of("EngineCore")


def start(folder: Path, given: Mapping[str, object], *, has_keys: bool = True) -> VllmService:
    """Start a service and wait until it serves. `has_keys`: of two tenants and an administrator."""
    env = {
        "SAMOVAR_AUTH__API_KEYS": json.dumps(KEYS),
        "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY,
    }
    service = VllmService(folder, given, env=env if has_keys else None, key=ADMIN_KEY if has_keys else None)
    service.wait_ready()
    return service


ADAPTER = "tea-tuned"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the model, of random numbers that are large enough to be heard."""
    made, width, rank = tmp_path_factory.mktemp("adapter"), 576, 8
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (made / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    draws, tensors = torch.Generator().manual_seed(1), {}
    for layer in range(30):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{at}.lora_A.weight"] = torch.randn(rank, width, generator=draws)
        tensors[f"{at}.lora_B.weight"] = torch.randn(width, rank, generator=draws) / 16
    save_file(tensors, made / "adapter_model.safetensors")
    return made


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[VllmService]:
    own = flags(**{"engine.vllm.adapters": json.dumps({ADAPTER: str(adapter)})})
    service = start(tmp_path_factory.mktemp("vllm-serve"), own)
    try:
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.text
