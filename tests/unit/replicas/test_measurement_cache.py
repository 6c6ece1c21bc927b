"""What a start has measured serves the next start of the same model on the same machine, and no other."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from samovar.cache_tiers.pricing import TierPrice, fit_prefill
from samovar.configs.sections import TierSettings
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas import measurement_cache
from samovar.replicas.engine import Probe, ProbeResult
from samovar.replicas.forward import GatherSdpa
from samovar.replicas.measurement_cache import MeasurementCache, NotMeasured
from samovar.replicas.start.build import BuiltEngine, Start
from tests.support.clock import Clock

NUMBER = TypeAdapter(float)
DAY_S = 24 * 3600.0


def measured(
    folder: Path | None, wall: Clock, *depends_on: str, keep_s: float = DAY_S, value: float = 1.0
) -> float:
    """One start that needs one number; the value is what measuring would give now."""
    kept = MeasurementCache(folder, keep_s, *depends_on, wall_clock=wall)
    number = kept.get("number", NUMBER, lambda: value, 0.0)
    kept.save()
    return number


def test_the_next_start_measures_nothing(tmp_path: Path) -> None:
    wall = Clock(1.7e9)
    assert measured(tmp_path / "new", wall, value=1.0) == 1.0
    assert measured(tmp_path / "new", wall, value=2.0) == 1.0
    assert measured(None, wall, value=3.0) == 3.0


def test_a_price_of_loads_of_any_size_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is proved for infinitely many bytes, which JSON has no number for."""
    price, kind = TierPrice(0.001, 5e9), TypeAdapter(TierPrice | None)
    for measures in (lambda: price, lambda: None):
        kept = MeasurementCache(tmp_path, DAY_S, wall_clock=Clock(1.7e9))
        assert kept.get("swap", kind, measures, None) == price
        kept.save()
    assert not caplog.messages


def test_what_could_not_be_measured_is_tried_again(tmp_path: Path) -> None:
    """A load of samples that failed once would else be a road without a price for a month."""

    def failing() -> float:
        raise NotMeasured("no room")

    kept = MeasurementCache(tmp_path, DAY_S, wall_clock=Clock(1.7e9))
    assert kept.get("number", NUMBER, failing, 0.0) == 0.0
    kept.save()
    assert measured(tmp_path, Clock(1.7e9), value=2.0) == 2.0


@pytest.mark.parametrize("passed_s", [DAY_S, 30 * DAY_S, -1.0], ids=["a day", "a month", "a clock set back"])
def test_old_measurements_are_taken_again_and_kept_anew(tmp_path: Path, passed_s: float) -> None:
    wall = Clock(1.7e9)
    measured(tmp_path, wall, value=1.0)
    wall.now_s += passed_s
    assert measured(tmp_path, wall, value=2.0) == 2.0
    assert measured(tmp_path, wall, value=3.0) == 2.0


def test_of_two_starts_at_once_one_measures(tmp_path: Path) -> None:
    wall, begun = Clock(1.7e9), threading.Event()
    first, second = (MeasurementCache(tmp_path, DAY_S, wall_clock=wall) for _ in range(2))

    def start_too() -> float:
        begun.set()
        return second.get("price", NUMBER, lambda: 9.0, 0.0)

    with ThreadPoolExecutor(1) as pool:
        assert first.get("probe", NUMBER, lambda: 1.0, 0.0) == 1.0
        waiting = pool.submit(start_too)
        assert begun.wait(10)
        assert first.get("price", NUMBER, lambda: 2.0, 0.0) == 2.0
        assert not waiting.done()
        first.save()
        assert waiting.result(10) == 2.0
    assert second.get("probe", NUMBER, lambda: 9.0, 0.0) == 1.0
    assert second.get("swap", NUMBER, lambda: 3.0, 0.0) == 3.0
    second.save()
    assert MeasurementCache(tmp_path, DAY_S, wall_clock=wall).get("swap", NUMBER, lambda: 9.0, 0.0) == 3.0


def test_who_ends_before_it_has_saved_holds_up_nobody(tmp_path: Path) -> None:
    first = MeasurementCache(tmp_path, DAY_S)
    first.get("number", NUMBER, lambda: 1.0, 0.0)
    del first  # as a process that ends: the kernel closes its files
    assert measured(tmp_path, Clock(1.7e9), value=2.0) == 2.0


def test_zero_seconds_keep_nothing(tmp_path: Path) -> None:
    assert measured(tmp_path, Clock(1.7e9), keep_s=0.0) == 1.0
    assert list(tmp_path.iterdir()) == []


