"""A machine with one node of the product on it: it starts, ticks, crashes, loses power, and starts again."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from samovar.cache_tiers.blocks import Record, TierError, TierName
from samovar.cache_tiers.forecast import TypeKm
from samovar.cache_tiers.media import Tier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.node import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.cache_tiers.transport import LazyLink
from samovar.configs.sections import TierSettings
from tests.support.inside import scans_of, state_of
from tests.world.disk import Disk
from tests.world.faults import Faults
from tests.world.network import Calls, Home, Network
from tests.world.scheduler import Scheduler
from tests.world.threads import WALL_S

TICK_S = 1.0
CHECKED_EVERY = 5
"""Ticks: a look into all books takes as long as the rest of them."""
SCAN_S_MAX = 5.0


@dataclass(frozen=True)
class Shape:
    """How the machines of a seed are made. `bytes_max`: of each tier that there is.

    `learns`: with a predictor that is saved, and told to others; else with one that only counts.
    """

    settings: TierSettings
    bytes_max: dict[TierName, int]
    learns: bool = False


class Machine(Home):
    """Node `number`. `counts`: the states that its moves reach."""

    def __init__(
        self,
        here: Scheduler,
        faults: Faults,
        network: Network,
        shape: Shape,
        number: int,
        root: Path,
        counts: Counter[str],
    ) -> None:
        super().__init__(f"node-{number}", number)
        self._here = here
        self._faults = faults
        self._network = network
        self._shape = shape
        self._counts = counts
        self._skew_s = 0.0
        self._folders = root
        (root / "0" / "kv").mkdir(parents=True)
        self.disk = Disk(here, faults, number, root / "0")
        self.lives = 0
        self.tiers: dict[TierName, Tier] = {}
        network.homes[self.name] = self

    @property
    def settings(self) -> TierSettings:
        return self._shape.settings

    @property
    def is_up(self) -> bool:
        return self.node is not None and self.process is not None and not self.process.is_dead

    def has_not_listed(self) -> bool:
        """Whether the bucket has not told it yet what was erased while it was away."""
        has_bucket = "s3" in self._shape.bytes_max
        return has_bucket and self.node is not None and scans_of(self.node).listed_ago_s("s3") is None

    def start(self) -> None:
        """Begin a life, in a process of its own; `is_up` when it answers."""
        assert self.process is None or self.process.is_dead, f"{self.name} lives already"
        self.lives += 1
        process = self._here.process(f"{self.name}.{self.lives}")
        self.process = process
        self._network.left.discard(self.name)
        self._here.spawn(process, "start", self._live)

    def crash(self, *, power: bool) -> None:
        """End the process at once; with `power`, what the disk has not got is lost as well."""
        if self.process is None or self.process.is_dead:
            return
        self._here.kill(self.process)
        self._ended()
        if power:
            into = self._folders / str(self.lives)
            self.disk = self.disk.after_power_cut(into, random.Random(f"{self.lives} {self.number}"))

    def stop(self, peers: list[str]) -> None:
        """Stop as a node does that is asked to: it drains, flushes, closes."""
        process, node = self.process, self.node
        if process is None or node is None or process.is_dead:
            return

        def leave() -> None:
            node.drain(5.0, peers)
            node.flush(5.0)
            node.close()

        task = self._here.spawn(process, "stop", leave)
        ends_s = self._here.now_s + 60.0
        while not task.is_done and self._here.now_s < ends_s:
            self._here.sleep(0.25)
        if not task.is_done:
            stack = self._here.stack_of(task)
            self._here.violate("late", f"{self.name} does not stop in 60 s\n{stack}")
        if self.process is process:  # else it crashed while it stopped, and lives again
            self.crash(power=False)

    def drained(self, drain_s: float, peers: tuple[str, ...]) -> dict[str, int] | None:
        """Save what only it has; return extents by outcome, None if it dies meanwhile."""
        process, node = self.process, self.node
        assert process is not None
        assert node is not None
        done: list[dict[str, int]] = []
        task = self._here.spawn(process, "drain", lambda: done.append(node.drain(drain_s, peers)))
        while not task.is_done and not process.is_dead:
            self._here.sleep(0.25)
        return done[0] if done else None

    def leave(self) -> None:
        """Close the node for good: it is in no list of nodes until it starts again."""
        node, life = self.node, self.lives
        assert node is not None
        left = len(state_of(node).pending)
        if left:
            self._here.violate("for ever", f"{self.name} leaves with {left} deletes that nobody else does")
        self.stop([])
        if self.lives != life:  # its power was cut as it left, and it lives again, with the disk it had
            return
        self._network.left.add(self.name)
        if "s3" not in self._shape.bytes_max:  # what it comes back with would not have heard of clears
            (self._folders / f"new {self.lives}" / "kv").mkdir(parents=True)
            self.disk = Disk(self._here, self._faults, self.number, self._folders / f"new {self.lives}")

    def jump(self, seconds: float) -> None:
        """Set the wall clock; it is nobody's but this machine's."""
        self._skew_s += seconds

    def _ended(self) -> None:
        self.node = None
        self.disk.died()

    def _live(self) -> None:
        process = self.process
        assert process is not None
        cpu = HeapTier(self._shape.bytes_max["cpu"])
        tiers: dict[TierName, Tier] = {"cpu": cpu}
        while "nvme" not in tiers:
            try:
                tiers["nvme"] = self._files()
            except TierError as error:
                self._here.tell(f"no nvme yet: {type(error).__name__}")  # its text may have a pid
                self._here.sleep(1.0)
        if "s3" in self._shape.bytes_max:
            tiers["s3"] = S3Tier(self._shape.settings.s3, self._wall_s)
        settings = self._shape.settings
        node = TierNode(
            settings,
            NodeMedia(tiers, self._shape.bytes_max, pending_path=Path(self.disk.base) / "owed.json"),
            NodeIdentity(self.name, f"{self.name} {self.lives}", self.lives - 1),
            NodePorts(
                lambda: self._here.now_s,
                self._wall_s,
                self._call_for,
                self._reach,
                Calls(self._network, self.number),
                LazyLink(None, "not in this world"),
            ),
            make_predictor=None if self._shape.learns else lambda: TypeKm(settings.predictor),
        )
        node.start(SCAN_S_MAX)
        self.tiers = tiers
        self.node = node
        self._here.tell("up")
        if self._shape.learns:
            self._here.spawn(process, "watch", lambda: self._watch(node))
        for number in itertools.count(1):
            self._here.sleep(TICK_S)
            node.tick()
            if number % CHECKED_EVERY == 0:
                node.check_integrity()

    def _watch(self, node: TierNode) -> None:
        """Meet nodes that are new, as the watch of a cluster does (`actors/cluster_watch.py`)."""
        met: set[str] = set()
        while True:
            there = {name for name, home in self._network.homes.items() if home.node is not None}
            came = node.peers.meet(sorted(there - met - {self.name}))
            met = (met & there) | came
            if came and node.resumption.is_new:
                node.resumption.start_from(node.peers.learned(sorted(came)))
            self._here.sleep(TICK_S)

    def _files(self) -> NvmeTier:
        return NvmeTier(
            Path(self.disk.base) / "kv",
            bytes_max=self._shape.bytes_max["nvme"],
            durability="crash",
            direct_io=False,
            quarantine_bytes_max=3 * 8192,
            wall_clock=self._wall_s,
            calls=self.disk,
        )

    def _wall_s(self) -> float:
        return WALL_S + self._here.now_s + self._skew_s

    def _call_for(self, source: object, ticket: int) -> Record:
        """A replica hands its record over."""
        self._here.sleep(self._faults.uniform(0.0, 0.05))
        if self._faults.strikes("replica dies", self.number):
            raise TierError("the replica is gone")
        records = cast("dict[int, np.ndarray]", source)
        return Record(records[ticket].copy())

    def _reach(self, state: str) -> None:
        self._counts[f"move: {state}"] += 1
        self._here.checkpoint()
