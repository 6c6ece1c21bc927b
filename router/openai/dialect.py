"""The wire formats of the routes that generate: how each reads a request and writes an answer.

OpenAI's shapes of an answer are here: whole objects and stream chunks, for chat and completions. Pure: takes
deltas and totals, returns dicts. The end of the module encodes a stream's server-sent events.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel

from samovar.replicas.messages import Delta, FinishReason, TokenLogprob
from samovar.replicas.reply import Call, Piece, Reply, ReplyReader, ReplyReading, read_reply
from samovar.router.openai.errors import ApiError, InvalidValue
from samovar.router.openai.messages import ChatMessage, ToolCall
from samovar.router.openai.parse import (
    AnswerExtras,
    ParsedChat,
    ParsedCompletion,
    ParsedRequest,
    RequestParser,
)
from samovar.router.openai.schema import NOT_PASSED, ChatBody


class Dialect(ABC):
    """How one route reads requests and writes answers. `id_prefix`: what its answers' ids begin with.

    `is_kept`: an answer that the client names can be had again, from one of its events on.
    """

    id_prefix: str
    is_kept = False

    @abstractmethod
    async def parse(self, body: bytes, tenant: str) -> ParsedChat | ParsedCompletion:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""

    @abstractmethod
    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> AnswerShape:
        """Return the shape of one answer; `session`: the session's tag."""

    async def over(self) -> None:
        """Share what shapes have kept of their answers, before the last bytes of one are sent."""
        return

    def renamed(self, error: ApiError, request: ParsedRequest) -> ApiError:
        """Return an error about a parsed request with the names that its client has called its fields by."""
        return error


class ChatDialect(Dialect):
    """OpenAI's /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    is_kept = True

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser

    async def parse(self, body: bytes, tenant: str) -> ParsedChat:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.chat(body)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> AnswerShape:
        """Return the shape of one answer."""
        return ChatShape(head)


class CompletionDialect(Dialect):
    """OpenAI's /v1/completions."""

    id_prefix = "cmpl-"
    is_kept = True

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser

    async def parse(self, body: bytes, tenant: str) -> ParsedCompletion:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.completion(body)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> AnswerShape:
        """Return the shape of one answer."""
        return CompletionShape(head)


def with_passed(asked: BaseModel, said: Json, but: Collection[str] = ()) -> Json:
    """Return a chat's fields of another API's body: those that it says in its own way, `said`, and the rest.

    `but`: names of a chat's fields that mean something else there. Raises `InvalidValue` for a field that is
    there both ways.
    """
    passed = ChatBody.model_fields.keys() - NOT_PASSED - set(but)
    given = {name: value for name in sorted(passed) if (value := getattr(asked, name, None)) is not None}
    for name in given.keys() & said.keys():
        raise InvalidValue(name, f"{name} is there in two ways, as another field says the same. Give one.")
    return given | said


def names_here(names: Mapping[str, str], asked: BaseModel) -> dict[str, str]:
    """Return the client's names of a chat's fields, without those that it called as a chat does."""
    found = {}
    for place, name in names.items():
        field_of_chat = place.partition(".")[0]
        if name.partition(".")[0] == field_of_chat or getattr(asked, field_of_chat, None) is None:
            found[place] = name
    return found


def rename(error: ApiError, places: Mapping[str, str]) -> ApiError:
    """Give an error about a translated field the name that the client used, in its message too.

    `places`: see `place_here`.
    """
    param = error.param
    if param is not None and (here := place_here(param, places)) != param:
        error.param = here
        error.message = error.message.replace(param, here)
    return error


PARTS_MAX = 32
"""Of a field's name that is looked up; no translated one has as many."""


def place_here(param: str, places: Mapping[str, str]) -> str:
    """Return the client's name of a translated field.

    `places`: of translated fields, the client's; the longest that fits counts, with what follows it. A name
    has few parts, and a body many places: the former are gone through.
    """
    ends = [found.start() for found in islice(re.finditer(r"[.\[]", param), PARTS_MAX)]
    for end in (len(param), *reversed(ends)):
        if (here := places.get(param[:end])) is not None:
            return here + param[end:]
    return param


Json = dict[str, Any]

