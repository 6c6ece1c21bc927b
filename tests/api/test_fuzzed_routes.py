"""3,000 odd requests over all routes that read a body: each is answered or refused, and none keeps a page.

What is sent is what clients send, changed in one to three places; the changes are those of a seed. Some
streams are left before their end.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.services.service import MODEL, Service, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 3000
AT_ONCE = 6
SEED = 20261123
SERVERS_FAULT = ("server_error", "api_error", "overloaded_error", "internal")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
SAID = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is the weather in Paris?"},
]
CHAT = {"model": MODEL, "messages": SAID, "max_tokens": 4, "temperature": 1, "seed": 1}
WITH_RESULT = [*SAID, {"role": "assistant", "tool_calls": [CALL]}]
WITH_RESULT.append({"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"})
STRICT = {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS, "strict": True}}
CHATS: list[dict[str, Any]] = [
    {**CHAT, "response_format": STRICT},
    {**CHAT, "response_format": {"type": "json_object"}},
    {**CHAT, "structured_outputs": {"regex": "[a-z]{1,5}"}},
    {**CHAT, "structured_outputs": {"choice": ["yes", "no"]}},
    {**CHAT, "structured_outputs": {"grammar": 'start: "a" | "b" start'}},
    {**CHAT, "logit_bias": {"5": 20, "17": -100}, "logprobs": True, "top_logprobs": 2, "stream": True},
    {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "stream": True},
    {**CHAT, "tools": [{"type": "function", "function": {**TOOL, "strict": True}}], "messages": WITH_RESULT},
    {**CHAT, "n": 2, "stop": ["\n"], "frequency_penalty": 0.5, "stream_options": {"include_usage": True}},
]
USER = {
    "role": "user",
    "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
}
USED = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "weather", "input_schema": PARAMETERS}
MESSAGES = {"model": MODEL, "max_tokens": 4, "messages": [USER], "system": "You are terse."}
ROUTES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": CHATS,
    "/v1/completions": [{"model": MODEL, "prompt": "Tea is", "max_tokens": 4, "echo": True, "logprobs": 1}],
    "/v1/messages": [
        {**MESSAGES, "stream": True, "stop_sequences": ["x"], "metadata": {"user_id": "u"}},
        {**MESSAGES, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
        {
            **MESSAGES,
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USED]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "20"}]},
            ],
            "tools": [ANTHROPIC_TOOL],
        },
    ],
    "/v1/messages/count_tokens": [{**MESSAGES, "tools": [ANTHROPIC_TOOL]}],
    "/v1/responses": [
        {"model": MODEL, "input": "Hello", "max_output_tokens": 16, "store": True, "stream": True},
        {
            "model": MODEL,
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "20"},
            ],
            "instructions": "Be terse.",
            "max_output_tokens": 16,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "auto",
        },
        {
            "model": MODEL,
            "input": "Hello",
            "max_output_tokens": 16,
            "text": {"format": {"type": "json_schema", "name": "w", "schema": PARAMETERS}},
            "previous_response_id": "resp_0",
        },
    ],
    "/v1/embeddings": [{"model": MODEL, "input": ["Hello"], "encoding_format": "float"}],
    "/tokenize": [{"model": MODEL, "messages": SAID, "add_generation_prompt": True}, {"prompt": "Hello"}],
    "/detokenize": [{"model": MODEL, "tokens": [1, 2, 3]}],
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -1e300, 1e300),
    *("", "x", "\x00", "\u202e", "\U0001f375", "é" * 300, "null", "required", "auto", "none", "text", "$ref"),
    *([], [[]], [None], {}, {"type": "object"}, {"$ref": "#"}, {"anyOf": []}, {"pattern": "(a+)+$"}),
    *({"type": "array", "items": {"$ref": "#"}}, {"enum": []}, {"const": "a"}, {"not": {}}, ["a"] * 40),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) below a value."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            inner += [(value, key), *places(value[key])]
    return inner


def changed(rng: random.Random, whole: dict[str, Any]) -> bytes:
    """A body with one to three places changed; sometimes cut in the middle."""
    body = copy.deepcopy(whole)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(body) or [({"model": MODEL}, "model")])
        match rng.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.extend(copy.deepcopy(container[: rng.randint(1, 3)]))
            case 2:  # something that belongs elsewhere
                other_container, other_key = rng.choice(places(body) or [({"model": MODEL}, "model")])
                container[key] = (
                    copy.deepcopy(other_container.get(other_key, 1))
                    if isinstance(other_container, dict)
                    else copy.deepcopy(other_container[other_key : other_key + 1])
                )
            case 3 if isinstance(container, dict):
                container[
                    rng.choice(["minItems", "format", "extra", "strict", "name", "type", "x" * 200])
                ] = container.pop(key)
            case _:
                container[key] = copy.deepcopy(rng.choice(ODD))
    for limit in ("max_tokens", "max_output_tokens"):
        if limit in whole and body.get(limit) in (None, -1):  # both: as many as fit
            body[limit] = whole[limit]
    text = json.dumps(body).encode()
    return text[: rng.randrange(len(text))] if rng.random() < 0.02 else text


def send(client: httpx.Client, number: int) -> tuple[str, int, str]:
    """Route, status, and what is wrong with the answer."""
    rng = random.Random(SEED + number)
    route = rng.choice([route for route, bodies in ROUTES.items() for _ in bodies])
    body = changed(rng, rng.choice(ROUTES[route]))
    try:
        status, wrong = answered(client, rng, route, body)
    except httpx.TimeoutException as error:
        status, wrong = 0, repr(error)
    return route, status, wrong and f"{number}: {route} {status} {wrong}\nfor {body[:2000]!r}"


def answered(client: httpx.Client, rng: random.Random, route: str, body: bytes) -> tuple[int, str]:
    """Status, and what is wrong with the answer."""
    headers = {"content-type": "application/json"}
    with client.stream("POST", route, content=body, headers=headers) as response:
        text = b""
        leaves_at = rng.choice([1, 200, 400]) if rng.random() < 0.1 else None
        for chunk in response.iter_bytes():
            text += chunk
            if leaves_at is not None and len(text) >= leaves_at:
                return response.status_code, ""
    status, said = response.status_code, text.decode()
    if status >= 500 or any(f'"{fault}"' in said for fault in SERVERS_FAULT):
        return status, said[-600:]
    if status >= 400 and "error" not in json.loads(said):
        return status, f"is no error in its API's shape: {said[:400]}"
    return status, ""


def test_3000_odd_requests_are_answered_or_refused_and_no_page_is_kept(service: Service) -> None:
    with service.http() as client, ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda number: send(client, number), range(REQUESTS)))
    table = Counter((route, status) for route, status, _ in found)
    for (route, status), count in sorted(table.items()):
        print(f"{count:5}  {status}  {route}")
    assert [wrong for _, _, wrong in found if wrong] == []
    for route in ROUTES:
        assert (
            any(status == 200 for found_at, status, _ in found if found_at == route)
            or route == "/v1/embeddings"
        )
    until("all pages are free again", service.idle)
