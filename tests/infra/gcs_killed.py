"""Run as a program in a pid namespace of its own: a head whose GCS is killed, and kept alive by `keep_gcs`.

Prints one JSON line: seconds until GCS took calls again, after each kill, and how the keeper ended.
Arguments: a short directory of its own, and GCS's port.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from samovar.cluster.launch.keep_gcs import find
from tests.support.services.service import until

ROOT = Path(__file__).resolve().parents[2]
KILLS = 2
BACK_S = 60.0
RAY = Path(sys.executable).parent / "ray"


@ray.remote(num_cpus=0)
class Counter:
    """Something that must outlive GCS."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> int:
        self._count += 1
        return self._count


def start_head(folder: Path, port: int) -> None:
    environment = os.environ | {
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(folder / "gcs"),
    }
    words = [
        *(str(RAY), "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *(f"--temp-dir={folder / 'ray'}", "--num-cpus=1", "--object-store-memory=80000000"),
        *("--include-dashboard=false", "--disable-usage-stats"),
    ]
    (folder / "gcs").mkdir(mode=0o700)
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)


def start_keeper(folder: Path, port: int) -> subprocess.Popen[bytes]:
    log = (folder / "keep_gcs.log").open("wb")
    words = [sys.executable, "-m", "samovar.cluster.launch.keep_gcs", f"--port={port}"]
    keeper = subprocess.Popen(words, cwd=ROOT, stderr=log, stdin=subprocess.DEVNULL)
    until("it watches", lambda: "watching GCS" in (folder / "keep_gcs.log").read_text(), 60.0)
    return keeper


def kill_gcs(port: int) -> int:
    found = find(port)
    assert found is not None, "GCS is not there"
    os.kill(found[0].pid, signal.SIGKILL)
    return found[0].pid


def use_gcs(number: int) -> int:
    """What needs GCS: finding an actor by its name, and making another one."""
    counter: Any = ray.get_actor("counter", namespace="gcs-test")
    another = Counter.options(name=f"another-{number}").remote()  # type: ignore[attr-defined]
    assert ray.get(another.add.remote(), timeout=BACK_S) == 1
    count: int = ray.get(counter.add.remote(), timeout=BACK_S)
    return count


def main(folder: Path, port: int) -> None:
    start_head(folder, port)
    keeper = start_keeper(folder, port)
    ray.init(f"127.0.0.1:{port}", namespace="gcs-test", log_to_driver=False)
    Counter.options(name="counter", lifetime="detached").remote()  # type: ignore[attr-defined]
    assert use_gcs(0) == 1
    back_s = []
    for number in range(1, KILLS + 1):
        old = kill_gcs(port)
        began_s = time.monotonic()
        assert use_gcs(number) == number + 1, "the actor is another one"
        back_s.append(round(time.monotonic() - began_s, 2))
        found = find(port)
        assert found is not None
        assert found[0].pid != old
    ray.shutdown()
    assert found is not None
    program, raylet = found
    psutil.Process(raylet).terminate()
    status = keeper.wait(timeout=60)
    log = (folder / "keep_gcs.log").read_text()
    print(json.dumps({"back_s": back_s, "status": status, "restarts": log.count("GCS is back")}))
    assert program.environment["RAY_gcs_storage"] == "rocksdb"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
