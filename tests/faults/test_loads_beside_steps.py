"""Loads by real threads beside the steps, with faults, aborts, preemptions: answers and books stay right."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import TAG_BYTES, Bytes, Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import KIB, TierSettings
from samovar.replicas.kv.block_io import PageIo, Ticket
from samovar.replicas.kv.copy_device import CopyEvent
from samovar.replicas.offload.tier_client import TierLink, WorkerPools
from samovar.replicas.scheduling.queues import Preemption
from samovar.replicas.scheduling.step import StepPlan
from tests.support.clock import Clock
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Tiered, tiered

REQUESTS, AT_ONCE, TOKENS, STUCK_S = 150, 6, 24, 60.0
# Tokens of each prompt.
SESSIONS = (90, 130, 200, 130)


class RunningClock(Clock):
    def __call__(self) -> float:
        return time.monotonic()


class SlowLink:
    """A link whose fetches take their time, and sometimes fail."""

    def __init__(self, inner: TierLink, rng: random.Random) -> None:
        self.inner, self.rng = inner, rng

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        time.sleep(self.rng.choice((0.0, 0.001, 0.004, 0.02)) * self.rng.random())
        fate = self.rng.random()
        if fate > 0.97:
            raise RuntimeError("the way to the tiers broke")
        return FetchFailed("error") if fate > 0.94 else self.inner.fetch(fetch)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


@pytest.fixture(autouse=True)
def threads_that_alternate() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def slow_copies(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    begin_in = PageIo.begin_in

    def slow(self: PageIo, payload: Bytes, pages: Any, read: CopyEvent) -> Ticket:
        time.sleep(rng.choice((0.0, 0.002, 0.006)) * rng.random())
        if rng.random() < 0.02:
            raise MemoryError("no staging memory")
        ticket = begin_in(self, payload, pages, read)
        time.sleep(rng.choice((0.0, 0.003)) * rng.random())
        return ticket

    monkeypatch.setattr(PageIo, "begin_in", slow)


def preempt_one(engine: Tiered, rng: random.Random) -> None:
    """As a step that is short of pages does it."""
    inner = engine.built.engine
    assert inner.offload is not None
    victim, how = rng.choice(inner.scheduler.running), rng.choice(("swap", "drop"))
    inner.scheduler.queues.preempt(Preemption(victim, how), StepPlan())  # type: ignore[arg-type]
    inner.offload.close(victim, keep_swapped=True)
    inner.requests.is_stalled = False


# The wait for a late load, its price beside computing, fetches at a time, threads.
KINDS = {
    "loads are waited for": (0.5, 1.0, 2, 4),
    "loads are late": (0.002, 1e-3, 8, 3),
    "one at a time": (0.0, 1.0, 1, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["swap", "drop"])
def test_loads_beside_steps(
    kind: str, policy: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slack_s, token_s, fetch_max, threads = KINDS[kind]
    rng = random.Random(f"{kind} {policy}")
    bare = tiered(tiny_llama, tmp_path / "bare", tiers={}, prefix_reuse=False)
    truth = {
        seed: bare.run(prompt_of(n, seed=seed), max_tokens=TOKENS).ids for seed, n in enumerate(SESSIONS)
    }
    slow_copies(monkeypatch, random.Random(1))
    lanes = WorkerPools.of_threads(2, threads)
    engine = tiered(
        tiny_llama,
        tmp_path,
        tiers={"cpu": HeapTier(64 * MIB)},
        settings=TierSettings(
            audit_share=0.0, extent_bytes_max=64 * KIB, hedge_slack_s=slack_s, fetch_max=fetch_max
        ),
        prefill=PrefillPrice(0.0, token_s, 0.0),
        clock=RunningClock(),
        lanes=lanes,
        link=lambda inner: SlowLink(inner, random.Random(2)),  # type: ignore[arg-type,return-value]
        pool_tokens=512,
        preemption=policy,
    )
    engine.placement = Placement("cpu", (), "cpu")
    inner, wake = engine.built.engine, threading.Semaphore(0)
    offload = inner.offload
    assert offload is not None
    inner.on_wake(wake.release)
    asked: dict[int, tuple[int, int]] = {}  # seed of the prompt, choices
    left, ends_s = REQUESTS, time.monotonic() + STUCK_S
    while left or inner.requests.open_keys() or offload.moves.pages_held() or not inner.is_settled:
        assert time.monotonic() < ends_s, f"stuck: {[one.restore for one in inner.scheduler.queues]}"
        if left and len(inner.requests.open_keys()) < AT_ONCE and rng.random() < 0.4:
            seed, choices = rng.randrange(len(SESSIONS)), rng.choice((1, 1, 2, 3))
            key = engine.submit(
                prompt_of(SESSIONS[seed], seed=seed),
                n=choices,
                max_tokens=rng.choice((1, 4, TOKENS)),
                tenant=bytes([seed % 2]) * TAG_BYTES,
                session=bytes([seed]) * TAG_BYTES,
            )
            asked[key], left = (seed, choices), left - 1
        fate = rng.random()
        if fate < 0.02 and inner.requests.open_keys():
            key = rng.choice(inner.requests.open_keys())
            inner.requests.abort(key)
            del asked[key]
        elif fate < 0.07:
            engine.forget_pool()
        elif fate < 0.075:
            inner.requests.forget({bytes([rng.randrange(2)]) * TAG_BYTES})
        elif fate < 0.1 and len(inner.scheduler.running) > 1:
            preempt_one(engine, rng)
        if rng.random() < 0.2:
            engine.node.work()
        if inner.has_work:
            engine.driver.step()
        else:
            wake.acquire(timeout=min(0.01, inner.wake_in_s or 0.01))
    lanes.close()
    inner.check_integrity()
    assert inner.scheduler.pool.active == 0
    for key, (seed, choices) in asked.items():
        answer = engine.driver.answers[key]
        assert (answer.failed, answer.refused) == (None, None)
        for index in range(choices):
            ids = answer.token_ids[index]
            assert ids
            assert ids == truth[seed][: len(ids)]
    stats = inner.stats()
    assert stats.decisions["load"] + stats.decisions.get("hedge", 0) > 0, "nothing was loaded"
