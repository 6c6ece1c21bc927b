"""The rows of `make bench-vllm`, and that its servers are asked the same things in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import vllm
from bench._peers_model import PeerModel
from bench._peers_servers import Place
from bench.vllm import Reading, VllmSamovar, connector, measure, rows_of
from samovar.cache_tiers.vllm.messages import ConnectorOptions


class Asked:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = 1
        self.asked: list[tuple[str, tuple[int, ...], int]] = []

    def start(self) -> None:
        self.lives += 1

    def until_ready(self) -> None: ...

    def stop(self) -> None: ...

    def ask(self, work: str, ids: Sequence[int]) -> Reading:
        self.asked.append((work, tuple(ids), self.lives))
        return Reading(self.name, work, len(ids), 1.0 * len(self.asked), 2.0, 0.5, 96)


def test_all_are_asked_the_same_and_return_to_what_was_cold(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = Asked("one"), Asked("two")
    rows = rows_of(measure([one, two], 2, [100]))  # type: ignore[list-item]
    assert one.asked == two.asked
    of_work = {work: {ids for other, ids, _ in one.asked if other == work} for work, _, _ in one.asked}
    assert of_work["cold"] == of_work["warm"] == of_work["return_ram"] == of_work["return_restart"]
    assert len(of_work["cold"]) == 2
    assert {lives for work, _, lives in one.asked if work == "return_restart"} == {2}
    works = ["cold", "warm", "return_ram", "return_restart"]
    assert [(row["engine"], row["work"], row["rounds"]) for row in rows[::2]] == [
        ("one", work, 2) for work in works
    ]
    assert rows[0]["cached"] == 96


def test_the_connector_is_told_what_it_takes(tmp_path: Path) -> None:
    ConnectorOptions.of(connector(tmp_path)["kv_connector_extra_config"])
    place = Place(PeerModel("m", tmp_path, tmp_path), tmp_path, tmp_path, [1, 2, 3], [0], 2144)
    tiers, own = VllmSamovar().launches(place)
    assert tiers.ready_port == 2
    assert str(tmp_path / "tiers.sock") in tiers.command
    assert "SamovarConnector" in own.command[-1]
    assert VllmSamovar().missing(tmp_path)
    assert vllm.FLOAT32[:2] == ("--dtype", "float32")
