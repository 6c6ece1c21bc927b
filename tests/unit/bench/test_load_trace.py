"""The stages of a return are those that its pieces passed, and `bench.loadpath` prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import _report as report
from bench import loadpath
from bench._gpu_model import TINY
from bench._load_trace import STAGES, Passed, trace_of
from samovar.cache_tiers.pricing.meters import PrefillMeter, PrefillPrice
from samovar.replicas.scheduling.sequence import Restore, RestorePiece


def test_stages_are_told_since_the_request_and_summed_over_pieces() -> None:
    pieces = [
        RestorePiece(
            0, 8, "cpu", 1, "placed", 8, begun_s=10.1, fetched_s=10.2, arrived_s=10.4, landed_s=10.5
        ),
        RestorePiece(
            8, 16, "cpu", 1, "placed", 16, begun_s=10.2, fetched_s=10.3, arrived_s=10.6, landed_s=10.8
        ),
        RestorePiece(16, 24, "cpu", 1, "overtaken"),
    ]
    restore = Restore(pieces, 8, "load", True, started_s=10.05, hedge_at_s=11.0, placed_s=10.85)
    told = list(trace_of(restore, 10.0, 11.0))
    assert tuple(one.stage for one in told) == STAGES
    verified = told[STAGES.index("verified")]
    assert verified == Passed(
        "verified",
        2,
        pytest.approx(0.2),
        pytest.approx(0.6),
        pytest.approx(0.5),  # type: ignore[arg-type]
    )
    waited = told[STAGES.index("waited for the engine")]
    assert (waited.first_s, waited.last_s) == (pytest.approx(0.8), pytest.approx(0.85))
    assert told[-1].last_s == pytest.approx(1.0)


def test_a_return_of_this_machine_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "OUT_DIR", tmp_path)
    monkeypatch.setattr(loadpath, "THIN", TINY)
    dear = PrefillPrice(0.0, 1.0, 0.0)  # loading pays, however busy the machine is
    monkeypatch.setattr(PrefillMeter, "price", property(lambda _: dear))
    assert loadpath.main(["--tokens", "96", "--rounds", "1"]) == 0
    written = json.loads((tmp_path / "loadpath.json").read_text())
    assert [row["stage"] for row in written["rows"]] == list(STAGES)
    ends = [row["is_over_ms"] for row in written["rows"]]
    assert ends == sorted(ends)
