"""Plain models of each family on pools full of NaN, and steps that have everything that a step may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Any

import torch

from samovar.replicas.forward.attention import ATTENTION_NAME, AttentionBackend, register
from samovar.replicas.forward.attention_triton import TritonPaged
from samovar.replicas.forward.forward import Forward
from samovar.replicas.forward.graphs import Bucket, buckets_of
from samovar.replicas.forward.inputs import StepPacker
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk
from tests.kernels.paged import CPU, SMALL
from tests.support.engines.engines import prompt_of
from tests.unit.replicas.forward.test_plain import MEMBERS, NAMES, made

__all__ = ["MEMBERS", "NAMES", "TOKENS", "FusedCase", "off", "served"]

PAGES = {"a": [4, 1, 6], "b": [8, 7, 2], "c": [3]}
STEPS: tuple[tuple[tuple[str, int, int], ...], ...] = (
    (("a", 0, 13),),  # a prompt
    (("b", 0, 17), ("a", 13, 13)),  # another one, and a chunk behind a context
    (("a", 26, 1), ("b", 17, 4), ("c", 0, 1)),  # decodes beside a chunk
    (("a", 27, 1), ("b", 21, 1), ("c", 1, 1)),  # decodes, in a graph's shape
)
"""Steps of (sequence, first token, tokens)."""
TOKENS = {"a": 28, "b": 22, "c": 2}
"""Of each sequence, once all is computed."""


def off(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Return how far the worst step's numbers are from the truth, relative to it; NaN is NaN."""
    apart = [((one - other).norm() / other.norm()).item() for one, other in zip(found, truth, strict=True)]
    return max(apart, key=lambda number: (math.isnan(number), number))


def served(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of random weights whose attention is a backend's. Its sizes are no powers of two."""
    register()
    model = made(family, **{"hidden": 96, "q_heads": 6, **more}).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


class FusedCase:
    """The sequences of `STEPS` on a pool of one geometry."""

    def __init__(self, model: Any, *, is_int8: bool = False, dtype: torch.dtype = torch.float32) -> None:
        config = model.config
        self.kv_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // self.kv_heads
        head_dim = int(model.base_model.layers[0].self_attn.head_dim)
        self.geometry = KvGeometry(
            config.num_hidden_layers, 16, self.kv_heads, head_dim, dtype, 2, is_int8=is_int8
        )
        self.sequences = {
            name: bare_sequence(prompt_of(50, seed=number), pages)
            for number, (name, pages) in enumerate(PAGES.items())
        }

    def kernel(self) -> TritonPaged:
        return TritonPaged(SMALL, processors=4, group=self.group, kv_heads=self.kv_heads)

    def run(
        self,
        make: Callable[[KvPool], Forward],
        backend: AttentionBackend,
        steps: Listing[Listing[tuple[str, int, int]]] = STEPS,
    ) -> tuple[list[torch.Tensor], KvPool]:
        """Return the logits of all rows of each step, and the pool. Decodes alone are padded as a graph's."""
        pool = KvPool(self.geometry, 10, CPU)
        pool.page_bytes.fill_(0xFF)  # NaN, wherever no token is
        packer, forward, logits = StepPacker(CPU, 16, tiling=backend.tiling), make(pool), []
        for step in steps:
            chunks = [Chunk(self.sequences[name], start, count) for name, start, count in step]
            rows, bucket = sum(chunk.rows for chunk in chunks), None
            if backend.tiling is not None and rows == len(chunks):
                bucket = Bucket.of_decodes(buckets_of(8)[-1], backend.tiling).shape
            inputs = packer.pack(chunks, bucket)
            with torch.inference_mode():
                logits.append(forward.logits(forward.hidden(inputs), torch.arange(rows), rows))
        return logits, pool
