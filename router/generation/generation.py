"""Serves one generation request, from its body to the last byte.

`GenerationEndpoint` is a raw ASGI app: it watches for a client disconnect while work is in flight, and then
cancels the replicas' work at once. It only orchestrates: parsing, limits, prompts, shapes and bytes belong
to the modules it calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from samovar.configs.telemetry import Span
from samovar.replicas.messages import Delta
from samovar.router.auth import RequestLease, tenant_of
from samovar.router.generation.answer import Answer, answer_headers
from samovar.router.generation.failover import EventPump, Outcome, Stream, resuming
from samovar.router.generation.opening import Identity, Prompted, RequestOpener, need_of
from samovar.router.generation.recorder import ServedTurn
from samovar.router.generation.response_sender import ResponseSender, cancel_on_disconnect
from samovar.router.generation.resumption import (
    REPLAYED_HEADER,
    EventIds,
)
from samovar.router.generation.services import IngressServices
from samovar.router.generation.stages import AnsweredTurn, tell
from samovar.router.metrics import RequestTimer
from samovar.router.openai import (
    PING_BEHIND_IDS,
    AnswerShape,
    ApiError,
    ClientClosedRequest,
    Dialect,
    InternalError,
    Loading,
    ParsedChat,
    ParsedCompletion,
    RequestTimeout,
    TooManyRequests,
    Unavailable,
    json_bytes,
    read_body,
)
from samovar.router.routing import (
    ReplicaFailed,
    ReplicaLost,
    TurnEnd,
)

logger = logging.getLogger(__name__)


ENTRIES_A_REPLY = 2  # with its reasoning and without
REMEMBER_S = 1.0  # how long the end of an answer may wait for the reply memory


@dataclass(slots=True)
class _Exchange:
    """State of one request in flight: what was asked, the answer so far, and the way out."""

    who: Identity
    made: Prompted
    request_id: str
    span: Span
    send: Send
    timer: RequestTimer
    answer: Answer
    shape: AnswerShape
    ids: EventIds | None  # of a stream's events, if its answer is named
    prompts_shown: set[int] = field(default_factory=set)  # of a stream, by number
    tokens_sent: int = 0  # of a stream: in deltas so far
    left_tokens: int = 0  # of the prompts: what their lineages' last turns left in the cache
    written_s: float = 0.0  # of a stream: when bytes were last sent (loop time)
    is_started: bool = False
    head: Message | None = None  # not sent before the event is seen that the client says it has
    is_noted: bool = False  # the session directory has its home replica

    @property
    def request(self) -> ParsedChat | ParsedCompletion:
        """What was asked."""
        return self.who.request

    def event(self, deltas: list[tuple[int, Delta]]) -> bytes:
        """Return the events of what is new."""
        return self.encoded(self._chunks(deltas))

    def encoded(self, chunks: list[dict[str, Any]]) -> bytes:
        """Return the events of chunks, with ids if the client can ask for them again."""
        if self.ids is None:
            return self.shape.encode(chunks)
        return self.ids.encode(self.shape, chunks)

    def _chunks(self, deltas: list[tuple[int, Delta]]) -> list[dict[str, Any]]:
        """Return the chunks of what is new: computed prompts, where they are shown, and deltas."""
        chunks: list[dict[str, Any]] = []
        answer = self.answer
        for number in answer.computed_prompts:
            if number not in self.prompts_shown:
                self.prompts_shown.add(number)
                part = answer.prompt_parts[number]
                for index in answer.choices_of(number):
                    chunks += self.with_usage(self.shape.of_prompt(index, part))
        for index, delta in deltas:
            self.tokens_sent += len(delta.token_ids)
            chunks += self.with_usage(self.shape.chunks(index, delta))
        if answer.is_over:  # the last chunk has a finish reason; no text comes after it
            self.shape.add_receipt(chunks, answer.receipt.json())
        return chunks

    def with_usage(self, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add `usage` as OpenAI does: with `include_usage` in every chunk, null before the last.

        With `continuous_usage_stats` as well, every chunk counts what was sent up to it.
        """
        if not self.request.include_usage:
            return chunks
        usage = None
        if self.request.continuous_usage:
            usage = replace(self.answer.usage(), completion_tokens=self.tokens_sent).json()
        return [{**chunk, "usage": usage} for chunk in chunks]


