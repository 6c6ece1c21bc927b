"""langchain-openai: chat, streaming, tools, structured output in its three ways, Responses."""

from __future__ import annotations

from typing import Any, Literal

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
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class WeatherArguments(BaseModel):
    """What the tool is asked."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=3)


@tool(args_schema=WeatherArguments)
def get_weather(city: str, days: int) -> str:
    """Look up the weather of a city."""
    return WEATHER_ANSWER


def model(**fields: Any) -> ChatOpenAI:
    fields = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
    return ChatOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=REQUEST_S, **fields)


def turn(question: str) -> list[Any]:
    return [SystemMessage(system()), HumanMessage(question)]


def cached_of(answer: AIMessage) -> int | None:
    assert answer.usage_metadata is not None, "no usage"
    return answer.usage_metadata.get("input_token_details", {}).get("cache_read")


@call("invoke")
def invoke() -> None:
    answer = model().invoke(turn(FIRST))
    assert answer.content, answer
    assert answer.usage_metadata is not None, "no usage"
    assert answer.usage_metadata["output_tokens"] > 0, answer.usage_metadata


@call("stream")
def stream() -> None:
    whole: AIMessageChunk | None = None
    for chunk in model(stream_usage=True).stream(turn(FIRST)):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content, whole
    assert whole.usage_metadata is not None, "no usage"


@call("batch")
def batch() -> None:
    assert all(answer.content for answer in model().batch([turn(FIRST), turn(SECOND)]))


@call("second turn")
def second_turn() -> dict[str, Any]:
    messages = turn(FIRST)
    first = model().invoke(messages)
    return check_cached(cached_of(model().invoke([*messages, first, HumanMessage(SECOND)])))


@call("logprobs")
def logprobs() -> None:
    assert model(logprobs=True).invoke(turn(FIRST)).response_metadata["logprobs"]["content"]


@call("completions (OpenAI)")
def completions() -> None:
    assert OpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=ANSWER_TOKENS).invoke("Tea is")


@call("bind_tools: two steps", "tools")
def bind_tools() -> dict[str, Any]:
    messages, big = turn(WEATHER_QUESTION), model(max_tokens=OBJECT_TOKENS)
    first = big.bind_tools([get_weather], tool_choice="any").invoke(messages)
    assert first.tool_calls, first
    check_weather(first.tool_calls[0]["args"])
    results = [ToolMessage(WEATHER_ANSWER, tool_call_id=made["id"]) for made in first.tool_calls]
    second = big.bind_tools([get_weather], tool_choice="none").invoke([*messages, first, *results])
    assert not second.tool_calls, second
    return check_cached(cached_of(second))


@call("bind_tools: stream", "tools")
def bind_tools_stream() -> None:
    bound = model(max_tokens=OBJECT_TOKENS).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    whole: AIMessageChunk | None = None
    for chunk in bound.stream(turn(WEATHER_QUESTION)):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    check_weather(whole.tool_calls[0]["args"])


def structured(method: str, **fields: Any) -> None:
    how = {"method": method, "include_raw": True, **fields}
    try:
        found = model(max_tokens=OBJECT_TOKENS).with_structured_output(Order, **how).invoke(turn(ORDER))
    except openai.LengthFinishReasonError:
        assert method == "json_mode", "any object may be as long as the model likes, but not this one"
        return
    if method == "json_mode":  # which promises an object, not this one
        assert found["raw"].content.lstrip().startswith("{"), found
    else:
        assert isinstance(found["parsed"], Order), found


@call("with_structured_output: json_schema", "schema")
def structured_json_schema() -> None:
    structured("json_schema", strict=True)


@call("with_structured_output: function_calling", "tools")
def structured_function_calling() -> None:
    structured("function_calling")


@call("with_structured_output: json_mode", "schema")
def structured_json_mode() -> None:
    structured("json_mode")


@call("error: model")
def wrong_model() -> dict[str, Any]:
    return expect_error(
        openai.NotFoundError, lambda: model(model=NO_MODEL).invoke(turn(FIRST)), says=NO_MODEL
    )


@call("responses", "responses")
def responses() -> None:
    answer = model(use_responses_api=True).invoke(turn(FIRST))
    assert answer.text, answer


@call("responses: stream", "responses")
def responses_stream() -> None:
    assert "".join(chunk.text for chunk in model(use_responses_api=True).stream(turn(FIRST)))


@call("responses: previous_response_id", "responses")
def responses_second_turn() -> dict[str, Any]:
    chain = model(use_responses_api=True, use_previous_response_id=True)
    messages = turn(FIRST)
    first = chain.invoke(messages)
    return check_cached(cached_of(chain.invoke([*messages, first, HumanMessage(SECOND)])))


if __name__ == "__main__":
    run()
