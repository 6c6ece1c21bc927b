"""The openai package: chat completions, tools, structured output, Responses."""

from __future__ import annotations

from typing import Any

import openai
from calls import (
    ANSWER_TOKENS,
    FIRST,
    KEY,
    MODEL,
    NO_MODEL,
    OBJECT_TOKENS,
    ORDER,
    REQUEST_S,
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

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=REQUEST_S)
TOOLS: Any = [{"type": "function", "function": WEATHER}]
NAMED: Any = {"type": "function", "function": {"name": WEATHER["name"]}}


def turn(*said: str) -> list[Any]:
    """System message, then user and assistant in turn."""
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": system()},
        *({"role": roles[place % 2], "content": text} for place, text in enumerate(said)),
    ]


def ask(messages: list[Any], **fields: Any) -> Any:
    fields = {"max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def check_usage(usage: Any) -> None:
    assert usage is not None, "no usage"
    assert usage.prompt_tokens > 0 < usage.completion_tokens, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


@call("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@call("chat")
def chat() -> None:
    answer = ask(turn(FIRST))
    assert answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason in ("stop", "length"), answer
    check_usage(answer.usage)


@call("stream")
def stream() -> None:
    chunks = list(ask(turn(FIRST), stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    check_usage(chunks[-1].usage)


@call("stream helper")
def stream_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=turn(FIRST), max_tokens=4 * OBJECT_TOKENS, stop=["."]
    ) as events:  # one that is cut off is an error here, and how long an answer gets is drawn
        kinds = {event.type for event in events}
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        assert events.get_final_completion().choices[0].message.content


@call("second turn")
def second_turn() -> dict[str, Any]:
    messages = turn(FIRST)
    answer = ask(messages).choices[0].message
    again = ask([*messages, answer, {"role": "user", "content": SECOND}])
    return check_cached(again.usage.prompt_tokens_details.cached_tokens)


@call("completions")
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="Tea is", max_tokens=ANSWER_TOKENS)
    assert answer.choices[0].text
    check_usage(answer.usage)


@call("logprobs")
def logprobs() -> None:
    answer = ask(turn(FIRST), logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs.content[0].logprob <= 0


@call("n, seed, stop, penalties")
def sampling() -> None:
    fields = {"n": 2, "seed": 1, "temperature": 1, "stop": ["\n\n"], "frequency_penalty": 0.1}
    assert len(ask(turn(FIRST), **fields).choices) == 2


@call("reasoning_effort")
def reasoning() -> dict[str, Any]:
    message = ask(turn(FIRST), reasoning_effort="low").choices[0].message
    thought = (message.model_extra or {}).get("reasoning_content")
    assert thought is None or isinstance(thought, str), f"reasoning_content: {thought!r}"
    return {"detail": "reasoning_content" if thought else "no reasoning in this answer"}


@call("tools: required, two steps", "tools")
def tools_required() -> dict[str, Any]:
    return two_steps("required")


@call("tools: named", "tools")
def tools_named() -> dict[str, Any]:
    return two_steps(NAMED)


def two_steps(choice: Any) -> dict[str, Any]:
    messages = turn(WEATHER_QUESTION)
    first = ask(messages, tools=TOOLS, tool_choice=choice, max_tokens=OBJECT_TOKENS).choices[0]
    assert first.message.tool_calls, f"no call: {first}"
    made = first.message.tool_calls[0]
    assert made.function.name == WEATHER["name"], made
    check_weather(made.function.arguments)
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": WEATHER_ANSWER}
        for each in first.message.tool_calls
    ]
    second = ask([*messages, first.message, *results], tools=TOOLS, tool_choice="none")
    assert isinstance(second.choices[0].message.content, str), second
    return check_cached(second.usage.prompt_tokens_details.cached_tokens)


@call("tools: auto", "tools")
def tools_auto() -> dict[str, Any]:
    choice = ask(turn(WEATHER_QUESTION), tools=TOOLS, max_tokens=OBJECT_TOKENS).choices[0]
    assert choice.message.content is not None or choice.message.tool_calls, choice
    return {"detail": "a call" if choice.message.tool_calls else "text"}


@call("tools: stream", "tools")
def tools_stream() -> None:
    chunks = ask(
        turn(WEATHER_QUESTION),
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=OBJECT_TOKENS,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    made = [part for choice in choices for part in choice.delta.tool_calls or () if part.index == 0]
    assert made, "no call in the stream"
    assert made[0].id, "a call without an id"
    assert made[0].function.name == WEATHER["name"], made[0]
    check_weather("".join(part.function.arguments or "" for part in made))
    assert choices[-1].finish_reason == "tool_calls", choices[-1].finish_reason


@call("parse: json_schema", "schema")
def parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=turn(ORDER), response_format=Order, max_tokens=OBJECT_TOKENS, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Order), answer


@call("json_object", "schema")
def json_object() -> dict[str, Any]:
    choice = ask(turn(ORDER), response_format={"type": "json_object"}, max_tokens=OBJECT_TOKENS).choices[0]
    assert choice.message.content.lstrip().startswith("{"), choice.message.content
    return {"detail": f"finish_reason {choice.finish_reason}"}


@call("error: model")
def wrong_model() -> dict[str, Any]:
    return expect_error(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model=NO_MODEL, messages=turn(FIRST)),
        says=NO_MODEL,
    )


@call("error: field")
def wrong_field() -> dict[str, Any]:
    return expect_error(openai.BadRequestError, lambda: ask(turn(FIRST), temperature=9), says="temperature")


def respond(given: Any = FIRST, **fields: Any) -> Any:
    fields = {"instructions": system(), "max_output_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
    return client.responses.create(model=MODEL, input=given, **fields)


@call("responses", "responses")
def responses() -> None:
    answer = respond()
    assert answer.output_text, answer
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@call("responses: stream", "responses")
def responses_stream() -> None:
    events = list(respond(stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    assert "response.output_text.delta" in kinds, kinds
    assert events[-1].response.output_text


@call("responses: previous_response_id", "responses")
def responses_second_turn() -> dict[str, Any]:
    told = system()
    first = respond(instructions=told)
    second = respond(SECOND, instructions=told, previous_response_id=first.id)
    return check_cached(second.usage.input_tokens_details.cached_tokens)


@call("responses: tools", "responses", "tools")
def responses_tools() -> None:
    told, tools = system(), [{"type": "function", **WEATHER, "strict": True}]
    asked = [{"role": "user", "content": WEATHER_QUESTION}]
    fields = {"instructions": told, "tools": tools, "max_output_tokens": OBJECT_TOKENS}
    first = respond(asked, tool_choice="required", parallel_tool_calls=False, **fields)
    (made,) = [item for item in first.output if item.type == "function_call"]
    check_weather(made.arguments)
    result = {"type": "function_call_output", "call_id": made.call_id, "output": WEATHER_ANSWER}
    second = respond([*asked, *first.output, result], tool_choice="none", **fields)
    assert [item.type for item in second.output][-1:] == ["message"], second.output


@call("responses: parse", "responses", "schema")
def responses_parse() -> None:
    answer = client.responses.parse(
        model=MODEL, input=ORDER, text_format=Order, max_output_tokens=OBJECT_TOKENS, temperature=0
    )
    assert isinstance(answer.output_parsed, Order), answer


if __name__ == "__main__":
    run()
