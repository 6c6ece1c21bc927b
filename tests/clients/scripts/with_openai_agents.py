"""openai-agents: runs over chat completions and, as is its default, over Responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
    Model,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from calls import (
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

asked: list[dict[str, Any]] = []
ENDS = 1024
"""Tokens: an answer must end by itself, as this client takes a response that was cut off as an error."""
TRIES = 5
"""Of an answer that is drawn: the toy repeats itself in some of them until the limit."""
CHAT, RESPONSES = OpenAIChatCompletionsModel, OpenAIResponsesModel
Kind = Callable[..., Model]


@function_tool
def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Look up the weather of a city."""
    asked.append({"city": city, "days": days})
    return WEATHER_ANSWER


def agent(
    kind: Kind, *, model: str = MODEL, tokens: int = OBJECT_TOKENS, wishes: Any = None, **fields: Any
) -> Agent:
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=REQUEST_S)
    return Agent(
        name="tea",
        instructions=system(),
        model=kind(model=model, openai_client=client),
        model_settings=ModelSettings(max_tokens=tokens, include_usage=True, **(wishes or {})),
        **fields,
    )


def ended(ask: Callable[[], Any]) -> Any:
    """Ask until an answer ends by itself: that one does not is no fault of the server."""
    for attempt in range(1, TRIES + 1):
        try:
            return ask()
        except ModelBehaviorError as error:
            if "max_output_tokens" not in str(error) or attempt == TRIES:
                raise


def cached_of(result: Any) -> int:
    return int(result.context_wrapper.usage.input_tokens_details.cached_tokens)


def text(kind: Kind, **fields: Any) -> None:
    helper = agent(kind, tokens=ENDS, **fields)
    result = ended(lambda: Runner.run_sync(helper, FIRST))
    assert result.final_output, result
    assert result.context_wrapper.usage.output_tokens > 0, result.context_wrapper.usage


def stream(kind: Kind) -> None:
    async def events() -> list[str]:
        result = Runner.run_streamed(agent(kind, tokens=ENDS), FIRST)
        kinds = [
            event.data.type async for event in result.stream_events() if event.type == "raw_response_event"
        ]
        assert result.final_output, result
        return kinds

    assert "response.output_text.delta" in ended(lambda: asyncio.run(events()))


def second_turn(kind: Kind) -> dict[str, Any]:
    same = agent(kind, tokens=ENDS)
    first = ended(lambda: Runner.run_sync(same, FIRST))
    messages = [*first.to_input_list(), {"role": "user", "content": SECOND}]
    second = ended(lambda: Runner.run_sync(same, messages))
    return check_cached(cached_of(second))


def tool_loop(kind: Kind) -> dict[str, Any]:
    """The choice `required` holds for the first step: the library then takes it back. One call at a time, as
    the toy goes on calling until its limit.

    A model that goes on calling is no fault of the server.
    """
    asked.clear()
    wishes = {"tool_choice": "required", "parallel_tool_calls": False}
    helper = agent(kind, tokens=ENDS, wishes=wishes, tools=[get_weather])
    result: Any
    try:
        result = ended(lambda: Runner.run_sync(helper, WEATHER_QUESTION, max_turns=4))
    except MaxTurnsExceeded as error:
        result = error.run_data
    assert asked, "no call"
    check_weather(asked[0])
    return check_cached(cached_of(result))


def output(kind: Kind) -> None:
    result = Runner.run_sync(agent(kind, tokens=OBJECT_TOKENS, output_type=Order), ORDER)
    assert isinstance(result.final_output, Order), result.final_output


def wrong_model(kind: Kind) -> dict[str, Any]:
    return expect_error(openai.NotFoundError, lambda: text(kind, model=NO_MODEL), says=NO_MODEL)


for way, kind, needs in (("chat", CHAT, ()), ("responses", RESPONSES, ("responses",))):
    call(f"{way}: run", *needs)(lambda kind=kind: text(kind))
    call(f"{way}: run_streamed", *needs)(lambda kind=kind: stream(kind))
    call(f"{way}: second turn", *needs)(lambda kind=kind: second_turn(kind))
    call(f"{way}: tool, two steps", *needs, "tools")(lambda kind=kind: tool_loop(kind))
    call(f"{way}: output_type", *needs, "schema")(lambda kind=kind: output(kind))
    call(f"{way}: error: model", *needs)(lambda kind=kind: wrong_model(kind))


if __name__ == "__main__":
    run()
