"""The device that a model runs on, and the dtype it is computed with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.configs.settings import EngineSettings, ModelSettings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.device import (
    FLOAT32_FASTER_MIN,
    GemmSeconds,
    choose_device,
    choose_dtype,
    measure_gemm,
)
from samovar.replicas.start.build import gemm_seconds


def test_cudnns_attention_is_off_where_a_gpu_is_used_and_untouched_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device(EngineSettings(device="cpu")) == torch.device("cpu")
    assert calls == []
    for asked in ("auto", "cuda"):
        assert choose_device(EngineSettings(device=asked)) == torch.device("cuda", 1)
    assert calls == [False, False]


def test_a_gpu_that_is_asked_for_and_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineSettings()) == torch.device("cpu")
    with pytest.raises(ModelRefused, match=r"engine\.device"):
        choose_device(EngineSettings(device="cuda"))


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bfloat16", "float32", "dtype", "why"),
    [
        (0.5, 1.0, torch.bfloat16, "2.0 times as fast as in float32"),
        (1.0, 1.0, torch.bfloat16, "fast enough"),
        (2.0, 1.0, torch.bfloat16, "fast enough"),
        (FLOAT32_FASTER_MIN, 1.0, torch.float32, "2.5 times as fast as in bfloat16"),
        (30.0, 1.0, torch.float32, "30.0 times as fast"),
    ],
)
def test_float32_is_chosen_where_it_is_faster_by_a_clear_margin(
    bfloat16: float, float32: float, dtype: torch.dtype, why: str
) -> None:
    chosen = choose_dtype(ModelSettings(), CPU, lambda: GemmSeconds(bfloat16, float32))
    assert chosen.dtype == dtype
    assert chosen.sentence.startswith(str(dtype).removeprefix("torch."))
    assert why in chosen.sentence


def test_nothing_is_measured_where_the_choice_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> GemmSeconds:
        raise AssertionError("measured")

    assert choose_dtype(ModelSettings(dtype="float16"), CPU, never).dtype == torch.float16
    assert choose_dtype(ModelSettings(), CPU, never, widens_weights=True).dtype == torch.bfloat16
    for has, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert choose_dtype(ModelSettings(), torch.device("cuda", 0), never).dtype == dtype


def test_what_was_measured_is_kept_so_that_the_dtype_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another dtype is another namespace: a start would not find the blocks of the one before."""
    answers = iter([GemmSeconds(30.0, 1.0), GemmSeconds(1.0, 30.0)])
    monkeypatch.setattr("samovar.replicas.start.build.measure_gemm", lambda: next(answers))
    first, again = (gemm_seconds(tmp_path, 1) for _ in range(2))
    assert first == again == GemmSeconds(30.0, 1.0)
    assert gemm_seconds(tmp_path, 2) != first, "other threads are measured by themselves"


def test_the_least_time_of_each_dtype_counts() -> None:
    """A busy machine delays some products, hardly all of them."""
    tick, times = 0.0, iter([0.01, 0.004, 0.02, 0.02, 0.05, 0.01, 0.05])

    def clock() -> float:
        nonlocal tick
        now, tick = tick, tick + next(times, 0.05)
        return now

    seconds = measure_gemm(clock)
    assert seconds.bfloat16 == pytest.approx(0.004)
    assert seconds.float32 == pytest.approx(0.05)
