"""Engines with real cache tiers in one process: no Ray, no threads, every step by hand.

The node and its NVMe files are the product's own; main memory is a `HeapTier`. Work that the service
does on worker threads is done at once, when it is submitted, or when `work` is called. Copies of blocks may
be those of a simulated device: then they happen in any order, some of them whenever `has_work` is asked for.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.blocks.tiers import TIERS, TierName
from samovar.cache_tiers.catalog import Catalog
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.node.manager import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierMeter, TierPrice
from samovar.cache_tiers.transport import LazyLink, PeerCalls
from samovar.configs.sections import TierSettings
from samovar.replicas.kv.block_io import PageIo
from samovar.replicas.kv.kv_pool import KvPool
from samovar.replicas.messages import GenerateRequest, Receipt, SamplingParams
from samovar.replicas.offload.tier_client import TierAccess, TierLink, WorkerPools
from samovar.replicas.start.build import BuiltEngine
from tests.support.clock import Clock
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.support.engines.exactness import assert_same_kv, assert_same_logprobs
from tests.support.engines.simulated_device import SimulatedDevice
from tests.support.inside import guards_of, join_scans
from tests.support.nodes.node_harness import records_of

MIB = 1024 * 1024
SCAN_S = 30.0
PRICES: Mapping[TierName, tuple[float, float]] = {
    "cpu": (1e-3, 4e9),
    "nvme": (2e-3, 1e9),
    "s3": (0.05, 100e6),
}
"""Latency in seconds and bytes per second, where a test says nothing else."""
SLOW_PREFILL = PrefillPrice(0.04, 1.1e-3, 4.5e-7)  # a CPU's: loading always pays

_incarnations = itertools.count(1)


class InlineExecutor(Executor):
    """Runs what is submitted at once, or, when `held`, when `release` is called."""

    def __init__(self) -> None:
        self.held = False
        self._waiting: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
                raise

        if self.held:
            self._waiting.append(run)
        else:
            run()
        return future

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def shuffle(self, rng: random.Random) -> None:
        """What waits is run in another order."""
        rng.shuffle(self._waiting)

    def release(self, count: int | None = None) -> None:
        """Run the first `count` of what waits (all by default)."""
        now, self._waiting = self._waiting[:count], [] if count is None else self._waiting[count:]
        for run in now:
            run()


def make_node(
    tiers: Mapping[TierName, Tier],
    outbox: StagingBuffer,
    settings: TierSettings,
    clock: Callable[[], float],
    bytes_max: int = 256 * MIB,
    prices: Mapping[TierName, tuple[float, float]] | None = None,
    is_proved: bool = True,
    peer_calls: PeerCalls | None = None,
    link: LazyLink | None = None,
    catalog: Callable[..., Catalog] = Catalog,
    **more: Any,
) -> TierNode:
    """A started node whose work is done by `work`.

    `prices`: of loads; not `is_proved`: none has been measured yet.
    """
    media = NodeMedia(dict(tiers), dict.fromkeys(TIERS, bytes_max))
    node = TierNode(
        settings,
        media,
        NodeIdentity("test", f"test-{next(_incarnations)}"),
        NodePorts(
            clock=clock,
            wall_clock=lambda: 1_700_000_000.0 + clock(),
            call_for=records_of(outbox),
            peer_calls=peer_calls,
            link=link,
            catalog=catalog,
        ),
        workers=0,
        **more,
    )
    node.start()
    for tier, (latency_s, bytes_per_s) in {**PRICES, **(prices or {})}.items():
        node.measured({tier: TierPrice(latency_s, bytes_per_s)})
        if is_proved and tier in tiers:
            prove(guards_of(node)[tier]._meter)
    return node


def prove(meter: TierMeter) -> None:
    """Play that real loads have said what the meter says, and that nothing changes any more."""
    meter._doubt_s, meter._proved_at_s = math.inf, meter._clock()
    meter._large_bytes, meter._large_at_s = 1 << 50, meter._proved_at_s


class Prefilled(NamedTuple):
    """A greedy answer, the KV of its prompt, and whether the engine's probe promises equality here."""

    answer: Answer
    kv: torch.Tensor
    is_exact: bool
    stored: torch.dtype


