"""Answers of the tiers that come late or in part: the engine computes meanwhile, and loads what is left.

By whichever way blocks enter, the turn is the one without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Lookup, LookupResult
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.configs.sections import TierSettings
from samovar.replicas.offload.tier_client import TierLink
from tests.support.constants import tuned
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import (
    MIB,
    InlineExecutor,
    Prefilled,
    Tiered,
    bare_turn,
    receipt_of,
    returning_turn,
    same,
    tiered,
)

PRICE = PrefillPrice(0.0, 0.01, 0.0)
LENGTH, NEW = 333, 9
MEET = (0.001, 6e4)
"""Latency and bytes per second of a tier that is about half as fast as computing."""


class Answers:
    """A link whose answers to lookups a test changes."""

    def __init__(self, inner: TierLink) -> None:
        self.inner = inner
        self.change: Callable[[LookupResult], LookupResult | None] = lambda found: found

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        found = self.inner.lookup(lookup)
        return None if found is None else self.change(found)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def engine_of(model: Path, folder: Path, *, extent_bytes: int = 64 * 1024, **more: object) -> Tiered:
    settings = TierSettings(audit_share=0.0, extent_bytes_max=extent_bytes)
    engine = tiered(
        model,
        folder,
        tiers={"cpu": HeapTier(64 * MIB)},
        settings=settings,
        prefill=PRICE,
        link=lambda link: Answers(link),  # type: ignore[arg-type, return-value]
        **more,
    )
    engine.placement = Placement("cpu", (), "cpu")
    return engine


def answers(engine: Tiered) -> Answers:
    assert engine.built.engine.offload is not None
    link = engine.built.engine.offload.link
    assert isinstance(link, Answers)
    return link


def recompute_s(engine: Tiered, prompt: list[int]) -> float:
    return engine.built.engine.meter.price.added_seconds(len(prompt) - 1, 0)


def lane(executor: object) -> InlineExecutor:
    assert isinstance(executor, InlineExecutor)
    return executor


def returning(model: Path) -> tuple[list[int], list[int]]:
    return returning_turn(model, LENGTH, NEW)


def truth(model: Path) -> Prefilled:
    return bare_turn(model, LENGTH, NEW)


def stored(model: Path, engine: Tiered) -> list[int]:
    first, prompt = returning(model)
    engine.run(first)
    engine.forget_pool()
    return prompt


def prefill_late(engine: Tiered, prompt: list[int], answered: int, loaded: int = 0) -> tuple[Prefilled, int]:
    """A turn whose lookup is answered, and whose loads come, when so many tokens are computed.

    Also returns how many were computed when the answer came.
    """
    lookups, fetches, inner = lane(engine.lanes.lookup), lane(engine.lanes.fetch), engine.built.engine
    lookups.held = fetches.held = True
    key, kv, done = engine.submit(prompt, logprobs=5), None, 0
    while inner.requests.open_keys():
        if not inner.has_work:
            assert inner.wake_in_s is not None, "a request waits for something that never comes"
            engine.clock.now_s += inner.wake_in_s
        engine.driver.step()
        running = inner.scheduler.running
        computed = running[0].computed if running else 0
        if computed >= answered and lookups.waiting:
            done = computed
            lookups.release()
        if computed >= loaded:
            fetches.release()
        if kv is None and computed >= len(prompt):
            kv = inner.runner.pool.gather(running[0].pages, len(prompt) - 1)
    assert kv is not None
    lookups.held = fetches.held = False
    engine.drain()
    return Prefilled(engine.driver.answers[key], kv, engine.built.info.exact, kv.dtype), done


@pytest.mark.parametrize("computed", [16, 48, 160, 330])
@pytest.mark.parametrize("tier", [None, MEET])
def test_a_late_answer_is_used_from_the_back_and_the_turn_is_the_same(
    tiny_llama: Path, tmp_path: Path, tier: tuple[float, float] | None, computed: int
) -> None:
    node = {"prices": {"cpu": tier}} if tier else {}
    engine = engine_of(tiny_llama, tmp_path, node=node, step_tokens_max=32)
    prompt = stored(tiny_llama, engine)
    returned, done = prefill_late(engine, prompt, computed)
    same(returned, truth(tiny_llama))
    receipt = receipt_of(returned.answer)
    assert receipt.missed["slow lookup"] == done // 16 * 16, "what was computed until then"
    assert receipt.missed.keys() <= {"slow lookup", "meet", "dearer to load"}
    loaded = receipt.tokens["cpu"]
    assert receipt.tokens["compute"] == len(prompt) - loaded
    if tier is None:
        assert receipt.decision == "load"
        assert loaded == LENGTH + 8 - 1 - -(-done // 16) * 16, "all but what was computed by then"
    elif computed < 100:
        assert receipt.decision == "meet"
        assert 0 < loaded < LENGTH
    assert engine.built.engine.stats().slow_lookups == {}


def test_a_late_answer_whose_load_is_late_as_well_is_hedged_and_the_turn_is_the_same(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Computing goes on into the blocks that are to come; when they come, those behind it are taken."""
    engine = engine_of(tiny_llama, tmp_path, step_tokens_max=32)
    prompt = stored(tiny_llama, engine)
    returned, _ = prefill_late(engine, prompt, 48, 176)
    same(returned, truth(tiny_llama))
    receipt = receipt_of(returned.answer)
    assert (receipt.decision, receipt.miss) == ("hedge", "late")
    assert 0 < receipt.tokens["cpu"] < LENGTH - 150


