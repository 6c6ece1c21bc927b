"""Commands on the machine itself, for the lab: run, and complain with what they said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
"""Where `ray`, `samovar` and `python` of the tests' environment are; not resolved, it is a venv's."""

CLEAN_ENV = {
    "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


class LabError(Exception):
    """The lab, or a command on one of its hosts, did not do what it should."""


def sh(argv: Sequence[str], stdin: str | None = None, timeout_s: float = 30.0) -> str:
    """What it printed. Raises LabError unless it ended with 0 in time."""
    done = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False, env=CLEAN_ENV
    )
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def ip_batch(namespace_pid: int, lines: Sequence[str]) -> None:
    """`ip` commands in the network namespace of that process. Raises LabError at the first that fails."""
    sh(["nsenter", "-t", str(namespace_pid), "-n", "ip", "-batch", "-"], stdin="\n".join(lines))


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Raises LabError, naming `what`, when it does not come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise LabError(f"{what}: not within {timeout_s} s")
        time.sleep(0.02)


def network_of(pid: int | str) -> str:
    """The name of a process's network namespace; empty when there is no such process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it ended
        return ""
