"""Tools and reasoning over HTTP: requests taken and refused, answers in both shapes, a loop of turns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import httpx
import openai
import pytest

from samovar.replicas.messages import Admitted, GenerateRequest, TokenLogprob
from samovar.replicas.reply import called_tools
from samovar.router.routing.replica_client import ReplicaLost
from tests.support.router.chat_templates import QWEN3, tokenizer_with
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import MODEL, TOKENIZER, House, chat, error_of, make_settings, spoken

CHAT = "/v1/chat/completions"
GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
STRICT = {
    "type": "function",
    "function": {
        "name": "get",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"k": {"type": "string"}},
            "required": ["k"],
            "additionalProperties": False,
        },
    },
}
ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}
NAMED = {"type": "function", "function": {"name": "get"}}
USER = {"role": "user", "content": "u"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"k": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
ONE = '<tool_call>\n{"name": "get", "arguments": {"k": "é"}}\n</tool_call>'
TWO = 'Let me see.\n<tool_call>{"name": "get"}</tool_call>\n<tool_call>{"name": "put"}</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return chat("u", **{"tools": [GET], **fields})


async def asked(house: House, **fields: Any) -> dict[str, Any]:
    async with house.client() as client:
        response = await client.post(CHAT, json=body(**fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(house: House, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with house.client() as client:
        response = await client.post(CHAT, json={**request, "stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ONE, None, [("get", '{"k": "é"}')]),
        (TWO, "Let me see.", [("get", "{}"), ("put", "{}")]),
        ("no call", "no call", []),
        ("<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    ],
)
async def test_calls_in_a_whole_answer_and_in_a_stream(
    text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    house = House(lambda request: spoken(text))
    (choice,) = (await asked(house))["choices"]
    message = choice["message"]
    assert message["content"] == content
    named = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    assert named == calls
    assert "tool_calls" in message or not calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    chunks = await streamed(house, body())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
    told: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for one in delta.get("tool_calls", []):
            if one["index"] not in told:
                assert (one["type"], one["id"][:5], one["function"]["arguments"]) == ("function", "call_", "")
                told[one["index"]] = {"name": one["function"]["name"], "arguments": ""}
            else:
                assert set(one) == {"index", "function"}
            told[one["index"]]["arguments"] += one["function"]["arguments"]
    assert [(one["name"], one["arguments"]) for one in told.values()] == calls
    assert list(told) == list(range(len(calls)))
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


async def test_the_openai_client_reads_calls_and_reasoning() -> None:
    house = House(lambda request: spoken(f"<think>\nhm\n</think>\n\n{TWO}"), tokenizer=tokenizer_with(QWEN3))
    async with (
        house.server() as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        sent: Any = {"model": MODEL, "messages": [USER], "tools": [GET]}
        whole = (await client.chat.completions.create(**sent)).choices[0]
        async with client.chat.completions.stream(**sent) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
    for choice in (whole, final):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert [call.function.name for call in choice.message.tool_calls or []] == ["get", "put"]
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == "hm"
    assert whole.message.model_extra["reasoning"] == "hm"


async def test_ids_differ_between_answers_and_choices_and_survive_a_lost_replica() -> None:
    house = House(lambda request: spoken(TWO))
    answers = [await asked(house) for _ in range(2)]
    ids = [call["id"] for answer in answers for call in answer["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 4

    def lost(request: GenerateRequest) -> Script:
        script = spoken(TWO)
        if request.resume is None:
            return [*script[:40], ReplicaLost("gone")]
        done = len(request.resume.token_ids)
        return [script[0], *script[1 + done :]]

    for answer in (await streamed(House(lost), body()), await streamed(house, body())):
        told = [one for chunk in answer for one in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [one["function"].get("name") for one in told] == ["get", None, "put", None]


async def test_one_call_where_parallel_calls_are_not_wanted() -> None:
    house = House(lambda request: spoken(TWO))
    (choice,) = (await asked(house, parallel_tool_calls=False))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
async def test_without_a_choice_a_call_is_text(fields: dict[str, Any]) -> None:
    house = House(lambda request: spoken(ONE))
    (choice,) = (await asked(house, **fields))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ONE, "stop")
    assert house.replicas.calls[0].reading is None


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [GET, GET]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
        ({"tools": [GET] * 600}, "tools", None),
        ({"tools": "x"}, "tools", None),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"tools": [STRICT], "regex": "a"}, "regex", "invalid_value"),
        ({"tools": [STRICT], "continue_final_message": True}, "continue_final_message", "invalid_value"),
        ({"tool_choice": "required", "add_generation_prompt": False}, "add_generation_prompt", None),
        ({"tools": [ODD], "tool_choice": "required"}, "tools[0].function.parameters", "invalid_grammar"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "put"}}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "unsupported_parameter"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        ({"messages": [USER, {**USER, "tool_calls": [CALL]}]}, "messages[1].tool_calls", "invalid_value"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], param: str, code: str | None
) -> None:
    async with House().client() as client:
        response = await client.post(CHAT, json=body(**fields))
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert code is None or error["code"] == code
    assert "tool" in error["message"] or "function" in error["message"]


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": NAMED}, "stop"),
        ({"tools": [STRICT]}, "tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_calls"),
        ({"response_format": {"type": "json_object"}}, "tool_calls"),
    ],
    ids=str,
)
async def test_promised_calls_reach_the_replica_as_a_grammar(fields: dict[str, Any], finish: str) -> None:
    """An answer to a named choice ends as `stop`, as OpenAI's and vLLM's do."""
    house = House(lambda request: spoken(ONE))
    (choice,) = (await asked(house, **fields))["choices"]
    assert choice["finish_reason"] == finish
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get"]
    chunks = await streamed(house, body(**fields))
    assert chunks[-1]["choices"][0]["finish_reason"] == finish
    free = await asked(house, session_id="s")
    assert free["usage"]["prompt_tokens"]
    first, *_, last = house.replicas.calls
    assert first.sampling.grammar is not None
    assert (first.sampling.grammar.kind, "<tool_call>" in first.sampling.grammar.text) == ("lark", True)
    assert first.reading is not None
    assert last.sampling.grammar is None
    if "tools" not in fields:
        assert first.prompt_token_ids == last.prompt_token_ids, "the choice leaves the prefix as it is"


@pytest.mark.parametrize("fields", [{}, {"tools": [STRICT], "tool_choice": "none"}], ids=str)
async def test_without_a_promise_there_is_no_grammar(fields: dict[str, Any]) -> None:
    house = House(lambda request: spoken(ONE))
    await asked(house, **fields)
    assert house.replicas.calls[0].sampling.grammar is None


async def test_calls_are_not_promised_in_a_format_without_a_frame() -> None:
    settings = make_settings()
    model = settings.model.model_copy(update={"tool_parser": "qwen3_xml"})
    house = House(settings=settings.model_copy(update={"model": model}), tokenizer=tokenizer_with(QWEN3))
    async with house.client() as client:
        for fields, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": NAMED}, "tool_choice"),
            ({"tools": [STRICT]}, "tools[0].function.strict"),
        ):
            error = error_of(await client.post(CHAT, json=body(**fields)))
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")
            assert "model.tool_parser 'qwen3_xml'" in error["message"]
        assert (await client.post(CHAT, json=body())).status_code == 200


async def test_what_may_mean_one_thing_only_is_taken() -> None:
    house = House()
    empty = {**CALL, "function": {"name": "get", "arguments": ""}}
    untyped = {"id": "c2", "function": {"name": "get", "arguments": "{}"}}
    said = [USER, {**CALLED, "content": "", "tool_calls": [empty, untyped]}, RESULT]
    await asked(house, messages=[*said, {**RESULT, "tool_call_id": "c2"}], tool_choice="auto")
    await asked(house, messages=[USER, {"role": "assistant", "content": "x", "tool_calls": None}, USER])
    await asked(house, tools=[{"type": "function", "function": {"name": "f", "strict": False}}])
    async with house.client() as client:
        told = await client.post("/tokenize", json={"messages": [USER], "tools": [GET]})
        less = await client.post("/tokenize", json={"messages": [USER]})
    assert told.json()["count"] > less.json()["count"]


async def test_a_loop_of_ten_turns_repeats_all_tokens_but_the_new_part() -> None:
    """What a client sends back of a call is another text than the model's, and gets the model's tokens."""
    house = House(
        lambda request: spoken(f'<tool_call>{{"arguments": {{"k":{number}}},"name":"get"}}</tool_call>')
    )
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be."}, USER]
    chain: list[int] = []
    for number in range(10):
        answer = await asked(house, messages=messages, session_id="s")
        assert answer["receipt"]["miss"] is None
        call = house.replicas.calls[-1]
        assert call.prompt_token_ids[: len(chain)] == chain, f"turn {number}"
        assert call.turn.role == ("tool" if number else "user")
        deltas: list[Any] = house.replicas.script(call)[1:]
        ids = [one.token_ids[0] for one in deltas]
        chain = [*call.prompt_token_ids, *ids]
        message = answer["choices"][0]["message"]
        (made,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": made["id"], "content": f"r{number}"}]


async def test_others_learn_that_a_turn_ended_with_a_call() -> None:
    house = House(lambda request: spoken(ONE))

    def states() -> list[str]:
        return [row.state for row in house.directory.table]

    answer = await asked(house, session_id="s")
    assert states() == ["tool"]
    request = house.replicas.calls[-1]
    assert request.reading is not None
    assert called_tools(request.reading, ONE) == ["get"], "what the replica tells the predictor, as tags"
    house.replicas.script = lambda request: spoken("done")
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    await asked(house, session_id="s", messages=[USER, answer["choices"][0]["message"], result])
    assert states() == ["idle"]


async def test_log_probabilities_and_ids_stay_with_their_tokens() -> None:
    deltas: list[Any] = spoken(f"a {ONE}")[1:]

    def scored(request: GenerateRequest) -> Script:
        told = [TokenLogprob(one.token_ids[0], one.text, one.text.encode(), -1.0) for one in deltas]
        pairs = zip(deltas, told, strict=True)
        return [Admitted("replica-1", 0, 0.0), *(replace(one, logprobs=(token,)) for one, token in pairs)]

    chunks = await streamed(House(scored), body(logprobs=True, return_token_ids=True))
    choices = [chunk["choices"][0] for chunk in chunks[1:]]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert ids == [one.token_ids[0] for one in deltas]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(ids)


async def test_several_answers_are_read_apart() -> None:
    first: list[Any] = spoken(ONE)
    second = [replace(one, index=1) for one in spoken("text")[1:]]  # type: ignore[type-var]
    both = [one for pair in zip_longest(first[1:], second) for one in pair if one is not None]
    house = House(lambda request: [first[0], *both])
    choices = (await asked(house, n=2))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop"]
    chunks = await streamed(house, body(n=2))
    ends = {
        chunk["choices"][0]["index"]: chunk["choices"][0]["finish_reason"]
        for chunk in chunks
        if chunk["choices"][0]["finish_reason"]
    }
    assert ends == {0: "tool_calls", 1: "stop"}


async def test_a_cut_answer_loses_no_text() -> None:
    for cut in (ONE[:20], "so <tool_"):
        said = say([cut], ids=TOKENIZER.encode(cut, add_special_tokens=False)[:1], finish="length")
        house = House()
        house.replicas.script = lambda request, said=said: said  # type: ignore[misc]
        (choice,) = (await asked(house))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (cut, "length")


async def test_fuzzed_tool_requests_are_answered_or_refused() -> None:
    rng = random.Random(3)
    values: list[Any] = [
        None,
        "",
        "x",
        1,
        -1,
        True,
        [],
        {},
        [None],
        [{}],
        {"type": "function"},
        [GET],
        [CALL],
        "none",
    ]
    values += ["required", {"type": "function", "function": {"name": "get"}}, "\u2028", '{"a": 1}', "{" * 50]
    house = House(lambda request: spoken(ONE))
    async with house.client() as client:
        for _ in range(300):
            messages = [dict(rng.choice([USER, CALLED, RESULT])) for _ in range(rng.randrange(1, 5))]
            sent: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [GET]}
            for _ in range(rng.randrange(3)):
                where = rng.choice([sent, *messages])
                where[
                    rng.choice(["tools", "tool_choice", "tool_calls", "tool_call_id", "content", "role"])
                ] = rng.choice(values)
            response: httpx.Response = await client.post(CHAT, json=sent)
            assert response.status_code in (200, 400), (sent, response.text)