LOGPROB_MIN = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer, over all its prompts and choices.

    `cached_by_tier`: prompt tokens that were not computed for it, by source.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_by_tier: Mapping[str, int]

    def json(self) -> Json:
        """Return OpenAI's `usage`; `cached_tokens` is always an integer, 0 on a miss."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self.cached_by_tier.values()),
                "cached_tokens_by_tier": dict(self.cached_by_tier),
            },
        }


@dataclass(slots=True)
class Choice:
    """One answer as generated so far. `reading`: how it is read as a message; None: it is text."""

    index: int
    reading: ReplyReading | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    _reply: Reply | None = field(default=None, init=False, repr=False)  # of the whole answer

    @property
    def text(self) -> str:
        """The text generated so far."""
        return "".join(self.texts)

    @property
    def reply(self) -> Reply:
        """The answer so far as a message."""
        if self._reply is not None:
            return self._reply
        reply = Reply(self.text) if self.reading is None else read_reply(self.reading, self.text)
        if self.finish_reason is not None:
            self._reply = reply
        return reply

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer share. `created` is a Unix time in seconds; `reading`: see `Choice`.

    `is_named_call`: the request names the tool to call; such an answer ends as `stop`, as OpenAI's does.
    """

    answer_id: str
    model: str
    created: int
    wants_logprobs: bool
    extras: AnswerExtras = field(default_factory=AnswerExtras)
    reading: ReplyReading | None = None
    is_named_call: bool = False

    def call_id(self, choice: int, number: int) -> str:
        """Return the id of a choice's tool call: the same on every replica."""
        named = f"{self.answer_id}/{choice}/{number}".encode()
        return f"call_{hashlib.sha256(named).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """What an answer may show of its prompt. `text`: for `echo`; `logprobs`: of all its tokens, or none.

    `cached_by_tier`: see `Usage`.
    """

    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)


class AnswerShape(ABC):
    """JSON shape of one answer. One object per request: completions count text offsets in it."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def opening(self, prompts: Sequence[ShownPrompt], n: int) -> list[Json]:
        """Return the chunks sent before the first text, for `n` choices of each prompt."""
        return []

    def of_prompt(self, index: int, prompt: ShownPrompt) -> list[Json]:
        """Return the chunks that show choice `index` its computed prompt, before its first delta."""
        return []

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Return the chunks of one delta of choice `index`; none if there is nothing to send.

        The finish reason always has a chunk of its own, the choice's last.
        """
        made, ids = [], self._ids(delta.token_ids)
        if delta.text or (delta.logprobs and self._head.wants_logprobs) or ids.get("token_ids"):
            logprobs = self._logprobs(index, delta.logprobs) if self._head.wants_logprobs else None
            made.append(self._chunk([self._piece(index, delta.text, logprobs, None) | ids]))
        if delta.finish_reason is not None:
            made.append(self._end(index, delta.finish_reason))
        return made

    def _end(self, index: int, reason: str) -> Json:
        return self._chunk([self._piece(index, None, None, reason) | self._ids(())])

    def sent(self, choice: Choice) -> ChatMessage | None:
        """Return a choice as the message that a client sends back; None if that is its text alone."""
        return None

    def add_receipt(self, chunks: list[Json], receipt: Json) -> None:
        """Put the receipt into the last chunk of the deltas."""
        chunks[-1]["receipt"] = receipt

    def closing(self, usage: Usage, receipt: Json, *, tells_usage: bool) -> bytes:
        """Return the end of a stream; `tells_usage`: with a chunk for the usage, without choices."""
        last = [{**self._chunk([]), "usage": usage.json(), "receipt": receipt}] if tells_usage else []
        return self.encode(last) + DONE

    def encode(self, chunks: Iterable[Json]) -> bytes:
        """Return the server-sent events of chunks."""
        return data(chunks)

    def ping(self) -> bytes:
        """Return what a silent stream says."""
        return PING

    def failed(self, failure: ApiError) -> bytes:
        """Return the end of a failed stream."""
        return error(failure)

    def whole(
        self, choices: Sequence[Choice], prompts: Sequence[ShownPrompt], usage: Usage, receipt: Json
    ) -> Json:
        """Return the answer to a request that does not stream; every prompt has as many choices."""
        n = len(choices) // len(prompts)
        made = [
            self._whole_choice(choice, prompts[number // n]) | self._ids(choice.token_ids)
            for number, choice in enumerate(choices)
        ]
        return {**self._base(self.whole_object, made), "usage": usage.json(), "receipt": receipt}

    def _ids(self, token_ids: Sequence[int]) -> Json:
        """Return vLLM's `token_ids` of a choice, if asked for."""
        return {"token_ids": list(token_ids)} if self._head.extras.token_ids else {}

    def _shown_prompt(self, prompt: ShownPrompt) -> Json:
        """Return what vLLM shows of a prompt, if asked for: its ids, its log-probabilities."""
        shown: Json = {}
        if self._head.extras.prompt_logprobs:
            shown["prompt_logprobs"] = [_by_id(token) for token in prompt.logprobs]
        if self._head.extras.token_ids:
            shown["prompt_token_ids"] = list(prompt.token_ids)
        return shown

    def _name(self, token: TokenLogprob) -> str:
        return f"token_id:{token.token_id}" if self._head.extras.names_ids else _name(token)

    def _chunk(self, choices: list[Json]) -> Json:
        return self._base(self.chunk_object, choices)

    def _base(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._head.answer_id,
            "object": kind,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    @abstractmethod
    def _piece(
        self, index: int, text: str | None, logprobs: Json | None, finish_reason: str | None
    ) -> Json: ...

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Json: ...

    @abstractmethod
    def _whole_choice(self, choice: Choice, prompt: ShownPrompt) -> Json: ...


class ChatShape(AnswerShape):
    """Shape of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._readers: dict[int, ReplyReader] = {}  # of a stream, by choice

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Return the chunks of one delta; see `AnswerShape.chunks`.

        What its tokens add to reasoning, content and calls has chunks of its own; log-probabilities and ids
        are in the first of them, or in one with nothing else.
        """
        if self._head.reading is None:
            return AnswerShape.chunks(self, index, delta)
        pieces, reply = self.read(index, delta)
        number = len(reply.calls) - sum(piece.kind == "call" for piece in pieces) - 1
        said: list[Json] = []
        for piece in pieces:
            number += piece.kind == "call"
            said += self._said(index, piece, number)
        logprobs = None
        if self._head.wants_logprobs and delta.logprobs:
            logprobs = self._logprobs(index, delta.logprobs)
        ids = self._ids(delta.token_ids)
        if not said and (logprobs or ids.get("token_ids")):
            said.append({"content": ""})
        made = [
            {"index": index, "delta": one, "logprobs": None, "finish_reason": None} | self._ids(())
            for one in said
        ]
        if made:
            made[0] |= {"logprobs": logprobs} | ids
        chunks = [self._chunk([choice]) for choice in made]
        if delta.finish_reason is not None:
            chunks.append(self._end(index, self._finish(delta.finish_reason, reply)))
        return chunks

    def read(self, index: int, delta: Delta) -> tuple[list[Piece], Reply]:
        """Return what the next delta of a streamed choice adds to its message, and the message so far."""
        reading = self._head.reading
        if reading is None:
            return [Piece("content", delta.text)] if delta.text else [], Reply()
        reader = self._readers.get(index) or self._readers.setdefault(index, ReplyReader(reading))
        pieces = reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        return pieces, reader.reply

    def sent(self, choice: Choice) -> ChatMessage | None:
        """Return a choice as the message that a client sends back; None if that is its text alone."""
        reply = choice.reply
        if reply.content == choice.text or reply.is_cut or any(call.value is None for call in reply.calls):
            return None
        calls = tuple(
            ToolCall(self._head.call_id(choice.index, number), call.name, call.arguments)
            for number, call in enumerate(reply.calls)
        )
        return ChatMessage("assistant", reply.content, reasoning=reply.reasoning, calls=calls)

    def _said(self, index: int, piece: Piece, number: int) -> list[Json]:
        """Return the delta of a piece: of a call first its id and name, then its arguments as they come."""
        if piece.kind == "call":
            return [{"tool_calls": [{"index": number, **self._call(index, number, Call(piece.text, ""))}]}]
        if piece.kind == "arguments":
            return [{"tool_calls": [{"index": number, "function": {"arguments": piece.text}}]}]
        if piece.kind == "called":
            return []
        return [{"content": piece.text}] if piece.kind == "content" else [_thought(piece.text)]

    def _call(self, choice: int, number: int, call: Call) -> Json:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._head.call_id(choice, number), "type": "function", "function": function}

    def opening(self, prompts: Sequence[ShownPrompt], n: int) -> list[Json]:
        """Return the role, once for every choice; the prompt's ids in the first chunk."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        made = [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(n)
        ]
        if self._head.extras.token_ids:
            made[0]["prompt_token_ids"] = list(prompts[0].token_ids)
        return made

    def whole(
        self, choices: Sequence[Choice], prompts: Sequence[ShownPrompt], usage: Usage, receipt: Json
    ) -> Json:
        """Return the answer to a request that does not stream."""
        return AnswerShape.whole(self, choices, prompts, usage, receipt) | self._shown_prompt(prompts[0])

    def _piece(self, index: int, text: str | None, logprobs: Json | None, finish_reason: str | None) -> Json:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Json:
        content = [
            {**self._token(token), "top_logprobs": [self._token(top) for top in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: TokenLogprob) -> Json:
        name = self._name(token) if self._head.extras.names_ids else token.token
        return {"token": name, "logprob": _finite(token.logprob), "bytes": list(token.token_bytes)}

    def _whole_choice(self, choice: Choice, prompt: ShownPrompt) -> Json:
        reply = choice.reply
        is_other = (
            reply.calls or reply.reasoning or (choice.reading is not None and choice.reading.is_promised)
        )
        said = reply.content if reply.content or not is_other else None
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        if reply.reasoning:
            message |= _thought(reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [
                self._call(choice.index, number, call) for number, call in enumerate(reply.calls)
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.index, choice.logprobs) if self._head.wants_logprobs else None,
            "finish_reason": choice.finish_reason and self._finish(choice.finish_reason, reply),
        }

    def _finish(self, reason: FinishReason, reply: Reply) -> FinishReason | Literal["tool_calls"]:
        """Return why an answer ended, as clients are told."""
        return reason if self._head.is_named_call else finish_of(reason, reply)


def finish_of(reason: FinishReason, reply: Reply) -> FinishReason | Literal["tool_calls"]:
    """Return why an answer ended, as clients are told."""
    return "tool_calls" if reason == "stop" and reply.ends_in_calls else reason


def _thought(text: str) -> Json:
    """Return the reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


