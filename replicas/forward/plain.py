"""Describes a Llama-like model as plain tensors and numbers, for forward passes of our own.

Read from a loaded transformers model, so that weights, config and their quirks have one source. What cannot
be described is refused: nothing of a model is left out in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from samovar.replicas.model import SERVED_ROPE_TYPES

PLAIN_TYPES = frozenset({"granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"})
"""Families whose code has been read: what they compute is what `PlainModel` says."""
ACTIVATIONS = frozenset({"silu"})
_UNKNOWN_TO_IT = ("attn_logit_softcapping", "final_logit_softcapping", "mlp_bias")
"""Fields of a config that change what is computed, in ways that have no field here."""


class NotPlain(Exception):
    """A model that `PlainModel` cannot describe; the message is a sentence that says why."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainLayer:
    """One layer: `x += m * out(attend(norm(x)))`, `y = norm(x)`, `x += m * down(act(gate(y)) * up(y))`.

    All matrices are `[outputs, inputs]`, contiguous. `qkv`: the rows of all query heads, then of all key
    heads, then of all value heads; `gate_up`: all rows of the gate, then all of up. `q_norm`, `k_norm`:
    `[head_dim]`, of each head before its rotation. `window`: a token sees itself and the `window - 1` tokens
    before it; None: all.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    uses_rope: bool
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class PlainModel:
    """A whole model, in one dtype on one device.

    `head`: `[vocab, hidden]`, the very tensor of `embedding` where they are tied. `norm_eps`: of all norms,
    which are RMSNorms: in float32, `x * rsqrt(mean(x^2) + eps)`, rounded to the dtype, times the weight.
    `inverse_frequencies`: float32 `[head_dim / 2]`; number `i` and number `i + head_dim / 2` of a head are
    rotated by position times the `i`-th, cos and sin scaled by `rope_scale` and rounded to the dtype.
    `embedding_multiplier`, `residual_multiplier` (`m` of `PlainLayer`), `logits_divisor`: 1.0 changes nothing
    and no operation is done for it.
    """

    model_type: str
    layers: tuple[PlainLayer, ...]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    norm_eps: float
    q_heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    inverse_frequencies: torch.Tensor
    rope_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    activation: str

    @property
    def is_tied(self) -> bool:
        return self.head is self.embedding

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab(self) -> int:
        return self.head.shape[0]

    @property
    def intermediate(self) -> int:
        return self.layers[0].down.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets, `[rows, hidden]`, of int token ids `[rows]`."""
        rows = F.embedding(token_ids, self.embedding)
        return rows if self.embedding_multiplier == 1.0 else rows * self.embedding_multiplier

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[rows, head_dim / 2]` of the rotations at int positions `[rows]`, as stored."""
        angles = positions[:, None].float() * self.inverse_frequencies
        cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
        return cos.to(self.dtype), sin.to(self.dtype)


def plain_model(model: torch.nn.Module) -> PlainModel:
    """Describe a loaded transformers causal LM. Raises `NotPlain`.

    The model stays usable, and nothing is held twice: its projections become views of the fused matrices.
    """
    config: Any = model.config
    _refuse_by_config(config)
    base: Any = model.base_model
    reader = _Reader(model)
    layers = tuple(_layer(reader, one, number, config) for number, one in enumerate(base.layers))
    first: Any = base.layers[0].self_attn
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    # Where they are tied, one and the same parameter.
    head, head_bias = reader.linear(model.get_output_embeddings())  # type: ignore[operator]
    if head_bias is not None:
        raise NotPlain("its output layer has a bias")
    described = PlainModel(
        model_type=config.model_type,
        layers=layers,
        embedding=reader.take(embedding.weight),
        final_norm=reader.norm(base.norm),
        head=head,
        norm_eps=reader.eps,
        q_heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(first.head_dim),
        attention_scale=float(first.scaling),
        inverse_frequencies=base.rotary_emb.inv_freq.float(),
        rope_scale=float(base.rotary_emb.attention_scaling),
        embedding_multiplier=float(getattr(base, "embedding_multiplier", 1.0)),
        residual_multiplier=float(getattr(base.layers[0], "residual_multiplier", 1.0)),
        logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
        activation=config.hidden_act,
    )
    reader.refuse_rest()
    _check_shapes(described)
    _check_rotation(described, base.rotary_emb, int(config.max_position_embeddings))
    return described


def _refuse_by_config(config: Any) -> None:
    if config.model_type not in PLAIN_TYPES:
        raise NotPlain(f"models of the type {config.model_type} have no form of our own")
    if config.hidden_act not in ACTIVATIONS:
        raise NotPlain(f"its activation function {config.hidden_act} has no form of our own")
    for name in _UNKNOWN_TO_IT:
        if getattr(config, name, None):
            raise NotPlain(f"{name} of its config has no form of our own")


class _Reader:
    """Takes a model's parameters one by one, and knows which ones are left."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._left = {id(one): name for name, one in model.named_parameters()}
        self._dtypes = {one.dtype for one in model.parameters()}
        if len(self._dtypes) > 1:
            raise NotPlain(f"its weights have several dtypes: {', '.join(sorted(map(str, self._dtypes)))}")
        self._eps: set[float] = set()

    @property
    def eps(self) -> float:
        """The norms' epsilon, once all are read."""
        if len(self._eps) != 1:
            raise NotPlain(f"its norms have several epsilons: {sorted(self._eps)}")
        return next(iter(self._eps))

    def take(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        self._left.pop(id(parameter), None)
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        return parameter

    def norm(self, norm: Any) -> torch.Tensor:
        if not type(norm).__name__.endswith("RMSNorm"):
            raise NotPlain(f"its norms are of the kind {type(norm).__name__}")
        self._eps.add(float(norm.variance_epsilon))
        return self.take(norm.weight)

    def linear(self, linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.fused(linear)

    def fused(self, *linears: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weights and biases of layers with one input, one below the other."""
        if any(type(one) is not torch.nn.Linear for one in linears):
            raise NotPlain(f"it has a {type(linears[0]).__name__} where a linear layer is expected")
        weight = self._joined([one.weight for one in linears])
        biases = [one.bias for one in linears if one.bias is not None]
        if biases and len(biases) < len(linears):
            raise NotPlain("some of its projections with one input have a bias, and some have none")
        return weight, self._joined(biases) if biases else None

    def _joined(self, parts: list[torch.nn.Parameter]) -> torch.Tensor:
        taken = [self.take(part) for part in parts]
        if len(taken) == 1:
            return taken[0]
        joined = torch.cat([one.detach() for one in taken])
        views = joined.split([len(one) for one in taken])  # type: ignore[no-untyped-call]
        for part, view in zip(parts, views, strict=True):
            part.data = view
        return joined

    def refuse_rest(self) -> None:
        if self._left:
            raise NotPlain(f"it has {next(iter(self._left.values()))}, which has no place in our form")


def _layer(reader: _Reader, layer: Any, number: int, config: Any) -> PlainLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = reader.fused(attention.q_proj, attention.k_proj, attention.v_proj)
    out, out_bias = reader.linear(attention.o_proj)
    gate_up, gate_up_bias = reader.fused(mlp.gate_proj, mlp.up_proj)
    down, down_bias = reader.linear(mlp.down_proj)
    if gate_up_bias is not None or down_bias is not None:
        raise NotPlain(f"the feed-forward of layer {number} has biases")
    has_norms = hasattr(attention, "q_norm") and hasattr(attention, "k_norm")
    return PlainLayer(
        input_norm=reader.norm(layer.input_layernorm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=reader.norm(attention.q_norm) if has_norms else None,
        k_norm=reader.norm(attention.k_norm) if has_norms else None,
        out=out,
        out_bias=out_bias,
        mlp_norm=reader.norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
        uses_rope=bool(getattr(attention, "use_rope", True)),
        window=_window(attention, config),
    )


def _window(attention: Any, config: Any) -> int | None:
    """Return what the family's code hands to attention: Llama's and Granite's hand no window at all."""
    of_mistral = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    window = getattr(attention, "sliding_window", of_mistral)
    return None if window is None else int(window)


def _check_shapes(plain: PlainModel) -> None:
    """Check the sizes that the config states against the tensors. Raises `NotPlain`."""
    hidden, inner = plain.hidden, plain.intermediate
    q_rows, kv_rows = plain.q_heads * plain.head_dim, plain.kv_heads * plain.head_dim
    for number, layer in enumerate(plain.layers):
        expected = {
            "qkv": (q_rows + 2 * kv_rows, hidden),
            "out": (hidden, q_rows),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for name, shape in expected.items():
            found = tuple(getattr(layer, name).shape)
            if found != shape:
                raise NotPlain(f"{name} of layer {number} is {found}, and by its config {shape}")


def _check_rotation(plain: PlainModel, rotary: Any, context_tokens_max: int) -> None:
    """Check that rotations are as described, by the model's own code. Raises `NotPlain`."""
    kind = rotary.rope_type
    if kind not in SERVED_ROPE_TYPES:
        raise NotPlain(f"its rotation ({kind}) is not known to depend on the position alone")
    if 2 * len(plain.inverse_frequencies) != plain.head_dim:
        raise NotPlain("only a part of each head is rotated")
    positions = torch.tensor([0, 1, 2, 17, context_tokens_max - 1], device=plain.embedding.device)
    with torch.inference_mode():
        ours = plain.cos_sin(positions)
        theirs = rotary(plain.embedding[:1], positions[None])
    for mine, whole in zip(ours, theirs, strict=True):
        if not torch.equal(torch.cat((mine, mine), dim=-1), whole[0]):
            raise NotPlain(f"its rotation ({kind}) is not the one that its frequencies say")
