"""Anthropic's Messages API over HTTP: answers, streams, errors, tokens counted, prefixes kept, fuzz."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from samovar.replicas.messages import GenerateRequest
from tests.support.amounts import examples
from tests.support.router.chat_templates import QWEN3, TEMPLATES, tokenizer_with
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import (
    CONTEXT,
    KEY,
    MODEL,
    TOKENIZER,
    House,
    make_settings,
    spoken,
)

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
GET = {"name": "get", "description": "Get it.", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "a"}
USED = {"type": "tool_use", "id": "c", "name": "get", "input": {}}
RESULT = {"type": "tool_result"}
USER = {"role": "user", "content": "u"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"k": "é"}}\n</tool_call>'
THINKS = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"


def body(*said: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "messages": list(said) or [USER], **fields}


async def asked(house: House, sent: dict[str, Any], **headers: str) -> dict[str, Any]:
    async with house.client(**{"anthropic-version": "2023-06-01", **headers}) as client:
        response = await client.post(PATH, json=sent)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    return message


async def streamed(house: House, sent: dict[str, Any]) -> list[dict[str, Any]]:
    async with house.client() as client:
        response = await client.post(f"{PATH}?beta=true", json={**sent, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as Anthropic's SDK does, which trusts the order of events."""
    first, *rest = [event for event in events if event["type"] != "ping"]
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (None, 0)
    is_open, parts = False, ""
    for event in rest:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, parts = True, ""
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    parts += delta["partial_json"]
                    block["input"] = from_json(parts, allow_partial=True)
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
            message["receipt"] = event["receipt"]
    assert not is_open
    assert [event["type"] for event in rest[-2:]] == ["message_delta", "message_stop"]
    return message


def error_in(response: httpx.Response) -> dict[str, Any]:
    told = response.json()
    assert set(told) == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    error: dict[str, Any] = told["error"]
    return error


def times_apart(message: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if key not in ("id", "receipt")}
    for block in message["content"]:
        block.pop("id", None)
    return message


@pytest.mark.parametrize(
    ("text", "blocks", "stop_reason"),
    [
        ("Hello é", [{"type": "text", "text": "Hello é"}], "end_turn"),
        ("", [], "end_turn"),
        (CALL, [{"type": "tool_use", "name": "get", "input": {"k": "é"}}], "tool_use"),
        (
            THINKS + CALL,
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                *[{"type": "tool_use", "name": "get", "input": {"k": "é"}}] * 2,
            ],
            "tool_use",
        ),
    ],
)
async def test_a_stream_folds_to_the_whole_message(
    text: str, blocks: list[dict[str, Any]], stop_reason: str
) -> None:
    house = House(lambda request: spoken(text, cached=16), tokenizer=tokenizer_with(QWEN3))
    sent = body(system="Be.", tools=[GET])
    whole = await asked(house, sent)
    assert whole["id"].startswith("msg_")
    ids = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    told = folded(await streamed(house, sent))
    assert times_apart(told) == times_apart(whole)
    assert whole["content"] == blocks
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, None)
    assert whole["receipt"]["tokens"]["gpu"] == told["receipt"]["tokens"]["gpu"] == 16
    prompt_tokens = len(house.replicas.calls[0].prompt_token_ids)
    usage = {key: value for key, value in whole["usage"].items() if not key.endswith("by_tier")}
    assert usage == {
        "input_tokens": prompt_tokens - 16,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": len(spoken(text)) - 1,
    }


@pytest.mark.parametrize(
    "marked",
    [
        body(system=[{"type": "text", "text": "Be.", **MARK}]),
        body({"role": "user", "content": [{"type": "text", "text": "u", **MARK}]}),
        body(tools=[{**GET, **MARK}]),
        body(**MARK),
    ],
)
async def test_marks_lengthen_how_long_a_turn_is_kept_and_name_what_was_created(
    marked: dict[str, Any],
) -> None:
    house = House(lambda request: spoken("x", cached=4))
    usage = (await asked(house, marked))["usage"]
    (call,) = house.replicas.calls
    assert call.placement is not None
    assert call.placement.min_ttl_s == max(300.0, house.settings.tiers.profiles.chat.min_ttl_s)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 4)
    assert usage["cache_creation_input_tokens"] == len(call.prompt_token_ids) - 4


async def test_what_ended_an_answer_is_named() -> None:
    stopped = say(
        ["so", ""], ids=[TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("s", "#")]
    )
    house = House(lambda request: stopped)
    message = await asked(house, body(stop_sequences=["!!", "#"]))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "#")
    assert house.replicas.calls[0].sampling.stop == ("!!", "#")
    assert (await asked(house, body(stop_sequences=["!!"])))["stop_reason"] == "end_turn"
    house.replicas.script = lambda request: spoken("ab", finish="length")
    full = len(TOKENIZER.encode("ab", add_special_tokens=False))
    assert (await asked(house, body(max_tokens=full)))["stop_reason"] == "max_tokens"
    message = await asked(house, body(max_tokens=CONTEXT * 10))
    assert message["stop_reason"] == "model_context_window_exceeded"
    call = house.replicas.calls[-1]
    assert call.sampling.max_tokens == CONTEXT - len(call.prompt_token_ids), "lowered to what is left"


