"""`bench.gpu`: what it makes of time, of failures and of values; its sizes; and all of it in a tiny shape."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import _gpu_attention, _gpu_moves
from bench._gpu_device import Ceilings, Device, share
from bench._gpu_engine import FULL, SMALL
from bench._gpu_model import LLAMA_8B, TINY, write_hollow_model
from bench._gpu_run import COLUMNS, Bar, GpuRun, Rows, Section, at_least, at_most, must_be, table_of
from bench._gpu_tiers import MappedRam, mapped
from samovar.cache_tiers.blocks import Address, BadRecord, Bytes, Record, TierFull, TierMiss
from samovar.cache_tiers.media import Deadline
from samovar.configs.sections import GIB, MIB
from samovar.replicas.forward import GatherSdpa
from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.kv import CopyEvent, KvGeometry, LayerKv, PageIo
from samovar.replicas.kv.block_io import Ticket
from samovar.replicas.kv.copy_device import HostDevice
from samovar.replicas.model import inspect_model
from tests.support.clock import Clock


class Stand:
    """A run with a clock that is set by hand, a screen and a file."""

    def __init__(self, tmp_path: Path, limit_s: float = 420.0, begun_s: float = 0.0) -> None:
        self.clock, self.screen, self.rows = Clock(), io.StringIO(), Rows(judges_speed=True)
        self.out = tmp_path / "out" / "gpu.json"
        self.is_lost = False
        self.run = GpuRun(
            self.rows,
            self.out,
            {"command": "it"},
            limit_s=limit_s,
            settle=self._settle,
            begun_s=begun_s,
            screen=self.screen,
            clock=self.clock,
        )

    def _settle(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    @property
    def document(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.out.read_text())
        return read

    def section(
        self, name: str, *, takes_s: float = 1.0, fails: bool = False, loses: bool = False
    ) -> Section:
        def run() -> None:
            self.clock.now_s += takes_s
            self.rows.add(name, "shape", 1.0, "ms")
            self.is_lost = loses
            if fails or loses:
                raise ValueError(f"{name} is wrong")

        return Section(name, run)


def test_a_section_that_begins_after_the_limit_is_skipped_and_fails_nothing(tmp_path: Path) -> None:
    stand = Stand(tmp_path, limit_s=10.0)
    stand.run.run([stand.section("long", takes_s=10.0), stand.section("late")])
    assert [(row["name"], row["ok"]) for row in stand.rows.rows] == [("long", None), ("late", None)]
    assert stand.rows.rows[1]["bar"] == "skipped: 10 s are over"
    assert stand.rows.are_good


def test_what_the_process_took_before_counts(tmp_path: Path) -> None:
    stand = Stand(tmp_path, limit_s=10.0, begun_s=10.0)
    stand.run.run([stand.section("late")])
    assert stand.rows.rows[0]["bar"] == "skipped: 10 s are over"


def test_a_section_that_raises_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.run.run([stand.section("bad", fails=True), stand.section("good")])
    stand.run.finish()
    bad = {
        "name": "bad",
        "shape": "",
        "value": None,
        "unit": "",
        "bar": "failed: ValueError: bad is wrong",
        "ok": False,
    }
    assert bad in stand.document["rows"]
    assert "ValueError: bad is wrong" in stand.document["errors"]["bad"]
    assert [row["name"] for row in stand.rows.rows if row["shape"]] == ["bad", "good"]
    assert not stand.rows.are_good
    assert stand.screen.getvalue().rstrip().splitlines()[-1] == f"written: {stand.out} (2 s)"


def test_nothing_is_tried_on_a_device_that_was_lost(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.run.run([stand.section("first", loses=True), stand.section("second")])
    assert stand.rows.rows[-1]["bar"] == "not run: the device was lost in first"
    assert not stand.rows.are_good
    assert set(stand.document["errors"]) == {"first", "first: after it"}


def test_what_is_cut_off_leaves_its_rows_and_names_the_section(tmp_path: Path) -> None:
    stand = Stand(tmp_path)

    def hang() -> None:
        stand.rows.add("half", "shape", 1.0, "ms")
        stand.clock.now_s += 470.0
        stand.run.cut_off()

    stand.run.run([Section("hangs", hang)])
    assert [row["bar"] for row in stand.document["rows"]] == ["", "cut off after 470 s"]
    assert "hangs  cut off after 470 s  NO" in stand.screen.getvalue()


@pytest.mark.parametrize(
    ("bar", "value", "ok"),
    [
        (at_least(0.7), 0.7, True),
        (at_least(0.7), 0.69, False),
        (at_most(7.0), 7.1, False),
        (must_be("<=", 0), 0.0, True),
        (at_least(0.7), math.nan, False),
        (at_most(7.0), math.nan, False),
        (None, 1.0, None),
        (at_least(0.7), None, None),
    ],
)
def test_bars(bar: Bar | None, value: float | None, ok: bool | None) -> None:
    rows = Rows(judges_speed=True)
    rows.add("name", "shape", value, "ms", bar)
    assert tuple(rows.rows[0]) == COLUMNS
    assert rows.rows[0]["ok"] is ok
    json.dumps(rows.rows, allow_nan=False)


def test_a_tiny_shape_is_judged_by_its_checks_alone() -> None:
    rows = Rows(judges_speed=False)
    rows.add("speed", "shape", 0.0, "of C", at_least(0.7))
    rows.add("check", "shape", 1.0, "wrong", must_be("<=", 0))
    assert [row["ok"] for row in rows.rows] == [None, False]


def test_the_table_has_all_rows_and_long_reasons_widen_no_column() -> None:
    rows = Rows(judges_speed=True)
    rows.add("copy", "2 GiB", 4321.0, "GB/s", at_least(1.0))
    rows.note("late", "skipped: " + "x" * 300, ok=None)
    head, copy, late = table_of(rows.rows).splitlines()
    assert head.split() == list(COLUMNS)
    assert copy.split() == ["copy", "2", "GiB", "4321", "GB/s", ">=", "1", "ok"]
    assert len(head) < 60 < len(late)


def test_the_shape_is_that_of_llama_8b() -> None:
    config = LLAMA_8B.config()
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_8B.block_bytes == 2 * MIB
    embeddings = LLAMA_8B.vocab * LLAMA_8B.hidden
    assert LLAMA_8B.prefill_flop(1) == pytest.approx(2 * (parameters - embeddings), rel=0.001)
    more = LLAMA_8B.prefill_flop(8192) - 8192 * (LLAMA_8B.prefill_flop(1) - 2 * embeddings) - 2 * embeddings
    assert more == pytest.approx(32 * 32 * 128 * 4 * 8192 * 8191 / 2, rel=0.001)


def test_pool_weights_and_activations_fit_the_smaller_gpu() -> None:
    pool = FULL.pages(LLAMA_8B.block_tokens) * LLAMA_8B.block_bytes
    assert pool + 16.1e9 < 0.75 * 78 * GIB
    assert FULL.pages(16) * 16 >= max(FULL.returns) + FULL.turn


def test_the_hollow_model_is_one_that_is_served_and_takes_no_room(tmp_path: Path) -> None:
    folder = write_hollow_model(tmp_path / "model", LLAMA_8B)
    spec = inspect_model(folder)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.vocab) == (32, 8, 128, 128256)
    assert spec.weights_bytes > 16e9
    assert (folder / "model.safetensors").stat().st_blocks * 512 < MIB


def test_mapped_memory_is_a_tier() -> None:
    tier, deadline = MappedRam(MIB), Deadline(5.0)
    record = Record(np.arange(256, dtype=np.uint8))
    address, other = (Address(bytes(16), bytes([number]) * 32, bytes(32)) for number in (1, 2))
    tier.put(address, record, deadline=deadline)
    tier.put(address, record, deadline=deadline)
    read = tier.read(address, 8, 16, deadline=deadline)
    assert read.tolist() == list(range(8, 24))
    assert not read.flags.writeable
    assert tier.bytes_held() == 256
    with pytest.raises(BadRecord):
        tier.read(address, 250, 16, deadline=deadline)
    with pytest.raises(TierFull):
        tier.put(other, Record(mapped(MIB)), deadline=deadline)
    with pytest.raises(TierMiss):
        tier.read(other, 0, 1, deadline=deadline)
    tier.delete(address)
    assert tier.bytes_held() == 0


def test_a_move_that_changes_a_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(PageIo):
        def begin_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
            wrong = payload.copy()
            wrong[-1] ^= 1
            return super().begin_in(wrong, pages, read)

    monkeypatch.setattr(
        _gpu_moves,
        "page_io",
        lambda pool, arena_bytes: Careless(HostDevice(pool.page_bytes.numpy()), pool.geometry),
    )
    geometry = KvGeometry(2, 16, 2, 16, torch.float32)
    rows = Rows(judges_speed=False)
    _gpu_moves.check_moves(rows, Device("cpu"), geometry, SMALL)
    changed = [row for row in rows.rows if row["unit"] == "blocks"]
    assert [(row["value"], row["ok"]) for row in changed] == [(1.0, False)] * 2


@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize("fault", ["", "a key too few", "another's page", "not finite", "written wrong"])
def test_attention_that_is_wrong_is_found(kv: str, fault: str) -> None:
    class Faulty(GatherSdpa):
        def attend(self, query: torch.Tensor, *more: Any) -> torch.Tensor:
            out = super().attend(query, *more)
            if fault == "not finite":
                out[-1, -1, -1] = torch.nan
            return out

        def write(self, layer_kv: LayerKv, key: torch.Tensor, *more: Any) -> None:
            super().write(layer_kv, key.roll(1, dims=0) if fault == "written wrong" else key, *more)

        def prepare(self, inputs: StepInputs) -> Any:
            if fault == "a key too few":
                words = [one._replace(start=max(0, one.start - 1)) for one in inputs.segments]
                inputs.segments = tuple(words)
            if fault == "another's page":
                inputs.tables[len(inputs.tables) // 2] = inputs.tables[1]
            return super().prepare(inputs)

    geometry = KvGeometry(2, 16, 2, 16, torch.float32, is_int8=kv == "int8")
    engine = SimpleNamespace(runner=SimpleNamespace(backend=Faulty(False, torch.float32)))
    caller: Any = SimpleNamespace(engine=engine, shape=TINY)
    rows = Rows(judges_speed=False)
    _gpu_attention.check_attention(rows, caller, Device("cpu"), geometry, SMALL)
    verdicts = [row["ok"] for row in rows.rows if row["bar"]]
    assert len(verdicts) == 2 * 5
    assert all(verdicts) if not fault else not all(verdicts)


def test_share_of_what_was_not_measured_is_unknown() -> None:
    assert share(1.0, Ceilings().copy) is None
    assert share(1.0, 4.0) == 0.25
