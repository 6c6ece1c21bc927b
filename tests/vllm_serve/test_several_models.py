"""Ours, vLLM's and an adapter of that at one address: named, listed, kept warm and erased by one front."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.tiny_models import make_tiny_model
from tests.support.services.service import MODEL, until
from tests.vllm_serve.conftest import ADAPTER, ENVIRONMENT, KEYS, POOL_BYTES, EngineService, start

TOY = "toy"
RED, GREEN = KEYS["red"], KEYS["green"]
TEXT = "A samovar keeps the tea hot for guests who come back for another cup. " * 6


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[EngineService]:
    """The model that vLLM serves has an adapter; ours is a toy of another family and tokenizer."""
    folder = tmp_path_factory.mktemp("several")
    toy = make_tiny_model(folder / "toy", "qwen3", seed=3, context=2048)
    given = {
        "model.dtype": "float32",
        "engine.threads": 1,
        "engine.pool-bytes-max": POOL_BYTES,
        "engine.fast-start": "true",
        "model.path": toy,
        "model.served-name": TOY,
        f"models.{MODEL}.model": MODEL,
        f"models.{MODEL}.engine": "vllm",
        f"models.{MODEL}.engine.vllm.python": ENVIRONMENT,
        f"models.{MODEL}.engine.vllm.options": json.dumps({"enforce_eager": True}),
        f"models.{MODEL}.engine.vllm.adapters": json.dumps({ADAPTER: str(adapter)}),
        f"models.{MODEL}.engine.sequences-max": 8,
        "tiers.cpu.bytes-max": 256 << 20,
        "server.start-timeout-s": 600,
    }
    service = start(folder, given)
    try:
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.text


def talk(service: EngineService, model: str, session: str, key: str = RED) -> list[dict[str, Any]]:
    """Two turns of a session."""
    client, found = service.openai(key), []
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    for _ in range(2):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=12,
            extra_body={"session_id": session},
        )
        found.append(answer.model_dump())
        said = answer.choices[0].message.content or ""
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "More?"}]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [one["choices"][0]["message"]["content"] for one in answers]


def test_two_engines_and_an_adapter_answer_at_one_address(service: EngineService) -> None:
    with service.http() as client:
        cards = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        health = client.get("/health").json()
        serving = {one["model_name"]: one for one in service.stats()["serving"]}
    assert (list(cards), cards[ADAPTER]["parent"]) == ([TOY, MODEL, ADAPTER], MODEL)
    assert health["models"] == {TOY: 1, MODEL: 1}
    assert serving[MODEL]["step"].startswith("vLLM ")
    assert not serving[TOY]["step"].startswith("vLLM ")
    said = {name: talk(service, name, "one for all") for name in (TOY, MODEL, ADAPTER)}
    for name, (first, second) in said.items():
        assert first["model"] == second["model"] == name
        assert cached(first) == 0, "blocks of another model"
        assert cached(second) >= 0.6 * first["usage"]["prompt_tokens"], second["usage"]
    assert len({texts(answers)[0] for answers in said.values()}) == 3
    assert texts(talk(service, MODEL, "alone")) == texts(said[MODEL])


def test_nobody_answers_for_an_unknown_model_and_other_tenants_find_nothing(service: EngineService) -> None:
    with service.http() as client:
        body = {"model": "nobody", "messages": [{"role": "user", "content": "Hi"}]}
        answer = client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {RED}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    for name in (TOY, MODEL, ADAPTER):
        talk(service, name, "red", RED)
        assert cached(talk(service, name, "green", GREEN)[0]) == 0


def test_a_deleted_session_is_gone_with_both_engines(service: EngineService) -> None:
    for name in (TOY, MODEL):
        talk(service, name, "to be forgotten")

    def deleted() -> dict[str, Any] | None:
        with service.http() as client:
            headers = {"authorization": f"Bearer {RED}"}
            answer = client.delete("/v1/sessions/to%20be%20forgotten", headers=headers)
        return answer.json() if answer.status_code == 200 else None

    done = until("all has been asked", deleted, 60)
    assert done is not None
    assert done["replicas"] == 2
    assert done["pages"] == "unreachable until overwritten, in 1 of 2 replicas"
