"""Attention on the device: against a reference in float32, and how quickly it reads the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from functools import partial

import torch

from bench._gpu_device import Ceilings, Device, dtype_name, share
from bench._gpu_engine import Sizes, shape_of
from bench._gpu_model import Caller, tokens_of
from bench._gpu_run import Rows, at_least, at_most, must_be
from samovar.replicas.forward import FusedForward, GatherSdpa, Runner
from samovar.replicas.forward.attention import AttentionBackend, AttentionForm
from samovar.replicas.forward.inputs import StepInputs, StepPacker
from samovar.replicas.kv import KvGeometry, KvPool
from samovar.replicas.scheduling import Chunk, bare_sequence

LAYERS = 8
"""Layers that are read in turn, so that none is still in the cache."""
ROWS_AT_A_TIME = 65536
REFERENCE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence of `context` tokens, of which the last `count` are this step's."""

    context: int
    count: int


@dataclass(slots=True)
class Laid:
    """Sequences with random K and V in some layers of a pool, and random queries of the step's rows.

    `keys`, `values`: of each layer, this step's, as the model would give them.
    """

    pool: KvPool
    parts: list[Part]
    pages: list[list[int]]
    inputs: StepInputs
    query: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def attend(
        self, backend: AttentionBackend, layer: int, meta: object, form: AttentionForm
    ) -> torch.Tensor:
        kv = self.pool.layer(layer)
        return backend.attend(self.query, self.keys[layer], self.values[layer], kv, meta, form)


