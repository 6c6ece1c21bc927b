"""Builds the OpenAPI 3.1 document of a table of operations.

Schemas of bodies are those of the pydantic models that parse them, with the limits of the settings; those of
answers are the types of `reference/answers.py`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from samovar.configs.settings import LimitsSettings
from samovar.router.reference.answers import ErrorJson, MessagesErrorJson

Json = dict[str, Any]
Body = Callable[[LimitsSettings], type[BaseModel]]
Access = Literal["tenant", "admin", "open"]

COMPONENT = "#/components/schemas/{model}"
JSON_TYPE = "application/json"
SCHEMES = ("bearer", "header")
BOUNDS = {"ge": "minimum", "le": "maximum"}
"""Bounds behind a validator of ours: pydantic passes them on under its own names."""
NOTHING: tuple[tuple[str, Any], ...] = (("default", None), ("additionalProperties", {}))
INTRODUCTION = """\
LLM chat with a tiered KV cache, behind OpenAI's and Anthropic's APIs.

**Keys.** With `auth.api_keys`, `auth.keys_file` or `auth.oidc` every route but `GET /health` and the \
files of the live page needs a key, as `Authorization: Bearer KEY` or \
`x-api-key: KEY`, or a token of the issuer, as the first; without them none does, and only local \
hosts are answered. Operations marked \
`x-needs: auth.admin_key` need the administrator's key where there are keys.

**Errors** have OpenAI's shape, below `/v1/messages` Anthropic's; `param` names the field at fault, `code` \
is for programs. Refusals with 429 and 503 carry `Retry-After` (seconds). Every answer has an `x-request-id`.

**Streams** (`stream: true`) are server-sent events (`text/event-stream`). Comments (`: ping`) keep a silent \
stream open; an error in the middle is an event, too.

**Answers** carry a `receipt`, and the headers `x-replica` and `x-cache`; `x-ignored-fields` names fields \
that were not read."""
REFUSED = """\
Refused. 400: the body or a field; 401: no key, or a wrong one; 403: not with this key, or from this host; \
404: no such route, model, session, response or entry; 405: another method; 408: sent too slowly; 409: \
changed meanwhile, or a question would not hold any more; 413, 431: too large; \
415: not called JSON; 429: too many requests, with `Retry-After`."""
FAILED = """\
Failed. 500: an error of ours, with the request's id; 503: loading, draining, stopping, or a clear that did \
not reach everything (`clear_incomplete`), with `Retry-After`."""


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """A parameter of an operation's query."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What the document says of one method of a route.

    `body`: returns the model of the body, given the limits. `answer`: the type of the answer's JSON,
    or a media type; None: it is always refused. `events`: what a stream has, where `stream: true` is served;
    `event`: the type of each, if they have one.
    `access`: who may call it where there are API keys. `statuses`: other statuses that are no errors of the
    common shape, with the type of the answer's JSON; None: it has no body.
    """

    group: str
    summary: str
    answer: Any | None
    description: str = ""
    body: Body | None = None
    is_body_optional: bool = False
    events: str = ""
    event: Any | None = None
    query: Sequence[QueryParameter] = ()
    access: Access = "tenant"
    statuses: Mapping[int, Any] | None = None


