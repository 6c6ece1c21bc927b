"""The JSON of answers, as the OpenAPI document tells it. Types only: the shapes are made where answers are.

`tests/unit/router/ingress/test_openapi.py` compares what the routes answer with these, so neither has a field
that the other lacks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

TierTokens = Annotated[dict[str, int], Field(description="prompt tokens by where their blocks were found")]
UnixTime = Annotated[int, Field(description="Unix time in seconds")]
Milliseconds = Annotated[float, Field(ge=0, description="milliseconds")]


class ErrorDetailJson(TypedDict):
    """What is wrong, and how to mend it."""

    message: str
    type: str
    param: Annotated[str | None, Field(description="the field at fault, as a path: `messages[0].content`")]
    code: Annotated[str | None, Field(description="a word that programs can test for")]


class ErrorJson(TypedDict):
    """An error of any route but Anthropic's."""

    error: ErrorDetailJson


class MessagesErrorJson(TypedDict):
    """An error of a route below `/v1/messages`."""

    type: Literal["error"]
    error: ErrorDetailJson
    request_id: str


class ReceiptJson(TypedDict):
    """Where the KV of the prompt came from, and what that saved."""

    tokens: Annotated[dict[str, int], Field(description="prompt tokens by source; `compute`: computed now")]
    decision: Annotated[str, Field(description="`none`, `load`, `recompute`, `hedge`, `meet`")]
    load_ms: Milliseconds
    recompute_ms_avoided: Milliseconds
    load_price_ms: Milliseconds
    recompute_price_ms: Milliseconds
    miss: Annotated[str | None, Field(description="why less was reused than there might have been")]
    missed: Annotated[
        dict[str, int] | None,
        Field(description="tokens that an earlier turn had computed and that were computed again, by reason"),
    ]
    prefix: Annotated[list[str] | None, Field(description="what was done to keep the prefix")]
    replica: list[str]
    request_id: Annotated[str | None, Field(description="of `x-request-id`; logs and traces have it, too")]
    compaction: NotRequired[Annotated[dict[str, Any], Field(description="what was left out of the prompt")]]


class PromptTokensJson(TypedDict):
    """Prompt tokens that were not computed for this request."""

    cached_tokens: Annotated[int, Field(ge=0, description="always there, 0 on a miss")]
    cached_tokens_by_tier: TierTokens


class UsageJson(TypedDict):
    """Tokens of an answer, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensJson


class CallFunctionJson(TypedDict):
    """The function of a tool call; `arguments`: the text of a JSON object."""

    name: NotRequired[str]
    arguments: str


class ToolCallJson(TypedDict):
    """A tool call. In a stream first its index, id and name come, then its arguments."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallFunctionJson


class ChatMessageJson(TypedDict):
    """A message of the assistant; in a stream, what a chunk adds to it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[Annotated[str, Field(description="the same as `reasoning_content`")]]
    tool_calls: NotRequired[list[ToolCallJson]]


FinishJson = Literal["stop", "length", "tool_calls"] | None


class ChatChoiceJson(TypedDict):
    """A choice of a chat."""

    index: int
    message: ChatMessageJson
    logprobs: dict[str, Any] | None
    finish_reason: FinishJson
    token_ids: NotRequired[list[int]]


class ChatDeltaJson(TypedDict):
    """A choice of a chunk."""

    index: int
    delta: ChatMessageJson
    logprobs: dict[str, Any] | None
    finish_reason: FinishJson
    token_ids: NotRequired[list[int]]


class _AnswerJson(TypedDict):
    id: str
    created: UnixTime
    model: str
    system_fingerprint: None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletionJson(_AnswerJson):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceJson]
    usage: UsageJson
    receipt: ReceiptJson


class ChatChunkJson(_AnswerJson):
    """A `data:` event of a streamed chat. The last have the receipt; `[DONE]` follows."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDeltaJson]
    usage: NotRequired[UsageJson | None]
    receipt: NotRequired[ReceiptJson]


class CompletionChoiceJson(TypedDict):
    """A choice of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionJson(_AnswerJson):
    """The answer of `POST /v1/completions`; in a stream each `data:` event has this form, too."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceJson]
    usage: NotRequired[UsageJson | None]
    receipt: NotRequired[ReceiptJson]


class MessagesUsageJson(TypedDict):
    """Tokens as Anthropic counts them: each once."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_read_input_tokens_by_tier: TierTokens
    output_tokens: int


class MessagesAnswerJson(TypedDict):
    """The answer of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[dict[str, Any]], Field(description="blocks `thinking`, `text` and `tool_use`")]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsageJson
    receipt: ReceiptJson


