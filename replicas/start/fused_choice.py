"""Compares the fused step with transformers' modules at start, on the weights and the device that serve."""

from __future__ import annotations

import torch

from samovar.replicas.forward import (
    ATTENTION_TOLERANCES,
    Forward,
    FusedForward,
    GatherSdpa,
    PlainModel,
    StepPacker,
    TransformersForward,
)
from samovar.replicas.kv import TRASH_PAGE, KvGeometry, KvPool
from samovar.replicas.model import in_a_line, is_device_lost
from samovar.replicas.scheduling import Chunk, bare_sequence

STRICT_LAYERS = 2
"""Whose K and V may be as far from the modules' as attention may be: `ATTENTION_TOLERANCES`, relative to
them. Those of the second say what the first one computes."""
LOGITS_OFF_MAX = 5
"""Times the tolerance of a layer: two right ways to round drift apart over a model's layers."""
INT8_TOLERANCE = 2e-2
"""Of vectors in int8: a code that is rounded the other way is a hundredth of the largest number."""
PROMPT, BESIDE, CHUNK = 30, 20, 17
"""Tokens of two prompts, and of a chunk behind the first one."""


class NotFused(Exception):
    """A model that the fused step does not compute here; the message is a sentence that says why."""


def compare_fused(
    model: torch.nn.Module, plain: PlainModel, geometry: KvGeometry, device: torch.device
) -> None:
    """Compare steps of a prompt, a chunk, and decodes, on pages of NaN; compiles what serving will run.

    `plain`: of `model`, and on the same memory. Raises `NotFused` if they differ or if the kernels do not
    run, and what says that the device is lost.
    """
    try:
        _compare(model, plain, geometry, device)
    except NotFused:
        raise
    except ImportError as error:
        raise NotFused(f"triton cannot be imported ({error})") from error
    except Exception as error:  # whatever a compiler may raise
        if is_device_lost(error):
            raise
        raise NotFused(in_a_line(error)) from error


@torch.inference_mode()
def _compare(model: torch.nn.Module, plain: PlainModel, geometry: KvGeometry, device: torch.device) -> None:
    blocks = -(-(PROMPT + CHUNK + 1) // geometry.block_tokens)
    first = bare_sequence(
        _tokens(plain, 2 * PROMPT, 13), list(range(2 * blocks, TRASH_PAGE + 1, -2))[:blocks]
    )
    # In no order, and each sequence's pages beside the other's.
    beside = bare_sequence(_tokens(plain, 2 * BESIDE, 29), [page - 1 for page in first.pages])
    steps = [
        [Chunk(first, 0, PROMPT)],
        [Chunk(beside, 0, BESIDE), Chunk(first, PROMPT, CHUNK)],
        [Chunk(first, PROMPT + CHUNK, 1), Chunk(beside, BESIDE, 1)],
    ]
    backend = GatherSdpa(False, geometry.dtype)
    pools = [KvPool(geometry, 1 + TRASH_PAGE + 2 * blocks, device) for _ in range(2)]
    forwards: list[Forward] = [
        TransformersForward(model, pools[0], backend, exact=False),
        FusedForward(plain, pools[1], backend),
    ]
    for pool in pools:
        pool.page_bytes.fill_(0xFF)  # NaN, wherever no token is
    tolerance = ATTENTION_TOLERANCES[geometry.dtype]
    if geometry.is_int8:
        tolerance = max(tolerance, INT8_TOLERANCE)
    packer = StepPacker(device, geometry.block_tokens)
    for step in steps:
        inputs = packer.pack(step)
        rows = torch.arange(inputs.shape.rows, device=device)
        truth, found = (one.logits(one.hidden(inputs), rows, len(rows)) for one in forwards)
        _check("logits", found, truth, LOGITS_OFF_MAX * tolerance)
    for layer in range(min(STRICT_LAYERS, geometry.layers)):
        for sequence, tokens in ((first, PROMPT + CHUNK + 1), (beside, BESIDE + 1)):
            both = [pool.gather_layer(layer, list(sequence.pages), 0, tokens).float() for pool in pools]
            for name, truth, found in zip("KV", *both, strict=True):
                _check(f"{name} of layer {layer}", found, truth, tolerance)


def _tokens(plain: PlainModel, count: int, first: int) -> list[int]:
    return [(7919 * number + first) % plain.vocab for number in range(count)]


def _check(what: str, found: torch.Tensor, truth: torch.Tensor, tolerance: float) -> None:
    off = ((found - truth).norm() / truth.norm()).item()
    if not off <= tolerance:  # NaN is not, either
        raise NotFused(f"its {what} differ by {off:.2g} of those of transformers' modules")
