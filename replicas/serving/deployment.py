"""One model replica as a Ray Serve deployment: the engine behind an async stream.

The constructor builds the engine. Requests come over links, or by a call of Serve's, and go to the engine's
thread (see `engine/thread.py`). When the caller disconnects, for any reason, the request is aborted and its
pages are free before the next step.

What computes is imported by the constructor: `samovar serve` and Serve's controller need only this module's
names, and would wait seconds for torch and transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import serve

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import NodeStats
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.configs.imports import collector_paused
from samovar.configs.settings import EngineSettings, Settings
from samovar.configs.telemetry import Tracer, open_tracer, set_up_logs
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
from samovar.replicas.serving.served import Places, call_handler
from samovar.replicas.turns import TenantThreads

if TYPE_CHECKING:
    from samovar.replicas.answers import AnswerLog, AnswerLogs, SweepTimer
    from samovar.replicas.engine import Engine, EventStream
    from samovar.replicas.links import EventSender
    from samovar.replicas.scheduling import Sequence
    from samovar.replicas.serving.tracing import AnswerSpans
    from samovar.replicas.start.build import BuiltEngine
    from samovar.replicas.start.start_notes import StartNotes

logger = logging.getLogger(__name__)

PREFIX = "samovar_"
"""Prefix of the metric names in Serve: other sources may have metrics of their own."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Current and expected load of one replica, for autoscaling; no value is negative.

    Ray Serve carries these numbers to the autoscaler, whose process has no model.

    `running`, `waiting`: sequences; `sequences_max`: the limit of running ones. `prompts`: sequences whose
    prompt is not computed yet; `prefill_s`: expected seconds to compute those. `pool_share`: share of the
    pool's pages in use; `pool_share_waiting`: share that waiting sequences will need. `returns`: idle
    sessions expected to resume within the horizon; `returns_pool_share`: share of the pool that those will
    need.
    """

    running: float
    waiting: float
    sequences_max: float
    prompts: float
    prefill_s: float
    pool_share: float
    pool_share_waiting: float
    returns: float
    returns_pool_share: float

    def metrics(self) -> dict[str, float]:
        """Return the fields as the metrics that `of_metrics` reads."""
        return {PREFIX + name: float(value) for name, value in asdict(self).items()}

    @staticmethod
    def of_metrics(metrics: Mapping[str, float]) -> ReplicaLoad | None:
        """Parse a load; None if a metric is missing or is not a valid value."""
        try:
            load = ReplicaLoad(**{name: float(metrics[PREFIX + name]) for name in FIELDS})
        except (KeyError, TypeError, ValueError):
            return None
        return load if load.is_valid else None

    @property
    def is_valid(self) -> bool:
        """Whether all values are finite and in range."""
        values = [getattr(self, name) for name in FIELDS]
        return all(math.isfinite(value) and value >= 0 for value in values) and self.sequences_max >= 1


FIELDS = tuple(field.name for field in fields(ReplicaLoad))


def load_of(engine: Engine, horizon_s: float) -> ReplicaLoad:
    """Return the load of an engine. Call on its thread. `horizon_s`: real seconds."""
    scheduler, price = engine.scheduler, engine.meter.price
    pool = scheduler.pool
    prompts, prefill_s = 0, 0.0
    for sequence in scheduler.queues:
        new_tokens, after_tokens = _uncomputed(engine, sequence)
        if new_tokens > 0:
            prompts += 1
            prefill_s += price.seconds(new_tokens, after_tokens)
    reporter = None if engine.offload is None else engine.offload.reporter
    expected = pool.returns.within(horizon_s * (1.0 if reporter is None else reporter.rate))
    waiting_pages = sum(pool.pages_for(len(sequence.tokens)) for sequence in scheduler.waiting)
    return ReplicaLoad(
        running=sum(sequence.forks for sequence in scheduler.running),
        waiting=sum(sequence.forks for sequence in scheduler.waiting),
        sequences_max=scheduler.queues.sequences_max,
        prompts=prompts,
        prefill_s=prefill_s,
        pool_share=pool.active / pool.usable,
        pool_share_waiting=waiting_pages / pool.usable,
        returns=expected.sessions,
        returns_pool_share=min(expected.tokens / (pool.usable * pool.block_tokens), expected.sessions),
    )


def _uncomputed(engine: Engine, sequence: Sequence) -> tuple[int, int]:
    """Return the prompt tokens still to be computed and the number of tokens before them.

    Tokens that the pool or the tiers have normally need no computing.
    """
    if sequence.holds:
        return 0, sequence.computed
    if sequence.pages:
        return max(0, sequence.prompt_tokens - sequence.computed), sequence.computed
    pool = engine.scheduler.pool
    known = sequence.prompt_tokens - 1
    found_blocks = 0
    if engine.scheduler.tables.prefix_reuse:
        keys = sequence.keys_of(known // pool.block_tokens, pool.block_tokens)
        found_blocks = len(pool.match(keys, sequence.tokens))
    offload_state = sequence.offload_state
    if offload_state is not None and offload_state.found is not None:
        found_blocks = max([found_blocks, *(span.first + span.blocks for span in offload_state.found.spans)])
    have = min(known, found_blocks * pool.block_tokens)
    return sequence.prompt_tokens - have, have


SETTLE_POLL_S = 0.02


class Replica:
    """The Serve deployment of one engine.

    `model_dir`: a directory that `samovar.replicas.model.spec.inspect_model` accepts; None: the one in
    `settings.model`.

    Raises `ModelRefused` or `PoolTooSmall` if the model cannot be served.
    """

    _tracer: Tracer | None = None

    def __init__(self, settings: Settings, model_dir: str | None) -> None:
        with collector_paused():
            from samovar.replicas.answers import AnswerLogs as Kept
            from samovar.replicas.answers import SweepTimer as Sweeps
            from samovar.replicas.engine import EngineThread
            from samovar.replicas.links import Links
            from samovar.replicas.model import ensure_model
            from samovar.replicas.serving.tracing import TracedLink
            from samovar.replicas.start.start_notes import StartNotes as Notes
            from samovar.replicas.start.tier_access import open_tiers

        set_up_logs(settings.telemetry)
        self._tracer = open_tracer(settings.telemetry, "replica")
        replica_id = serve.get_replica_context().replica_id.unique_id
        notes = Notes(settings.starting_dir, str(settings.server.port), replica_id)
        notes.begin("tiers")
        self._tiers = open_tiers(settings) if settings.tiers.enabled else None
        if self._tiers is not None and self._tracer is not None:
            self._tiers = replace(self._tiers, link=TracedLink(self._tiers.link, self._tracer))
        path = Path(model_dir) if model_dir else ensure_model(settings.model)
        built = self.build(settings, path, replica_id, notes)
        notes.end()
        self._settings = settings
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._info: ReplicaInfo = replace(built.info, stages=notes.seconds)
        self._sampler = built.engine.sampler
        self._runner = built.engine.runner
        self._thread = EngineThread(built.engine, self._deliver, settings.engine.idle_check_s)
        self._streams: dict[int, EventStream | EventSender] = {}
        self._kept: AnswerLogs = Kept(settings.answers, self._abort_kept, time.monotonic)
        self._answer_logs: dict[int, AnswerLog] = {}  # of answers that are not over, by the engine's key
        self._kept_spans: dict[int, AnswerSpans] = {}
        self._sweeps: SweepTimer = Sweeps(self._kept, _call_later, time.monotonic)
        self._untold: dict[int, AnswerSpans] = {}  # traced requests whose prompt is not computed yet
        self._links = Links(settings.cluster.links, settings.router.heartbeat_s)
        self._inlet: Inlet | None = open_inlet(settings.cluster.links, 0.0)
        self._places = places(settings.engine)
        self._compiles = TenantThreads("compile", settings.grammar.threads, places=settings.engine.queue_max)
        self._ingress_loads = IngressLoads(replica_id)
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread.start()

    def build(self, settings: Settings, model_dir: Path, replica_id: str, notes: StartNotes) -> BuiltEngine:
        """Build the engine. Another engine behind the same deployment is a subclass that builds it."""
        from samovar.replicas.start.build import Start
        from samovar.replicas.start.machine_prices import MachinePrices, keep_prices, measurements_dir
        from samovar.replicas.start.ray_ranks import launch_rank

        tiers, keep = self._tiers, measurements_dir(settings)
        built = Start(
            settings, model_dir, replica_id, tiers=tiers, keep=keep, begin=notes.begin, launch=launch_rank
        ).run()
        keep_prices(keep, MachinePrices.of(built.info, built.engine.meter.price))
        return built

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """Yield the events of a request that Serve carries, in lists; an empty one is a sign of life.

        Requests come over links (`serving/served.py`); this is for those that no link takes.
        """
        from samovar.replicas.engine import EventStream

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
        compile_it = partial(self._sampler.refusal_of, request.sampling.grammar)
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
        self._thread.submit(key, request)
        try:
            yield
        finally:
            if spans is not None:
                spans.end(is_complete=stream.is_over)
            self._untold.pop(key, None)
            del self._streams[key]
            self._ingress_loads.ended(key)
            if not stream.is_over:
                self._thread.abort(key)

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
            self._thread.submit(key, request)
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
        """Add our replica id, so that the retry avoids this replica."""
        if isinstance(event, Failed) and event.replica_lost:
            return replace(event, replica_id=self._info.replica_id)
        return event

    async def describe(self) -> ReplicaInfo:
        return self._info

    async def stats(self) -> EngineStats:
        stats = await asyncio.wrap_future(self._thread.call(lambda engine: engine.stats()))
        return replace(stats, integrity_failures=self._thread.integrity_failures)

    async def record_routing_stats(self) -> dict[str, object]:
        """Return what all routers are told periodically about this replica (Ray Serve hook)."""
        price = await asyncio.wrap_future(self._thread.call(lambda engine: engine.meter.price))
        return {
            "prefill": [price.c0_s, price.a_s, price.b_s],
            "step_tokens": price.step_tokens,
            "load": self._ingress_loads.report(
                PrefillPrice(price.c0_s, price.a_s, price.b_s, price.step_tokens)
            ),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load that the autoscaler decides from (Ray Serve hook)."""
        horizon_s = self._settings.cluster.autoscaling.horizon_s
        load = await asyncio.wrap_future(self._thread.call(lambda engine: load_of(engine, horizon_s)))
        return load.metrics()

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

    async def pool_bytes(self, owner: bytes) -> int:
        """Return the pool bytes that hold blocks of a session (tenant's and session's tag)."""
        pages = await asyncio.wrap_future(
            self._thread.call(lambda engine: len(engine.scheduler.pool.owned(owner)))
        )
        return pages * self._info.block_tokens * self._info.bytes_per_token

    async def glance(self, owners: tuple[bytes, ...]) -> ReplicaGlance:
        """Return the counters, and the pool's blocks of each lineage that it holds any of."""

        def look(engine: Engine) -> ReplicaGlance:
            pool = engine.scheduler.pool
            blocks = {owner: len(pool.owned(owner)) for owner in owners}
            return ReplicaGlance(engine.stats(), {owner: held for owner, held in blocks.items() if held})

        return await asyncio.wrap_future(self._thread.call(look))

    async def cool(self, owner: bytes) -> int:
        """Make a session's pages the next to be evicted: it will not resume soon. Return their number."""
        return await asyncio.wrap_future(
            self._thread.call(lambda engine: engine.scheduler.pool.evict_first(owner))
        )

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """Apply a client's hint about its idle session."""
        hinted = owner, event, expected_return_s
        call = self._thread.call(lambda engine: engine.scheduler.pool.returns.hint(*hinted))
        await asyncio.wrap_future(call)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> Forgotten:
        """Forget everything of a tenant, or only these sessions of it (tags), here and in the node's tiers.

        Raises `TimeoutError` if the tiers do not answer.
        """
        tags = {tenant} if sessions is None else {tenant + session for session in sessions}

        async def forget() -> int:
            self._kept.forget(tags)
            return await asyncio.wrap_future(self._thread.call(lambda engine: engine.requests.forget(tags)))

        # The engine first: running sequences must not publish or store after the tiers have forgotten.
        pages = await forget()
        if self._tiers is None:
            return Forgotten(pages, 0, 0)
        clear = Clear(tenant) if sessions is None else Clear(tenant, sessions[0], sessions[1:])
        try:
            done = await asyncio.to_thread(self._tiers.link.clear, clear)
        finally:
            pages += await forget()  # what a concurrent request has loaded from the tiers
        return Forgotten(pages, done.extents, done.nbytes, tuple(sorted(done.unreachable)))

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
        deadline_s = time.monotonic() + timeout_s
        while not await asyncio.wrap_future(self._thread.call(lambda engine: engine.is_settled)):
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(SETTLE_POLL_S)  # polled: the last transfer ends in the tier actor
        return True

    async def check_integrity(self) -> None:
        """Raise `AssertionError` if the engine's bookkeeping is wrong. For tests and operators."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.check_integrity()))

    def check_health(self) -> None:
        """Raise if this replica should be replaced (Ray Serve health hook)."""
        self._thread.check_health(self._settings.engine.stuck_step_s)

    async def hand_over(self, timeout_s: float) -> bool:
        """Hand the blocks that only the pool has to the tiers, most valuable first; False on timeout."""
        deadline_s = time.monotonic() + timeout_s
        left = await asyncio.wrap_future(self._thread.call(_begin_handover))
        while left and time.monotonic() < deadline_s:
            await asyncio.sleep(SETTLE_POLL_S)  # polled: room appears when the tier actor fetches records
            left = await asyncio.wrap_future(self._thread.call(_continue_handover))
        return await self.settle(max(0.0, deadline_s - time.monotonic())) and not left

    async def __del__(self) -> None:
        """Store the last turns and stop (Ray Serve shutdown hook; the requests that it carries are over).

        Calls over links, which Serve does not see, get as long as it would have waited for them.
        """
        if self._inlet is not None:
            self._inlet.calls.stop()
            if not await self._inlet.calls.over(self._settings.server.graceful_shutdown_s):
                logger.warning("%d answers go on elsewhere: they took too long", self._inlet.calls.open)
        settle_s = self._settings.tiers.settle_s
        if self._tiers is not None and not await self.hand_over(settle_s):
            logger.warning("not all blocks that only this replica held were handed over in %g s", settle_s)
        await asyncio.to_thread(self._thread.stop, self._settings.engine.stuck_step_s)
        if self._tiers is not None:
            self._tiers.lanes.close()
            await asyncio.wrap_future(self._thread.call(_close_copies))
        if self._inlet is not None:
            self._inlet.close()
        self._compiles.close()
        await asyncio.to_thread(self._runner.close)
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
        """Note an event of a kept answer and tell its readers."""
        self._kept.put(log, self._named(event))
        if log.is_over:
            self._end_kept(log.key, is_complete=not log.has_failed)
            self._sweeps.set()

    def _abort_kept(self, key: int) -> None:
        self._end_kept(key, is_complete=False)
        self._thread.abort(key)

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


def _begin_handover(engine: Engine) -> int:
    return 0 if engine.offload is None else engine.offload.handover.begin()


def _continue_handover(engine: Engine) -> int:
    return 0 if engine.offload is None else engine.offload.handover.advance()


def _close_copies(engine: Engine) -> None:
    """Unregister memory while it is still mapped. A GPU that has failed is left as it is."""
    try:
        if engine.offload is not None:
            engine.offload.moves.io.close()
    except RuntimeError as error:
        logger.warning("the copies of this replica could not be closed: %s", error)
