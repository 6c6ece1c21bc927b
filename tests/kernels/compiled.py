"""`python -m tests.kernels.compiled SM WHAT`: compile what is launched on such a GPU, without one.

`WHAT`: attention or checksums. Prints a line of JSON for each kernel: what Triton's own ptxas and cuobjdump
say of it. In a process of its own: without Triton's interpreter, and with a driver that only names a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samovar.cache_tiers.blocks.extent import BlockShape
from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.attention_triton import tile_shapes, write_rows
from samovar.replicas.kv.page_sums import page_sums
from tests.kernels.paged import PagedCase, Shape

BF16 = torch.bfloat16
STEPS = ((300, 1), (100, 40))
CASES = {
    "head 128": (Shape(head_dim=128, dtype=BF16), AttentionForm(0.1)),
    "head 128, split": (Shape(head_dim=128, dtype=BF16, splits=8), AttentionForm(0.1)),
    "head 128, int8, split": (Shape(head_dim=128, dtype=BF16, splits=8, is_int8=True), AttentionForm(0.1)),
    "head 128, int8": (Shape(head_dim=128, dtype=BF16, is_int8=True), AttentionForm(0.1)),
    "head 128, float16": (Shape(head_dim=128, dtype=torch.float16), AttentionForm(0.1)),
    "head 128, float32": (Shape(head_dim=128), AttentionForm(0.1)),
    "head 128, window": (Shape(head_dim=128, dtype=BF16, splits=8), AttentionForm(0.1, 64)),
    "head 64": (Shape(head_dim=64, dtype=BF16), AttentionForm(0.1)),
    "head 64, window, sinks, int8, split": (
        Shape(head_dim=64, group=8, dtype=BF16, splits=8, is_int8=True),
        AttentionForm(0.1, 128, None, torch.zeros(16, dtype=BF16)),
    ),
    "head 80, group 7": (Shape(head_dim=80, group=7, dtype=BF16, kv_groups=2), AttentionForm(0.1)),
    "head 256, soft cap": (Shape(head_dim=256, dtype=BF16, splits=8), AttentionForm(0.1, None, 50.0)),
    "head 256, window, soft cap, int8": (
        Shape(head_dim=256, dtype=BF16, is_int8=True),
        AttentionForm(0.1, 64, 50.0),
    ),
}


class NamedGpu:
    """The part of Triton's driver that compiling asks; launching is never asked for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def resources(cubin: bytes) -> dict[str, int]:
    said = dumped(cubin, "--dump-resource-usage")
    return {name.lower(): int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


def only_compiling(capability: int) -> list[Any]:
    """Launch nothing from now on; what would be is compiled into the list that is returned."""
    compiled: list[Any] = []
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = only_compile
    driver.set_active(NamedGpu(capability))
    return compiled


def facts(kernel: Any) -> dict[str, Any]:
    return {
        "shared": kernel.metadata.shared,
        "wgmma": "wgmma" in kernel.asm["ptx"],
        **resources(kernel.asm["cubin"]),
    }


def attention(capability: int) -> Iterator[dict[str, Any]]:
    compiled = only_compiling(capability)
    seen = set()
    for name, (shape, form) in CASES.items():
        shapes = tile_shapes(capability, shape.head_dim, shape.dtype.itemsize, shape.group)
        case = PagedCase(shape, STEPS, shapes=shapes)
        case.attend(form)
        new = torch.zeros(case.inputs.shape.rows, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
        write_rows(case.kv, case.inputs.slots, new, new)
        attends = iter(("decode", "prefill"))
        for kernel in compiled:
            what = kernel.metadata.name.removesuffix("_tiles")
            what = f"attend, {next(attends)}" if what == "attend" else what
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                yield {
                    "case": name,
                    "kernel": what,
                    **facts(kernel),
                }
        compiled.clear()


def checksums(capability: int) -> Iterator[dict[str, Any]]:
    compiled = only_compiling(capability)
    for layer_bytes in (65536, 12288, 4104):
        shape, numbers = BlockShape(2, layer_bytes, 16), torch.zeros(4, dtype=torch.int64)
        page_sums(torch.zeros((5, shape.block_bytes), dtype=torch.uint8), numbers, numbers, shape)
        sass = dumped(compiled[-1].asm["cubin"], "--dump-sass")
        yield {
            "case": f"layers of {layer_bytes} bytes",
            "wide_products": sass.count("IMAD.WIDE.U32"),
            "wide_loads": sass.count("LDG.E.128"),
            **facts(compiled[-1]),
        }


WHAT: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {"attention": attention, "checksums": checksums}

if __name__ == "__main__":
    assert triton.__version__
    for found in WHAT[sys.argv[2]](int(sys.argv[1])):
        print(json.dumps(found), flush=True)
