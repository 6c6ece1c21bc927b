"""A server and all processes below it: what they take of the CPU and of memory, and how they are stopped.

CPU is read from each thread's `schedstat` in nanoseconds, as a request that takes 0.2 s on a dozen processes
is lost in ticks of 10 ms; what runs for long and starts processes that end again (a start) is read from the
processes' own times, with those of their children that ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

STOP_S = 60.0
GONE_S = 5.0
QUIET_SHARE = 0.25
"""Of a core. Ray's processes take an eighth when nothing happens."""
_PROC = Path("/proc")


class Threads:
    """CPU seconds of all threads of some processes, those that ended meanwhile included."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._seen_ns: dict[tuple[int, int], int] = {}

    def cpu_s(self, pids: Sequence[int]) -> float:
        """Return the seconds of all threads that were seen so far. Never falls."""
        for pid in pids:
            tasks = self._proc / str(pid) / "task"
            with contextlib.suppress(OSError):  # the process is gone: what was seen of it stays
                for thread in os.listdir(tasks):
                    with contextlib.suppress(OSError):
                        ran_ns = int((tasks / thread / "schedstat").read_text().split()[0])
                        self._seen_ns[pid, int(thread)] = ran_ns
        return sum(self._seen_ns.values()) / 1e9


class Running:
    """The processes of one server, each with all below it.

    `cores`: those that it may run on. `window_s`: it is quiet when little was done for two of these.
    """

    def __init__(self, cores: Sequence[int], window_s: float = 0.4) -> None:
        self._cores = set(cores)
        self._window_s = window_s
        self._roots: list[subprocess.Popen[bytes]] = []
        self._threads = Threads()
        self._pids: list[int] = []

    def start(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        """Start one more process in a session of its own; its output is appended to `output`."""
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as log:
            process = subprocess.Popen(
                list(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
        self._roots.append(process)

    def ended(self) -> int | None:
        """Return the exit code of a process of `start` that has ended, None while all of them run."""
        return next((code for root in self._roots if (code := root.poll()) is not None), None)

    def processes(self) -> list[psutil.Process]:
        """Return all processes as they are now; `cpu_s` goes on with these."""
        found: list[psutil.Process] = []
        for root in self._roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root.pid)
                found += [process, *process.children(recursive=True)]
        self._pids = [process.pid for process in found]
        return found

    def cpu_s(self) -> float:
        """Return CPU seconds so far of the processes that the last `processes` found."""
        return self._threads.cpu_s(self._pids)

    def start_cpu_s(self) -> float:
        """Return CPU seconds since the first start, with those of children that ended. To 10 ms a process."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times: Any = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory(self) -> dict[str, float]:
        """Return the MB of all: `rss_mb` counts shared pages once a process, `pss_mb` once."""
        rss, pss, count = 0, 0, 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                info: Any = process.memory_full_info()
                rss, pss, count = rss + info.rss, pss + info.pss, count + 1
        return {"rss_mb": rss / 1e6, "pss_mb": pss / 1e6, "processes": count}

    def settle(self, timeout_s: float = 20.0) -> float:
        """Wait until nothing is being done any more; return the CPU seconds that took until it was quiet.

        After an answer servers store what they computed. Gives up after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        began = before = self.cpu_s()
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline_s:
            time.sleep(self._window_s)  # a share is measured in a time
            now = self.cpu_s()
            quiet = quiet + 1 if now - before < QUIET_SHARE * self._window_s else 0
            before = now
        return before - began

    def stop(self) -> None:
        """End all with SIGTERM, last started first; what is still there then is killed, by its pid."""
        below = self.processes()
        for root in reversed(self._roots):
            if root.poll() is None:
                root.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                root.wait(STOP_S)
        # psutil knows a process by its start time, too: never another one.
        left = psutil.wait_procs(below, timeout=GONE_S)[1]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GONE_S)
        for root in self._roots:
            root.wait(STOP_S)
        self._roots.clear()
        self._pids = []


def until_ready(
    running: Running, is_ready: Callable[[], bool], output: Path, timeout_s: float, poll_s: float = 0.2
) -> None:
    """Wait until a server answers. Raises `RuntimeError` with the end of its output if it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not is_ready():
        code = running.ended()
        if code is not None or time.monotonic() > deadline_s:
            what = f"not ready within {timeout_s:.0f} s" if code is None else f"ended with {code}"
            text = output.read_text(errors="replace") if output.exists() else ""
            raise RuntimeError(f"{what}; {last_words(text)} ({output})")
        time.sleep(poll_s)


def last_words(text: str, chars: int = 300) -> str:
    """Return the last lines of an output that say something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return " | ".join((errors or lines)[-3:])[-chars:]
