"""Reads request bodies and parses them into plain data, or raises an error that names the field.

A body's type, its size, and how much structure it may have are looked at before anything is parsed.
`RequestParser` is created once per ingress with its limits. It checks OpenAI's rules about which fields go
together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from samovar.configs.sections import ProfileName
from samovar.configs.settings import LimitsSettings
from samovar.replicas.messages import SamplingParams
from samovar.router.openai.errors import (
    EXPECTED,
    ApiError,
    BodyTooLarge,
    ClientClosedRequest,
    ContextLengthExceeded,
    InvalidJson,
    InvalidValue,
    RequestTimeout,
    UnsupportedMediaType,
    UnsupportedParameter,
    error_of,
    shown,
    validated,
)
from samovar.router.openai.messages import (
    ChatMessage,
    Tool,
    ToolOffer,
    grammar_of,
    messages_of,
    not_followed,
    offer_of,
)
from samovar.router.openai.schema import (
    CacheControl,
    CacheOptions,
    ChatBody,
    CompactionOptions,
    CompletionBody,
    DetokenizeBody,
    KnowledgeOptions,
    Message,
    RuntimeHints,
    TemplateKwargs,
    bounded_chat,
    bounded_completion,
    bounded_tokenize,
)

Retention = Literal["in_memory", "24h"]

COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of /v1/completions where none is given."""


@dataclass(frozen=True, slots=True)
class BodyIds:
    """Ids in the body that identify the conversation. Not yet checked for control characters."""

    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class CacheWish:
    """How long, and down to which tier, the client wants its blocks kept (`ttl_s`: at least).

    `profile`: the use case named in the body. `marked_ttl_s`: the longest wish of a part marked with
    `cache_control`. `returns_s`: when the session's next request follows the answer; None: not told.
    """

    profile: ProfileName | None = None
    retention: Retention | None = None
    mode: str | None = None
    ttl_s: float | None = None
    marked_ttl_s: float | None = None
    returns_s: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerExtras:
    """What an answer holds besides its text and the log-probabilities of its tokens.

    `echo`: the prompt comes first; `prompt_logprobs`: in vLLM's form; `token_ids`: of prompt and answer;
    `names_ids`: log-probabilities name a token `token_id:N` instead of by its text.
    """

    echo: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    names_ids: bool = False


@dataclass(frozen=True, slots=True)
class KnowledgeWish:
    """What a chat wants of the tenant's knowledge base.

    `retrieve`: False: only what earlier turns got stays in the prompt. `query`: looked up in place of the
    question. `kinds`: of entries; all, if empty. Budgets: None is the setting's. `remember`: False: question
    and answer are not kept, so that there is no feedback on them.
    """

    retrieve: bool = True
    budget_tokens: int | None = None
    entries: int | None = None
    kinds: tuple[str, ...] = ()
    query: str | None = None
    remember: bool = True


