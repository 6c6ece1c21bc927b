"""`bench.predictor`: what it reads and reckons, and the bars on the recorded chat."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from bench import _turn_tables as turn_tables
from bench import predictor as bench
from bench._forecast_scores import auc, brier, censored_ece, ece
from bench._trace_patterns import Patterns
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.configs.sections import PredictorSettings

CHAT = (
    "session,turn,t_s,input_tokens,output_tokens,shared_depth_blocks512,idle_after_s\n"
    "a,0,0.0,20000,100,0,50\n"
    "b,0,1.0,1000,10,0,\n"
    "a,1,54.0,2000,10,1,\n"
)
AGENTIC = (
    "session,is_subagent,turn,t,input_tokens,output_tokens,input_types,stop,api_s,lcp_blocks64_prev\n"
    "s,False,0,0.0,64000,100,text,tool_use,5.0,0\n"
    "s,False,1,9.0,64000,100,tool_result,,,999\n"
    "s,False,2,10.0,64000,100,text,end_turn,5.0,1000\n"
)


def test_a_chat_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "chat.csv.gz"
    path.write_bytes(gzip.compress(CHAT.encode()))
    table = turn_tables.read(path)
    assert table.kind == "chat"
    assert [turn.session for turn in table.turns] == ["a", "b", "a"]
    assert table.turns[0].ended_s == pytest.approx(100 * 0.03 + 1.0)
    assert table.turns[2].kept_tokens == 512
    assert table.idle_s() == pytest.approx([50.0, np.inf, np.inf])
    assert [index for _, _, index in table.events()][:2] == [0, 1]


def test_an_agentic_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "agentic.csv"
    path.write_text(AGENTIC)
    first, second, third = turn_tables.read(path, seed=1).turns
    assert (first.stop, first.role, first.profile) == ("tool_calls", "user", "code")
    assert (second.stop, second.role) == ("stop", "tool")
    assert second.ended_s == third.started_s, "a turn is over when the session's next one begins"
    assert third.started_s - first.started_s == pytest.approx(10.0)
    assert third.kept_tokens == 64000


def test_what_is_sent_beside_conversations_is_learned_from_and_not_scored(tmp_path: Path) -> None:
    path = tmp_path / "chat.csv.gz"
    path.write_bytes(gzip.compress(CHAT.encode()))
    table = turn_tables.read_beside(path, Patterns(side=1.0))
    main = [turn for index, turn in enumerate(table.turns) if index not in table.beside]
    assert [turn.input_tokens for turn in main] == [20000, 1000, 2000]
    assert main[0].session == main[2].session
    assert len(table.turns) == 12
    assert len({turn.session for turn in table.turns}) == 2 + 9  # each a lineage of its own
    assert not bench.scored_turns(table)[list(table.beside)].any()


def test_another_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="another schema"):
        turn_tables.read(path)
    assert bench.main(["--trace", str(tmp_path / "nothing.csv")]) == 2


def test_scores_are_what_they_are_called() -> None:
    forecasts, came_back = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
    assert auc(forecasts, came_back) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert ece(forecasts, came_back) == pytest.approx((0.1 + 0.2 + 0.2) / 4)
    assert brier(forecasts, came_back) == pytest.approx((0.01 + 0.36 + 0.16 + 0.04) / 4)
    assert auc(forecasts, np.ones(4, dtype=bool)) is None
    assert ece(np.zeros(0), np.zeros(0, dtype=bool)) is None


def test_turns_that_were_not_seen_long_enough_count_until_then() -> None:
    """What is known of them makes the error smaller by chance, and no different otherwise."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        forecasts = rng.uniform(0.1, 0.6, 1000)
        hazard = -np.log1p(-forecasts) / 300.0
        idle_s, seen_s = rng.exponential(1.0 / hazard), rng.uniform(0.0, 600.0, 1000)
        whole = seen_s >= 300.0
        error, chance = censored_ece(forecasts, idle_s, seen_s, 300.0) or (1.0, 1.0)
        found.append([error, chance, ece(forecasts[whole], idle_s[whole] <= 300.0) or 1.0])
    error, chance, of_whole = np.mean(found, axis=0)
    assert error == pytest.approx(chance, rel=0.1)
    assert error < 0.95 * of_whole
    wrong, _ = censored_ece(forecasts + 0.2, idle_s, seen_s, 300.0) or (0.0, 0.0)
    assert wrong == pytest.approx(0.2, abs=0.05)
    seen_s = np.full(1000, 900.0)
    assert (censored_ece(forecasts, idle_s, seen_s, 300.0) or (0.0,))[0] == pytest.approx(
        ece(forecasts, idle_s <= 300.0)
    )
    assert censored_ece(forecasts, idle_s, np.full(1000, 200.0), 300.0) is None


def test_the_bars_fire() -> None:
    row = {"trace": "chat", "model": "learned", "horizon_s": 300, "auc": 0.7, "ece": 0.01}
    good = {**row, "us_per_prediction": 40.0}
    assert bench.missed([good], 300.0) == []
    bad = [
        {**good, "auc": 0.6},
        {**good, "auc": None},
        {**good, "ece": 0.05},
        {**good, "us_per_prediction": 60.0},
    ]
    assert [len(bench.missed([each], 300.0)) for each in bad] == [1, 1, 1, 1]
    assert len(bench.missed([good], 900.0)) == 1


def test_who_comes_back_to_the_recorded_chat_is_forecast() -> None:
    path = bench.TRACES / bench.FILES[0]
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    table = turn_tables.read(path)
    curves, _ = bench.replay(table, Predictor(PredictorSettings()), "chat")
    (row,) = (row for row in bench.score(table, "learned", curves, 0.0) if row["horizon_s"] == 300)
    assert row["auc"] >= bench.AUC_MIN["chat"]
    assert row["ece"] <= bench.ECE_MAX
