"""Which kind of step serves: the lean one where it can, and never at the price of exactness."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from samovar.configs.compiled import AVX512_BF16
from samovar.configs.settings import EngineSettings
from samovar.replicas.engine.audit import Probe, ProbeResult
from samovar.replicas.forward.loading import load_model
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.native import NotNative
from samovar.replicas.start.checkpoint import PlainRecipe
from samovar.replicas.start.step_choice import ChosenStep, StepChoice, expects_native, layers_of_all_kinds
from tests.support.engines.engines import small_engine
from tests.support.engines.plain_models import Shape, random_plain
from tests.support.engines.tiny_models import make_tiny_model

CPU = torch.device("cpu")
YES, NO = ProbeResult(True, "bitwise", is_tried=True), ProbeResult(False, "not bitwise here", is_tried=True)
NEVER = ProbeResult(False, "not bitwise with 9 threads")


class Chooser:
    """Chooses for a tiny model, with a probe that is played: kind -> verdict."""

    def __init__(
        self,
        model_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
        keep: Path | None = None,
        *,
        reads: bool = False,
        **verdicts: ProbeResult,
    ) -> None:
        """`reads`: it may read the weights without loading the model."""
        self.loads = 0
        self._directory = model_dir if reads else None
        self.probed: list[str] = []
        self._spec = inspect_model(model_dir)
        self._keep = keep

        def run(probe: Probe, step_tokens_max: int) -> ProbeResult:
            kind = "transformers" if probe._forward is None else "lean"
            self.probed.append(kind)
            return verdicts[kind]

        monkeypatch.setattr(Probe, "run", run)

    def choose(self, **engine: object) -> ChosenStep:
        spec, geometry = (
            self._spec,
            KvGeometry(2, 16, self._spec.kv_heads, self._spec.head_dim, torch.float32),
        )

        def load() -> torch.nn.Module:
            self.loads += 1
            return load_model(spec, torch.float32, CPU)

        kept = MeasurementCache(self._keep, 60.0, "a model")
        settings = EngineSettings.model_validate(engine)
        choice = StepChoice(settings, geometry, CPU, load, kept, directory=self._directory)
        chosen = choice.settle(spec.vocab, 64)
        kept.save()
        return chosen


Play = Callable[..., Chooser]


@pytest.fixture
def play(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return lambda **verdicts: Chooser(tiny_llama, monkeypatch, **verdicts)


def test_the_lean_step_serves_and_takes_the_weights_over(play: Play) -> None:
    chooser = play(lean=YES)
    chosen = chooser.choose()
    assert chosen.kind == "lean"
    assert chosen.exactness.exact
    assert chosen.sentence.startswith("lean, weights ")
    assert chosen.model is not None
    assert {parameter.device.type for parameter in chosen.model.parameters()} == {"meta"}
    assert (chooser.loads, chooser.probed) == (1, ["lean"])
    assert " lean" in chosen.numerics(CPU)


@pytest.mark.parametrize(
    ("lean", "transformers", "kind", "probed", "loads"),
    [
        (NO, YES, "transformers", ["lean", "transformers"], 2),
        (NO, NO, "lean", ["lean", "transformers"], 2),
        (NEVER, YES, "lean", ["lean"], 1),
    ],
    ids=["only transformers is exact", "nothing is", "no trial was made"],
)
def test_exactness_comes_before_speed(
    play: Play, lean: ProbeResult, transformers: ProbeResult, kind: str, probed: list[str], loads: int
) -> None:
    chooser = play(lean=lean, transformers=transformers)
    chosen = chooser.choose()
    assert chosen.kind == kind
    assert chosen.exactness.exact == (kind == "transformers")
    assert (chooser.probed, chooser.loads) == (probed, loads)


def test_a_verdict_is_kept_for_each_kind(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Chooser(tiny_llama, monkeypatch, tmp_path, lean=NO, transformers=YES)
    assert first.choose().kind == "transformers"
    second = Chooser(tiny_llama, monkeypatch, tmp_path)
    assert second.choose().kind == "transformers"
    assert second.probed == []


def test_weights_are_read_without_the_model_once_it_is_known_how(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Chooser(tiny_llama, monkeypatch, tmp_path, reads=True, lean=YES)
    learned = first.choose()
    assert (first.loads, learned.model is None) == (1, False)
    second = Chooser(tiny_llama, monkeypatch, tmp_path, reads=True)
    chosen = second.choose()
    assert (second.loads, second.probed, chosen.model) == (0, [], None)
    assert (chosen.sentence, chosen.numerics(CPU)) == (learned.sentence, learned.numerics(CPU))
    other = Chooser(tiny_llama, monkeypatch, tmp_path, reads=True, transformers=NO)
    assert other.choose(step="transformers").model is not None
    assert other.loads == 1


def test_a_step_that_is_not_exact_gives_way_to_the_model_also_without_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loads in (2, 1):
        chooser = Chooser(tiny_llama, monkeypatch, tmp_path, reads=True, lean=NO, transformers=YES)
        chosen = chooser.choose()
        assert (chosen.kind, chooser.loads) == ("transformers", loads)
        assert chosen.model is not None
        assert all(one.device.type == "cpu" for one in chosen.model.parameters())


def test_what_reads_other_numbers_is_not_used(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainRecipe, "gives", lambda *_: False)
    for _ in range(2):
        chooser = Chooser(tiny_llama, monkeypatch, tmp_path, reads=True, lean=YES)
        chooser.choose()
        assert chooser.loads == 1


def test_a_probe_of_what_was_read_without_the_model_asks_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's elementwise functions are tried at the widths that the model's config says."""
    Chooser(tiny_llama, monkeypatch, tmp_path, reads=True).choose(exact=False)
    later = Chooser(tiny_llama, monkeypatch, tmp_path, reads=True, lean=YES)
    assert later.choose(step="lean").exactness.exact
    assert (later.loads, later.probed) == (1, ["lean"])