def test_an_idle_engine_begins_in_steps_that_grow_with_the_wait(tiny_llama: Path, tmp_path: Path) -> None:
    """3.5 s to compute: it waits 1.7 s, and begins after a fifth of that, if nobody else needs the engine."""
    engine = engine_of(tiny_llama, tmp_path)
    prompt = stored(tiny_llama, engine)
    inner = engine.built.engine
    lane(engine.lanes.lookup).held = True
    key = engine.submit(prompt)
    engine.driver.step()
    assert not inner.has_work, "it waits, and nothing spins meanwhile"
    began_s, wait_s = engine.clock.now_s, inner.wake_in_s
    assert wait_s == pytest.approx(0.2 * 0.5 * recompute_s(engine, prompt), rel=0.01)
    engine.clock.now_s += wait_s
    counts = []
    while not engine.driver.answers[key].finish:
        before = sum(one.computed for one in inner.scheduler.running)
        engine.driver.step()
        count = sum(one.computed for one in inner.scheduler.running) - before
        waited_s = engine.clock.now_s - began_s
        if waited_s < 1.7:
            assert 0 < count * PRICE.a_s <= waited_s
            counts.append(count)
            engine.clock.now_s += count * PRICE.a_s
    assert counts[:2] == [32, 64]
    lane(engine.lanes.lookup).release()
    engine.drain()
    assert receipt_of(engine.driver.answers[key]).miss == "slow lookup"
    assert inner.stats().misses["slow lookup"] == 1
    assert inner.stats().slow_lookups == {"node": 1}


