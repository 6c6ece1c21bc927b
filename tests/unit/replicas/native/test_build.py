"""The native step is compiled for this CPU; what prevents it is a sentence, and another step serves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from samovar.configs.compiled import AVX2, AVX512, NEON, PAIR_FLAGS
from samovar.configs.settings import ModelSettings, Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.native.build import (
    pair_variant_here,
    variant_here,
    variant_of,
)
from samovar.replicas.native.native_step import NotNative
from samovar.replicas.start import step_choice
from tests.support.engines import native_steps
from tests.support.engines.engines import Driver, prompt_of, small_engine

BF16 = torch.bfloat16


def test_a_library_that_does_not_load_is_removed_and_another_step_serves(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torn = tmp_path / "step.so"
    torn.touch()
    monkeypatch.setattr(step_choice, "build_library", lambda *_, **__: torn)
    built = small_engine(tiny_llama)
    assert "native: its library does not load" in built.info.step
    assert not torn.exists()


def test_weights_that_memory_does_not_hold_twice_are_left_to_the_lean_step(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_choice, "free_memory_bytes", lambda device: 1000)
    assert "are free" in small_engine(tiny_llama).info.step


def test_each_machine_has_its_variant() -> None:
    assert [variant_of(name, "x86_64") for name in ("AVX512", "AVX2")] == [AVX512, AVX2]
    assert variant_of("DEFAULT", "aarch64") == NEON
    with pytest.raises(NotNative, match="needs AVX2"):
        variant_of("DEFAULT", "x86_64")


# -- in an engine -----------------------------------------------------------------------------


def _needs_dot_products() -> None:
    try:
        pair_variant_here()
    except NotNative as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("step", ["native-bf16", "native"])
def test_an_engine_takes_the_native_step_and_is_exact_with_any_threads(tiny_llama: Path, step: str) -> None:
    if step == "native-bf16":
        _needs_dot_products()
    engines = [
        small_engine(tiny_llama, threads=threads, dtype="bfloat16", step=step) for threads in (1, 2, 4)
    ]
    prompt = prompt_of(100)
    answers = [Driver(built.engine).run(prompt, max_tokens=12).ids for built in engines]
    name = native_steps.widest_here().name if step == "native-bf16" else variant_here().name
    assert [built.info.step for built in engines] == [f"{step}, compiled for {name} (engine.step)"] * 3
    assert all(built.info.exact for built in engines)
    assert answers[0] == answers[1] == answers[2]
    assert len({built.engine.requests.intake.namespace for built in engines}) == 1, (
        "what one has stored the others find"
    )
    assert engines[0].engine.runner.forward.name == step, "by this name its speed is kept for later starts"


def test_its_blocks_are_not_those_of_other_steps(tiny_llama: Path) -> None:
    native, lean = (small_engine(tiny_llama, step=step, dtype="bfloat16") for step in ("native", "lean"))
    if lean.info.exact:
        assert native.engine.requests.intake.namespace != lean.engine.requests.intake.namespace
    again = small_engine(tiny_llama, step="native", dtype="bfloat16", measures_anew=True)
    assert again.engine.requests.intake.namespace == native.engine.requests.intake.namespace


def test_products_in_bfloat16_are_taken_where_the_cpu_has_them_with_a_namespace_of_their_own(
    tiny_llama: Path,
) -> None:
    """Neither finds the other's blocks: they are other bits."""
    _needs_dot_products()
    chosen, in_float = (
        small_engine(tiny_llama, dtype="bfloat16", step=step, threads=1) for step in ("auto", "native")
    )
    assert chosen.info.step == "native-bf16, compiled for AVX512-BF16"
    assert chosen.engine.requests.intake.namespace != in_float.engine.requests.intake.namespace
    kept = small_engine(tiny_llama, dtype="float32", threads=1)
    assert "native-bf16: it multiplies in bfloat16, and the weights are float32" in kept.info.step
    with pytest.raises(ModelRefused, match=r"engine\.step is native-bf16, which does not serve here"):
        small_engine(tiny_llama, dtype="float32", step="native-bf16")


def test_a_cpu_without_dot_products_multiplies_in_float32(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    built = small_engine(tiny_llama, dtype="bfloat16")
    assert built.info.step.startswith(f"native, compiled for {variant_here().name} (native-bf16: this CPU")
    with pytest.raises(ModelRefused, match="native-bf16, which does not serve here: this CPU has no"):
        small_engine(tiny_llama, dtype="bfloat16", step="native-bf16")


def test_a_cpu_whose_dot_products_are_others_multiplies_in_float32(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its blocks would be another CPU's."""
    monkeypatch.setattr(step_choice, "pair_variant_here", native_steps.widest_here)
    monkeypatch.setattr(step_choice, "PAIR_FLAGS", (*PAIR_FLAGS, "-O1", "-DSAMOVAR_FAULT=3"))
    step = small_engine(tiny_llama, dtype="bfloat16").info.step
    assert step.startswith("native, compiled for")
    assert "native-bf16: it does not start: this CPU's dot products in bf16 have other bits" in step


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing was compiled yet: no compiler on the PATH, an empty folder."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(Settings, "native_dir", tmp_path / "native")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_lean_step_serves_and_says_so(tiny_llama: Path) -> None:
    built = small_engine(tiny_llama)
    assert built.info.step.startswith("lean")
    assert "native: there is no C++ compiler on the PATH" in built.info.step
    assert len(Driver(built.engine).run(prompt_of(30), max_tokens=4).ids) == 4
    with pytest.raises(ModelRefused, match=r"engine\.step is native, which does not serve here: .*compiler"):
        small_engine(tiny_llama, step="native")


def test_weights_in_int8_have_a_namespace_of_their_own(tiny_llama: Path) -> None:
    for exact in (None, False):
        plain, rounded = (
            small_engine(tiny_llama, weights=weights, dtype="bfloat16", exact=exact)
            for weights in ("auto", "int8")
        )
        assert rounded.info.step.endswith(", weights in int8")
        assert rounded.info.exact == (exact is None)
        assert rounded.engine.requests.intake.namespace != plain.engine.requests.intake.namespace
        assert len(Driver(rounded.engine).run(prompt_of(30), max_tokens=4).ids) == 4


@pytest.mark.parametrize(
    ("engine", "why"), [({"step": "lean"}, "engine.step is lean"), ({"kv_dtype": "int8"}, "not as int8")]
)
def test_weights_in_int8_are_the_native_steps_alone(
    tiny_llama: Path, engine: dict[str, object], why: str
) -> None:
    with pytest.raises(ModelRefused, match=f"model.weights is int8, which only the native step has: .*{why}"):
        small_engine(tiny_llama, weights="int8", **engine)


def test_kv_in_int8_is_left_to_the_lean_step(tiny_llama: Path) -> None:
    built = small_engine(tiny_llama, kv_dtype="int8")
    assert built.info.step.startswith("lean")
    assert "not as int8" in built.info.step


def test_the_compiled_step_lies_in_the_cache() -> None:
    assert Settings(model=ModelSettings(cache_dir=Path("/x"))).native_dir == Path("/x/native")
    assert native_steps.library(BF16).stat().st_uid == os.geteuid()
