"""One model replica as a Ray Serve deployment: the engine behind an async stream.

The constructor builds the engine, of which only `ServedEngine` is known here. Requests come over links, or by
a call of Serve's. When the caller disconnects, for any reason, the request is aborted: our engine frees its
pages before the next step.

What computes is imported by the constructor: `samovar serve` and Serve's controller need only this module's
names, and would wait seconds for torch and transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import serve

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import NodeStats
from samovar.configs.imports import collector_paused, keep_collections_short
from samovar.configs.settings import EngineSettings, Settings
from samovar.configs.telemetry import Tracer, open_tracer, set_up_logs
from samovar.configs.tls import node_tls
from samovar.replicas.links import Inlet, open_inlet
from samovar.replicas.messages import (
    Admitted,
    EngineStats,
    Event,
    Failed,
    Forgotten,
    GenerateRequest,
    LoggedAnswer,
    Refused,
    ReplicaGlance,
    ReplicaInfo,
    TierSign,
)
from samovar.replicas.serving.ingress_loads import IngressLoads
from samovar.replicas.serving.served import EventStream, Places, call_handler
from samovar.replicas.serving.served_engine import OwnEngine, ServedEngine
from samovar.replicas.turns import TenantThreads

if TYPE_CHECKING:
    from samovar.replicas.answers import AnswerLog, AnswerLogs, SweepTimer
    from samovar.replicas.links import EventSender
    from samovar.replicas.serving.tracing import AnswerSpans
    from samovar.replicas.start.start_notes import StartNotes

logger = logging.getLogger(__name__)


class Replica:
    """The Serve deployment of one engine.

    `model_dir`: a directory that `samovar.replicas.model.spec.inspect_model` accepts; None: the one in
    `settings.model`. Raises `ModelRefused` or `PoolTooSmall` if the model cannot be served.
    """

    _tracer: Tracer | None = None

    def __init__(self, settings: Settings, model_dir: str | None) -> None:
        with collector_paused():
            from samovar.replicas.model import ensure_model
            from samovar.replicas.serving.tracing import TracedLink
            from samovar.replicas.start.start_notes import StartNotes as Notes

            if settings.tiers.enabled:
                from samovar.replicas.start.tier_access import open_tiers
            self._import_engine()
        set_up_logs(settings.telemetry)
        keep_collections_short()
        self._tracer = open_tracer(settings.telemetry, "replica")
        replica_id = serve.get_replica_context().replica_id.unique_id
        notes = Notes(settings.starting_dir, str(settings.server.port), replica_id)
        notes.begin("tiers")
        self._tiers = open_tiers(settings) if settings.tiers.enabled else None
        if self._tiers is not None and self._tracer is not None:
            self._tiers = replace(self._tiers, link=TracedLink(self._tiers.link, self._tracer))
        path = Path(model_dir) if model_dir else ensure_model(settings.model)
        engine = self.build(settings, path, replica_id, notes)
        notes.end()
        self._node_id: str = ray.get_runtime_context().get_node_id()
        info = replace(engine.info, stages=notes.seconds)
        self._begin(settings, engine, info, open_inlet(settings.cluster.links, 0.0))

    def _begin(
        self,
        settings: Settings,
        engine: ServedEngine,
        info: ReplicaInfo,
        inlet: Inlet | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve by this engine. `inlet`: of calls over links; `clock`: of kept answers."""
        from samovar.replicas.answers import AnswerLogs as Kept
        from samovar.replicas.answers import SweepTimer as Sweeps
        from samovar.replicas.links import Links

        self._settings = settings
        self._engine = engine
        self._info = info
        self._streams: dict[int, EventStream | EventSender] = {}
        self._kept: AnswerLogs = Kept(settings.answers, self._abort_kept, clock)
        self._answer_logs: dict[int, AnswerLog] = {}  # of answers that are not over, by the engine's key
        self._kept_spans: dict[int, AnswerSpans] = {}
        self._sweeps: SweepTimer = Sweeps(self._kept, _call_later, clock)
        self._untold: dict[int, AnswerSpans] = {}  # traced requests whose prompt is not computed yet
        self._links = Links(settings.cluster.links, settings.router.heartbeat_s, node_tls())
        self._inlet = inlet
        self._places = places(settings.engine)
        self._compiles = TenantThreads("compile", settings.grammar.threads, places=settings.engine.queue_max)
        self._ingress_loads = IngressLoads(info.replica_id)
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        engine.start(self._deliver)

    @staticmethod
    def _import_engine() -> None:
        """Import what `build` needs and takes long: the start's stages are timed without it."""
        import samovar.replicas.engine  # noqa: F401

    def build(self, settings: Settings, model_dir: Path, replica_id: str, notes: StartNotes) -> ServedEngine:
        """Build the engine. Another engine behind the same deployment is a subclass that builds it."""
        from samovar.replicas.start.build import Start
        from samovar.replicas.start.machine_prices import MachinePrices, keep_prices, measurements_dir
        from samovar.replicas.start.ray_ranks import launch_rank

        tiers, keep = self._tiers, measurements_dir(settings)
        built = Start(
            settings, model_dir, replica_id, tiers=tiers, keep=keep, begin=notes.begin, launch=launch_rank
        ).run()
        keep_prices(keep, MachinePrices.of(built.info, built.engine.meter.price))
        return OwnEngine(built.engine, built.info, settings.engine, None if tiers is None else tiers.lanes)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """Yield the events of a request that Serve carries, in lists; an empty one is a sign of life.

        Requests come over links (`serving/served.py`); this is for those that no link takes.
        """
        await self._places.take()
        try:
            yield []  # it has left Serve's queue: later ones of its ingress need not stand behind it
            stream = EventStream(
                request.n,
                coalesce_s=self._settings.engine.coalesce_ms / 1000,
                heartbeat_s=self._settings.router.heartbeat_s,
                joins=request.keep is None,
            )
            async with self._answering(request, stream):
                while not stream.is_read:
                    yield await stream.next()
        finally:
            self._places.leave()

    @asynccontextmanager
    async def _answering(
        self, request: GenerateRequest, stream: EventStream | EventSender
    ) -> AsyncIterator[None]:
        """Have a request's events put into `stream` while the block runs; abort what is not over then."""
        self._loop = asyncio.get_running_loop()
        refused = await self._refusal_of(request)
        if refused is not None:
            stream.put(self._named(refused))
            yield
        elif request.keep is not None and not self._goes_on_apart(request):
            with self._reading_kept(request, stream):
                yield
        else:
            with self._computing(request, stream):
                yield

    async def _refusal_of(self, request: GenerateRequest) -> Refused | Failed | None:
        """Return what is said of a request that is not computed here."""
        if request.model and request.model != self._info.model:
            return Failed("this replica serves another model", replica_lost=True)
        if request.sampling.grammar is None:
            return None
        compile_it = partial(self._engine.refusal_of, request.sampling.grammar)
        return await self._compiles.run(request.tenant.hex(), compile_it, must_run=True)  # see `Places`

    @contextmanager
    def _computing(self, request: GenerateRequest, stream: EventStream | EventSender) -> Iterator[None]:
        """Compute an answer for one reader while the block runs."""
        key = next(self._keys)
        self._streams[key] = stream
        self._ingress_loads.began(key, request)
        spans = self._spans(request)
        if spans is not None:
            self._untold[key] = spans
        self._engine.answer(key, request)
        try:
            yield
        finally:
            if spans is not None:
                spans.end(is_complete=stream.is_over)
            self._untold.pop(key, None)
            del self._streams[key]
            self._ingress_loads.ended(key)
            if not stream.is_over:
                self._engine.abort(key)

    def _goes_on_apart(self, request: GenerateRequest) -> bool:
        """Whether the rest of an answer is computed for its reader alone, and not kept.

        The reader has begun it on a replica that was lost, and what is kept under its name did not begin so.
        """
        keep = request.keep
        log = None if keep is None else self._kept.find(request.tenant, keep.ref)
        return keep is not None and log is not None and not log.begins_with(keep.before)

    @contextmanager
    def _reading_kept(self, request: GenerateRequest, stream: EventStream | EventSender) -> Iterator[None]:
        """Tell `stream` an answer that is kept, while the block runs; it begins with its first reader."""
        keep = request.keep
        assert keep is not None, "an answer without a name"
        log = self._kept.find(request.tenant, keep.ref)
        said: Generator[None] | None = None  # what is told again
        telling: asyncio.Task[None] | None = None
        if log is not None and log.keep.body != keep.body:
            stream.put(Refused("invalid", "This key was sent with another request.", param="idempotency-key"))
            log = None
        elif log is not None:
            said = self._kept.attach(log, stream, keep.before)
            next(said, None)  # now: it is read from here on, and what of it is dropped is told all the same
            telling = asyncio.create_task(self._tell_again(said, stream))
        elif keep.is_attaching:
            stream.put(self._named(Failed("this replica does not keep the answer", replica_lost=True)))
        else:
            key = next(self._keys)
            log = self._answer_logs[key] = self._kept.begin(key, request, stream)
            self._ingress_loads.began(key, request)
            spans = self._spans(request)
            if spans is not None:
                self._untold[key] = self._kept_spans[key] = spans
            self._engine.answer(key, request)
        try:
            yield
        finally:
            if telling is not None and said is not None:
                telling.cancel()
                said.close()
            if log is not None:
                self._kept.detach(log, stream)
                self._sweeps.set()

    async def _tell_again(self, said: Generator[None], stream: EventStream | EventSender) -> None:
        """Tell a reader the rest of what an answer has said, as fast as it reads."""
        try:
            await stream.drained()
            for _ in said:
                await stream.drained()
        except Exception:  # else the reader would wait for ever
            logger.exception("a kept answer could not be told again")
            stream.put(Failed("The answer could not be told again."))
        self._sweeps.set()

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[str, LoggedAnswer | None]:
        """Return our id, and what is known of the answer that a tenant's client has named so."""
        log, own = self._kept.find(tenant, ref), self._info.replica_id
        return own, None if log is None else log.told(own)

    def _spans(self, request: GenerateRequest) -> AnswerSpans | None:
        if self._tracer is None or not request.trace:
            return None
        from samovar.replicas.serving.tracing import AnswerSpans

        return AnswerSpans(self._tracer, request.trace, self._info.replica_id, time.monotonic)

    def _named(self, event: Event) -> Event:
        if isinstance(event, Failed) and event.replica_lost:  # the retry avoids this replica
            return replace(event, replica_id=self._info.replica_id)
        return event

    async def describe(self) -> ReplicaInfo:
        return self._info

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def record_routing_stats(self) -> dict[str, object]:
        """Return what all routers are told periodically about this replica (Ray Serve hook)."""
        price = await self._engine.prices()
        return {
            "prefill": [price.c0_s, price.a_s, price.b_s],
            "step_tokens": price.step_tokens,
            "load": self._ingress_loads.report(price),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load that the autoscaler decides from (Ray Serve hook)."""
        return (await self._engine.load(self._settings.cluster.autoscaling.horizon_s)).metrics()

    async def record_replica_metadata(self) -> dict[str, object]:
        """Return what routers are told once (Ray Serve hook): the model, and where calls over links go."""
        told: dict[str, object] = {"model": self._info.model}
        if self._inlet is not None:
            self._inlet.calls.take(call_handler(self._links, self._places, self._answering))
            try:
                told["address"] = list(astuple(await self._inlet.address()))
            except OSError as error:
                logger.warning("Serve carries all calls: this replica cannot listen: %s", error)
        return told

    async def pool_bytes(self, owner: bytes) -> int | None:
        """Return the pool bytes that hold blocks of a session (tenant's and session's tag)."""
        return await self._engine.pool_bytes(owner)

    async def glance(self, owners: tuple[bytes, ...]) -> ReplicaGlance:
        """Return the counters, and the pool's blocks of each lineage that it holds any of."""
        return await self._engine.glance(owners)

    async def cool(self, owner: bytes) -> int:
        """Make a session's pages the next to be evicted: it will not resume soon. Return their number."""
        return await self._engine.cool(owner)

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """Apply a client's hint about its idle session."""
        await self._engine.hint(owner, event, expected_return_s)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> Forgotten:
        """Forget everything of a tenant, or only these sessions of it (tags), here and in the node's tiers.

        Raises `TimeoutError` if the tiers do not answer.
        """
        tags = {tenant} if sessions is None else {tenant + session for session in sessions}

        async def forget() -> int:
            self._kept.forget(tags)
            return await self._engine.forget(tags)

        # The engine first: running sequences must not publish or store after the tiers have forgotten.
        pages, leaves = await forget(), not self._info.drops_pages
        if self._tiers is None:
            return Forgotten(pages, 0, 0, leaves_pages=leaves)
        clear = Clear(tenant) if sessions is None else Clear(tenant, sessions[0], sessions[1:])
        try:
            done = await asyncio.to_thread(self._tiers.link.clear, clear)
        finally:
            pages += await forget()  # what a concurrent request has loaded from the tiers
        return Forgotten(pages, done.extents, done.nbytes, tuple(sorted(done.unreachable)), leaves)

    async def tier_stats(self) -> NodeStats | None:
        """Return the stats of this node's tiers; None without tiers, or if they do not answer."""
        return None if self._tiers is None else await asyncio.to_thread(self._tiers.link.stats)

    async def tier_sign(self) -> TierSign | None:
        """Return whether this node's tier actor answers; None without tiers."""
        if self._tiers is None:
            return None
        return TierSign(self._node_id, await asyncio.to_thread(self._tiers.link.ping) is not None)

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every finished turn is handed to the tiers; False if `timeout_s` passes first."""
        return await self._engine.settle(timeout_s)

    async def check_integrity(self) -> None:
        """Raise `AssertionError` if the engine's bookkeeping is wrong. For tests and operators."""
        await self._engine.check_integrity()

    def check_health(self) -> None:
        """Raise if this replica should be replaced (Ray Serve health hook)."""
        self._engine.check_health()

    async def hand_over(self, timeout_s: float) -> bool:
        """Hand what only the engine has to the tiers, most valuable first; False on timeout."""
        return await self._engine.hand_over(timeout_s)

    async def __del__(self) -> None:
        """Store the last turns and stop (Ray Serve shutdown hook; the requests that it carries are over).

        Calls over links, which Serve does not see, get as long as it would have waited for them.
        """
        if not hasattr(self, "_engine"):  # it did not start, and has said why
            return
        if self._inlet is not None:
            self._inlet.calls.stop()
            if not await self._inlet.calls.over(self._settings.server.graceful_shutdown_s):
                logger.warning("%d answers go on elsewhere: they took too long", self._inlet.calls.open)
        settle_s = self._settings.tiers.settle_s
        if self._tiers is not None and not await self.hand_over(settle_s):
            logger.warning("not all blocks that only this replica held were handed over in %g s", settle_s)
        await self._engine.close()
        if self._inlet is not None:
            self._inlet.close()
        self._compiles.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _deliver(self, events: list[tuple[int, Event]]) -> None:
        assert self._loop is not None, "events without a request"
        self._loop.call_soon_threadsafe(self._distribute, events)

    def _distribute(self, events: list[tuple[int, Event]]) -> None:
        for key, event in events:
            stream, log = self._streams.get(key), self._answer_logs.get(key)
            if log is not None:
                self._put_kept(log, event)
            elif stream is not None:  # else its reader has just disconnected
                stream.put(self._named(event))
            else:
                continue
            if isinstance(event, Admitted):
                self._ingress_loads.computed(key)
            spans = self._untold.get(key)
            if spans is not None:
                spans.saw([event])
                if not spans.is_waiting:
                    del self._untold[key]

    def _put_kept(self, log: AnswerLog, event: Event) -> None:
        self._kept.put(log, self._named(event))
        if log.is_over:
            self._end_kept(log.key, is_complete=not log.has_failed)
            self._sweeps.set()

    def _abort_kept(self, key: int) -> None:
        self._end_kept(key, is_complete=False)
        self._engine.abort(key)

    def _end_kept(self, key: int, *, is_complete: bool) -> None:
        self._answer_logs.pop(key, None)
        self._untold.pop(key, None)
        self._ingress_loads.ended(key)
        if (spans := self._kept_spans.pop(key, None)) is not None:
            spans.end(is_complete=is_complete)


def places(engine: EngineSettings) -> Places:
    """Return the count of requests open at a replica: as many as Serve lets it have (`serve/graph.py`)."""
    return Places(engine.sequences_max + engine.queue_max, engine.queue_max)


def _call_later(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call)
