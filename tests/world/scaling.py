"""Replicas and nodes that come and go by the product's own decisions, and what must be so meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from samovar.cache_tiers.blocks import TIERS
from samovar.cache_tiers.node import NodeLeave, has_refuge, is_worth_another, takers
from samovar.cluster.serve.autoscale import KvPressurePolicy
from samovar.configs.cluster import AutoscalingSettings
from samovar.replicas.serving.served_engine import ReplicaLoad
from tests.world.front import LISTED_S, OPEN_MAX, Directory, Replica
from tests.world.machine import SCAN_S_MAX, Machine
from tests.world.scheduler import Scheduler

LOOK_S = 1.0
WINDOW = 6
"""Reports of a replica that count, as in Serve."""
UP_S, DOWN_S, EMPTY_S = 2.0, 6.0, 4.0
DRAIN_S = 5.0
STARTS_S = SCAN_S_MAX + 5.0
SETTLES_S = 60.0
"""By then a load that stays the same has the replicas that it needs, and no other."""
LOAD_S = 15.0
ASKED = OPEN_MAX + 1
"""Requests at a time that one replica is too few for."""


class Scaler:
    """Has as many `replicas` as the policy wants, and nodes where those are. `directory`: told who leaves.

    A replica that is to stop takes nothing more and ends what it has; a node that no replica lives on leaves,
    if its blocks have another place.
    """

    def __init__(
        self,
        here: Scheduler,
        machines: Sequence[Machine],
        replicas: Sequence[Replica],
        directory: Directory,
        seen: Counter[str],
        seed: int,
    ) -> None:
        self._here = here
        self._machines = machines
        self._replicas = replicas
        self._directory = directory
        self._seen = seen
        self._rng = random.Random(f"scaling {seed}")
        self.limits = AutoscalingSettings(
            replicas_max=len(replicas),
            upscale_delay_s=UP_S,
            downscale_delay_s=DOWN_S,
            metrics_interval_s=LOOK_S,
        )
        self._policy = KvPressurePolicy(lambda: here.now_s, **self.limits.model_dump(mode="json"))
        self._state: dict[str, Any] = {}
        self._said: dict[str, list[SimpleNamespace]] = {}
        self._leaves: dict[tuple[str, int], NodeLeave] = {}
        self._going: set[str] = set()
        self.target = len(replicas)
        self._is_over = False
        here.spawn(here.process("scaler"), "scaler", self._live)

    @property
    def live(self) -> list[Replica]:
        return [one for one in self._replicas if not one.process.is_dead and not one.is_leaving]

    def is_away(self, machine: Machine) -> bool:
        """Whether it has left, and nothing has called it back."""
        return self._leave_of(machine).stage == "gone"

    def end(self) -> None:
        """Have everything there again, and leave it so."""
        self._is_over = True
        while self._going:
            self._here.sleep(LOOK_S)
        for replica in self._replicas:
            self._bring(replica)

    def _leave_of(self, machine: Machine) -> NodeLeave:
        """Of this life of the machine: who starts after it was gone (a fault did that) has decided nothing.

        The product's is a part of the tiers' actor, and new with each.
        """
        return self._leaves.setdefault((machine.name, machine.lives), NodeLeave(EMPTY_S, self._here.now_s))

    # -- what is judged ---------------------------------------------------------------------

    def judge(self, chat: Callable[[float], None]) -> None:
        """All is quiet: under a load more replicas come, without it they go, and nodes after them.

        `chat(until_s)`: asks for one answer after the other.
        """
        tasks = [
            self._here.spawn(self._here.world, "load", lambda: chat(self._here.now_s + LOAD_S))
            for _ in range(ASKED)
        ]
        most = self._most_until(self._here.now_s + LOAD_S)
        while not all(task.is_done for task in tasks):
            self._here.sleep(LOOK_S)
        if most < 2 <= self.limits.replicas_max:
            self._here.violate("not scaled", f"{ASKED} requests at a time, and {most} replicas")
        self._here.sleep(SETTLES_S)
        before = {one.name for one in self.live}
        self._most_until(self._here.now_s + SETTLES_S)
        after = {one.name for one in self.live}
        if len(after) != 1 or after != before or self.target != 1:
            self._here.violate("not scaled", f"nothing is asked for, and there are {before}, then {after}")
        up = [machine for machine in self._machines if machine.is_up]
        homes = {one.machine.name for one in self.live}
        idle = [one.name for one in up if one.name not in homes and self._may_go(one)]
        if idle:
            self._here.violate("not scaled", f"no replica is on {idle}, and they are paid for")
        if not up:
            self._here.violate("not scaled", "the last node has left")

    def _most_until(self, ends_s: float) -> int:
        most = len(self.live)
        while self._here.now_s < ends_s:
            self._here.sleep(LOOK_S)
            most = max(most, len(self.live))
        return most

    # -- the life ---------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._is_over:
            self._here.sleep(LOOK_S)
            self._decide()
            for machine in self._machines:
                if not self._is_over and machine.is_up and machine.name not in self._going:
                    self._look_around(machine)

    def _decide(self) -> None:
        """Ask the policy as Serve's controller does, and do what it wants."""
        live = self.live
        for one in live:
            points = self._said.setdefault(one.name, [])
            points.append(SimpleNamespace(timestamp=self._here.now_s, load=_load(one).metrics()))
            del points[:-WINDOW]
        self._said = {one.name: self._said[one.name] for one in live}
        names = ReplicaLoad(*[1.0] * 9).metrics()
        series = {
            name: {
                replica: [SimpleNamespace(timestamp=at.timestamp, value=at.load[name]) for at in points]
                for replica, points in self._said.items()
            }
            for name in names
        }
        context: Any = SimpleNamespace(
            running_replicas=list(self._said),
            raw_metrics=series,
            policy_state=self._state,
            target_num_replicas=self.target,
            total_num_requests=float(sum(len(one.open) for one in live)),
        )
        wanted, self._state = self._policy(context)
        if not self.limits.replicas_min <= wanted <= self.limits.replicas_max:
            self._here.violate("not scaled", f"{wanted} replicas are wanted")
            return
        if wanted != self.target:
            self._seen["scaled up" if wanted > self.target else "scaled down"] += 1
            self._here.tell(f"{wanted} replicas, not {self.target}")
        self.target = wanted
        self._carry_out()

    def _carry_out(self) -> None:
        live = self.live
        for replica in self._rng.sample(live, max(0, len(live) - self.target)):
            replica.is_leaving = True
            self._begin(replica.name, partial(self._stop, replica))
        dead = [one for one in self._replicas if one.process.is_dead and one.name not in self._going]
        coming = sum(one.process.is_dead and one.name in self._going for one in self._replicas)
        for replica in self._rng.sample(dead, min(len(dead), max(0, self.target - len(live) - coming))):
            self._begin(replica.name, partial(self._bring, replica))

    def _begin(self, name: str, run: Callable[[], None]) -> None:
        self._going.add(name)

        def carry_out() -> None:
            try:
                run()
            finally:
                self._going.discard(name)

        self._here.spawn(self._here.world, "scale", carry_out)

    def _stop(self, replica: Replica) -> None:
        """Let it end what it has, once the fronts know that it leaves."""
        self._here.sleep(2 * LISTED_S)
        while replica.open and not replica.process.is_dead:
            self._here.sleep(LOOK_S)
        replica.crash()
        replica.is_leaving = False

    def _bring(self, replica: Replica) -> None:
        """Start a replica, and its node before it, if that has left."""
        machine = replica.machine
        self._leave_of(machine).used(self._here.now_s)
        ends_s = self._here.now_s + STARTS_S
        while (not machine.is_up or self.is_away(machine)) and self._here.now_s < ends_s:
            if machine.process is None or machine.process.is_dead:  # it may just have been leaving
                machine.start()
            self._here.sleep(LOOK_S)
        self._directory.draining.discard(machine.name)
        replica.start()

    def _may_go(self, machine: Machine) -> bool:
        assert machine.node is not None
        others = [one for one in self._machines if one is not machine and one.is_up]
        homes = {one.machine.name for one in self.live}
        stats = machine.node.stats()
        return has_refuge(
            sum(row.extents for row in stats.tiers if row.name not in TIERS.shared),
            stats.pending_deletes,
            others=[one.name for one in others],
            takers=[one.name for one in others if one.name in homes],
            s3_is_up=any(row.name in TIERS.shared and row.state == "up" for row in stats.tiers),
        )

    def _look_around(self, machine: Machine) -> None:
        """As a node does that no replica has used for long (`actors/cluster_watch.py`)."""
        leave, now_s, node = self._leave_of(machine), self._here.now_s, machine.node
        assert node is not None
        if any(one.machine is machine and not one.process.is_dead for one in self._replicas):
            leave.used(now_s)
        elif leave.is_due(now_s) and not self._may_go(machine):
            leave.used(now_s)
            node.drain_over()
        elif leave.empty(now_s):
            self._begin(machine.name, lambda: self._leave(machine, leave))

    def _leave(self, machine: Machine, leave: NodeLeave) -> None:
        node, life = machine.node, machine.lives
        if node is None:
            return
        homes = {one.machine.name for one in self.live} - {machine.name}
        before = node.stats().drained
        node.drain_over()
        self._directory.draining.add(machine.name)
        saved = machine.drained(DRAIN_S, takers(machine.name, homes, ()))
        is_ours = machine.is_up and machine.lives == life
        is_empty = not any(one.machine is machine and not one.process.is_dead for one in self._replicas)
        may_go = saved is not None and is_ours and is_empty and not is_worth_another(before, saved)
        if may_go and self._may_go(machine) and leave.go():  # again: a clear may have come
            self._seen["a node left"] += 1
            self._here.tell(f"{machine.name} leaves: {saved}")
            machine.leave()
        else:
            self._directory.draining.discard(machine.name)
            leave.used(self._here.now_s)


def _load(replica: Replica) -> ReplicaLoad:
    running = float(len(replica.open))
    return ReplicaLoad(running, 0.0, OPEN_MAX, 0.0, 0.0, running / OPEN_MAX, 0.0, 0.0, 0.0)
