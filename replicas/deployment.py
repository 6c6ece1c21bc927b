"""One model replica as a Ray Serve deployment: the engine behind an async stream.

A thin shell: it builds the engine in its constructor, hands requests to the engine's thread and
gives each request's events to whoever iterates `generate` (see `engine/thread.py`). When the caller goes
away, however it goes, the request is aborted and its pages are free before the next step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import serve

from cache_tiers.actors import StagingBuffer, open_outbox, tier_actor
from cache_tiers.blocks import Clear
from cache_tiers.forecast import HintEvent
from cache_tiers.messages import NodeStats
from configs.settings import Settings
from replicas.build import TierAccess, build_engine, by_tag, shared_tiers
from replicas.engine import Engine, EngineThread, EventStream
from replicas.messages import EngineStats, Event, Failed, Forgotten, GenerateRequest, ReplicaInfo, TierSign
from replicas.model import ensure_model
from replicas.offload import RayLink, WorkerPools

# How much work a replica has and expects, as numbers that Ray Serve carries to whoever scales.
#
# Light: that is decided in a process that has no model. Knows nothing of the decision.

if TYPE_CHECKING:
    from replicas.engine import Engine
    from replicas.scheduling import Sequence

logger = logging.getLogger(__name__)

PREFIX = "samovar_"
"""Of the names under which Serve carries them: others may have metrics of their own."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica's load; none of it is negative.

    `running`, `waiting`: sequences; `sequences_max`: as many run at once. `prompts`: sequences whose prompt
    is not computed yet; `prefill_s`: what computing those is expected to take. `pool_share`: of the pool's
    pages, those in use; `pool_share_waiting`: what sequences that wait will need. `returns`: idle sessions
    that are expected back within the horizon; `returns_pool_share`: what those will need of the pool.
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
        """As `of_metrics` reads it."""
        return {PREFIX + name: float(value) for name, value in asdict(self).items()}

    @staticmethod
    def of_metrics(metrics: Mapping[str, float]) -> ReplicaLoad | None:
        """None where one is missing or is no number that a load could be."""
        try:
            load = ReplicaLoad(**{name: float(metrics[PREFIX + name]) for name in FIELDS})
        except (KeyError, TypeError, ValueError):
            return None
        return load if load.is_sane else None

    @property
    def is_sane(self) -> bool:
        """Whether it can be true."""
        values = [getattr(self, name) for name in FIELDS]
        return all(math.isfinite(value) and value >= 0 for value in values) and self.sequences_max >= 1


FIELDS = tuple(field.name for field in fields(ReplicaLoad))


def load_of(engine: Engine, horizon_s: float) -> ReplicaLoad:
    """The load of an engine, on its thread. `horizon_s`: real seconds."""
    scheduler, price = engine.scheduler, engine.meter.price
    pool = scheduler.pool
    prompts, prefill_s = 0, 0.0
    for sequence in scheduler.sequences():
        new_tokens, after_tokens = _uncomputed(engine, sequence)
        if new_tokens > 0:
            prompts += 1
            prefill_s += price.seconds(new_tokens, after_tokens)
    news = None if engine.offload is None else engine.offload.news
    expected = pool.returns_within(horizon_s * (1.0 if news is None else news.rate))
    waiting_pages = sum(pool.pages_for(len(sequence.tokens)) for sequence in scheduler.waiting)
    return ReplicaLoad(
        running=sum(sequence.forks for sequence in scheduler.running),
        waiting=sum(sequence.forks for sequence in scheduler.waiting),
        sequences_max=scheduler.sequences_max,
        prompts=prompts,
        prefill_s=prefill_s,
        pool_share=pool.active / pool.usable,
        pool_share_waiting=waiting_pages / pool.usable,
        returns=expected.sessions,
        returns_pool_share=min(expected.tokens / (pool.usable * pool.block_tokens), expected.sessions),
    )


