"""Turns with a tool, by the openai client against the real service: only what is new is computed."""

from __future__ import annotations

import json
import uuid
from typing import Any

import openai
import pytest

from tests.support.services.service import MODEL

BLOCK = 16
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize(("is_streamed", "turns"), [(False, 4), (True, 10)])
def test_from_the_second_turn_on_only_what_is_new_is_computed(
    client: openai.OpenAI, is_streamed: bool, turns: int
) -> None:
    """The toy calls the tool or says something: the client sends back either as it came."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    sent: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 40}
    sent["user"] = uuid.uuid4().hex
    chain = 0
    for turn in range(turns):
        if is_streamed:
            options: Any = {"include_usage": True}
            with client.chat.completions.stream(messages=messages, stream_options=options, **sent) as stream:
                for _ in stream:
                    pass
                answer: Any = stream.current_completion_snapshot  # the final one may not be cut
        else:
            answer = client.chat.completions.create(messages=messages, **sent)
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= BLOCK * ((chain - 1) // BLOCK), f"turn {turn}"
        chain = usage.prompt_tokens + usage.completion_tokens
        (choice,) = answer.choices
        message = choice.message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls or []:
            assert choice.finish_reason in ("tool_calls", "length")
            assert isinstance(json.loads(call.function.arguments), dict)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{turn} degrees"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": f"And in {turn} days?"})
