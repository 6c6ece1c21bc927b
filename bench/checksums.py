"""`make bench-checksums`: what sealing and checking records cost, and how long they hold the interpreter.

GB/s of the checksums of an extent of 64 MiB in memory, of the present version (compiled on one thread and on
more, and by numpy), of encryption at rest, and of version 2 (xxh3: a layer at a time when it is sealed, a
block at a time when it is checked), for blocks of several models, at best: what else runs on the machine
takes memory, too. Beside each, this thread computes in Python, as an engine does: `held_pct` is the share of
its time in which it slept, as it does only for the interpreter. Its waits for a core are left out (Linux's
`schedstat` tells them apart).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from bench import _report as report
from samovar.cache_tiers.blocks.compiled_sums import CompiledSums, sums_library
from samovar.cache_tiers.blocks.extent import BlockShape, Bytes
from samovar.cache_tiers.blocks.record import header_bytes, plain_sums
from samovar.cache_tiers.encryption.tier import Geometry, Opened, SessionKey, encrypt
from samovar.configs.settings import Settings

MIB = 1024 * 1024
EXTENT_BYTES = 64 * MIB
"""`tiers.extent_bytes_max` of the presets for GPUs."""
SHAPES = {
    "SmolLM2-135M": BlockShape(30, 12288, 16),
    "Llama 8B": BlockShape(32, 65536, 16),
    "Llama 70B": BlockShape(80, 65536, 16),
}
ROUNDS = 20
SCHEDSTAT = Path("/proc/thread-self/schedstat")


def ways(shape: BlockShape, payload: Bytes, keys: list[bytes]) -> dict[str, tuple[int, Callable[[], object]]]:
    """Threads, and the call, of each way to compute an extent's checksums."""
    seeds = np.frombuffer(b"".join(key[:8] for key in keys), "<u8")
    sums = np.empty((len(keys), shape.layers), np.uint64)
    settings = Settings()
    library = sums_library(settings.native_dir, settings.engine.native_build_s_max)

    def xxh3(step: int) -> None:
        view = payload.data
        for start in range(0, payload.nbytes, step):
            xxh3_64_intdigest(view[start : start + step], 1)

    found: dict[str, tuple[int, Callable[[], object]]] = {
        f"compiled, {threads} thread{'s' * (threads > 1)}": (
            threads,
            partial(CompiledSums(library, threads), payload, seeds, shape, sums),
        )
        for threads in sorted({1, 2, os.cpu_count() or 1})
    }
    found["numpy"] = (1, partial(plain_sums, payload, seeds, shape, sums))
    key = SessionKey(bytes(8), os.urandom(32))
    geometry = Geometry(header_bytes(len(keys), shape.layers), shape.block_bytes, len(keys))
    plain = np.concatenate((np.zeros(geometry.plain_head, np.uint8), payload))
    sealed = encrypt(plain, geometry, key)
    block = np.empty(shape.block_bytes, np.uint8)

    def decrypt() -> None:
        opened = Opened(sealed[: geometry.head], key)
        for number in range(geometry.blocks):
            opened.open(number, sealed[geometry.at(number) :][: geometry.stride], block)

    found["AES-256-GCM, encrypted"] = (1, partial(encrypt, plain, geometry, key))
    found["AES-256-GCM, decrypted"] = (1, decrypt)
    found["version 2, sealed"] = (1, partial(xxh3, shape.layer_bytes))
    found["version 2, checked"] = (1, partial(xxh3, shape.block_bytes))
    return found


def held_share(call: Callable[[], object], seconds: float) -> float:
    """Return the share of this thread's time that another, which calls, held the interpreter."""
    over, started = threading.Event(), threading.Event()

    def work() -> None:
        while not over.is_set():
            started.set()
            call()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    began_s, ran = time.perf_counter(), core_s()
    while time.perf_counter() - began_s < seconds:
        pass
    took_s = time.perf_counter() - began_s
    computed_s, waited_s = (after - before for before, after in zip(ran, core_s(), strict=True))
    over.set()
    thread.join()
    asleep_s = max(0.0, took_s - computed_s - waited_s)
    return asleep_s / (asleep_s + computed_s)


def core_s() -> tuple[float, float]:
    """Return for how long this thread had a core, and waited for one."""
    had, waited, _ = map(int, SCHEDSTAT.read_text().split())
    return had / 1e9, waited / 1e9


def measure(name: str, shape: BlockShape, seconds: float) -> list[dict[str, Any]]:
    blocks = EXTENT_BYTES // shape.block_bytes
    payload = np.random.default_rng(1).integers(0, 256, blocks * shape.block_bytes, dtype=np.uint8)
    keys = [os.urandom(32) for _ in range(blocks)]
    rows = []
    for way, (threads, call) in {
        "none": (1, partial(time.sleep, 0.001)),
        **ways(shape, payload, keys),
    }.items():
        took = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            call()
            took.append(time.perf_counter() - begun)
        rows.append(
            {
                "blocks": name,
                "way": way,
                "threads": threads,
                "gb_per_s": payload.nbytes / min(took) / 1e9 if way != "none" else None,
                "held_pct": 100 * held_share(call, seconds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of computing beside each way")
    seconds = parser.parse_args().seconds
    sys.setswitchinterval(0.005)  # Python's own
    rows = list(itertools.chain(*(measure(name, shape, seconds) for name, shape in SHAPES.items())))
    report.show("checksums of an extent of 64 MiB, in memory", rows)
    print(f"written to {report.write('checksums', rows)}")


if __name__ == "__main__":
    main()
