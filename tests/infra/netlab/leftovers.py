"""What a lab whose tests were killed leaves: directories and control groups. All else the kernel ends."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import psutil

LABS = Path("/var/tmp/samovar-netlab")
CGROUPS = Path("/sys/fs/cgroup/memory")
CGROUP_PREFIX = "samovar-netlab-"


def owner_mark() -> str:
    """Names this process and no later one of the same number."""
    me = psutil.Process()
    return f"{me.pid}-{int(me.create_time() * 100)}"


def is_alive(mark: str) -> bool:
    """Whether the process that gave itself this mark is there."""
    pid, _, created = mark.partition("-")
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        return str(int(psutil.Process(int(pid)).create_time() * 100)) == created
    return False


def sweep(labs: Path = LABS, cgroups: Path = CGROUPS) -> list[str]:
    """Removes the labs of processes that are gone; their names. A lab's name is `<mark>.<name>`."""
    removed = []
    for directory in sorted(labs.glob("*")):
        if not is_alive(directory.name.partition(".")[0]):
            shutil.rmtree(directory, ignore_errors=True)  # another lab may be at it, too
            removed.append(directory.name)
    for group in sorted(cgroups.glob(f"{CGROUP_PREFIX}*")):
        if not is_alive(group.name.removeprefix(CGROUP_PREFIX).partition(".")[0]):
            with contextlib.suppress(OSError):  # its last process is still ending: next time
                group.rmdir()
                removed.append(group.name)
    return removed
