"""F29, F30 in a node and an engine: a predictor that is wrong in any way costs forecasts, never a request."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.forecast import learner as predictor_file
from samovar.cache_tiers.forecast.learner import FAILURES_MAX
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import COLD, EDGES, Curves, Hint, Opening, SessionKey, Turn
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import Lookup, LookupResult
from samovar.cache_tiers.node import resumption as node_returns
from samovar.configs.sections import PredictorSettings, PrefetchSettings, TierSettings
from tests.support.constants import tuned
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import Tiered, tiered
from tests.support.inside import idle_in, learner_of
from tests.support.nodes.node_harness import MIB, SESSION, TENANT, Bench, Sample, bench, nvme, sample
from tests.unit.cache_tiers.node.test_resumption import Foretells, begin, over

OWNER = bytes(32)


def turns(node: Bench, count: int = 1, *, is_checked: bool = True) -> list[Curves | None]:
    wanted = sample(1)
    curves = []
    for _ in range(count):
        begin(node, wanted, is_checked=is_checked)
        forecast = node.node.resumption.turn_over(over(wanted))
        curves.append(None if forecast is None else forecast.curve)
    return curves


class Fails(Foretells):
    """It raises at one method, while `fails`."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.fails = True

    def _at(self, method: str) -> None:
        if self.fails and self.at == method:
            raise FloatingPointError("not a number")

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
        self._at("arrived")

    def ended(self, turn: Turn) -> Curves:
        self._at("ended")
        return super().ended(turn)

    def hint(self, hint: Hint) -> Curves | None:
        self._at("hint")
        return super().hint(hint)

    def forget(self, session: SessionKey) -> None:
        self._at("forget")


def learned(path: Path) -> bytes:
    predictor = Predictor(PredictorSettings())
    for number in range(50):
        predictor.arrived(b"a", number * 10.0)
        predictor.ended(Turn(b"a", number * 10.0, number * 10.0 + 1, 100, 10))
    predictor_file.save(path, predictor)
    return path.read_bytes()


@pytest.mark.parametrize("how", ["garbage", "empty", "truncated", "one bit", "a directory"])
def test_f29_a_bad_file_is_refused_and_the_node_starts_cold(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "predictor.bin"
    good = learned(path)
    path.unlink()
    if how == "a directory":
        path.mkdir()
    else:
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 16
        path.write_bytes(
            {"garbage": b"\xff" * 5000, "empty": b"", "truncated": good[:-9], "one bit": bytes(flipped)}[how]
        )
    node = bench([HeapTier(MIB)], predictor_path=path)
    with caplog.at_level(logging.WARNING):
        (curve,) = turns(node)
    assert curve is not None
    assert np.array_equal(curve, COLD)
    stats = node.node.stats().returns
    assert stats.predictor == "cold"
    assert stats.failures == 1
    assert stats.restored not in ("", "restored", "no file")
    assert "starts without data" in caplog.text
    node.node.close()
    if how != "a directory":  # a good file takes its place
        again = bench([HeapTier(MIB)], predictor_path=path)
        turns(again)
        assert again.node.stats().returns.restored == "restored"


def test_f29_where_it_cannot_be_saved_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "file" / "predictor.bin"
    path.parent.write_text("no directory")
    node = bench([HeapTier(MIB)], predictor_path=path)
    turns(node)
    node.clock.now_s += 1e4
    assert turns(node)[0] is not None
    node.node.close()
    stats = node.node.stats().returns
    assert stats.saves == 0
    assert stats.failures >= 2


@pytest.mark.parametrize("at", ["arrived", "ended", "hint", "forget"])
def test_f29_a_predictor_that_raises_starts_anew_and_at_last_is_off(tmp_path: Path, at: str) -> None:
    made: list[Fails] = []

    def make() -> Fails:
        made.append(Fails(at))
        return made[-1]

    node, wanted = bench([HeapTier(MIB)], make_predictor=make), sample(1)
    assert node.store(wanted) == "taken"
    for _ in range(FAILURES_MAX + 3):
        (curve,) = turns(node)
        assert at in ("hint", "forget", "arrived") or curve is None
        node.node.resumption.hint(TENANT, SESSION, "typing", None)
        learner_of(node.node.resumption).forget(OWNER)
        node.node.resumption.work()
        assert node.load(wanted) is not None, "the tiers go on"
    stats = node.node.stats().returns
    assert stats.failures >= FAILURES_MAX
    assert len(made) >= FAILURES_MAX
    if at == "ended" and stats.predictor.startswith("off"):
        assert turns(node) == [None]
    node.node.check_integrity()


def test_f29_after_failures_in_a_row_nobody_asks_it_any_more(tmp_path: Path) -> None:
    class Broken(Fails):
        def _at(self, method: str) -> None:
            raise ValueError(method)

    node = bench([HeapTier(MIB)], make_predictor=lambda: Broken(""))
    turns(node, FAILURES_MAX)
    stats = node.node.stats().returns
    assert stats.predictor == f"off: failed {FAILURES_MAX} times in a row"
    assert stats.failures == FAILURES_MAX
    assert turns(node, 3) == [None] * 3
    assert node.node.stats().returns.failures == FAILURES_MAX
    sessions = idle_in(node.node.resumption)
    assert np.array_equal(sessions.curves[sessions.slot(TENANT + SESSION)], COLD), "then it is by recency"


def test_f29_a_predictor_that_hangs_holds_up_no_lookup_and_its_queue_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_returns, "ANSWER_S_MAX", 0.02)
    monkeypatch.setattr(node_returns, "CLOSE_S_MAX", 0.02)
    goes_on, hangs = threading.Event(), threading.Event()

    class Hangs(Foretells):
        def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
            hangs.set()
            goes_on.wait(30)

    settings = TierSettings(predictor=tuned(PredictorSettings(), queue_max=5))
    node = bench([HeapTier(MIB)], settings=settings, make_predictor=Hangs, workers=1)
    wanted = sample(1)
    node.offer(wanted)
    begin(node, wanted, is_checked=False)
    assert hangs.wait(10)
    assert turns(node, 20, is_checked=False) == [None] * 20, "lookups and turns' ends while it hangs"
    stats = node.node.stats().returns
    assert stats.dropped >= 30
    sessions = idle_in(node.node.resumption)
    assert sessions.running[sessions.slot(TENANT + SESSION)] == 1  # of the first of all
    node.node.close()  # not held up either
    goes_on.set()