async def test_both_apis_render_a_conversation_to_the_same_tokens() -> None:
    """Also with tools, calls, results and reasoning, as string or parts, and without the billing line."""
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"k": 1}'}}
    offered = {"name": "get", "parameters": GET["input_schema"], "description": GET["description"]}
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is it?"},
            {"role": "system", "content": "Linux."},
            {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "function": offered}],
    }
    billing = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=ab12;"
    used = {"type": "tool_use", "id": "c1", "name": "get", "input": {"k": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]}
    said = body(
        {"role": "user", "content": [{"type": "text", "text": "What is it?", **MARK}]},
        {"role": "system", "content": "Linux."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look."},
                used,
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        system=[{"type": "text", "text": billing}, {"type": "text", "text": "Be brief.", **MARK}],
        tools=[GET],
    )
    for template in (None, *TEMPLATES.values()):
        if template is TEMPLATES["llama3"]:
            continue
        house = House(tokenizer=tokenizer_with(template))
        async with house.client() as client:
            whole = await client.post("/v1/chat/completions", json=chat)
            assert whole.status_code == 200, whole.text
            counted = await client.post(COUNT, json={key: said[key] for key in said if key != "max_tokens"})
        message = await asked(house, said)
        first, second = (call.prompt_token_ids for call in house.replicas.calls)
        assert first == second
        assert counted.json() == {"input_tokens": len(first)}
        assert message["receipt"]["prefix"] == ["dropped x-anthropic-billing-header"]


@pytest.mark.parametrize("family", [None, "hermes", "qwen3", "mistral"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_loop_repeats_all_tokens_but_the_new_part(family: str | None, is_streamed: bool) -> None:
    house = House(tokenizer=tokenizer_with(TEMPLATES.get(family or "")))
    messages: list[dict[str, Any]] = [USER]
    chain: list[int] = []
    for number in range(6):
        said = f'{{"arguments":  {{"k":{number}}},"name":"get"}}'
        said = f"[TOOL_CALLS]{said}" if family == "mistral" else f"<tool_call>{said}</tool_call>"
        script = spoken(said)
        house.replicas.script = lambda request, script=script: script  # type: ignore[misc]
        sent = body(*messages, tools=[GET], system="Be.", metadata={"user_id": '{"session_id": "s"}'})
        message = folded(await streamed(house, sent)) if is_streamed else await asked(house, sent)
        assert message["receipt"]["miss"] is None
        call = house.replicas.calls[-1]
        assert call.prompt_token_ids[: len(chain)] == chain, f"turn {number}"
        assert call.turn.role == ("tool" if number else "user")
        deltas: list[Any] = script[1:]
        chain = [*call.prompt_token_ids, *(one.token_ids[0] for one in deltas)]
        (used,) = message["content"]
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": f"r{number}"}
        messages += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result]},
        ]
    assert len(set(house.replicas.session_keys)) == 1
    assert [row.state for row in house.directory.table] == ["tool"]


