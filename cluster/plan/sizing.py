"""Sizes a model: what fits a GPU, bounds on decode speed, and when loading KV beats computing it.

For `samovar plan --model DIR --gpu 80GB --context 2k,8k,32k,128k`. Bounds from four numbers (memory,
bandwidth, compute, a tier's speed), not measurements; every default is in `SizingOptions`. GB is 10^9 bytes,
GiB 2^30, 2k tokens are 2048. The arithmetic is pure; `read_model` and `run_sizing` read and write files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from samovar.cache_tiers.blocks import CPU, NVME, S3
from samovar.cluster.plan.model_kv import KvFormat, KvShape, read_shape
from samovar.cluster.plan.runs import PlanRefused, check_gpus_a_replica
from samovar.configs.json_text import parse_json
from samovar.configs.model_reference import hub_model, is_default
from samovar.configs.sections import GIB, KIB, MIB, TIB
from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import ModelRefused

_UNITS = {
    "": 1,
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB},
}
_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """The speed of loads from a tier into the GPU."""

    name: str
    gb_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class SizingOptions:
    """The assumptions of a sizing. Defaults: an H100 SXM with bf16, and usual tiers.

    `memory_gb_per_s`, `tflops`: the GPU's (dense); `computed_share`: share of `tflops` that prefill reaches.
    `tiers`: over PCIe 4 x16, one NVMe drive, an S3 endpoint. `reserve_share`: share of the GPU's memory that
    weights and KV leave free. `stored`: what KV is kept as; None: the model's own dtype. `block_tokens`:
    sequences take whole blocks. `gpus`: that share the model (`engine.tensor_parallel`), taken to be so many
    times as fast as one, main memory's link included: an upper bound. `active_params`: parameters per token
    of a mixture of experts; None: all (`weights_bytes` by the element), or unknown for a mixture.
    """

    memory_gb_per_s: float = 3350.0
    tflops: float = 989.0
    computed_share: float = 0.5
    tiers: tuple[TierSpeed, ...] = (
        TierSpeed(CPU.name, 25.0, 0.0001),
        TierSpeed(NVME.name, 6.0, 0.001),
        TierSpeed(S3.name, 1.0, 0.05),
    )
    reserve_share: float = 0.0
    stored: KvFormat | None = None
    block_tokens: int = 16
    gpus: int = 1
    active_params: float | None = None


@dataclass(frozen=True, slots=True)
class TierBreakEven:
    """When loading from a tier beats computing. `load_s`: of this context.

    `tokens`: the prompt length from which loading its KV is quicker than computing it; None: never.
    `gb_per_s_needed`: the speed at which both take equally long; None: computing takes no longer than the
    tier's latency alone.
    """

    tier: str
    load_s: float
    is_quicker: bool
    tokens: int | None
    gb_per_s_needed: float | None


@dataclass(frozen=True, slots=True)
class ContextSizing:
    """The sizing of sequences of `tokens` tokens.

    `sequences`: how many of this length fit beside the weights. `alone_tokens_per_s`: upper bound of one
    sequence's decode; `batch_tokens_per_s`: of all that fit, together. `compute_s`: prefill; None: unknown.
    """

    tokens: int
    kv_bytes: int
    sequences: int
    alone_tokens_per_s: float
    batch_tokens_per_s: float
    compute_s: float | None
    tiers: tuple[TierBreakEven, ...]


@dataclass(frozen=True, slots=True)
class Sizing:
    """A model on a GPU. `weights_tokens_per_s`: bandwidth / weights, a sequence's bound without context."""

    token_bytes: int
    weights_bytes: int
    kv_room_bytes: int
    weights_tokens_per_s: float
    contexts: tuple[ContextSizing, ...]
    notes: tuple[str, ...]


def size_model(
    shape: KvShape, weights_bytes: int, gpu_bytes: int, contexts: Sequence[int], options: SizingOptions
) -> Sizing:
    """Return the sizing of a model on a GPU. Raises `ValueError` for invalid numbers."""
    _check(weights_bytes, gpu_bytes, contexts, options)
    options = _together(options)
    room = max(0, math.floor(options.gpus * gpu_bytes * (1.0 - options.reserve_share)) - weights_bytes)
    notes = list(shape.notes)
    params = options.active_params
    if params is None and shape.is_moe:
        notes.append("a mixture of experts: the number of active parameters per token is not known")
        notes.append("... and a token reads fewer weights than all: decoding alone can be quicker than this")
    elif params is None and shape.is_quantized:
        notes.append("a quantized model: its number of parameters is not known from its size")
    elif params is None:
        params = weights_bytes / shape.itemsize
    if not room:
        notes.append("the weights alone do not fit")
    found = [_context(shape, weights_bytes, room, tokens, params, options) for tokens in contexts]
    return Sizing(
        token_bytes=shape.token_bytes(options.stored),
        weights_bytes=weights_bytes,
        kv_room_bytes=room,
        weights_tokens_per_s=options.memory_gb_per_s * 1e9 / weights_bytes,
        contexts=tuple(found),
        notes=tuple(notes),
    )


