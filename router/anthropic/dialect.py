"""Anthropic's Messages as a dialect: whole messages and the events of a stream, and errors, in its JSON
shapes.

Reasoning is a `thinking` block with an empty signature. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from pydantic_core import from_json

from samovar.replicas.messages import Delta, FinishReason
from samovar.replicas.reply import Call, Piece, Reply, finite
from samovar.router.anthropic.request import MessagesParser, ParsedMessages
from samovar.router.openai import (
    PING,
    AnswerHead,
    ApiError,
    ChatShape,
    Choice,
    ContextLengthExceeded,
    Dialect,
    Json,
    ParsedRequest,
    ShownPrompt,
    Usage,
    finish_of,
    json_bytes,
    rename,
)


class MessagesDialect(Dialect):
    """Anthropic's /v1/messages; `decode`: the text of tokens."""

    id_prefix = "msg_"

    def __init__(self, parser: MessagesParser, decode: Callable[[Sequence[int]], str]) -> None:
        self._parser = parser
        self._decode = decode

    async def parse(self, body: bytes, tenant: str) -> ParsedMessages:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.messages(body)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> MessagesShape:
        """Return the shape of one answer."""
        assert isinstance(request, ParsedMessages)
        return MessagesShape(head, request, self._decode)

    def renamed(self, error: ApiError, request: ParsedRequest) -> ApiError:
        """See `Dialect`."""
        assert isinstance(request, ParsedMessages)
        return rename(error, request.called)


