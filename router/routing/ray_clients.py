"""Clients for the replicas and the session directory over Ray.

The only place on a request's path that holds a Serve handle. Ray's exceptions are turned into ours, so that
no caller depends on Ray. The handle's router chooses the replica.

A call goes to a replica over a link, and its events come back over one (`DirectCall`). Who takes it is
decided as Serve's router does. Where no replica does, Serve carries it, with its events: it queues, and says
why not (docs/adr/018).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ray import get_runtime_context
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import Cleared, NodeGlance, NodeStats
from samovar.cache_tiers.sessions import (
    Item,
    Kind,
    Move,
    Recalled,
    SessionRow,
    SessionsCleared,
    Sync,
    Synced,
    Use,
)
from samovar.cache_tiers.transport import PeerError
from samovar.configs.cluster import LinkSettings
from samovar.configs.telemetry import Tracer
from samovar.replicas.links import CLOSING, FAILED, FULL, Inlet, Link, LinkLost, Links, events_of, said_events
from samovar.replicas.messages import (
    Admitted,
    EngineStats,
    Event,
    Failed,
    GenerateRequest,
    LoggedAnswer,
    Refused,
    ReplicaGlance,
    ReplicaInfo,
    TierSign,
)
from samovar.replicas.serving.served import pack_request, request_form
from samovar.router.routing import load_tracker, roster
from samovar.router.routing.replica_client import (
    ClearCounts,
    ReplicaFailed,
    ReplicaLost,
    choices_ended,
    clear_counts,
)
from samovar.router.routing.session_directory import DirectoryLost

logger = logging.getLogger(__name__)


Answer = TypeVar("Answer")

LOST = (RayActorError, NodeDiedError, WorkerCrashedError, ObjectLostError, DeploymentUnavailableError)
"""The replica is dead, or its output was lost with it or its node."""


CONTROL_S = 2.0
"""How long `describe` and the statistics wait for the slowest replica."""


async def _broadcast(handle: Any, method: str, *args: object) -> list[Awaitable[Any]]:
    """Ask all of a deployment, and return each one's call.

    Serve's own `results_async` has no answer of any where the slowest is late (ray 2.60, `handle.py`).
    """
    asked = await handle.broadcast(method, *args)._fetch_replica_results_async()
    return [one.get_async() for one in asked]


async def answers_of_all(handle: Any, method: str, *args: object, timeout_s: float) -> list[Any]:
    """Ask all of a deployment; return each one's answer or exception, `TimeoutError` of one that is late.

    Raises `TimeoutError` and Ray's exceptions if they cannot be asked.
    """
    loop = asyncio.get_running_loop()
    late_s = loop.time() + timeout_s
    calls = await asyncio.wait_for(_broadcast(handle, method, *args), timeout_s)
    bounded = [asyncio.wait_for(call, late_s - loop.time()) for call in calls]
    return await asyncio.gather(*bounded, return_exceptions=True)


class RayReplicaClient:
    """`ReplicaClient` over the Serve handle of the replica deployment.

    `clear_timeout_s`: how long `clear`, which deletes files and objects, waits for the slowest replica.
    `stall_s`: a replica that sends nothing about a request for this long is suspected. `links`: requests go
    over these to replicas that take them, and events come back to the `inlet`; None, or where none does:
    Serve carries both. `further`: the key in `models` of the model whose replicas these are; empty: the
    first's.
    """

    def __init__(
        self,
        handle: Any,
        *,
        retry_after_s: float,
        clear_timeout_s: float = 60.0,
        stall_s: float = 15.0,
        tracer: Tracer | None = None,
        inlet: Inlet | None = None,
        links: Links | None = None,
        further: str = "",
    ) -> None:
        self._direct = None if inlet is None or links is None else DirectCalls(links, inlet, further)
        self._further = further
        self._tracer = tracer
        self._stall_s = stall_s
        self._handle = handle
        self._retry_after_s = retry_after_s
        self._search = AnswerSearch(CONTROL_S)
        self._clear_timeout_s = clear_timeout_s

    @property
    def _book(self) -> load_tracker.ReplicaLoadTracker:
        return load_tracker.book_of(self._further)

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        ticket = uuid.uuid4().hex
        request = replace(request, route=replace(request.route, ticket=ticket, ingress=self._book.ingress))
        call: DirectCall | _ServeCall | None = None
        choices_open = request.n
        loop = asyncio.get_running_loop()
        heard_s = began_s = loop.time()
        is_routing = self._tracer is not None and bool(request.trace)
        try:
            if self._direct is not None:
                call = await self._direct.begin(request, session_key)
            if call is None:
                call = self._serve_call(request, session_key)
            async for events in call:
                if is_routing:
                    is_routing = False
                    self._record_route(request, began_s)
                choices_open -= choices_ended(events, choices_open)
                self._take_note(ticket, events)
                yield events
                heard_s = loop.time()
                if choices_open <= 0 and isinstance(call, DirectCall):
                    break  # a link says no more of it; a call of Serve's returns
            choices_open = 0
        except BackPressureError:
            choices_open = 0
            message = "All replicas' queues are full. Try again later."
            yield [Refused("queue_full", message, self._retry_after_s)]
        except LinkLost as lost:
            self._book.failed(ticket)
            raise ReplicaLost(str(lost)) from lost  # the call itself may still run: it is cancelled
        except CallRefused as refused:
            choices_open = 0
            if refused.args[0] == FAILED:
                raise ReplicaFailed("the replica has failed") from refused
            self._book.failed(ticket)
            raise ReplicaLost(f"an answer has ended: {refused}") from refused
        except LOST as lost:
            choices_open = 0
            self._book.failed(ticket)
            raise ReplicaLost(type(lost).__name__) from lost
        except (RayError, RayServeException) as failed:
            choices_open = 0
            raise ReplicaFailed(type(failed).__name__) from failed
        finally:
            if choices_open > 0 and loop.time() - heard_s >= self._stall_s:
                self._book.failed(ticket)  # the reader gave up on a silent replica
            self._book.ended(ticket)
            if call is not None:
                call.close(is_over=choices_open <= 0)

    def _serve_call(self, request: GenerateRequest, session_key: str) -> _ServeCall:
        handle = self._handle.options(stream=True, session_id=session_key)
        # `start`, because Serve gives calls from one HTTP request the same internal id, and if two calls with
        # the same id are routed at the same moment, it loses one (docs/adr/001).
        response = rpc.start(handle.generate, request)
        return _ServeCall(response, request.route.ticket, self._further)

    def _record_route(self, request: GenerateRequest, began_s: float) -> None:
        """Record the span of choosing a replica; nothing where another router than ours chose it."""
        ticket = request.route.ticket
        routed_s = self._book.routed_s(ticket)
        if self._tracer is not None and routed_s is not None:
            replica = {"samovar.replica": self._book.replica_of(ticket)}
            self._tracer.record("route", request.trace, began_s, routed_s, replica)

    async def describe(self) -> list[ReplicaInfo]:
        return await self._ask_all("describe", ReplicaInfo)

    async def stats(self) -> list[EngineStats]:
        return await self._ask_all("stats", EngineStats)

    async def cache_stats(self) -> list[NodeStats]:
        nodes = await self._ask_all("tier_stats", NodeStats)
        return list({node.incarnation: node for node in nodes}.values())

    async def tiers_up(self) -> dict[str, bool]:
        """See `ReplicaClient.tiers_up`. One replica that reaches the tier actor is enough."""
        up: dict[str, bool] = {}
        for sign in await self._ask_all("tier_sign", TierSign):
            up[sign.node_id] = up.get(sign.node_id, False) or sign.is_up
        return up

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[LoggedAnswer | None, bool]:
        try:
            async with asyncio.timeout(CONTROL_S):
                calls = await _broadcast(self._handle, "kept", tenant, ref)
        except (TimeoutError, RayError, RayServeException) as failed:
            logger.warning("kept: asking the replicas failed: %s", type(failed).__name__)
            return None, False
        return await self._search.find(calls, self._book.nodes)

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int | None:
        answers = await self._broadcast("pool_bytes", CONTROL_S, tenant + session)
        known = [answer for answer in answers if isinstance(answer, int)]
        is_unknown = any(answer is None or isinstance(answer, TimeoutError) for answer in answers)
        if is_unknown or (answers and not known):
            return None  # one that died holds nothing
        return sum(known)

    async def glance(self, owners: tuple[bytes, ...]) -> list[ReplicaGlance]:
        answers = await self._broadcast("glance", CONTROL_S, owners)
        return [answer for answer in answers if isinstance(answer, ReplicaGlance)]

    async def cool(self, tenant: bytes, session: bytes) -> None:
        await self._broadcast("cool", CONTROL_S, tenant + session)

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> None:
        await self._broadcast("hint", CONTROL_S, tenant + session, event, expected_return_s)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        answers = await self._broadcast("clear", self._clear_timeout_s, tenant, sessions)
        for answer in answers:
            if isinstance(answer, Exception):
                logger.warning("clear: a replica failed: %s", type(answer).__name__)
        return clear_counts(answers)

    async def _ask_all(self, method: str, kind: type[Answer]) -> list[Answer]:
        answers = await self._broadcast(method, CONTROL_S)
        good = [answer for answer in answers if isinstance(answer, kind)]
        if len(good) < len(answers):
            logger.debug(
                "%s: %d of %d replicas did not answer", method, len(answers) - len(good), len(answers)
            )
        return good

    async def _broadcast(self, method: str, timeout_s: float, *args: object) -> list[Any]:
        """Return every replica's answer or exception; if they cannot be asked, why, in the place of one.

        Empty if there is none.
        """
        try:
            return await answers_of_all(self._handle, method, *args, timeout_s=timeout_s)
        except DeploymentUnavailableError as none:  # there is none: it sleeps, or none has begun
            logger.debug("%s: there is no replica: %s", method, none)
            return []
        except (TimeoutError, RayError, RayServeException) as failed:  # callers continue with what they know
            is_usual = isinstance(failed, TimeoutError)  # while one starts or ends
            logger.log(
                logging.DEBUG if is_usual else logging.WARNING,
                "%s: asking the replicas failed: %s",
                method,
                failed,
            )
            return [failed]

    def _take_note(self, ticket: str, events: list[Event]) -> None:
        """Update the load tracker from the events of a call."""
        for event in events:
            if isinstance(event, Admitted):
                self._book.admitted(ticket, event.receipt)
            elif isinstance(event, Failed) and event.replica_lost:
                self._book.failed(ticket)


class _ServeCall:
    """A call that Serve carries, with its events: while it waits in Serve's queue, later ones do."""

    def __init__(self, response: Any, ticket: str, further: str) -> None:
        self._roster = roster.roster_of(further)
        self._response = response
        self._ticket = ticket
        self._events = aiter(response)
        self._roster.queued.add(ticket)

    def __aiter__(self) -> _ServeCall:
        return self

    async def __anext__(self) -> list[Event]:
        events: list[Event] = await anext(self._events)
        self._roster.queued.discard(self._ticket)
        return events

    def close(self, *, is_over: bool) -> None:
        """Drop what still comes. `is_over`: a finished call needs no cancelling."""
        self._roster.queued.discard(self._ticket)
        if not is_over:
            self._response.cancel()