def lay_out(
    pool: KvPool,
    backend: AttentionBackend,
    parts: list[Part],
    q_heads: int,
    *,
    layers: int,
    device: Device,
    seed: int,
) -> Laid:
    """Write random K and V of all sequences into shuffled pages of the pool's first `layers`."""
    geometry = pool.geometry
    free = list(range(1, pool.pages))
    random.Random(seed).shuffle(free)
    pages: list[list[int]] = []
    for part in parts:
        count = -(-part.context // geometry.block_tokens)
        pages.append(free[:count])
        free = free[count:]
    chunks = [
        Chunk(bare_sequence([7] * part.context, table), part.context - part.count, part.count)
        for part, table in zip(parts, pages, strict=True)
    ]
    packer = StepPacker(device.torch, geometry.block_tokens, tiling=backend.tiling)
    packer.reserve(sum(len(table) for table in pages) + 64 * sum(part.count for part in parts) + 4096)
    rows = sum(part.count for part in parts)
    query = device.random(rows, q_heads, geometry.head_dim, dtype=geometry.dtype, seed=seed)
    laid = Laid(pool, parts, pages, packer.pack(chunks), query)
    for layer in range(layers):
        new = [
            _write(pool, layer, part, table, device, seed + 1000 * layer + number)
            for number, (part, table) in enumerate(zip(parts, pages, strict=True))
        ]
        laid.keys.append(torch.cat([keys for keys, _ in new]))
        laid.values.append(torch.cat([values for _, values in new]))
    return laid


def _write(
    pool: KvPool, layer: int, part: Part, pages: Listing[int], device: Device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random K and V of one sequence; return those of its last rows."""
    geometry = pool.geometry
    table = torch.tensor(pages, device=device.torch)
    for start in range(0, part.context, ROWS_AT_A_TIME):
        end = min(start + ROWS_AT_A_TIME, part.context)
        shape = (end - start, geometry.kv_heads, geometry.head_dim)
        keys = device.random(*shape, dtype=geometry.dtype, seed=2 * (seed + start))
        values = device.random(*shape, dtype=geometry.dtype, seed=2 * (seed + start) + 1)
        places = torch.arange(start, end, device=device.torch)
        slots = (table[places // geometry.block_tokens], places % geometry.block_tokens)
        pool.layer(layer).write(slots, keys, values)
    assert part.count <= len(keys), "the step's rows are in the last part"
    return keys[-part.count :], values[-part.count :]


def reference(laid: Laid, layer: int, form: AttentionForm) -> torch.Tensor:
    """Return the attention of all rows in float32, from what is stored: every row and head by itself."""
    out = torch.empty_like(laid.query, dtype=torch.float32)
    row, group = 0, laid.query.shape[1] // laid.pool.geometry.kv_heads
    for part, pages in zip(laid.parts, laid.pages, strict=True):
        stored = laid.pool.gather_layer(layer, pages, 0, part.context).float()
        keys, values = (one.repeat_interleave(group, dim=1).transpose(0, 1) for one in stored)
        numbers = torch.arange(part.context, device=laid.query.device)
        for first in range(0, part.count, REFERENCE_ROWS):
            count = min(REFERENCE_ROWS, part.count - first)
            some = slice(row + first, row + first + count)
            scores = laid.query[some].float().transpose(0, 1) @ keys.transpose(1, 2) * form.scale
            position = torch.arange(count, device=numbers.device) + part.context - part.count + first
            scores.masked_fill_(numbers[None, :] > position[:, None], -torch.inf)
            out[some] = (scores.softmax(dim=-1) @ values).transpose(0, 1)
        row += part.count
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is expected; NaN if anything is NaN."""
    return float((out.float() - expected).norm() / expected.norm())


def check_attention(rows: Rows, caller: Caller, device: Device, geometry: KvGeometry, sizes: Sizes) -> None:
    """Compare the engine's attention with the reference: mixed steps, splits, old NaN everywhere."""
    backend = caller.engine.runner.backend
    is_kernel = not isinstance(backend, GatherSdpa)
    name = "attention is computed by the kernel"
    rows.add(name, backend.name, float(is_kernel), "of 1", must_be(">=", 1) if device.is_cuda else None)
    bar = must_be("<=", 1e-2)
    form = AttentionForm(geometry.head_dim**-0.5)
    long, short = sizes.context, max(20, sizes.context // 12)
    batches = {
        "prefill": [Part(short, short)],
        "chunk": [Part(long, short)],
        "decode": [Part(long, 1)],
        "decode, B=9": [Part(1 + (number * long) // 9, 1) for number in range(9)],
        "mixed": [Part(long // 2, 1), Part(short, short), Part(long, 17), Part(1, 1), Part(2 * short, short)],
    }
    pages = 1 + sum(-(-part.context // geometry.block_tokens) for parts in batches.values() for part in parts)
    pool = KvPool(geometry, pages, device.torch)
    for number, (kind, parts) in enumerate(batches.items()):
        pool.page_bytes[1:].fill_(255)  # in every format a NaN, as old pages of others may have it
        laid = lay_out(
            pool, backend, parts, caller.shape.q_heads, layers=2, device=device, seed=40 + 10 * number
        )
        meta = backend.prepare(laid.inputs)
        worst = 0.0
        for layer in range(2):
            poison = torch.full_like(laid.query, torch.nan)
            del poison  # what is allocated next is at the same place
            error = relative_error(laid.attend(backend, layer, meta, form), reference(laid, layer, form))
            worst = max(worst, error) if error == error else error
        shape = f"{kind} {geometry.stored_name}"
        rows.add("attention, of float32's", shape, worst, "relative", bar)
        wrong = _written_otherwise(laid, backend, meta)
        rows.add(
            "K and V written otherwise than they were given", shape, wrong, "sequences", must_be("<=", 0)
        )


def _written_otherwise(laid: Laid, backend: AttentionBackend, meta: object) -> int:
    """Let the backend write the first layer's K and V into the second; return the sequences that differ."""
    kv, wrong, row = laid.pool.layer(1), 0, 0
    backend.write(kv, laid.keys[0], laid.values[0], meta)
    for part, pages in zip(laid.parts, laid.pages, strict=True):
        given = torch.stack(
            [kv.as_stored(one[row : row + part.count]) for one in (laid.keys[0], laid.values[0])]
        )
        wrong += not torch.equal(
            laid.pool.gather_layer(1, pages, part.context - part.count, part.context), given
        )
        row += part.count
    return wrong


def attending_by(runner: Runner, backend: AttentionBackend) -> Runner:
    """Return another runner of the same weights on the same pool, attending by `backend`."""
    forward, pool = runner.forward, runner.pool
    make = None
    if isinstance(forward, FusedForward):  # the modules have none any more
        make = partial(FusedForward, forward.plain, backend=backend)
    return Runner(runner.model, pool, backend, exact=False, forward=make)


def check_logits(rows: Rows, caller: Caller, sizes: Sizes) -> None:
    """Compare whole forward passes with `GatherSdpa`'s: prefill, a chunk and decodes of two sequences."""
    runner: Runner = caller.engine.runner
    geometry = runner.pool.geometry
    caller.forget()
    count = max(48, sizes.context // 16)
    tokens, other = tokens_of(count, 61, caller.shape), tokens_of(count // 2, 62, caller.shape)
    blocks = -(-count // geometry.block_tokens)
    logits = []
    for one in (runner, attending_by(runner, GatherSdpa(False, geometry.dtype))):
        pages = list(range(1, 1 + 2 * blocks))
        sequence, beside = bare_sequence(tokens, pages[:blocks][::-1]), bare_sequence(other, pages[blocks:])
        steps = (
            [Chunk(beside, 0, len(other)), Chunk(sequence, 0, count - 9)],
            [Chunk(beside, len(other) - 1, 1), Chunk(sequence, count - 9, 8)],
            # By a graph, where there is one.
            [Chunk(sequence, count - 1, 1), Chunk(beside, len(other) - 1, 1)],
        )
        found = [one.run(chunks).clone() for chunks in steps]
        logits.append(torch.cat(found).double().log_softmax(dim=-1))
    ours, theirs = logits
    divergence = float((theirs.exp() * (theirs - ours)).sum(dim=-1).max())
    agree = float((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).double().mean())
    shape = f"{count} tokens"
    rows.add("logits, from GatherSdpa's", shape, divergence, "KL", must_be("<=", 0.1))
    rows.add("logits, same greedy token as GatherSdpa's", shape, agree, "of rows")


@dataclass(slots=True)
class DecodeTimes:
    """Seconds of a layer's attention by KV format and shape, to compare formats."""

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)


def measure_attention(
    rows: Rows,
    caller: Caller,
    device: Device,
    sizes: Sizes,
    ceilings: Ceilings,
    into: DecodeTimes,
    *,
    kind: str,
) -> None:
    """Measure decode attention on the engine's own pool, whose blocks it forgets before."""
    runner = caller.engine.runner
    pool, geometry, backend = runner.pool, runner.pool.geometry, runner.backend
    caller.forget()
    layers = min(LAYERS, geometry.layers)
    form = AttentionForm(geometry.head_dim**-0.5)
    for batch, context, least in ((sizes.batch, sizes.context, 0.7), (1, sizes.long_context, 0.5)):
        parts = [Part(context, 1)] * batch
        laid = lay_out(pool, backend, parts, caller.shape.q_heads, layers=layers, device=device, seed=80)
        meta = backend.prepare(laid.inputs)

        def work(laid: Laid = laid, meta: object = meta) -> None:
            for layer in range(layers):
                laid.attend(backend, layer, meta, form)

        took_s = device.seconds(device.recorded(work), sizes.repeats) / layers
        shape, name = shape_of(batch, context), f"decode attention, {geometry.stored_name}"
        into.seconds[kind, shape] = took_s
        rate = batch * context * geometry.bytes_per_token / geometry.layers / took_s
        rows.add(name, shape, 1e6 * took_s, "us a layer")
        if kind == "auto":
            rows.add(name, shape, share(rate, ceilings.copy), "of C", at_least(least))
            continue
        rows.add(name, shape, share(rate, ceilings.copy), "of C")
        plain_s = into.seconds.get(("auto", shape))
        bar = at_most(0.6) if batch > 1 else None
        rows.add(
            f"{name}, of {dtype_name(geometry.dtype)}",
            shape,
            plain_s and took_s / plain_s,
            "of the time",
            bar,
        )
