"""`python -m tests.kernels.compiled SM WHAT`: compile what is launched on such a GPU, without one.

`WHAT`: attention, fused or checksums. Prints a line of JSON for each kernel: what Triton's own ptxas and
cuobjdump say of it. In a process of its own: without Triton's interpreter, and with a driver that only names
a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samovar.cache_tiers.blocks.extent import BlockShape
from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.attention_triton import tile_shapes, write_rows
from samovar.replicas.forward.fused import step as fused_step
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.kv.page_sums import page_sums
from tests.kernels.paged import PagedCase, Shape
from tests.support.engines.plain_models import Shape as Plain

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


SMALL_ONE = Plain(q_heads=9, kv_heads=3, head_dim=64, hidden=576, inner=1536)
EIGHT_B = Plain(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336)
FUSED: dict[str, tuple[Plain, torch.dtype, bool]] = {
    "8B": (EIGHT_B, BF16, False),
    "8B, int8": (EIGHT_B, BF16, True),
    "8B, float16": (EIGHT_B, torch.float16, False),
    "8B, float32": (EIGHT_B, torch.float32, False),
    "8B, norms of heads, int8": (replace(EIGHT_B, has_head_norms=True), BF16, True),
    "7B, group 7": (Plain(q_heads=28, kv_heads=4, head_dim=128, hidden=3584, inner=18944), BF16, False),
    "head 80, group 1": (Plain(q_heads=32, kv_heads=32, head_dim=80, hidden=2560, inner=6912), BF16, False),
    "head 64, group 3": (SMALL_ONE, BF16, False),
    "405B": (Plain(q_heads=128, kv_heads=8, head_dim=128, hidden=16384, inner=53248), BF16, False),
}
"""Shapes of models that are served; dtype, and whether KV is int8."""


def fused(capability: int) -> Iterator[dict[str, Any]]:
    compiled = only_compiling(capability)
    seen = set()
    for name, (shape, dtype, is_int8) in FUSED.items():
        for kernel in _of_layer(compiled, shape, dtype, is_int8=is_int8):
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                yield {
                    "case": name,
                    "kernel": kernel.metadata.name,
                    "wide_loads": dumped(kernel.asm["cubin"], "--dump-sass").count("LDG.E.128"),
                    **facts(kernel),
                }


def _of_layer(compiled: list[Any], shape: Plain, dtype: torch.dtype, *, is_int8: bool) -> list[Any]:
    """Compile what a layer launches."""
    compiled.clear()
    heads = torch.zeros((4, shape.q_heads + 2 * shape.kv_heads, shape.head_dim), dtype=dtype)
    vector, rows = heads.new_zeros(shape.head_dim), heads.new_zeros((4, shape.hidden))
    half, weight = heads.new_zeros((4, shape.head_dim // 2)), heads.new_zeros(shape.hidden)
    layer = Mock(q_norm=None, k_norm=None, uses_rope=True)
    if shape.has_head_norms:
        layer.q_norm = layer.k_norm = vector
    plain = Mock(q_heads=shape.q_heads, kv_heads=shape.kv_heads, norm_eps=1e-5)
    geometry = KvGeometry(1, 16, shape.kv_heads, shape.head_dim, dtype, is_int8=is_int8)
    kv = KvPool(geometry, 2, torch.device("cpu")).layer(0)
    slots = torch.zeros(4, dtype=torch.int32)
    fused_step.norm(rows, weight, 1e-5)
    fused_step.add_norm(rows, rows.clone(), 1.0, weight, 1e-5)
    for layer.uses_rope in (True, False) if shape is SMALL_ONE else (True,):
        fused_step.rotate_write(plain, layer, heads, (half, half.clone()), slots, kv)
    fused_step.silu_times(heads.new_zeros((4, 2 * shape.inner)))
    return compiled


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


WHAT: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "attention": attention,
    "fused": fused,
    "checksums": checksums,
}

if __name__ == "__main__":
    assert triton.__version__
    for found in WHAT[sys.argv[2]](int(sys.argv[1])):
        print(json.dumps(found), flush=True)
