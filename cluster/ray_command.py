"""Runs one of Ray's own commands, shows what it prints as it comes, and gives up after a while.

Knows nothing of clusters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from configs.knobs import knobs

LAST_OUTPUT_S = 2.0
"""A connection that ssh keeps for the next command holds the pipe open: its end is not waited for."""

GRACE_S = 10.0


class CommandFailed(Exception):
    """It ended with an error, or was ended; the text names it and says which."""


def ray_program() -> str:
    """The `ray` beside our Python, else that of PATH. Raises `CommandFailed`."""
    beside = Path(sys.executable).with_name("ray")
    found = str(beside) if beside.exists() else shutil.which("ray")
    if found is None:
        raise CommandFailed(
            "there is no `ray` beside this Python nor in PATH. Install Samovar's requirements"
        )
    return found


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for others' programs: they need none of our secrets."""
    hidden = {knob.env for knob in knobs().values() if knob.secret} | {"SAMOVAR_API_KEY"}
    return {name: value for name, value in env.items() if name not in hidden}


def run_shown(
    words: Sequence[str], env: Mapping[str, str], limit_s: float, show: Callable[[str], None]
) -> int:
    """The exit code. `show` gets each line, from another thread. Raises `CommandFailed` after `limit_s`."""
    process = subprocess.Popen(
        list(words),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            show(line.rstrip("\r\n"))

    reader = threading.Thread(target=read, name="output", daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"`{_name(words)}` was not done after {limit_s:.0f} s and was ended") from None
    finally:
        _end(process)
        reader.join(LAST_OUTPUT_S)
    return code


def _end(process: subprocess.Popen[str]) -> None:
    """All of its group, if it still runs: after a timeout, or Ctrl-C."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # those that a shell has sent to the background stay deaf
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _name(words: Sequence[str]) -> str:
    return " ".join([Path(words[0]).name, *words[1:2]])
