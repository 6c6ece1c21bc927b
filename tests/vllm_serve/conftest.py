"""Real services of two replicas on two cores, in float32: of our engine, and of real vLLMs.

The tests are the same for both. What differs is listed in `differences.py`, and a test that depends on it
says on which row: `@differs("erasing")`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.test_rollout import Rolling
from tests.support.services.guests import Conversation
from tests.support.services.service import MODEL, until
from tests.support.services.tier_service import ADMIN_KEY, MIB
from tests.vllm_serve.differences import DIFFERENCES

ENVIRONMENT = os.environ.get("TESTS_VLLM_SERVE")
collect_ignore_glob = [] if ENVIRONMENT else ["test_*.py"]
"""`make test-vllm-serve` names the environment's Python; other targets leave these files out."""

Engine = Literal["ours", "vllm"]
ENGINES: tuple[Engine, ...] = ("ours", "vllm")
KEYS = {name: f"key-of-tenant-{name}" for name in ("red", "green")}
RED, GREEN = KEYS["red"], KEYS["green"]
POOL_BYTES = 80 * MIB
"""About 1,800 tokens of SmolLM2-135M in float32: one long prompt overruns it."""
START_S = 300.0
OF_VLLM: Mapping[str, object] = {
    "engine.kind": "vllm",
    "engine.vllm.python": ENVIRONMENT,
    "engine.vllm.options": json.dumps({"enforce_eager": True}),
}


def flags(engine: Engine, **more: object) -> dict[str, object]:
    """Settings of a service, small enough for two cores."""
    own: dict[str, object] = {
        "model.dtype": "float32",
        "engine.threads": 1,
        "engine.sequences-max": 8,
        "engine.pool-bytes-max": POOL_BYTES,
        "tiers.cpu.bytes-max": 512 * MIB,
        "cluster.replicas": 2,
        "router.heartbeat-s": 1,
        "router.stall-s": 10,
        "server.start-timeout-s": 600,
    }
    return own | (dict(OF_VLLM) if engine == "vllm" else {}) | more


def differs(row: str) -> Callable[[Any], Any]:
    """Mark a test that expects of each engine what a row of the differences says."""
    if row not in DIFFERENCES:
        raise ValueError(f"tests/vllm_serve/differences.py has no row {row!r}")
    return lambda test: test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1500))  # a service starts within the first test


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def talk(seed: int, key: str = RED, words: int = 80) -> Conversation:
    return Conversation(seed, turn_words=words, key=key)


class EngineService(Rolling):
    """A service of replicas of one engine, with two tenants."""

    engine: Engine

    @property
    def is_vllm(self) -> bool:
        return self.engine == "vllm"

    def core_pids(self) -> list[int]:
        """The processes in which the engines compute."""
        return self.pids_of("EngineCore") if self.is_vllm else self.replica_pids()

    def settled(self) -> None:
        """Wait until everything is stored."""

        def is_stored() -> bool:
            return not any(one["running"] + one["loading"] for one in self.stats()["replicas"])

        until("everything is stored", is_stored, 60)

    def forget_pages(self) -> None:
        """Have both pools forget what was in them, by asking other things."""

        def fill(number: int) -> None:
            drawn = random.Random(f"fill {number} {os.urandom(4).hex()}")
            ids = drawn.choices(range(1000, 40000), k=1500)
            self.openai(GREEN).completions.create(model=MODEL, prompt=ids, max_tokens=1, temperature=0)

        with ThreadPoolExecutor(4) as pool:  # several at once, so that none of the replicas is left out
            list(pool.map(fill, range(12)))


def start(
    folder: Path, given: Mapping[str, object], *, engine: Engine = "vllm", has_keys: bool = True
) -> EngineService:
    """Start a service and wait until it serves. `has_keys`: of two tenants and an administrator."""
    env = {
        "SAMOVAR_AUTH__API_KEYS": json.dumps(KEYS),
        "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY,
    }
    service = EngineService(folder, given, env=env if has_keys else None, key=ADMIN_KEY if has_keys else None)
    service.engine = engine
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


@pytest.fixture(scope="session", params=ENGINES)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, adapter: Path
) -> Iterator[EngineService]:
    engine: Engine = request.param
    own = {"engine.vllm.adapters": json.dumps({ADAPTER: str(adapter)})} if engine == "vllm" else {}
    service = start(tmp_path_factory.mktemp(f"serve-{engine}"), flags(engine, **own), engine=engine)
    try:
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.text


@pytest.fixture
def vllm(service: EngineService) -> EngineService:
    """A service of vLLM's: of what our engine has not."""
    if not service.is_vllm:
        pytest.skip("our engine has it not: differences.py")
    return service
