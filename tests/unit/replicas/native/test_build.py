"""The native step is compiled once; what prevents it is a sentence, and another step serves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from configs.settings import ModelSettings, Settings
from replicas import step_choice
from replicas.messages import ModelRefused
from replicas.native import build
from replicas.native.build import (
    AVX2,
    AVX512,
    NEON,
    PLAIN,
    build_library,
    find_compiler,
    pair_variant_here,
    variant_here,
    variant_of,
)
from replicas.native.native_step import NotNative
from tests.support.engines import native_steps
from tests.support.engines.engines import Driver, prompt_of, small_engine

BF16 = torch.bfloat16


class Compilers:
    """Compilers that are played, in a folder that is the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin"
        self.path.mkdir()
        self.calls = folder / "calls"
        self.environment = {"PATH": str(self.path)}

    def add(self, name: str, does: str = 'touch "$out"', version: str = "1.0") -> Path:
        script = self.path / name
        find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done'
        said = f'[ "$1" = --version ] && echo {version} && exit 0'
        touch = 'touch() { : > "$1"; }'
        script.write_text(f"#!/bin/sh\n{said}\necho {name} >> {self.calls}\n{touch}\n{find}\n{does}\n")
        script.chmod(0o700)
        return script

    def called(self) -> list[str]:
        return self.calls.read_text().split() if self.calls.exists() else []

    def build(self, folder: Path, wait_s: float = 60.0, dtype: torch.dtype = BF16) -> Path:
        return build_library(folder, PLAIN, dtype, wait_s=wait_s, environment=self.environment)


@pytest.fixture
def compilers(tmp_path: Path) -> Compilers:
    return Compilers(tmp_path)


def test_it_is_compiled_once_for_each_compiler_and_dtype(tmp_path: Path, compilers: Compilers) -> None:
    folder = tmp_path / "native"
    compilers.add("g++")
    first = compilers.build(folder)
    assert compilers.build(folder) == first
    assert compilers.called() == ["g++"]
    assert compilers.build(folder, dtype=torch.float32) != first
    compilers.add("g++", version="2.0")
    assert compilers.build(folder) != first
    compilers.add("c++")
    compilers.build(folder)
    assert compilers.called() == ["g++", "g++", "g++", "c++"]
    compilers.environment["CXX"] = f"{compilers.add('my-compiler')} -v"
    compilers.build(folder)
    assert compilers.called()[-1] == "my-compiler"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".so"}, "no drafts, no locks"


def test_old_libraries_are_forgotten(
    tmp_path: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LIBRARIES_MAX", 2)
    made = []
    for number in range(4):
        compilers.add("c++", version=str(number))
        made.append(compilers.build(tmp_path / "native"))
        os.utime(made[-1], (number, number))
    assert [path.exists() for path in made] == [False, False, True, True]


def test_without_a_compiler_what_one_has_compiled_serves(tmp_path: Path, compilers: Compilers) -> None:
    with pytest.raises(NotNative, match=r"no C\+\+ compiler on the PATH \(c\+\+, g\+\+, clang\+\+\)"):
        compilers.build(tmp_path / "native")
    script = compilers.add("clang++")
    library = compilers.build(tmp_path / "native")
    script.unlink()
    assert compilers.build(tmp_path / "native") == library


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            "echo 'step.cpp:1: error: what is this' >&2; exit 1",
            "does not compile it: step.cpp:1: error: what",
        ),
        ("exit 3", "it ended with status 3"),
        ("exec sleep 60", "longer than 1 s"),
        ("kill -9 $$", "status -9"),
    ],
    ids=["an error", "a silent one", "no end", "killed"],
)
def test_a_compiler_that_fails_is_a_sentence(
    tmp_path: Path, compilers: Compilers, does: str, said: str
) -> None:
    sleep = next(path for path in ("/bin/sleep", "/usr/bin/sleep") if Path(path).exists())
    compilers.add("c++", does.replace("sleep", sleep))
    with pytest.raises(NotNative, match=said):
        compilers.build(tmp_path / "native", wait_s=1.0)
    assert not list((tmp_path / "native").glob("*.so"))
    calls = len(compilers.called())
    compilers.add("c++")
    with pytest.raises(NotNative, match=said):  # of the one that has failed; others waited for it
        compilers.build(tmp_path / "native")
    assert len(compilers.called()) == calls
    (note,) = (tmp_path / "native").glob("*.failed")
    os.utime(note, (0, 0))
    assert compilers.build(tmp_path / "native").exists()
    assert not note.exists()


def test_where_nothing_can_be_compiled_what_was_serves(tmp_path: Path, compilers: Compilers) -> None:
    compilers.add("c++")
    library = compilers.build(tmp_path / "native")
    compilers.add("c++", "exit 1", version="2.0")
    assert compilers.build(tmp_path / "native") == library


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


def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, compilers: Compilers) -> None:
    compilers.add("c++")
    library = compilers.build(tmp_path / "native")
    for path in (library, library.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(NotNative, match="may be written by others"):
            compilers.build(tmp_path / "native")
        path.chmod(mode)
    (tmp_path / "file").touch()
    with pytest.raises(NotNative, match="cannot be kept in"):
        compilers.build(tmp_path / "file")


def test_a_compiler_that_does_not_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotNative, match="does not run"):
        find_compiler({"CXX": str(tmp_path / "none")}, wait_s=5)


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
    assert len({built.engine.namespace for built in engines}) == 1, "what one has stored the others find"
    assert engines[0].engine.runner.forward.name == step, "by this name its speed is kept for later starts"


def test_its_blocks_are_not_those_of_other_steps(tiny_llama: Path) -> None:
    native, lean = (small_engine(tiny_llama, step=step, dtype="bfloat16") for step in ("native", "lean"))
    if lean.info.exact:
        assert native.engine.namespace != lean.engine.namespace
    again = small_engine(tiny_llama, step="native", dtype="bfloat16", measures_anew=True)
    assert again.engine.namespace == native.engine.namespace


def test_products_in_bfloat16_are_taken_where_the_cpu_has_them_with_a_namespace_of_their_own(
    tiny_llama: Path,
) -> None:
    """Neither finds the other's blocks: they are other bits."""
    _needs_dot_products()
    chosen, in_float = (
        small_engine(tiny_llama, dtype="bfloat16", step=step, threads=1) for step in ("auto", "native")
    )
    assert chosen.info.step == "native-bf16, compiled for AVX512-BF16"
    assert chosen.engine.namespace != in_float.engine.namespace
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
    monkeypatch.setattr(step_choice, "PAIR_FLAGS", (*build.PAIR_FLAGS, "-O1", "-DSAMOVAR_FAULT=3"))
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
        assert rounded.engine.namespace != plain.engine.namespace
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
