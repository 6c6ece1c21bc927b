"""What the soak does to a running service: kills, hangs, rotten and missing files.

Faults inside the tiers (delays, errors, flips, short reads, no room) are the service's own,
`tiers.faults.*`: `fault_flags`. Here is what comes from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil

from bench._soak_watch import process_name

RECORDS = (".kv", ".bad", ".tmp")
TIER_FAULTS = {
    "nvme": {"delay-s": 0.05, "delay-rate": 0.05, "hang-rate": 0.001, "hang-s": 5.0},
    "s3": {"delay-s": 0.3, "delay-rate": 0.05, "hang-rate": 0.002, "hang-s": 12.0},
}
RATES = {"error-rate": 0.01, "flip-rate": 0.02, "truncate-rate": 0.01, "full-rate": 0.01}
PERIODS_S = {"flip a file": 7.0, "delete a file": 11.0, "freeze S3": 61.0, "kill the tier actor": 97.0}
FREEZE_S = (2.0, 8.0)


def fault_flags(seed: int) -> Iterator[str]:
    """Flags of `samovar serve`. Not for main memory: with faults in between, it would hand out copies."""
    for tier, faults in TIER_FAULTS.items():
        for name, value in {"seed": seed, **RATES, **faults}.items():
            yield from (f"--tiers.faults.{tier}.{name}", str(value))


class Saboteur:
    """Does harm to the processes below `root` and to the files in `nvme_dir`; `counts` what it did."""

    def __init__(self, root: psutil.Process, nvme_dir: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._root = root
        self._nvme_dir = nvme_dir
        self._rng = random.Random(seed)
        self._deleted: dict[Path, int] = {}

    async def run(self, until_s: float) -> None:
        """Until `until_s` (monotonic). A short run sees each kind, too."""
        left_s = until_s - time.monotonic()
        acts: dict[str, Callable[[], Awaitable[bool]]] = {
            "flip a file": lambda: asyncio.to_thread(self._flip),
            "delete a file": lambda: asyncio.to_thread(self._delete),
            "freeze S3": self._freeze_s3,
            "kill the tier actor": lambda: asyncio.to_thread(self._kill_actor),
        }
        await asyncio.gather(
            *(self._every(min(PERIODS_S[name], left_s / 2), name, act, until_s) for name, act in acts.items())
        )

    @property
    def missing_bytes(self) -> int:
        """Room that deleted files took and nobody has filled again: a tier may not know yet."""
        return sum(nbytes for path, nbytes in self._deleted.items() if not path.exists())

    async def _every(
        self, period_s: float, name: str, act: Callable[[], Awaitable[bool]], until_s: float
    ) -> None:
        while True:
            await asyncio.sleep(min(self._rng.uniform(0.5, 1.5) * period_s, until_s - time.monotonic()))
            if time.monotonic() >= until_s:
                return
            self.counts[name if await act() else f"{name}: none there"] += 1

    def _flip(self) -> bool:
        path = self._any_record()
        if path is None:
            return False
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:  # evicted meanwhile
            place = self._rng.randrange(max(1, path.stat().st_size))
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1 << self._rng.randrange(8)]))
            return True
        return False

    def _delete(self) -> bool:
        path = self._any_record()
        if path is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            self._deleted[path] = path.stat().st_blocks * 512
            path.unlink()
            return True
        return False

    def _any_record(self) -> Path | None:
        paths = sorted(files_below(self._nvme_dir, ".kv"))
        return self._rng.choice(paths) if paths else None

    async def _freeze_s3(self) -> bool:
        servers = await asyncio.to_thread(self._processes, "rclone")
        if not servers:
            return False
        try:
            for server in servers:
                server.suspend()
            await asyncio.sleep(self._rng.uniform(*FREEZE_S))
        finally:
            for server in servers:
                server.resume()
        return True

    def _kill_actor(self) -> bool:
        actors = self._processes("ray::TierActor")
        for actor in actors:
            os.kill(actor.pid, signal.SIGKILL)
        return bool(actors)

    def _processes(self, name: str) -> list[psutil.Process]:
        """Processes of the service by their `process_name`."""
        return [process for process in self._root.children(recursive=True) if process_name(process) == name]


def disk_use(folder: Path) -> tuple[int, int]:
    """Bytes of room that a tier's files below `folder` take, and how many files."""
    nbytes = files = 0
    for path in files_below(folder, *RECORDS):
        with contextlib.suppress(FileNotFoundError):
            nbytes += path.stat().st_blocks * 512
            files += 1
    return nbytes, files


def files_below(folder: Path, *suffixes: str) -> Iterator[Path]:
    """Yield the files with these suffixes. Folders may go meanwhile, which `Path.rglob` does not bear."""
    for directory, _, names in os.walk(folder):
        yield from (Path(directory, name) for name in names if name.endswith(suffixes))
