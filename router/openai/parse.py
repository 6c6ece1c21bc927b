"""Parses request bodies into plain data, or raises an error that names the field.

`RequestParser` is created once per ingress with its limits. It checks OpenAI's rules about which fields go
together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from configs.sections import ProfileName
from configs.settings import LimitsSettings
from replicas.messages import SamplingParams
from router.openai.errors import (
    ApiError,
    BodyTooLarge,
    ClientClosedRequest,
    ContextLengthExceeded,
    InvalidJson,
    InvalidValue,
    MissingField,
    RequestTimeout,
    UnsupportedParameter,
    shown,
)
from router.openai.schema import (
    UNSUPPORTED_FIELDS,
    CacheOptions,
    ChatBody,
    CompletionBody,
    Message,
    bounded_chat,
    bounded_completion,
)

Role = Literal["system", "user", "assistant"]
Retention = Literal["in_memory", "24h"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `developer` has become `system`, text parts have been joined.

    `cuts`: of a system message, the places in `content` where parts met.
    """

    role: Role
    content: str
    cuts: tuple[int, ...] = ()


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
    `cache_control`.
    """

    profile: ProfileName | None = None
    retention: Retention | None = None
    mode: str | None = None
    ttl_s: float | None = None
    marked_ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """Validated fields common to chat and completions. `ignored_fields`: fields that were not read."""

    model: str
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    ids: BodyIds = field(default_factory=BodyIds)
    cache: CacheWish = field(default_factory=CacheWish)
    metadata: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedChat(ParsedRequest):
    """A conversation whose next turn is requested."""

    messages: tuple[ChatMessage, ...]
    template_kwargs: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion(ParsedRequest):
    """Texts, or token ids, to continue: `n` answers to each."""

    prompts: tuple[str | tuple[int, ...], ...]


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
    """Return the whole body.

    Raises `BodyTooLarge` as soon as it is known to be over `body_bytes_max`, without reading on;
    `RequestTimeout` after `body_read_s`; `ClientClosedRequest` if the client leaves.
    """
    declared = declared_bytes(headers)
    if declared is not None and declared > limits.body_bytes_max:
        raise BodyTooLarge(limits.body_bytes_max)
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


Body = TypeVar("Body", bound=BaseModel)

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
TOOL_ROLES = frozenset({"tool", "function"})
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names that pydantic puts into an error's location for a branch of a union, besides those with brackets.
UNION_TAGS = frozenset(
    {"str", "int", "float", "none", "constrained-str", "constrained-int", "constrained-float"}
)
# Token ids in a body that is too long to be parsed. Quotes inside of text are escaped there.
PROMPT_IDS = re.compile(rb'"prompt"\s*:\s*\[([\d\s,\[\]]*)')
TTL = re.compile(r"(\d{1,9})(s|m|h|d)")
TTL_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
EPHEMERAL = "ephemeral"
EPHEMERAL_TTL_S = 300.0
"""How long a part marked `cache_control: {type: ephemeral}` without `ttl` is kept, as by Anthropic's API."""
EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of those",
    "stop": "a string or a list of strings, none of them empty",
    "content": "a string or a list of parts {'type': 'text', 'text': ...}",
    "ttl": "a text such as '30m' or a number of seconds",
}


class RequestParser:
    """Parses the bodies of both completion routes within `limits` and the model's context.

    Both methods raise `ApiError` with status 400 for anything that is not a valid request.
    """

    def __init__(self, limits: LimitsSettings, context_tokens_max: int) -> None:
        self._limits = limits
        self._context_tokens_max = context_tokens_max
        self._prompt_ids_max = limits.prompts_max * (context_tokens_max + 1)
        self._chat = bounded_chat(limits)
        self._completion = bounded_completion(limits)

    def chat(self, body: bytes) -> ParsedChat:
        """Parse the body of POST /v1/chat/completions."""
        check_structure(body, self._limits)
        asked = _validate(self._chat, body)
        _refuse_unbuilt_chat(asked)
        ignored = _ignored(asked, "")
        template_kwargs: dict[str, bool] = {}
        if asked.chat_template_kwargs is not None:
            ignored += _ignored(asked.chat_template_kwargs, "chat_template_kwargs.")
            if asked.chat_template_kwargs.enable_thinking is not None:
                template_kwargs["enable_thinking"] = asked.chat_template_kwargs.enable_thinking
        if asked.top_logprobs is not None and not asked.logprobs:
            raise InvalidValue("top_logprobs", "top_logprobs needs logprobs to be true.")
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        return ParsedChat(
            messages=tuple(_message(message, index) for index, message in enumerate(asked.messages)),
            template_kwargs=template_kwargs,
            sampling=_sampling(asked, max_tokens, logprobs),
            ignored_fields=tuple(ignored),
            **self._common(asked),
        )

    def completion(self, body: bytes) -> ParsedCompletion:
        """Parse the body of POST /v1/completions."""
        try:
            check_structure(body, self._limits, self._prompt_ids_max)
        except InvalidJson:
            self._refuse_long_ids(body)
            raise
        asked = _validate(self._completion, body)
        if asked.echo:
            raise UnsupportedParameter("echo", "echo is not supported: the answer never repeats the prompt.")
        if asked.suffix:
            raise UnsupportedParameter("suffix", "suffix is not supported: text cannot be inserted.")
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
        return ParsedCompletion(
            prompts=_prompts(asked.prompt),
            sampling=_sampling(asked, asked.max_tokens, asked.logprobs),
            ignored_fields=tuple(_ignored(asked, "")),
            **self._common(asked),
        )

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
            raise InvalidValue("stream_options", "stream_options is only allowed when stream is true.")
        options = asked.stream_options
        return {
            "model": asked.model,
            "n": 1 if asked.n is None else asked.n,
            "stream": bool(asked.stream),
            "include_usage": bool(options and options.include_usage),
            "continuous_usage": bool(options and options.continuous_usage_stats),
            "ids": BodyIds(asked.session_id, asked.prompt_cache_key, asked.user, asked.cache_salt),
            "cache": _cache_wish(asked),
            "metadata": metadata,
        }


