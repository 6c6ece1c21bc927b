"""instructor: an object out of a model, in the modes that an OpenAI-compatible server has."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
from calls import (
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
    Order,
    call,
    check_cached,
    expect_error,
    run,
    system,
)
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException


def client(mode: Mode) -> instructor.Instructor:
    plain = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=REQUEST_S)
    return instructor.from_openai(plain, mode=mode)


def fields(*messages: Any, told: str = "", **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "system", "content": told or system()}, *messages],
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": OBJECT_TOKENS,
        **more,
    }


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def order(mode: Mode) -> None:
    found = client(mode).create(response_model=Order, **fields(user(ORDER)))
    assert isinstance(found, Order), found


call("TOOLS", "tools")(lambda: order(Mode.TOOLS))
call("TOOLS_STRICT", "tools")(lambda: order(Mode.TOOLS_STRICT))
call("JSON_SCHEMA", "schema")(lambda: order(Mode.JSON_SCHEMA))


@call("JSON (json_object)", "schema")
def json_mode() -> dict[str, Any]:
    """An object is promised, not this one: that it is another one, or too long, is the model's choice."""
    try:
        order(Mode.JSON)
    except (InstructorRetryException, IncompleteOutputException) as error:
        if not any(sign in str(error) for sign in ("validation error", "incomplete", "max_tokens")):
            raise
        return {"detail": "an object, which is no order"}
    return {"detail": "an order"}


@call("TOOLS: create_partial (stream)", "tools")
def partial() -> None:
    *_, last = client(Mode.TOOLS).create_partial(response_model=Order, **fields(user(ORDER)))
    Order.model_validate(last.model_dump())


@call("JSON_SCHEMA: second turn", "schema")
def second_turn() -> dict[str, Any]:
    """With the raw answer, where usage is."""
    told = system()
    create = client(Mode.JSON_SCHEMA).create_with_completion
    first, _ = create(response_model=Order, **fields(user(ORDER), told=told))
    said = {"role": "assistant", "content": first.model_dump_json()}
    _, raw = create(response_model=Order, **fields(user(ORDER), said, user(SECOND), told=told))
    return check_cached(raw.usage.prompt_tokens_details.cached_tokens)


@call("error: model")
def wrong_model() -> dict[str, Any]:
    def ask() -> None:
        client(Mode.MD_JSON).create(response_model=Order, **fields(user(FIRST), model=NO_MODEL))

    return expect_error(InstructorRetryException, ask, says=NO_MODEL)


@call("RESPONSES_TOOLS", "responses", "tools")
def responses() -> None:
    found = client(Mode.RESPONSES_TOOLS).create(
        response_model=Order,
        model=MODEL,
        messages=[user(ORDER)],
        max_retries=0,
        max_output_tokens=OBJECT_TOKENS,
    )
    assert isinstance(found, Order), found


@call("ANTHROPIC_TOOLS", "messages", "tools")
def anthropic_tools() -> None:
    plain = anthropic.Anthropic(base_url=ROOT_URL, api_key=KEY, max_retries=0, timeout=REQUEST_S)
    found = instructor.from_anthropic(plain, mode=Mode.ANTHROPIC_TOOLS).create(
        response_model=Order,
        model=MODEL,
        messages=[user(ORDER)],
        max_tokens=OBJECT_TOKENS,
        max_retries=0,
    )
    assert isinstance(found, Order), found


if __name__ == "__main__":
    run()
