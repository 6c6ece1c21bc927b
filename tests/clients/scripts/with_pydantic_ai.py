"""pydantic-ai: agents over chat completions, Responses and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

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
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
)
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def chat(name: str = MODEL) -> Model:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=KEY))


def responses() -> Model:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))


def messages() -> Model:
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT_URL, api_key=KEY))


def agent(model: Model, tokens: int = ANSWER_TOKENS, **fields: Any) -> Agent[None, Any]:
    settings: Any = {"max_tokens": tokens, "timeout": REQUEST_S}
    return Agent(model, instructions=system(), model_settings=settings, retries=0, **fields)


def text(model: Model) -> None:
    answer = agent(model).run_sync(FIRST)
    assert answer.output, answer
    assert answer.usage.output_tokens > 0, answer.usage


def stream(model: Model) -> None:
    with agent(model).run_stream_sync(FIRST) as answer:
        assert "".join(answer.stream_text(delta=True))


def second_turn(model: Model) -> dict[str, Any]:
    same = agent(model)
    first = same.run_sync(FIRST)
    second = same.run_sync(SECOND, message_history=first.all_messages())
    return check_cached(second.usage.cache_read_tokens)


def tool_loop(model: Model) -> dict[str, Any]:
    """A tool in the first step, the answer in the second."""
    asked: list[dict[str, Any]] = []

    def settings(context: Any) -> Any:
        choice = "required" if context.run_step == 1 else "none"
        one = {"parallel_tool_calls": False}  # a toy goes on calling, and the last call is cut: an error here
        return {"max_tokens": OBJECT_TOKENS, "timeout": REQUEST_S, "tool_choice": choice, **one}

    helper: Agent[None, str] = Agent(model, instructions=system(), model_settings=settings, retries=0)

    @helper.tool_plain
    def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Look up the weather of a city."""
        asked.append({"city": city, "days": days})
        return WEATHER_ANSWER

    answer = helper.run_sync(WEATHER_QUESTION)
    assert asked, "no call"
    check_weather(asked[0])
    assert answer.output, answer
    return check_cached(answer.usage.cache_read_tokens)


def output(model: Model, kind: Any = Order) -> None:
    found = agent(model, OBJECT_TOKENS, output_type=kind).run_sync(ORDER)
    assert isinstance(found.output, Order), found


call("text")(lambda: text(chat()))
call("stream")(lambda: stream(chat()))
call("second turn")(lambda: second_turn(chat()))
call("tool: two steps", "tools")(lambda: tool_loop(chat()))
call("output_type: ToolOutput", "tools")(lambda: output(chat(), ToolOutput(Order)))
call("output_type: NativeOutput", "schema")(lambda: output(chat(), NativeOutput(Order)))


@call("output_type: PromptedOutput", "schema")
def prompted() -> dict[str, Any]:
    """An object is promised (json_object), not this one: that it is another one is the model's choice."""
    try:
        output(chat(), PromptedOutput(Order))
    except UnexpectedModelBehavior as error:
        return {"detail": f"an object, which is no order: {error}"}
    return {"detail": "an order"}


@call("error: model")
def wrong_model() -> dict[str, Any]:
    return expect_error(ModelHTTPError, lambda: text(chat(NO_MODEL)), says=NO_MODEL)


def plan(name: str, model: Callable[[], Model], need: str) -> None:
    """Plan what is asked of the other two interfaces."""
    call(f"{name}: text", need)(lambda: text(model()))
    call(f"{name}: stream", need)(lambda: stream(model()))
    call(f"{name}: second turn", need)(lambda: second_turn(model()))
    call(f"{name}: tool, two steps", need, "tools")(lambda: tool_loop(model()))
    call(f"{name}: output_type", need, "tools")(lambda: output(model()))


plan("responses", responses, "responses")
plan("anthropic", messages, "messages")


if __name__ == "__main__":
    run()
