"""`bench.gpu` sees what a first GPU showed and no bench had: nothing stored, loads overtaken, loads slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench._gpu_device import Ceilings, Device
from bench._gpu_engine import SMALL
from bench._gpu_model import TINY
from bench._gpu_returns import measure_returns
from bench._gpu_run import Rows
from bench._gpu_stage import Stage
from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.pricing.load_plan import Doubt
from samovar.cache_tiers.pricing.meters import TierMeter, TierPrice
from samovar.replicas.kv.block_io import PageIo, Ticket
from samovar.replicas.kv.copy_device import CopyEvent

RATE = 200e6
"""What the machine of these tests is said to move in a second."""


def measured(folder: Path) -> dict[str, bool]:
    """Return for each bar of the section whether it held in every row."""
    rows = Rows(judges_speed=True)
    stage = Stage(Device("cpu"), TINY, SMALL, folder)
    try:
        caller, node = stage.caller("auto"), stage.node("auto")
        measure_returns(rows, caller, node, SMALL, Ceilings(up=RATE), judges_times=False)
    finally:
        stage.close()
    held: dict[str, bool] = {}
    for row in rows.rows:
        if row["ok"] is not None:
            held[row["name"]] = held.get(row["name"], True) and row["ok"]
    return held


def test_as_it_is_served_all_is_stored_and_loaded(tmp_path: Path) -> None:
    held = measured(tmp_path)
    assert held["stored of a conversation"]
    assert held["loaded of a return"]


def test_planted_a_price_that_forbids_everything_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the H200: a start takes loads for a thousand times as dear, and nothing doubts it."""
    right = TierMeter.measured

    def dear(meter: TierMeter, first: TierPrice) -> None:
        right(meter, TierPrice(1000 * first.latency_s, first.bytes_per_s / 1e6))

    monkeypatch.setattr(TierMeter, "measured", dear)
    monkeypatch.setattr(Doubt, "tries", lambda *_: False)
    held = measured(tmp_path)
    assert not held["stored of a conversation"]
    assert not held["loaded of a return"]


def test_planted_a_slow_road_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_in = PageIo.begin_in

    def slow(io: PageIo, payload: Bytes, pages: Sequence[int], read: CopyEvent, *more: Any) -> Ticket:
        time.sleep(4 * payload.nbytes / RATE)
        return begin_in(io, payload, pages, read, *more)

    monkeypatch.setattr(PageIo, "begin_in", slow)
    held = measured(tmp_path)
    assert not held["rate of that load"]