class TokenCountJson(TypedDict):
    """The answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ResponseJson(TypedDict):
    """A response: the answer of `POST /v1/responses`. Fields of the request are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: UnixTime
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    background: Literal[False]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: Annotated[list[dict[str, Any]], Field(description="`reasoning`, `message`, `function_call`")]
    usage: dict[str, Any] | None
    receipt: NotRequired[ReceiptJson]


class DeletedResponseJson(TypedDict):
    """The answer of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class TokensJson(TypedDict):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextJson(TypedDict):
    """The answer of `POST /detokenize`."""

    prompt: str


class ModelJson(TypedDict):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: UnixTime
    owned_by: str
    max_model_len: Annotated[int, Field(description="tokens of a prompt and its answer")]
    root: NotRequired[Annotated[str, Field(description="of an alias: the model's name")]]
    revision: NotRequired[Annotated[str, Field(description="the commit of a model of the hub")]]
    generation_defaults: NotRequired[dict[str, float]]
    type: NotRequired[Literal["model"]]
    display_name: NotRequired[str]
    created_at: NotRequired[str]


class ModelsJson(TypedDict):
    """The served names. The last fields are there with the header `anthropic-version`."""

    object: Literal["list"]
    data: list[ModelJson]
    has_more: NotRequired[bool]
    first_id: NotRequired[str | None]
    last_id: NotRequired[str | None]


class _RowJson(TypedDict):
    home: Annotated[str | None, Field(description="the replica that has its pages")]
    node: str | None
    turns: int
    tokens: int
    created: UnixTime
    last_used: UnixTime
    state: Literal["idle", "typing", "tool", "closed"]
    expected_return: Annotated[int | None, Field(description="Unix time in seconds, of a client's hint")]


class SessionJson(_RowJson):
    """A conversation: place and length of its main lineage, and the turns of all."""

    id: str
    object: Literal["session"]
    tenant: NotRequired[Annotated[str | None, Field(description="for the administrator only")]]


class LineageJson(_RowJson):
    """A chain of prompts of a session, each extending the one before."""

    id: str
    is_main: bool
    first_prompt_tokens: int
    bytes: Annotated[
        dict[str, int | None] | None,
        Field(
            description="by tier; null: the directory does not answer; gpu: null: the engine does not say "
            "whose its pages are"
        ),
    ]
    likely_within_600s: float | None


class SessionDetailJson(SessionJson):
    """A conversation with its bytes by tier and its lineages."""

    bytes: dict[str, int | None] | None
    lineages: list[LineageJson]


class HintedJson(SessionJson):
    """The session after a hint."""

    action: Literal["promote", "demote", "none"]
    extents_moving: int


class SessionsJson(TypedDict):
    """A page of sessions, the most recently used first."""

    object: Literal["list"]
    data: list[SessionJson]
    has_more: bool


class ClearedCountsJson(TypedDict):
    """What a clear has deleted."""

    replies: int
    pages: int
    extents: int
    bytes: int


class ClearedJson(TypedDict):
    """Everything asked for is deleted; else the answer is 503 `clear_incomplete`.

    `pages`: of an engine that cannot drop single pages: nothing finds them any more.
    """

    object: Literal["cache.cleared"]
    cleared: ClearedCountsJson
    replicas: int
    pages: NotRequired[str]


class CacheStatsJson(TypedDict):
    """The counters of the replicas and nodes that answer now."""

    replicas: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    serving: NotRequired[list[dict[str, Any]] | None]
    settings: NotRequired[dict[str, Any]]


class UsageReportJson(TypedDict):
    """What a tenant has used; the administrator gets the sums and every tenant's."""

    object: Literal["usage"]
    tenant: NotRequired[str]
    since_unix_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    tokens: Annotated[dict[str, int], Field(description="prompt tokens by source")]
    hit_rate: float | None
    saved_s: float
    bytes_held: NotRequired[dict[str, int | None] | None]
    tenants: NotRequired[dict[str, Any]]


class HealthJson(TypedDict):
    """Whether requests are served."""

    status: Annotated[str, Field(description="`ok`; with 503: `loading` or `draining`")]
    replicas: NotRequired[int]
    detail: NotRequired[Annotated[str, Field(description="names nodes whose tiers do not answer")]]


class VersionJson(TypedDict):
    """The installed version."""

    version: str
