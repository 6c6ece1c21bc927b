"""The seam between a replica and its engine: what a deployment asks of any engine, and how ours answers.

Whatever knows a scheduler, a pool or the way to the tiers is on the engine's side of it. The module imports
without torch: another engine may live in an environment that ours does not run in.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.configs.settings import EngineSettings
from samovar.replicas.messages import (
    EngineStats,
    Event,
    GenerateRequest,
    Grammar,
    Refused,
    ReplicaGlance,
    ReplicaInfo,
)

if TYPE_CHECKING:
    from samovar.replicas.engine import Engine, EngineThread
    from samovar.replicas.offload import WorkerPools
    from samovar.replicas.scheduling import Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")
Deliver = Callable[[list[tuple[int, Event]]], None]
"""Takes (request key, event) pairs in the order in which they happened. For any thread; it does not block."""

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


class ServedEngine(Protocol):
    """An engine as a replica serves it. Methods are for the replica's event loop, but for `refusal_of`.

    `info`: what is said of it; the replica adds what its start took. An owner is a tenant's tag with a
    session's or a lineage's behind it.
    """

    info: ReplicaInfo

    def start(self, deliver: Deliver) -> None:
        """Begin to serve. Events of answers go to `deliver`."""

    def answer(self, key: int, request: GenerateRequest) -> None:
        """Begin an answer; its events, a refusal or a failure included, are delivered under the new `key`."""

    def abort(self, key: int) -> None:
        """End an answer, if it is not over, and free what it holds. What it still delivers is dropped."""

    def refusal_of(self, grammar: Grammar) -> Refused | None:
        """Prepare for answers of this form; return why there can be none. Takes long: for any thread."""

    async def stats(self) -> EngineStats: ...

    async def load(self, horizon_s: float) -> ReplicaLoad:
        """Return what runs, waits, and is expected within the next `horizon_s` real seconds."""

    async def prices(self) -> PrefillPrice:
        """Return what computing a prompt takes, for who routes requests."""

    async def glance(self, owners: tuple[bytes, ...]) -> ReplicaGlance:
        """Return the counters, and how many blocks of each owner are here, of those that have any."""

    async def pool_bytes(self, owner: bytes) -> int | None:
        """Return the bytes that hold blocks of an owner; None: it does not say whose its pages are."""

    async def cool(self, owner: bytes) -> int:
        """Let an owner's blocks be evicted before others; return their number."""

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """Learn when an owner's session is expected back."""

    async def forget(self, tags: Collection[bytes]) -> int:
        """Forget these tenants and sessions, and what their answers go on to compute; return the pages."""

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every finished turn is handed to the tiers; False if `timeout_s` passes first."""

    async def hand_over(self, timeout_s: float) -> bool:
        """Hand what only this engine has to the tiers, and settle; False if `timeout_s` passes first."""

    async def check_integrity(self) -> None:
        """Raise `AssertionError` if its bookkeeping is wrong."""

    def check_health(self) -> None:
        """Raise if the replica should be replaced."""

    async def close(self) -> None:
        """Fail what is open, and end."""


SETTLE_POLL_S = 0.02


class OwnEngine:
    """Our engine, on a thread of its own: what is asked of it is asked between two steps.

    `lanes`: the threads by which it calls its node's tiers, if any; closed with it.
    """

    _thread: EngineThread  # from `start` on

    def __init__(
        self, engine: Engine, info: ReplicaInfo, settings: EngineSettings, lanes: WorkerPools | None = None
    ) -> None:
        self.info = info
        self._engine = engine
        self._settings = settings
        self._lanes = lanes

    def start(self, deliver: Deliver) -> None:
        from samovar.replicas.engine import EngineThread as Own  # it computes: with torch

        self._thread = Own(self._engine, deliver, self._settings.idle_check_s)
        self._thread.start()

    def answer(self, key: int, request: GenerateRequest) -> None:
        self._thread.submit(key, request)

    def abort(self, key: int) -> None:
        self._thread.abort(key)

    def refusal_of(self, grammar: Grammar) -> Refused | None:
        return self._engine.sampler.refusal_of(grammar)

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(question))

    async def stats(self) -> EngineStats:
        stats = await self._ask(lambda engine: engine.stats())
        return replace(stats, integrity_failures=self._thread.integrity_failures)

    async def load(self, horizon_s: float) -> ReplicaLoad:
        return await self._ask(lambda engine: load_of(engine, horizon_s))

    async def prices(self) -> PrefillPrice:
        return await self._ask(lambda engine: engine.meter.price)

    async def glance(self, owners: tuple[bytes, ...]) -> ReplicaGlance:
        def look(engine: Engine) -> ReplicaGlance:
            pool = engine.scheduler.pool
            blocks = {owner: len(pool.owned(owner)) for owner in owners}
            return ReplicaGlance(engine.stats(), {owner: held for owner, held in blocks.items() if held})

        return await self._ask(look)

    async def pool_bytes(self, owner: bytes) -> int:
        pages = await self._ask(lambda engine: len(engine.scheduler.pool.owned(owner)))
        return pages * self.info.block_tokens * self.info.bytes_per_token

    async def cool(self, owner: bytes) -> int:
        return await self._ask(lambda engine: engine.scheduler.pool.evict_first(owner))

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        hinted = owner, event, expected_return_s
        await self._ask(lambda engine: engine.scheduler.pool.returns.hint(*hinted))

    async def forget(self, tags: Collection[bytes]) -> int:
        return await self._ask(lambda engine: engine.requests.forget(tags))

    async def settle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not await self._ask(lambda engine: engine.is_settled):
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(SETTLE_POLL_S)  # polled: the last transfer ends in the tier actor
        return True

    async def hand_over(self, timeout_s: float) -> bool:
        """Hand the blocks that only the pool has to the tiers, most valuable first."""
        deadline_s = time.monotonic() + timeout_s
        left = await self._ask(_begin_handover)
        while left and time.monotonic() < deadline_s:
            await asyncio.sleep(SETTLE_POLL_S)  # polled: room appears when the tier actor fetches records
            left = await self._ask(_continue_handover)
        return await self.settle(max(0.0, deadline_s - time.monotonic())) and not left

    async def check_integrity(self) -> None:
        await self._ask(lambda engine: engine.check_integrity())

    def check_health(self) -> None:
        self._thread.check_health(self._settings.stuck_step_s)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop, self._settings.stuck_step_s)
        if self._lanes is not None:
            self._lanes.close()
            await self._ask(_close_copies)
        await asyncio.to_thread(self._engine.runner.close)


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
