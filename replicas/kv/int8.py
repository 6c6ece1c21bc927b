"""K and V in int8: how a vector is rounded, and what the rounded one is read as.

A vector of one token and KV head is stored as `head_dim` codes, and a scale that all of them share. The
bytes are the same wherever they are computed: float32, true division, halves to even, and the scale is
rounded to bfloat16 before anything is divided by it. One scale for each token and head, not for each channel:
a token is written at once, without knowing the others of its block (docs/adr/012-int8-kv.md).
"""

from __future__ import annotations

import torch

CODE_MAX = 127
SCALE_DTYPE = torch.bfloat16
SCALE_MIN = 2.0**-126
"""The smallest normal number: of zeros, too, a scale is one that can be divided by on every device."""


def quantise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round vectors `[..., head_dim]` to int8 codes of the same shape and bfloat16 scales `[...]`.

    A vector with an Inf or a NaN gets a scale that is none either, so that it is read as no number, too.
    """
    values = vectors.float()
    largest = values.abs().amax(dim=-1)
    # By a tensor: CUDA divides by a Python number as a multiplication by its reciprocal.
    scales = (largest / torch.full_like(largest, CODE_MAX)).clamp_min_(SCALE_MIN).to(SCALE_DTYPE)
    codes = (values / scales.float().unsqueeze(-1)).round_().clamp_(-CODE_MAX, CODE_MAX)
    return codes.to(torch.int8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what codes `[..., head_dim]` with scales `[...]` stand for, rounded once to `dtype`."""
    # Codes and scales are whole in float32 and bfloat16; a scale may be too small for float16.
    wide = torch.float32 if dtype == torch.float16 else dtype
    return codes.to(wide).mul_(scales.to(wide).unsqueeze(-1)).to(dtype)
