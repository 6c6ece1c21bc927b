"""The other end of a link, a process of its own: `python -m tests.faults.link_peer NAME ARENA_BYTES LEASE_S`.

One JSON object a line, in and out. `{"seed", "nbytes"}` leases, fills (see `pattern`) and exports;
`{"record": base64}` does so with given bytes; `{"release": generation, "fill": byte}` releases a lease and
overwrites its bytes, as its next holder would. A `Peer` in the test's process speaks to it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.transport.link import ArenaLease, Export, NixlLink

ROOT = Path(__file__).resolve().parents[2]
SETTLE_S = 30.0


def pattern(seed: int, nbytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Peer:
    """A child with a link. `env`: on top of this process's environment."""

    def __init__(self, name: str, *, arena_bytes: int, env: dict[str, str] | None = None) -> None:
        self.name = name
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.link_peer", name, str(arena_bytes), "600"],
            cwd=ROOT,
            env=os.environ | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == {"ready": name}

    @property
    def pid(self) -> int:
        return self._child.pid

    def export(self, seed: int, nbytes: int) -> Export:
        return self._exported({"seed": seed, "nbytes": nbytes})

    def export_bytes(self, data: Bytes) -> Export:
        return self._exported({"record": base64.b64encode(data.tobytes()).decode()})

    def overwrite(self, generation: int, byte: int) -> None:
        """Release a lease; its memory is used for something else."""
        self._ask({"release": generation, "fill": byte})

    def stop(self) -> None:
        """SIGSTOP, and it has stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(SETTLE_S)

    def close(self) -> int:
        """Its exit code, after it was asked to end (or was killed before)."""
        if self._child.poll() is None:
            self.go_on()
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        code = self._child.wait(SETTLE_S)
        self._child.stdout.close()
        return code

    def _exported(self, order: dict[str, Any]) -> Export:
        answer = self._ask(order)
        return Export(**answer | {"metadata": base64.b64decode(answer["metadata"])})

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        return answer


def obey(link: NixlLink, leases: dict[int, ArenaLease], order: dict[str, Any]) -> dict[str, Any]:
    if "release" in order:
        link.release(order["release"])
        leases.pop(order["release"]).view[:] = order["fill"]
        return {}
    if "record" in order:
        data = np.frombuffer(base64.b64decode(order["record"]), np.uint8)
    else:
        data = pattern(order["seed"], order["nbytes"])
    lease = link.lease(len(data), expires=True)
    assert lease is not None, "the peer's arena is full"
    lease.view[:] = data
    leases[lease.generation] = lease
    export = link.export(lease)
    return {
        "agent": export.agent,
        "metadata": base64.b64encode(export.metadata).decode(),
        "address": export.address,
        "nbytes": export.nbytes,
        "generation": export.generation,
    }


def main(name: str, arena_bytes: int, lease_s: float) -> None:
    link = NixlLink(name, arena_bytes=arena_bytes, lease_s=lease_s, clock=time.monotonic)
    print(json.dumps({"ready": name}), flush=True)
    leases: dict[int, ArenaLease] = {}
    for line in sys.stdin:
        print(json.dumps(obey(link, leases, json.loads(line))), flush=True)
        link.check_integrity()
    link.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
