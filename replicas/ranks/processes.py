"""Ranks as plain processes of this machine: for tests, benchmarks, and machines without Ray.

The service runs them as actors (`replicas/start/ray_ranks.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys

from samovar.replicas.ranks.worker import RankStart

ENTRY = (
    "import sys; from samovar.replicas.ranks import serve_rank, start_of; serve_rank(start_of(sys.argv[1]))"
)
"""Not `-m`: this package imports this module, so that it would be there twice, and Python warns of that."""
_END_S = 10.0
"""A rank ends by itself when rank 0 closes the channels; after this it is killed."""


class RankSubprocess:
    """A rank in a process of its own, a `RankProcess`."""

    def __init__(self, start: RankStart) -> None:
        command = [sys.executable, "-c", ENTRY, start.as_json()]
        self._rank = start.rank
        env = os.environ | _its_gpu(start.rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)

    def failure(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"rank {self._rank} has ended with {code}; see its log"

    def stop(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _its_gpu(rank: int, visible: str | None) -> dict[str, str]:
    """Return what lets a rank see its own GPU only, of those `visible` to rank 0, which takes the first."""
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(rank)}
    gpus = [name for name in visible.split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": gpus[rank] if rank < len(gpus) else ""}
