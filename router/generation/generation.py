"""Serves one generation request, from its body to the last byte.

`GenerationEndpoint` is a raw ASGI app: it watches for a client disconnect while work is in flight, and then
cancels the replicas' work at once. It only orchestrates: parsing, limits, prompts, shapes and bytes belong
to the modules it calls.

`RequestOpener` opens a request: whose it is, which prompts it gives, and what the replicas are asked for
them. Three steps, in this order: `identify`, `prompt`, and `answer` with `asks`. And how much of the limits a
request needs, before and after its prompts are known.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from samovar.cache_tiers.blocks import Placement, tenant_tag
from samovar.configs.telemetry import Span
from samovar.replicas.messages import Delta, GenerateRequest, TurnContext
from samovar.router.auth import Need, RequestLease, tenant_of, tenant_salt
from samovar.router.generation.answer import Answer, answer_headers
from samovar.router.generation.failover import (
    REPLAYED_HEADER,
    AnswerName,
    EventIds,
    EventPump,
    NamedAnswer,
    NamedAnswers,
    Outcome,
    Stream,
    resuming,
    seeded,
)
from samovar.router.generation.recorder import ServedTurn
from samovar.router.generation.response_sender import ResponseSender, cancel_on_disconnect
from samovar.router.generation.services import IngressServices, ModelTable
from samovar.router.generation.stages import AnsweredTurn, AskedTurn, Placing, asking, measure, staged, tell
from samovar.router.ingresses import SessionTurn
from samovar.router.metrics import RequestTimer
from samovar.router.openai import (
    PING_BEHIND_IDS,
    AnswerHead,
    AnswerShape,
    ApiError,
    ClientClosedRequest,
    Dialect,
    InternalError,
    InvalidValue,
    Loading,
    ParsedChat,
    ParsedCompletion,
    RequestTimeout,
    TooManyRequests,
    Unavailable,
    json_bytes,
    read_body,
)
from samovar.router.prompt import Owner, Prompt, answer_tokens
from samovar.router.routing import (
    ReplicaFailed,
    ReplicaLost,
    TurnEnd,
    placement,
    session_key,
    session_tag,
    turn_context,
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
    now_s: Callable[[], float]  # the loop's clock
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
        are_shown = len(self.prompts_shown) == len(answer.prompts)
        for number in () if are_shown else answer.computed_prompts:
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
        self._by_model: ModelTable[GenerationEndpoint] | None = None

    def before(self, front: IngressServices, each: Sequence[GenerationEndpoint]) -> GenerationEndpoint:
        """Return this route's endpoint before several models; `each`: those of the models, this one first."""
        found = GenerationEndpoint(self._dialect, front)
        found._by_model = ModelTable(front, each)
        return found

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
            endpoint, by_model = self, self._by_model
            if by_model is not None:
                endpoint = by_model.of_body(body)
                if not endpoint._service.readiness.takes_work:
                    raise Loading(self._limits.retry_after_s)
            with closing(ResponseSender(send, self._limits.write_idle_s)) as sender:
                work = endpoint._serve(lease, scope, body, sender)
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
        try:
            made = await self._opener.prompt(who, body, span)
        except ApiError as error:
            raise self._dialect.renamed(error, who.request) from None
        answer, shape = self._opener.answer(who, made, request_id)
        timer = RequestTimer(self._service.metrics, now_s)
        ids = None if made.named is None else EventIds(made.named.name, made.named.is_over)
        clock = asyncio.get_running_loop().time
        return _Exchange(who, made, request_id, span, send, timer, clock, answer, shape, ids)

    def _calls(self, exchange: _Exchange, lease: RequestLease) -> list[Stream]:
        """Return the streams of all prompts' answers. Nothing starts before they are read."""
        client, who = self._service.client, exchange.who
        asks = self._opener.asks(who, exchange.made, exchange.request_id, exchange.span)
        exchange.left_tokens = sum(
            min(ask.route.cached_tokens, len(ask.prompt_token_ids) - 1) for ask in asks
        )
        lease.ask(need_of(asks))
        settings = self._service.settings.router
        is_deleted = partial(self._service.is_deleted, who.known)
        return [resuming(client, ask, who.session, settings, self._count_resume, is_deleted) for ask in asks]

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
                if is_noted and exchange.who.turn.is_final:
                    self._service.directory.hint(tenant, lineage, "closed", None)
                elif is_noted and answer.calls_tool(index):
                    self._service.directory.hint(tenant, lineage, "tool", None)

    async def _stream(self, exchange: _Exchange, pump: EventPump) -> None:
        silence_s = self._service.settings.server.sse_keepalive_s
        answer, now_s = exchange.answer, exchange.now_s
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
        if exchange.ids is not None and was_admitted and answer.resumes_apart(came[1]):
            exchange.ids.resumed_apart()
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
        now_s, tokens = exchange.now_s(), sum(len(delta.token_ids) for _, delta in deltas)
        timer.tokens(now_s, tokens, hit=timer.ttft_s is None and answer.receipt.cached_tokens > 0)
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
            exchange.written_s = exchange.now_s()

    async def _fail(self, exchange: _Exchange | None, error: ApiError) -> None:
        """End a failed request with an error response, or with the last event of its stream."""
        if exchange is not None:
            error = self._dialect.renamed(error, exchange.request)
            exchange.span.fail(error.code or type(error).__name__)
        if exchange is None or not exchange.is_started or isinstance(error, ClientClosedRequest):
            raise error
        if not exchange.request.stream:
            raise error  # half a JSON body: closing the connection shows it is incomplete
        await self._write(exchange, exchange.shape.failed(error), more=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """A parsed request, whose it is, and where its blocks belong.

    `name`: how the client names its answer. `session`: the session's key; `known` has its tag. `placement`:
    of its blocks. `turn`: for the forecast of the next one.
    """

    request: ParsedChat | ParsedCompletion
    name: AnswerName | None
    known: SessionTurn
    session: str
    placement: Placement | None
    turn: TurnContext

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self.known.owner.tenant

    @property
    def salt(self) -> bytes:
        """What separates blocks and remembered replies: by tenant, and `cache_salt`."""
        return self.known.salt


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompts of a request. `named`: the answer that the client can ask for again.

    `lineages`: of each prompt, the tag of the session's lineage that it belongs to. `placings`: what the
    stages did to a chat; `nodes`: see `AskedTurn`.
    """

    prompts: Sequence[Prompt]
    lineages: tuple[bytes, ...]
    named: NamedAnswer | None
    placings: tuple[Placing, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def is_replayed(self) -> bool:
        """Whether the answer was asked for before: who asked first has counted it."""
        return self.named is not None and self.named.is_replayed


class RequestOpener:
    """Opens the requests of one route, for one ingress. Its methods raise `ApiError`."""

    def __init__(self, dialect: Dialect, service: IngressServices) -> None:
        self._dialect = dialect
        self._service = service
        self._names = NamedAnswers(dialect, service.secret, service.settings)

    async def identify(self, lease: RequestLease, headers: Headers, body: bytes) -> Identity:
        """Parse a body, refuse what cannot be served, and say whose it is; nothing is tokenised."""
        service, settings, tenant = self._service, self._service.settings, lease.tenant
        # A deletion from here on is one of a turn that runs.
        began_unix_s, forgets = time.time(), service.prompts.forgotten.count
        request = await self._dialect.parse(body, tenant)
        service.refuse_other_model(request.model)
        name, request = self._names.name(request, headers, tenant)
        try:
            request = await self._within(lease, request)
        except ApiError as error:
            raise self._dialect.renamed(error, request) from None
        salt = tenant_salt(service.secret, tenant, request.ids.cache_salt)
        if service.is_further:  # so that replies of one model are never taken for another's
            salt = hashlib.sha256(b"model" + salt + service.model.encode()).digest()[: len(salt)]
        if request.model in service.adapters:  # its KV is another's, and so are its replies
            salt = hashlib.sha256(b"adapter" + salt + request.model.encode()).digest()[: len(salt)]
        where = placement(settings.tiers, tenant, headers, request.cache)
        session = session_key(
            service.secret,
            tenant,
            headers,
            request,
            settings.limits.id_chars_max,
            settings.router.session_ids,
            settings.router.prefix.volatile_lines,
        )
        owner = Owner(tenant, session_tag(session))
        known = SessionTurn(tenant_tag(service.secret, tenant), owner, salt, forgets, began_unix_s)
        turn = turn_context(settings.tiers, tenant, headers, request)
        return Identity(request, name, known, session, where, turn)

    async def _within(
        self, lease: RequestLease, request: ParsedChat | ParsedCompletion
    ) -> ParsedChat | ParsedCompletion:
        """Return a request within its tenant's rights and the model's window; its lease asks for its need."""
        service = self._service
        request = within_right(request, service.settings.best_priority(lease.tenant))
        vocabulary, sampling = service.prompts.vocabulary, request.sampling
        vocabulary.refuse_unknown(sampling.allowed_token_ids, "allowed_token_ids")
        vocabulary.refuse_unknown((token_id for token_id, _ in sampling.logit_bias), "logit_bias")
        request = with_cut(request, service.context_tokens_max)
        lease.ask(need_at_least(request))  # before the work of tokenising, and of compiling
        if sampling.grammar is not None:
            await service.prompts.check_grammar(sampling.grammar, lease.tenant)
        return request

    async def prompt(self, who: Identity, body: bytes, span: Span) -> Prompted:
        """Tokenise a request's prompts, with what is put into them."""
        service = self._service
        began_s = asyncio.get_running_loop().time()
        prompts, placings, nodes = await self._prompts(who)
        named: NamedAnswer | None = None
        if who.name is not None:
            named = await self._names.answer(service.client, who.name, who.tenant, who.session, body)
            prompts = named.prompts(prompts)  # a replay answers the tokens of then, not those of now
        span.part("tokenize", began_s, asyncio.get_running_loop().time())
        await measure(placings, prompts[0].rendered)  # behind that: None if these are other tokens
        lineages = tuple(
            service.directory.lineage(
                who.known.tenant,
                who.known.owner.session,
                prompt.token_ids,
                key=who.salt,
                begin_tokens=prompt.begin_tokens,
            )
            for prompt in prompts
        )
        return Prompted(prompts, lineages, named, placings, nodes)

    async def _prompts(self, who: Identity) -> tuple[list[Prompt], tuple[Placing, ...], tuple[str, ...]]:
        service, request, known = self._service, who.request, who.known
        if not isinstance(request, ParsedChat):
            return await service.prompts.completion(request, who.tenant), (), ()
        await service.known.recall(known, request)
        owner, forgets = known.owner, known.forgets
        turn = AskedTurn(
            who.tenant, owner.session, who.session, who.salt, forgets, who.placement, request, request
        )
        turn, placings = await staged(service.stages, turn)
        prompt = await service.prompts.chat(
            who.salt.hex(), turn.placed, who.tenant, owner=owner, forgets=forgets
        )
        return [prompt], placings, turn.nodes

    def answer(self, who: Identity, made: Prompted, request_id: str) -> tuple[Answer, AnswerShape]:
        """Return the empty answer to a request's prompts, and its shape."""
        request, named = who.request, made.named
        head = AnswerHead(
            answer_id=f"{self._dialect.id_prefix}{uuid.uuid4().hex}" if named is None else named.answer_id,
            model=request.model if request.model in self._service.adapters else self._service.model_name,
            created=int(time.time()) if named is None else named.keep.created,
            wants_logprobs=request.sampling.logprobs is not None,
            extras=request.extras,
            reading=made.prompts[0].reading,
            is_named_call=isinstance(request, ParsedChat) and bool(request.offer and request.offer.only),
        )
        answer = Answer(
            made.prompts,
            request.n,
            self._service.settings.limits.retry_after_s,
            generates=request.generates,
            request_id=request_id,
            contexts={one.stage.name: one.context for one in made.placings if one.context is not None},
        )
        return answer, self._dialect.shape(head, request, who.tenant, who.known.owner.session)

    def asks(self, who: Identity, made: Prompted, request_id: str, span: Span) -> list[GenerateRequest]:
        """Return the replica request of each prompt."""
        service, request, named = self._service, who.request, made.named
        self._refuse_long_prompt_logprobs(request, sum(len(prompt.token_ids) for prompt in made.prompts))
        asks = []
        for index, (prompt, lineage) in enumerate(zip(made.prompts, made.lineages, strict=True)):
            max_tokens = self._answer_tokens(request, len(prompt.token_ids))
            if not made.is_replayed:
                service.directory.turn_began(who.known.tenant, lineage)
            route = asking(service.directory.route(who.known.tenant, lineage), made.nodes)
            if named is not None and named.is_replayed:
                route = replace(route, only=named.replica_id)
            sampling = replace(
                request.sampling,
                max_tokens=max_tokens,
                shown_token_ids=prompt.shown_ids,
                grammar=prompt.grammar or request.sampling.grammar,
                continues_text=not isinstance(request, ParsedChat) or request.continues,
            )
            asks.append(
                GenerateRequest(
                    request_id=request_id if index == 0 else f"{request_id}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=seeded(sampling, None if named is None else named.seed),
                    n=request.n,
                    salt=who.salt,
                    tenant=who.known.tenant,
                    session=lineage,
                    placement=who.placement,
                    model=service.model,
                    route=route,
                    turn=who.turn,
                    reading=prompt.reading if prompt.reading and prompt.reading.tools else None,
                    trace=span.trace,
                    keep=None if named is None else named.keep,
                    priority=request.priority,
                    adapter=request.model if request.model in service.adapters else "",
                )
            )
        return asks

    def _answer_tokens(self, request: ParsedChat | ParsedCompletion, prompt_tokens: int) -> int:
        """Return how long an answer to so many tokens may become."""
        context_tokens_max = self._service.context_tokens_max
        wanted = request.sampling.max_tokens or None
        if wanted is not None and request.is_length_default:
            wanted = min(wanted, max(1, context_tokens_max - prompt_tokens))
        param = "messages" if isinstance(request, ParsedChat) else "prompt"
        return answer_tokens(prompt_tokens, wanted, request.sampling.min_tokens, context_tokens_max, param)

    def _refuse_long_prompt_logprobs(
        self, request: ParsedChat | ParsedCompletion, prompt_tokens: int
    ) -> None:
        """Raise `InvalidValue` if the prompts have more log-probabilities than one answer may hold."""
        top, limit = request.sampling.prompt_logprobs, self._service.settings.limits.prompt_logprobs_max
        if top is not None and (1 + top) * prompt_tokens > limit:
            param = "prompt_logprobs" if request.extras.prompt_logprobs else "logprobs"
            message = (
                f"{prompt_tokens} prompt tokens with {1 + top} log-probabilities each are "
                f"more than {limit} (limits.prompt_logprobs_max). Send shorter prompts, or lower {param}."
            )
            raise InvalidValue(param, message)


def need_at_least(request: ParsedChat | ParsedCompletion) -> Need:
    """Return a lower bound of the request's need, before anything is tokenised."""
    prompts = () if isinstance(request, ParsedChat) else request.prompts
    count = max(1, len(prompts))
    sequences = count * request.n
    cut = request.truncate_tokens
    lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    prompt_tokens = sum(lengths) if cut is None else sum(min(length, cut) for length in lengths)
    return Need(
        sequences,
        max(count, prompt_tokens)
        + sequences * (1 if request.is_length_default else request.sampling.max_tokens or 1),
        "n" if request.n > 1 else "prompt",
    )


def need_of(asks: Sequence[GenerateRequest]) -> Need:
    """Return the need of the replica requests.

    An answer without `max_tokens` may take the whole context.
    """
    return Need(
        sum(ask.n for ask in asks),
        sum(len(ask.prompt_token_ids) + ask.n * ask.sampling.max_tokens for ask in asks),
        "n" if asks[0].n > 1 else "prompt",
    )


def within_right(request: ParsedChat | ParsedCompletion, best: int) -> ParsedChat | ParsedCompletion:
    """Return a request with a priority that its tenant may have, at best `best`; told if it had another."""
    if request.priority >= best:
        return request
    return replace(request, priority=best, ignored_fields=(*request.ignored_fields, "priority"))


def with_cut(
    request: ParsedChat | ParsedCompletion, context_tokens_max: int
) -> ParsedChat | ParsedCompletion:
    """Return a request whose prompt is cut to as many tokens as fit, where it asks for that."""
    if request.truncate_tokens != -1:
        return request
    # The default length of a chat's answer takes nothing from its prompt.
    is_asked = isinstance(request, ParsedCompletion) or not request.is_length_default
    left = context_tokens_max - max(1, request.sampling.max_tokens if is_asked else 1)
    return replace(request, truncate_tokens=max(1, left))
