"""Another version is rolled over replicas and fronts, by the product's own order, while processes die.

The product decides what Serve shall run, step by step, what it waits for, and what is put back after a start
that failed (`cluster/serve/rollout.py`). That Serve starts the new before it stops the old, lets the old
finish, and starts again what died, is the world's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.rollout import FRONT_APP, MODEL_APP_PREFIX, Apps, Patience, exchange, not_running
from tests.world.clients import Clients
from tests.world.front import LISTED_S, Front, Replica
from tests.world.machine import Machine
from tests.world.model import Conversation
from tests.world.scheduler import Process, Scheduler

STARTS_S_MAX = 6.0
"""A replica's start takes so long at most, and a front's."""
RESTARTS_S = 1.0
READY_S = 60.0
"""As `launch.up_timeout_s`: the product gives up then."""
ENDS_S = 240.0
"""By then it has ended, whatever died, and nothing of another version runs."""
TALKS = 2
GENTLE = ("nothing", "the new does not start", "deployer")
"""Of these nobody notices anything: each request is answered."""
INTERRUPTIONS = (*GENTLE, "old replica", "new replica", "node")


@dataclass(frozen=True)
class App:
    """What one application of Serve is here: replicas of a `model`, or fronts that ask `model_app`."""

    model: str = ""
    model_app: str = ""
    version: int = 0


def wanted_of(model: str, version: int) -> dict[str, App]:
    """Return both applications of a version, in the order in which they start."""
    name = f"{MODEL_APP_PREFIX}{version}"
    return {name: App(model, version=version), FRONT_APP: App(model, name, version)}


class Fleet:
    """Serve: what it shall run, what runs, and what died and begins again. A `Target`."""

    def __init__(
        self,
        here: Scheduler,
        machines: Sequence[Machine],
        replicas: list[Replica],
        fronts: list[Front],
        make_replica: Callable[[Machine, str, str], Replica],
        make_front: Callable[[str, str], Front],
        rng: random.Random,
    ) -> None:
        self._here = here
        self._machines = machines
        self.replicas = replicas
        self.fronts = fronts
        self._make_replica = make_replica
        self._make_front = make_front
        self._rng = rng
        self.apps: dict[str, App] = wanted_of("", 0)
        self.broken: frozenset[str] = frozenset()
        """Applications that never start."""
        self._status = dict.fromkeys(self.apps, "RUNNING")
        for one in (*replicas, *fronts):
            one.app = f"{MODEL_APP_PREFIX}0"
        here.spawn(here.world, "serve", self._restart)

    def put(self, apps: Apps, begun: Collection[str], gone: Collection[str]) -> None:
        self.apps = dict(apps)
        for name in begun:
            self._status[name] = "DEPLOYING"
            start = self._exchange_fronts if name == FRONT_APP else self._start_model
            self._here.spawn(self._here.world, "deploy", partial(start, name, self.apps[name]))
        for name in gone:
            self._here.spawn(self._here.world, "delete", partial(self._stop_model, name))

    def missing(self, names: Collection[str]) -> str | None:
        return not_running(names, self._status, dict.fromkeys(names, "it was broken"))

    def of(self, app: str) -> list[Replica]:
        return [one for one in self.replicas if one.app == app]

    def versions(self) -> set[str]:
        """Return the model's applications of which something runs or is asked for answers."""
        return {one.app for one in (*self.replicas, *self.fronts)}

    def is_less(self) -> bool:
        """Whether a replica has died and is not back yet."""
        return any(one.process.is_dead for one in self.replicas)

    def _is_wanted(self, name: str, app: App) -> bool:
        return self.apps.get(name) == app

    def _start_model(self, name: str, app: App) -> None:
        if name in self.broken:
            self._here.sleep(STARTS_S_MAX)
            if self._is_wanted(name, app):
                self._status[name] = "DEPLOY_FAILED"
            return
        there = {one.machine for one in self.of(name)}
        for machine in self._machines:
            self._here.sleep(self._rng.uniform(0.0, STARTS_S_MAX))
            if self._is_wanted(name, app) and machine not in there:
                self.replicas.append(self._make_replica(machine, name, app.model))
        if self._is_wanted(name, app):
            self._status[name] = "RUNNING"

    def _stop_model(self, name: str) -> None:
        """Let each replica end what it has: nobody asks it for more."""
        for replica in self.of(name):
            replica.is_leaving = True
        self._here.sleep(2 * LISTED_S)
        while name not in self.apps and (left := self.of(name)):
            for replica in left:
                if replica.process.is_dead or not replica.open:
                    replica.crash()
                    self.replicas.remove(replica)
            self._here.sleep(0.5)

    def _exchange_fronts(self, name: str, app: App) -> None:
        """Start the new ones, send clients to them, and let the old ones end what they have."""
        self._here.sleep(self._rng.uniform(0.0, STARTS_S_MAX))
        if not self._is_wanted(name, app):
            return
        if not all(front.app == app.model_app for front in self.fronts):
            old = list(self.fronts)
            new = [self._make_front(app.model_app, app.model) for _ in old]
            while not all(front.is_ready for front in new):
                self._here.sleep(0.1)
            self.fronts[:] = new
            while any(front.asked for front in old):
                self._here.sleep(0.1)
            for front in old:
                self._here.kill(front.process)
        if self._is_wanted(name, app):
            self._status[name] = "RUNNING"

    def _restart(self) -> None:
        while True:
            self._here.sleep(RESTARTS_S)
            for replica in self.replicas:
                if replica.process.is_dead and not replica.is_leaving:
                    replica.start()
            for machine in self._machines:
                if machine.process is not None and machine.process.is_dead:
                    machine.start()