@pytest.mark.parametrize("exact", [True, False])
def test_the_setting_decides(play: Play, exact: bool) -> None:
    verdict = YES if exact else NO
    chosen = play(transformers=verdict).choose(step="transformers")
    assert chosen.kind == "transformers"
    assert chosen.sentence == "the modules of transformers (engine.step)"
    assert "lean" not in chosen.numerics(CPU)
    chooser = play(lean=verdict)
    assert chooser.choose(step="lean").kind == "lean"
    assert chooser.loads == 1


def test_a_family_without_a_lean_form_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = make_tiny_model(tmp_path / "gemma2", "gemma2")
    chosen = Chooser(gemma, monkeypatch, transformers=NO).choose()
    assert chosen.kind == "transformers"
    assert "gemma2" in chosen.sentence
    with pytest.raises(ModelRefused, match=r"engine\.step is lean.*gemma2"):
        Chooser(gemma, monkeypatch).choose(step="lean")


def test_several_gpus_and_cuda_keep_the_modules_of_transformers(play: Play) -> None:
    sentence = play().choose(tensor_parallel=2, kv_groups=2).sentence
    assert sentence == "the modules of transformers (native-bf16, native, lean: engine.tensor_parallel)"


@pytest.mark.parametrize(
    ("model_type", "engine", "compiles", "expected"),
    [
        ("llama", {}, True, True),
        ("llama", {"step": "native"}, True, True),
        ("llama", {"step": "native-bf16"}, True, True),
        ("llama", {}, False, False),
        ("gemma2", {}, True, False),
        ("llama", {"step": "lean"}, True, False),
        ("llama", {"kv_dtype": "int8"}, True, False),
        ("llama", {"tensor_parallel": 2, "kv_groups": 2}, True, False),
    ],
)
def test_whether_the_native_step_is_to_be_expected_is_known_before_the_model_is_loaded(
    model_type: str,
    engine: dict[str, object],
    compiles: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dtype depends on it, and on the dtype what is loaded."""

    def build_library(*_: object, **__: object) -> Path:
        if not compiles:
            raise NotNative("planted")
        return tmp_path

    monkeypatch.setattr("samovar.replicas.start.step_choice.build_library", build_library)
    monkeypatch.setattr("samovar.replicas.start.step_choice.pair_variant_here", lambda: AVX512_BF16)
    settings, spec = EngineSettings.model_validate(engine), Mock(model_type=model_type, rope="{}")
    assert expects_native(settings, spec, CPU, tmp_path) == expected
    for factor in (1.0, 0.5):
        spec.rope = json.dumps({"partial_rotary_factor": factor})
        assert expects_native(settings, spec, CPU, tmp_path) == (expected and factor == 1)
    assert not expects_native(settings, spec, torch.device("cuda", 0), tmp_path)


@pytest.mark.parametrize(("step", "left"), [("native", 1), ("lean", 2)])
def test_threads_of_torch_are_left_to_steps_that_compute_by_it(
    tiny_llama: Path, step: str, left: int
) -> None:
    """With the native step they would only spin behind each draw of a token."""
    before = torch.get_num_threads()
    try:
        assert small_engine(tiny_llama, step=step, threads=2).info.threads == 2
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)


def test_of_layers_that_are_alike_two_are_probed() -> None:
    plain = random_plain(Shape(layers=6), torch.float32)
    assert layers_of_all_kinds(plain) == 6  # the last one has no rotation
    alike = plain.layers[0]
    assert layers_of_all_kinds(replace(plain, layers=(alike,) * 6)) == 2
    assert layers_of_all_kinds(replace(plain, layers=(alike,))) == 1
    windowed, biased = replace(alike, window=64), replace(alike, out_bias=alike.mlp_norm)
    for other in (windowed, biased):
        assert layers_of_all_kinds(replace(plain, layers=(alike, alike, other, alike, other))) == 3
