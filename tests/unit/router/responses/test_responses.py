"""OpenAI's Responses API over HTTP: answers, events of OpenAI's types, stored responses, prefixes, fuzz."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from samovar.router.responses.custom_tools import InputReader, input_of, input_so_far
from samovar.router.responses.request import encrypted
from tests.support.amounts import examples
from tests.support.router.chat_templates import QWEN3, TEMPLATES, tokenizer_with
from tests.support.router.router_harness import (
    CONTEXT,
    KEY,
    MODEL,
    OTHER_KEY,
    House,
    error_of,
    make_settings,
    spoken,
)

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
GET = {"type": "function", "name": "get", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"k": "é"}}\n</tool_call>'
THINKS = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"
ITEM = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"k": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def body(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": list(items) or "u", **fields}


async def asked(house: House, sent: dict[str, Any], **headers: str) -> dict[str, Any]:
    async with house.client(**headers) as client:
        response = await client.post(PATH, json=sent)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    Response.model_validate(made)
    return made


async def streamed(house: House, sent: dict[str, Any]) -> list[dict[str, Any]]:
    async with house.client() as client:
        response = await client.post(PATH, json={**sent, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, part in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without ids, which differ between answers."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Hello é", ["message"]),
        ("", []),
        (CALL, ["function_call"]),
        (THINKS + CALL, ["reasoning", "message", "function_call", "function_call"]),
    ],
)
async def test_a_stream_ends_with_the_whole_response(text: str, kinds: list[str]) -> None:
    house = House(lambda request: spoken(text, cached=16), tokenizer=tokenizer_with(QWEN3))
    sent = body(instructions="Be.", tools=[GET], include=["reasoning.encrypted_content"])
    whole = await asked(house, sent)
    events = await streamed(house, sent)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    told = last["response"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert bare(told["output"]) == bare(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == told["output"]
    for kind, name in (
        ("output_text", "content"),
        ("function_call_arguments", ""),
        ("reasoning_text", "content"),
    ):
        pieces = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        ends = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(pieces) == "".join(end["text" if name else "arguments"] for end in ends)
    for made in (whole, told):
        assert (made["status"], made["instructions"], made["tools"][0]["name"]) == ("completed", "Be.", "get")
        assert made["usage"]["input_tokens"] == len(house.replicas.calls[0].prompt_token_ids)
        assert made["usage"]["input_tokens_details"]["cached_tokens"] == 16
        assert made["receipt"]["tokens"]["gpu"] == 16


async def test_the_openai_client_reads_whole_responses_and_streams() -> None:
    house = House(lambda request: spoken(f"Look.{CALL}"))
    async with (
        house.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        sent: Any = {"model": MODEL, "input": "u", "tools": [{**GET, "strict": False}]}
        whole = await client.responses.create(**sent)
        async with client.responses.stream(**sent) as stream:
            final = await stream.get_final_response()
        for made in (whole, final):
            assert made.output_text == "Look."
            call: Any = made.output[1]
            assert (call.name, call.arguments) == ("get", '{"k": "é"}')
        again = await client.responses.retrieve(whole.id)
        assert again.output_text == "Look."
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)


async def test_an_answer_cut_by_its_length_is_incomplete() -> None:
    house = House(lambda request: spoken("ab", finish="length"))
    made = await asked(house, body(max_output_tokens=2))
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][0]["status"] == "incomplete"
    assert house.replicas.calls[0].sampling.max_tokens == 2
    assert (await streamed(house, body()))[-1]["type"] == "response.incomplete"


async def test_both_apis_render_a_conversation_to_the_same_tokens() -> None:
    """Also with tools, calls, results and reasoning; as Codex sends it, and without the billing line."""
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"k": 1}'}}
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is it?"},
            {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}],
    }
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=ab12;\n"
    items = [
        user("What is it?"),
        {"type": "reasoning", "summary": [], "encrypted_content": encrypted("hm")},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Look.", "annotations": []}]},
        ITEM,
        RESULT,
        {"type": "message", "role": "user", "content": "And?"},
    ]
    for template in (None, *TEMPLATES.values()):
        if template is TEMPLATES["llama3"]:
            continue
        house = House(tokenizer=tokenizer_with(template))
        async with house.client() as client:
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        await asked(house, body(*items, instructions=f"{billing}Be brief.", tools=[GET]))
        await asked(house, body({"role": "developer", "content": "Be brief."}, *items, tools=[GET]))
        first, second, third = (call.prompt_token_ids for call in house.replicas.calls)
        assert first == second == third


@pytest.mark.parametrize("family", [None, "hermes", "qwen3", "mistral"])
@pytest.mark.parametrize("way", ["items", "streamed", "previous", "references"])
async def test_a_tool_loop_repeats_all_tokens_but_the_new_part(family: str | None, way: str) -> None:
    house = House(tokenizer=tokenizer_with(TEMPLATES.get(family or "")))
    items: list[dict[str, Any]] = [user("u")]
    previous: dict[str, str] = {}
    chain: list[int] = []
    for number in range(6):
        said = f'{{"arguments":  {{"k":{number}}},"name":"get"}}'
        said = f"[TOOL_CALLS]{said}" if family == "mistral" else f"<tool_call>{said}</tool_call>"
        script = spoken(said)
        house.replicas.script = lambda request, script=script: script  # type: ignore[misc]
        sent = body(*items, tools=[GET], instructions="Be.", prompt_cache_key="s", **previous)
        made = (
            (await streamed(house, sent))[-1]["response"] if way == "streamed" else await asked(house, sent)
        )
        assert made["receipt"]["miss"] is None
        call = house.replicas.calls[-1]
        assert call.prompt_token_ids[: len(chain)] == chain, f"turn {number}"
        deltas: list[Any] = script[1:]
        chain = [*call.prompt_token_ids, *(one.token_ids[0] for one in deltas)]
        (used,) = made["output"]
        result = {"type": "function_call_output", "call_id": used["call_id"], "output": f"r{number}"}
        if way == "previous":
            previous, items = {"previous_response_id": made["id"]}, [result]
        elif way == "references":  # as Vercel's SDK does with what it knows to be stored
            items += [{"type": "item_reference", "id": used["id"]}, result]
        else:
            items += [used, result]
    assert len(set(house.replicas.session_keys)) == 1


async def test_functions_of_a_namespace_are_served_and_other_tools_listed() -> None:
    """As Codex sends them."""
    group = {"type": "namespace", "name": "mcp", "tools": [GET]}
    sent = body(
        tools=[group, {"type": "web_search"}], client_metadata={"a": "b"}, store=False,
        reasoning={"summary": "auto", "effort": "high"}, text={"verbosity": "low"}, parallel_tool_calls=True,
    )  # fmt: skip
    house = House(lambda request: spoken(CALL.replace("get", "mcp.get")))
    async with house.client(**{"session-id": "s"}) as client:
        response = await client.post(PATH, json=sent)
        ignored = "client_metadata, text.verbosity, reasoning.summary, tools.web_search"
        assert response.headers["x-ignored-fields"] == ignored
        (used,) = response.json()["output"]
        assert (used["namespace"], used["name"]) == ("mcp", "get")
        back = {**used, "status": "completed"}
        result = {**RESULT, "call_id": used["call_id"]}
        again = await client.post(PATH, json={**sent, "input": [user("u"), back, result]})
        assert again.status_code == 200, again.text
        assert (await client.get(f"{PATH}/{response.json()['id']}")).status_code == 404, "store is false"
    assert house.replicas.calls[1].turn.role == "tool"


async def test_stored_responses_are_a_tenants_own_and_go_with_its_session_or_cache() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY, "beta": OTHER_KEY}))
    async with house.client() as client:
        alpha, beta = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))

        async def make(session: str, headers: dict[str, str], **more: Any) -> str:
            sent = body(prompt_cache_key=session, **more)
            made = await client.post(PATH, json=sent, headers=headers)
            assert made.status_code == 200, made.text
            return str(made.json()["id"])

        async def status(response_id: str, headers: dict[str, str]) -> int:
            return (await client.get(f"{PATH}/{response_id}", headers=headers)).status_code

        first, second, other = await make("a", alpha), await make("b", alpha), await make("a", beta)
        assert await status(first, alpha) == 200
        assert await status(first, beta) == 404
        refused = await client.post(PATH, json=body(previous_response_id=first), headers=beta)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "previous_response_id")
        item = (await client.get(f"{PATH}/{first}", headers=alpha)).json()["output"][0]["id"]
        named = body(user("u"), {"id": item}, user("v"))
        assert (await client.post(PATH, json=named, headers=alpha)).status_code == 200
        refused = await client.post(PATH, json=named, headers=beta)
        assert (refused.status_code, error_of(refused)["param"]) == (404, "input[1].id")
        assert (await client.delete(f"{PATH}/{first}", headers=beta)).status_code == 404
        assert (await client.delete("/v1/sessions/a", headers=alpha)).status_code == 200
        assert [await status(one, alpha) for one in (first, second)] == [404, 200]
        assert await status(other, beta) == 200
        assert (await client.delete("/v1/cache", headers=alpha)).status_code == 200
        assert await status(second, alpha) == 404
        assert await status(other, beta) == 200


async def test_what_is_stored_is_bounded() -> None:
    house = House(settings=make_settings(limits={"responses_max": 2}))
    ids = [(await asked(house, body()))["id"] for _ in range(3)]
    async with house.client() as client:
        assert [(await client.get(f"{PATH}/{one}")).status_code for one in ids] == [404, 200, 200]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": -5}, "max_tokens"),  # as a chat calls it, and so does who sent it
        ({"tools": [GET], "tool_choice": {"type": "function", "name": "none"}}, "tool_choice.name"),
        ({"temperature": 3.0}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, GET, GET]}, "tools[2].name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x " * 3 * CONTEXT}, "input"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with House().client() as client:
        response = await client.post(PATH, json={**body(), **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    if param == "previous_response_id":  # by which clients know that they have to send the whole history
        assert error["code"] == "previous_response_not_found"


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3), st.just({}), st.just([])
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"])},
        optional={"text": st.text(max_size=3), "refusal": SCALARS},
    ),
    max_size=2,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"]),
        "role": st.sampled_from(["user", "assistant", "developer", "tool"]),
        "content": st.one_of(st.text(max_size=3), PARTS, SCALARS),
        "call_id": st.sampled_from(["c1", "c2", ""]),
        "name": st.sampled_from(["get", "a b"]),
        "namespace": st.sampled_from(["mcp", ""]),
        "arguments": st.sampled_from(["{}", "", "[", '{"k": NaN}']),
        "output": st.one_of(st.text(max_size=3), PARTS),
        "summary": SCALARS,
        "encrypted_content": st.sampled_from(["eA==", "_", "/w=="]),
    },
)
BODIES = st.fixed_dictionaries(
    {"model": st.just(MODEL), "input": st.one_of(st.text(max_size=3), st.lists(ITEMS, max_size=4), SCALARS)},
    optional={
        "instructions": SCALARS,
        "tools": st.one_of(st.lists(st.one_of(st.just(GET), SCALARS), max_size=2), SCALARS),
        "tool_choice": st.one_of(SCALARS, st.sampled_from(["auto", "none", "required"])),
        "text": st.one_of(SCALARS, st.just({"format": {"type": "json_object"}})),
        "reasoning": st.one_of(SCALARS, st.just({"effort": "none"})),
        "previous_response_id": SCALARS,
        "max_output_tokens": SCALARS,
        "metadata": SCALARS,
        "include": SCALARS,
        "stream": st.booleans(),
    },
)


@settings(max_examples=examples(150), deadline=None)
@given(sent=BODIES)
async def test_fuzzed_requests_are_answered_or_refused(sent: dict[str, Any]) -> None:
    house = House(lambda request: spoken(CALL))
    async with house.client() as client:
        response = await client.post(PATH, content=json.dumps(sent))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert error_of(response)["message"]


PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar"}}
PATCHED = '*** Begin \u00e9\n"quoted" \\ \U0001f600 </tool_call>\n*** End'


@pytest.mark.parametrize("ensure_ascii", [True, False])
async def test_a_tool_of_text_is_offered_called_and_streamed_as_such(ensure_ascii: bool) -> None:
    called = json.dumps({"name": "apply_patch", "arguments": {"input": PATCHED}}, ensure_ascii=ensure_ascii)
    text = f"<tool_call>\n{called}\n</tool_call>"
    house = House(lambda request: spoken(text), tokenizer=tokenizer_with(QWEN3))
    sent = body(tools=[PATCH, GET])
    whole = await asked(house, sent)
    (item,) = whole["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCHED)
    events = await streamed(house, sent)
    deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == PATCHED
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert bare(done) == bare(whole["output"]) == bare(events[-1]["response"]["output"])
    # What comes back continues the prompt as it was.
    back = {key: item[key] for key in ("type", "call_id", "name", "input")}
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done"}
    await asked(house, body(user("u"), back, result, tools=[PATCH, GET]))
    first, again = (house.replicas.calls[at].prompt_token_ids for at in (0, -1))
    assert again[: len(first) - 8] == first[: len(first) - 8]


async def test_a_tool_of_text_that_is_cut_has_its_input_so_far() -> None:
    called = json.dumps({"name": "apply_patch", "arguments": {"input": PATCHED}})
    text = f"<tool_call>\n{called}\n</tool_call>"
    for cut in range(60, len(text) - 10, 7):
        house = House(
            lambda request, cut=cut: spoken(text[:cut], finish="length"), tokenizer=tokenizer_with(QWEN3)
        )
        sent = body(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
        whole = await asked(house, sent)
        events = await streamed(house, sent)
        deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
        items = whole["output"]
        assert [one["type"] for one in items] == ["custom_tool_call"]
        assert "".join(deltas) == items[0]["input"]
        assert PATCHED.startswith(items[0]["input"])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"input":"abc\\ud83d def"}',
        '{"input":"abc\\ude00"}',
        '{"input":"abc\\ud83d\\u00e9"}',
        '{"input":"a","input":"b"}',
        '{"input":"a","input":5}',
        '{"x":1,"input":"abc"}',
        '{"input":"abc","x":NaN}',
        '{"input":["abc"]}',
        f'{{{" " * 500}"input":"abc"}}',
    ],
)
async def test_the_pieces_of_an_input_are_the_whole_of_it(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    house = House(lambda request: spoken(text), tokenizer=tokenizer_with(QWEN3))
    (item,) = (await asked(house, body(tools=[PATCH])))["output"]
    events = await streamed(house, body(tools=[PATCH]))
    deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [one["input"] for one in events if one["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done == item["input"]


@given(st.text(), st.booleans(), st.integers(1, 9), st.data())
def test_an_input_is_read_as_it_is_written(text: str, is_ascii: bool, step: int, data: st.DataObject) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    written = written[: data.draw(st.integers(0, len(written)))]
    reader, told = InputReader(), ""
    for at in range(0, len(written), step):
        told += reader.feed(written[at : at + step])
        assert len(reader._unread) <= 40, "what was told is not read again"
        assert text.startswith(told)
    assert told == input_so_far(written)
    assert input_of(written).startswith(told)


async def test_what_a_stored_response_answered_is_listed_in_pages() -> None:
    house = House(lambda request: spoken("Hello"))
    async with house.client() as client:
        first = (await client.post(PATH, json=body(user("u"), ITEM, RESULT, user("v")))).json()
        second = (await client.post(PATH, json=body(user("w"), previous_response_id=first["id"]))).json()
        path = f"{PATH}/{second['id']}/input_items"
        whole = (await client.get(path, params={"order": "asc"})).json()
        kinds = [(item["type"], item.get("role")) for item in whole["data"]]
        assert kinds == [
            ("message", "user"),
            ("function_call", None),
            ("function_call_output", None),
            ("message", "user"),
            ("message", "assistant"),
            ("message", "user"),
        ]
        assert whole["data"][1]["arguments"] == ITEM["arguments"]
        assert whole["data"][2]["call_id"] == whole["data"][1]["call_id"] == "c1"
        assert not whole["has_more"]
        pages: list[Any] = []
        while True:
            after = {"after": pages[-1]["id"]} if pages else {}
            page = (await client.get(path, params={"limit": 4, **after})).json()
            pages += page["data"]
            if not page["has_more"]:
                break
        assert pages == whole["data"][::-1]
        for params in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
            assert (await client.get(path, params=params)).status_code == 400
        assert (await client.get(f"{PATH}/resp_none/input_items")).status_code == 404
