"""Pydantic models of the body of POST /v1/responses.

They say which fields there are; lengths and values are bounded where the request becomes a chat request.
Fields of items are told apart by `type` when that is done, so that errors name the item's place.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, create_model

from samovar.configs.settings import LimitsSettings
from samovar.router.openai import Skipped, StrictModel, Word, passed_fields, unbuilt_fields


class ItemPart(StrictModel):
    """A part of an item: `input_text`, `output_text`, `refusal`, `summary_text`, `reasoning_text`, ..."""

    model_config = ConfigDict(extra="allow")

    type: Word = ""
    text: str | None = None
    refusal: str | None = None


ItemParts = Annotated[list[ItemPart], Field(fail_fast=True)]


class InputItem(StrictModel):
    """An item of `input`: a message, reasoning, a call or its output, a reference, or what others have made.

    `input`, `action`, `operation`: what calls are made with that are no function's.
    """

    type: Word | None = None
    id: str | None = None
    role: Word | None = None
    content: str | ItemParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: str | ItemParts | dict[str, Any] | None = None
    summary: ItemParts | None = None
    encrypted_content: str | None = None


class ResponsesTool(StrictModel):
    """A tool: a function, one of text (`custom`), or a `namespace` of functions; others are skipped."""

    type: Word
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponsesTool] | None = None


class ResponsesToolChoice(StrictModel):
    """`tool_choice` as an object."""

    type: Word
    name: str | None = None


class TextForm(StrictModel):
    """`text.format`."""

    type: Word
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(StrictModel):
    """`text`."""

    format: TextForm | None = None
    verbosity: Word | None = None


class ReasoningConfig(StrictModel):
    """`reasoning`; a summary is not made: what the model thinks is in the item's content."""

    effort: Word | None = None
    summary: Word | None = None


class ResponsesBody(StrictModel):
    """The body of POST /v1/responses; `bounded_responses_body` adds what it has in common with a chat's."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Skipped]

    model: str
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Word | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Word] | None = None
    metadata: dict[str, Any] | None = None
    truncation: Word | None = None
    prompt: Any = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


def bounded_responses_body(limits: LimitsSettings) -> type[ResponsesBody]:
    """Return `ResponsesBody` with its lists bounded by `limits`, and with the fields of a chat."""
    items = Annotated[list[InputItem], Field(max_length=limits.messages_max, fail_fast=True)]
    tools = Annotated[list[ResponsesTool], Field(max_length=limits.tools_max, fail_fast=True)]
    return create_model(
        "BoundedResponsesBody",
        __base__=ResponsesBody,
        **unbuilt_fields(ResponsesBody),
        **passed_fields(limits, ResponsesBody),
        input=(str | items | None, None),
        tools=(tools | None, None),
    )
