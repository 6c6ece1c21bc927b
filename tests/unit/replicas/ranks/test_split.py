"""What each rank holds: by the model's own plan, and only where that is nothing but cut linear layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from samovar.configs.settings import EngineSettings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import check_heads, inspect_model, read_weights
from samovar.replicas.ranks.split import RankSplit, narrow
from samovar.replicas.ranks.weights import read_part
from tests.support.engines.tiny_models import Family, make_tiny_model

LAYER = "model.layers.11."


def test_a_tensor_is_cut_as_the_plan_says() -> None:
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    first, last = (RankSplit(rank, 4, plan) for rank in (0, 3))
    assert (
        first.cut_of(LAYER + "self_attn.q_proj.weight") == first.cut_of(LAYER + "self_attn.q_proj.bias") == 0
    )
    assert first.cut_of(LAYER + "mlp.down_proj.weight") == 1
    whole = (
        "model.norm.weight",
        "lm_head.weight",
        LAYER + "mlp.down_proj.bias",
        LAYER + "mlp.up_proj.weight",
    )
    assert all(first.cut_of(name) is None for name in whole)
    assert [split.is_zero(LAYER + "mlp.down_proj.bias") for split in (first, last)] == [False, True]
    assert (first.span(12), last.span(12)) == (slice(0, 3), slice(9, 12))
    with pytest.raises(ValueError, match="10"):
        last.span(10)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_parts_of_all_ranks_are_the_weights(tmp_path: Path, family: Family) -> None:
    spec = inspect_model(make_tiny_model(tmp_path / family, family, q_heads=8, kv_heads=4))
    parts = []
    for rank in range(4):
        split = narrow(AutoConfig.from_pretrained(spec.path), spec, rank, 4)
        parts.append((split, read_part(spec, split, torch.float32)))
    whole = read_part(spec, RankSplit(0, 1, {}), torch.float32)
    assert {
        name for file in read_weights(spec.path) for name in (t.name for t in file.tensors)
    } == whole.keys()
    cuts = set()
    for name, tensor in whole.items():
        cut = parts[0][0].cut_of(name)
        cuts.add(cut)
        joined = parts[0][1][name] if cut is None else torch.cat([part[name] for _, part in parts], dim=cut)
        assert torch.equal(joined, tensor), name
    assert cuts == {None, 0, 1}


@pytest.mark.parametrize(
    ("family", "shape", "ranks", "why"),
    [
        (
            "llama",
            {"q_heads": 4, "kv_heads": 2},
            4,
            "has 2 KV heads, which 4 GPUs.*set engine.tensor_parallel to 1 or 2",
        ),
        ("phi3", {}, 2, "type 'phi3' is not cut: its plan for several GPUs has colwise_gather_output"),
        ("mixtral", {}, 2, "type 'mixtral' is not cut.*moe_tp_experts"),
        ("gpt_oss", {}, 2, "type 'gpt_oss' is not cut: it has no plan"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    tmp_path: Path, family: Family, shape: dict[str, int], ranks: int, why: str
) -> None:
    spec = inspect_model(make_tiny_model(tmp_path / family, family, **shape))
    with pytest.raises(ModelRefused, match=rf"engine.tensor_parallel={ranks}: .*{why}"):
        narrow(AutoConfig.from_pretrained(spec.path), spec, 0, ranks)


def test_an_odd_width_is_refused(tmp_path: Path) -> None:
    spec = inspect_model(make_tiny_model(tmp_path / "m", "llama", q_heads=8, kv_heads=4))
    config = AutoConfig.from_pretrained(spec.path)
    config.intermediate_size = 90
    check_heads(spec, 4)
    with pytest.raises(ModelRefused, match="intermediate_size=90, which 4 GPUs"):
        narrow(config, spec, 0, 4)


def test_gpus_hold_whole_groups_of_heads() -> None:
    assert EngineSettings(tensor_parallel=2, kv_groups=4).kv_groups == 4
    with pytest.raises(
        ValidationError, match=r"engine.kv_groups=1 .*engine.tensor_parallel=2.*Set engine.kv_groups to 2"
    ):
        EngineSettings(tensor_parallel=2)
    with pytest.raises(ValidationError):
        EngineSettings(tensor_parallel=3)