def test_another_model_machine_library_or_code_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = Clock(1.7e9)
    measured(tmp_path, wall, "model", "bfloat16", value=1.0)
    assert measured(tmp_path, wall, "model", "float32", value=2.0) == 2.0
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert measured(tmp_path, wall, "model", "bfloat16", value=3.0) == 3.0
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(measurement_cache, "_cpu", lambda: "another")
    assert measured(tmp_path, wall, "model", "bfloat16", value=4.0) == 4.0
    monkeypatch.undo()
    assert measured(tmp_path, wall, "model", "bfloat16", value=5.0) == 1.0
    package = tmp_path / "replicas"
    shutil.copytree(Path(measurement_cache.__file__).parent, package)
    (package / "forward" / "runner.py").write_text("another way to compute\n")
    monkeypatch.setattr(measurement_cache, "__file__", str(package / "measurement_cache.py"))
    measurement_cache._code.cache_clear()
    assert measured(tmp_path, wall, "model", "bfloat16", value=6.0) == 6.0
    measurement_cache._code.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"number": 1.0}',
        "[" * 100_000,
        '{"measured_unix_s": 1.7e9, "number": "many"}',
    ],
    ids=["empty", "torn", "a list", "a number", "nothing", "no date", "nested", "another form"],
)
def test_a_bad_file_costs_a_measurement(tmp_path: Path, text: str) -> None:
    wall = Clock(1.7e9)
    measured(tmp_path, wall, value=1.0)
    (file,) = tmp_path.glob("*.json")
    file.write_text(text)
    assert measured(tmp_path, wall, value=2.0) == 2.0
    assert json.loads(file.read_text())["number"] == 2.0


def test_a_folder_that_cannot_be_written_stops_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert measured(tmp_path / "file", Clock(1.7e9)) == 1.0
    assert "could not be saved" in caplog.text


def start(
    model: Path, keep: Path, *, threads: int = 1, fast: bool = False, exact: bool | None = None
) -> BuiltEngine:
    settings = Settings(
        model=ModelSettings(path=model, dtype="float32"),
        engine=EngineSettings(
            device="cpu", threads=threads, step_tokens_max=64, fast_start=fast, exact=exact
        ),
        tiers=TierSettings(),
    )
    return Start(settings, model, "test", pages=64, keep=keep).run()


def test_an_engine_keeps_its_probe_and_its_prices(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tiny_llama, tmp_path)

    def again(self: Probe, step_tokens_max: int) -> ProbeResult:
        raise AssertionError("it probes again")

    with monkeypatch.context() as patched:
        patched.setattr(Probe, "run", again)
        second = start(tiny_llama, tmp_path)
        with pytest.raises(AssertionError, match="it probes again"):
            start(tiny_llama, tmp_path, threads=2)
    assert (second.info.exact, second.info.exactness) == (first.info.exact, first.info.exactness)
    assert second.engine.meter.price == first.engine.meter.price
    start(tiny_llama, tmp_path, threads=1)


def test_another_attention_backend_is_measured_anew(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine.exact`, or a kernel that no longer compiles: the device and the code are the same."""
    taken = list[int]()

    def noting(*_: object, tokens_max: int) -> list[tuple[int, int, float]]:
        taken.append(tokens_max)
        return [(16, 0, 1.0 + len(taken)), (64, 0, 4.0)]

    monkeypatch.setattr("samovar.replicas.start.build.measure_prefill", noting)
    first = start(tiny_llama, tmp_path, exact=False)
    assert start(tiny_llama, tmp_path, exact=False).engine.meter.price == first.engine.meter.price
    assert len(taken) == 1
    monkeypatch.setattr(GatherSdpa, "__init__", _another)
    assert start(tiny_llama, tmp_path, exact=False).engine.meter.price != first.engine.meter.price
    assert len(taken) == 2


def _another(self: GatherSdpa, exact: bool, dtype: torch.dtype) -> None:
    self.exact, self.dtype, self.name = exact, dtype, "another"


def test_a_start_that_does_not_measure_takes_what_is_kept_and_keeps_nothing(tmp_path: Path) -> None:
    wall = Clock(1.7e9)

    def fast() -> float:
        kept = MeasurementCache(tmp_path, DAY_S, measures=False, wall_clock=wall)
        number = kept.get("number", NUMBER, lambda: pytest.fail("it was measured"), 7.0)
        kept.save()
        return number

    assert fast() == 7.0
    assert list(tmp_path.iterdir()) == []
    assert measured(tmp_path, wall, value=1.0) == 1.0
    assert fast() == 1.0


@pytest.mark.parametrize("exact", [None, True])
def test_a_fast_start_is_never_assumed_to_be_exact(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool | None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Probe, "run", lambda *_: pytest.fail("it probes"))
        fast = start(tiny_llama, tmp_path, fast=True, exact=exact)
    assert not fast.info.exact
    assert "not probed (engine.fast_start)" in fast.info.exactness
    assert fast.engine.meter.price == fit_prefill([], 64), "a price for what was never measured"
    assert list(tmp_path.iterdir()) == []
    whole = start(tiny_llama, tmp_path, exact=exact)
    again = start(tiny_llama, tmp_path, fast=True, exact=exact)
    assert (again.info.exact, again.info.exactness) == (whole.info.exact, whole.info.exactness)
    assert again.engine.meter.price == whole.engine.meter.price
    assert (whole.engine.requests.intake.namespace == fast.engine.requests.intake.namespace) == (
        not whole.info.exact
    )
