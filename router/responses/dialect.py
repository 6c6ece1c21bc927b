"""/v1/responses as a dialect of the one way to generate: the whole object and the events of a stream.

Reasoning is an item with its text as content. Pure, except that a finished response goes to `keep`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from samovar.replicas.messages import Delta, FinishReason
from samovar.replicas.reply import Call, Piece
from samovar.router.openai import (
    AnswerHead,
    ApiError,
    ChatShape,
    Choice,
    Dialect,
    Json,
    ParsedRequest,
    ShownPrompt,
    Usage,
    json_bytes,
    rename,
)
from samovar.router.responses.custom_tools import InputReader, input_of, input_so_far
from samovar.router.responses.request import (
    ParsedResponse,
    ResponseNotFound,
    ResponsesParser,
    encrypted,
)
from samovar.router.responses.store import StoredResponse

FETCHES_MAX = 64
"""Responses that one request may have fetched, by their ids or by those of their items."""


class SharedStore(Protocol):
    """Responses that other ingresses find too."""

    def put(self, tenant: str, response_id: str, stored: StoredResponse, *, forgets: int) -> bool:
        """Keep a response; `tell` shares it. See `ResponseStore.put`."""
        ...

    async def tell(self) -> None:
        """Share what was put."""
        ...

    async def fetch(self, tenant: str, wanted_id: str) -> bool:
        """Take over the response of that id, or with an item of that id; return whether there is one."""
        ...


class ResponsesDialect(Dialect):
    """OpenAI's /v1/responses; what is to be kept of answers goes into `store`."""

    id_prefix = "resp_"

    def __init__(self, parser: ResponsesParser, store: SharedStore) -> None:
        self._parser = parser
        self._store = store

    async def parse(self, body: bytes, tenant: str) -> ParsedResponse:
        """Return the request of a body; responses that it names are fetched.

        Raises `ApiError` naming the field at fault.
        """
        for _ in range(FETCHES_MAX):
            try:
                return self._parser.response(body, tenant)
            except ResponseNotFound as missing:
                if not await self._store.fetch(tenant, missing.wanted_id):
                    raise
        return self._parser.response(body, tenant)

    async def over(self) -> None:
        """Share the responses that were kept, before the client can name them."""
        await self._store.tell()

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> ResponsesShape:
        """Return the shape of one answer."""
        assert isinstance(request, ParsedResponse)
        return ResponsesShape(head, request, partial(self._keep, request, tenant, session))

    def _keep(
        self, request: ParsedResponse, tenant: str, session: bytes, response: Json, answer: Json
    ) -> None:
        messages = json_bytes({"messages": [*request.said, answer]})
        items = tuple(item["id"] for item in response["output"])
        stored = StoredResponse(json_bytes(response), messages, session, items, request.began_unix_s)
        self._store.put(tenant, response["id"], stored, forgets=request.forgets)

    def renamed(self, error: ApiError, request: ParsedRequest) -> ApiError:
        """See `Dialect`."""
        assert isinstance(request, ParsedResponse)
        return rename(error, request.called)


Keep = Callable[[Json, Json], None]
"""Takes a finished response and its answer as a message of a chat request."""


