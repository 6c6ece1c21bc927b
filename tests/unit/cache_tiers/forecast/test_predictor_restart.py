"""A predictor that goes on with its file forecasts, and learns, as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from bench import _turn_tables as turn_tables
from bench import predictor as bench
from bench._forecast_scores import auc, brier
from samovar.cache_tiers.forecast import learner as predictor_file
from samovar.cache_tiers.forecast.features import FEATURES, LINEAGE_FEATURES, RANGED
from samovar.cache_tiers.forecast.hazard_net import HIDDEN, KNOTS_S
from samovar.cache_tiers.forecast.kaplan_meier import KINDS, KINDS_WITHOUT_ASIDE, kinds_with_aside
from samovar.cache_tiers.forecast.learner import (
    FILE_BYTES_MAX,
    VERSION,
    VERSION_OF_ONE_NETWORK,
    VERSION_WITHOUT_LINEAGES,
    VERSION_WITHOUT_TURNS,
    BadState,
    PredictorFile,
    TurnLearner,
    decode,
    encode,
    restore,
    save,
)
from samovar.cache_tiers.forecast.predictor import LINEAGE_ARRAYS, TURNS_ARRAYS, Predictor, ReplayTurns, State
from samovar.cache_tiers.forecast.turns import EDGES, EDGES_S, Curves, Turn, resume_probability
from samovar.configs.sections import PredictorSettings
from tests.support.constants import tuned
from tests.support.inside import turns_of
from tests.support.turn_streams import Rule, stream

SETTINGS = PredictorSettings()
STOPPED_S = 900.0
TURNS_MAX = 1000


class Frozen(Predictor):
    """Never learns again."""

    def restore(self, state: State) -> None:
        super().restore(state)
        for of in self._traffics.values():
            of.learn = lambda now_s: None  # type: ignore[method-assign]


def feed(predictor: Predictor, turns: Iterable[Turn]) -> Curves:
    curves = []
    for turn in turns:
        predictor.arrived(turn.session, turn.started_s)
        curves.append(predictor.ended(turn))
    predictor.check_integrity()
    return np.stack(curves)


def taught(settings: PredictorSettings = SETTINGS, end_s: float = STOPPED_S) -> Predictor:
    predictor = Predictor(settings)
    feed(predictor, (turn for turn, _ in stream(Rule(), seed=1, end_s=end_s)))
    return predictor


def later(*, seed: int = 2, seconds: float = 300.0) -> list[Turn]:
    """Of sessions that nobody has seen before."""
    end_s = STOPPED_S + seconds
    return [turn for turn, _ in stream(Rule(), seed=seed, begin_s=STOPPED_S, end_s=end_s)]


def forget_sessions(predictor: Predictor) -> None:
    """What a restart does on purpose: no session is in the file; what they have survived stays counted."""
    so_far = predictor.counts.counts_so_far()
    for session in list(predictor._sessions):
        predictor.forget(session)
    predictor.counts.counts = so_far
    for of in predictor._traffics.values():
        of.recount()  # its curves are a few turns old


def without_turns(state: State) -> State:
    return {name: state[name] for name in state.keys() - TURNS_ARRAYS - {"added"}}


EARLY = FEATURES - LINEAGE_FEATURES
RANGES = slice(*((HIDDEN + len(KNOTS_S)) * at for at in (EARLY, EARLY + RANGED)))
"""Of the weights, those of numbers by range."""
OF_GUARD = frozenset({"choices", "turn_curves"})
"""What older files do not say of it: which kinds the network forecasts, and what all kinds together said."""


def of_one_network(state: State) -> State:
    """As a version wrote it that had one network for all profiles; all turns are of one."""
    old = {name: state[name] for name in state.keys() - {"choices"}}
    old |= {name: state[name][0] for name in ("weights", "sums", "added") if name in state}
    old["weights"] = np.delete(old["weights"], RANGES, axis=1)
    counts = state["counts"][:, :KINDS]
    aside = np.arange(KINDS) % 4 == 3
    pools = [counts[:, pool].sum(axis=1) for pool in (aside, ~aside)]
    old["counts"] = np.concatenate([counts, np.stack(pools, axis=1)], axis=1)
    old["steps"], old["returns"] = state["steps"][:1], state["returns"][:1]
    old["is_trusted"] = (state["choices"][:1] == 0).astype(np.uint8)
    if "turn_curves" in old:
        old["turn_curves"] = state["turn_curves"][:, :2]
    return old


def without_lineages(state: State) -> State:
    """As a version wrote it that knew neither their features nor the kind of turn beside others."""
    state = of_one_network(state)
    kinds = kinds_with_aside(np.arange(KINDS_WITHOUT_ASIDE))
    before, late = FEATURES - LINEAGE_FEATURES, LINEAGE_FEATURES * (HIDDEN + len(KNOTS_S))
    at = before * (HIDDEN + len(KNOTS_S))
    old = {name: state[name] for name in state.keys() - LINEAGE_ARRAYS}
    old["weights"] = np.delete(state["weights"], range(at, at + late), axis=1)
    old["sums"] = state["sums"][:, :before]
    old["counts"] = state["counts"][:, [*kinds, -1]]
    if "turn_kinds" in old:
        old["turn_features"] = state["turn_features"][:, :before]
        old["turn_kinds"] = np.searchsorted(kinds, state["turn_kinds"]).astype(np.int16)
    return old


@pytest.mark.parametrize("replay_turns", [8000, 600], ids=["ring half full", "ring has gone round"])
def test_a_restarted_predictor_goes_on_bit_by_bit(tmp_path: Path, replay_turns: int) -> None:
    settings = tuned(PredictorSettings(), replay_turns=replay_turns, guard_outcomes=500)
    kept, path = taught(settings), tmp_path / "predictor.bin"
    assert kept.source == "model"
    save(path, kept)
    restarted = Predictor(settings)
    assert restore(path, restarted) is None
    forget_sessions(kept)
    restarted._rng.bit_generator.state = kept._rng.bit_generator.state  # which turns are drawn is chance
    turns = later()
    assert np.array_equal(feed(restarted, turns), feed(kept, turns))
    was, now = kept.state(), restarted.state()
    assert was.keys() == now.keys()
    assert [name for name in was if not np.array_equal(was[name], now[name])] == []


def test_a_state_is_that_of_the_predictor_which_was_given_it() -> None:
    state, again = taught().state(), Predictor(SETTINGS)
    again.restore(state)
    assert [name for name, array in again.state().items() if not np.array_equal(array, state[name])] == []
    assert len(state["turn_kinds"]) == state["added"][0, 0] > 500
    assert 0 < state["turn_is_back"].sum() < len(state["turn_is_back"]), "who is idle has survived so far"


@pytest.mark.parametrize(("name", "first"), [(bench.FILES[0], 3000), (bench.FILES[1], 4000)])
def test_a_restart_does_not_worsen_the_forecasts_of_a_recorded_trace(name: str, first: int) -> None:
    """It did: AUC .63 for .73 at 60 s (agentic), .57 for .63 (chat), less than never learning again."""
    path = bench.TRACES / name
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    table = turn_tables.read(path)
    events = [(is_end, table.turns[index], index) for _, is_end, index in table.events()]
    kept = Predictor(SETTINGS)
    split = [at for at, (is_end, _, _) in enumerate(events) if is_end][first]

    def run(predictor: Predictor, part: list[tuple[bool, Turn, int]]) -> tuple[Curves, list[int]]:
        curves, ended = np.zeros((len(part), EDGES), dtype=np.float32), []
        for is_end, turn, index in part:
            if is_end:
                curves[len(ended)] = predictor.ended(turn)
                ended.append(index)
            else:
                predictor.arrived(turn.session, turn.started_s)
        return curves[: len(ended)], ended

    run(kept, events[:split])
    data = encode(kept)
    forget_sessions(kept)
    restarted, frozen = Predictor(SETTINGS), Frozen(SETTINGS)
    for each in (restarted, frozen):
        each.restore(decode(data))
    idle_s = np.array(table.idle_s())
    areas, errors = {}, {}
    for title, predictor in {"kept": kept, "restarted": restarted, "frozen": frozen}.items():
        curves, ended = run(predictor, events[split : split + 2 * TURNS_MAX])
        for horizon_s in (60.0, 300.0):
            said = resume_probability(curves, np.zeros(len(curves)), horizon_s)
            came_back = idle_s[ended] <= horizon_s
            areas[title, horizon_s] = auc(said, came_back) or 0.0
            errors[title, horizon_s] = brier(said, came_back)
    for horizon_s in (60.0, 300.0):
        for other in ("kept", "frozen"):
            # A file has the latest turns alone. Measured: .02 less area at most, 2.1 % more error.
            assert areas["restarted", horizon_s] >= areas[other, horizon_s] - 0.025, (areas, errors)
            assert errors["restarted", horizon_s] <= 1.025 * errors[other, horizon_s], (areas, errors)


def old_file(predictor: Predictor, monkeypatch: pytest.MonkeyPatch, version: int) -> bytes:
    model = predictor.traffic().model
    for weights in (model.weights, model.average, *model.moments):
        weights[RANGES] = 0.0
    state = predictor.state()
    state = of_one_network(state) if version == VERSION_OF_ONE_NETWORK else without_lineages(state)
    if version == VERSION_WITHOUT_TURNS:
        state = without_turns(state)
    with monkeypatch.context() as patched:
        patched.setattr(predictor_file, "VERSION", version)
        patched.setattr(Predictor, "state", lambda _: state)
        return encode(predictor)


def test_an_older_file_is_read_and_learning_waits_until_there_is_enough_to_learn_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, path = taught(), tmp_path / "predictor.bin"
    path.write_bytes(old_file(before, monkeypatch, VERSION_WITHOUT_TURNS))
    restarted = Predictor(tuned(PredictorSettings(), learning_turns_min=300))
    assert restore(path, restarted) is None
    steps = restarted.learned_steps
    assert steps == before.learned_steps > 0
    assert restarted.source == "model"
    turns = later()
    feed(restarted, turns[:300])
    assert restarted.learned_steps == steps, "steps on a handful of turns would undo what was learned"
    feed(restarted, turns[300:400])
    assert restarted.learned_steps == steps + 100, "one an arrival: it is not young"


@pytest.mark.parametrize("version", [VERSION_OF_ONE_NETWORK, VERSION_WITHOUT_LINEAGES])
def test_an_older_file_with_its_turns_is_read_as_if_it_were_of_today(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int
) -> None:
    before, path = taught(), tmp_path / "predictor.bin"
    path.write_bytes(old_file(before, monkeypatch, version))
    restarted = Predictor(SETTINGS)
    assert restore(path, restarted) is None
    was, now = before.state(), restarted.state()
    assert {name for name in was if not np.array_equal(was[name], now[name])} <= OF_GUARD | {"counts"}
    assert np.array_equal(was["counts"][:, :KINDS], now["counts"][:, :KINDS])
    assert np.allclose(was["counts"], now["counts"], rtol=1e-3), "pools are the sums of their kinds"
    forget_sessions(before)
    turn = later()[0]
    assert np.allclose(restarted.ended(turn), before.ended(turn), rtol=1e-3)


@pytest.mark.parametrize("turns", [True, False], ids=["with turns", "without any"])
def test_a_file_whose_bins_end_after_a_day_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turns: bool
) -> None:
    before, path, edges = taught(tuned(SETTINGS, saved_turns=8000 * turns)), tmp_path / "predictor.bin", 18
    state = before.state()
    state |= {"counts": state["counts"][..., : edges - 1], "turn_curves": state["turn_curves"][..., :edges]}
    with monkeypatch.context() as patched:
        patched.setattr(predictor_file, "EDGES_S", EDGES_S[:edges])
        patched.setattr(Predictor, "state", lambda _: state)
        path.write_bytes(encode(before))
    restarted = Predictor(SETTINGS)
    assert restore(path, restarted) is None
    restarted.check_integrity()
    forget_sessions(before)
    turn = later()[0]
    assert np.array_equal(restarted.ended(turn), before.ended(turn))
    feed(restarted, later()[1:50])


def test_a_file_with_other_bins_is_put_aside_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "predictor.bin"
    with monkeypatch.context() as patched:
        patched.setattr(predictor_file, "EDGES_S", EDGES_S[:-1] * 2)
        path.write_bytes(encode(taught(end_s=100.0)))
    file = PredictorFile(lambda predictor: restore(path, predictor), lambda _: None, 60.0)  # type: ignore[arg-type]
    learner = TurnLearner(lambda: Predictor(SETTINGS), queue_max=10, clock=lambda: 0.0, file=file)
    learner.arrived("a", 0.0)
    learner.work()
    assert [record.message for record in caplog.records] == [
        "the predictor's file is not used, it starts without data: other bins of idle time"
    ]


def test_what_the_file_held_is_said_once_it_is_read() -> None:
    """Found by the world, seed 10000118: a node that joined meanwhile asked nobody else."""
    said: list[str] = []

    def restored(_: object) -> str:
        said.append(learner.restored)
        return "no file"

    file = PredictorFile(restored, lambda _: None, 60.0)
    learner = TurnLearner(lambda: Predictor(SETTINGS), queue_max=10, clock=lambda: 0.0, file=file)
    assert learner.learned(1.0) == b""
    assert said == [""]
    assert learner.restored == "no file"


def test_a_file_that_makes_reading_it_fail_is_not_read_again() -> None:
    reads: list[object] = []

    def fails(predictor: object) -> str:
        reads.append(predictor)
        raise RuntimeError("planted")

    file = PredictorFile(fails, lambda _: None, 60.0)
    learner = TurnLearner(lambda: Predictor(SETTINGS), queue_max=10, clock=lambda: 0.0, file=file)
    assert learner.learned(1.0) == learner.learned(1.0) == b""
    assert (len(reads), learner.restored, learner.failures) == (1, "rejected", 1)


def test_a_version_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = taught(end_s=100.0)
    for version in (1, VERSION + 1):
        monkeypatch.setattr(predictor_file, "VERSION", version)
        data = encode(predictor)
        monkeypatch.undo()
        with pytest.raises(BadState, match=f"version {version}"):
            decode(data)


def test_where_no_turns_are_saved_learning_waits_and_a_young_predictor_does_not() -> None:
    settings = tuned(PredictorSettings(), saved_turns=0, learning_turns_min=200)
    restarted = Predictor(settings)
    restarted.restore(decode(encode(taught(settings))))
    steps = restarted.learned_steps
    feed(restarted, later()[:200])
    assert restarted.learned_steps == steps
    young = Predictor(SETTINGS)
    young.restore(decode(encode(taught(end_s=60.0))))  # all turns that there ever were
    steps = young.learned_steps
    feed(young, later()[:10])
    assert young.learned_steps == steps + 20


def test_other_settings_than_it_was_saved_with_take_the_newest_turns() -> None:
    state = taught().state()
    small = Predictor(tuned(PredictorSettings(), replay_turns=64, guard_outcomes=50))
    small.restore(state)
    rows = turns_of(small).latest(64)
    assert np.array_equal(turns_of(small).features(rows), state["turn_features"][-64:])
    feed(small, later()[:100])
    large = Predictor(tuned(PredictorSettings(), replay_turns=20_000, saved_turns=40_000))
    large.restore(state)
    assert len(turns_of(large)) == len(state["turn_kinds"])
    feed(large, later()[:100])


def put(name: str, value: float) -> State:
    predictor = taught(end_s=100.0)
    predictor.lineages.ratios.restore(np.array([3, 7], dtype=np.uint64), np.ones((2, 3)))
    state = predictor.state()
    state[name] = state[name].copy()
    state[name].flat[state[name].size // 2] = value
    return state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (lambda: put("turn_features", np.nan), "turn_features: not within"),
        (lambda: put("turn_features", 1e9), "turn_features: not within"),
        (lambda: put("turn_curves", np.inf), "turn_curves: not within"),
        (lambda: put("turn_curves", -900.0), "a curve that rises"),
        (lambda: put("turn_kinds", KINDS), "turn_kinds: not within"),
        (lambda: put("turn_kinds", -1), "turn_kinds: not within"),
        (lambda: put("turn_idle_s", -1.0), "turn_idle_s: not within"),
        (lambda: put("turn_idle_s", np.nan), "turn_idle_s: not within"),
        (lambda: put("turn_is_back", 2), "turn_is_back: not within"),
        (lambda: put("added", 2**62), "added: beyond reason"),
        (lambda: put("added", 2**40), "more turns were judged"),
        (lambda: {**put("added", 0), "added": np.eye(5, 3, dtype=np.int64) * [3, 0, 0]}, r"turns of \[3"),
        (lambda: {**put("added", 0), "turn_kinds": np.zeros(5, np.int16)}, "turn_curves|turn_features"),
        (lambda: {**put("added", 0), "turn_kinds": np.array(5, np.int16)}, "turn_"),
        (lambda: {**put("added", 0), "turn_idle_s": np.zeros(9, np.float32)}, "turn_idle_s: float32"),
        (lambda: put("ratio_counts", np.nan), "ratio_counts: negative, or beyond"),
        (lambda: put("ratio_counts", -1.0), "ratio_counts: negative, or beyond"),
        (lambda: {**put("added", 0), "ratio_cells": np.array([7, 7], np.uint64)}, "ratio_cells: not one row"),
        (lambda: {**put("added", 0), "ratio_counts": np.zeros((3, 3))}, "ratio_counts: float64"),
        (lambda: put("left", 9.0), "more branches were regained"),
        (lambda: {k: v for k, v in put("added", 0).items() if k != "left"}, "other arrays"),
        (lambda: {k: v for k, v in put("added", 0).items() if k != "turn_kinds"}, "other arrays"),
        (lambda: {k: v for k, v in put("added", 0).items() if k != "added"}, "other arrays"),
    ],
)
def test_turns_that_cannot_be_are_refused_and_nothing_has_changed(state: object, reason: str) -> None:
    predictor = Predictor(SETTINGS)
    before = predictor.state()
    with pytest.raises(ValueError, match=reason):
        predictor.restore(state())  # type: ignore[operator]
    assert all(np.array_equal(array, before[name]) for name, array in predictor.state().items())
    assert len(turns_of(predictor)) == 0


def test_the_largest_file_that_settings_allow_may_be_read() -> None:
    settings = tuned(PredictorSettings(), replay_turns=40_000, saved_turns=40_000)
    predictor = Predictor(settings)
    turns, curve = turns_of(predictor), np.zeros(EDGES, dtype=np.float32)
    assert isinstance(turns, ReplayTurns)
    for number in range(40_000):
        turns.add(np.zeros(turns._features.shape[1], dtype=np.float32), 0, [curve] * 3, float(number))
    data = encode(predictor)
    assert len(data) < FILE_BYTES_MAX
    Predictor(settings).restore(decode(data))


def test_what_has_not_changed_is_not_written_again() -> None:
    now_s = 0.0
    writes: list[object] = []
    file = PredictorFile(lambda _: "no file", writes.append, 60.0)
    learner = TurnLearner(lambda: Predictor(SETTINGS), queue_max=10, clock=lambda: now_s, file=file)
    for _ in range(5):
        now_s += 61.0
        learner.work()
    assert not writes
    learner.arrived("a", now_s)
    learner.work()
    assert len(writes) == 1
    now_s += 59.0
    learner.arrived("a", now_s)
    learner.work()
    assert len(writes) == 1, "once a minute"
    for _ in range(3):
        now_s += 61.0
        learner.work()
    assert len(writes) == 2
