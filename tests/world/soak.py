"""`make world-soak`: hours of one small cluster under faults that no node dies of; nothing may grow.

`python -m tests.world.soak --hours 6`: on the world's clock; some minutes of a core.
"""

from __future__ import annotations

import _thread
import argparse
import gc
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a life
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.world.soak", *sys.argv[1:]])

import numpy as np

from samovar.cache_tiers.media.s3 import S3Clears
from samovar.cache_tiers.media.s3_client import S3Keys
from samovar.cache_tiers.node import TierNode
from samovar.router.routing import SessionDirectory, load_tracker
from tests.support.inside import state_of
from tests.world.faults import AT_ONCE, KINDS, Fault, Kind
from tests.world.life import Life
from tests.world.machine import Machine, Shape
from tests.world.swarm import stay_on_one_core
from tests.world.threads import THREADING, WALL_S

SEED = 1276
"""Two nodes with a bucket that learn who comes back, two clients, and fronts."""
PAUSE_S = 5.0
FAULT_EVERY_S = 180.0
SAMPLES = 36
MARKS_S = 600.0
"""How long the bucket's marks of clears stay; a day would be longer than a soak."""
REMEMBERED_MAX, OVER_MAX = 1000, 200
"""Of rings that take days to fill at a world's pace: that they are bounded has tests of its own."""
PAST_MAX = 20
"""Erased conversations that the clients look for afterwards."""
ENDS: frozenset[Kind] = frozenset(
    {"crash", "power cut", "graceful stop", "door crash", "directory crash", "clock jump"}
)
"""A process that begins anew holds nothing: these would hide what grows."""
GROWS_SHARE = 0.1
SLACK = {"bytes of the product": 60_000, "objects of the product": 300, "objects in the bucket": 40}
"""Beside a tenth: what buffers of a few hundred rows take until they are full; and the marks of ten minutes'
clears, which are 30 to 66 by chance. Of all else: 12."""
OLD_S = MARKS_S + 120.0
"""By then a mark is deleted: after its time the second listing does it, and a fault may take one. What probes
leave goes with a later one."""


def plan_of(seed: int, nodes: int, has_bucket: bool, lasts_s: float) -> list[Fault]:
    """The faults of a soak: one after the other, of every kind after which the processes are the same."""
    rng = random.Random(f"soak {seed}")
    kinds = [kind for kind in KINDS if kind not in ENDS and (has_bucket or not kind.startswith("bucket"))]
    faults = []
    for number in range(int(lasts_s / FAULT_EVERY_S)):
        at_s = FAULT_EVERY_S * (number + rng.random())
        kind = kinds[number % len(kinds)]
        ends_s = at_s if kind in AT_ONCE else at_s + rng.uniform(1.0, 30.0)
        faults.append(Fault(kind, rng.randrange(nodes), at_s, ends_s, rng.choice((0.1, 0.4, 1.0))))
    return sorted(faults, key=lambda fault: fault.at_s)


class Soak(Life):
    """One long life. `samples`: what was there, by name, at moments of the same distance."""

    pause_s = PAUSE_S

    def __init__(self, seed: int, root: Path, lasts_s: float) -> None:
        super().__init__(seed, root, [], lasts_s)
        self.here.steps_max = 10**12
        self.plan = plan_of(seed, len(self.machines), "s3" in self.setting, lasts_s)
        self.faults.take(self.plan)
        self.samples: list[dict[str, float]] = []
        self._held = Held()

    def _machine(self, shape: Shape, number: int) -> Machine:
        s3 = shape.settings.s3.model_copy(update={"clears_retention_s": MARKS_S})
        policy = shape.settings.policy.model_copy(update={"remembered_blocks_max": REMEMBERED_MAX})
        settings = shape.settings.model_copy(update={"s3": s3, "policy": policy})
        return super()._machine(replace(shape, settings=settings), number)

    def _look_into_memory(self) -> None:
        super()._look_into_memory()
        if self.here.now_s >= (len(self.samples) + 1) * self._lasts_s / SAMPLES:
            self._forget()
            self.samples.append(self._sample())

    def _forget(self) -> None:
        """What the world itself remembers, and need not."""
        erased = [one for one in self.clients.past if one.erased_s is not None]
        for one in erased[:-PAST_MAX]:
            self.clients.past.remove(one)

    def _parts(self) -> Iterator[object]:
        yield from (machine.node for machine in self.machines)
        yield from (self.directory.table, self.door.erasures)
        for front in self.fronts:
            yield from (front.tracker, front.roster, front.directory)

    def _left_in_bucket(self, nodes: Sequence[TierNode]) -> Iterator[str]:
        """Yield what nothing takes away: records that no node knows, and all else whose time is over."""
        catalogs = [state_of(node).catalog for node in nodes]
        keys = S3Keys(self.machines[0].settings.s3.prefix)
        for key, stored in self.bucket.objects.items():
            address = keys.parse(key)
            if address is not None:
                if not any("s3" in catalog.copies(address) for catalog in catalogs):
                    yield key
            elif not keys.parse_bad(key) and stored.at_s < WALL_S + self.here.now_s - OLD_S:
                yield key

    def _sample(self) -> dict[str, float]:
        files = [path for path in self._root.rglob("*") if path.is_file()]
        nodes = [machine.node for machine in self.machines if machine.node is not None]
        gc.collect()
        objects, nbytes = self._held.measure(self._parts())
        return {
            "bytes of the product": nbytes,
            "objects of the product": objects,
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": _thread._count(),
            "files": len(files),
            "kB in files": sum(path.stat().st_size for path in files) / 1000,
            "objects in the bucket": len(self.bucket.objects),
            "left in the bucket": sum(1 for _ in self._left_in_bucket(nodes)),
            "extents": sum(row.extents for node in nodes for row in node.stats().tiers),
            "moves": sum(len(state_of(node).catalog.transfers) for node in nodes),
            "pending clears": sum(len(state_of(node).pending) for node in nodes),
            "rows of fronts": sum(len(front.directory.table) for front in self.fronts),
        }


