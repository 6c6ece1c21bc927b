"""A model as plain tensors: what is read from which family, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from samovar.replicas.forward.plain import PLAIN_TYPES, NotPlain, PlainLayer, PlainModel, plain_model
from tests.support.engines.tiny_models import TIED, Family, tiny_config

MEMBERS: list[tuple[str, dict[str, bool]]] = [
    *((family, {}) for family in sorted(PLAIN_TYPES)),
    ("llama", {"bias": True}),
    ("mistral", {"window": True}),
    ("qwen2", {"window": True}),
    ("qwen3", {"window": True}),
]
NAMES = [" ".join((family, *more)) for family, more in MEMBERS]
TOKENS = 40
"""More than the window of the tiny models that have one."""


def made(family: str, change: dict[str, Any] | None = None, **more: Any) -> Any:
    """A model of random weights, norms and biases included. `change`: of its config."""
    config: Any = tiny_config(cast(Family, family), **more)
    for name, value in (change or {}).items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) * (0.2 if parameter.dim() == 2 else 0.5))
    return model.eval().requires_grad_(False)


def spelled_out(plain: PlainModel, tokens: list[int]) -> torch.Tensor:
    """The logits `[tokens, vocab]` as the record's docstrings say."""

    def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + plain.norm_eps) * weight

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    count, group = len(tokens), plain.q_heads // plain.kv_heads
    cos, sin = plain.cos_sin(torch.arange(count))
    rows = F.embedding(torch.tensor(tokens), plain.embedding) * plain.embedding_multiplier
    behind = torch.arange(count)[:, None] - torch.arange(count)
    for layer in plain.layers:
        heads = F.linear(norm(rows, layer.input_norm), layer.qkv, layer.qkv_bias)
        q, k, v = heads.view(count, -1, plain.head_dim).split([plain.q_heads, *[plain.kv_heads] * 2], dim=1)
        q = q if layer.q_norm is None else norm(q, layer.q_norm)
        k = k if layer.k_norm is None else norm(k, layer.k_norm)
        if layer.uses_rope:
            q, k = rotated(q), rotated(k)
        k, v = (one.repeat_interleave(group, dim=1) for one in (k, v))
        hidden = (behind < 0) | (behind >= (layer.window or count))
        scores = torch.einsum("ihd,jhd->hij", q, k) * plain.attention_scale
        seen = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        attended = F.linear(seen.reshape(count, -1), layer.out, layer.out_bias)
        rows = rows + plain.residual_multiplier * attended
        gate, up = F.linear(norm(rows, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        rows = rows + plain.residual_multiplier * F.linear(F.silu(gate) * up, layer.down)
    return F.linear(norm(rows, plain.final_norm), plain.head) / plain.logits_divisor


@pytest.mark.parametrize(("family", "more"), MEMBERS, ids=NAMES)
def test_the_record_says_what_the_model_computes(family: str, more: dict[str, bool]) -> None:
    model = made(family, **more)
    tokens = [(7 * i + 3) % 512 for i in range(TOKENS)]
    before = model(input_ids=torch.tensor([tokens])).logits[0]
    plain = plain_model(model)
    after = model(input_ids=torch.tensor([tokens])).logits[0]
    assert torch.equal(before, after), "reading a model must not change it"
    torch.testing.assert_close(spelled_out(plain, tokens), before, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("family", sorted(PLAIN_TYPES))
def test_nothing_is_held_twice(family: str) -> None:
    model = made(family)
    plain = plain_model(model)
    assert plain.is_tied == (family in TIED)
    held = [plain.embedding, plain.final_norm, *([] if plain.is_tied else [plain.head])]
    for layer in plain.layers:
        of_layer = (getattr(layer, name) for name in PlainLayer.__slots__)
        held += [one for one in of_layer if isinstance(one, torch.Tensor)]
    ours = {one.untyped_storage().data_ptr() for one in held}
    theirs = {one.untyped_storage().data_ptr() for one in model.parameters()}
    assert ours == theirs
    assert sum(one.numel() for one in held) == sum(one.numel() for one in model.parameters())


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def other_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1.0


def one_more_parameter(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))


def other_dtype(model: Any) -> None:
    model.model.norm.to(torch.float64)


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.forward = lambda x, positions: (torch.ones(1, 5, 16), torch.zeros(1, 5, 16))


@pytest.mark.parametrize(
    ("family", "change", "spoil", "reason"),
    [
        ("gemma2", {}, None, "models of the type gemma2"),
        ("llama", {"hidden_act": "gelu"}, None, "activation function gelu"),
        ("llama", {"mlp_bias": True}, None, "mlp_bias"),
        ("llama", {"rope_parameters": DYNAMIC}, None, "rotation"),
        ("llama", {}, other_epsilon, "several epsilons"),
        ("llama", {}, one_more_parameter, r"self_attn\.sinks"),
        ("llama", {}, other_dtype, "several dtypes"),
        ("llama", {}, other_frequencies, "not the one that its frequencies say"),
    ],
)
def test_what_cannot_be_described_is_refused(
    family: str, change: dict[str, Any], spoil: Callable[[Any], None] | None, reason: str
) -> None:
    model = made(family, change)
    if spoil is not None:
        spoil(model)
    with pytest.raises(NotPlain, match=reason):
        plain_model(model)
