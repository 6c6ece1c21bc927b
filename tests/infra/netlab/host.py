"""One host of a lab: commands and processes on it, its files, its cable, and its end.

It is booted by `lab.py`, which knows the bridge; what runs on it is its users'.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.infra.netlab.relay import Relay
from tests.infra.netlab.shell import CLEAN_ENV, LabError, ip_batch, sh, wait_for

END_S = 20.0


@dataclass(eq=False)
class Host:
    """`init_pid`: its process 1, numbered as on the machine. `port_name`: the bridge's end of its cable."""

    name: str
    ip: str
    dir: Path
    port_name: str
    bridge_pid: int
    process: subprocess.Popen[str]
    init_pid: int
    cgroup: Path | None = None
    is_up: bool = True
    relays: list[Relay] = field(default_factory=list)

    # -- commands ------------------------------------------------------------------------------

    def popen(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: int | IO[str] | None = subprocess.DEVNULL,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command (a str: by bash) in /root on this host, in a process group of its own.

        The process is `nsenter`, which waits for the command: end both with `Host.stop`.
        """
        if not self.is_up:
            raise LabError(f"host {self.name} is off")
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        enter = ["nsenter", "-t", str(self.init_pid), "-m", "-u", "-i", "-n", "-p", "--wdns=/root", "--"]
        if self.cgroup is not None:
            limited = f'echo $$ >"{self.cgroup}/cgroup.procs" && exec "$@"'
            enter = ["sh", "-c", limited, "sh", *enter]
        return subprocess.Popen(
            [*enter, *argv],
            env={**CLEAN_ENV, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs it to its end; stderr is in stdout. Raises LabError if it fails (`check`) or is too slow."""
        process = self.popen(
            command, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = process.communicate(stdin, timeout=timeout_s)
        except BaseException as error:  # Ctrl-C, too: the command must not go on alone
            self.stop(process, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                said = (error.output or b"").decode(errors="replace")
                raise LabError(f"{self.name}: {command}: not within {timeout_s} s: {said}") from error
            raise
        if check and process.returncode:
            raise LabError(f"{self.name}: {command}: exit {process.returncode}: {output}")
        return subprocess.CompletedProcess(process.args, process.returncode, output, "")

    @staticmethod
    def stop(process: subprocess.Popen[str], sig: int = signal.SIGTERM, timeout_s: float = END_S) -> int:
        """Signals what `popen` started, waits, and says its exit code."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, sig)
        return process.wait(timeout_s)

    # -- looking in from outside ---------------------------------------------------------------

    def file(self, path: str | Path) -> Path:
        """A file of this host, while it is up, as a path on the machine."""
        return Path(f"/proc/{self.init_pid}/root") / str(path).lstrip("/")

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Those whose command line matches the regular expression; not process 1 and its `sleep`."""
        here = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it ended meanwhile
                line = " ".join(process.cmdline())
                ours = os.readlink(f"/proc/{process.pid}/ns/pid") == here and process.pid != self.init_pid
                if ours and line and line != "sleep 3600" and re.search(pattern, line):
                    found.append(process)
        return found

    # -- faults --------------------------------------------------------------------------------

    def plug(self, is_in: bool) -> None:
        """Its cable, at the bridge."""
        ip_batch(self.bridge_pid, [f"link set {self.port_name} {'up' if is_in else 'down'}"])

    def blackhole(self, ip: str, is_lost: bool) -> None:
        """Whether what it sends there is lost."""
        verb = "replace" if is_lost else "del"
        ip_batch(self.init_pid, [f"route {verb} blackhole {ip}/32"])

    def slow(self, mbit: float | None) -> None:
        """Limits its cable to so many Mbit/s, each way; None lifts the limit."""
        for pid, link in ((self.init_pid, "eth0"), (self.bridge_pid, self.port_name)):
            tc = ["nsenter", "-t", str(pid), "-n", "tc", "qdisc"]
            if mbit is None:
                sh([*tc, "del", "dev", link, "root"])
            else:
                burst_bytes = max(32_768, int(mbit * 1e6 / 8 / 250))  # what passes in one tick of the kernel
                limits = ["rate", f"{mbit}mbit", "burst", str(burst_bytes), "latency", "50ms"]
                sh([*tc, "replace", "dev", link, "root", "tbf", *limits])

    def kill(self) -> None:
        """Power off, in an instant. Its files stay below `dir` until the lab ends. Again: nothing."""
        if not self.is_up:
            return
        self.is_up = False
        for relay in self.relays:
            relay.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)
        self.process.wait(END_S)  # it ends when all processes on the host have
        with contextlib.suppress(LabError):  # the kernel was quicker
            ip_batch(self.bridge_pid, [f"link del {self.port_name}"])
        if self.cgroup is not None:
            wait_for(f"the cgroup of {self.name} is empty", lambda: _removed(self.cgroup), END_S)


def _removed(cgroup: Path | None) -> bool:
    if cgroup is None or not cgroup.exists():
        return True
    with contextlib.suppress(OSError):  # busy: its last process is still ending
        cgroup.rmdir()
    return not cgroup.exists()