class RayDirectoryLink:
    """`DirectoryLink` over Ray. `timeout_s`: of one call; `clear_s_max`: of a clear in the actor."""

    def __init__(self, actor: rpc.ActorRef, *, timeout_s: float = 5.0, clear_s_max: float = 60.0) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._clear_s_max = clear_s_max

    async def sync(self, sync: Sync) -> Synced:
        actor = get_runtime_context().get_actor_id() or ""
        reply: Synced = await self._ask("sync", self._timeout_s, replace(sync, actor=actor))
        return reply

    async def held(self, tenant: bytes, sessions: tuple[bytes, ...]) -> dict[bytes, dict[str, int]]:
        held: dict[bytes, dict[str, int]] = await self._ask("held", self._timeout_s, tenant, sessions)
        return held

    async def tenant_held(self, tenant: bytes) -> dict[str, int]:
        held: dict[str, int] = await self._ask("tenant_held", self._timeout_s, tenant)
        return held

    async def likely(
        self, tenant: bytes, sessions: tuple[bytes, ...], horizon_s: float
    ) -> dict[bytes, float]:
        found: dict[bytes, float] = await self._ask("likely", self._timeout_s, tenant, sessions, horizon_s)
        return found

    async def glance(
        self, owners: tuple[bytes, ...], at_s: tuple[float, ...], with_stats: bool
    ) -> dict[str, NodeGlance]:
        nodes: dict[str, NodeGlance] = await self._ask("glance", self._timeout_s, owners, at_s, with_stats)
        return nodes

    async def move(self, tenant: bytes, session: bytes, how: Move) -> int:
        moved: int = await self._ask("move", self._timeout_s, tenant, session, how)
        return moved

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> int:
        told: int = await self._ask("hint", self._timeout_s, tenant, session, event, expected_return_s)
        return told

    async def clear(self, clear: Clear) -> dict[str, Cleared | None]:
        cleared: dict[str, Cleared | None] = await self._ask(
            "clear", self._clear_s_max + self._timeout_s, clear
        )
        return cleared

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int:
        kept: int = await self._ask("keep", self._timeout_s, items, rows)
        return kept

    async def recall(self, tenant: bytes, session: bytes) -> Recalled:
        found: Recalled = await self._ask("recall", self._timeout_s, tenant, session)
        return found

    async def kept(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None:
        found: Item | None = await self._ask("kept", self._timeout_s, tenant, kind, name)
        return found

    async def discard(self, tenant: bytes, kind: Kind, name: bytes) -> bool:
        was_there: bool = await self._ask("discard", self._timeout_s, tenant, kind, name)
        return was_there

    async def forget(self, clears: tuple[SessionsCleared, ...]) -> int:
        erased: int = await self._ask("forget", self._timeout_s, clears)
        return erased

    async def allow(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        may: bool | None = await self._ask("allow", self._timeout_s, ingress, asked, tenant, wanted, limit)
        return may

    async def _ask(self, method: str, timeout_s: float, *args: object) -> Any:
        try:
            return await self._actor.call_async(method, *args, timeout_s=timeout_s)
        except PeerError as error:
            raise DirectoryLost(f"{method}: {error}") from error


READ_BYTES = 1 << 14
"""Of a kept answer that is told again, so much is read at once: then others have their turn."""

TRIES_MAX = 4
"""Replicas that are asked before Serve is, which knows more of who is full."""


class CallRefused(Exception):
    """A replica gives no answer to a call. `args[0]`: why (`replicas/links`)."""


class DirectCall:
    """Iterates over the lists of events of one call; an empty one is a sign of life.

    `joins`: deltas that come together become one. Iterating raises `LinkLost`, or `CallRefused`. `close` at
    the end.
    """

    def __init__(self, inlet: Inlet, link: Link, ticket: str, *, joins: bool) -> None:
        self._inlet = inlet
        self._link = link
        self._ticket = ticket
        self._joins = joins
        self._mailbox = inlet.expect(ticket)
        self._first: list[Event] | None = None

    async def begin(self, payload: bytes) -> None:
        """Send the request, and wait until the replica says something of it. Raises as iterating does."""
        self._link.call(self._ticket, payload, self._lose, self._refuse)
        self._first = await self._next()

    def __aiter__(self) -> DirectCall:
        return self

    async def __anext__(self) -> list[Event]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._next()

    async def _next(self) -> list[Event]:
        if self._joins:
            return events_of(await self._mailbox.next())
        return said_events(await self._mailbox.next(READ_BYTES))

    def close(self, *, is_over: bool) -> None:
        """Drop what still comes. `is_over`: the answer is whole; else it is cancelled."""
        self._inlet.forget(self._ticket)
        self._link.close(self._ticket, is_over=is_over)

    def _lose(self) -> None:
        self._mailbox.fail(LinkLost("the connection to the replica has ended"))

    def _refuse(self, reason: str) -> None:
        self._mailbox.fail(CallRefused(reason))


class DirectCalls:
    """Calls replicas over links, as far as these are known and reached. `inlet`: where events are awaited.

    `further`: as of `RayReplicaClient`.
    """

    def __init__(self, links: Links, inlet: Inlet, further: str = "") -> None:
        self._further = further
        self._links = links
        self._inlet = inlet
        self._settings: LinkSettings = inlet.settings
        self._is_listening = True
        request_form()

    async def begin(self, request: GenerateRequest, session_key: str) -> DirectCall | None:
        """Return the call of the first replica that takes it; None: Serve is to carry it.

        Raises `LinkLost` if that replica is lost before it has said anything, `CallRefused` if it has failed.
        """
        if request.sampling.prompt_logprobs is not None:
            return None  # megabytes in one message: it must not fill what all streams share
        known = roster.roster_of(self._further)
        if not self._is_listening or known.queued:
            return None  # while earlier requests wait with Serve, later ones stand behind them
        book = load_tracker.book_of(self._further)
        replicas, ranking = known.ranked(request, session_key, book)
        if not replicas or replicas[0].address is None:
            return None
        ticket = request.route.ticket
        if ranking is not None:  # at once, so that concurrent choices see it
            book.routed(ticket, replicas[0].name, ranking.work_s[replicas[0].name], None)
        payload = await self._packed(request)
        if payload is None:
            return None
        for one in replicas[:TRIES_MAX]:
            link = await self._links.reach(one.address)
            if link is None:
                return None  # not another one: here may be the session's blocks
            if ranking is not None and book.replica_of(ticket) != one.name:
                book.routed(ticket, one.name, ranking.work_s[one.name], None)
            call = await self._taken(link, request, payload)
            if call is not None:
                if ranking is not None:
                    book.counted(ranking.outcomes.get(one.name))
                return call
        return None

    async def _packed(self, request: GenerateRequest) -> bytes | None:
        try:
            payload = pack_request(replace(request, reply_to=await self._inlet.address()))
        except OSError as error:
            logger.warning("Serve carries all calls: this ingress cannot listen for events: %s", error)
            self._is_listening = False
            return None
        except ValueError as error:
            logger.warning("request %s goes through Serve: %s", request.request_id, error)
            return None
        return payload if len(payload) <= self._settings.call_bytes_max else None

    async def _taken(self, link: Link, request: GenerateRequest, payload: bytes) -> DirectCall | None:
        """Return the call, if the replica takes it."""
        ticket = request.route.ticket
        await link.drained(ticket)  # while the connection takes no more
        call = DirectCall(self._inlet, link, ticket, joins=request.keep is None)
        try:
            await call.begin(payload)
        except CallRefused as refused:
            call.close(is_over=True)
            if refused.args[0] == FAILED:
                raise
            level = logging.DEBUG if refused.args[0] in (FULL, CLOSING) else logging.WARNING
            logger.log(level, "request %s is refused: %s", request.request_id, refused.args[0])
            return None
        except BaseException:
            call.close(is_over=False)
            raise
        return call


Told = tuple[str, LoggedAnswer | None]
"""Which replica says it, and what it keeps."""

SILENT_S = 10.0
"""A replica that did not answer in time is not waited for again for so long: each request would."""


class AnswerSearch:
    """The first answer that is kept, of replicas that are asked together. Use it from one event loop.

    `wait_s`: how long replicas are waited for. `clock`: monotonic seconds.
    """

    def __init__(self, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._silent: dict[str, float] = {}  # replica -> until when it is not waited for

    async def find(
        self, asked: Sequence[Awaitable[Told]], replicas: Collection[str]
    ) -> tuple[LoggedAnswer | None, bool]:
        """Return what is kept, one that is over before one that is not, and whether all have answered.

        `replicas`: those that exist now, as far as is known. Waits for none that has just been silent once
        the others have answered, and for none once an answer is found.
        """
        now_s = self._clock()
        self._silent = {name: until_s for name, until_s in self._silent.items() if until_s > now_s}
        pending = {asyncio.ensure_future(one) for one in asked}
        wanted, heard, found = set(replicas) - self._silent.keys(), set[str](), list[LoggedAnswer]()
        is_whole, ends_s = bool(pending), asyncio.get_running_loop().time() + self._wait_s
        try:
            while pending and not found and not (wanted and wanted <= heard):
                wait_s = max(0.0, ends_s - asyncio.get_running_loop().time())
                done, pending = await asyncio.wait(
                    pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    if task.cancelled() or task.exception() is not None:
                        is_whole = False
                        continue
                    name, kept = task.result()
                    heard.add(name)
                    found += [] if kept is None else [kept]
            else:
                wanted = heard  # none was too late
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        for name in heard:
            self._silent.pop(name, None)
        for name in wanted - heard:
            logger.warning("replica %s does not say what it keeps: not waited for for %g s", name, SILENT_S)
            self._silent[name] = self._clock() + SILENT_S
        return max(found, key=lambda one: one.is_over, default=None), is_whole and not pending