class CompletionShape(AnswerShape):
    """Shape of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._offsets: dict[int, _TextOffsets] = {}

    def _piece(self, index: int, text: str | None, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": finish_reason}

    def of_prompt(self, index: int, prompt: ShownPrompt) -> list[Json]:
        """Return the prompt's text and log-probabilities (`echo`) and its ids, as far as asked for."""
        extras = self._head.extras
        if not (extras.echo or extras.token_ids):
            return []
        text, logprobs = (prompt.text, self._prompt_logprobs(index, prompt)) if extras.echo else ("", None)
        shown = self._piece(index, text, logprobs, None) | self._ids(())
        return [self._chunk([shown | self._shown_prompt(prompt)])]

    def _prompt_logprobs(self, index: int, prompt: ShownPrompt) -> Json | None:
        """Return the log-probabilities of an echoed prompt; null where there are none, as for its first."""
        if not self._head.wants_logprobs:
            return None
        shown = self._logprobs(index, prompt.logprobs)
        for place, token in enumerate(prompt.logprobs):
            if not token.rank:
                shown["token_logprobs"][place] = shown["top_logprobs"][place] = None
        return shown

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Json:
        """Return parallel lists; `text_offset` counts characters from the beginning of the text."""
        offsets = self._offsets.setdefault(index, _TextOffsets())
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._name(other): _finite(other.logprob) for other in (*token.top, token)}
                for token in tokens
            ],
            "text_offset": [offsets.add(token.token_bytes) for token in tokens],
        }

    def _whole_choice(self, choice: Choice, prompt: ShownPrompt) -> Json:
        text, echoed = choice.text, None
        if self._head.extras.echo:
            text, echoed = prompt.text + text, self._prompt_logprobs(choice.index, prompt)
        logprobs = self._logprobs(choice.index, choice.logprobs) if self._head.wants_logprobs else None
        if logprobs is not None and echoed is not None:
            logprobs = {name: [*echoed[name], *values] for name, values in logprobs.items()}
        return self._piece(choice.index, text, logprobs, choice.finish_reason) | self._shown_prompt(prompt)


