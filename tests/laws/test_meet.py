"""A load that is to meet computing meets it, however long steps are, and whatever comes of its pieces.

Time is the clock's: a token takes `TOKEN_S` to compute, and pieces come by a timetable. Where they come in
time, what was planned to be loaded is loaded; nothing ever waits for longer than the load may be late; the
answer is the uncached one, bit for bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import TierSettings
from samovar.replicas.offload.tier_client import TierLink
from samovar.replicas.scheduling.queues import Preemption
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepPlan
from tests.support.engines.tier_engines import (
    MIB,
    InlineExecutor,
    Prefilled,
    bare_turn,
    receipt_of,
    returning_turn,
    same,
    tiered,
)

TOKEN_S = 0.002
ROAD = (0.001, 3e5)  # latency and bytes per second: about as quick as computing
LENGTH, NEW = 700, 9
PIECE_BYTES = 64 * 1024
STEPS = (16, 64, 300, 16_384)


def returning(model: Path) -> tuple[list[int], list[int]]:
    return returning_turn(model, LENGTH, NEW)


def truth(model: Path) -> Prefilled:
    return bare_turn(model, LENGTH, NEW)


class Failing:
    """A link of which some fetches fail."""

    def __init__(self, inner: TierLink, rng: random.Random) -> None:
        self.inner, self.rng, self.share = inner, rng, 0.0

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        return FetchFailed("error") if self.rng.random() < self.share else self.inner.fetch(fetch)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


Timetable = Callable[[float], float]
"""When a piece comes that would usually come after so many seconds."""


class Return:
    """A turn that comes back from a tier about as quick as computing, on a clock that computing moves."""

    def __init__(
        self, model: Path, folder: Path, step_tokens: int, seed: int = 0, *, simulated: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.links: list[Failing] = []

        def failing(link: TierLink) -> TierLink:
            self.links.append(Failing(link, self.rng))
            return self.links[-1]  # type: ignore[return-value]

        self.engine = tiered(
            model,
            folder,
            tiers={"cpu": HeapTier(64 * MIB)},
            settings=TierSettings(audit_share=0.0, extent_bytes_max=PIECE_BYTES),
            prefill=PrefillPrice(0.0, TOKEN_S, 0.0),
            link=failing,
            node={"prices": {"cpu": ROAD}},
            step_tokens_max=step_tokens,
            copies=self.rng if simulated else None,
        )
        self.engine.placement = Placement("cpu", (), "cpu")
        first, self.prompt = returning(model)
        self.engine.run(first)
        self.engine.forget_pool()
        self.planned_tokens = 0
        self.planned_s = self.hedge_s = self.took_s = 0.0

    def run(self, timetable: Timetable, *, preempted_at: int | None = None) -> Prefilled:
        """Run the turn to its end; its pieces come in any order."""
        engine, inner, clock = self.engine, self.engine.built.engine, self.engine.clock
        fetches = engine.lanes.fetch
        assert isinstance(fetches, InlineExecutor)
        fetches.held = True
        key, began_s, kv = engine.submit(self.prompt, logprobs=5), clock.now_s, None
        due: list[float] | None = None
        for _ in range(20 * len(self.prompt)):
            if not inner.requests.open_keys():
                break
            running = inner.scheduler.running
            if running and due is None:
                began, usual = self.planned(running[0])
                due = [began + timetable(after_s) for after_s in usual]
            while due and due[0] <= clock.now_s:
                del due[0]
                fetches.shuffle(self.rng)
                fetches.release(1)
            if not engine.has_work:  # else computing passes the time
                waits_s = [inner.wake_in_s] if inner.wake_in_s is not None else []
                waits_s += [due[0] - clock.now_s] if due else []
                assert waits_s, "it waits for something that never comes"
                clock.now_s += min(waits_s)
                continue
            computed = inner.stats().prefill_tokens
            engine.driver.step()
            clock.now_s += TOKEN_S * (inner.stats().prefill_tokens - computed)
            running = inner.scheduler.running
            if running and preempted_at is not None and running[0].computed >= preempted_at:
                self.preempt(running[0])
                preempted_at, due = None, None
            elif running and running[0].computed >= len(self.prompt):
                kv = (
                    kv if kv is not None else inner.runner.pool.gather(running[0].pages, len(self.prompt) - 1)
                )
        assert kv is not None, "it never ends"
        self.took_s = clock.now_s - began_s
        fetches.held = False
        fetches.release()
        engine.drain()
        return Prefilled(engine.driver.answers[key], kv, engine.built.info.exact, kv.dtype)

    def planned(self, sequence: Sequence) -> tuple[float, list[float]]:
        """Note what is to be loaded; return when that began, and after how long each piece would come."""
        restore = sequence.restore
        assert restore is not None
        assert restore.decision == "meet"
        self.planned_tokens = sum(piece.end - piece.start for piece in restore.pieces)
        self.planned_s, self.hedge_s = restore.load_price_s, restore.hedge_at_s - restore.started_s
        count = len(restore.pieces)
        return restore.started_s, [self.planned_s * (at + 1) / count for at in range(count)]

    def preempt(self, sequence: Sequence) -> None:
        inner = self.engine.built.engine
        assert inner.offload is not None
        inner.scheduler.queues.preempt(Preemption(sequence, "drop"), StepPlan())
        inner.offload.close(sequence)


def loaded(turn: Prefilled) -> int:
    return receipt_of(turn.answer).tokens["cpu"]


@pytest.mark.parametrize("step_tokens", STEPS)
@pytest.mark.parametrize("seed", range(2))
def test_what_was_planned_to_be_loaded_is_loaded_where_it_comes_in_time(
    tiny_llama: Path, tmp_path: Path, step_tokens: int, seed: int
) -> None:
    """On the GPU steps were as long as the prompt: 0 of 8,224 tokens were loaded."""
    back = Return(tiny_llama, tmp_path, step_tokens, seed, simulated=seed == 1)
    turn = back.run(lambda usual_s: (1.0, 1.5)[seed] * usual_s)
    same(turn, truth(tiny_llama))
    assert loaded(turn) >= 0.9 * back.planned_tokens
    assert receipt_of(turn.answer).decision == "meet"


@pytest.mark.parametrize("step_tokens", STEPS)
@pytest.mark.parametrize("late", [3.0, math.inf])
def test_what_is_late_is_overtaken_when_it_is_late_and_not_for_ever_waited_for(
    tiny_llama: Path, tmp_path: Path, step_tokens: int, late: float
) -> None:
    back = Return(tiny_llama, tmp_path, step_tokens)
    turn = back.run(lambda usual_s: late * usual_s)
    same(turn, truth(tiny_llama))
    assert (receipt_of(turn.answer).decision, receipt_of(turn.answer).miss) == ("hedge", "late")
    assert back.took_s <= back.hedge_s + TOKEN_S * len(back.prompt), "it computes from then on, at the latest"
    assert (loaded(turn) > 0) == (late < math.inf), "of what comes later the rest is taken"


@pytest.mark.parametrize("step_tokens", STEPS)
def test_what_fails_is_computed_at_once(tiny_llama: Path, tmp_path: Path, step_tokens: int) -> None:
    back = Return(tiny_llama, tmp_path, step_tokens, seed=3)
    back.links[0].share = 0.5
    turn = back.run(lambda usual_s: usual_s)
    same(turn, truth(tiny_llama))
    assert 0 < loaded(turn) < back.planned_tokens
    assert back.took_s <= back.planned_s + TOKEN_S * len(back.prompt)


@pytest.mark.parametrize("step_tokens", STEPS)
@pytest.mark.parametrize("preempted_at", [1, 250])
def test_a_load_that_was_preempted_begins_again(
    tiny_llama: Path, tmp_path: Path, step_tokens: int, preempted_at: int
) -> None:
    back = Return(tiny_llama, tmp_path, step_tokens, seed=4, simulated=True)
    turn = back.run(lambda usual_s: usual_s, preempted_at=preempted_at)
    same(turn, truth(tiny_llama))