class Held:
    """What the product holds, by a walk from its parts and modules; nothing that was there when this began.

    Objects of the tests end the walk, and what was imported does, but for containers of modules and classes.
    """

    def __init__(self) -> None:
        gc.collect()
        self._old = {id(one) for one in gc.get_objects()}
        modules = [module for name, module in sys.modules.items() if name.startswith("samovar.")]
        classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
        self._roots = [
            one for of in (*modules, *classes) for one in vars(of).values() if isinstance(one, BOXES)
        ]

    def measure(self, parts: Iterable[object]) -> tuple[int, int]:
        """Return how many objects of the product's classes there are, and the bytes of everything."""
        seen, objects, nbytes = set[int](), 0, 0
        todo = [*parts, *(child for root in self._roots for child in gc.get_referents(root))]
        while todo:
            one = todo.pop()
            module = str(type(one).__module__)
            if id(one) in seen or id(one) in self._old or module.startswith("tests."):
                continue
            seen.add(id(one))
            objects += module.startswith("samovar.")
            nbytes += sys.getsizeof(one)
            todo += gc.get_referents(one)
            if isinstance(one, np.ndarray) and one.base is not None:
                todo.append(one.base)
        return objects, nbytes


BOXES = (list, dict, set, deque)


def grown(samples: Sequence[dict[str, float]]) -> list[str]:
    """Return what is more in the last third than in the first, by more than chance; medians of the thirds."""
    third, found = len(samples) // 3, []
    for name in samples[0]:
        first, last = (
            statistics.median(one[name] for one in part) for part in (samples[:third], samples[-third:])
        )
        if last > first * (1 + GROWS_SHARE) + SLACK.get(name, 12):
            found.append(f"{name}: {first:,.0f}, then {last:,.0f}")
    return found


LEAKS: dict[str, tuple[Any, str]] = {
    "memory": (TierNode, "lookup"),
    "files": (TierNode, "lookup"),
    "threads": (TierNode, "lookup"),
    "rows": (SessionDirectory, "turn_ended"),
    "marks": (S3Clears, "settle"),
}
"""Where each is planted, to see that it is noticed: something stays behind with every second call."""


def leaking(kind: str, root: Path) -> Callable[..., Any]:
    """Return the method of `LEAKS[kind]`, leaving something behind."""
    of, name = LEAKS[kind]
    whole, calls = getattr(of, name), count()

    def leak(self: Any, what: Any) -> Any:
        if kind == "marks":
            return 0  # else the next call would do it
        number, found = next(calls), whole(self, what)
        left = self.__dict__.setdefault("left", [])
        if number % 2:
            return found
        if kind == "memory":
            left.append(found)
        elif kind == "files":
            left.append((root / f"left-{number}").open("wb"))
        elif kind == "threads":
            THREADING.Thread(THREADING.Event().wait, name="left").start()
        else:
            self.table.turn(
                what.tenant, number.to_bytes(20, "big"), home="", node="", tokens=1, now_unix_s=0.0
            )
        return found

    return leak


def soak(seed: int, hours: float, leak: str) -> int:
    """Live, print what was there at the beginning, in the middle and in the end, and what has grown."""
    logging.disable(logging.CRITICAL)
    stay_on_one_core(seed)
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="world-soak-", dir=memory if memory.is_dir() else None))
    try:
        with ExitStack() as planted:
            planted.enter_context(patch.object(load_tracker, "OVER_MAX", OVER_MAX))
            if leak:
                of, name = LEAKS[leak]
                planted.enter_context(patch.object(of, name, leaking(leak, root)))
            life = Soak(seed, root, hours * 3600.0)
            outcome = life.run()
    finally:
        shutil.rmtree(root)
    print(
        f"seed {seed}: {outcome.setting}; {hours:g} hours, {outcome.steps:,} steps, {len(life.plan)} faults"
    )
    print(*(f"  {one}" for one in outcome.violations), sep="\n")
    samples = life.samples
    for name in samples[0] if samples else ():
        at = [samples[index][name] for index in (0, len(samples) // 3, 2 * len(samples) // 3, -1)]
        print(f"  {name:24}" + "".join(f"{value:14,.0f}" for value in at))
    more = grown(samples) if len(samples) >= 3 else ["no samples"]
    print("grown:", "; ".join(more) or "nothing")
    return 1 if more or outcome.violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--hours", type=float, default=6.0, help="of the world's clock")
    parser.add_argument(
        "--leak", choices=LEAKS, default="", help="plant this leak, to see that it is noticed"
    )
    asked = parser.parse_args()
    return soak(asked.seed, asked.hours, asked.leak)


if __name__ == "__main__":
    sys.exit(main())
