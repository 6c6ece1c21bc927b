"""`python -m bench.gpu`: what the engine does on a GPU, first whether it is right, then how quick it is.

One command, offline, in less than eight minutes: a model of Llama 8B's shape with random weights is made on
the device, the machine's own copy rate (C), PCIe rate (P) and matrix rate (G) are measured, and the product's
classes are held against them. Needs torch, transformers and pydantic; nothing of Ray. `--tiny --device cpu`
runs every section in a shape that says nothing of speed. Exit code 1: a check or a bar failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from bench import _report as report
from bench._gpu_attention import DecodeTimes, check_attention, check_logits, measure_attention
from bench._gpu_device import Device, measure_ceilings
from bench._gpu_engine import (
    FULL,
    SMALL,
    Alone,
    Sizes,
    check_start,
    measure_prefill_rate,
    measure_steps,
    measure_streams,
    measure_turns,
)
from bench._gpu_memory import survive_memory
from bench._gpu_model import LLAMA_8B, TINY, Caller, Shape
from bench._gpu_moves import check_moves, measure_moves
from bench._gpu_returns import measure_returns
from bench._gpu_run import GpuRun, Rows, Section
from bench._gpu_stage import Stage
from bench._gpu_sums import measure_sums
from samovar.replicas.kv import KvGeometry

SECTIONS_S = 420.0
"""No section begins later after the process did."""
RUN_S = 465.0
"""Then the run ends, whatever it does: in less than eight minutes."""
CUT_OFF = 3


def sections(
    stage: Stage, rows: Rows, device: Device, shape: Shape, sizes: Sizes, *, tiny: bool
) -> list[Section]:
    """Return all sections, checks first."""
    ceilings, alone, times = stage.ceilings, Alone(), DecodeTimes()
    geometry = KvGeometry(shape.layers, shape.block_tokens, shape.kv_heads, shape.head_dim, shape.dtype)

    def auto() -> Caller:
        return stage.caller("auto")

    def of(kind: str, work: Callable[[str], None]) -> Callable[[], None]:
        return lambda: work(kind)

    def attention_is_right(kind: str) -> None:
        caller = stage.caller(kind)
        check_attention(rows, caller, device, caller.engine.runner.pool.geometry, sizes)

    def attention(kind: str) -> None:
        measure_attention(rows, stage.caller(kind), device, sizes, ceilings, times, kind=kind)

    def returns(kind: str) -> None:
        caller, node = stage.caller(kind), stage.node(kind)
        measure_returns(rows, caller, node, sizes, ceilings, judges_times=kind == "auto")

    return [
        Section("ceilings", lambda: measure_ceilings(rows, device, ceilings, tiny=tiny, dtype=shape.dtype)),
        Section("start", lambda: check_start(rows, auto())),
        Section("moves are right", lambda: check_moves(rows, device, geometry, sizes)),
        Section("checksums", lambda: measure_sums(rows, device, geometry, sizes, ceilings)),
        Section("attention is right", of("auto", attention_is_right)),
        Section("logits are right", lambda: check_logits(rows, auto(), sizes)),
        Section("attention", of("auto", attention)),
        Section("steps", lambda: measure_steps(rows, auto(), sizes, alone)),
        Section("streams", lambda: measure_streams(rows, auto(), sizes)),
        Section("turns", lambda: measure_turns(rows, auto(), sizes)),
        Section("prefill", lambda: measure_prefill_rate(rows, auto(), sizes, ceilings)),
        Section("moves", lambda: measure_moves(rows, auto(), device, geometry, sizes, ceilings)),
        Section("returns", of("auto", returns)),
        Section("memory", lambda: survive_memory(rows, auto(), device, sizes)),
        Section("int8: attention is right", of("int8", attention_is_right)),
        Section("int8: attention", of("int8", attention)),
        Section("int8: returns", of("int8", returns)),
    ]


def facts(device: Device, shape: Shape) -> dict[str, Any]:
    """Return what the numbers depend on."""
    found: dict[str, Any] = {"machine": report.machine(), "shape": shape.name, "device": str(device.torch)}
    for name in ("transformers", "triton", "numpy", "pydantic"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.torch)
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "gpu_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=report.OUT_DIR / "gpu.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape: tries the script, measures nothing"
    )
    parser.add_argument("--only", nargs="*", default=(), metavar="SECTION", help="run these sections alone")
    parser.add_argument("--limit-s", type=float, default=SECTIONS_S, help="no section begins after this")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was run. `--tiny --device cpu` tries the script itself.")
        return 2
    device = Device(args.device)
    shape, sizes = (TINY, SMALL) if args.tiny else (LLAMA_8B, FULL)
    rows = Rows(judges_speed=not args.tiny)
    command = " ".join([Path(sys.executable).name, "-m", "bench.gpu", *argv])
    begun_s = time.time() - psutil.Process().create_time()  # importing torch takes a while
    run = GpuRun(
        rows,
        args.out,
        {"command": command, **facts(device, shape)},
        limit_s=args.limit_s,
        begun_s=begun_s,
        settle=device.settle,
        screen=sys.stdout,
    )

    def end() -> None:
        run.cut_off()
        os._exit(CUT_OFF)  # a kernel that never ends cannot be stopped otherwise

    watchdog = threading.Timer(max(RUN_S, args.limit_s + RUN_S - SECTIONS_S) - begun_s, end)
    watchdog.daemon = True
    watchdog.start()
    with tempfile.TemporaryDirectory(prefix="samovar-gpu-") as folder:
        stage = Stage(device, shape, sizes, Path(folder))
        wanted = sections(stage, rows, device, shape, sizes, tiny=args.tiny)
        run.run([section for section in wanted if not args.only or section.name in args.only])
        stage.close()
    watchdog.cancel()
    run.finish()
    return 0 if rows.are_good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
