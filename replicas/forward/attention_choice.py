"""Chooses the attention backend of a replica: the kernel where it is right, else what is right everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import torch

from samovar.replicas.forward.attention import AttentionBackend, AttentionForm, GatherSdpa
from samovar.replicas.forward.attention_triton import TritonPaged, Unserved, tile_shapes
from samovar.replicas.forward.inputs import StepPacker
from samovar.replicas.kv import TRASH_PAGE, KvGeometry, KvPool
from samovar.replicas.model import in_a_line, is_device_lost
from samovar.replicas.scheduling import Chunk, bare_sequence

logger = logging.getLogger(__name__)

ATTENTION_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""How far a head's output may be from `GatherSdpa`'s, relative to it: several times what either is off."""
TOKENS_MAX = 600
"""Of the longest sequence that is compared: several runs of keys, and ends inside a page."""
SPLITS = (1, 4)
SCORES_BYTES = 1 << 30
"""Of what torch's SDPA takes of all heads at a time, in float32, where none of its quicker kernels serves: 64
rows of 32 heads behind 128k tokens."""


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A backend, and the sentence that says which one it is and why."""

    backend: AttentionBackend
    sentence: str


def attention_forms(model: torch.nn.Module, head_dim: int) -> list[AttentionForm]:
    """Return the forms of attention that the model's layers have: their own scales, and one layer's sinks."""
    config: Any = model.config
    sinks = [one.detach() for name, one in model.named_parameters() if name.endswith(".sinks")]
    # Some families say 0 for a model without windows.
    windows = dict.fromkeys((None, getattr(config, "sliding_window", None) or None))
    softcap = getattr(config, "attn_logit_softcapping", None)
    of_layers = (getattr(one, "scaling", None) for one in model.modules() if hasattr(one, "layer_idx"))
    scales = dict.fromkeys(float(scale) for scale in of_layers if scale is not None)
    return [
        AttentionForm(scale, window, softcap, sinks[0] if sinks else None)
        for scale in scales or (head_dim**-0.5,)
        for window in windows
    ]


def choose_attention(
    model: torch.nn.Module | None,
    geometry: KvGeometry,
    device: torch.device,
    *,
    exact: bool,
) -> ChosenAttention:
    """Return the backend that serves the model: on CUDA the kernel, if it computes what `GatherSdpa` does."""
    if device.type != "cuda" or exact:
        sdpa = GatherSdpa(exact, geometry.dtype)
        return ChosenAttention(sdpa, sdpa.name)
    assert model is not None, "on CUDA it is transformers' model that computes"
    config: Any = model.config
    sdpa = GatherSdpa(exact, geometry.dtype, scores_max=SCORES_BYTES // (4 * config.num_attention_heads))
    return prefer(lambda: compared_kernel(model, geometry, device), sdpa)


def prefer(find: Callable[[], AttentionBackend], fallback: AttentionBackend) -> ChosenAttention:
    """Return the backend that `find` finds; the fallback, and why, if it raises anything.

    Raises what says that the device is lost: nothing can be computed there any more.
    """
    try:
        found = find()
    except Unserved as why:
        reason = str(why)
    except ImportError as error:
        reason = f"triton cannot be imported ({error})"
    except Exception as error:  # whatever a compiler may raise
        if is_device_lost(error):
            raise
        reason = in_a_line(error)
        logger.warning("the attention kernel does not run here", exc_info=True)
    else:
        return ChosenAttention(found, found.name)
    logger.warning("attention is %s, which is much slower than the kernel: %s", fallback.name, reason)
    return ChosenAttention(fallback, f"{fallback.name}, as the kernel does not serve: {reason}")


def compared_kernel(model: torch.nn.Module, geometry: KvGeometry, device: torch.device) -> TritonPaged:
    """Return the kernel for the device once it has been compared. Raises whatever is wrong with it."""
    properties = torch.cuda.get_device_properties(device)
    config: Any = model.config
    # Of the whole model: on several GPUs each has as many parts of both.
    heads = int(config.num_attention_heads)
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    capability = 10 * properties.major + properties.minor
    kernel = TritonPaged(
        tile_shapes(capability, geometry.head_dim, geometry.dtype.itemsize, group),
        processors=properties.multi_processor_count,
        group=group,
        kv_heads=geometry.kv_heads,
    )
    pool = KvPool(geometry, 1 + -(-TOKENS_MAX // geometry.block_tokens), device)
    compare(kernel, pool, attention_forms(model, geometry.head_dim))
    return kernel


@torch.inference_mode()
def compare(kernel: TritonPaged, pool: KvPool, forms: Listing[AttentionForm]) -> None:
    """Compare the kernel with `GatherSdpa` on random pages: decodes, a prompt and a chunk, split and not.

    Compiles what serving will run. `pool`: one that holds no blocks. Raises `Unserved` if they differ.
    """
    geometry, device = pool.geometry, pool.data.device
    pages = list(range(TRASH_PAGE + 1, pool.pages))
    pages = pages[1::2] + pages[::2][::-1]  # in no order
    tokens = min(TOKENS_MAX, len(pages) * geometry.block_tokens)
    packer = StepPacker(device, geometry.block_tokens, tiling=kernel.tiling)
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, heads: int) -> torch.Tensor:
        drawn = torch.randn((rows, heads, geometry.head_dim), generator=generator, device=device)
        return drawn.to(geometry.dtype)

    layer, sdpa = pool.layer(geometry.layers - 1), GatherSdpa(False, geometry.dtype)
    keys, values = random(tokens, geometry.kv_heads), random(tokens, geometry.kv_heads)
    pool.page_bytes.fill_(0xFF)  # NaN, wherever no token is
    whole = packer.pack([Chunk(bare_sequence([0] * tokens, pages), 0, tokens)])
    kernel.write(layer, keys, values, kernel.prepare(whole))
    for read, given in zip(layer.read(torch.tensor(pages, device=device)), (keys, values), strict=True):
        if not torch.equal(read[:tokens], layer.as_stored(given)):
            raise Unserved("it stores other K and V than it is given")
    third = tokens // 3
    steps = [(tokens - 1, 1), (third, 1), (0, 1), (0, third), (third, tokens // 4)]
    inputs = packer.pack([Chunk(bare_sequence([0] * (past + new), pages), past, new) for past, new in steps])
    places, query = inputs.positions.long(), random(inputs.shape.rows, kernel.group * geometry.kv_heads)
    keys, values = keys[places], values[places]
    for form in forms:
        truth = sdpa.attend(query, keys, values, layer, sdpa.prepare(inputs), form).float()
        for splits in SPLITS:
            plan = kernel.prepare(inputs).split_into(splits)
            found = kernel.attend(query, keys, values, layer, plan, form).float()
            off = ((found - truth).norm(dim=-1) / truth.norm(dim=-1)).max().item()
            if not off <= ATTENTION_TOLERANCES[geometry.dtype]:  # NaN is not, either
                raise Unserved(f"its result differs by {off:.2g} of it, in {splits} splits, with {form}")