def models_page(cards: Sequence[Json]) -> Json:
    """Return the list of models with what Anthropic's list has besides OpenAI's fields."""
    data = [
        {
            **card,
            "type": "model",
            "display_name": card["id"],
            "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        }
        for card in cards
    ]
    ids = [card["id"] for card in cards]
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
OPENED: Mapping[str, Json] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesShape(ChatShape):
    """Shape of /v1/messages.

    `decode`: the text of tokens; it finds which stop sequence ended an answer.
    """

    def __init__(
        self, head: AnswerHead, request: ParsedMessages, decode: Callable[[Sequence[int]], str]
    ) -> None:
        super().__init__(head)
        self._request = request
        self._decode = decode
        self._is_begun = False
        self._block: str | None = None  # kind of the open block
        self._blocks = 0  # closed
        self._calls = 0
        self._token_ids: list[int] = []
        self._ended: Json = {}

    def opening(self, prompts: Sequence[ShownPrompt], n: int) -> list[Json]:
        """Return nothing: a message begins with its usage, which is known when its prompt is computed."""
        return []

    def of_prompt(self, index: int, prompt: ShownPrompt) -> list[Json]:
        """Return the event that begins the message."""
        self._is_begun = True
        usage = self._usage(Usage(len(prompt.token_ids), 0, prompt.cached_by_tier))
        return [{"type": "message_start", "message": self._message([], {}, usage)}]

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Return the events of one delta."""
        self._token_ids += delta.token_ids
        pieces, reply = self.read(index, delta)
        events: list[Json] = []
        for piece in pieces:
            events += self._piece_events(piece)
        if delta.finish_reason is not None:
            events += self._closed()
            self._ended = self._ending(delta.finish_reason, reply, self._token_ids)
        return events

    def _piece_events(self, piece: Piece) -> list[Json]:
        if piece.kind == "called":
            return self._closed()
        kind = "call" if piece.kind == "arguments" else piece.kind
        events = []
        if self._block != kind or piece.kind == "call":
            events += self._closed()
            self._block = kind
            events.append(_start(self._blocks, self._opened(piece)))
        if piece.kind == "arguments":
            events.append(_delta(self._blocks, {"type": "input_json_delta", "partial_json": piece.text}))
        elif piece.kind == "content":
            events.append(_delta(self._blocks, {"type": "text_delta", "text": piece.text}))
        elif piece.kind == "reasoning":
            events.append(_delta(self._blocks, {"type": "thinking_delta", "thinking": piece.text}))
        return events

    def _opened(self, piece: Piece) -> Json:
        """Return the block that a piece opens."""
        if piece.kind != "call":
            return OPENED[piece.kind]
        self._calls += 1
        return {
            "type": "tool_use",
            "id": self._head.call_id(0, self._calls - 1),
            "name": piece.text,
            "input": {},
        }

    def _closed(self) -> list[Json]:
        """Close the open block, if there is one."""
        if self._block is None:
            return []
        events = []
        if self._block == "reasoning":
            events.append(_delta(self._blocks, {"type": "signature_delta", "signature": ""}))
        events.append(_stop(self._blocks))
        self._block = None
        self._blocks += 1
        return events

    def add_receipt(self, chunks: list[Json], receipt: Json) -> None:
        """Leave the events as they are: the receipt is in the one before the last."""

    def closing(self, usage: Usage, receipt: Json, *, tells_usage: bool) -> bytes:
        """Return the events that end the message."""
        told = {
            "type": "message_delta",
            "delta": self._ended,
            "usage": self._usage(usage),
            "receipt": receipt,
        }
        return self.encode([told, {"type": "message_stop"}])

    def encode(self, chunks: Iterable[Json]) -> bytes:
        """Return the server-sent events, each with its name."""
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), json_bytes(chunk)) for chunk in chunks
        )

    def ping(self) -> bytes:
        """Return an event once the message has begun; before, a comment: nothing may come before it."""
        return self.encode([{"type": "ping"}]) if self._is_begun else PING

    def failed(self, failure: ApiError) -> bytes:
        """Return the event of an error, which ends the stream."""
        return self.encode([error_json(failure)])

    def whole(
        self, choices: Sequence[Choice], prompts: Sequence[ShownPrompt], usage: Usage, receipt: Json
    ) -> Json:
        """Return the answer to a request that does not stream."""
        choice = choices[0]
        reply = choice.reply
        blocks: list[Json] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            blocks.append({"type": "text", "text": reply.content})
        for number, call in enumerate(reply.calls):
            call_id = self._head.call_id(choice.index, number)
            blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": input_of(call)})
        ending = self._ending(choice.finish_reason or "stop", reply, choice.token_ids)
        return self._message(blocks, ending, self._usage(usage)) | {"receipt": receipt}

    def _message(self, blocks: list[Json], ending: Json, usage: Json) -> Json:
        return {
            "id": self._head.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": blocks,
            "stop_reason": ending.get("stop_reason"),
            "stop_sequence": ending.get("stop_sequence"),
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> Json:
        """Return the tokens as Anthropic counts them: each once.

        What was computed of a prompt with marks is kept for its next turn: it is counted as created.
        """
        cached = sum(usage.cached_by_tier.values())
        computed = usage.prompt_tokens - cached
        created = computed if self._request.is_marked else 0
        return {
            "input_tokens": computed - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "cache_read_input_tokens_by_tier": dict(usage.cached_by_tier),
            "output_tokens": usage.completion_tokens,
        }

    def _ending(self, reason: FinishReason, reply: Reply, token_ids: Sequence[int]) -> Json:
        told = STOP_REASONS[finish_of(reason, reply)]
        if told == "max_tokens" and len(token_ids) < self._request.tokens_asked:
            told = "model_context_window_exceeded"
        sequence = None
        if told == "end_turn":
            sequence = stopped_by(self._request.sampling.stop, token_ids, self._decode)
            told = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": told, "stop_sequence": sequence}


def input_of(call: Call) -> Json:
    """Return a call's arguments as an object: of one that was cut what there is, as their client reads it.

    What is no JSON stands under the name by which Anthropic's documents tell a model of it.
    """
    try:
        found = finite(
            from_json(call.arguments or "{}", allow_partial=not call.is_whole, allow_inf_nan=False)
        )
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": call.arguments}


def stopped_by(
    stops: Sequence[str], token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> str | None:
    """Return the stop string at the end of an answer's tokens; None: something else ended it.

    The first stop string that appears ends an answer, so one among the last tokens is the one.
    """
    if not stops:
        return None
    longest = max(map(len, stops))
    tail = decode(token_ids[-4 * (longest + 1) :])  # a character takes up to four tokens
    return max((stop for stop in stops if stop in tail), key=tail.rfind, default=None)


def _start(index: int, block: Mapping[str, object]) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": dict(block)}


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(error: ApiError, request_id: str) -> bytes:
    """Return the body of an error; `param` and `code` are Samovar's addition."""
    body = error_json(error)
    body["request_id"] = request_id
    return json.dumps(body, separators=(",", ":")).encode()


def error_json(error: ApiError) -> Json:
    """Return an error as an object, which is also a stream's event of type `error`."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):  # clients know these words, and shorten their conversation
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens_max} maximum"
    told = {"type": kind, "message": message, "param": error.param, "code": error.code}
    return {"type": "error", "error": told}