def _validate(model: type[Body], body: bytes) -> Body:
    try:
        return model.model_validate_json(body)
    except ValidationError as refused:
        raise error_of(refused) from None


def error_of(refused: ValidationError) -> ApiError:
    """Return the most informative of pydantic's errors: a limit, else the deepest, else the first."""
    found = refused.errors(include_url=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return InvalidJson(f"{found[0]['ctx']['error']}.")
    best = max(found, key=lambda error: (error["type"].endswith("too_long"), len(_path(error["loc"]))))
    path = _path(best["loc"])
    if not path:
        return InvalidJson("an object is expected.")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    name = next(part for part in reversed(path) if isinstance(part, str))
    if name in UNSUPPORTED_FIELDS:
        return UnsupportedParameter(param, f"{param} is not supported by this server. Leave it out.")
    if best["type"] == "missing":
        return MissingField(param)
    if name in EXPECTED and path[-1] == name and best["type"] not in {"too_long", "string_too_long"}:
        return InvalidValue(param, f"{param} must be {EXPECTED[name]}.", code="invalid_type")
    return InvalidValue(param, f"{param}: {best['msg']}.")


def _path(place: Sequence[int | str]) -> list[int | str]:
    return [
        part
        for part in place
        if isinstance(part, int) or (FIELD_NAME.fullmatch(part) and part not in UNION_TAGS)
    ]


def _ignored(asked: BaseModel, prefix: str) -> list[str]:
    return [prefix + name for name in asked.model_extra or {}]


def _refuse_unbuilt_chat(asked: ChatBody) -> None:
    if asked.response_format is not None and asked.response_format.type != "text":
        wanted = shown(asked.response_format.type)
        raise UnsupportedParameter(
            "response_format", f"response_format.type={wanted} is not supported; only 'text' is."
        )
    if asked.modalities is not None and any(kind != "text" for kind in asked.modalities):
        raise UnsupportedParameter("modalities", "Only the modality 'text' is supported.")


def _message(message: Message, index: int) -> ChatMessage:
    place = f"messages[{index}]"
    if message.role in TOOL_ROLES:
        raise UnsupportedParameter(
            f"{place}.role", f"{place}.role={message.role!r}: tools are not supported."
        )
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidValue(f"{place}.role", f"{place}.role={shown(message.role)} is none of {known}.")
    if message.content is None:
        if message.role != "assistant":
            raise MissingField(f"{place}.content")
        return ChatMessage("assistant", "")
    if isinstance(message.content, str):
        return ChatMessage(ROLES[message.role], message.content)
    texts = []
    for number, part in enumerate(message.content):
        param = f"{place}.content[{number}]"
        if part.type != "text":
            raise UnsupportedParameter(
                f"{param}.type", f"{param}.type={shown(part.type)} is not supported; only 'text' parts are."
            )
        if part.text is None:
            raise MissingField(f"{param}.text")
        texts.append(part.text)
    cuts = accumulate(map(len, texts[:-1])) if ROLES[message.role] == "system" else ()
    return ChatMessage(ROLES[message.role], "".join(texts), tuple(cuts))


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(
        item if isinstance(item, str) else tuple(item) for item in cast(list[str | list[int]], prompt)
    )


def _sampling(
    asked: ChatBody | CompletionBody, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    min_tokens = asked.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidValue("min_tokens", f"min_tokens={min_tokens} is larger than max_tokens={max_tokens}.")
    stop = asked.stop or []

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        max_tokens=max_tokens or 0,
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
    )


def _cache_wish(asked: ChatBody | CompletionBody) -> CacheWish:
    options = asked.prompt_cache_options or CacheOptions()
    return CacheWish(
        profile=asked.cache_profile,
        retention=asked.prompt_cache_retention,
        mode=options.mode,
        ttl_s=_ttl_s(options.ttl),
        marked_ttl_s=_marked_ttl_s(asked.messages) if isinstance(asked, ChatBody) else None,
    )


def _ttl_s(ttl: str | float | None) -> float | None:
    if ttl is None or isinstance(ttl, float):
        return ttl
    match = TTL.fullmatch(ttl)
    if match is None:
        param = "prompt_cache_options.ttl"
        raise InvalidValue(param, f"{param}={shown(ttl)} must be {EXPECTED['ttl']}.")
    return float(int(match[1]) * TTL_UNIT_S[match[2]])


def _marked_ttl_s(messages: Sequence[Message]) -> float | None:
    """Return the longest time that a marked message or part asks for; None without marks."""
    longest: float | None = None
    for message in messages:
        parts = message.content if isinstance(message.content, list) else ()
        for mark in (message.cache_control, *(part.cache_control for part in parts)):
            if mark is None or mark.type != EPHEMERAL:
                continue
            try:
                asked_s = _ttl_s(mark.ttl)
            except InvalidValue:  # a mark is a hint: one in words of another API is no error
                asked_s = None
            longest = max(longest or 0.0, EPHEMERAL_TTL_S if asked_s is None else asked_s)
    return longest
