"""Pydantic models of the request bodies of the completion and tokenizer routes.

Types are strict (no "5" for 5, no true for 1), floats are finite, and every list and string is bounded
during validation, so that a hostile body is dropped at its first excess item. A value that clients spell
differently and that can have one meaning only is taken (40.0 for 40, "" for no stop string). Unknown fields
are accepted by name and never built as Python objects. The models define the syntax of a body; `parse.py`
interprets it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from samovar.configs.sections import PRIORITY_MAX, ProfileName
from samovar.configs.settings import LimitsSettings
from samovar.replicas.reply import TOOL_NAME
from samovar.router.openai.fields import UNBUILT, UNBUILT_ERROR

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
COUNT_MAX = 2**31 - 1  # more tokens than any model generates
TOKEN_ID_MAX = 2**32 - 1  # token ids are u32 everywhere in Samovar
TOOL_NAME_CHARS_MAX = 256  # in a history: other providers allow longer names than are offered here
WORD_CHARS_MAX = 64  # roles, part types, modes: words of the API, not user text


def _whole(value: Any) -> Any:
    """Return 40 for 40.0, which JavaScript and Lua do not tell apart; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> Any:
    """Return the JSON text of a number or a truth value; anything else as it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _some_stops(value: Any) -> Any:
    """Return `stop` without what means no stop string: "" and null, alone or in a list."""
    if isinstance(value, list):
        return [item for item in value if item is not None and item != ""]
    return None if value == "" else value


TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
Word = Annotated[str, Field(max_length=WORD_CHARS_MAX)]
Whole = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, BeforeValidator(_text)]
Length = Annotated[Whole, Field(ge=-1, le=COUNT_MAX)]
"""A number of tokens; -1: as many as fit."""
Bias = Annotated[float, Field(ge=-100, le=100)]
Retention = Literal["in_memory", "in-memory", "24h"]


class _Skipped:
    """A value of any shape that is ignored: validates to None, without building the value."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        none = core_schema.none_schema()
        return core_schema.with_default_schema(none, default=None, on_error="default")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)  # typing would take (0,) and (False,) for one
class _Unbuilt:
    """Marks a field that Samovar does not implement.

    Null, empty values and the `neutral` ones, which ask for what is done anyway, pass and become None; all
    others are an error of type `UNBUILT_ERROR`.
    """

    neutral: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}

    def _check(self, value: Any) -> None:
        if value is None or value in ("", [], {}):
            return
        is_truth = isinstance(value, bool)
        if any(value == one and isinstance(one, bool) == is_truth for one in self.neutral):
            return
        raise PydanticCustomError(UNBUILT_ERROR, "is not supported")


Absent = Annotated[Any, _Unbuilt()]
"""A field inside another one that is not implemented."""


def unbuilt_fields(model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields that a body of `model` may not have, for `create_model`: those it does not build."""
    return {
        name: (Annotated[Any, _Unbuilt(neutral)], None)
        for name, neutral in UNBUILT.items()
        if name not in model.model_fields
    }


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


# The bases of bodies, for the other APIs.
StrictModel = _Strict
Skipped = _Skipped


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
    """A part of a message's content. Texts are served; what else a history has is shown as a line."""

    type: Word = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    cache_control: CacheMark = None


ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]


class CalledFunction(_Strict):
    """The function of a tool call in a history; `arguments`: mostly the text of a JSON object."""

    name: Annotated[str, Field(max_length=TOOL_NAME_CHARS_MAX)] | None = None
    arguments: Any = None


class CalledCustom(_Strict):
    """A call in a history of a tool whose input is text."""

    name: Annotated[str, Field(max_length=TOOL_NAME_CHARS_MAX)] = ""
    input: str | None = None


class AssistantCall(_Strict):
    """A tool call in a history."""

    id: str | int | None = None
    type: Word | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class Message(_Strict):
    """One message of a conversation. `function_call`, `name`: of histories from before there were tools."""

    role: Word
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    reasoning_content: Annotated[str | None, _OrNone()] = None
    reasoning: Annotated[str | None, _OrNone()] = None
    refusal: Annotated[str | None, _OrNone()] = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[CalledFunction | None, _OrNone()] = None
    name: Annotated[str | None, _OrNone()] = None
    cache_control: CacheMark = None


