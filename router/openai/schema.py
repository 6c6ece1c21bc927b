"""Pydantic models of the request bodies of /v1/chat/completions and /v1/completions.

Types are strict (no "5" for 5, no true for 1), floats are finite, and every list and string is bounded
during validation, so that a hostile body is dropped at its first excess item. Unknown fields are accepted
by name and never built as Python objects. The models define the syntax of a body; `parse.py` interprets it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from configs.sections import ProfileName
from configs.settings import LimitsSettings

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
COUNT_MAX = 2**31 - 1  # more tokens than any model generates
TOKEN_ID_MAX = 2**32 - 1  # token ids are u32 everywhere in Samovar
WORD_CHARS_MAX = 64  # roles, part types, modes: words of the API, not user text

TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
Word = Annotated[str, Field(max_length=WORD_CHARS_MAX)]


class _Skipped:
    """A value of any shape that is ignored: validates to None, without building the value."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        none = core_schema.none_schema()
        return core_schema.with_default_schema(none, default=None, on_error="default")


class _Absent:
    """A field that Samovar does not implement: null and empty values pass, all others are an error."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        empty_list = core_schema.list_schema(max_length=0)
        empty_dict = core_schema.dict_schema(max_length=0)
        return core_schema.union_schema([core_schema.none_schema(), empty_list, empty_dict])


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class _OrNone:
    """Makes a value of any other form None: a hint in another form is no reason to refuse a request."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_default_schema(handler(source), default=None, on_error="default")


class CacheControl(_Strict):
    """`cache_control`, the mark of a part up to which the prompt is kept; `ttl`: see `CacheOptions`."""

    type: Word | None = None
    ttl: Word | Annotated[float, Field(ge=0)] | None = None


CacheMark = Annotated[CacheControl | None, _OrNone()]


class Part(_Strict):
    """A part of a message's content. Only `type: text` is served."""

    type: Word
    text: str | None = None
    cache_control: CacheMark = None


class Message(_Strict):
    """One message of a conversation."""

    role: Word
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: _Absent | None = None
    function_call: _Absent | None = None
    cache_control: CacheMark = None


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheOptions(_Strict):
    """`prompt_cache_options`: `ttl` is "30m", "3600s", "1h" or a number of seconds."""

    mode: Word | None = None
    ttl: Word | Annotated[float, Field(ge=0)] | None = None


class Typed(_Strict):
    """An object of which only the `type` is used, such as `response_format`."""

    type: Word


class TemplateKwargs(_Strict):
    """The `chat_template_kwargs` that templates of served models use."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Skipped]

    enable_thinking: bool | None = None


class _Body(_Strict):
    """Fields common to both kinds of request. `bounded_*` tighten those that have limits."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Skipped]

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=COUNT_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=COUNT_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=COUNT_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    cache_profile: ProfileName | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    metadata: dict[str, str] | None = None
    logit_bias: _Absent | None = None


class ChatBody(_Body):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Annotated[int, Field(ge=1, le=COUNT_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Typed | None = None
    modalities: list[Word] | None = None
    tool_choice: Literal["none"] | None = None
    function_call: Literal["none"] | None = None
    tools: _Absent | None = None
    functions: _Absent | None = None
    audio: _Absent | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class CompletionBody(_Body):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


# Fields refused with `unsupported_parameter` instead of `invalid_value`.
UNSUPPORTED_FIELDS = frozenset(
    {
        "audio",
        "function_call",
        "functions",
        "logit_bias",
        "tool_calls",
        "tool_choice",
        "tools",
    }
)


def _bounded_fields(limits: LimitsSettings) -> dict[str, Any]:
    name = Annotated[str, Field(max_length=limits.id_chars_max)] | None
    stop = Annotated[str, Field(min_length=1, max_length=limits.stop_chars_max)]
    stops = Annotated[list[stop], Field(max_length=limits.stop_max, fail_fast=True)]
    stop_ids = Annotated[list[TokenId], Field(max_length=limits.stop_token_ids_max, fail_fast=True)]
    pairs = Annotated[dict[str, str], Field(max_length=limits.metadata_bytes_max)]
    return {
        "model": (Annotated[str, Field(min_length=1, max_length=limits.id_chars_max)], ...),
        "n": (Annotated[int, Field(ge=1, le=limits.n_max)] | None, None),
        "stop": (stop | stops | None, None),
        "stop_token_ids": (stop_ids | None, None),
        "user": (name, None),
        "session_id": (name, None),
        "prompt_cache_key": (name, None),
        "cache_salt": (name, None),
        "metadata": (pairs | None, None),
    }


def bounded_chat(limits: LimitsSettings) -> type[ChatBody]:
    """Return `ChatBody` bounded by `limits`."""
    messages = Annotated[list[Message], Field(min_length=1, max_length=limits.messages_max, fail_fast=True)]
    top = Annotated[int, Field(ge=0, le=limits.top_logprobs_max)] | None
    return create_model(
        "BoundedChatBody",
        __base__=ChatBody,
        messages=(messages, ...),
        top_logprobs=(top, None),
        **_bounded_fields(limits),
    )


def bounded_completion(limits: LimitsSettings) -> type[CompletionBody]:
    """Return `CompletionBody` bounded by `limits`.

    The length of a prompt of token ids is not bounded here: a prompt that is too long gets the error that
    names both numbers, and `parse.check_structure` has already bounded the list.
    """
    ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    texts = Annotated[list[str], Field(min_length=1, max_length=limits.prompts_max, fail_fast=True)]
    many = Annotated[list[ids], Field(min_length=1, max_length=limits.prompts_max, fail_fast=True)]
    top = Annotated[int, Field(ge=0, le=limits.top_logprobs_max)] | None
    return create_model(
        "BoundedCompletionBody",
        __base__=CompletionBody,
        prompt=(str | texts | ids | many, ...),
        logprobs=(top, None),
        **_bounded_fields(limits),
    )
