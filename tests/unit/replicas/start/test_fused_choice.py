"""The fused step serves where it computes what transformers' modules do; else they serve, and say why."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench._gpu_attention import attending_by
from samovar.configs.settings import EngineSettings
from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.fused import step as fused_step
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.plain import plain_model
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk
from samovar.replicas.start import step_choice
from samovar.replicas.start.step_choice import ChosenStep, NotFused, StepChoice, compare_fused, kinds_of
from tests.kernels.fused import MEMBERS, NAMES, FusedCase, served
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.fused_reference import FusedReference, add_norm, rotate_write
from tests.support.engines.tiny_models import make_tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels by torch, and CPUs that the fused step serves on."""
    monkeypatch.setattr(fused_step, "_kernels", FusedReference)
    monkeypatch.setattr(step_choice, "kinds_of", lambda device: ["fused", "transformers"])


def choose(model_dir: Path, **engine: object) -> tuple[ChosenStep, list[torch.nn.Module]]:
    """Return what is chosen, and the models that were loaded for it."""
    spec, loaded = inspect_model(model_dir), list[torch.nn.Module]()
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, torch.float32)

    def load() -> torch.nn.Module:
        loaded.append(load_model(spec, torch.float32, CPU))
        return loaded[-1]

    settings = EngineSettings.model_validate({"exact": False, **engine})
    choice = StepChoice(settings, geometry, CPU, load, MeasurementCache(None, 60.0, "a model"))
    return choice.settle(spec.vocab, 64), loaded


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("is_int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "more"), MEMBERS, ids=NAMES)
def test_what_is_right_is_taken(family: str, more: dict[str, Any], dtype: torch.dtype, is_int8: bool) -> None:
    model = served(family, dtype, **more)
    compare_fused(model, plain_model(model), FusedCase(model, is_int8=is_int8, dtype=dtype).geometry, CPU)


def at_half_the_speed(*args: Any, **names: Any) -> None:
    cos, sin = args[5], args[6]
    rotate_write(*args[:5], (cos + 1) / 2, sin / 2, *args[7:], **names)


def without_the_epsilon(*args: Any, **names: Any) -> None:
    add_norm(*args[:-1], 0.1, **names)


def a_little_more(*args: Any, **names: Any) -> None:
    add_norm(*args, **names)
    args[1].mul_(1.04)


def without_a_row(*args: Any, **names: Any) -> None:
    add_norm(*args, **names)
    args[1][0] = torch.nan


@pytest.mark.parametrize(
    ("kernel", "planted", "reason"),
    [
        ("rotate_write", at_half_the_speed, r"differ by .* of those of transformers' modules"),
        ("add_norm", without_the_epsilon, "differ by"),
        ("add_norm", without_a_row, "differ by nan"),
    ],
)
def test_what_is_wrong_is_refused(
    kernel: str, planted: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = FusedReference()
    setattr(played, kernel, type(played.add_norm)(planted))
    monkeypatch.setattr(fused_step, "_kernels", lambda: played)
    model = served("qwen3", torch.bfloat16)
    with pytest.raises(NotFused, match=reason):
        compare_fused(model, plain_model(model), FusedCase(model, dtype=torch.bfloat16).geometry, CPU)


def test_what_is_a_little_wrong_is_refused_by_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 logits may be off by more than this is."""
    played = FusedReference()
    monkeypatch.setattr(played, "add_norm", type(played.add_norm)(a_little_more), raising=False)
    monkeypatch.setattr(fused_step, "_kernels", lambda: played)
    model = served("llama", torch.bfloat16)
    with pytest.raises(NotFused, match=r"K of layer 0 differ by 0\.0"):
        compare_fused(model, plain_model(model), FusedCase(model, dtype=torch.bfloat16).geometry, CPU)


def raising(error: Exception) -> Callable[[], ModuleType]:
    def kernels() -> ModuleType:
        raise error

    return kernels


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("No module named 'triton'"), r"triton cannot be imported \(No module named 'triton'\)"),
        (RuntimeError("no C compiler"), "RuntimeError: no C compiler"),
        (torch.OutOfMemoryError("all gone"), "OutOfMemoryError: all gone"),
    ],
)
@pytest.mark.usefixtures("played")
def test_what_does_not_run_leaves_the_modules_serving_and_the_sentence_says_why(
    error: Exception, reason: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_step, "_kernels", raising(error))
    chosen, loaded = choose(tiny_llama)
    assert (chosen.kind, chosen.form, chosen.model) == ("transformers", None, loaded[0])
    assert len(loaded) == 1, "its modules compute on what has been joined"
    assert all(parameter.device == CPU for parameter in loaded[0].parameters())
    assert re.match(rf"the modules of transformers \(fused: {reason}\)", chosen.sentence)
    with pytest.raises(ModelRefused, match=rf"engine\.step is fused, which does not serve here: {reason}"):
        choose(tiny_llama, step="fused")


@pytest.mark.usefixtures("played")
def test_a_lost_device_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(fused_step, "_kernels", raising(lost))
    model = served("llama")
    with pytest.raises(torch.AcceleratorError):
        compare_fused(model, plain_model(model), FusedCase(model).geometry, CPU)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("step", ["auto", "fused"])
def test_it_serves_takes_the_weights_over_and_leaves_blocks_interchangeable(
    step: str, tiny_llama: Path
) -> None:
    chosen, loaded = choose(tiny_llama, step=step)
    assert chosen.kind == "fused"
    assert chosen.sentence.startswith("fused: ")
    assert (chosen.numerics(CPU), chosen.numerics(CUDA), chosen.attention) == ("", "", None)
    assert len(loaded) == 1
    assert {parameter.device.type for parameter in loaded[0].parameters()} == {"meta"}


@pytest.mark.usefixtures("played")
def test_a_weight_is_held_once(tiny_llama: Path) -> None:
    spec = inspect_model(tiny_llama)
    model = load_model(spec, torch.float32, CPU)
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, torch.float32)

    def held() -> int:
        storages = {one.untyped_storage() for one in model.parameters()}
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

    before = held()
    plain = plain_model(model)
    compare_fused(model, plain, geometry, CPU)
    assert held() == before
    addresses = {one.untyped_storage().data_ptr() for one in model.parameters()}
    ours = [plain.embedding, plain.head, *(layer.qkv for layer in plain.layers)]
    assert {one.untyped_storage().data_ptr() for one in ours} <= addresses


@pytest.mark.usefixtures("played")
def test_exact_mode_several_gpus_and_other_families_keep_the_modules(
    tiny_llama: Path, tmp_path: Path
) -> None:
    assert "(fused: engine.exact)" in choose(tiny_llama, exact=True)[0].sentence
    assert "(fused: engine.tensor_parallel)" in choose(tiny_llama, tensor_parallel=2, kv_groups=2)[0].sentence
    gemma = make_tiny_model(tmp_path / "gemma2", "gemma2")
    assert "(fused: models of the type gemma2" in choose(gemma)[0].sentence


def test_cpus_never_ask_for_it_and_gpus_for_nothing_else(tiny_llama: Path) -> None:
    assert kinds_of(CPU) == ["native-bf16", "native", "lean", "transformers"]
    assert kinds_of(CUDA) == ["fused", "transformers"]
    with pytest.raises(ModelRefused, match=r"engine\.step is fused.*the model is on cpu"):
        choose(tiny_llama, step="fused")
    assert "fused" not in choose(tiny_llama)[0].sentence


@pytest.mark.usefixtures("played")
def test_a_benchmark_runs_another_attention_over_the_same_weights(tiny_llama: Path) -> None:
    """The modules have none any more."""
    runner = small_engine(tiny_llama, step="fused", exact=False).engine.runner
    chunk, pages = Chunk(bare_sequence(prompt_of(20), [1, 2]), 0, 20), torch.tensor([1, 2])
    found = [
        one.run([chunk]).clone() for one in (runner, attending_by(runner, GatherSdpa(False, torch.float32)))
    ]
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
    assert runner.pool.layer(0).read(pages)[0][:20].abs().sum() > 0


@pytest.mark.usefixtures("played")
def test_a_whole_engine_answers_as_by_the_modules(tiny_llama: Path) -> None:
    answers = []
    for step in ("fused", "transformers"):
        built = small_engine(tiny_llama, step=step, exact=False)
        assert built.engine.runner.forward.name == step
        driver = Driver(built.engine)
        keys = [driver.submit(prompt_of(20 + 30 * seed, seed=seed), max_tokens=12) for seed in (0, 1)]
        driver.drain()
        answers.append([driver.answers[key].token_ids for key in keys])
    assert answers[0] == answers[1]
