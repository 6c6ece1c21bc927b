"""The anthropic package: messages, tools, structured output, counting tokens."""

from __future__ import annotations

from typing import Any

import anthropic
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

client = anthropic.Anthropic(base_url=ROOT_URL, api_key=KEY, max_retries=0, timeout=REQUEST_S)
TOOLS: Any = [
    {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(*messages: Any, **fields: Any) -> Any:
    fields = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "system": system(), **fields}
    return client.messages.create(messages=list(messages), **fields)


@call("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@call("message", "messages")
def message() -> None:
    answer = ask(user(FIRST))
    assert answer.content[0].text, answer
    assert answer.stop_reason in ("end_turn", "max_tokens"), answer.stop_reason
    assert (
        answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        > 0
        < answer.usage.output_tokens
    )


@call("stream", "messages")
def stream() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=ANSWER_TOKENS, system=system(), messages=[user(FIRST)]
    ) as events:
        text = "".join(events.text_stream)
        whole = events.get_final_message()
    assert text == whole.content[0].text
    assert whole.usage.output_tokens > 0
    assert whole.stop_reason in ("end_turn", "max_tokens"), whole.stop_reason


@call("second turn, cache_control", "messages")
def second_turn() -> dict[str, Any]:
    told = [{"type": "text", "text": system(), "cache_control": {"type": "ephemeral"}}]
    first = ask(user(FIRST), system=told)
    second = ask(user(FIRST), {"role": "assistant", "content": first.content}, user(SECOND), system=told)
    return check_cached(second.usage.cache_read_input_tokens)


@call("thinking", "messages")
def thinking() -> dict[str, Any]:
    """Adaptive thinking is what Claude Code asks of every model."""
    answer = ask(user(FIRST), thinking={"type": "adaptive"})
    assert answer.content, answer
    return {"detail": ", ".join(block.type for block in answer.content)}


@call("tools: two steps", "messages", "tools")
def tools() -> dict[str, Any]:
    told, fields = system(), {"tools": TOOLS, "max_tokens": OBJECT_TOKENS}
    one = {"type": "any", "disable_parallel_tool_use": True}  # a small model ends no list of calls
    first = ask(user(WEATHER_QUESTION), system=told, tool_choice=one, **fields)
    assert first.stop_reason == "tool_use", first.stop_reason
    made = [block for block in first.content if block.type == "tool_use"]
    check_weather(made[0].input)
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": WEATHER_ANSWER} for each in made]
    said = {"role": "assistant", "content": first.content}
    second = ask(
        user(WEATHER_QUESTION), said, user(results), system=told, tool_choice={"type": "none"}, **fields
    )
    assert second.stop_reason in ("end_turn", "max_tokens"), second.stop_reason
    return check_cached(second.usage.cache_read_input_tokens)


@call("tools: stream", "messages", "tools")
def tools_stream() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=OBJECT_TOKENS,
        tools=TOOLS,
        tool_choice={"type": "tool", "name": WEATHER["name"]},
        messages=[user(WEATHER_QUESTION)],
    ) as events:
        parts = "".join(event.partial_json for event in events if event.type == "input_json")
        whole = events.get_final_message()
    (made,) = [block for block in whole.content if block.type == "tool_use"]
    check_weather(made.input)
    check_weather(parts)


@call("parse: json_schema", "messages", "schema")
def parse() -> None:
    answer = client.messages.parse(
        model=MODEL, max_tokens=OBJECT_TOKENS, messages=[user(ORDER)], output_format=Order
    )
    assert isinstance(answer.parsed_output, Order), answer


@call("count_tokens", "messages")
def count_tokens() -> None:
    told = system()
    counted = client.messages.count_tokens(model=MODEL, system=told, messages=[user(FIRST)]).input_tokens
    usage = ask(user(FIRST), system=told).usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted == usage.input_tokens + cached, f"{counted} counted, {usage}"


@call("error: model", "messages")
def wrong_model() -> dict[str, Any]:
    return expect_error(anthropic.NotFoundError, lambda: ask(user(FIRST), model=NO_MODEL), says=NO_MODEL)


@call("error: field", "messages")
def wrong_field() -> dict[str, Any]:
    return expect_error(
        anthropic.BadRequestError, lambda: ask(user(FIRST), extra_body={"temperature": 9}), says="temperature"
    )


if __name__ == "__main__":
    run()
