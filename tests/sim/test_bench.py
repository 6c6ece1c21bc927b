"""The benchmarks of policies and prefetch: what they read into a trace, and that their bars can be missed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import _report, policy, prefetch
from bench.policy import Row, broken_bars
from samovar.cluster.plan.traces.replay import ended_s, next_starts_s
from tests.support.traffic import made


def rows(trace: str, tokens: int, **rates: float) -> list[Row]:
    return [Row(trace, name, tokens, rate) for name, rate in rates.items()]


def test_bars_that_hold_are_not_reported() -> None:
    good = rows("chat", 2_560_000, lru=0.12, learned=0.17, oracle=0.3)
    assert list(broken_bars(good + rows("agentic", 2_048_000, lru=0.74, learned=0.765, oracle=0.8))) == []


@pytest.mark.parametrize(
    ("missed", "words"),
    [
        (rows("chat", 2_560_000, lru=0.12, learned=0.15), "1.35 x LRU"),
        (rows("agentic", 2_048_000, lru=0.74, learned=0.755), "+ 0.02"),
        (rows("chat", 512_000, lru=0.05, learned=0.047), "< LRU"),
        (rows("agentic", 1_024_000, learned=0.5, oracle=0.49), "> oracle"),
    ],
)
def test_a_bar_that_is_missed_is_reported(missed: list[Row], words: str) -> None:
    (said,) = broken_bars(missed)
    assert words in said


def test_policy_bench_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "OUT_DIR", tmp_path)
    path = tmp_path / "made.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for turn in made(150):
            row = {
                "timestamp": round(turn.started_s * 1000),
                "input_length": turn.input_tokens,
                "output_length": turn.output_tokens,
                "hash_ids": turn.blocks,
            }
            file.write(json.dumps(row) + "\n")
    monkeypatch.setenv("TRACE", str(path))
    assert policy.main(["--blocks", "100,400", "--jobs", "2"]) == 0
    found = json.loads((tmp_path / "policy.json").read_text())["rows"]
    assert {(row["policy"], row["cache_tokens"]) for row in found} == {
        (name, blocks * 512) for name in policy.POLICIES for blocks in (100, 400)
    }
    assert all(row["trace"] == "chat" and 0 <= row["hit_rate"] <= 1 for row in found)


def test_learned_is_never_below_lru_for_people_with_a_daily_rhythm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was by a tenth of all hits, from a quarter of all blocks on: beyond a day LRU went backwards."""
    monkeypatch.setattr(_report, "OUT_DIR", tmp_path)
    monkeypatch.setattr(policy, "RHYTHM_TURNS", 6000)
    monkeypatch.setattr(policy, "RHYTHM_SHARES", (0.25, 0.5))
    assert policy.main(["--trace", "rhythm", "--policies", "lru,learned", "--jobs", "1"]) == 0
    document = json.loads((tmp_path / "policy.json").read_text())
    assert document["below_the_bar"] == []
    rates = {(row["trace"], row["policy"], row["cache_tokens"]): row["hit_rate"] for row in document["rows"]}
    quarter, half = sorted({tokens for *_, tokens in rates})
    assert rates["rhythm, kept 30 days", "learned", quarter] > 1.05 * rates["rhythm", "learned", quarter]
    assert rates["rhythm, kept 30 days", "lru", half] > 1.05 * rates["rhythm", "lru", half], "past a weekend"


def test_hints_come_before_the_return_and_after_the_turn() -> None:
    turns = made(600)
    hints = prefetch.hints_of(turns, 0.5, 5.0)
    next_s = next_starts_s(turns)
    returns = sum(at_s < float("inf") for at_s in next_s)
    assert 0.3 * returns < len(hints) < 0.7 * returns
    for number, (at_s,) in hints.items():
        assert ended_s(turns[number]) < at_s
        assert at_s <= max(next_s[number] - 5.0, ended_s(turns[number]) + 0.1)


@pytest.mark.slow
def test_waste_meter_switches_guessing_off_where_nobody_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace made to fool it: without the meter several times as much is brought up for nothing."""
    monkeypatch.setattr(prefetch, "_subject", prefetch.load("fooling", 60_000, turns=2000))
    for way in ("hazard", "hazard unmetered"):
        fewer = prefetch.SETTINGS[way].model_copy(update={"accuracy_window": 20})
        monkeypatch.setitem(prefetch.SETTINGS, way, fewer)
    metered, unmetered = prefetch.measure("hazard"), prefetch.measure("hazard unmetered")
    assert not metered["hazard_on"]
    assert unmetered["hazard_on"]
    assert float(str(metered["guessed_gib"])) < 0.7 * float(str(unmetered["guessed_gib"]))
