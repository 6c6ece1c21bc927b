"""Keeps Ray's GCS alive beside `ray start`: `python -m samovar.cluster.launch.keep_gcs --port 6379`.

Ray starts `gcs_server` once. When it dies, raylets wait `launch.gcs.away_s_max` for it, then exit, and
with them the cluster. This program restarts it with the same command line and environment, as often as
`Restarts` allows, and exits when the head's raylet has ended. That helps only if GCS recovers its state
(RocksDB, Redis): with state in memory a new GCS would know no node, so this program says so and exits. It
never logs the environment, which may hold secrets. systemd's `Restart=` and supervisor cannot do it: GCS is
started by `ray start`, with arguments that only the running process knows.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

logger = logging.getLogger(__name__)

FIND_S = 30.0
"""GCS and the raylet must be found within this time; `ray start` has started them before us."""
LOOK_S = 0.2
RESTARTS_MAX = 10
WINDOW_S = 600.0
DELAY_S_MAX = 15.0
"""Well below the least `launch.gcs.away_s_max` (60 s), after which a raylet gives up without GCS."""


@dataclass(frozen=True, slots=True)
class Program:
    """How a process was started, to restart it."""

    pid: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str


class Restarts:
    """Decides when to restart: at once, then with growing delays; only so often within a time window."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque()

    def delay_s(self, now_s: float) -> float | None:
        """Return the seconds to wait before a restart, at a death of GCS; None: it died too often."""
        while self._at_s and now_s - self._at_s[0] > WINDOW_S:
            self._at_s.popleft()
        if len(self._at_s) == RESTARTS_MAX:
            return None
        delay_s = min(DELAY_S_MAX, 2.0 ** (len(self._at_s) - 1)) if self._at_s else 0.0
        self._at_s.append(now_s)
        return delay_s


def is_gcs(command: Sequence[str], port: int) -> bool:
    """Whether this is the GCS that listens on `port`."""
    return _is(command, "gcs_server") and f"--gcs_server_port={port}" in command


def is_head_raylet(command: Sequence[str], gcs: Sequence[str]) -> bool:
    """Whether this is the head's raylet of the session that `gcs` (a command line) belongs to."""
    session = next((word for word in gcs if word.startswith("--session-name=")), None)
    return _is(command, "raylet") and "--head" in command and session in command


def is_durable(gcs: Program) -> bool:
    """Whether a new GCS recovers the state of this one."""
    has_redis = any(word.startswith("--redis_address=") for word in gcs.command)
    return has_redis or gcs.environment.get("RAY_gcs_storage") == "rocksdb"


def _is(command: Sequence[str], name: str) -> bool:
    return bool(command) and PurePath(command[0]).name == name


def find(port: int) -> tuple[Program, int] | None:
    """Return GCS and the pid of the head's raylet; None while either is missing."""
    seen: list[psutil.Process] = list(psutil.process_iter(["pid", "cmdline"]))
    for process in seen:
        command = process.info["cmdline"] or []
        if not is_gcs(command, port):
            continue
        for other in seen:
            if is_head_raylet(other.info["cmdline"] or [], command):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    return (
                        Program(process.pid, tuple(command), process.environ(), process.cwd()),
                        other.pid,
                    )
    return None


@contextlib.contextmanager
def watched(*pids: int) -> Iterator[dict[int, int]]:
    """Yield pidfds, readable once their process has ended, -> its pid. Raises `ProcessLookupError`."""
    of: dict[int, int] = {}
    try:
        for pid in pids:
            of[os.pidfd_open(pid)] = pid
        yield of
    finally:
        for descriptor in of:
            os.close(descriptor)


def ended(pids: Sequence[int], timeout_s: float | None) -> set[int]:
    """Block until a process has ended, or for `timeout_s`; return those that have. A zombie has ended."""
    try:
        with watched(*pids) as of:
            poll = select.poll()
            for descriptor in of:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
            return {of[descriptor] for descriptor, _ in ready}
    except ProcessLookupError:
        return {pid for pid in pids if not psutil.pid_exists(pid)}


def keep(gcs: Program, raylet: int, restarts: Restarts) -> bool:
    """Restart GCS until the raylet has ended (returns True) or GCS has died too often (False)."""
    pid, child = gcs.pid, None
    while True:
        gone = ended([pid, raylet], None)
        if raylet in gone:
            logger.info("the head's raylet has ended, so this program ends too")
            return True
        status = "" if child is None else f", status {child.wait()}"
        delay_s = restarts.delay_s(time.monotonic())
        if delay_s is None:
            logger.error(
                "GCS has died %d times in %.0f minutes: it is not restarted. Its log is in Ray's session "
                "directory",
                RESTARTS_MAX + 1,
                WINDOW_S / 60,
            )
            return False
        logger.warning("GCS (pid %d) has ended%s: restarting it in %.0f s", pid, status, delay_s)
        if ended([raylet], delay_s):
            continue  # `ray stop`
        child = subprocess.Popen(
            gcs.command,
            env=dict(gcs.environment),
            cwd=gcs.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives this program
        )
        pid = child.pid
        logger.warning("GCS is back as pid %d", pid)


def wait_for(port: int) -> tuple[Program, int]:
    """Wait for `find` to succeed. Raises `SystemExit`, naming the problem, after `FIND_S`."""
    deadline_s = time.monotonic() + FIND_S
    while (found := _found(port)) is None:
        if time.monotonic() > deadline_s:
            raise SystemExit(
                f"no head of a Ray cluster with --port={port} runs here. Start it with `ray start --head "
                f"--port={port}` before this program"
            )
        time.sleep(LOOK_S)
    return found


def _found(port: int) -> tuple[Program, int] | None:
    try:
        return find(port)
    except psutil.AccessDenied:
        raise SystemExit(
            f"the head with --port={port} is another user's. Run this program as the user of `ray start`"
        ) from None


def main(words: Sequence[str]) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(prog="keep_gcs", description="Starts the head's GCS again when it dies.")
    parser.add_argument("--port", type=int, default=6379, help="the head's, as given to `ray start`")
    port: int = parser.parse_args(words).port
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    gcs, raylet = wait_for(port)
    if not is_durable(gcs):
        logger.warning(
            "GCS keeps its state in memory: a new process would know no nodes, so GCS is not restarted. "
            "launch.gcs.storage=rocksdb (or redis) changes that"
        )
        return 0
    logger.info("watching GCS, pid %d, and the head's raylet, pid %d", gcs.pid, raylet)
    return 0 if keep(gcs, raylet, Restarts()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
