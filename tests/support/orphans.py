"""Ends what a run of the tests has started, when the run is over: also one that is killed.

A plugin of pytest's, with a program: `pytest_configure` marks this process' environment, which all that it
starts inherit, and starts the program, which waits for this process to end and then ends whatever has the
mark, with its children. One that makes an environment of its own for a process passes it by: `Popen` of
tests must not (`tests/unit/repository/test_orphans.py`), and the product's such processes end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    import pytest

MARK = "TESTS_RUN"
GRACE_S, END_S = 10.0, 20.0
"""A service that is asked to end gets so long; after `END_S` what cannot be killed is left."""


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform != "linux" or hasattr(
        config, "workerinput"
    ):  # of xdist's workers the first one sees to it
        return
    mark, outer = uuid4().hex, os.environ.get(MARK)
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        env=unmarked,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    os.environ[MARK] = f"{outer},{mark}" if outer else mark  # a run inside of a test is the outer one's, too


def marked(mark: str) -> set[int]:
    """Return the processes that have a mark, and their children, but for this one."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if status[0] == "Z":
                continue
            parents[pid] = int(status[1])
            if any(mark in value for value in _marks_of(pid)):
                found.add(pid)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found - {os.getpid()}


def _marks_of(pid: int) -> Iterator[str]:
    for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = line.decode(errors="replace").partition("=")
        if name == MARK:
            yield value


def end_all(mark: str) -> None:
    """Ask all marked processes to end, and kill those that do not."""
    began_s, asked = time.monotonic(), set[int]()
    while (left := marked(mark)) and (passed_s := time.monotonic() - began_s) < END_S:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if passed_s > GRACE_S:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    os.kill(pid, signal.SIGTERM)
        asked |= left
        time.sleep(0.1)


def main(pid: int, mark: str) -> None:
    """Wait for a process to end, then end what it has left."""
    with contextlib.suppress(ProcessLookupError):
        run = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([run], [], [])
    end_all(mark)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
