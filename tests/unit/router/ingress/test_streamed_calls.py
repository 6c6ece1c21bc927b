"""Calls while they are written, over the three APIs: token by token, cut, resumed, by the official client."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from samovar.replicas.messages import Delta, GenerateRequest
from samovar.router.routing.replica_client import ReplicaLost
from tests.support.amounts import examples
from tests.support.router.fake_replica import Script, Step
from tests.support.router.router_harness import MODEL, House, chat, spoken

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FUNCTION: dict[str, Any] = {"name": "note", "parameters": SCHEMA}
ARGUMENTS = json.dumps({"text": " ".join(f"w{at % 97} </tool_call>" for at in range(80))})
CALL = f'<tool_call>\n{{"name": "note", "arguments": {ARGUMENTS}}}\n</tool_call>'
GAP_TOKENS = 3


def body(path: str, *, promised: bool = True, **fields: Any) -> dict[str, Any]:
    """A request that promises a call, or only allows it."""
    if path == "/v1/messages":
        tools = [{"name": "note", "input_schema": SCHEMA}]
        choice: dict[str, Any] = {"tool_choice": {"type": "tool", "name": "note"}} if promised else {}
        return {**chat("u"), "max_tokens": 600, "tools": tools, **choice, **fields}
    if path == "/v1/responses":
        choice = {"tool_choice": {"type": "function", "name": "note"}} if promised else {}
        functions = [{"type": "function", **FUNCTION, "strict": False}]
        return {"model": MODEL, "input": "u", "tools": functions, **choice, **fields}
    choice = {"tool_choice": {"type": "function", "function": {"name": "note"}}} if promised else {}
    return {**chat("u"), "tools": [{"type": "function", "function": FUNCTION}], **choice, **fields}


async def asked(house: House, path: str, **fields: Any) -> dict[str, Any]:
    async with house.client() as client:
        response = await client.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(house: House, path: str, **fields: Any) -> list[dict[str, Any]]:
    async with house.client() as client:
        response = await client.post(path, json=body(path, stream=True, **fields))
    assert response.status_code == 200, response.text
    lines = [line for part in response.text.split("\n\n") for line in part.split("\n")]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def calls_in(event: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, part of the arguments) of what an event says of calls."""
    if "choices" in event:
        made = [one for choice in event["choices"] for one in choice["delta"].get("tool_calls", [])]
        return [(one["function"].get("name", ""), one["function"]["arguments"]) for one in made]
    if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        return [(event["content_block"]["name"], "")]
    if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
        return [("", event["delta"]["partial_json"])]
    if event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
        return [(event["item"]["name"], event["item"]["arguments"])]
    if event["type"] == "response.function_call_arguments.delta":
        return [("", event["delta"])]
    return []