def _together(options: SizingOptions) -> SizingOptions:
    """Return the speeds of all GPUs together: each has a link of its own to main memory."""
    gpus = options.gpus
    return replace(
        options,
        memory_gb_per_s=gpus * options.memory_gb_per_s,
        tflops=gpus * options.tflops,
        tiers=tuple(
            replace(tier, gb_per_s=gpus * tier.gb_per_s) if tier.name == CPU.name else tier
            for tier in options.tiers
        ),
    )


def _context(
    shape: KvShape, weights_bytes: int, room: int, tokens: int, params: float | None, options: SizingOptions
) -> ContextSizing:
    whole = -(-tokens // options.block_tokens) * options.block_tokens
    kv_bytes = shape.context_bytes(whole, options.stored)
    sequences = room // kv_bytes
    memory = options.memory_gb_per_s * 1e9
    compute_s = None if params is None else prefill_s(shape, params, tokens, options)
    return ContextSizing(
        tokens=tokens,
        kv_bytes=kv_bytes,
        sequences=sequences,
        alone_tokens_per_s=memory / (weights_bytes + kv_bytes),
        batch_tokens_per_s=sequences * memory / (weights_bytes + sequences * kv_bytes),
        compute_s=compute_s,
        tiers=tuple(
            _break_even(shape, params, tokens, compute_s, tier, options)
            for tier in options.tiers
            if params is not None and compute_s is not None
        ),
    )


def prefill_s(shape: KvShape, params: float, tokens: int, options: SizingOptions) -> float:
    """Return seconds to compute a prompt: 2 operations per parameter and token, plus attention.

    Attention for a token at position p costs 4 x width x p operations in each full-attention layer, and at
    most those of the window in the others.
    """
    seen = 0.0
    for group in shape.groups:
        window = group.window or tokens
        inside = min(tokens, window)
        seen += group.layers * (inside * inside / 2 + (tokens - inside) * window)
    operations = 2.0 * params * tokens + 4.0 * shape.attention_width * seen
    return operations / (options.tflops * 1e12 * options.computed_share)


def _break_even(
    shape: KvShape, params: float, tokens: int, compute_s: float, tier: TierSpeed, options: SizingOptions
) -> TierBreakEven:
    def gain_s(count: int) -> float:
        return prefill_s(shape, params, count, options) - _load_s(shape, count, tier, options)

    left_s = compute_s - tier.latency_s
    needed = shape.context_bytes(tokens, options.stored) / left_s / 1e9 if left_s > 0 else None
    return TierBreakEven(
        tier=tier.name,
        load_s=_load_s(shape, tokens, tier, options),
        is_quicker=gain_s(tokens) > 0,
        tokens=_first(lambda count: gain_s(count) > 0),
        gb_per_s_needed=needed,
    )


def _load_s(shape: KvShape, tokens: int, tier: TierSpeed, options: SizingOptions) -> float:
    return tier.latency_s + shape.context_bytes(tokens, options.stored) / (tier.gb_per_s * 1e9)


def _first(is_true: Callable[[int], bool], most: int = 1 << 24) -> int | None:
    """Return the least count from 1 on for which it is true; it stays true above, as the gain is convex."""
    high = 1
    while not is_true(high):
        if high >= most:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle
    return high


def _check(weights_bytes: int, gpu_bytes: int, contexts: Sequence[int], options: SizingOptions) -> None:
    speeds = [options.memory_gb_per_s, options.tflops, *(tier.gb_per_s for tier in options.tiers)]
    if weights_bytes < 1 or gpu_bytes < 1 or any(tokens < 1 for tokens in contexts):
        raise ValueError("weights, GPU memory and contexts must be 1 or more")
    if not all(0 < speed < math.inf for speed in speeds) or not 0 < options.computed_share <= 1:
        raise ValueError("speeds must be more than 0, and computed_share at most 1")
    if not 0 <= options.reserve_share < 1 or options.block_tokens < 1:
        raise ValueError("reserve_share must be at least 0 and less than 1; sizes must be 1 or more")
    if any(not 0 <= tier.latency_s < math.inf for tier in options.tiers):
        raise ValueError("latencies must be 0 or more")


def read_model(path: Path) -> tuple[KvShape, int | None]:
    """Return a model's shape, and the bytes of its weights if they are known. Raises `ModelRefused`.

    `path`: a directory, a model of the hub (whose weights are not downloaded), or the default model's name.
    """
    of_hub = hub_model(path)
    if of_hub is not None or is_default(path):
        from samovar.replicas.model import describe_hub_model, ensure_model  # imports torch

        if of_hub is not None:
            folder, weights_bytes = describe_hub_model(of_hub)
            return read_shape(folder), weights_bytes
        path = ensure_model(ModelSettings())
    path = path.expanduser()
    shape = read_shape(path)
    folder = path if path.is_dir() else path.parent
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            stated = parse_json(index.read_bytes())["metadata"]["total_size"]
            if type(stated) is int and stated > 0:
                return shape, stated
        found = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused(
            f"the weights in {folder} cannot be sized ({error!r})", "give their size"
        ) from error
    return shape, found or None


def parse_size(text: str) -> int:
    """Parse a size into bytes: `80GB` (10^9), `64GiB` (2^30), `512MB`. Raises `ValueError`."""
    return _parse(text, _UNITS, "a size such as 80GB or 64GiB")


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: `2k` (2048), `1m`, `8192`. Raises `ValueError`."""
    return _parse(text, _TOKEN_UNITS, "a number of tokens such as 2k or 8192")


def parse_contexts(text: str) -> tuple[int, ...]:
    """Parse a list of contexts: `2k,8k,32k`. Raises `ValueError`."""
    return tuple(parse_tokens(one) for one in text.split(","))


# `pydantic.ByteSize` would read `1,000GB` as 1 byte, `80GB,` as 80 GB and `5bit` as 0, and has no tokens.
def _parse(text: str, units: dict[str, int], what: str) -> int:
    found = _SIZE.fullmatch(text)
    factor = units.get(found[2].lower()) if found else None
    value = float(found[1]) * factor if found and factor else 0.0
    if not 1 <= value < 1 << 60 or value != int(value):
        raise ValueError(f"{text!r:.60} is not {what}")
    return int(value)


KV_FORMATS = {
    of.name: of
    for of in (
        *(KvFormat("fp32", 4), KvFormat("bf16", 2), KvFormat("fp16", 2), KvFormat("fp8", 1)),
        KvFormat("int8", 1, scale_bytes=2),  # `engine.kv_dtype`: a bf16 scale for each K and each V of a head
    )
}


@dataclass(frozen=True, slots=True)
class SizingAsk:
    """The command's options as given; None: not given."""

    model: Path
    gpu: str
    contexts: str = "2k,8k,32k,128k"
    weights: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: int = 1
    memory_gb_per_s: float | None = None
    tflops: float | None = None
    json_to: Path | None = None


def kv_format(name: str | None) -> KvFormat | None:
    """Return how KV is stored; None: in the model's own dtype. Raises `PlanRefused` for an unknown name."""
    if name is not None and name not in KV_FORMATS:
        raise PlanRefused(f"--kv-dtype {name!r:.40}: there are {', '.join(KV_FORMATS)}")
    return None if name is None else KV_FORMATS[name]


def run_sizing(ask: SizingAsk, console: Console) -> int:
    """Print the tables, write the JSON. Raises `PlanRefused`, `ModelRefused`, `ValueError`, `OSError`."""
    if ask.json_to is not None and not ask.json_to.resolve().parent.is_dir():
        raise PlanRefused(f"--json: there is no directory {ask.json_to.parent}")
    check_gpus_a_replica(ask.tensor_parallel)
    stored = kv_format(ask.kv_dtype)
    gpu_bytes, contexts = (
        _parsed("--gpu", parse_size, ask.gpu),
        _parsed("--context", parse_contexts, ask.contexts),
    )
    _check_unit("--gpu", ask.gpu, gpu_bytes)
    shape, weights_bytes = read_model(ask.model)
    if ask.weights is not None:
        weights_bytes = _parsed("--weights", parse_size, ask.weights)
        _check_unit("--weights", ask.weights, weights_bytes)
    if weights_bytes is None:
        raise PlanRefused(f"there are no weights in {ask.model}: give their size (--weights 65GB)")
    options = replace(SizingOptions(), stored=stored, gpus=ask.tensor_parallel)
    if ask.memory_gb_per_s is not None:
        options = replace(options, memory_gb_per_s=ask.memory_gb_per_s)
    if ask.tflops is not None:
        options = replace(options, tflops=ask.tflops)
    sizing = size_model(shape, weights_bytes, gpu_bytes, contexts, options)
    console.print(f"{ask.model}, {shape.kind} attention", highlight=False)
    for line in [
        *lines(sizing, stored or KvFormat("", shape.itemsize), gpu_bytes, options.gpus),
        *beyond(stated_context(ask.model), contexts),
    ]:
        console.print(line, highlight=False)
    tiers = ", ".join(f"{tier.name} {tier.gb_per_s:g}" for tier in options.tiers)
    console.print(
        f"assumed: {options.memory_gb_per_s:,g} GB/s of memory, {options.tflops:,g} TFLOPS of which prefill "
        f"reaches {options.computed_share:.0%}; loads, GB/s: {tiers}\n",
        highlight=False,
    )
    console.print(_table("What fits, and the highest decoding speed", CONTEXT_HEAD, context_rows(sizing)))
    console.print(_table("Loading a prompt's KV, or computing it", TIER_HEAD, tier_rows(sizing)))
    if ask.json_to is not None:
        ask.json_to.write_text(json.dumps(as_json(sizing), indent=1) + "\n")
        console.print(f"written: {ask.json_to}", highlight=False)
    return 0


SIZE_BYTES_MIN = 16 * MIB
"""Less is a size without its unit, and would give a table of zeros."""


def _check_unit(option: str, given: str, nbytes: int) -> None:
    if nbytes < SIZE_BYTES_MIN:
        raise PlanRefused(
            f"{option} {given} is {nbytes:,} bytes: write it with its unit, such as 80GB or 64GiB"
        )


def stated_context(path: Path) -> int | None:
    """Return the longest context that a model's config.json states; None if it states none."""
    path = path.expanduser()
    try:
        config = parse_json((path / "config.json" if path.is_dir() else path).read_bytes())
        tokens = config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None


def beyond(context_tokens: int | None, contexts: Sequence[int]) -> list[str]:
    """Return a note if some of `contexts` are longer than the model's own context."""
    longer = [] if context_tokens is None else [tokens for tokens in contexts if tokens > context_tokens]
    if context_tokens is None or not longer:
        return []
    listed = ", ".join(map(in_tokens, longer))
    return [
        f"note: the model's context ends at {in_tokens(context_tokens)} tokens: {listed} would not be served"
    ]


def _parsed(option: str, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise PlanRefused(f"{option}: {error}") from error


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for at, name in enumerate(head):
        is_word = at == 0 or name in ("tier", "quicker")
        table.add_column(name, justify="left" if is_word else "right")
    for row in rows:
        table.add_row(*row)
    return table


CONTEXT_HEAD = (
    *("context", "KV of one", "sequences that fit", "one decodes (tokens/s)", "all decode (tokens/s)"),
    "prefill",
)
TIER_HEAD = ("context", "tier", "load", "compute", "quicker", "loading wins from", "needs at least")


def in_bytes(nbytes: float) -> str:
    """Format bytes: `4.00 GiB`, `512 MiB`."""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"


def in_seconds(seconds: float | None) -> str:
    """Format seconds: `1.25 s`, `35.0 ms`; a dash if unknown."""
    if seconds is None:
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.1f} ms"


def in_tokens(tokens: int) -> str:
    """Format tokens, as `8k` if it is a round number."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def lines(sizing: Sizing, stored: KvFormat, gpu_bytes: int, gpus: int = 1) -> list[str]:
    """Return the lines above the tables."""
    each = f"{gpus} GPUs of " if gpus > 1 else ""
    element = f"{stored.itemsize} byte{'s' * (stored.itemsize > 1)} an element"
    if stored.scale_bytes:
        element += f", {stored.scale_bytes} for the scale of each K and V of a head"
    return [
        f"{sizing.token_bytes:,} bytes of KV a token ({element})",
        f"{each}{in_bytes(gpu_bytes)} of GPU memory, {in_bytes(sizing.weights_bytes)} of weights: "
        f"{in_bytes(sizing.kv_room_bytes)} for KV",
        f"one sequence decodes at {sizing.weights_tokens_per_s:,.0f} tokens/s at most (bandwidth / weights)",
        *(f"note: {note}" for note in sizing.notes),
    ]


def context_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Return the rows below `CONTEXT_HEAD`."""
    return [
        (
            in_tokens(one.tokens),
            in_bytes(one.kv_bytes),
            f"{one.sequences:,}",
            f"{one.alone_tokens_per_s:,.0f}",
            f"{one.batch_tokens_per_s:,.0f}",
            in_seconds(one.compute_s),
        )
        for one in sizing.contexts
    ]


def tier_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Return the rows below `TIER_HEAD`."""
    return [_tier_row(context, tier) for context in sizing.contexts for tier in context.tiers]


def _tier_row(context: ContextSizing, tier: TierBreakEven) -> tuple[str, ...]:
    needed = tier.gb_per_s_needed
    return (
        in_tokens(context.tokens),
        tier.tier,
        in_seconds(tier.load_s),
        in_seconds(context.compute_s),
        "load" if tier.is_quicker else "compute",
        "never" if tier.tokens is None else f"{tier.tokens:,} tokens",
        "-" if needed is None else f"{needed:,.2f} GB/s",
    )


def as_json(sizing: Sizing) -> dict[str, Any]:
    """Return the sizing as plain data, for `--json`."""
    return asdict(sizing)