def test_f29_curves_that_are_none_harm_nobody(tmp_path: Path) -> None:
    """Not a number, everywhere: ranks are as they may be, but nothing raises, and every request is served."""

    class Nans(Foretells):
        def ended(self, turn: Turn) -> Curves:
            return np.full(EDGES, np.nan, dtype=np.float32)

    node = bench([HeapTier(64 * 1024), nvme(tmp_path)], make_predictor=Nans, bytes_max=64 * 1024)
    for number in range(30):
        wanted = sample(number, session=b"%016d" % number)
        assert node.store(wanted) in ("taken", "refused:full")
        begin(node, wanted)
        node.node.resumption.turn_over(over(wanted))
        node.node.tick()
        node.work()
    node.node.check_integrity()


def storm(path: Path, prefetch: PrefetchSettings, sessions: int) -> tuple[Bench, list[Sample]]:
    node = bench(
        [HeapTier(16 * MIB), nvme(path, 16 * MIB)],
        bytes_max=16 * MIB,
        settings=TierSettings(prefetch=prefetch),
        make_predictor=lambda: Foretells(0.6),
    )
    samples = [
        sample(number, session=b"%016d" % number, placement=Placement(first="nvme", write_behind=()))
        for number in range(sessions)
    ]
    for wanted in samples:
        node.offer(wanted)
        while node.node.work():
            pass
    return node, samples


def test_f30_a_storm_of_returns_stays_within_budget_and_bytes_in_flight(tmp_path: Path) -> None:
    one = sample(0).record.nbytes
    prefetch = tuned(
        PrefetchSettings(by_hazard=True, bytes_per_s_max=3 * one, inflight_bytes_max=4 * one, at_pause=False),
        burst_s=2.0,
        holdout_share=0.0,
    )
    node, samples = storm(tmp_path, prefetch, 150)
    for wanted in samples:
        begin(node, wanted, is_checked=False)
        node.node.resumption.turn_over(over(wanted))
    started_s = node.clock.now_s
    rng = random.Random(7)
    for _ in range(30):
        node.node.tick()
        stats = node.node.stats().returns.prefetch
        assert stats.moving <= prefetch.inflight_bytes_max
        seconds = node.clock.now_s - started_s
        assert stats.started.get("hazard", 0) <= prefetch.bytes_per_s_max * (seconds + prefetch.burst_s)
        for _ in range(rng.randrange(6)):
            node.node.work()
        assert node.load(rng.choice(samples)) is not None, "demand"
        node.clock.now_s += rng.choice([0.0, 0.5, 1.0])
        node.node.check_integrity()
    assert node.node.stats().returns.prefetch.started["hazard"] > 10 * one


def test_f30_a_storm_of_hints_and_queued_requests_is_bounded_in_bytes(tmp_path: Path) -> None:
    one = sample(0).record.nbytes
    prefetch = PrefetchSettings(bytes_per_s_max=0, inflight_bytes_max=5 * one)
    node, samples = storm(tmp_path, prefetch, 100)
    moved = 0
    for number, wanted in enumerate(samples):
        if number % 2:
            begin(node, wanted, is_queued=True, is_checked=False)
        else:
            node.node.resumption.prefetch.promote(TENANT, wanted.header.session, "hint")
        assert node.node.stats().returns.prefetch.moving <= 5 * one
        if number % 10 == 9:
            while node.node.work():
                moved += 1
    assert moved == 50, "five at a time"
    node.node.check_integrity()


