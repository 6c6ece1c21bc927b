"""`samovar plan --model DIR --gpu 80GB`: reads the model, has it sized (`kv_sizing.py`), prints tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cluster import sizing_report as report
from cluster.kv_sizing import SizingOptions, parse_contexts, parse_size, read_model, size_model
from cluster.plan_runs import PlanRefused

KV_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class SizingAsk:
    """As given; None: not given."""

    model: Path
    gpu: str
    contexts: str = "2k,8k,32k,128k"
    weights: str | None = None
    kv_dtype: str | None = None
    memory_gb_per_s: float | None = None
    tflops: float | None = None
    json_to: Path | None = None


def kv_itemsize(name: str | None) -> int | None:
    """Bytes an element; None: the model's own. Raises `PlanRefused`."""
    if name is not None and name not in KV_DTYPES:
        raise PlanRefused(f"--kv-dtype {name!r:.40}: there are {', '.join(KV_DTYPES)}")
    return None if name is None else KV_DTYPES[name]


def run_sizing(ask: SizingAsk, console: Console) -> int:
    """Print the tables, write the JSON. Raises `PlanRefused`, `ModelRefused`, `ValueError`, `OSError`."""
    if ask.json_to is not None and not ask.json_to.resolve().parent.is_dir():
        raise PlanRefused(f"--json: there is no directory {ask.json_to.parent}")
    itemsize = kv_itemsize(ask.kv_dtype)
    gpu_bytes, contexts = (
        _parsed("--gpu", parse_size, ask.gpu),
        _parsed("--context", parse_contexts, ask.contexts),
    )
    shape, weights_bytes = read_model(ask.model)
    if ask.weights is not None:
        weights_bytes = _parsed("--weights", parse_size, ask.weights)
    if weights_bytes is None:
        raise PlanRefused(f"there are no weights in {ask.model}: say how large they are (--weights 65GB)")
    options = replace(SizingOptions(), kv_itemsize=itemsize)
    if ask.memory_gb_per_s is not None:
        options = replace(options, memory_gb_per_s=ask.memory_gb_per_s)
    if ask.tflops is not None:
        options = replace(options, tflops=ask.tflops)
    sizing = size_model(shape, weights_bytes, gpu_bytes, contexts, options)
    console.print(f"{ask.model}, {shape.kind} attention", highlight=False)
    for line in report.lines(sizing, shape, gpu_bytes):
        console.print(line, highlight=False)
    tiers = ", ".join(f"{tier.name} {tier.gb_per_s:g}" for tier in options.tiers)
    console.print(
        f"assumed: {options.memory_gb_per_s:,g} GB/s of memory, {options.tflops:,g} TFLOPS of which prefill "
        f"reaches {options.computed_share:.0%}; loads, GB/s: {tiers}\n",
        highlight=False,
    )
    console.print(
        _table("What fits, how quick it decodes at most", report.CONTEXT_HEAD, report.context_rows(sizing))
    )
    console.print(
        _table("Loading a prompt's KV, or computing it", report.TIER_HEAD, report.tier_rows(sizing))
    )
    if ask.json_to is not None:
        ask.json_to.write_text(json.dumps(report.as_json(sizing), indent=1) + "\n")
        console.print(f"written: {ask.json_to}", highlight=False)
    return 0


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