def _uncomputed(engine: Engine, sequence: Sequence) -> tuple[int, int]:
    """Tokens of its prompt that are still to be computed, and how many are there before them.

    What the pool or the tiers have is not computed, as a rule.
    """
    if sequence.holds:
        return 0, sequence.computed
    if sequence.pages:
        return max(0, sequence.prompt_tokens - sequence.computed), sequence.computed
    pool = engine.scheduler.pool
    known = sequence.prompt_tokens - 1
    found_blocks = 0
    if engine.scheduler.prefix_reuse:
        keys = sequence.keys_of(known // pool.block_tokens, pool.block_tokens)
        found_blocks = len(pool.match(keys, sequence.tokens))
    visit = sequence.visit
    if visit is not None and visit.found is not None:
        found_blocks = max([found_blocks, *(span.first + span.blocks for span in visit.found.spans)])
    have = min(known, found_blocks * pool.block_tokens)
    return sequence.prompt_tokens - have, have


SETTLE_POLL_S = 0.02


def open_tiers(settings: Settings) -> TierAccess:
    """The way to this node's tier actor, which is created if there is none yet."""
    tiers = shared_tiers(settings)
    shares = by_tag(settings.auth, tiers.tenant_shares)
    context = ray.get_runtime_context()
    find = partial(tier_actor, tiers, context.get_node_id(), settings.nvme_dir, shares)
    outbox = StagingBuffer(tiers.staged_bytes_max, keep_s=2 * tiers.store_s_max)
    open_outbox(outbox)
    lanes = WorkerPools.of_threads(tiers.lookup_threads, tiers.io_threads)
    return TierAccess(RayLink(find, context.current_actor, tiers), outbox, lanes)


class Replica:
    """`model_dir`: a directory that `replicas.model.spec.inspect_model` accepts; None: `settings.model`'s.

    Raises `ModelRefused` or `PoolTooSmall` when it cannot serve.
    """

    def __init__(self, settings: Settings, model_dir: str | None) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._tiers = open_tiers(settings) if settings.tiers.enabled else None
        path = Path(model_dir) if model_dir else ensure_model(settings.model)
        built = build_engine(settings, path, replica_id, tiers=self._tiers)
        self._settings = settings
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._info: ReplicaInfo = built.info
        self._thread = EngineThread(built.engine, self._deliver, settings.engine.idle_check_s)
        self._streams: dict[int, EventStream] = {}
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """The request's events (see `messages.py`), a list at a time; an empty one is a sign of life."""
        if request.model and request.model != self._info.model:
            yield [self._named(Failed("this replica serves another model", replica_lost=True))]
            return
        self._loop = asyncio.get_running_loop()
        key, settings = next(self._keys), self._settings
        stream = self._streams[key] = EventStream(
            request.n,
            coalesce_s=settings.engine.coalesce_ms / 1000,
            heartbeat_s=settings.router.heartbeat_s,
        )
        self._thread.submit(key, request)
        try:
            while not stream.is_read:
                yield [self._named(event) for event in await stream.next()]
        finally:
            del self._streams[key]
            if not stream.is_over:
                self._thread.abort(key)

    def _named(self, event: Event) -> Event:
        """Whoever asks again must know whom not to ask."""
        if isinstance(event, Failed) and event.replica_lost:
            return replace(event, replica_id=self._info.replica_id)
        return event

    async def describe(self) -> ReplicaInfo:
        return self._info

    async def stats(self) -> EngineStats:
        stats = await asyncio.wrap_future(self._thread.call(lambda engine: engine.stats()))
        return replace(stats, integrity_failures=self._thread.integrity_failures)

    async def record_routing_stats(self) -> dict[str, object]:
        """Ray Serve's hook: what routers everywhere are told of this replica, again and again."""
        price = await asyncio.wrap_future(self._thread.call(lambda engine: engine.meter.price))
        return {"prefill": [price.c0_s, price.a_s, price.b_s], "step_tokens": price.step_tokens}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's hook: what the decision how many replicas there should be is made from."""
        horizon_s = self._settings.cluster.autoscaling.horizon_s
        load = await asyncio.wrap_future(self._thread.call(lambda engine: load_of(engine, horizon_s)))
        return load.metrics()

    def record_replica_metadata(self) -> dict[str, object]:
        """Ray Serve's hook: what they are told once."""
        return {"model": self._info.model}

    async def pool_bytes(self, owner: bytes) -> int:
        """Bytes of the pool that hold blocks of a session (tenant's and session's tag)."""
        pages = await asyncio.wrap_future(
            self._thread.call(lambda engine: len(engine.scheduler.pool.owned(owner)))
        )
        return pages * self._info.block_tokens * self._info.bytes_per_token

    async def cool(self, owner: bytes) -> int:
        """A session will not be back soon: its pages are the next to be taken; how many."""
        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.scheduler.pool.cool(owner)))

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """What a client says about its idle session."""
        call = self._thread.call(lambda engine: engine.scheduler.pool.hint(owner, event, expected_return_s))
        await asyncio.wrap_future(call)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> Forgotten:
        """Forget what a tenant made, or only these sessions of it (tags), here and in the node's tiers.

        Raises `TimeoutError` when the tiers do not answer.
        """
        tags = {tenant} if sessions is None else {tenant + session for session in sessions}

        async def forget() -> int:
            return await asyncio.wrap_future(self._thread.call(lambda engine: engine.forget(tags)))

        # Here first: what runs must not publish or store any more when the tiers forget.
        pages = await forget()
        if self._tiers is None:
            return Forgotten(pages, 0, 0)
        clear = Clear(tenant) if sessions is None else Clear(tenant, sessions[0], sessions[1:])
        try:
            done = await asyncio.to_thread(self._tiers.link.clear, clear)
        finally:
            pages += await forget()  # what a request that came meanwhile has still loaded from there
        return Forgotten(pages, done.extents, done.nbytes, tuple(sorted(done.unreachable)))

    async def tier_stats(self) -> NodeStats | None:
        """The tiers of this replica's node; None without tiers, or when they do not answer."""
        return None if self._tiers is None else await asyncio.to_thread(self._tiers.link.stats)

    async def tier_sign(self) -> TierSign | None:
        """Whether this node's tier actor answers; None without tiers."""
        if self._tiers is None:
            return None
        return TierSign(self._node_id, await asyncio.to_thread(self._tiers.link.answers))

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every finished turn is handed over to the tiers; False when that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while not await asyncio.wrap_future(self._thread.call(lambda engine: engine.is_settled)):
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(SETTLE_POLL_S)  # polled: the last of it ends in the tier actor
        return True

    async def check_integrity(self) -> None:
        """Raises `AssertionError` when the engine's books are wrong. For tests and operators."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.check_integrity()))

    def check_health(self) -> None:
        """Ray Serve's health hook: raises when this replica should be replaced."""
        self._thread.check_health(self._settings.engine.stuck_step_s)

    async def hand_over(self, timeout_s: float) -> bool:
        """Hand to the tiers what only the pool has, the most valuable first; False: that took too long."""
        deadline_s = time.monotonic() + timeout_s
        left = await asyncio.wrap_future(self._thread.call(_begin_handover))
        while left and time.monotonic() < deadline_s:
            await asyncio.sleep(SETTLE_POLL_S)  # polled: room comes when the tier actor calls for records
            left = await asyncio.wrap_future(self._thread.call(_go_on_with_handover))
        return await self.settle(max(0.0, deadline_s - time.monotonic())) and not left

    async def __del__(self) -> None:
        """Ray Serve's shutdown hook, after the running requests have finished: their turns are stored yet."""
        settle_s = self._settings.tiers.settle_s
        if self._tiers is not None and not await self.hand_over(settle_s):
            logger.warning("not all that only this replica held was handed over in %g s", settle_s)
        await asyncio.to_thread(self._thread.stop, self._settings.engine.stuck_step_s)
        if self._tiers is not None:
            self._tiers.lanes.close()

    def _deliver(self, events: list[tuple[int, Event]]) -> None:
        assert self._loop is not None, "events without a request"
        self._loop.call_soon_threadsafe(self._distribute, events)

    def _distribute(self, events: list[tuple[int, Event]]) -> None:
        for key, event in events:
            stream = self._streams.get(key)
            if stream is not None:  # else its reader has just gone away
                stream.put(event)


def _begin_handover(engine: Engine) -> int:
    return 0 if engine.offload is None else engine.offload.handover.begin()


def _go_on_with_handover(engine: Engine) -> int:
    return 0 if engine.offload is None else engine.offload.handover.go_on()
