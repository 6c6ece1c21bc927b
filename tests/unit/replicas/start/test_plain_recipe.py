"""What a recipe reads is what transformers loads, bit for bit; a start that has one does without it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter

from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.plain import PLAIN_TYPES, PlainLayer, PlainModel, plain_model
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.start.checkpoint import PlainRecipe, recipe_of
from tests.house import ROOT
from tests.support.engines.tiny_models import Family, make_tiny_model

CPU = torch.device("cpu")
MEMBERS: list[tuple[str, dict[str, bool]]] = [
    *((family, {}) for family in sorted(PLAIN_TYPES)),
    ("llama", {"bias": True}),
    ("mistral", {"window": True}),
    ("qwen2", {"window": True}),
]
NAMES = [" ".join((family, *more)) for family, more in MEMBERS]
KEPT = TypeAdapter(PlainRecipe | None)


def loaded(model_dir: Path, dtype: torch.dtype) -> PlainModel:
    return plain_model(load_model(inspect_model(model_dir), dtype, CPU))


def assert_same(ours: Any, theirs: Any) -> None:
    """Every tensor bit for bit, every number equal."""
    for one in fields(theirs):
        mine, other = getattr(ours, one.name), getattr(theirs, one.name)
        if one.name == "layers":
            assert len(mine) == len(other)
            for pair in zip(mine, other, strict=True):
                assert_same(*pair)
        elif isinstance(other, torch.Tensor):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape), one.name
            assert torch.equal(mine, other), one.name
        else:
            assert mine == other, one.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "more"), MEMBERS, ids=NAMES)
def test_the_recipe_reads_what_transformers_loads(
    family: str, more: dict[str, bool], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, cast(Family, family), **more)
    theirs = loaded(model, dtype)
    recipe = recipe_of(theirs)
    assert recipe.gives(theirs, model)
    kept = KEPT.validate_json(KEPT.dump_json(recipe))
    assert kept == recipe
    ours = kept.read(model, dtype)
    assert_same(ours, theirs)
    assert ours.is_tied == theirs.is_tied


def test_what_it_reads_lies_in_memory_of_its_own(tiny_llama: Path) -> None:
    """Weights whose file is replaced below a running service stay what they were."""
    recipe = recipe_of(loaded(tiny_llama, torch.float32))
    first, second = (recipe.read(tiny_llama, torch.float32) for _ in range(2))
    first.embedding.zero_()
    first.layers[0].qkv.zero_()
    assert_same(second, recipe.read(tiny_llama, torch.float32))


def planted(plain: PlainModel, where: str) -> PlainModel:
    """The model with one number changed: as if transformers read a file in a way of its own."""
    layer: PlainLayer = plain.layers[1]
    if where in ("qkv", "down", "input_norm"):
        tensor = getattr(layer, where).clone()
        tensor.view(-1)[-1] += 1
        changed = replace(layer, **{where: tensor})
        return replace(plain, layers=(plain.layers[0], changed))
    tensor = plain.embedding.clone()
    tensor[-1, -1] += 1
    return replace(plain, embedding=tensor, head=tensor)


@pytest.mark.parametrize("where", ["qkv", "down", "input_norm", "embedding"])
def test_a_recipe_that_reads_one_other_number_is_not_used(tiny_llama: Path, where: str) -> None:
    plain = loaded(tiny_llama, torch.float32)
    assert recipe_of(plain).gives(plain, tiny_llama)
    other = planted(plain, where)
    assert not recipe_of(other).gives(other, tiny_llama)


def test_a_model_whose_tensors_have_other_names_has_no_recipe(tiny_llama: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, "qwen3")
    plain = loaded(other, torch.float32)  # its norms of heads are not in Llama's files
    assert not recipe_of(plain).gives(plain, tiny_llama)


START = """
import sys
from pathlib import Path
from tests.support.engines.engines import Driver
from samovar.configs.sections import TierSettings
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.start.build import Start

model, keep = map(Path, sys.argv[1:])
settings = Settings(
    model=ModelSettings(path=model, dtype="float32"),
    engine=EngineSettings(device="cpu", threads=1, step_tokens_max=64),
    tiers=TierSettings(),
)
built = Start(settings, model, "test", pages=64, keep=keep).run()
answer = Driver(built.engine).run([(7 * i + 3) % 500 for i in range(40)], max_tokens=12, logprobs=2)
print(built.info.step, built.info.exactness)
print(answer.ids, answer.text.encode(), answer.deltas)
print(built.engine.requests.intake.namespace.hex())
print("transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_second_start_answers_the_same_and_imports_no_transformers(family: Any, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family)
    told = []
    for _ in range(2):
        command = [sys.executable, "-c", START, str(model), str(tmp_path / "kept")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(done.stdout.splitlines())
    first, second = told
    assert second[:-1] == first[:-1]
    assert (first[-1], second[-1]) == ("True True", "False False")