def test_an_engine_that_others_need_computes_theirs_and_the_prompt_waits(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    prompt = stored(tiny_llama, engine)
    other = engine.submit(prompt_of(40, seed=5), max_tokens=60)
    for _ in range(3):
        engine.driver.step()
    lane(engine.lanes.lookup).held = True
    key = engine.submit(prompt)
    for _ in range(20):
        engine.driver.step()
        engine.clock.now_s += 0.05
    assert not engine.driver.answers[key].admitted
    lane(engine.lanes.lookup).release()
    engine.drain()
    assert engine.driver.answers[other].finish == {0: "length"}
    receipt = receipt_of(engine.driver.answers[key])
    assert (receipt.decision, receipt.miss) == ("load", "")


@pytest.mark.parametrize("share", [0.5, 3.0])
def test_no_request_waits_longer_than_its_own_recompute_price(
    tiny_llama: Path, tmp_path: Path, share: float
) -> None:
    """Its lookup comes at the last moment, its load does not: both are waited for so long, or as wanted."""
    engine = engine_of(tiny_llama, tmp_path, extent_bytes=16 * MIB, node={"prices": {"cpu": (1.2, 1e9)}})
    inner, offload = engine.built.engine, engine.built.engine.offload
    assert offload is not None
    offload.restores.settings = tuned(TierSettings(audit_share=0.0, lookup_share=share), hedge_factor=100.0)
    prompt = stored(tiny_llama, engine)
    lane(engine.lanes.lookup).held = lane(engine.lanes.fetch).held = True
    other = engine.submit(prompt_of(20, seed=5), max_tokens=1)  # somebody computes: the engine is not idle
    came_s = engine.clock.now_s
    key = engine.submit(prompt)
    (sequence,) = [one for one in inner.scheduler.waiting if len(one.tokens) == len(prompt)]
    assert sequence.offload_state is not None
    engine.clock.now_s = sequence.offload_state.deadline_s - 0.01
    lane(engine.lanes.lookup).release()
    while sequence.computed == 0:
        engine.driver.step()
        if not inner.has_work:
            assert inner.wake_in_s is not None
            engine.clock.now_s += inner.wake_in_s
    waited_s = engine.clock.now_s - came_s
    bound_s = max(1.0, share) * recompute_s(engine, prompt)
    assert bound_s - 0.01 < waited_s <= bound_s + 1e-6
    lane(engine.lanes.fetch).release()
    lane(engine.lanes.lookup).held = lane(engine.lanes.fetch).held = False
    engine.drain()
    assert engine.driver.answers[other].finish
    assert engine.driver.answers[key].ids == truth(tiny_llama).answer.ids


def test_a_tier_that_is_being_listed_is_asked_again_until_it_has_the_blocks(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    prompt = stored(tiny_llama, engine)
    link, inner, began_s = answers(engine), engine.built.engine, engine.clock.now_s
    asked: list[float] = []

    def not_listed(found: LookupResult) -> LookupResult:
        asked.append(round(engine.clock.now_s - began_s, 2))
        return replace(found, spans=(), tails=(), unlisted=("s3",)) if len(asked) < 5 else found

    link.change = not_listed
    key = engine.submit(prompt)
    while not engine.driver.answers[key].finish:
        engine.driver.step()
        if not inner.has_work and inner.wake_in_s is not None:
            engine.clock.now_s += inner.wake_in_s
    assert asked == [0.0, 0.02, 0.06, 0.14, 0.3]
    receipt = receipt_of(engine.driver.answers[key])
    assert (receipt.decision, receipt.miss, receipt.tokens["cpu"]) == ("load", "", LENGTH + 7)
    engine.drain()


def test_a_tier_that_is_not_listed_in_time_is_computed_around_and_named(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = engine_of(tiny_llama, tmp_path)
    prompt = stored(tiny_llama, engine)
    link, inner = answers(engine), engine.built.engine
    link.change = lambda found: replace(found, spans=(), tails=(), unlisted=("s3",))
    key = engine.submit(prompt)
    while not engine.driver.answers[key].finish:
        engine.driver.step()
        if not inner.has_work and inner.wake_in_s is not None:
            engine.clock.now_s += inner.wake_in_s
    assert receipt_of(engine.driver.answers[key]).miss == "slow lookup"
    assert inner.stats().slow_lookups == {"s3": 1}
    assert engine.driver.answers[key].ids == truth(tiny_llama).answer.ids
    engine.drain()


def test_what_is_found_of_it_in_time_is_used(tiny_llama: Path, tmp_path: Path) -> None:
    """Only the front is known by the deadline: it is loaded, and the rest is computed."""
    engine = engine_of(tiny_llama, tmp_path)
    prompt = stored(tiny_llama, engine)
    link, inner = answers(engine), engine.built.engine
    link.change = lambda found: replace(found, spans=found.spans[:1], tails=(), unlisted=("s3",))
    key = engine.submit(prompt)
    while not engine.driver.answers[key].finish:
        engine.driver.step()
        if not inner.has_work and inner.wake_in_s is not None:
            engine.clock.now_s += inner.wake_in_s
    receipt = receipt_of(engine.driver.answers[key])
    assert 0 < receipt.tokens["cpu"] < LENGTH
    assert engine.driver.answers[key].ids == truth(tiny_llama).answer.ids
    engine.drain()


def test_a_request_that_is_preempted_while_it_is_looked_up_is_served(
    tiny_llama: Path, tmp_path: Path
) -> None:
    engine = engine_of(tiny_llama, tmp_path, pool_tokens=512, step_tokens_max=32)
    prompt = stored(tiny_llama, engine)
    inner = engine.built.engine
    lane(engine.lanes.lookup).held = True
    first = engine.submit(prompt_of(100, seed=8), max_tokens=120)
    key = engine.submit(prompt)
    for _ in range(400):
        engine.driver.step()
        if not inner.has_work and inner.wake_in_s is not None:
            engine.clock.now_s += inner.wake_in_s
        inner.check_integrity()
        if engine.driver.answers[first].finish and engine.driver.answers[key].finish:
            break
    lane(engine.lanes.lookup).release()
    lane(engine.lanes.lookup).held = False
    engine.drain()
    assert engine.driver.answers[key].ids == truth(tiny_llama).answer.ids