class ResponsesShape(ChatShape):
    """Shape of /v1/responses."""

    def __init__(self, head: AnswerHead, request: ParsedResponse, keep: Keep) -> None:
        super().__init__(head)
        self._request = request
        self._keep = keep
        self._events = 0
        self._open: Json | None = None  # the item that grows
        self._items: list[Json] = []  # closed
        self._calls = 0
        self._arguments = ""  # of the open call
        self._input = InputReader()
        self._reason: FinishReason = "stop"
        self._streamed = Choice(0, head.reading)

    def opening(self, prompts: Sequence[ShownPrompt], n: int) -> list[Json]:
        """Return the events that begin a response."""
        begun = self._response("in_progress", [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def of_prompt(self, index: int, prompt: ShownPrompt) -> list[Json]:
        """Return nothing: a response shows nothing of its prompt."""
        return []

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Return the events of one delta."""
        self._streamed.add(delta)
        pieces, _ = self.read(index, delta)
        events: list[Json] = []
        for piece in pieces:
            events += self._piece_events(piece)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            events += self._closed()
        return events

    def _piece_events(self, piece: Piece) -> list[Json]:
        if piece.kind == "called":
            return self._closed(is_whole=True)
        if piece.kind == "call":
            events = self._closed()
            self._open = self._call_item(Call(piece.text, ""), self._calls) | {"status": "in_progress"}
            self._arguments, self._input = "", InputReader()
            self._calls += 1
            place = {"output_index": len(self._items), "item": dict(self._open)}
            return [*events, self._event("response.output_item.added", **place)]
        if piece.kind == "arguments" and self._open is not None:
            self._arguments += piece.text
            if self._open["type"] == "custom_tool_call":
                return self._input_events(self._input.feed(piece.text))
            self._open["arguments"] = self._arguments
            told = {**self._place(), "delta": piece.text}
            return [self._event("response.function_call_arguments.delta", **told)]
        events = []
        kind = "message" if piece.kind == "content" else "reasoning"
        if self._open is None or self._open["type"] != kind:
            events += self._closed()
            self._open = self._text_item(kind, "", len(self._items), "in_progress")
            part = self._open["content"][0]
            events += [
                self._event(
                    "response.output_item.added",
                    output_index=len(self._items),
                    item={**self._open, "content": []},
                ),
                self._event("response.content_part.added", **self._place(), part=dict(part)),
            ]
        self._open["content"][0]["text"] += piece.text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        events.append(self._event(name, **self._place(), **_logprobs(kind), delta=piece.text))
        return events

    def _input_events(self, text: str) -> list[Json]:
        """Return the event of more input of the open call, if there is any."""
        if not text or self._open is None:
            return []
        self._open["input"] += text
        return [self._event("response.custom_tool_call_input.delta", **self._place(), delta=text)]

    def _closed(self, *, is_whole: bool = False) -> list[Json]:
        """Close the open item, if there is one; `is_whole`: a call that is not cut."""
        if self._open is None:
            return []
        if self._open["type"] == "custom_tool_call":
            place, said = self._place(), input_of(self._arguments) if is_whole else self._open["input"]
            rest = self._input_events(said[len(self._open["input"]) :])
            item = self._open | {"status": _status(is_whole), "input": said}
            self._open = None
            self._items.append(item)
            return [
                *rest,
                self._event("response.custom_tool_call_input.done", **place, input=said),
                self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
            ]
        if self._open["type"] == "function_call":
            item, place = self._open | {"status": _status(is_whole)}, self._place()
            told = {"name": item["name"], "arguments": item["arguments"]}
            self._open = None
            events = [
                self._event("response.function_call_arguments.done", **place, **told),
                self._event("response.output_item.done", output_index=len(self._items), item=item),
            ]
            self._items.append(item)
            return events
        kind, text = self._open["type"], self._open["content"][0]["text"]
        is_cut = kind == "message" and self._reason == "length"
        item = self._text_item(kind, text, len(self._items), "incomplete" if is_cut else "completed")
        name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
        events = [
            self._event(name, **self._place(), **_logprobs(kind), text=text),
            self._event("response.content_part.done", **self._place(), part=item["content"][0]),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._open = None
        return events

    def _place(self) -> Json:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        is_call = self._open["type"] in ("function_call", "custom_tool_call")
        return place if is_call else place | {"content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _text_item(self, kind: str, text: str, number: int, status: str) -> Json:
        if kind == "reasoning":
            part: Json = {"type": "reasoning_text", "text": text}
            item: Json = {"id": self._item_id("rs", number), "type": kind, "summary": [], "content": [part]}
            if self._request.tells_thoughts:
                item["encrypted_content"] = encrypted(text)
            return item | {"status": status}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        made = {"id": self._item_id("msg", number), "type": kind, "role": "assistant", "status": status}
        return made | {"content": [part]}

    def _call_item(self, call: Call, number: int) -> Json:
        if call.name in self._request.customs:
            said = input_of(call.arguments) if call.is_whole else input_so_far(call.arguments)
            return {
                "id": self._item_id("ctc", number),
                "type": "custom_tool_call",
                "call_id": self._head.call_id(0, number),
                "name": call.name,
                "input": said if call.arguments else "",
                "status": _status(call.is_whole),
            }
        namespace, name = self._request.names.get(call.name, (None, call.name))
        item = {
            "id": self._item_id("fc", number),
            "type": "function_call",
            "call_id": self._head.call_id(0, number),
            "name": name,
            "arguments": call.arguments,
            "status": _status(call.is_whole),
        }
        return item if namespace is None else item | {"namespace": namespace}

    def _item_id(self, prefix: str, number: int) -> str:
        named = f"{self._head.answer_id}/{prefix}/{number}".encode()
        return f"{prefix}_{hashlib.sha256(named).hexdigest()[:32]}"

    def add_receipt(self, chunks: list[Json], receipt: Json) -> None:
        """Leave the events as they are: the receipt is in the last."""

    def closing(self, usage: Usage, receipt: Json, *, tells_usage: bool) -> bytes:
        """Return the event that ends the stream; the response is stored before."""
        made = self._finished(self._items, self._streamed, usage, receipt)
        return self.encode([self._event(f"response.{made['status']}", response=made)])

    def encode(self, chunks: Iterable[Json]) -> bytes:
        """Return the server-sent events, each with its name."""
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), json_bytes(chunk)) for chunk in chunks
        )

    def failed(self, failure: ApiError) -> bytes:
        """Return the event of a response that failed, which ends the stream."""
        made = self._response("failed", self._items)
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        made["error"] = {"code": code, "message": failure.message}
        return self.encode([self._event("response.failed", response=made)])

    def whole(
        self, choices: Sequence[Choice], prompts: Sequence[ShownPrompt], usage: Usage, receipt: Json
    ) -> Json:
        """Return the answer to a request that does not stream; it is stored before."""
        choice = choices[0]
        reply = choice.reply
        self._reason = choice.finish_reason or "stop"
        status = "incomplete" if self._reason == "length" else "completed"
        items: list[Json] = []
        if reply.reasoning:
            items.append(self._text_item("reasoning", reply.reasoning, 0, "completed"))
        if reply.content:
            items.append(self._text_item("message", reply.content, len(items), status))
        items += [self._call_item(call, number) for number, call in enumerate(reply.calls)]
        return self._finished(items, choice, usage, receipt)

    def _finished(self, items: Sequence[Json], choice: Choice, usage: Usage, receipt: Json) -> Json:
        is_cut = self._reason == "length"
        made = self._response("incomplete" if is_cut else "completed", items)
        if is_cut:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        made["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": sum(usage.cached_by_tier.values()),
                "cache_write_tokens": 0,
                "cached_tokens_by_tier": dict(usage.cached_by_tier),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        made["receipt"] = receipt
        if self._request.is_stored:
            self._keep(made, self._message(choice))
        return made

    def _message(self, choice: Choice) -> Json:
        """Return the answer as a message of a chat request."""
        reply = choice.reply
        message: Json = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": self._head.call_id(0, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(reply.calls)
            ]
        return message

    def _response(self, status: str, items: Sequence[Json]) -> Json:
        echo: Mapping[str, Any] = self._request.echo
        return {
            "id": self._head.answer_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(items),
            **echo,
            "usage": None,
        }


def _status(is_whole: bool) -> str:
    return "completed" if is_whole else "incomplete"


def _logprobs(kind: str) -> Json:
    """Return the field that events of texts have and those of reasoning have not."""
    return {"logprobs": []} if kind == "message" else {}
