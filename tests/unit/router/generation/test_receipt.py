"""Receipts: what an answer says about where its prompt's KV came from."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from samovar.replicas.messages import Admitted, Delta, GenerateRequest, Receipt
from samovar.router.generation.answer import joined
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import MODEL, House, chat, make_settings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LOADED = Receipt(
    tokens={"compute": 5, "gpu": 16, "cpu": 32, "nvme": 0, "s3": 0, "peer": 0},
    decision="load",
    load_s=0.0031,
    load_bytes=4096,
    load_price_s=0.002,
    recompute_price_s=0.25,
    saved_s=0.2,
)


def loaded(request: GenerateRequest) -> Script:
    return say(["Hel", "lo"], cached=48, receipt=LOADED)


JSON = {
    "tokens": {"compute": 5, "gpu": 16, "cpu": 32, "nvme": 0, "s3": 0, "peer": 0},
    "decision": "load",
    "load_ms": 3.1,
    "recompute_ms_avoided": 200.0,
    "load_price_ms": 2.0,
    "recompute_price_ms": 250.0,
    "miss": None,
    "missed": None,
    "prefix": None,
    "replica": ["replica-1"],
    "request_id": "req-7",
}
NAMED = {"x-request-id": "req-7"}


def chunks_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_whole_answer_has_its_receipt() -> None:
    async with House(loaded).client(**NAMED) as client:
        response = await client.post(CHAT, json=chat())
    body = response.json()
    assert body["receipt"] == JSON
    details = body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 48
    assert details["cached_tokens_by_tier"] == {"gpu": 16, "cpu": 32, "nvme": 0, "s3": 0, "peer": 0}
    assert response.headers["x-cache"] == "hit; tokens=48; gpu=16; cpu=32; decision=load; load_ms=3.1"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_has_it_in_its_last_finish_chunk_and_in_the_usage_chunk(n: int) -> None:
    def script(request: GenerateRequest) -> Script:
        ends = [Delta(index, "x", (1,), finish_reason="stop") for index in range(request.n)]
        return [Admitted("replica-1", 48, 0.0, LOADED), *ends]

    async with House(script).client(**NAMED) as client:
        plain = await client.post(CHAT, json=chat(stream=True, n=n))
        options = {"include_usage": True}
        with_usage = await client.post(CHAT, json=chat(stream=True, n=n, stream_options=options))
    *before, last = chunks_of(plain.text)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["receipt"] == JSON
    assert not any("receipt" in chunk for chunk in before)
    *before, finish, usage = chunks_of(with_usage.text)
    assert (finish["receipt"], usage["receipt"], usage["choices"]) == (JSON, JSON, [])
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["cpu"] == 32
    assert not any("receipt" in chunk for chunk in before)
    assert plain.headers["x-cache"].startswith("hit; tokens=48; gpu=16; cpu=32; decision=load")


async def test_a_stream_whose_head_had_to_go_early_still_ends_with_the_receipt() -> None:
    """The prompt was still being computed when the silence had to be broken."""
    gate = asyncio.Event()
    house = House(lambda request: [gate, *loaded(request)], settings=make_settings(sse_keepalive_s=0.02))
    async with (
        house.server() as url,
        httpx.AsyncClient(headers=NAMED) as client,
        client.stream("POST", url + CHAT, json=chat(stream=True)) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            if ": ping" in text:
                gate.set()
    assert "x-cache" not in response.headers
    assert chunks_of(text)[-1]["receipt"] == JSON


async def test_several_prompts_make_one_receipt() -> None:
    recomputed = Receipt(
        tokens={"compute": 2, "s3": 16},
        decision="recompute",
        load_price_s=0.4,
        recompute_price_s=0.1,
        miss="late",
        missed={"late": 2},
    )

    def script(request: GenerateRequest) -> Script:
        return say(["x"], cached=0, receipt=LOADED if len(request.prompt_token_ids) == 1 else recomputed)

    async with House(script).client() as client:
        response = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": [[5], [6, 7]]})
    receipt = response.json()["receipt"]
    assert receipt["tokens"] == {"compute": 7, "gpu": 16, "cpu": 32, "nvme": 0, "s3": 16, "peer": 0}
    assert (receipt["decision"], receipt["miss"]) == ("load+recompute", "late")
    assert receipt["missed"] == {"late": 2}
    assert (receipt["load_ms"], receipt["recompute_ms_avoided"]) == (3.1, 200.0)
    assert (receipt["load_price_ms"], receipt["recompute_price_ms"]) == (400.0, 250.0)
    assert response.headers["x-cache"].startswith("hit; tokens=64; gpu=16; cpu=32; s3=16; decision=load+rec")


def test_decisions_that_are_the_same_or_none_are_said_once() -> None:
    none = Receipt(tokens={"compute": 1})
    assert joined([(none, 1, 0), (none, 1, 0)], []).decision == "none"
    assert joined([(none, 1, 0), (LOADED, 1, 0), (LOADED, 1, 0)], []).decision == "load"
    assert joined([(none, 1, 0)], []).header() == "miss"
    late = Receipt(tokens={"compute": 1}, decision="recompute", miss="late")
    assert joined([(late, 1, 0)], []).header() == "miss; decision=recompute"
    assert joined([(late, 1, 0)], []).json()["miss"] == "late"


async def test_sources_are_counted_once_a_request() -> None:
    async with House(loaded).client() as client:
        await client.post(CHAT, json=chat())
        await client.post(CHAT, json=chat(stream=True))
        text = (await client.get("/metrics")).text
    assert 'samovar_tokens_total{source="cpu"} 64.0' in text
    assert 'samovar_tokens_total{source="compute"} 10.0' in text
    assert "samovar_prompt_tokens_total 106.0" in text
    assert 'samovar_ttft_seconds_count{cache="hit"} 2.0' in text
