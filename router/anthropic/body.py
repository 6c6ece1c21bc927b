"""Pydantic models of the bodies of /v1/messages and /v1/messages/count_tokens.

They say which fields there are; lengths and values are bounded where the request becomes a chat request.
Fields of content blocks are told apart by `type` when that is done, so that errors name the block's place.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, create_model

from samovar.configs.settings import LimitsSettings
from samovar.router.openai import CacheMark, Part, Skipped, StrictModel, Word, passed_fields, unbuilt_fields


class BlockSource(StrictModel):
    """The source of a `document`; `data` of one of `type: text` is its text."""

    type: Word | None = None
    data: str | None = None


class ContentBlock(StrictModel):
    """A block of a message: `text`, `thinking`, `redacted_thinking`, `tool_use`, `tool_result`, or others."""

    type: Word
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    source: BlockSource | str | None = None
    content: str | Annotated[list[Part], Field(fail_fast=True)] | dict[str, Any] | None = None
    is_error: bool | None = None
    cache_control: CacheMark = None


class AnthropicMessage(StrictModel):
    """A message of a conversation."""

    role: Word
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class AnthropicTool(StrictModel):
    """A tool; without `type`, or `custom`, it is the client's own."""

    name: str
    type: Word | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheMark = None


class AnthropicToolChoice(StrictModel):
    """`tool_choice`: `auto`, `none`, `any` or `tool` with a name."""

    type: Word
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """`thinking`: `enabled`, `adaptive` or `disabled`."""

    type: Word


class JsonOutput(StrictModel):
    """`output_config.format`: a JSON schema for the answer."""

    type: Word
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class OutputConfig(StrictModel):
    """`output_config`."""

    effort: Word | None = None
    format: JsonOutput | None = None


class AnthropicMetadata(StrictModel):
    """`metadata`."""

    user_id: str | None = None


class MessagesBody(StrictModel):
    """The body of POST /v1/messages. Without `max_tokens`, that of /v1/messages/count_tokens.

    `bounded_messages_body` adds what it has in common with a chat's.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Skipped]

    model: str
    messages: list[AnthropicMessage]
    max_tokens: int | None = None
    system: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    metadata: AnthropicMetadata | None = None
    cache_control: CacheMark = None
    mcp_servers: list[Skipped] | None = None
    container: Any = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None


def bounded_messages_body(limits: LimitsSettings) -> type[MessagesBody]:
    """Return `MessagesBody` with its lists bounded by `limits`, and with the fields of a chat."""
    messages = Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=limits.messages_max, fail_fast=True)
    ]
    tools = Annotated[list[AnthropicTool], Field(max_length=limits.tools_max, fail_fast=True)]
    stops = Annotated[list[str], Field(max_length=limits.stop_max, fail_fast=True)]
    return create_model(
        "BoundedMessagesBody",
        __base__=MessagesBody,
        **unbuilt_fields(MessagesBody),
        **passed_fields(limits, MessagesBody),
        messages=(messages, ...),
        tools=(tools | None, None),
        stop_sequences=(stops | None, None),
    )