@dataclass
class Tiered:
    """One engine with its tiers. `tiers` may be handed on to the next engine: a restart."""

    built: BuiltEngine
    driver: Driver
    node: TierNode
    tiers: dict[TierName, Tier]
    lanes: WorkerPools
    clock: Clock
    placement: Placement = field(default_factory=lambda: Placement("cpu", ("nvme",), "s3"))
    device: SimulatedDevice | None = None

    @property
    def has_work(self) -> bool:
        if self.device is None:
            return self.built.engine.has_work
        self.device.happen()
        return self.device.is_busy or self.built.engine.has_work

    def submit(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        salt: bytes = b"",
        tenant: bytes = bytes(16),
        session: bytes = bytes(16),
        max_tokens: int = 8,
        stores_all: bool = False,
        **params: Any,
    ) -> int:
        key = self.driver.next_key()
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
        request = GenerateRequest(
            *(f"r{key}", prompt, sampling, n, salt, tenant, session, self.placement), stores_all=stores_all
        )
        answer = self.driver.answers[key] = Answer()
        answer.refused = self.built.engine.requests.add(key, request)
        return key

    def run(self, prompt: list[int], **params: Any) -> Answer:
        key = self.submit(prompt, **params)
        self.drain()
        return self.driver.answers[key]

    def drain(self) -> None:
        """Until nothing is open and everything is stored."""
        while self.has_work:
            self.driver.step()
        assert not self.built.engine.requests.open_keys(), "a request waits for something that never comes"
        self.work()

    def work(self) -> None:
        """Let the node finish stores and copies, and the engine take in the outcome."""
        while self.node.work() or self.built.engine.has_arrivals:
            if self.built.engine.has_arrivals:
                self.driver.step()
        self.built.engine.check_integrity()
        self.node.check_integrity()

    def forget_pool(self) -> None:
        """As when others overran the pool."""
        self.built.engine.scheduler.pool.clear_cache()

    def prefill(self, prompt: list[int], **params: Any) -> Prefilled:
        """Run a prompt of one choice; its answer and the KV of all its prompt but the last token."""
        key = self.submit(prompt, **params)
        kv, pool = None, self.built.engine.runner.pool
        while self.has_work:
            self.driver.step()
            running = self.built.engine.scheduler.running
            if kv is None and running and running[0].computed >= len(prompt):
                kv = pool.gather(running[0].pages, len(prompt) - 1)
        self.drain()
        assert kv is not None, "the prompt was never computed"
        return Prefilled(self.driver.answers[key], kv, self.built.info.exact, pool.geometry.stored_dtype)


def tiered(
    model_dir: Path,
    folder: Path,
    *,
    tiers: dict[TierName, Tier] | None = None,
    settings: TierSettings | None = None,
    link: Callable[[TierLink], TierLink] = lambda link: link,
    prefill: PrefillPrice = SLOW_PREFILL,
    clock: Clock | None = None,
    node: dict[str, Any] | None = None,
    lanes: WorkerPools | None = None,
    copies: random.Random | None = None,
    **engine: Any,
) -> Tiered:
    """An engine over `cpu` and `nvme` (in `folder`), or over `tiers`. `lanes`: threads, if the clock runs.

    `copies`: the order in which a simulated device copies blocks; None: they are copied at once.
    """
    settings = settings or TierSettings(audit_share=0.0)
    clock = clock or Clock()
    if tiers is None:
        tiers = {"cpu": HeapTier(256 * MIB), "nvme": nvme(folder)}
    outbox = StagingBuffer(settings.staged_bytes_max, keep_s=600.0, clock=clock)
    the_node = make_node(tiers, outbox, settings, clock, **(node or {}))
    if lanes is None:  # the clock stands still: nobody would wait for what is still being listed
        join_scans(the_node, SCAN_S)
    lanes = lanes or WorkerPools(*(InlineExecutor() for _ in range(7)))
    access = TierAccess(link(the_node), outbox, lanes, clock)
    devices: list[SimulatedDevice] = []

    def simulated(pool: KvPool, *_: object) -> PageIo:
        assert copies is not None
        devices.append(SimulatedDevice(pool.page_bytes.numpy(), copies))
        return PageIo(devices[-1], pool.geometry, staging_bytes=3 * pool.geometry.block_bytes)

    with nullcontext() if copies is None else mock.patch("samovar.replicas.start.build.page_io", simulated):
        built = small_engine(model_dir, tiers=access, tier_settings=settings, prefill=prefill, **engine)
    built.engine.meter.observe_steps = lambda *_: None  # type: ignore[method-assign]  # tests set the price
    built.engine.scheduler.budget.pace.ran = lambda *_, **__: None  # type: ignore[method-assign]
    driver = Driver(built.engine)
    return Tiered(built, driver, the_node, tiers, lanes, clock, device=devices[0] if devices else None)


@cache
def returning_turn(model: Path, length: int, new_tokens: int) -> tuple[list[int], list[int]]:
    """A first prompt, and that of the next turn."""
    first = prompt_of(length, seed=length)
    answer = tiered(model, model, tiers={}, prefix_reuse=False).run(first)
    return first, [*first, *answer.ids, *prompt_of(new_tokens, seed=1)]


@cache
def bare_turn(model: Path, length: int, new_tokens: int) -> Prefilled:
    """The next turn of `returning_turn`, computed without a cache."""
    bare = tiered(model, model, tiers={}, prefix_reuse=False)
    return bare.prefill(returning_turn(model, length, new_tokens)[1], logprobs=5)


def nvme(folder: Path, bytes_max: int = 256 * MIB) -> NvmeTier:
    return NvmeTier(
        folder,
        bytes_max=bytes_max,
        durability="none",
        direct_io=False,
        quarantine_bytes_max=MIB,
        wall_clock=lambda: 1_700_000_000.0,
    )


def same(one: Prefilled, other: Prefilled, is_exact: bool | None = None) -> None:
    """Law L14: bit for bit, or (`is_exact`: by default what their engines' probe says) within the bound."""
    exact = one.is_exact and other.is_exact if is_exact is None else is_exact
    assert_same_kv(one.kv, other.kv, exact, stored=one.stored)
    ours, expected = (
        [row for delta in turn.answer.deltas for row in delta.logprobs] for turn in (one, other)
    )
    assert len(ours) == len(one.answer.ids), "ask for log-probabilities, or nothing is compared"
    assert_same_logprobs(ours, expected, one.stored, exact, greedy=True)
    if exact:
        assert one.answer.ids == other.answer.ids


def receipt_of(answer: Answer) -> Receipt:
    assert answer.admitted is not None
    return answer.admitted.receipt
