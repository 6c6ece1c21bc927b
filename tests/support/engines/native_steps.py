"""The native step for tests: compiled once into the user's cache, as the product does it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from samovar.configs.compiled import (
    AVX2,
    AVX512,
    INT8_FLAGS,
    PAIR_FLAGS,
    PLAIN,
    STEP_FLAGS,
    Variant,
    find_compiler,
)
from samovar.configs.settings import Settings
from samovar.replicas import native
from samovar.replicas.forward.inputs import StepPacker
from samovar.replicas.forward.plain import PlainModel
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.native.build import (
    build_library,
    pair_variant_here,
    variant_here,
)
from samovar.replicas.native.native_step import NativeStep, NotNative
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk

CPU = torch.device("cpu")
Computed = tuple[torch.Tensor, torch.Tensor]
"""Logits of every token, KV of all."""


@cache
def library(dtype: torch.dtype, variant: Variant | None = None, more_flags: tuple[str, ...] = ()) -> Path:
    settings = Settings()
    variant = variant or variant_here()
    return build_library(settings.native_dir, variant, dtype, wait_s=600, more_flags=more_flags)


def pair_library(dtype: torch.dtype = torch.bfloat16, more_flags: tuple[str, ...] = ()) -> Path:
    """Of products in bfloat16: by the CPU's dot products where it has them, else slowly."""
    return library(dtype, widest_here(), (*PAIR_FLAGS, *more_flags))


def widest_here() -> Variant:
    """The variant with all instructions of this CPU."""
    try:
        return pair_variant_here()
    except NotNative:
        return variant_here()


def compile_program(source: Path, program: Path, *flags: str) -> Path:
    """Compile a program over the native step's sources, quickly."""
    without = ("-O3", "-shared", "-fvisibility=hidden")
    of_all = [flag for flag in STEP_FLAGS if flag not in without]
    command = [*find_compiler(os.environ, wait_s=60).command, *of_all, *flags, "-O1"]
    include = f"-I{Path(native.__file__).parent}"
    subprocess.run([*command, include, str(source), "-o", str(program)], check=True, timeout=600)
    return program


def native_step(plain: PlainModel, *, is_int8: bool = False, has_pairs: bool = False) -> NativeStep:
    """With as many threads as torch has. `is_int8`: its weights; `has_pairs`: products are in bfloat16."""
    of = pair_library() if has_pairs else library(plain.dtype, more_flags=INT8_FLAGS if is_int8 else ())
    return NativeStep(plain, of, torch.get_num_threads())


def variants_here() -> list[Variant]:
    """What this CPU can run, the product's choice first."""
    widest = variant_here()
    return [widest, *([AVX2] if widest == AVX512 else []), PLAIN]


class StepBench:
    """A plain model's native step on a pool of its own, full of NaN where nothing has been written."""

    def __init__(
        self,
        plain: PlainModel,
        *,
        block_tokens: int = 16,
        threads: int = 1,
        pages: int = 120,
        groups: int = 1,
        of: Path | None = None,
        layers: int | None = None,
    ) -> None:
        """`of`: another library than the product's. `layers`: the first ones alone."""
        self.step = NativeStep(plain, of or library(plain.dtype), threads)
        geometry = KvGeometry(
            layers or len(plain.layers), block_tokens, plain.kv_heads, plain.head_dim, plain.dtype, groups
        )
        self.pool = KvPool(geometry, pages, CPU)
        self.pool.page_bytes.fill_(0xFF)
        self._forward = self.step.on(self.pool, layers)
        self._packer = StepPacker(CPU, block_tokens)

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[tuple[list[int], int]], wanted: list[int] | None) -> Computed:
        """Compute the rest of sequences behind so many tokens in one step.

        Return the hidden states, and K and V. `wanted`: of the last step's rows; None: all.
        """
        block_tokens, pages = self.pool.geometry.block_tokens, list(range(1, self.pool.pages))
        made = []
        for tokens, _ in sequences:
            made.append(bare_sequence(tokens, [pages.pop() for _ in range(-(-len(tokens) // block_tokens))]))
        before = [Chunk(one, 0, done) for one, (_, done) in zip(made, sequences, strict=True) if done]
        if before:
            self._forward.hidden(self._packer.pack(before))
        rest = [
            Chunk(one, done, len(one.tokens) - done) for one, (_, done) in zip(made, sequences, strict=True)
        ]
        rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
        hidden = self._forward.hidden(self._packer.pack(rest), rows)[0]
        return hidden, torch.cat([self.pool.gather(one.pages, len(one.tokens)).flatten() for one in made])

    @torch.inference_mode()
    def compute(self, sequences: Sequence[list[int]], steps: Sequence[Sequence[int]]) -> list[Computed]:
        """Compute sequences side by side: of each so many tokens a step as its entry says, 0 for none."""
        block_tokens, pages = self.pool.geometry.block_tokens, list(range(1, self.pool.pages))
        shuffled = [pages[i] for i in torch.randperm(len(pages)).tolist()]
        made, rows = [], [list[torch.Tensor]() for _ in sequences]
        for tokens in sequences:
            made.append(
                bare_sequence(tokens, [shuffled.pop() for _ in range(-(-len(tokens) // block_tokens))])
            )
        done = [0] * len(made)
        for counts in steps:
            running = [number for number, count in enumerate(counts) if count]
            inputs = self._packer.pack([Chunk(made[i], done[i], counts[i]) for i in running])
            hidden = self._forward.hidden(inputs)
            logits = self._forward.logits(hidden, torch.arange(hidden.shape[1]), hidden.shape[1])
            for segment, number in zip(inputs.segments, running, strict=True):
                rows[number].append(logits[segment.row : segment.row + segment.count])
                done[number] += segment.count
        return [
            (torch.cat(mine), self.pool.gather(one.pages, len(one.tokens)))
            for one, mine in zip(made, rows, strict=True)
        ]

    def one(self, tokens: list[int], chunks: Sequence[int] | None = None) -> Computed:
        return self.compute([tokens], [[count] for count in chunks or [len(tokens)]])[0]


def same(ours: Computed, truth: Computed) -> bool:
    return torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])
