"""Plain models with random weights, of any shape, and what they compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from samovar.replicas.forward.plain import PlainLayer, PlainModel


@dataclass(frozen=True)
class Shape:
    """What a plain model is besides its weights."""

    q_heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    hidden: int = 96
    inner: int = 160
    vocab: int = 71
    layers: int = 2
    has_biases: bool = False
    has_head_norms: bool = False
    window: int | None = None
    multiplier: float = 1.0


def random_plain(shape: Shape, dtype: torch.dtype, seed: int = 0) -> PlainModel:
    """A model whose last layer has no rotation, and no window."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, around: float = 0.0, width: float = 1.0) -> torch.Tensor:
        whole = torch.randint(-(2**15), 2**15, size, generator=generator)  # the same on every CPU
        return (around + width * 3**0.5 * (whole.double() / 2**15)).to(dtype)

    q_width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def layer(number: int) -> PlainLayer:
        is_last = number == shape.layers - 1
        norms = [draw(shape.head_dim, around=1.0, width=0.1) if shape.has_head_norms else None for _ in "qk"]
        return PlainLayer(
            input_norm=draw(shape.hidden, around=1.0, width=0.1),
            qkv=draw(q_width + 2 * kv_width, shape.hidden, width=shape.hidden**-0.5),
            qkv_bias=draw(q_width + 2 * kv_width, width=0.3) if shape.has_biases else None,
            q_norm=norms[0],
            k_norm=norms[1],
            out=draw(shape.hidden, q_width, width=q_width**-0.5),
            out_bias=draw(shape.hidden, width=0.3) if shape.has_biases else None,
            mlp_norm=draw(shape.hidden, around=1.0, width=0.1),
            gate_up=draw(2 * shape.inner, shape.hidden, width=shape.hidden**-0.5),
            down=draw(shape.hidden, shape.inner, width=shape.inner**-0.5),
            uses_rope=not is_last,
            window=None if is_last else shape.window,
        )

    half = torch.arange(shape.head_dim // 2, dtype=torch.float32)
    embedding = draw(shape.vocab, shape.hidden)
    return PlainModel(
        model_type="llama",
        layers=tuple(layer(number) for number in range(shape.layers)),
        embedding=embedding,
        final_norm=draw(shape.hidden, around=1.0, width=0.1),
        head=draw(shape.vocab, shape.hidden, width=shape.hidden**-0.5),
        norm_eps=1e-5,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        attention_scale=shape.head_dim**-0.5,
        inverse_frequencies=10000.0 ** (-2 * half / shape.head_dim),
        rope_scale=shape.multiplier,
        embedding_multiplier=shape.multiplier,
        residual_multiplier=1 / shape.multiplier,
        logits_divisor=shape.multiplier,
        activation="silu",
    )


def in_int8(plain: PlainModel) -> PlainModel:
    """The same with its matrices rounded to int8 codes times a scale of each output, in float64."""

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        scales = matrix.float().abs().amax(dim=1, keepdim=True) / 127
        return (matrix.float() / scales).round().double() * scales.double()

    layers = tuple(
        replace(one, **{name: rounded(getattr(one, name)) for name in ("qkv", "out", "gate_up", "down")})
        for one in plain.layers
    )
    return replace(plain, layers=layers, head=rounded(plain.head))


def reference(plain: PlainModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[tokens, vocab]` and KV `[layers, 2, tokens, kv_heads, head_dim]` of one sequence, in float64.

    Of the model's dtype are its weights, and K and V as they are kept.
    """
    positions = torch.arange(len(tokens))
    angles = (positions[:, None].float() * plain.inverse_frequencies).double()
    cos, sin = (part.repeat(1, 2)[:, None] * plain.rope_scale for part in (angles.cos(), angles.sin()))

    def norm(rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return rows
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + plain.norm_eps) * weight.double()

    def turned(heads: torch.Tensor) -> torch.Tensor:
        low, high = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-high, low), dim=-1) * sin

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = rows @ weight.double().T
        return product if bias is None else product + bias.double()

    x, kv = plain.embedding[tokens].double() * plain.embedding_multiplier, []
    widths = [heads * plain.head_dim for heads in (plain.q_heads, plain.kv_heads, plain.kv_heads)]
    for layer in plain.layers:
        joined = linear(norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        q, k, v = (part.unflatten(1, (-1, plain.head_dim)) for part in joined.split(widths, dim=1))
        q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        if layer.uses_rope:
            q, k = turned(q), turned(k)
        k, v = (part.to(plain.dtype).double() for part in (k, v))
        kv.append(torch.stack((k, v)))
        group = plain.q_heads // plain.kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * plain.attention_scale
        apart = positions[:, None] - positions
        hidden = (apart < 0) | (apart >= (layer.window or len(tokens)))
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        heads = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(group, 1)).flatten(1)
        x = x + linear(heads, layer.out, layer.out_bias) * plain.residual_multiplier
        gate, up = linear(norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * up
        x = x + linear(product, layer.down) * plain.residual_multiplier
    logits = linear(norm(x, plain.final_norm), plain.head) / plain.logits_divisor
    return logits, torch.stack(kv).to(plain.dtype)