@dataclass(frozen=True, slots=True)
class CompactionWish:
    """What a chat wants done when it outgrows the window; None is the setting's, `off`: nothing."""

    mode: Literal["retrieve", "summarise", "off"] | None = None
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """Validated fields common to chat and completions. `ignored_fields`: fields that were not read.

    `generates`: False for `max_tokens: 0`: the prompt is computed, and nothing follows it.
    `is_length_default`: `sampling.max_tokens` is the route's own, and is lowered to what is left.
    `truncate_tokens`: only the prompt's last tokens are used; -1: as many as fit. `priority`: smaller =
    sooner, among its tenant's.
    """

    model: str
    sampling: SamplingParams
    n: int = 1
    generates: bool = True
    is_length_default: bool = False
    truncate_tokens: int | None = None
    priority: int = 0
    extras: AnswerExtras = field(default_factory=AnswerExtras)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ids: BodyIds = field(default_factory=BodyIds)
    cache: CacheWish = field(default_factory=CacheWish)
    metadata: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat(ParsedRequest):
    """A conversation whose next turn is requested.

    `begins_turn`: the prompt ends where the assistant begins to speak; `continues`: it ends inside the last
    message, which the answer continues. `documents`: ids of those that stand whole in front of it. `lead`:
    what the first user message of the prompt begins with, whichever that is once old turns were left out.
    `entries`: ids of the knowledge that was put into the messages.
    """

    messages: tuple[ChatMessage, ...]
    offer: ToolOffer | None = None
    template_kwargs: Mapping[str, bool | str] = field(default_factory=dict)
    begins_turn: bool = True
    continues: bool = False
    knowledge: KnowledgeWish | None = None
    documents: tuple[str, ...] = ()
    compaction: CompactionWish | None = None
    lead: str = ""
    entries: tuple[str, ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that it offers."""
        return self.offer.tools if self.offer is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion(ParsedRequest):
    """Texts, or token ids, to continue: `n` answers to each. `add_special_tokens`: to texts."""

    prompts: tuple[str | tuple[int, ...], ...]
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTokenize:
    """A text, or a conversation, whose tokens are wanted; `wants_names`: also what they are called."""

    model: str | None
    text: str
    chat: ParsedChat | None
    add_special_tokens: bool
    wants_names: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDetokenize:
    """Tokens whose text is wanted."""

    model: str | None
    token_ids: tuple[int, ...]


Asked = TypeVar("Asked", ChatBody, CompletionBody)

# Token ids in a body that is too long to be parsed. Quotes inside of text are escaped there.
PROMPT_IDS = re.compile(rb'"prompt"\s*:\s*\[([\d\s,\[\]]*)')
SERVICE_TIERS: dict[str | None, int] = {"priority": -10, "flex": 10}
"""OpenAI's tiers that are another priority; all others are 0."""
ALIASES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""llama.cpp's names of fields, and ours."""
TTL = re.compile(r"(\d{1,9})(s|m|h|d)")
TTL_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
EPHEMERAL = "ephemeral"
EPHEMERAL_TTL_S = 300.0
"""How long a part marked `cache_control: {type: ephemeral}` without `ttl` is kept, as by Anthropic's API."""


class RequestParser:
    """Parses the bodies of both completion routes within `limits` and the model's context.

    Both methods raise `ApiError` with status 400 for anything that is not a valid request.
    """

    def __init__(
        self,
        limits: LimitsSettings,
        context_tokens_max: int,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        """`defaults`: of fields that a request leaves out; `max_tokens` of chats only."""
        self._limits = limits
        self._defaults = dict(defaults or {})
        tokens = self._defaults.pop("max_tokens", None)
        self._chat_tokens = None if tokens is None else int(tokens)
        self._context_tokens_max = context_tokens_max
        self._prompt_ids_max = limits.prompts_max * (context_tokens_max + 1)
        self._chat = bounded_chat(limits)
        self._completion = bounded_completion(limits)
        self._tokenize = bounded_tokenize(limits)

    def chat(self, body: bytes) -> ParsedChat:
        """Parse the body of POST /v1/chat/completions."""
        check_structure(body, self._limits)
        return self._chat_of(validated(self._chat, body))

    def translated(self, fields: Mapping[str, Any]) -> ParsedChat:
        """Parse what another API's body is as a chat request; errors name that request's fields."""
        try:
            return self._chat_of(self._chat.model_validate(fields))
        except ValidationError as refused:
            raise error_of(refused) from None

    def _chat_of(self, asked: ChatBody) -> ParsedChat:
        asked = self._filled(asked)
        ignored = _ignored(asked, "")
        template_kwargs = _template_kwargs(asked.chat_template_kwargs)
        if asked.chat_template_kwargs is not None:
            ignored += _ignored(asked.chat_template_kwargs, "chat_template_kwargs.")
        if asked.enable_thinking is not None:
            if template_kwargs.get("enable_thinking", asked.enable_thinking) != asked.enable_thinking:
                message = "enable_thinking contradicts chat_template_kwargs.enable_thinking. Give one."
                raise InvalidValue("enable_thinking", message)
            template_kwargs["enable_thinking"] = asked.enable_thinking
        if asked.reasoning_effort == "none":
            if template_kwargs.get("enable_thinking"):
                message = "reasoning_effort='none' contradicts enable_thinking=true."
                raise InvalidValue("reasoning_effort", message)
            template_kwargs["enable_thinking"] = False
        elif asked.reasoning_effort is not None:
            template_kwargs["reasoning_effort"] = asked.reasoning_effort
        if asked.top_logprobs and not asked.logprobs:
            raise InvalidValue("top_logprobs", "top_logprobs needs logprobs to be true.")
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        is_length_default = max_tokens is None and self._chat_tokens is not None
        if max_tokens is None and self._chat_tokens is not None:
            max_tokens = max(self._chat_tokens, asked.min_tokens or 0)
        offer = offer_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        sampling = _sampling(asked, max_tokens, logprobs, asked.prompt_logprobs)
        messages, altered = messages_of(asked.messages)
        parsed = ParsedChat(
            messages=messages,
            offer=offer,
            template_kwargs=template_kwargs,
            **_end_of_prompt(asked.add_generation_prompt, asked.continue_final_message),
            sampling=sampling,
            generates=max_tokens != 0,
            is_length_default=is_length_default,
            ignored_fields=(*ignored, *altered, *not_followed(sampling.grammar, offer)),
            extras=_extras(asked),
            knowledge=_knowledge_wish(asked.knowledge),
            documents=tuple(asked.documents or ()),
            compaction=_compaction_wish(asked.compaction),
            **self._common(asked),
        )
        _refuse_two_forms(parsed)
        return parsed

    def completion(self, body: bytes) -> ParsedCompletion:
        """Parse the body of POST /v1/completions."""
        try:
            check_structure(body, self._limits, self._prompt_ids_max)
        except InvalidJson:
            self._refuse_long_ids(body)
            raise
        asked = self._filled(validated(self._completion, body))
        if asked.best_of is not None:
            n = asked.n or 1
            if asked.best_of > n:
                raise UnsupportedParameter(
                    "best_of", f"best_of={shown(asked.best_of)} above n={n} is not supported."
                )
            if asked.best_of < n:
                raise InvalidValue(
                    "best_of", f"best_of={shown(asked.best_of)} must not be smaller than n={n}."
                )
        max_tokens = asked.max_tokens
        if max_tokens is None:
            max_tokens = max(COMPLETION_TOKENS, asked.min_tokens or 0)
        of_prompt = asked.prompt_logprobs
        if of_prompt is None and asked.echo:
            of_prompt = asked.logprobs
        sampling = _sampling(asked, max_tokens, asked.logprobs, of_prompt)
        return ParsedCompletion(
            prompts=_prompts(asked.prompt),
            sampling=sampling,
            generates=max_tokens != 0,
            is_length_default=asked.max_tokens is None,
            ignored_fields=(*_ignored(asked, ""), *not_followed(sampling.grammar, None)),
            extras=replace(_extras(asked), echo=bool(asked.echo)),
            add_special_tokens=asked.add_special_tokens is not False,
            **self._common(asked),
        )

    def tokenize(self, body: bytes) -> ParsedTokenize:
        """Parse the body of POST /tokenize."""
        check_structure(body, self._limits)
        asked, chat = validated(self._tokenize, body), None
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidValue("prompt", "Exactly one of prompt and messages is needed.")
        if asked.messages is not None:
            chat = ParsedChat(
                model=asked.model or "",
                sampling=SamplingParams(),
                messages=messages_of(asked.messages)[0],
                offer=offer_of(asked.tools, None, None),
                template_kwargs=_template_kwargs(asked.chat_template_kwargs),
                **_end_of_prompt(asked.add_generation_prompt, asked.continue_final_message),
            )
        specials = asked.add_special_tokens
        return ParsedTokenize(
            model=asked.model,
            text=asked.prompt or "",
            chat=chat,
            add_special_tokens=chat is None if specials is None else specials,
            wants_names=bool(asked.return_token_strs),
        )

    def detokenize(self, body: bytes) -> ParsedDetokenize:
        """Parse the body of POST /detokenize."""
        check_structure(body, self._limits, self._prompt_ids_max)
        asked = validated(DetokenizeBody, body)
        return ParsedDetokenize(model=asked.model, token_ids=tuple(asked.tokens))

    def _filled(self, asked: Asked) -> Asked:
        """Return the body with the model's defaults in the fields that it leaves out."""
        named = _by_own_names(asked)
        left_out = {name: value for name, value in self._defaults.items() if getattr(named, name) is None}
        return named.model_copy(update=left_out) if left_out else named

    def _refuse_long_ids(self, body: bytes) -> None:
        """Raise `ContextLengthExceeded` if `body` is too large because of a prompt of too many token ids."""
        found = PROMPT_IDS.search(body)
        prompts_max = self._limits.prompts_max
        lists = found[1].split(b"]", prompts_max)[:prompts_max] if found else []
        longest = 1 + max((ids.strip(b", \t\r\n[").count(b",") for ids in lists), default=0)
        if longest >= self._context_tokens_max:
            raise ContextLengthExceeded(longest, None, self._context_tokens_max, "prompt", at_least=True)

    def _common(self, asked: ChatBody | CompletionBody) -> dict[str, Any]:
        metadata = asked.metadata or {}
        metadata_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
        if metadata_bytes > self._limits.metadata_bytes_max:
            limit = self._limits.metadata_bytes_max
            raise InvalidValue("metadata", f"metadata holds {metadata_bytes} bytes, more than {limit}.")
        if asked.stream_options is not None and not asked.stream:
            raise InvalidValue("stream_options", "stream_options needs stream to be true.")
        if asked.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens=0 leaves no prompt. Give a number of tokens, or -1."
            raise InvalidValue("truncate_prompt_tokens", message)
        if asked.stream and asked.prompt_logprobs is not None:
            raise InvalidValue("prompt_logprobs", "prompt_logprobs is not available when stream is true.")
        options, tier = asked.stream_options, SERVICE_TIERS.get(asked.service_tier, 0)
        include_usage = bool(options and options.include_usage)
        return {
            "model": asked.model,
            "n": 1 if asked.n is None else asked.n,
            "truncate_tokens": asked.truncate_prompt_tokens,
            "priority": tier if asked.priority is None else asked.priority,
            "stream": bool(asked.stream),
            "include_usage": include_usage,
            "continuous_usage": include_usage and bool(options and options.continuous_usage_stats),
            "ids": BodyIds(asked.session_id, asked.prompt_cache_key, asked.user, asked.cache_salt),
            "cache": _cache_wish(asked),
            "metadata": metadata,
        }


def _by_own_names(asked: Asked) -> Asked:
    """Return a body whose fields have our names, where it came with those of llama.cpp.

    Raises `InvalidValue` if it has both and they differ, `UnsupportedParameter` for a part of a penalty.
    """
    update: dict[str, Any] = {}
    for alias, name in ALIASES.items():
        value, own = getattr(asked, alias), getattr(asked, name)
        if value is None:
            continue
        if own is not None and own != value:
            raise InvalidValue(alias, f"{alias} and {name} mean the same and differ. Give one.")
        update[name] = value
    named = asked.model_copy(update=update) if update else asked
    penalty, window = named.repetition_penalty, named.repeat_last_n
    if penalty is not None and window == 0:
        return named.model_copy(update={"repetition_penalty": 1.0})
    if penalty not in (None, 1.0) and window not in (None, -1):
        message = "repeat_last_n is not supported beside a penalty: it covers the whole context. Send -1."
        raise UnsupportedParameter("repeat_last_n", message)
    return named


def _ignored(asked: BaseModel, prefix: str) -> list[str]:
    return [prefix + name for name in asked.model_extra or {}]


def _template_kwargs(given: TemplateKwargs | None) -> dict[str, bool | str]:
    return (
        {} if given is None else given.model_dump(include=set(TemplateKwargs.model_fields), exclude_none=True)
    )


def _end_of_prompt(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, Any]:
    """Return where a chat's prompt ends, as fields of `ParsedChat`."""
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message contradicts add_generation_prompt. Set one of them only."
        raise InvalidValue("continue_final_message", message)
    begins = not continue_final_message and add_generation_prompt is not False
    return {"begins_turn": begins, "continues": bool(continue_final_message)}


def _knowledge_wish(given: KnowledgeOptions | None) -> KnowledgeWish | None:
    if given is None:
        return None
    return KnowledgeWish(
        given.retrieve is not False,
        given.budget_tokens,
        given.entries,
        tuple(given.kinds or ()),
        given.query,
        given.remember is not False,
    )


def _compaction_wish(given: CompactionOptions | None) -> CompactionWish | None:
    return None if given is None else CompactionWish(given.mode, given.budget_tokens)


def _extras(asked: ChatBody | CompletionBody) -> AnswerExtras:
    return AnswerExtras(
        prompt_logprobs=asked.prompt_logprobs is not None,
        token_ids=bool(asked.return_token_ids),
        names_ids=bool(asked.return_tokens_as_token_ids),
    )


def _refuse_two_forms(chat: ParsedChat) -> None:
    """Raise `InvalidValue` if calls are promised beside another form, or for a part of an answer.

    OpenAI defines `response_format` beside tools: it is the form of what is said, not of calls.
    """
    promise, grammar = chat.offer and chat.offer.promise, chat.sampling.grammar
    if promise is None:
        return
    if grammar is not None and not grammar.field.startswith("response_format"):
        message = f"{grammar.field} and {promise} both say what the answer must look like. Give one."
        raise InvalidValue(grammar.field, message)
    if chat.continues or not chat.begins_turn:
        other = "continue_final_message" if chat.continues else "add_generation_prompt"
        message = f"{promise} promises the form of a whole answer, and {other} asks for a part of one."
        raise InvalidValue(other, message)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(
        item if isinstance(item, str) else tuple(item) for item in cast(list[str | list[int]], prompt)
    )


def _sampling(
    asked: ChatBody | CompletionBody,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the sampling parameters; `max_tokens` of None or -1 becomes 0, the rest of the context.

    With `max_tokens=0` a replica samples one token, as nothing less computes a prompt; it is not shown.
    """
    min_tokens = asked.min_tokens or 0
    if max_tokens is not None and 0 <= max_tokens < min_tokens:
        raise InvalidValue("min_tokens", f"min_tokens={min_tokens} is larger than max_tokens={max_tokens}.")
    stop = asked.stop or []

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        max_tokens=1 if max_tokens == 0 else max(0, max_tokens or 0),
        min_tokens=min_tokens,
        temperature=given(asked.temperature, 1.0),
        top_p=given(asked.top_p, 1.0),
        top_k=max(0, asked.top_k or 0),  # vLLM's clients send -1 for "off"
        min_p=given(asked.min_p, 0.0),
        presence_penalty=given(asked.presence_penalty, 0.0),
        frequency_penalty=given(asked.frequency_penalty, 0.0),
        repetition_penalty=given(asked.repetition_penalty, 1.0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        seed=asked.seed,
        logprobs=logprobs,
        allowed_token_ids=tuple(asked.allowed_token_ids or ()),
        logit_bias=tuple((asked.logit_bias or {}).items()),
        grammar=grammar_of(asked),
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_from=asked.logprob_start_len or 0,
    )


def _cache_wish(asked: ChatBody | CompletionBody) -> CacheWish:
    options, retention = asked.prompt_cache_options or CacheOptions(), asked.prompt_cache_retention
    told = asked.nvext or RuntimeHints()
    hints, messages = told.agent_hints, asked.messages if isinstance(asked, ChatBody) else ()
    return CacheWish(
        profile=asked.cache_profile,
        retention="in_memory" if retention == "in-memory" else retention,
        mode=options.mode,
        ttl_s=_ttl_s(options.ttl),
        marked_ttl_s=_marked_ttl_s(told.cache_control, messages),
        returns_s=None if hints is None or hints.iat is None else hints.iat / 1000.0,
    )


def _ttl_s(ttl: str | float | None) -> float | None:
    if ttl is None or isinstance(ttl, float):
        return ttl
    match = TTL.fullmatch(ttl)
    if match is None:
        param = "prompt_cache_options.ttl"
        raise InvalidValue(param, f"{param}={shown(ttl)} must be {EXPECTED['ttl']}.")
    return float(int(match[1]) * TTL_UNIT_S[match[2]])


def _marked_ttl_s(whole: CacheControl | None, messages: Sequence[Message]) -> float | None:
    """Return the longest time that the body, a marked message or part asks for; None without marks."""
    longest: float | None = None
    marks = [whole]
    for message in messages:
        parts = message.content if isinstance(message.content, list) else ()
        marks += [message.cache_control, *(part.cache_control for part in parts)]
    for mark in marks:
        if mark is None or mark.type != EPHEMERAL:
            continue
        try:
            asked_s = _ttl_s(mark.ttl)
        except InvalidValue:  # a mark is a hint: one in words of another API is no error
            asked_s = None
        longest = max(longest or 0.0, EPHEMERAL_TTL_S if asked_s is None else asked_s)
    return longest


# Generous allowance for one message (keys, words and a dozen parts), and for the rest of the body.
STRINGS_PER_MESSAGE = 64
CONTAINERS_PER_MESSAGE = 16
STRINGS_BESIDE = 4096
CONTAINERS_BESIDE = 1024


def declared_bytes(headers: Headers) -> int | None:
    """Return the `Content-Length`, None if absent. Raises `InvalidValue` if it is not a number."""
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidValue("content-length", "The content-length header is not a whole number of bytes.")
    return int(text)


async def read_body(receive: Receive, headers: Headers, limits: LimitsSettings) -> bytes:
    """Return the whole body, which its sender must call JSON, or nothing at all.

    Raises `UnsupportedMediaType` before anything is read; `BodyTooLarge` as soon as it is known to be over
    `body_bytes_max`, without reading on; `RequestTimeout` after `body_read_s`; `ClientClosedRequest` if the
    client leaves.
    """
    declared = declared_bytes(headers)
    if declared is not None and declared > limits.body_bytes_max:
        raise BodyTooLarge(limits.body_bytes_max)
    if declared != 0 and not is_json_type(headers.get("content-type", ""), is_of_page="origin" in headers):
        raise UnsupportedMediaType(headers.get("content-type", ""))
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if declared != 0 and encoding not in ("", "identity"):
        what = f"A body in Content-Encoding {shown(encoding)} is not read. Send it as it is."
        raise ApiError(415, what, param="content-encoding", code="unsupported_encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_read_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientClosedRequest
                body += message.get("body", b"")
                if len(body) > limits.body_bytes_max:
                    raise BodyTooLarge(limits.body_bytes_max)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestTimeout("Sending the request body", limits.body_read_s) from None


def is_json_type(content_type: str, *, is_of_page: bool = False) -> bool:
    """Return whether a Content-Type header names JSON; no header is taken for it.

    `is_of_page`: it must say so. A browser asks us first whether a foreign page may send JSON, but not what
    has no type.
    """
    kind = content_type.partition(";")[0].strip().lower()
    return (
        (not kind and not is_of_page) or kind in {"application/json", "text/json"} or kind.endswith("+json")
    )


def check_structure(body: bytes, limits: LimitsSettings, prompt_ids_max: int = 0) -> None:
    """Refuse a body with more strings, objects, arrays or items than any valid request can need.

    A JSON parser holds the GIL while it works, so a body made only of structure would stall all streams.
    This check counts at memchr speed before parsing. Brackets, quotes and commas inside of text do not
    count. `prompt_ids_max`: number of token ids allowed in addition to the messages. Raises `InvalidJson`.
    """
    quotes_max = 2 * (STRINGS_PER_MESSAGE * limits.messages_max + STRINGS_BESIDE)
    containers_max = CONTAINERS_PER_MESSAGE * limits.messages_max + CONTAINERS_BESIDE
    commas_max = quotes_max // 2 + prompt_ids_max

    def fits(structure: bytes, quotes: int) -> bool:
        containers = structure.count(b"{") + structure.count(b"[")
        return quotes <= quotes_max and containers <= containers_max and structure.count(b",") <= commas_max

    if fits(body, body.count(b'"')):
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = bare.count(b'"')
    # Split only once the quotes are known to be few: each piece is an object of its own.
    if quotes <= quotes_max and fits(b" ".join(bare.split(b'"')[::2]), quotes):
        return
    raise InvalidJson(
        f"it holds more strings, objects or list items than a request within limits.messages_max="
        f"{limits.messages_max} and limits.prompts_max={limits.prompts_max} can need. Send fewer."
    )


DIGITS_MAX = 10
PAGE_DEFAULT, PAGE_MAX = 100, 1000
"""Items of one answer of a list."""


def page_limit(params: Mapping[str, str]) -> int:
    """Return how many items a list's answer may have (`limit`). Raises `InvalidValue`."""
    return whole_number(params, "limit", PAGE_DEFAULT, PAGE_MAX)


def whole_number(params: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return a number from 1 to `most`; `default` where it is not given. Raises `InvalidValue`."""
    given = params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdigit() and len(given) <= DIGITS_MAX
    if not is_number or not 1 <= int(given) <= most:
        raise InvalidValue(name, f"{name}={shown(given)} is no number from 1 to {most}.")
    return int(given)


def cursor(params: Mapping[str, str]) -> str:
    """Return the id that a page begins behind. Raises `InvalidValue` for what no id has."""
    given = params.get("after", "")
    if not given.isprintable():
        raise InvalidValue("after", f"after={shown(given)} has characters that no id has.")
    return given


def no_such_cursor(after: str) -> InvalidValue:
    """Return the error for the id of no item: an empty page would look like the end of the list."""
    message = f"after={shown(after)} is the id of no item here: it may have been deleted. Begin without it."
    return InvalidValue("after", message)
