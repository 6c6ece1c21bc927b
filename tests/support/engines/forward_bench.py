"""One model on a pool of its own, computing given tokens under given circumstances."""

from __future__ import annotations

from pathlib import Path

import torch

from samovar.replicas.engine.audit import bare_sequence
from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.forward import MakeForward
from samovar.replicas.forward.lean import LeanForward, LeanModel
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.plain import plain_model
from samovar.replicas.forward.runner import Runner
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.native.native_step import NativeStep
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk
from tests.support.engines.exactness import assert_same_kv, assert_same_logits, probe
from tests.support.engines.native_steps import native_step

STEP_TOKENS_MAX = 1040  # of the largest step of these tests, a multiple of 4
Computed = tuple[torch.Tensor, torch.Tensor]
"""Logits of the last token, KV of all."""


class Bench:
    """One model on a pool of its own, computing given tokens under given circumstances."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        block_tokens: int,
        *,
        exact: bool = True,
        pages: int = 200,
        is_int8: bool = False,
        step: str = "transformers",
    ) -> None:
        """`step`: what computes, of `engine.step`; or `native int8`, with weights in int8."""
        spec = inspect_model(model_dir)
        device = torch.device("cpu")
        self.block_tokens = block_tokens
        self._name = model_dir.name
        self.model = load_model(spec, dtype, device)
        geometry = KvGeometry(spec.layers, block_tokens, spec.kv_heads, spec.head_dim, dtype, is_int8=is_int8)
        self.pool = KvPool(geometry, pages, device)
        self.step = step
        self._lean = LeanModel(plain_model(self.model)) if step == "lean" else None
        self._native: NativeStep | None = None
        if step.startswith("native"):
            plain, has_pairs = plain_model(self.model), step == "native-bf16"
            self._native = native_step(plain, is_int8=step == "native int8", has_pairs=has_pairs)
        backend = GatherSdpa(exact, dtype)
        self.runner = Runner(self.model, self.pool, backend, exact=exact, forward=self._forward(exact))
        self._free = list(range(1, pages))

    def _forward(self, exact: bool) -> MakeForward | None:
        if self._native is not None:
            return self._native.on
        model, backend = self._lean, GatherSdpa(exact, self.pool.geometry.dtype)
        return None if model is None else lambda pool: LeanForward(model, pool, backend, exact=exact)

    def sequence(self, tokens: list[int]) -> Sequence:
        blocks = -(-len(tokens) // self.block_tokens)
        # Backwards: physical order must not matter.
        return bare_sequence(tokens, [self._free.pop() for _ in range(blocks)])

    def compute(
        self, tokens: list[int], chunking: list[int], others: list[list[int]] | None = None
    ) -> Computed:
        """(logits of the last token, KV) after computing `tokens` in chunks beside `others`.

        Each companion is computed whole in the first step and decodes its last token again and
        again later, so that every step mixes prefill chunks and decodes.
        """
        sequence = self.sequence(tokens)
        companions = [self.sequence(other) for other in others or []]
        start, logits = 0, torch.empty(0)
        for step, count in enumerate(chunking):
            chunks = [Chunk(sequence, start, count)]
            for companion in companions:
                length = len(companion.tokens)
                chunks.insert(
                    0, Chunk(companion, 0, length) if step == 0 else Chunk(companion, length - 1, 1)
                )
            logits = self.runner.run(chunks)[-1:]
            start += count
        kv = self.pool.gather(sequence.pages, len(tokens))
        self._free += [*sequence.pages, *(page for companion in companions for page in companion.pages)]
        return logits[0], kv

    def is_exact(self) -> bool:
        """What the product's probe says of this model here, with this many threads."""
        if self._native is not None:  # on every CPU
            return True
        name = self._name if self._lean is None else f"{self._name} ({self.step})"
        return probe(self.model, self.pool.geometry, name, STEP_TOKENS_MAX, self._forward(True)).exact

    def assert_same(self, got: Computed, expected: Computed, what: str = "") -> None:
        """The law."""
        stored = self.pool.geometry.stored_dtype
        assert_same_logits(got[0], expected[0], stored, self.is_exact, what)
        assert_same_kv(got[1], expected[1], self.is_exact, what, stored=stored)
