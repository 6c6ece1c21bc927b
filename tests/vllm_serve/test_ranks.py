"""vLLM on two ranks, tensor parallel and pipeline parallel: the same greedy text, and each stores its own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.engines.tiny_models import make_tiny_model
from tests.support.services.tier_service import MIB
from tests.vllm_serve.conftest import EngineService, flags, start

TOKENS = 320
PARALLEL: Mapping[str, Mapping[str, object]] = {
    "alone": {},
    "tensor": {"engine.tensor-parallel": 2},
    "pipeline": {
        "engine.vllm.options": json.dumps(
            # Not `enforce_eager`: vLLM's CPU worker has no tensors for a stage's input then.
            {"pipeline_parallel_size": 2, "compilation_config": {"mode": 2, "backend": "eager"}}
        ),
    },
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def ask(service: EngineService) -> tuple[str, Mapping[str, int]]:
    """A greedy answer, and where its prompt came from."""
    ids = random.Random(7).choices(range(10, 500), k=TOKENS)
    said = service.openai().completions.create(
        model="tiny", prompt=ids, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    assert said.usage is not None
    assert said.usage.prompt_tokens_details is not None
    return said.choices[0].text, (said.usage.prompt_tokens_details.model_extra or {})["cached_tokens_by_tier"]


def test_two_ranks_tell_what_one_tells_and_find_what_they_have_stored(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", "llama", hidden=512, q_heads=8, kv_heads=4)
    texts = {}
    for name, parallel in PARALLEL.items():
        given = flags(
            "vllm",
            **{
                "model.path": str(model),
                "cluster.replicas": 1,
                "engine.pool-bytes-max": 16 * MIB,
                "tiers.nvme.dir": tmp_path / "kv",  # of all: what others have stored is not theirs
                **parallel,
            },
        )
        for found in (0, TOKENS - 32):
            service = start(tmp_path / name, given, has_keys=False)
            try:
                assert len(service.pids_of("VLLM::Worker")) == (1 if name == "alone" else 2)
                text, by_tier = ask(service)
                assert sum(by_tier.values()) == by_tier["nvme"] == found, (name, by_tier)
                assert texts.setdefault(name, text) == text
                service.settled()
            finally:
                assert service.stop() == 0, service.text
    assert set(texts.values()) == {texts["alone"]}, texts
