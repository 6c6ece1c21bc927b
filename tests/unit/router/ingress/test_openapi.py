"""`GET /openapi.json`: valid, with every route of the app, and what it says is what is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from samovar.configs.settings import LimitsSettings
from samovar.router.ingress import operations
from samovar.router.ingress.operations import OPERATIONS, methods_of, openapi_document
from tests.support.router.fake_directory import FakeLink
from tests.support.router.fake_replica import say
from tests.support.router.router_harness import ADMIN_KEY, KEY, MODEL, House, chat, make_settings, spoken

DOCUMENT = openapi_document(LimitsSettings(), "0")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
REPEATED = {"Response"}
"""Schemas of objects with more fields than they list: those of the request."""


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not list."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return made | {"additionalProperties": False} if "properties" in schema else made


CLOSED = {name: one if name in REPEATED else closed(one) for name, one in SCHEMAS.items()}


def wrong(value: Any, schema: dict[str, Any]) -> list[str]:
    """How a value differs from a schema, fields that the schema does not list included."""
    checker = Draft202012Validator({**schema, "components": {"schemas": CLOSED}})
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(value)]


def schema_of(method: str, path: str, status: int) -> dict[str, Any]:
    responses = DOCUMENT["paths"][path][method.lower()]["responses"]
    told = responses.get(str(status)) or responses[f"{status // 100}XX"]
    if "$ref" in told:
        told = DOCUMENT["components"]["responses"][told["$ref"].rsplit("/", 1)[1]]
    schema: dict[str, Any] = told["content"]["application/json"]["schema"]
    return schema


def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_every_route_of_the_app_is_in_the_document_and_no_other(tmp_path: Path) -> None:
    kb = {"enabled": True, "dir": tmp_path / "kb", "embedder": "none"}
    settings = make_settings(knowledge=kb)
    auth = settings.auth.model_copy(update={"keys_file": tmp_path / "keys.json"})
    everything = House(settings=settings.model_copy(update={"auth": auth}))
    served = methods_of(everything.app.routes)
    everything.service.stage("knowledge").close()  # type: ignore[union-attr]
    assert served == set(OPERATIONS), "router/ingress/operations.py says what each route takes and answers"
    fewer = methods_of(House(settings=make_settings(page=False)).app.routes)
    document = openapi_document(LimitsSettings(), "0", fewer)
    assert "/v1/live" not in document["paths"]
    assert sum(len(item.keys() - {"parameters"}) for item in document["paths"].values()) == len(fewer)


def test_ids_are_unique_and_only_health_and_the_page_need_no_key() -> None:
    operations = [
        one for item in DOCUMENT["paths"].values() for name, one in item.items() if name != "parameters"
    ]
    assert len({one["operationId"] for one in operations}) == len(operations) == len(OPERATIONS)
    assert [one["operationId"] for one in operations if one.get("security") == []] == [
        "get_health",
        "get_api_hello",
        "get_root",
        "get_page_name",
    ]


async def test_it_is_served_with_the_limits_of_the_service_and_only_with_a_key() -> None:
    house = House(settings=make_settings(keys={"team": KEY}, limits={"tools_max": 7}))
    async with house.client() as client:
        refused = await client.get("/openapi.json")
        assert refused.status_code == 401
        served = await client.get("/openapi.json", headers={"x-api-key": KEY})
    assert served.headers["content-type"] == "application/json"
    body = served.json()["components"]["schemas"]["ChatBody"]["properties"]["tools"]
    assert body["anyOf"][0]["maxItems"] == 7


ROUTES = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/v1/models/none", None),
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("GET", "/v1/usage", None),
    ("GET", "/v1/sessions", None),
    ("GET", "/v1/sessions/one", None),
    ("GET", "/v1/sessions/none", None),
    ("POST", "/v1/sessions/one/hint", {"event": "typing"}),
    ("POST", "/v1/sessions/one/hint", {}),
    ("GET", "/cache/stats", None),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/tokenize", {}),
    ("POST", "/detokenize", {"tokens": [1, 2]}),
    ("GET", "/tokenizer_info", None),
    ("POST", "/v1/embeddings", {"input": "hi"}),
    ("POST", "/v1/chat/completions", chat(logprobs=True, return_token_ids=True)),
    ("POST", "/v1/chat/completions", chat(max_tokens="many")),
    ("POST", "/v1/completions", {"model": MODEL, "prompt": "hi", "logprobs": 1, "echo": True}),
    ("POST", "/v1/messages", chat(max_tokens=5)),
    ("POST", "/v1/messages", {"model": MODEL}),
    ("POST", "/v1/messages/count_tokens", chat()),
    ("POST", "/v1/responses", {"model": MODEL, "input": "hi"}),
    ("GET", "/v1/responses/resp_none", None),
    ("GET", "/v1/responses/resp_none/input_items", None),
    ("DELETE", "/v1/sessions/one", None),
    ("DELETE", "/v1/cache", None),
    ("POST", "/cache/clear", None),
    ("POST", "/reset_prefix_cache", {"tenant": "local"}),
]


def template_of(path: str) -> str:
    """The document's path of a request's."""
    if path in DOCUMENT["paths"]:
        return path
    begin, rest = "/".join(path.split("/")[:3]), "/".join(["", *path.split("/")[4:]]).rstrip("/")
    (found,) = [
        one for one in DOCUMENT["paths"] if one.startswith(f"{begin}/{{") and one.partition("}")[2] == rest
    ]
    return str(found)


async def test_answers_are_what_the_document_says() -> None:
    house = House(lambda _: say(["Hel", "lo"]), link=FakeLink())
    found = {}
    async with house.client() as client:
        await client.post("/v1/chat/completions", json=chat(), headers={"x-session-id": "one"})
        for method, path, body in ROUTES:
            answer = await client.request(method, path, json=body)
            problems = wrong(answer.json(), schema_of(method, template_of(path), answer.status_code))
            if problems or answer.status_code >= 500:
                found[f"{method} {path} -> {answer.status_code}"] = problems
        stored = (await client.post("/v1/responses", json={"model": MODEL, "input": "hi"})).json()["id"]
        for method in ("GET", "DELETE"):
            answer = await client.request(method, f"/v1/responses/{stored}")
            assert wrong(answer.json(), schema_of(method, "/v1/responses/{response_id}", 200)) == []
        anthropic = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert wrong(anthropic.json(), schema_of("GET", "/v1/models", 200)) == []
        assert (await client.get("/metrics")).headers["content-type"] in (
            DOCUMENT["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
        )
    assert found == {}


async def test_the_administrator_sees_sessions_and_a_starting_service_says_so_as_documented() -> None:
    house = House(settings=make_settings(keys={"team": KEY}, admin_key=ADMIN_KEY), link=FakeLink())
    async with house.client() as client:
        await client.post("/v1/chat/completions", json=chat(), headers={"x-api-key": KEY})
        listed = await client.get("/v1/sessions", headers={"x-api-key": ADMIN_KEY})
    assert listed.json()["data"][0]["tenant"] == "team"
    assert wrong(listed.json(), schema_of("GET", "/v1/sessions", 200)) == []
    transport = httpx.ASGITransport(House().app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        loading = await client.get("/health")
    assert loading.status_code == 503
    assert wrong(loading.json(), schema_of("GET", "/health", 503)) == []


QUERY_READ = re.compile(r"(?:params\.get\(|whole_number\([\w.]+, |_one_of\(request, )\"(\w+)\"")


async def test_what_the_page_and_the_knowledge_base_take_and_answer_is_in_the_document() -> None:
    async with House().client() as client:
        for path, template in (("/", "/"), ("/page/app.js", "/page/{name}")):
            whole = await client.get(path)
            again = await client.get(path, headers={"if-none-match": whole.headers["etag"]})
            told = DOCUMENT["paths"][template]["get"]["responses"]
            assert (again.status_code, again.content, told["304"].keys()) == (304, b"", {"description"})
    router = Path(operations.__file__).parent.parent
    files = ("ingress/knowledge_routes.py", "context/learning/feedback_routes.py")
    source = "".join((router / name).read_text(encoding="utf-8") for name in files)
    told = {
        parameter["name"]
        for path, item in DOCUMENT["paths"].items()
        if path.startswith(("/v1/knowledge", "/v1/feedback"))
        for one in item.values()
        if isinstance(one, dict)
        for parameter in one.get("parameters", ())
    }
    of_pages = {"limit"} if "page_limit(" in source else set()
    assert told == {*QUERY_READ.findall(source), *of_pages}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("/v1/chat/completions", chat(stream_options={"include_usage": True}, tools=[TOOL]), "ChatChunk"),
        ("/v1/completions", {"model": MODEL, "prompt": "hi"}, "Completion"),
    ],
)
async def test_events_of_streams_are_what_the_document_says(
    path: str, body: dict[str, Any], schema: str
) -> None:
    house = House(lambda _: spoken(CALL))
    async with house.client() as client:
        answer = await client.post(path, json={**body, "stream": True})
    *events, done = [
        line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data")
    ]
    assert done == "[DONE]"
    assert len(events) > 1
    for event in events:
        assert wrong(json.loads(event), {"$ref": f"#/components/schemas/{schema}"}) == []


async def test_a_body_that_the_document_allows_is_parsed_and_one_that_it_forbids_is_refused() -> None:
    bodies = [
        (chat(tools=[TOOL], stop=["a"], seed=1, response_format={"type": "json_object"}), True),
        (chat(any_other_field={"a": [1]}), True),
        (chat(temperature=3), False),
        ({"model": MODEL}, False),
        (chat(structured_outputs={"nothing": 1}), False),
    ]
    house = House()
    async with house.client() as client:
        for body, is_right in bodies:
            assert (wrong_body(body) == []) == is_right, body
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code == 200) == is_right, answer.text


def wrong_body(body: dict[str, Any]) -> list[str]:
    schema = {"$ref": "#/components/schemas/ChatBody", "components": {"schemas": SCHEMAS}}
    return [error.message for error in Draft202012Validator(schema).iter_errors(body)]
