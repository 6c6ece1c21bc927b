"""Checksums of blocks, computed where they lie in the pool's pages, beside those of the host."""

from __future__ import annotations

import time

import numpy as np
import torch

from bench._gpu_device import Ceilings, Device, share
from bench._gpu_engine import Sizes
from bench._gpu_run import Rows, at_least, must_be
from samovar.cache_tiers.blocks.record import layer_sums
from samovar.configs.sections import MIB
from samovar.replicas.kv import KvGeometry

KEY = b"k" * 24
NUMBER_BYTES = 8


def measure_sums(rows: Rows, device: Device, geometry: KvGeometry, sizes: Sizes, ceilings: Ceilings) -> None:
    """Compare and time the checksums of many blocks: the host's, as a load has it, and the device's."""
    shape, blocks = geometry.record_shape, sizes.moved_blocks
    generator = torch.Generator(device.torch).manual_seed(23)
    pages = torch.empty((2 * blocks, shape.block_bytes), dtype=torch.uint8, device=device.torch)
    pages.random_(0, 256, generator=generator)
    numbers = np.random.default_rng(23).permutation(len(pages))[:blocks]
    keys = [int(number).to_bytes(NUMBER_BYTES, "little") + KEY for number in numbers]
    payload = pages[torch.from_numpy(numbers).to(device.torch)].cpu().numpy().reshape(-1)
    named, nbytes = f"{blocks} x {shape.block_bytes / MIB:.3g} MiB", blocks * shape.block_bytes
    took_s = []
    for _ in range(sizes.repeats):
        started_s = time.perf_counter()
        expected = layer_sums(payload, keys, shape)
        took_s.append(time.perf_counter() - started_s)
    rows.add("checksums by the host, of one extent", named, nbytes / min(took_s) / 1e9, "GB/s")
    if not device.is_cuda:
        rows.add("checksums in pages", named, None, "GB/s")
        return
    from samovar.replicas.kv.page_sums import page_sums  # triton comes with torch's CUDA builds only

    table = seeds = torch.from_numpy(numbers).to(device.torch)  # a key begins with its page's number
    found = page_sums(pages, table, seeds, shape).cpu().numpy().view(np.uint64)
    wrong = int((found != expected).any(axis=1).sum())
    rows.add("checksums in pages that are not the record's", named, wrong, "blocks", must_be("<=", 0))
    rate = nbytes / device.seconds(lambda: page_sums(pages, table, seeds, shape), sizes.repeats)
    rows.add("checksums in pages", named, rate / 1e9, "GB/s")
    rows.add("checksums in pages", named, share(rate, ceilings.copy), "of C", at_least(0.5))
