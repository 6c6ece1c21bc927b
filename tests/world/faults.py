"""What goes wrong in a life, and when: drawn from the seed as a list, so that a shorter one can be tried."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.world.scheduler import Scheduler

Kind = Literal[
    "disk error", "disk full", "disk slow", "torn write", "bad read", "bit rot", "lost fsync",
    "bucket 5xx", "bucket throttles", "bucket late", "bucket slow", "bucket list lags", "bucket lies",
    "net loss", "net slow", "net twice", "partition",
    "crash", "power cut", "graceful stop", "door crash", "clock jump", "replica dies", "small store fails",
    "replica crash", "replica stalls", "directory crash", "directory silent",
]  # fmt: skip
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]
AT_ONCE: frozenset[Kind] = frozenset(
    {
        "crash", "power cut", "graceful stop", "door crash", "clock jump", "bit rot",
        "replica crash", "directory crash",
    }
)  # fmt: skip
"""They happen at a moment; the others last, and strike with a rate."""
ONLY_SEVERAL: frozenset[Kind] = frozenset({"net loss", "net slow", "net twice", "partition"})


@dataclass(frozen=True, slots=True)
class Fault:
    """`target`: the number of a node; of a partition, the one cut off. Times in virtual seconds."""

    kind: Kind
    target: int
    at_s: float
    ends_s: float
    rate: float

    def __str__(self) -> str:
        if self.kind in AT_ONCE:
            return f"{self.kind} at {self.target}, {self.at_s:.2f} s"
        return f"{self.kind} at {self.target}, {self.at_s:.2f} to {self.ends_s:.2f} s, rate {self.rate:.2f}"


def drawn(seed: int, nodes: int, has_bucket: bool, lasts_s: float) -> list[Fault]:
    """The faults of a seed: of some kinds only, so that one kind does not hide what another finds."""
    rng = random.Random(f"faults {seed}")
    kinds = [kind for kind in KINDS if (has_bucket or not kind.startswith("bucket"))]
    kinds = [kind for kind in kinds if nodes > 1 or kind not in ONLY_SEVERAL]
    if rng.random() < 0.1:
        return []
    on = [kind for kind in kinds if rng.random() < rng.choice((0.2, 0.5))]
    faults = []
    for kind in on:
        for _ in range(rng.randint(1, 4)):
            at_s = rng.uniform(0.0, lasts_s)
            ends_s = at_s + rng.choice((1.0, 5.0, 20.0, 60.0)) * rng.random()
            rate = rng.choice((0.1, 0.4, 1.0))
            faults.append(Fault(kind, rng.randrange(nodes), at_s, ends_s, rate))
    return sorted(faults, key=lambda fault: fault.at_s)


class Faults:
    """Whether a fault strikes now. `struck`: how often each kind did."""

    def __init__(self, here: Scheduler, plan: Sequence[Fault], seed: int) -> None:
        self._here = here
        self._rng = random.Random(f"dice {seed}")
        self._lasting: dict[Kind, list[Fault]] = {}
        self.take(plan)
        self.struck: Counter[str] = Counter()
        self.is_over = False

    def take(self, plan: Sequence[Fault]) -> None:
        """Let these strike as well."""
        for fault in plan:
            if fault.kind not in AT_ONCE:
                self._lasting.setdefault(fault.kind, []).append(fault)

    def strikes(self, kind: Kind, target: int | None = None) -> bool:
        """Whether a fault of this kind strikes `target`; None: whichever node it is at."""
        now_s = self._here.now_s
        for fault in self._lasting.get(kind, ()):
            is_on = not self.is_over and fault.at_s <= now_s < fault.ends_s
            is_ours = target in (None, fault.target)
            if is_on and is_ours and self._rng.random() < fault.rate:
                self.struck[kind] += 1
                self._here.tell(f"strikes: {kind} {target}")
                return True
        return False

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def below(self, end: int) -> int:
        return self._rng.randrange(end)
