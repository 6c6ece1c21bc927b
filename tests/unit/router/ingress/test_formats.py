"""What an answer must look like, as bodies ask for it: served, or refused with a name. Never ignored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from samovar.replicas.messages import Delta, Grammar, Refused
from tests.support.router.fake_replica import say
from tests.support.router.router_harness import MODEL, House, chat, error_of, make_settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(OBJECT)
ANY = '{"type": "object"}'
SCHEMA, SO = "response_format.json_schema.schema", "structured_outputs"
NO, OLD = "not supported", "guided_json"


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


SERVED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, SO: None, "guided_choice": None, "grammar": None}, None),
    ({SO: {"json": {}}}, Grammar("json_schema", "{}", f"{SO}.json")),
    ({"guided_json": {}}, Grammar("json_schema", "{}", OLD)),
    ({"json_schema": {}}, Grammar("json_schema", "{}", "json_schema")),
    ({"response_format": schema_format({})}, Grammar("json_schema", "{}", SCHEMA)),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        Grammar("json_schema", "{}", "response_format"),
    ),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", ANY, "response_format")),
    (
        {"response_format": {"type": "json_object", "schema": OBJECT}},
        Grammar("json_schema", TEXT, "response_format"),
    ),
    *(
        ({"response_format": schema_format(OBJECT, **more)}, Grammar("json_schema", TEXT, SCHEMA))
        for more in ({}, {"strict": True}, {"strict": False}, {"strict": None, "description": "x"})
    ),
    ({SO: {"json": OBJECT}}, Grammar("json_schema", TEXT, f"{SO}.json")),
    ({SO: {"json": TEXT}}, Grammar("json_schema", TEXT, f"{SO}.json")),
    ({SO: {"json_object": True}}, Grammar("json_schema", ANY, f"{SO}.json_object")),
    ({SO: {"regex": "a+"}}, Grammar("regex", "a+", f"{SO}.regex")),
    ({SO: {"choice": ["a", "é"]}}, Grammar("choice", '["a", "\\u00e9"]', f"{SO}.choice")),
    ({SO: {"grammar": 'start: "a"'}}, Grammar("grammar", 'start: "a"', f"{SO}.grammar")),
    (
        {SO: {"json": TEXT, "disable_any_whitespace": True}},
        Grammar("json_schema", TEXT[:-1] + ', "x-guidance": {"whitespace_flexible": false}}', f"{SO}.json"),
    ),
    (
        {"guided_json_object": True, "guided_whitespace_pattern": " ?"},
        Grammar("json_schema", ANY[:-1] + ', "x-guidance": {"whitespace_pattern": " ?"}}', f"{OLD}_object"),
    ),
    ({"guided_json": OBJECT}, Grammar("json_schema", TEXT, "guided_json")),
    ({"json_schema": TEXT}, Grammar("json_schema", TEXT, "json_schema")),
    ({"guided_regex": "a"}, Grammar("regex", "a", "guided_regex")),
    ({"regex": "a"}, Grammar("regex", "a", "regex")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"', "guided_grammar")),
    ({"grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"', "grammar")),
    ({"ebnf": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"', "ebnf")),
]  # fmt: skip


@pytest.fixture
async def house() -> House:
    return House()


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with house.client() as client:
        yield client


@pytest.mark.parametrize(("fields", "grammar"), SERVED)
async def test_every_spelling_reaches_the_replica(
    house: House, client: httpx.AsyncClient, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for path, body in ((CHAT, chat("hi")), (COMPLETIONS, {"model": MODEL, "prompt": "hi"})):
        response = await client.post(path, json={**body, **fields})
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
        assert house.replicas.calls[-1].sampling.grammar == grammar


CODES = {
    *("invalid_value", "invalid_type", "invalid_grammar"),
    *("missing_required_parameter", "unsupported_parameter"),
}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA, "required"),
    ({"response_format": {"type": "grammar"}}, "response_format", "'grammar'"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "'structural_tag'"),
    ({"response_format": schema_format({"not": {}})}, SCHEMA, '"not"'),
    ({"response_format": schema_format({"if": {}, "then": {}})}, SCHEMA, '"if", "then"'),
    ({"response_format": schema_format({"unevaluatedItems": False})}, SCHEMA, "unevaluatedItems"),
    ({"response_format": schema_format({"allOf": [{"const": 2**53 + 1}]})}, SCHEMA, "9007199254740993"),
    *(({SO: {name: empty}}, f"{SO}.{name}", "empty") for name, empty in (("regex", ""), ("grammar", ""))),
    ({SO: {"choice": []}}, f"{SO}.choice", "empty"),
    ({SO: {}}, SO, "one of json"),
    ({SO: {"json_object": False}}, SO, "one of json"),
    ({SO: {"whitespace_pattern": " "}}, SO, "one of json"),
    ({SO: {"json": ""}}, f"{SO}.json", "Expecting value"),
    *(({name: ""}, name, "empty") for name in ("guided_regex", "regex", "guided_grammar", "grammar", "ebnf")),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"response_format": schema_format({"$ref": "#/nowhere"})}, SCHEMA, "/nowhere"),
    ({"response_format": schema_format([1])}, SCHEMA, "object"),
    ({SO: {"regex": "(?<=a)b"}}, f"{SO}.regex", "look-behind"),
    ({SO: {"regex": "a", "choice": ["a"]}}, f"{SO}.choice", f"{SO}.regex"),
    ({SO: {"structural_tag": "x"}}, f"{SO}.structural_tag", NO),
    ({SO: {"disable_additional_properties": True}}, f"{SO}.disable_additional_properties", NO),
    ({SO: {"shape": "x"}}, f"{SO}.shape", "not permitted"),
    ({SO: "json"}, SO, ""),
    ({"guided_json": "{"}, "guided_json", "Expecting property name"),
    ({"guided_json": "[", "guided_whitespace_pattern": " "}, "guided_json", "not JSON"),
    ({"guided_json": "[]", "guided_whitespace_pattern": " "}, "guided_json", "object"),
    ({"guided_json": 5}, "guided_json", ""),
    ({"guided_regex": "x", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
    ({"guided_regex": "x" * 70_000}, "guided_regex", "grammar.spec_bytes_max"),
    ({"guided_choice": [1]}, "guided_choice[0]", "a text"),
    ({"guided_grammar": "root ::= foo"}, "guided_grammar", "foo"),
    ({"grammar": "root ::= ("}, "grammar", "Expected"),
    ({"ebnf": "nonsense"}, "ebnf", "nonsense"),
    ({"structural_tag": {"begin": "x"}}, "structural_tag", NO),
    ({"bad_words": ["x"]}, "bad_words", NO),
    ({"logits_processors": ["x"]}, "logits_processors", NO),
    ({"use_beam_search": True}, "use_beam_search", NO),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", NO),
    ({"skip_special_tokens": False}, "skip_special_tokens", NO),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "512"),
    ({"logit_bias": {"hare": 1}}, "logit_bias.hare", "whole number"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {str(token): 1 for token in range(1100)}}, "logit_bias", "1024"),
    ({"logit_bias": [5]}, "logit_bias", "-100 to 100"),
]  # fmt: skip
OF_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"functions": [{"name": "f"}]}, "functions", NO),
    ({"function_call": {"name": "f"}}, "function_call", NO),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"audio": {"voice": "x"}}, "audio", NO),
    ({"web_search_options": {"user_location": None}}, "web_search_options", NO),
    ({"documents": [{"text": "x"}]}, "documents[0]", "text"),
    ({"documents": ["doc_0"]}, "documents", "knowledge.enabled"),
    ({"chat_template": "{{ x }}"}, "chat_template", NO),
    ({"format": "json"}, "format", NO),
    ({"echo": True}, "echo", NO),
]


@pytest.mark.parametrize(("fields", "param", "names"), [*REFUSED, *OF_CHAT])
async def test_what_cannot_be_served_is_a_400_with_its_name_and_reaches_no_replica(
    house: House, client: httpx.AsyncClient, fields: dict[str, Any], param: str, names: str
) -> None:
    bodies = {CHAT: chat("hi"), COMPLETIONS: {"model": MODEL, "prompt": "hi"}}
    if (fields, param, names) in OF_CHAT:
        del bodies[COMPLETIONS]
    for path, body in bodies.items():
        response = await client.post(path, json={**body, **fields})
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, param), error
        assert names in error["message"], error
        assert error["code"] in CODES
    assert not house.replicas.calls


async def test_numbers_that_json_has_not_are_refused(client: httpx.AsyncClient) -> None:
    body = b'{"model":"%s","prompt":"hi","guided_json":{"maximum":%s}}'
    for number in (b"NaN", b"1e999", b"-Infinity"):
        content = body % (MODEL.encode(), number)
        response = await client.post(
            COMPLETIONS, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        error_of(response)


async def test_what_promises_no_form_is_accepted_and_listed(house: House, client: httpx.AsyncClient) -> None:
    harmless = {
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "guided_decoding_backend": "x",
    }
    response = await client.post(
        CHAT, json=chat("hi", **harmless, skip_special_tokens=True, use_beam_search=False)
    )
    assert response.status_code == 200
    assert set(response.headers["x-ignored-fields"].split(", ")) == set(harmless)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses"])
async def test_what_of_a_schema_is_not_followed_is_listed(client: httpx.AsyncClient, path: str) -> None:
    """One tool of an MCP server killed each request of a session."""
    schema = {
        "$schema": "https://example.com/mcp.json",
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "path"},
            "b": {"type": "array", "uniqueItems": True},
        },
    }
    words, tool = ("format.path", "uniqueItems", "$schema"), {"name": "get", "strict": True}
    body: dict[str, Any] = {"model": MODEL, "prompt": "hi", "guided_json": schema}
    if path == CHAT:
        offered = {"type": "function", "function": {**tool, "parameters": schema}}
        body = chat("hi", response_format=schema_format(schema), tools=[offered])
    elif path == "/v1/messages":
        body = chat("hi", max_tokens=5, tools=[{**tool, "input_schema": schema}])
    elif path == "/v1/responses":
        format = {"type": "json_schema", "name": "x", "schema": schema}
        function = {"type": "function", **tool, "parameters": schema}
        body = {"model": MODEL, "input": "hi", "text": {"format": format}, "tools": [function]}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    listed = response.headers["x-ignored-fields"].split(", ")
    places = {
        CHAT: [SCHEMA, "tools.get"],
        COMPLETIONS: ["guided_json"],
        "/v1/messages": ["tools.get"],
        "/v1/responses": ["text.format.schema", "tools.get"],
    }[path]
    wanted = {f"{place}.{word}" for place in places for word in words}
    assert wanted <= set(listed)
    free = chat("hi", tools=[{"type": "function", "function": {"name": "get", "parameters": schema}}])
    assert "x-ignored-fields" not in (await client.post(CHAT, json=free)).headers


async def test_logit_bias_reaches_the_replica(house: House, client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat("hi", logit_bias={"5": -100, "7": 2.5}))
    assert response.status_code == 200
    assert house.replicas.calls[-1].sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert (await client.post(CHAT, json=chat("hi", logit_bias={}))).status_code == 200


async def test_a_grammar_that_a_replica_gives_up_is_an_error_and_no_end() -> None:
    """It grew too complex in the middle of the answer: the client hears of it, in a stream too."""
    whole = say(["Hel", "lo"])
    given_up = [
        *whole[:2],
        Refused("invalid", "guided_regex cannot be served: too many states", param="guided_regex"),
    ]
    house = House(lambda request: given_up)
    async with house.client() as client:
        response = await client.post(CHAT, json=chat("hi", guided_regex="a+"))
        assert (response.status_code, error_of(response)["param"]) == (400, "guided_regex")
        streamed = await client.post(CHAT, json=chat("hi", guided_regex="a+", stream=True))
    assert isinstance(given_up[1], Delta)
    *_, last = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "guided_regex"
    assert '"finish_reason":"' not in streamed.text


async def test_the_limits_are_the_settings() -> None:
    settings = make_settings().model_copy(
        update={"grammar": make_settings().grammar.model_copy(update={"spec_bytes_max": 1024})}
    )
    async with House(settings=settings).client() as client:
        response = await client.post(CHAT, json=chat("hi", guided_regex="x" * 2000))
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_grammar")
        assert (await client.post(CHAT, json=chat("hi", guided_regex="x" * 1000))).status_code == 200
