"""Writers that are killed at random points; run as a program of its own, which forks safely.

`python -m tests.faults.nvme_torn_writer DIR KILLS SEED`: prints what it saw as one line of numbers; exits
with an assertion's trace when a torn record was found or a finished one was lost.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import (
    DEADLINE_S,
    SHAPE,
    SickCalls,
    check,
    make,
    open_tier,
    read_all,
    temporaries,
    why_bad,
)

EXTENTS = 6
CALLS_MAX = 60  # more than the calls of one writer's puts, so that some come through


def dies(calls: SickCalls, name: str, args: tuple[Any, ...]) -> None:
    """SIGKILL instead of the call, or in the middle of a write."""
    if name == "pwrite":
        fd, data, offset = args
        part = random.randrange(len(data) + 1)
        part = part // 512 * 512 if len(data) % 4096 == 0 else part  # perhaps past the page cache
        calls.really(name, fd, data[:part], offset)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_writing(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
    """The next write is the last."""
    return dies(calls, name, args) if name == "pwrite" else calls.really(name, *args)


def write(dir: Path, seed: int, report: int) -> None:
    """A writer: puts some extents, deletes some, says what is finished, and is killed on its way."""
    random.seed(seed)
    calls = SickCalls()
    tier = open_tier(dir, calls, direct_io=bool(seed % 2))
    if random.random() < 0.4:
        calls.arm(dies_writing, random.randint(1, CALLS_MAX // 2), 10_000)
    else:
        calls.arm(dies, random.randint(1, CALLS_MAX))
    for number in random.sample(range(EXTENTS), 4):
        sealed = make(number)
        if random.random() < 0.3:
            os.write(report, bytes([number, 2]))  # from now on it may be there or not
            tier.delete(sealed.address)
            os.write(report, bytes([number, 0]))
        else:
            tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
            os.write(report, bytes([number, 1]))


def survey(tier: NvmeTier, must: dict[int, int]) -> int:
    """Only whole, right records are found, and all that were finished. How many."""
    found = {scanned.header.address for scanned in tier.scan()}
    assert not temporaries(tier.dir), "a temporary file was not swept"
    assert not list(tier.dir.rglob("*.bad")), "a half record became visible"
    for number in range(EXTENTS):
        sealed = make(number)
        if sealed.address in found:
            assert why_bad(tier, sealed) is None, f"extent {number} is not what was written"
            assert read_all(tier, sealed).tobytes() == sealed.data.tobytes()
        state = must.get(number, 0)
        assert state == 2 or (state == 1) == (sealed.address in found), f"extent {number}: {state}"
    check(tier)
    return len(found)


def main(dir: Path, kills: int, seed: int) -> None:
    must: dict[int, int] = {}  # extent -> 1 finished, 0 not there, 2 unknown
    seen: Counter[str] = Counter()
    assert make(0).header.shape == SHAPE
    for run in itertools.count():
        if seen["killed"] == kills:
            break
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            write(dir, seed * 10_000 + run, theirs)
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as file:
            events = file.read()
        _, status = os.waitpid(pid, 0)
        seen["killed" if os.WIFSIGNALED(status) else "ended"] += 1
        assert os.WIFSIGNALED(status) or status == 0, "a writer failed"
        seen["torn"] += bool(temporaries(dir))
        for number, state in zip(events[::2], events[1::2], strict=True):
            must[number] = state
        # A put that was cut short may have been published just before.
        tier = open_tier(dir)
        found = {scanned.header.address for scanned in tier.scan()}
        for number in range(EXTENTS):
            if must.get(number, 0) == 0 and make(number).address in found:
                assert os.WIFSIGNALED(status), f"extent {number} came back"
                must[number] = 1
        seen["found"] += survey(tier, must)
        for number in range(EXTENTS):
            must[number] = int(make(number).address in found)
        tier.close()
    print(*(f"{name}={count}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