class OfferedFunction(_Strict):
    """A function that the model may call; `parameters`: a JSON schema, which is passed on as it is."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(_Strict):
    """A tool that the model may call. Only `type: function` is served."""

    type: Word
    function: OfferedFunction | None = None


class NamedFunction(_Strict):
    """The function of `tool_choice`."""

    name: ToolName


class NamedTool(_Strict):
    """`tool_choice` as an object: the one tool that is to be called."""

    type: Word
    function: NamedFunction | None = None


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheOptions(_Strict):
    """`prompt_cache_options`: `ttl` is "30m", "3600s", "1h" or a number of seconds."""

    mode: Word | None = None
    ttl: Word | Annotated[float, Field(ge=0)] | None = None


class AgentHints(_Strict):
    """`nvext.agent_hints`, as NVIDIA's agents send it; `iat`: milliseconds to their next request."""

    iat: Annotated[float, Field(ge=0)] | None = None


class RuntimeHints(_Strict):
    """`nvext`, of which only what says how long blocks are wanted is read."""

    agent_hints: Annotated[AgentHints | None, _OrNone()] = None
    cache_control: CacheMark = None


class SchemaFormat(_Strict):
    """`response_format.json_schema`; its `strict` makes no difference: every schema is followed."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(_Strict):
    """`response_format`; `schema` beside `json_object` is llama.cpp's spelling."""

    type: Word
    json_schema: SchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(_Strict):
    """`structured_outputs`, vLLM's way to say what an answer must look like."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Absent = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[Any, _Unbuilt((False,))] = None
    disable_fallback: bool | None = None


class TemplateKwargs(_Strict):
    """The `chat_template_kwargs` that templates of served models use."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Skipped]

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Word | None = None


class KnowledgeOptions(_Strict):
    """`knowledge`: entries of the tenant's knowledge base as context; see `KnowledgeWish`."""

    model_config = ConfigDict(extra="forbid")

    retrieve: bool | None = None
    budget_tokens: Annotated[Whole, Field(ge=1, le=COUNT_MAX)] | None = None
    entries: Annotated[Whole, Field(ge=1, le=COUNT_MAX)] | None = None
    kinds: Annotated[list[Word], Field(max_length=16)] | None = None
    query: Annotated[str, Field(min_length=1)] | None = None
    remember: bool | None = None