class GenerationEndpoint:
    """ASGI app of one of the routes that generate.

    Needs `caller` and `request_id` in the scope's state (see `router/ingress/middleware.py`). Raises
    `ApiError` before the first byte; after it, a stream ends with an error event.
    """

    def __init__(self, dialect: Dialect, service: IngressServices) -> None:
        self._dialect = dialect
        self._service = service
        self._limits = service.settings.limits
        self._opener = RequestOpener(dialect, service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, service = tenant_of(scope), self._service
        if not service.readiness.takes_work:
            if service.readiness.state == "draining":
                message = "The server is stopping: it only finishes running requests. Try again later."
                raise Unavailable(message, self._limits.retry_after_s, code="draining")
            raise Loading(self._limits.retry_after_s)
        with service.concurrency.lease(tenant) as lease, service.demand():
            await service.shares.check(tenant)
            body = await read_body(receive, Headers(scope=scope), self._limits)
            with closing(ResponseSender(send, self._limits.write_idle_s)) as sender:
                work = self._serve(lease, scope, body, sender)
                await cancel_on_disconnect(receive, work, sender)

    async def _serve(self, lease: RequestLease, scope: Scope, body: bytes, send: Send) -> None:
        now_s = asyncio.get_running_loop().time()
        deadline_s = now_s + self._limits.request_timeout_s
        exchange: _Exchange | None = None
        try:
            async with asyncio.timeout_at(deadline_s):
                exchange = await self._open(lease, scope, body, send, now_s)
                calls = self._calls(exchange, lease)
                await self._service.shares.check(exchange.who.tenant)
                async with EventPump(calls) as pump:
                    if exchange.request.stream:
                        await self._stream(exchange, pump)
                    else:
                        await self._reply(exchange, pump)
        except TimeoutError:
            await self._fail(exchange, RequestTimeout("The whole request", self._limits.request_timeout_s))
        except ReplicaLost as lost:
            logger.warning("request %s: replica lost: %s", scope["state"]["request_id"], lost)
            message = "The replica that handled this request was lost. Try again."
            await self._fail(exchange, Unavailable(message, self._limits.retry_after_s, code="replica_lost"))
        except ReplicaFailed as failed:
            logger.error("request %s: replica failed: %s", scope["state"]["request_id"], failed)
            await self._fail(exchange, InternalError(scope["state"]["request_id"]))
        except ApiError as error:
            await self._fail(exchange, error)
        except Exception:  # an internal error must not look like the end of an answer
            logger.exception("request %s failed", scope["state"]["request_id"])
            await self._fail(exchange, InternalError(scope["state"]["request_id"]))
        finally:
            if exchange is not None:  # a client that disconnects midway may come back
                self._note_home(exchange)
                if exchange.span.trace:
                    exchange.span.set(
                        exchange.answer.attributes(exchange.who.tenant, stream=exchange.request.stream)
                    )
                if not exchange.made.is_replayed:
                    self._count_turn(exchange, now_s)

    def _count_turn(self, exchange: _Exchange, began_s: float) -> None:
        """Record the turn, and count what it used."""
        answer, who, lineages = exchange.answer, exchange.who, exchange.made.lineages
        served = ServedTurn(who.session, who.salt, answer, who.turn, began_s, lineages)
        if self._service.recorder is not None and not self._service.recorder.over(served):
            self._service.metrics.unrecorded.inc()
        self._service.usage.count(
            answer,
            self._service.directory.prefill_price,
            tenant=who.tenant,
            lineage=lineages[0],
            request_id=exchange.request_id,
            ttft_s=exchange.timer.ttft_s,
            e2e_s=asyncio.get_running_loop().time() - began_s,
        )

    async def _open(
        self, lease: RequestLease, scope: Scope, body: bytes, send: Send, now_s: float
    ) -> _Exchange:
        request_id, span = scope["state"]["request_id"], scope["state"]["span"]
        who = await self._opener.identify(lease, Headers(scope=scope), body)
        made = await self._opener.prompt(who, body, span)
        answer, shape = self._opener.answer(who, made, request_id)
        timer = RequestTimer(self._service.metrics, now_s)
        ids = None if made.named is None else EventIds(made.named.name, made.named.is_over)
        return _Exchange(who, made, request_id, span, send, timer, answer, shape, ids)

    def _calls(self, exchange: _Exchange, lease: RequestLease) -> list[Stream]:
        """Return the streams of all prompts' answers. Nothing starts before they are read."""
        client, who = self._service.client, exchange.who
        asks = self._opener.asks(who, exchange.made, exchange.request_id, exchange.span)
        exchange.left_tokens = sum(
            min(ask.route.cached_tokens, len(ask.prompt_token_ids) - 1) for ask in asks
        )
        lease.ask(need_of(asks))
        settings = self._service.settings.router
        return [resuming(client, ask, who.session, settings, self._count_resume) for ask in asks]

    def _count_resume(self, outcome: Outcome) -> None:
        self._service.metrics.failovers.labels(outcome).inc()

    def _note_home(self, exchange: _Exchange) -> None:
        """Record where the prompts' blocks are now; once, and before the client can send its next turn."""
        if exchange.is_noted or not exchange.answer.replica_ids:
            return
        exchange.is_noted = True
        tenant, answer = exchange.who.known.tenant, exchange.answer
        for index, lineage in enumerate(exchange.made.lineages):
            if home := answer.home(index):
                end = TurnEnd(tenant, lineage, home, answer.chain_tokens(index), exchange.made.is_replayed)
                is_noted = self._service.directory.turn_ended(end)
                # As if the client had said so; its next turn says it is over.
                if is_noted and answer.calls_tool(index):
                    self._service.directory.hint(tenant, lineage, "tool", None)

    async def _stream(self, exchange: _Exchange, pump: EventPump) -> None:
        silence_s = self._service.settings.server.sse_keepalive_s
        answer, now_s = exchange.answer, asyncio.get_running_loop().time
        exchange.written_s = now_s()
        while not answer.is_over:
            # Of bytes, not of tokens: those may be held back until it is known what they are.
            came = await self._next(exchange, pump, max(0.0, exchange.written_s + silence_s - now_s()))
            if came is None:
                await self._send_head(exchange)
                await self._write(exchange, PING_BEHIND_IDS if exchange.ids else exchange.shape.ping())
                continue
            if answer.is_admitted or came:
                await self._send_head(exchange)
            await self._write(exchange, await self._built(exchange, partial(exchange.event, came)))
        await self._remember(exchange)
        shape, usage, receipt = exchange.shape, answer.usage(), answer.receipt.json()
        if exchange.ids is None:
            last = shape.closing(usage, receipt, tells_usage=exchange.request.include_usage)
        else:
            last = exchange.ids.closing(shape, usage, receipt, exchange.request.include_usage)
            exchange.ids.refuse_unsent()
        await self._dialect.over()
        await self._write(exchange, last, more=False)

    async def _reply(self, exchange: _Exchange, pump: EventPump) -> None:
        while not exchange.answer.is_over:
            await self._next(exchange, pump, self._limits.request_timeout_s)
        await self._remember(exchange)
        answer = exchange.answer

        def build() -> bytes:
            whole = exchange.shape.whole(
                answer.choices, answer.prompt_parts, answer.usage(), answer.receipt.json()
            )
            return json_bytes(whole)

        body = await self._built(exchange, build)
        await self._dialect.over()
        await self._start(exchange, "application/json", len(body))
        await self._write(exchange, body, more=False)

    async def _next(
        self, exchange: _Exchange, pump: EventPump, silence_s: float
    ) -> list[tuple[int, Delta]] | None:
        """Apply the next deltas to the answer and the metrics and return them; None after a silence."""
        answer, timer = exchange.answer, exchange.timer
        try:
            came = await pump.next(silence_s)
        except StopAsyncIteration:
            raise ReplicaFailed("the stream of events ended before the answer did") from None
        if came is None:
            return None
        was_admitted = answer.is_admitted
        deltas = answer.apply(*came)
        if exchange.made.is_replayed:
            if answer.is_over:
                self._note_home(exchange)
                await self._tell_stages(exchange)
            return deltas
        if answer.is_admitted and not was_admitted:
            timer.admitted(answer.queue_s, answer.receipt.tokens)
            metrics, cached = self._service.metrics, answer.receipt.cached_tokens
            metrics.returned(exchange.left_tokens, cached)
            for left in answer.prefixes_left:
                metrics.left_prefix(left.kind, left.token, answer.prompt_tokens - max(cached, left.token))
        now_s = asyncio.get_running_loop().time()
        tokens = sum(len(delta.token_ids) for _, delta in deltas)
        timer.tokens(now_s, tokens, hit=answer.receipt.cached_tokens > 0)
        if answer.is_over:
            timer.finished(now_s)
            self._note_home(exchange)
            await self._tell_stages(exchange)
        return deltas

    async def _built(self, exchange: _Exchange, build: Callable[[], bytes]) -> bytes:
        """Build bytes of the answer: in a thread where log-probabilities of a whole prompt make it long."""
        if exchange.request.sampling.prompt_logprobs is None:
            return build()
        return await self._service.prompts.work(build, 1, exchange.who.tenant, must_run=True)

    async def _tell_stages(self, exchange: _Exchange) -> None:
        """Tell the stages of a chat's prompt the first answer to it, before the receipt is sent."""
        if not exchange.made.placings:
            return
        answer, choice = exchange.answer, exchange.answer.choices[0]
        is_deleted = partial(self._service.is_deleted, exchange.who.known)
        sent, is_replayed = exchange.shape.sent(choice), exchange.made.is_replayed
        told = AnsweredTurn(choice, sent, answer.home(), is_replayed, is_deleted)
        await tell(exchange.made.placings, told, exchange.request_id)

    async def _remember(self, exchange: _Exchange) -> None:
        """Store the token ids of this turn before the client can send its next one."""
        if not isinstance(exchange.request, ParsedChat):
            return
        who = exchange.who
        try:
            async with asyncio.timeout(REMEMBER_S):
                for choice in exchange.answer.choices:
                    await self._service.prompts.remember(
                        who.salt.hex(),
                        exchange.answer.prompt_of(choice),
                        choice.text,
                        choice.token_ids,
                        owner=who.known.owner,
                        forgets=who.known.forgets,
                        reply=exchange.shape.sent(choice),
                    )
            replies = ENTRIES_A_REPLY * len(exchange.answer.choices)
            await self._service.known.keep(who.known, replies, exchange.made.lineages, who.placement)
        except (TimeoutError, TooManyRequests):
            logger.info("request %s: the tokenizer is busy, its reply is not remembered", exchange.request_id)
        except Exception as failed:  # noqa: BLE001 - it costs a later turn time, not this one its answer
            logger.warning("request %s: %s, reply forgotten", exchange.request_id, type(failed).__name__)

    async def _send_head(self, exchange: _Exchange) -> None:
        if exchange.is_started or exchange.head is not None:
            return
        await self._start(exchange, "text/event-stream; charset=utf-8", None)
        opening = exchange.shape.opening(exchange.answer.prompt_parts, exchange.request.n)
        if opening:
            await self._write(exchange, exchange.encoded(exchange.with_usage(opening)))

    async def _start(self, exchange: _Exchange, content_type: str, content_bytes: int | None) -> None:
        headers = {"content-type": content_type, "cache-control": "no-cache"}
        length = None if content_bytes is None else {"content-length": str(content_bytes)}
        headers |= length or {"x-accel-buffering": "no"}  # else nginx buffers the stream
        if exchange.made.is_replayed:
            headers[REPLAYED_HEADER] = "true"
        headers.update(answer_headers(exchange.answer, exchange.request))
        headers["x-ingress"] = self._service.shares.name
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        exchange.head = {"type": "http.response.start", "status": 200, "headers": raw}
        if exchange.ids is None or not exchange.ids.is_unproven:
            await self._send_started(exchange)

    async def _send_started(self, exchange: _Exchange) -> None:
        if (head := exchange.head) is not None:
            exchange.head, exchange.is_started = None, True
            await exchange.send(head)

    async def _write(self, exchange: _Exchange, body: bytes, *, more: bool = True) -> None:
        if body or not more:
            await self._send_started(exchange)
            await exchange.send({"type": "http.response.body", "body": body, "more_body": more})
            exchange.written_s = asyncio.get_running_loop().time()

    async def _fail(self, exchange: _Exchange | None, error: ApiError) -> None:
        """End a failed request with an error response, or with the last event of its stream."""
        error = self._dialect.renamed(error)
        if exchange is not None:
            exchange.span.fail(error.code or type(error).__name__)
        if exchange is None or not exchange.is_started or isinstance(error, ClientClosedRequest):
            raise error
        if not exchange.request.stream:
            raise error  # half a JSON body: closing the connection shows it is incomplete
        await self._write(exchange, exchange.shape.failed(error), more=False)