async def test_an_answer_is_continued_where_the_assistant_spoke_last() -> None:
    house = House()
    await asked(house, body(USER, {"role": "assistant", "content": "The answer is"}))
    text = TOKENIZER.decode(house.replicas.calls[0].prompt_token_ids)
    assert text.endswith("The answer is")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"stop_sequences": ["", 5]}, "stop_sequences[1]"),
        ({"temperature": 3.0}, "temperature"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}, GET, GET]}, "tools[2].name"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [GET], "tool_choice": {"type": "tool", "name": "none"}}, "tool_choice.name"),
        ({"stop": ["", 5]}, "stop[0]"),  # as a chat calls it, and so does who sent it
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"metadata": {"user_id": "x" * 5000}}, "metadata"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with House().client() as client:
        response = await client.post(PATH, json=body(**fields))
    error = error_in(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert param.rsplit(".", 1)[-1].split("[")[0] in error["message"]


async def test_errors_have_anthropics_shape_on_its_routes_only() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    async with house.client(**{"x-api-key": KEY}) as client:
        long = await client.post(PATH, json=body({"role": "user", "content": "x " * 3 * CONTEXT}))
        model = await client.post(PATH, json={**body(), "model": "claude"})
        route = await client.post(f"{PATH}/batches", json={})
        method = await client.get(PATH)
        other = await client.get("/v1/nothing")
        no_key = await client.post(PATH, json=body(), headers={"x-api-key": "sk-none"})
        counted = await client.post(COUNT, json={"model": MODEL})
    assert error_in(long)["message"].startswith("prompt is too long: ")
    assert [error_in(one)["type"] for one in (model, route, method, no_key, counted)] == [
        "not_found_error",
        "not_found_error",
        "invalid_request_error",
        "authentication_error",
        "invalid_request_error",
    ]
    assert [one.status_code for one in (long, model, route, method, no_key)] == [400, 404, 404, 405, 401]
    assert set(other.json()) == {"error"}


async def test_a_silent_stream_says_comments_and_then_pings() -> None:
    def slow(request: GenerateRequest) -> Script:
        script = spoken("ab")
        return [0.2, script[0], 0.2, *script[1:]]

    house = House(slow, settings=make_settings(sse_keepalive_s=0.05))
    async with house.client() as client:
        text = (await client.post(PATH, json=body(stream=True))).text
    before, _, after = text.partition("event: message_start")
    assert set(before.split("\n")) == {": ping", ""}
    assert 'event: ping\ndata: {"type":"ping"}' in after


async def test_unknown_fields_and_server_tools_are_listed_and_the_rest_is_served() -> None:
    """As Claude Code sends them."""
    sent = body(
        tools=[{"type": "web_search_20250305", "name": "web_search"}, {**GET, "defer_loading": True}],
        thinking={"type": "adaptive", "display": "summarized"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    house = House(lambda request: spoken(CALL + CALL))
    async with house.client(**{"anthropic-beta": "any", "x-claude-code-session-id": "s"}) as client:
        response = await client.post(PATH, json=sent)
        assert response.headers["x-ignored-fields"] == "context_management, tools.web_search_20250305"
        assert response.headers["x-cache"] == "miss"
        assert len(response.json()["content"]) == 1, "no parallel calls"
        models = (
            await client.get("/v1/models", params={"limit": 1000}, headers={"anthropic-version": "1"})
        ).json()
        assert (models["data"][0]["type"], models["first_id"], models["has_more"]) == ("model", MODEL, False)
        assert (await client.delete("/v1/sessions/s")).status_code == 200
        assert house.replicas.clears


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3), st.just({}), st.just([])
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", ""])},
    optional={
        "text": st.text(max_size=4),
        "thinking": SCALARS,
        "id": st.sampled_from(["c1", "c2", "", 1]),
        "name": st.sampled_from(["get", "", "a b"]),
        "input": st.one_of(SCALARS, st.just({"k": 1e300})),
        "tool_use_id": st.sampled_from(["c1", "c2", ""]),
        "content": st.one_of(st.text(max_size=3), st.just([{"type": "text", "text": "r"}]), SCALARS),
        "cache_control": st.one_of(SCALARS, st.just({"type": "ephemeral", "ttl": "1h"})),
    },
)
CHOICES = st.fixed_dictionaries({"type": st.sampled_from(["any", "none", "tool"])})
THINKING = st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"])})
SAID = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.one_of(st.text(max_size=5), st.lists(BLOCKS, max_size=3), SCALARS),
    }
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just(MODEL),
        "max_tokens": st.one_of(st.just(8), SCALARS),
        "messages": st.lists(SAID, max_size=4),
    },
    optional={
        "system": st.one_of(st.text(max_size=5), st.lists(BLOCKS, max_size=2), SCALARS),
        "tools": st.one_of(st.lists(st.one_of(st.just(GET), SCALARS), max_size=2), SCALARS),
        "tool_choice": st.one_of(SCALARS, CHOICES),
        "thinking": st.one_of(SCALARS, THINKING),
        "stop_sequences": st.one_of(SCALARS, st.lists(st.text(max_size=2), max_size=2)),
        "output_config": st.one_of(SCALARS, st.just({"format": {"type": "json_schema", "schema": {}}})),
        "metadata": SCALARS,
        "stream": st.booleans(),
    },
)


@settings(max_examples=examples(150), deadline=None)
@given(sent=BODIES)
async def test_fuzzed_requests_are_answered_or_refused(sent: dict[str, Any]) -> None:
    house = House(lambda request: spoken(CALL))
    async with house.client() as client:
        for path in (PATH, COUNT):
            response = await client.post(path, content=json.dumps(sent))
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                assert error_in(response)["message"]


async def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    house = House(tokenizer=tokenizer_with(template))
    said = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{**TEXT, "text": "b", **MARK}, {**TEXT, "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{**TEXT, "text": "e"}, USED]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": "c", "content": "r"}]},
        {"role": "user", "content": "f"},
    ]
    await asked(house, body(*said, tools=[GET]))
    text = str(TOKENIZER.decode(house.replicas.calls[-1].prompt_token_ids))
    turns = text.split("<|im_end|>")[1:]
    assert turns[:2] == ["user: a\n\nbc", f"assistant: d\n\ne\n{CALL}".replace('{"k": "é"}', "{}")]
    assert turns[2:] == ["user: <tool_response>\nr\n</tool_response>\nf", ""]
    odd = {"type": "image", "source": {"type": "base64", "data": "x"}}
    async with house.client() as client:
        sent = body(USER, {"role": "user", "content": [TEXT, odd]})
        refused = await client.post(PATH, json=sent)
    assert (refused.status_code, "messages[1].content[1]" in refused.text) == (400, True)