def folded(told: list[dict[str, Any]]) -> list[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    for event in told:
        for name, part in calls_in(event):
            if name:
                made.append((name, part))
            else:
                made[-1] = (made[-1][0], made[-1][1] + part)
    return made


def of_whole(path: str, answer: dict[str, Any]) -> tuple[list[tuple[str, Any]], Any, str]:
    """Calls, text and finish reason of an answer that was not streamed; arguments may be an object."""
    if path == "/v1/messages":
        calls = [(one["name"], one["input"]) for one in answer["content"] if one["type"] == "tool_use"]
        text = [one["text"] for one in answer["content"] if one["type"] == "text"]
        return calls, text or None, answer["stop_reason"]
    if path == "/v1/responses":
        items = answer["output"]
        calls = [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
        text = [one for one in items if one["type"] == "message"]
        return calls, text or None, answer["status"]
    (choice,) = answer["choices"]
    made = choice["message"].get("tool_calls", [])
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in made]
    return calls, choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("promised", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_a_long_call_comes_token_by_token(path: str, promised: bool) -> None:
    """Counted in tokens, of which each has a delta of the replica's."""
    taken, marks = 0, list[int]()
    script = spoken(CALL)
    tokens = len(script) - 1
    assert tokens > 300

    def counted(request: GenerateRequest) -> Iterator[Step]:
        nonlocal taken
        for step in script:
            taken += isinstance(step, Delta)
            yield step

    house = House(counted)  # type: ignore[arg-type]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def seen(message: Any) -> None:
            text = message.get("body", b"").decode()
            said = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
            if any(calls_in(one) for one in said):
                marks.append(taken)
            await send(message)

        await house.app(scope, receive, seen)

    await house.service.readiness.poll()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        await client.post(path, json=body(path, promised=promised, stream=True))
    frame = len(spoken(CALL.partition(ARGUMENTS)[0]))
    assert marks[0] <= frame + GAP_TOKENS
    assert max(later - one for one, later in pairwise(marks)) <= GAP_TOKENS
    assert tokens - marks[-1] <= len(spoken("}\n</tool_call>")) + GAP_TOKENS


@pytest.mark.parametrize(
    "arguments", ['{"text": "\\ud83d"}', '{"text": NaN}', f'{{"text": {"1" * 5000}}}', '{"text": "a",}']
)
@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_is_whole_whatever_its_call_holds(path: str, arguments: str) -> None:
    """Half a character could not be remembered, and the finished answer was a 500."""
    call = f'<tool_call>\n{{"name": "note", "arguments": {arguments}}}\n</tool_call>'
    house = House(lambda _: spoken(call))
    whole = await asked(house, path)
    told = folded(await events(house, path))
    assert [name for name, _ in of_whole(path, whole)[0]] == [name for name, _ in told] == ["note"]
    assert told[0][1].startswith(arguments)


@pytest.mark.parametrize("path", PATHS)
async def test_a_reply_that_cannot_be_remembered_is_an_answer(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(lambda _: spoken(CALL))

    async def fails(*_: Any, **__: Any) -> bool:
        raise RuntimeError("a part of the memory has an error")

    monkeypatch.setattr(house.service.prompts, "remember", fails)
    whole = await asked(house, path)
    assert [name for name, _ in of_whole(path, whole)[0]] == ["note"]
    assert [name for name, _ in folded(await events(house, path))] == ["note"]
    assert caplog.text.count("RuntimeError") == 2


def scripted(steps: Script, request: GenerateRequest) -> Script:
    return steps


@pytest.mark.parametrize("path", PATHS)
async def test_a_promised_call_that_is_cut_is_a_call_so_far(path: str) -> None:
    script = spoken(CALL)
    rng = random.Random(path)
    for _ in range(examples(40)):
        cut = rng.randrange(1, len(script) - 2)
        *kept, last = script[: cut + 1]
        assert isinstance(last, Delta)
        end = Delta(0, last.text, last.token_ids, finish_reason="length")
        steps: Script = [*kept, end]
        house = House(partial(scripted, steps))
        calls, text, finish = of_whole(path, await asked(house, path))
        assert finish in ("length", "max_tokens", "model_context_window_exceeded", "incomplete")
        assert text is None
        assert [name for name, _ in calls] == ["note"]
        told = await events(house, path)
        ((name, arguments),) = folded(told)
        assert (name, ARGUMENTS[: len(arguments)]) == ("note", arguments)
        if path != "/v1/messages":
            assert calls == [(name, arguments)]
        assert "<tool_call>\\n" not in json.dumps(told)


@pytest.mark.parametrize("path", PATHS)
async def test_fifty_replicas_lost_in_a_call_change_nothing(path: str) -> None:
    script = spoken(f"Let me see. {CALL}")
    plain = [bare(one) for one in await events(House(lambda request: script), path, promised=False)]
    rng = random.Random(path)
    for _ in range(examples(50)):
        cuts = sorted(rng.sample(range(1, len(script) - 1), 2))

        def lost(request: GenerateRequest, cuts: list[int] = cuts) -> Script:
            done = len(request.resume.token_ids) if request.resume is not None else 0
            rest = script[1 + done :]
            later = [cut - done for cut in cuts if cut > done]
            return [
                script[0],
                *(rest[: later[0]] if later else rest),
                *([ReplicaLost("gone")] if later else []),
            ]

        told = await events(House(lost), path, promised=False)
        assert [bare(one) for one in told] == plain


def bare(value: Any) -> Any:
    """An event without what differs between answers."""
    apart = ("id", "call_id", "item_id", "created", "created_at", "receipt", "system_fingerprint")
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if key not in apart}
    return [bare(one) for one in value] if isinstance(value, list) else value


async def test_the_official_client_puts_the_same_call_together() -> None:
    house = House(lambda request: spoken(CALL))
    wanted = json.loads(ARGUMENTS)
    async with (
        house.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        sent: Any = body(PATHS[0])
        async with client.chat.completions.stream(**sent) as stream:
            seen = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = (await stream.get_final_completion()).choices[0]
        (call,) = final.message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("note", wanted)
        assert len(seen) > 200
        sent = body(PATHS[2])
        async with client.responses.stream(**sent) as responses:
            parts = [one async for one in responses if one.type == "response.function_call_arguments.delta"]
            item: Any = (await responses.get_final_response()).output[0]
        assert (item.name, json.loads(item.arguments), item.status) == ("note", wanted, "completed")
        assert len(parts) > 200
