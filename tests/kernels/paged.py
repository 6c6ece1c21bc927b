"""A step on a paged pool with everything that may go wrong there, and what attention is, in float64."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.attention_triton import TileShape, TritonPaged
from samovar.replicas.forward.inputs import StepInputs, StepPacker, StepShape, TilePlaces, Tiling
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk

CPU = torch.device("cpu")
SMALL = (TileShape(16, 32, 4, 2, 1), TileShape(32, 32, 4, 2, 1))
"""Tiles that are small beside the contexts of the tests, so that every loop has several turns."""

MIXED = ((130, 1), (0, 37), (30, 21), (0, 1), (63, 1), (64, 20), (95, 1))
"""(context, new tokens): decodes, prompts and chunks; some end with a page or a run of keys, some do not."""

FEW = ((130, 1), (30, 21), (0, 1), (64, 6))
"""For what the interpreter is slow at: splits are merged row by row and head by head."""


LONG_AND_SHORT = ((130, 1), (700, 1), (17, 1), (600, 40), (0, 21))
"""The long ones are read in several runs."""


@dataclass(frozen=True)
class Shape:
    group: int = 4
    head_dim: int = 64
    block_tokens: int = 16
    splits: int = 1
    kv_groups: int = 1
    dtype: torch.dtype = torch.float32
    is_int8: bool = False
    kv_heads: int = 2


class PagedCase:
    """A step's query on a pool whose pages are shuffled and hold NaN wherever no token is."""

    def __init__(
        self,
        shape: Shape,
        steps: Listing[tuple[int, int]] = MIXED,
        *,
        rows_multiple: int = 1,
        shapes: tuple[TileShape, TileShape] = SMALL,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.shape, self.steps, tokens = shape, steps, shape.block_tokens
        geometry = KvGeometry(
            2, tokens, shape.kv_heads, shape.head_dim, shape.dtype, shape.kv_groups, shape.is_int8
        )
        blocks = [-(-(context + count) // tokens) for context, count in steps]
        self.pool = KvPool(geometry, 1 + sum(blocks) + 3, CPU)
        self._poison()
        free = (1 + torch.randperm(self.pool.pages - 1, generator=generator)).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in blocks]
        self.kv = self.pool.layer(1)
        self.truth: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (context, count), table in zip(steps, self.tables, strict=True):
            places = torch.arange(context + count)
            slots = (torch.tensor(table)[places // tokens], places % tokens)
            keys, values = self._random(2, context + count, shape.kv_heads, generator=generator)
            self.kv.write(slots, keys, values)
            self.truth.append(self._stored(slots))
        self.chunks = [
            Chunk(bare_sequence([5] * (context + count), table), context, count)
            for (context, count), table in zip(steps, self.tables, strict=True)
        ]
        self.backend = TritonPaged(
            shapes,
            processors=1,
            group=shape.group,
            kv_heads=shape.kv_heads,
        )
        packer = StepPacker(CPU, tokens, rows_multiple=rows_multiple, tiling=self.backend.tiling)
        self.inputs: StepInputs = packer.pack(self.chunks)
        rows = self.inputs.shape.rows
        self.query = self._random(shape.kv_heads * shape.group, rows, generator=generator).transpose(0, 1)

    def _random(self, *sizes: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(*sizes, self.shape.head_dim, generator=generator).to(self.shape.dtype)

    def _poison(self) -> None:
        if self.pool.scales is None:
            self.pool.data.fill_(math.nan)
        else:  # codes are numbers, whatever they are; their scales need not be
            self.pool.data.fill_(99)
            self.pool.scales.fill_(math.nan)

    def _stored(self, slots: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[tokens, kv_heads, head_dim]` as they lie in the pool, float64."""
        found = []
        for codes, scales in ((self.kv.keys, self.kv.key_scales), (self.kv.values, self.kv.value_scales)):
            vectors = codes[slots].double().flatten(1, 2)
            found.append(
                vectors if scales is None else vectors * scales[slots].double().flatten(1)[..., None]
            )
        return found[0], found[1]

    def attend(self, form: AttentionForm | None = None) -> torch.Tensor:
        plan = self.backend.prepare(self.inputs).split_into(self.shape.splits)
        unused = torch.empty(0)
        return self.backend.attend(self.query, unused, unused, self.kv, plan, form or self.form())

    def attend_padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a recorded shape gives for the step, and what the step's own does.

        All that is not of the step is NaN, the trash page and padding's queries too. Two layers
        write one after the other.
        """
        tiling = Tiling(self.backend.tiling.rows, 9, 40)
        self.backend.tiling = tiling
        padded = StepShape(96, 12, 12, TilePlaces(8, 17), TilePlaces(20, 60), is_recorded=True)
        found = list[torch.Tensor]()
        for shape in (None, padded):
            inputs = StepPacker(CPU, self.shape.block_tokens, tiling=tiling).pack(self.chunks, shape)
            plan, empty = self.backend.prepare(inputs), torch.empty(0)
            assert all(launch.work.is_split for launch in plan.launches)
            missing = inputs.shape.rows - len(self.query)
            query = torch.cat([self.query, torch.full((missing, *self.query.shape[1:]), math.nan)])
            for _ in range(2):
                out = self.backend.attend(query, empty, empty, self.kv, plan, self.form())
            found.append(out)
        return found[1], found[0]

    def form(self) -> AttentionForm:
        return AttentionForm(self.shape.head_dim**-0.5)

    def reference(self, form: AttentionForm | None = None) -> torch.Tensor:
        """What attention is, row by row; zero in padding rows."""
        form, group = form or self.form(), self.shape.group
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        row = 0
        for (context, count), (keys, values) in zip(self.steps, self.truth, strict=True):
            query = self.query[row : row + count].double().transpose(0, 1)
            keys, values = (one.transpose(0, 1).repeat_interleave(group, 0) for one in (keys, values))
            scores = query @ keys.transpose(1, 2) * form.scale
            if form.softcap is not None:
                scores = torch.tanh(scores / form.softcap) * form.softcap
            number, position = torch.arange(context + count), torch.arange(context, context + count)[:, None]
            hidden = number > position
            if form.window is not None:
                hidden |= number <= position - form.window
            scores = scores.masked_fill(hidden, -math.inf)
            if form.sinks is not None:
                sinks = form.sinks.double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            shares = scores.softmax(dim=-1)[..., : context + count]
            out[row : row + count] = (shares @ values).transpose(0, 1)
            row += count
        return out

    def error(self, form: AttentionForm | None = None) -> float:
        """Return the largest error of a row, relative to its length; NaN counts as inf.

        Of a single head float32 is off by 1e-6 now and then, in torch's SDPA as here.
        """
        found, truth = self.attend(form).double().flatten(1), self.reference(form).flatten(1)
        rows = sum(count for _, count in self.steps)
        assert (found[rows:] == 0).all(), "padding"
        largest = ((found - truth).norm(dim=-1) / truth.norm(dim=-1))[:rows].max().item()
        return math.inf if math.isnan(largest) else largest


def planted(kernels: ModuleType, find: str, put: str, folder: Path) -> ModuleType:
    """Return a module of kernels with a fault in it: `put` in the place of `find`."""
    text = Path(kernels.__file__ or "").read_text()
    assert find in text
    file = folder / "planted_kernels.py"
    file.write_text(text.replace(find, put))
    spec = importlib.util.spec_from_file_location("planted_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
