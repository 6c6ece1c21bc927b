"""Requests as real clients make them: credentials, content types, lengths, usage in streams, many at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from samovar.replicas.messages import Admitted, Delta, GenerateRequest
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import (
    CONTEXT,
    KEY,
    MODEL,
    OTHER_KEY,
    TOKENIZER,
    House,
    chat,
    error_of,
    make_settings,
    until,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
KEYS = {"alpha": KEY, "beta": OTHER_KEY}
PREFLIGHT = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}


@pytest.mark.parametrize(
    ("path", "body", "continues"),
    [
        (COMPLETIONS, {"prompt": "The capital of France is"}, True),
        (CHAT, {"messages": [{"role": "user", "content": "u"}]}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "u"}]}, False),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": "I am"}]}, True),
    ],
)
async def test_a_replica_is_told_which_answers_continue_a_text(
    path: str, body: dict[str, Any], continues: bool
) -> None:
    house = House()
    async with house.client() as client:
        answered = await client.post(path, json={"model": MODEL, "max_tokens": 4, **body})
    assert answered.status_code == 200, answered.text
    (ask,) = house.replicas.calls
    assert ask.sampling.continues_text is continues


# Credentials ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": "Bearer unused-by-the-proxy"}, 200),
        ({"x-api-key": "unused", "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": "Basic dXNlcjpwYXNz"}, 200),
        ({"x-api-key": "", "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {OTHER_KEY}"}, 401),
        ({"x-api-key": "sk-wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": KEY}, 401),
        ({}, 401),
    ],
    ids=str,
)
async def test_a_key_comes_in_either_header(headers: dict[str, str], status: int) -> None:
    house = House(settings=make_settings(keys=KEYS))
    async with house.client(**headers) as client:
        response = await client.get("/v1/models")
    assert response.status_code == status
    if status == 401:
        assert KEY not in response.text
        assert error_of(response)["code"] == "invalid_api_key"


async def test_two_x_api_keys_are_refused() -> None:
    house = House(settings=make_settings(keys=KEYS))
    async with house.client() as client:
        twice = httpx.Headers([("x-api-key", KEY), ("x-api-key", KEY)])
        assert (await client.get("/v1/models", headers=twice)).status_code == 401


async def test_a_preflight_carries_no_key_and_gets_nothing() -> None:
    house = House(settings=make_settings(keys=KEYS))
    async with house.client() as client:
        allowed = await client.options(CHAT, headers=PREFLIGHT)
        assert (allowed.status_code, allowed.content) == (204, b"")
        assert not [name for name in allowed.headers if name.startswith("access-control")]
        assert (await client.options(CHAT)).status_code == 401, "not a preflight"
        assert (await client.post(CHAT, json=chat(), headers=PREFLIGHT)).status_code == 401
    async with House().client() as client:  # without keys foreign pages are refused, as ever
        foreign = await client.options(CHAT, headers={**PREFLIGHT, "origin": "http://evil.example"})
        assert foreign.status_code == 403
        assert (await client.options(CHAT, headers=PREFLIGHT)).status_code == 403, "another port's page"
        own = {**PREFLIGHT, "origin": str(client.base_url)}
        assert (await client.options(CHAT, headers=own)).status_code == 204


# Content types -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain;charset=UTF-8", 415),
        ("application/xml", 415),
    ],
)
async def test_a_body_that_is_not_called_json_is_415(content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with House().client() as client:
        for path, body in ((CHAT, chat()), ("/tokenize", {"prompt": "x"})):
            response = await client.post(path, content=json.dumps(body).encode(), headers=headers)
            assert response.status_code == status, path
            if status == 415:
                error = error_of(response)
                assert error["code"] == "unsupported_media_type"
                assert "Content-Type: application/json" in error["message"]


async def test_a_415_does_not_wait_for_the_body() -> None:
    never = asyncio.Event()

    async def silent() -> Any:
        yield b""
        await never.wait()

    async with House().client() as client, asyncio.timeout(5):
        headers = {"content-type": "application/x-www-form-urlencoded"}
        response = await client.post(CHAT, content=silent(), headers=headers)
    assert response.status_code == 415


async def test_an_empty_form_is_no_form() -> None:
    """`curl -X POST -d ''` sends one where there is nothing to say."""
    house = House()
    async with house.client() as client:
        headers = {"content-type": "application/x-www-form-urlencoded", "content-length": "0"}
        assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == 200


# Lengths -------------------------------------------------------------------------------------


async def test_completions_default_to_16_tokens_or_what_is_left() -> None:
    house = House()
    async with house.client() as client:
        for prompt in (3, CONTEXT - 5, CONTEXT - 1):
            body = {"model": MODEL, "prompt": [5] * prompt}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        await client.post(COMPLETIONS, json={"model": MODEL, "prompt": [5] * 3, "max_tokens": -1})
        await client.post(CHAT, json=chat(max_tokens=-1))
    lengths = [call.sampling.max_tokens for call in house.replicas.calls]
    chat_prompt = len(house.replicas.calls[-1].prompt_token_ids)
    assert lengths == [16, 5, 1, CONTEXT - 3, CONTEXT - chat_prompt]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_computes_the_prompt_and_says_nothing(stream: bool) -> None:
    house = House(lambda request: say(["secret"]))
    async with house.client() as client:
        response = await client.post(CHAT, json=chat(max_tokens=0, stream=stream, logprobs=True))
        plain = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "p", "max_tokens": 0})
    assert response.status_code == 200
    assert "secret" not in response.text + plain.text
    if not stream:
        (choice,) = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        assert response.json()["usage"]["completion_tokens"] == 0
    assert {call.sampling.max_tokens for call in house.replicas.calls} == {1}


@pytest.mark.parametrize(("keep", "kept"), [(5, 5), (10**6, 40), (-1, 40)])
async def test_a_prompt_is_cut_to_its_last_tokens(keep: int, kept: int) -> None:
    house = House()
    ids = list(range(10, 50))
    async with house.client() as client:
        body = {"model": MODEL, "prompt": ids, "truncate_prompt_tokens": keep, "echo": True, "max_tokens": 4}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        text = TOKENIZER.decode(ids[-kept:], skip_special_tokens=False)
        assert answer["choices"][0]["text"] == text + "Hello"
        long = {"model": MODEL, "prompt": "ab " * 5000, "truncate_prompt_tokens": -1, "max_tokens": 10}
        assert (await client.post(COMPLETIONS, json=long)).status_code == 200
        await client.post(CHAT, json=chat("word " * 5000, truncate_prompt_tokens=7))
    prompts = [call.prompt_token_ids for call in house.replicas.calls]
    assert prompts[0] == ids[-kept:]
    assert len(prompts[1]) == CONTEXT - 10
    assert len(prompts[2]) == 7


# Where a chat's prompt ends ------------------------------------------------------------------


async def test_the_final_message_is_continued_and_not_closed() -> None:
    house = House()
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    async with house.client() as client:
        for fields in (
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
            {"add_generation_prompt": False},
            {},
        ):
            response = await client.post(CHAT, json={"model": MODEL, "messages": messages, **fields})
            assert response.status_code == 200, response.text
    texts = [
        TOKENIZER.decode(call.prompt_token_ids, skip_special_tokens=False) for call in house.replicas.calls
    ]
    assert texts[0] == texts[1]
    assert texts[0].endswith("assistant\none, two")
    assert texts[2].endswith("one, two<|im_end|>\n")
    assert texts[3].endswith("<|im_start|>assistant\n")


# Usage in streams ----------------------------------------------------------------------------


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def script_of_many(request: GenerateRequest) -> Script:
    return [
        Admitted("replica-1", 16, 0.0),
        Delta(0, "a", (1,)),
        Delta(0, "", (2,)),  # inside a character
        Delta(0, "é", (3, 4)),
        Delta(0, "z", (5,), finish_reason="stop"),
    ]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("continuous", [None, False, True])
@pytest.mark.parametrize("include", [None, False, True])
async def test_usage_comes_as_asked_and_counts_each_token_once(
    path: str, include: bool | None, continuous: bool | None
) -> None:
    options = {"include_usage": include, "continuous_usage_stats": continuous}
    body: dict[str, Any] = {"model": MODEL, "stream": True, "stream_options": options}
    body |= {"prompt": "p"} if path == COMPLETIONS else {"messages": chat()["messages"]}
    async with House(script_of_many).client() as client:
        events = events_of(await client.post(path, json=body))
    if not include:
        assert not any("usage" in event for event in events)
        return
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    begin = [] if path == COMPLETIONS else [0]  # the role
    assert counts == ([*begin, 1, 4, 5, 5] if continuous else [])
    assert all("usage" in chunk for chunk in chunks)


# Many at once --------------------------------------------------------------------------------


async def test_without_keys_two_hundred_chats_are_not_one_users_thirty_two() -> None:
    gate = asyncio.Event()
    house = House(lambda request: [gate, *say(["x"])])
    async with house.client() as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=chat(f"chat {n}"))) for n in range(200)]
        await until(lambda: house.replicas.open == 200 or any(task.done() for task in tasks))
        gate.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}


async def test_without_keys_the_limit_of_the_whole_server_holds() -> None:
    gate = asyncio.Event()
    settings = make_settings(limits={"concurrent_total": 3})
    house = House(lambda request: [gate, *say(["x"])], settings=settings)
    async with house.client() as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(3)]
        await until(lambda: house.replicas.open == 3)
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 429
        assert "API key" not in error_of(refused)["message"]
        gate.set()
        await asyncio.gather(*tasks)


async def test_a_service_that_stops_says_so() -> None:
    house = House()
    async with house.client() as client:
        house.service.readiness.drain()
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 503
        assert "stopping" in error_of(response)["message"]
