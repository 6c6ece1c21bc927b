"""The rows and bars of `make bench-vllm`, and that its servers are asked the same things in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench._peers_model import PeerModel
from bench._peers_servers import Place
from bench._vllm_engines import FLOAT32, Reading, VllmSamovar, VllmSamovarS3, connector
from bench.vllm import ALONE, LMCACHE, OURS, Row, Run, bars, measure, measure_s3, rows_of
from samovar.cache_tiers.vllm.messages import ConnectorOptions


class Asked:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = 1
        self.asked: list[tuple[str, tuple[tuple[int, ...], ...], int]] = []

    def start(self) -> None:
        self.lives += 1

    def until_ready(self) -> None: ...

    def stop(self) -> None: ...

    def ask(self, work: str, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> Reading:
        self.asked.append((work, tuple(tuple(ids) for ids in prompts), self.lives))
        return Reading(self.name, work, len(prompts[0]), 1.0 * len(self.asked), 2.0, 0.5, 96)

    def prompts_of(self, work: str) -> set[tuple[tuple[int, ...], ...]]:
        return {prompts for other, prompts, _ in self.asked if other == work}

    def lives_of(self, work: str) -> set[int]:
        return {lives for other, _, lives in self.asked if other == work}


def test_all_are_asked_the_same_and_return_to_what_was_cold() -> None:
    one, two = Asked("one"), Asked("two")
    rows = rows_of(measure(Run([one, two], [100], lambda _: None), 2))
    assert one.asked == two.asked
    for work in ("warm", "return_ram", "return_nvme"):
        assert one.prompts_of(work) == one.prompts_of("cold"), work
    assert len(one.prompts_of("cold")) == 2
    assert (one.lives_of("return_ram"), one.lives_of("return_nvme")) == ({1}, {2})
    assert [len(prompts) for prompts in one.prompts_of("streams_16")] == [16] * 6
    assert [row["engine"] for row in rows] == ["one", "two"] * (len(rows) // 2)
    assert rows[0]["cached"] == 96


def test_a_bucket_is_asked_after_a_restart_for_what_was_computed_before_it() -> None:
    one = Asked("one")
    measure_s3(Run([one], [100, 200], lambda _: None), 2)
    assert one.prompts_of("cold") == one.prompts_of("return_s3")
    assert (one.lives_of("cold"), one.lives_of("return_s3")) == ({1}, {2})


def row(engine: str, work: str, tokens: int, seconds: float) -> Row:
    return {"engine": engine, "work": work, "tokens": tokens, "ttft_s": seconds, "cpu_s": seconds, "gap_s": 0}


def test_bars_hold_for_ratios_within_them_and_fail_beyond() -> None:
    def failed(ram_s: float, miss_s: float) -> list[str]:
        rows = [row(OURS, "return_ram", 1000, ram_s), row(LMCACHE, "return_ram", 1000, 0.1)]
        rows += [row(OURS, "warm", 1000, 0.06), row(OURS, "return_nvme", 1000, 0.1)]
        rows += [row(OURS, "miss", 64, miss_s), row(ALONE, "miss", 64, 0.1)]
        return [bar.what for bar in bars(rows) if not bar.holds]

    assert failed(0.07, 0.102) == []
    assert failed(0.079, 0.104) == [
        "RAM, time of still warm, 1000 tokens",
        "ms more that a request pays which hits nothing",
    ]
    assert failed(0.081, 0.1)[0] == "RAM, CPU of LMCache's, 1000 tokens"


def test_the_connector_is_told_what_it_takes(tmp_path: Path) -> None:
    ConnectorOptions.of(connector(tmp_path)["kv_connector_extra_config"])
    place = Place(PeerModel("m", tmp_path, tmp_path), tmp_path, tmp_path, [1, 2, 3], [0], 2144)
    tiers, own = VllmSamovar().launches(place)
    assert tiers.ready_port == 2
    assert str(tmp_path / "tiers.sock") in tiers.command
    assert "SamovarConnector" in own.command[-1]
    assert VllmSamovar().missing(tmp_path)
    assert FLOAT32[:2] == ("--dtype", "float32")
    bucket, _ = VllmSamovarS3({"--tiers.s3.bucket": "b"}, {"KEY": "k"}).launches(place)
    assert ("b" in bucket.command, bucket.env["KEY"]) == (True, "k")
    assert str(tmp_path / "kv") not in bucket.command