# -- with an engine ------------------------------------------------------------------------


def two_turns(engine: Tiered) -> list[list[int]]:
    prompt = prompt_of(60, seed=5)
    first = engine.run(prompt)
    engine.forget_pool()
    second = engine.run([*prompt, *first.ids, *prompt_of(9, seed=1)])
    return [first.ids, second.ids]


def test_f29_answers_are_the_same_with_a_broken_predictor(tiny_llama: Path, tmp_path: Path) -> None:
    whole = two_turns(tiered(tiny_llama, tmp_path / "whole"))
    for at in ("arrived", "ended"):
        broken = tiered(tiny_llama, tmp_path / at, node={"make_predictor": lambda at=at: Fails(at)})
        assert two_turns(broken) == whole
        outcomes = broken.built.engine.offload.reporter.outcomes  # type: ignore[union-attr]
        assert outcomes == ({"no forecast": 2} if at == "ended" else {"forecast": 2})


def test_the_pool_hears_what_the_node_foretells(tiny_llama: Path, tmp_path: Path) -> None:
    engine = tiered(tiny_llama, tmp_path, node={"make_predictor": lambda: Foretells(0.3)})
    key = engine.submit(prompt_of(60, seed=5), max_tokens=3)
    pool = engine.built.engine.scheduler.pool
    assert pool.sessions.running[pool.sessions.slot(OWNER)] == 1
    engine.drain()
    slot = pool.sessions.slot(OWNER)
    assert engine.driver.answers[key].finish == {0: "length"}
    assert pool.sessions.running[slot] == 0
    assert pool.sessions.tokens[slot] == 63
    assert np.array_equal(pool.sessions.curves[slot], Foretells(0.3).ended(None))  # type: ignore[arg-type]
    node_sessions = idle_in(engine.node.resumption)
    assert node_sessions.running[node_sessions.slot(OWNER)] == 0


@pytest.mark.parametrize("choices", [1, 3])
def test_who_hangs_up_is_gone_and_not_running(tiny_llama: Path, tmp_path: Path, choices: int) -> None:
    foretells = Foretells()
    engine = tiered(tiny_llama, tmp_path, node={"make_predictor": lambda: foretells})
    key = engine.submit(prompt_of(60, seed=5), n=choices, max_tokens=50)
    for _ in range(4):
        engine.driver.step()
    engine.built.engine.requests.abort(key)
    engine.work()
    turns_heard = [turn for turn in foretells.heard if isinstance(turn, Turn)]
    assert [turn.stop for turn in turns_heard] == ["gone"]
    pool = engine.built.engine.scheduler.pool
    assert pool.sessions.running[pool.sessions.slot(OWNER)] == 0


def test_several_choices_are_one_turn(tiny_llama: Path, tmp_path: Path) -> None:
    foretells = Foretells()
    engine = tiered(tiny_llama, tmp_path, node={"make_predictor": lambda: foretells})
    engine.run(prompt_of(40, seed=5), n=3, max_tokens=4, temperature=1.0, seed=1)
    assert len([turn for turn in foretells.heard if isinstance(turn, Turn)]) == 1


def test_f29_a_node_that_does_not_answer_is_no_longer_told(tiny_llama: Path, tmp_path: Path) -> None:
    engine = tiered(tiny_llama, tmp_path)
    held = engine.lanes.returns
    held.held = True  # type: ignore[attr-defined]
    for number in range(70):
        engine.run(prompt_of(20, seed=number), max_tokens=1)
    reporter = engine.built.engine.offload.reporter  # type: ignore[union-attr]
    assert reporter.outcomes == {"not reported": 6}
    held.release()  # type: ignore[attr-defined]
    engine.work()
    assert reporter.outcomes == {"not reported": 6, "forecast": 64}
    reporter.check_integrity()
    reporter._waiting = -1
    with pytest.raises(AssertionError):
        reporter.check_integrity()


def test_a_request_that_finds_no_place_is_said_to_be_queued(tiny_llama: Path, tmp_path: Path) -> None:
    engine = tiered(tiny_llama, tmp_path, sequences_max=1, n_max=1)
    seen: list[bool] = []
    looked_up = engine.node.resumption.looked_up

    def notes(lookup: Lookup, found: LookupResult) -> None:
        seen.append(lookup.is_queued)
        looked_up(lookup, found)

    engine.node.resumption.looked_up = notes  # type: ignore[method-assign]
    engine.submit(prompt_of(30, seed=1))
    engine.submit(prompt_of(30, seed=2), session=b"2" * 16)
    engine.drain()
    assert seen == [False, True]
