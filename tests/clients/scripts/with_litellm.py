"""litellm: as an OpenAI-compatible server, as vLLM, and by Anthropic's interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import litellm
from calls import (
    ANSWER_TOKENS,
    FIRST,
    KEY,
    MODEL,
    NO_MODEL,
    OBJECT_TOKENS,
    ORDER,
    REQUEST_S,
    ROOT_URL,
    SECOND,
    URL,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    Order,
    call,
    check_cached,
    check_weather,
    expect_error,
    run,
    system,
)

litellm.suppress_debug_info = True
TOOLS = [{"type": "function", "function": WEATHER}]
ANTHROPIC_TOOLS = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(way: str, *messages: Any, told: str = "", **fields: Any) -> Any:
    fields = {"max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
    return litellm.completion(
        model=f"{way}/{fields.pop('model', MODEL)}",
        api_base=ROOT_URL if way == "anthropic" else URL,
        api_key=KEY,
        messages=[{"role": "system", "content": told or system()}, *messages],
        num_retries=0,
        timeout=REQUEST_S,
        **fields,
    )


def chat(way: str) -> None:
    answer = ask(way, user(FIRST))
    assert answer.choices[0].message.content, answer
    assert answer.usage.prompt_tokens > 0 < answer.usage.completion_tokens, answer.usage


def stream(way: str) -> None:
    chunks = list(ask(way, user(FIRST), stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
    assert usage.completion_tokens > 0, usage


def second_turn(way: str) -> dict[str, Any]:
    told = system()
    first = ask(way, user(FIRST), told=told).choices[0].message
    second = ask(way, user(FIRST), first.model_dump(), user(SECOND), told=told)
    return check_cached(second.usage.prompt_tokens_details.cached_tokens)


def tools(way: str) -> dict[str, Any]:
    told, fields = system(), {"tools": TOOLS, "max_tokens": OBJECT_TOKENS}
    first = ask(way, user(WEATHER_QUESTION), told=told, tool_choice="required", **fields).choices[0].message
    assert first.tool_calls, first
    check_weather(first.tool_calls[0].function.arguments)
    results = [
        {"role": "tool", "tool_call_id": made.id, "content": WEATHER_ANSWER} for made in first.tool_calls
    ]
    second = ask(
        way, user(WEATHER_QUESTION), first.model_dump(), *results, told=told, tool_choice="none", **fields
    )
    assert isinstance(second.choices[0].message.content, str), second
    return check_cached(second.usage.prompt_tokens_details.cached_tokens)


def schema(way: str) -> None:
    answer = ask(way, user(ORDER), response_format=Order, max_tokens=OBJECT_TOKENS)
    Order.model_validate_json(answer.choices[0].message.content)


def wrong_model(way: str) -> dict[str, Any]:
    return expect_error(litellm.NotFoundError, lambda: ask(way, user(FIRST), model=NO_MODEL), says=NO_MODEL)


PARTS: tuple[tuple[str, tuple[str, ...], Callable[[str], Any]], ...] = (
    ("completion", (), chat),
    ("stream", (), stream),
    ("second turn", (), second_turn),
    ("tools: two steps", ("tools",), tools),
    ("json_schema", ("schema",), schema),
    ("error: model", (), wrong_model),
)


def plan_completion(way: str, *needs: str) -> None:
    for name, more, part in PARTS:
        call(f"{way}/: {name}", *needs, *more)(lambda part=part: part(way))


plan_completion("openai")


@call("openai/: json_object", "schema")
def json_object() -> None:
    answer = ask("openai", user(ORDER), response_format={"type": "json_object"}, max_tokens=OBJECT_TOKENS)
    assert answer.choices[0].message.content.lstrip().startswith("{"), answer


@call("openai/: text_completion")
def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=URL,
        api_key=KEY,
        prompt="Tea is",
        max_tokens=ANSWER_TOKENS,
    )
    assert answer.choices[0].text, answer


@call("openai/: responses", "responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input=FIRST, max_output_tokens=ANSWER_TOKENS
    )
    assert answer.output_text, answer


plan_completion("hosted_vllm")
plan_completion("anthropic", "messages")


def message(way: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    """Anthropic's interface: a dict in Anthropic's form, whatever the server behind it speaks."""
    asked = litellm.anthropic.messages.acreate(
        model=f"{way}/{MODEL}",
        api_base=ROOT_URL if way == "anthropic" else URL,
        api_key=KEY,
        messages=list(messages),
        **{"max_tokens": ANSWER_TOKENS, "system": system(), **fields},
    )
    answer = asyncio.run(asked)
    found: dict[str, Any] = answer if isinstance(answer, dict) else answer.model_dump()
    return found


def message_second_turn(way: str) -> dict[str, Any]:
    told = system()
    first = message(way, user(FIRST), system=told)
    assert first["content"], first
    said = {"role": "assistant", "content": first["content"]}
    second = message(way, user(FIRST), said, user(SECOND), system=told)
    return check_cached(second["usage"].get("cache_read_input_tokens"))


def message_tools(way: str) -> dict[str, Any]:
    fields = {"tools": ANTHROPIC_TOOLS, "max_tokens": OBJECT_TOKENS}
    first = message(way, user(WEATHER_QUESTION), tool_choice={"type": "any"}, **fields)
    made = [block for block in first["content"] if block["type"] == "tool_use"]
    assert made, first
    check_weather(json.dumps(made[0]["input"]))
    return {"detail": f"stop_reason {first['stop_reason']}"}


# By way of chat completions, of Responses, and as it is.
for way, needs in (("hosted_vllm", ()), ("openai", ("responses",)), ("anthropic", ("messages",))):
    call(f"messages, {way}/: second turn", *needs)(lambda way=way: message_second_turn(way))
    call(f"messages, {way}/: tools", *needs, "tools")(lambda way=way: message_tools(way))


if __name__ == "__main__":
    run()