class CompactionOptions(_Strict):
    """`compaction`: what becomes of old turns when the conversation outgrows the window."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["retrieve", "summarise", "off"] | None = None
    budget_tokens: Annotated[Whole, Field(ge=1, le=COUNT_MAX)] | None = None


class _Body(_Strict):
    """Fields common to both kinds of request. `bounded_*` tighten those that have limits."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Skipped]

    model: str
    max_tokens: Length | None = None
    n_predict: Length | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=COUNT_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=COUNT_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=COUNT_MAX)] | None = None
    seed: Annotated[Whole, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[Whole, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    service_tier: Word | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    cache_profile: ProfileName | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: CacheOptions | None = None
    nvext: Annotated[RuntimeHints | None, _OrNone()] = None
    metadata: dict[str, str] | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: Annotated[Whole, Field(ge=0, le=COUNT_MAX)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Length | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class ChatBody(_Body):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Word | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Word | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    enable_thinking: bool | None = None
    knowledge: KnowledgeOptions | None = None
    documents: Annotated[list[Word], Field(max_length=256, fail_fast=True)] | None = None
    compaction: CompactionOptions | None = None


class CompletionBody(_Body):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(_Strict):
    """The body of POST /tokenize: `prompt`, or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: list[OfferedTool] | None = None


class DetokenizeBody(_Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def _bounded_fields(limits: LimitsSettings) -> dict[str, Any]:
    name = Annotated[str, Field(max_length=limits.id_chars_max)] | None
    stop = Annotated[str, Field(min_length=1, max_length=limits.stop_chars_max)]
    stops = Annotated[list[stop], Field(max_length=limits.stop_max, fail_fast=True)]
    stop_ids = Annotated[list[TokenId], Field(max_length=limits.stop_token_ids_max, fail_fast=True)]
    allowed = Annotated[
        list[TokenId], Field(min_length=1, max_length=limits.allowed_token_ids_max, fail_fast=True)
    ]
    biases = Annotated[dict[TokenId, Bias], Field(max_length=limits.logit_bias_max)]
    pairs = Annotated[dict[str, Text], Field(max_length=limits.metadata_bytes_max)]
    return {
        "model": (Annotated[str, Field(min_length=1, max_length=limits.id_chars_max)], ...),
        "n": (Annotated[Whole, Field(ge=1, le=limits.n_max)] | None, None),
        "stop": (Annotated[stop | stops | None, BeforeValidator(_some_stops)], None),
        "stop_token_ids": (stop_ids | None, None),
        "allowed_token_ids": (allowed | None, None),
        "logit_bias": (biases | None, None),
        "prompt_logprobs": (Annotated[Whole, Field(ge=0, le=limits.top_logprobs_max)] | None, None),
        "user": (name, None),
        "session_id": (name, None),
        "prompt_cache_key": (name, None),
        "cache_salt": (name, None),
        "metadata": (pairs | None, None),
    }


def _bounded_messages(limits: LimitsSettings) -> Any:
    calls = Annotated[list[AssistantCall], Field(max_length=limits.tool_calls_max, fail_fast=True)]
    message = create_model("BoundedMessage", __base__=Message, tool_calls=(calls | None, None))
    return Annotated[list[message], Field(min_length=1, max_length=limits.messages_max, fail_fast=True)]


def _bounded_tools(limits: LimitsSettings) -> Any:
    return Annotated[list[OfferedTool], Field(max_length=limits.tools_max, fail_fast=True)] | None


def bounded_tokenize(limits: LimitsSettings) -> type[TokenizeBody]:
    """Return `TokenizeBody` bounded by `limits`."""
    messages = _bounded_messages(limits)
    return create_model(
        "BoundedTokenizeBody",
        __base__=TokenizeBody,
        **unbuilt_fields(TokenizeBody),
        messages=(messages | None, None),
        tools=(_bounded_tools(limits), None),
    )


def bounded_chat(limits: LimitsSettings) -> type[ChatBody]:
    """Return `ChatBody` bounded by `limits`."""
    messages = _bounded_messages(limits)
    top = Annotated[Whole, Field(ge=0, le=limits.top_logprobs_max)] | None
    return create_model(
        "BoundedChatBody",
        __base__=ChatBody,
        messages=(messages, ...),
        tools=(_bounded_tools(limits), None),
        top_logprobs=(top, None),
        **unbuilt_fields(ChatBody),
        **_bounded_fields(limits),
    )


def passed_fields(limits: LimitsSettings, own: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of a chat that a body of another API has beside its `own`, for `create_model`.

    They mean the same there, and become the chat's as they are.
    """
    fields = {name: (field.annotation, field) for name, field in ChatBody.model_fields.items()}
    return {
        name: field
        for name, field in (fields | _bounded_fields(limits)).items()
        if name not in own.model_fields and name not in UNBUILT and name not in NOT_PASSED
    }


NOT_PASSED = frozenset({"messages", "tools", "tool_choice", "stream_options"})
"""Fields of a chat that other APIs say in their own way."""


def bounded_completion(limits: LimitsSettings) -> type[CompletionBody]:
    """Return `CompletionBody` bounded by `limits`.

    The length of a prompt of token ids is not bounded here: a prompt that is too long gets the error that
    names both numbers, and `parse.check_structure` has already bounded the list.
    """
    ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    texts = Annotated[list[str], Field(min_length=1, max_length=limits.prompts_max, fail_fast=True)]
    many = Annotated[list[ids], Field(min_length=1, max_length=limits.prompts_max, fail_fast=True)]
    top = Annotated[Whole, Field(ge=0, le=limits.top_logprobs_max)] | None
    return create_model(
        "BoundedCompletionBody",
        __base__=CompletionBody,
        prompt=(str | texts | ids | many, ...),
        logprobs=(top, None),
        **unbuilt_fields(CompletionBody),
        **_bounded_fields(limits),
    )