class Rollout:
    """Rolls out another setting, then another model, while users talk and something dies; judges both."""

    def __init__(
        self,
        here: Scheduler,
        clients: Clients,
        fleet: Fleet,
        live: Sequence[Conversation],
        seen: Counter[str],
        seed: int,
    ) -> None:
        self._here = here
        self._clients = clients
        self._fleet = fleet
        self._live = live
        self._talking, self._quiet = live[:-1], live[-1]
        """Who says nothing while versions are exchanged has met no other model before."""
        self._seen = seen
        self._rng = random.Random(f"rollout {seed}")
        self._is_over = False

    def judge(self) -> None:
        """All is quiet: exchange what runs, twice, and see that sessions go on and nothing old is left."""
        for version, model in enumerate(("", "another model"), start=1):
            before = dict(self._fleet.apps)
            for one in self._live:
                self._ask(one)
            interruption = self._rng.choice(INTERRUPTIONS)
            wanted = wanted_of(model, version)
            self._roll(wanted, interruption)
            self._seen[f"rollout: {interruption}"] += 1
            is_back = interruption == "the new does not start"
            self._judge_ended(before if is_back else wanted)
            if self._here.violations:
                return
            for one in self._live:
                is_new = bool(model) and not is_back and one is self._quiet
                self._judge_resumed(one, is_new=is_new)

    def _ask(self, one: Conversation) -> int:
        answer = self._rng.choice(self._fleet.fronts).ask(one)
        if not answer.replica:
            self._here.violate("not rolled out", f"{one.name} has no answer")
        return answer.loaded

    def _judge_resumed(self, one: Conversation, *, is_new: bool) -> None:
        """Blocks of the same model are there again; of another one none are, at first."""
        loaded = self._ask(one)
        if is_new and loaded:
            self._here.violate("a wrong byte", f"{one.name}: {loaded} blocks of a model that it never met")
        again = self._ask(one)
        if not again and self._is_kept(one):
            self._here.violate("not resumed", f"{one.name}: it loads {loaded}, then {again} blocks")
        self._seen["resumed behind a rollout"] += bool(again)

    def _is_kept(self, one: Conversation) -> bool:
        """Whether a node has the beginning of what the fronts' model knows of it."""
        app = self._fleet.apps[FRONT_APP]
        begins = one.of(app.model).extent(0).header.address
        return any(
            self._clients.has(machine, begins) for machine in {r.machine for r in self._fleet.replicas}
        )

    def _judge_ended(self, apps: dict[str, App]) -> None:
        fleet, ends_s = self._fleet, self._here.now_s + ENDS_S
        wanted = {apps[FRONT_APP].model_app}
        while (fleet.versions() != wanted or fleet.is_less()) and self._here.now_s < ends_s:
            self._here.sleep(1.0)
        self._here.sleep(2 * LISTED_S)  # a replica that has died and is back is known to fronts by then
        if fleet.apps != apps or fleet.versions() != wanted:
            what = f"{sorted(fleet.apps)} shall run, {sorted(fleet.versions())} do, not {sorted(apps)}"
            self._here.violate("not rolled out", what)

    def _roll(self, wanted: dict[str, App], interruption: str) -> None:
        """Exchange what runs for `wanted`, again if the one who does it dies, while users talk."""
        here, fleet = self._here, self._fleet
        new, old = next(iter(wanted)), fleet.apps[FRONT_APP].model_app
        fleet.broken = frozenset({new} if interruption == "the new does not start" else ())
        self._is_over, failed = False, list[str]()
        talk = partial(self._talk, interruption)
        users = [here.spawn(here.world, "talk", talk) for _ in range(TALKS)]
        process = self._deployer(wanted, failed)
        here.sleep(self._rng.uniform(0.0, 3 * STARTS_S_MAX))
        if interruption == "deployer":
            here.kill(process)
            here.sleep(self._rng.uniform(0.0, STARTS_S_MAX))
            process = self._deployer(wanted, failed)
        elif interruption == "node":
            replicas = fleet.of(old) or fleet.of(new)
            self._rng.choice(replicas).machine.crash(power=self._rng.random() < 0.5)
        elif interruption.endswith("replica"):
            for replica in fleet.of(old if interruption.startswith("old") else new)[:1]:
                replica.crash()
        ends_s = here.now_s + ENDS_S
        while process.tasks and here.now_s < ends_s:
            here.sleep(0.5)
        self._is_over = True
        while not all(task.is_done for task in users):
            here.sleep(0.5)
        if process.tasks:
            here.violate("for ever", f"a rollout goes on after {ENDS_S:.0f} s")
        if bool(failed) != bool(fleet.broken):
            here.violate("not rolled out", f"{interruption}: {failed or 'no failure'}")

    def _deployer(self, wanted: dict[str, App], failed: list[str]) -> Process:
        """Whoever runs `samovar deploy`: begins with what Serve has now."""

        def run() -> None:
            patience = Patience(READY_S, "launch.up_timeout_s", self._here.tell)
            try:
                exchange(dict(self._fleet.apps), wanted, self._fleet, patience.wait)
            except StartFailed as error:
                failed.append(str(error))

        process = self._here.process("deployer")
        self._here.spawn(process, "exchange", run)
        return process

    def _talk(self, interruption: str) -> None:
        while not self._is_over and not self._here.violations:
            self._here.sleep(self._rng.expovariate(1.0))
            one = self._rng.choice(self._talking)
            answer = self._rng.choice(self._fleet.fronts).ask(one)
            if not answer.replica and interruption in GENTLE:
                self._here.violate("not rolled out", f"{one.name} has no answer beside {interruption}")