class _TextOffsets:
    """Counts the characters of a text by the bytes of its tokens: a character may be split over several."""

    def __init__(self) -> None:
        self._chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: bytes) -> int:
        """Return how many whole characters stand in front of a token, and count those that it ends."""
        before, self._chars = self._chars, self._chars + len(self._decoder.decode(token))
        return before


def _by_id(token: TokenLogprob) -> Json | None:
    """Return a prompt token and the best in its place as vLLM's `prompt_logprobs` do."""
    if not token.rank:
        return None
    ranked = [(token, token.rank), *((top, rank) for rank, top in enumerate(token.top, 1))]
    return {
        str(one.token_id): {"logprob": _finite(one.logprob), "rank": rank, "decoded_token": one.token}
        for one, rank in ranked
    }


def _name(token: TokenLogprob) -> str:
    """Return a token's key: its text, or `bytes:\\xe4\\xbd` as OpenAI writes part of a character.

    By text alone all such tokens would be U+FFFD, and one would hide the others.
    """
    try:
        token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
    return token.token


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


# Server-sent events: the bytes of OpenAI's streams.

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PING_BEHIND_IDS = b": ping\n"
"""Behind an event with an id, openai's client takes an empty line for an event without data, and fails."""


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Encode compact ASCII JSON. Raises ValueError for NaN and infinities, which JSON lacks.

    ASCII, because many clients treat U+2028, U+2029 and U+0085 as line ends, as `str.splitlines` does, and
    would split an event.
    """
    return _ENCODER.encode(value).encode()


def data(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode one `data:` event for each chunk."""
    return b"".join(b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks)


def error(failure: ApiError) -> bytes:
    """Encode the end of a failed stream: an error that clients raise, then `[DONE]`.

    A stream that is merely cut looks like a short answer to clients.
    """
    return b"data: " + failure.body_bytes() + b"\n\n" + DONE