def build_document(
    operations: Mapping[tuple[str, str], Operation], limits: LimitsSettings, version: str
) -> Json:
    """Return the OpenAPI document; keys of `operations` are method and path, as Starlette writes it."""
    schemas = _Schemas(limits)
    paths: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        made = _operation(method, path, operation, schemas)
        item = paths.setdefault(re.sub(r":\w+}", "}", path), {})
        parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)", path)]
        if parameters:
            item["parameters"] = parameters
        item[method.lower()] = made
    schemas.of_answer(ErrorJson)
    schemas.of_answer(MessagesErrorJson)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "Samovar",
            "version": version,
            "description": INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "the service that this document comes from"}],
        "security": [{scheme: []} for scheme in SCHEMES],
        "tags": [{"name": group} for group in dict.fromkeys(one.group for one in operations.values())],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.named.items())),
            "responses": {
                "Refused": _refusal(REFUSED, "Error"),
                "Failed": _refusal(FAILED, "Error"),
                "MessagesRefused": _refusal(REFUSED, "MessagesError"),
                "MessagesFailed": _refusal(FAILED, "MessagesError"),
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "an API key"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


class _Schemas:
    """Collects the schemas of a document, each once, under names without `Bounded` and `Json`."""

    def __init__(self, limits: LimitsSettings) -> None:
        self._limits = limits
        self.named: dict[str, Json] = {}

    def of_body(self, body: Body) -> Json:
        """Return the reference of a body's schema."""
        model = body(self._limits)
        return self._add(model.__name__, model.model_json_schema(ref_template=COMPONENT))

    def of_answer(self, answer: Any) -> Json:
        """Return the reference of an answer's schema; of `dict` a schema of any object."""
        if answer is dict:
            return {"type": "object"}
        return self._add(answer.__name__, TypeAdapter(answer).json_schema(ref_template=COMPONENT))

    def _add(self, name: str, schema: Json) -> Json:
        parts = {**schema.pop("$defs", {}), name: schema}
        for part, told in parts.items():
            named = _renamed(told)
            assert self.named.setdefault(_name(part), named) == named, f"two schemas are called {_name(part)}"
        return {"$ref": COMPONENT.format(model=_name(name))}


def _name(name: str) -> str:
    return name.removeprefix("Bounded").removesuffix("Json").removeprefix("_")


def _renamed(schema: Any) -> Any:
    """Return a schema with the names of components, and without the titles that repeat fields' names."""
    if isinstance(schema, list):
        return [_renamed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    for key, value in schema.items():
        if key == "$ref":
            made[key] = COMPONENT.format(model=_name(value.rsplit("/", 1)[1]))
        elif key == "properties":
            made[key] = {name: _renamed(one) for name, one in value.items()}
        elif key == "description":
            made[key] = " ".join(str(value).split())
        elif key != "title" and (key, value) not in NOTHING:
            made[BOUNDS.get(str(key), str(key))] = _renamed(value)
    return made


def _operation(method: str, path: str, operation: Operation, schemas: _Schemas) -> Json:
    made: Json = {
        "operationId": _operation_id(method, path),
        "tags": [operation.group],
        "summary": operation.summary,
    }
    if operation.description:
        made["description"] = operation.description
    if operation.access == "open":
        made["security"] = []
    if operation.access == "admin":
        made["x-needs"] = "auth.admin_key"
    if operation.query:
        made["parameters"] = [
            {"name": one.name, "in": "query", "description": one.description, "schema": dict(one.schema)}
            for one in operation.query
        ]
    if operation.body is not None:
        made["requestBody"] = {
            "required": not operation.is_body_optional,
            "content": {JSON_TYPE: {"schema": schemas.of_body(operation.body)}},
        }
    made["responses"] = _responses(path, operation, schemas)
    return made


def _responses(path: str, operation: Operation, schemas: _Schemas) -> Json:
    made: Json = {}
    if isinstance(operation.answer, str):
        made["200"] = {
            "description": operation.summary,
            "content": {operation.answer: {"schema": {"type": "string"}}},
        }
    elif operation.answer is not None:
        content: Json = {JSON_TYPE: {"schema": schemas.of_answer(operation.answer)}}
        if operation.event is not None:
            schemas.of_answer(operation.event)
        if operation.events:
            content["text/event-stream"] = {"schema": {"type": "string", "description": operation.events}}
        made["200"] = {"description": operation.summary, "content": content}
    for status, answer in (operation.statuses or {}).items():
        made[str(status)] = {"description": operation.summary}
        if answer is not None:
            made[str(status)]["content"] = {JSON_TYPE: {"schema": schemas.of_answer(answer)}}
    prefix = "Messages" if path.startswith("/v1/messages") else ""
    for status_range, kind in (("4XX", "Refused"), ("5XX", "Failed")):
        made[status_range] = {"$ref": f"#/components/responses/{prefix}{kind}"}
    return made


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z]+", re.sub(r":\w+}", "}", path.removeprefix("/v1")))
    return "_".join([method.lower(), *(words or ["root"])])


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _refusal(description: str, schema: str) -> Json:
    content = {JSON_TYPE: {"schema": {"$ref": COMPONENT.format(model=schema)}}}
    header = {"description": "seconds", "schema": {"type": "integer", "minimum": 0}}
    return {"description": description, "headers": {"Retry-After": header}, "content": content}
