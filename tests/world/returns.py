"""What nodes learn of who comes back: saved, there again after a power cut, and told to a node that joins."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from samovar.cache_tiers.blocks import marks_of
from samovar.cache_tiers.blocks.extent import KEY_BYTES
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.messages import TurnEnded
from samovar.configs.sections import PredictorSettings, TierSettings
from tests.support.constants import tuned
from tests.support.inside import learner_of
from tests.world.faults import Faults
from tests.world.machine import Machine
from tests.world.model import SHAPE
from tests.world.scheduler import Scheduler

YOUNG_TURNS = 6
"""`JUDGED_MIN` in a life: below, a node does not tell what it has learned."""
SAVE_S = 3.0
SAVED_S = 4 * SAVE_S
"""By then everything is saved, where nothing goes on."""
SMALL = {
    "save_s": SAVE_S,
    "learning_turns_min": YOUNG_TURNS,
    "replay_turns": 100,
    "saved_turns": 100,
    "guard_outcomes": 100,
}
STARTS_S = 60.0
ON_DISK = ("disk error", "disk full", "bad read", "torn write")
"""Faults for which a predictor may fail: it could not be saved, or what was saved could not be read."""


def learning(settings: TierSettings) -> TierSettings:
    """Return settings with which nodes learn, soon enough for a life."""
    predictor = tuned(PredictorSettings(sessions_max=20), **SMALL)
    policy = settings.policy.model_copy(update={"name": "learned"})
    return settings.model_copy(update={"predictor": predictor, "policy": policy})


def over(tenant: bytes, session: bytes, chain: bytes, service_s: float) -> TurnEnded:
    """Return what a replica tells of a turn that has ended, with the whole `chain`."""
    keys = [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]
    tokens = len(keys) * SHAPE.block_tokens
    return TurnEnded(tenant, session, service_s, tokens, 1, marks_of(keys), SHAPE.block_tokens)


class Returns:
    """Judges what `machines` have learned. `join`: puts a new machine, which lives, beside them."""

    def __init__(
        self,
        here: Scheduler,
        faults: Faults,
        machines: Sequence[Machine],
        seen: Counter[str],
        seed: int,
        join: Callable[[], Machine],
    ) -> None:
        self._here = here
        self._seen = seen
        self._faults = faults
        self._machines = machines
        self._rng = random.Random(f"returns {seed}")
        self._join = join

    def judge(self) -> None:
        """All is quiet: nothing failed but for the disk, a crash loses nothing, and all of it is told."""
        self._here.sleep(SAVED_S)
        learned = [(machine, self._learned(machine)) for machine in self._machines if machine.is_up]
        for machine, _ in learned:
            self._judge_failures(machine)
        if not learned:
            return
        machine, before = self._rng.choice(learned)
        is_power = self._rng.random() < 0.5
        machine.crash(power=is_power)
        machine.start()
        self._wait_for(machine)
        if before and self._learned(machine) != before:
            what = f"{before} turns at {machine.name} before, {self._learned(machine)} now"
            self._here.violate("not learned", f"{what}: {self._restored(machine)}, power cut: {is_power}")
        elif before:
            self._seen["learned: there again"] += 1
        if any(turns >= YOUNG_TURNS for _, turns in learned):
            self._judge_joined()

    def _judge_joined(self) -> None:
        joined = self._join()
        self._wait_for(joined)
        self._here.sleep(3.0)
        if self._restored(joined) == "from a peer":
            self._seen["learned: from a peer"] += 1
        else:
            what = f"a node that joins has {self._learned(joined)} turns: {self._restored(joined)}"
            told = {machine.name: self._learned(machine) for machine in self._machines if machine.is_up}
            self._here.violate("not learned", f"{what}, and the others have {told}")

    def _judge_failures(self, machine: Machine) -> None:
        assert machine.node is not None
        stats = machine.node.stats().returns
        is_excused = any(self._faults.struck[kind] for kind in ON_DISK)
        if stats.predictor.startswith("off") or (stats.failures and not is_excused):
            what = f"{stats.failures} failures at {machine.name}, {stats.predictor}, {stats.restored}"
            self._here.violate("not learned", what)

    def _wait_for(self, machine: Machine) -> None:
        """Until it has read its file, or found none."""
        for waited_s in count():
            self._here.sleep(1.0)
            if machine.is_up and self._restored(machine):
                return
            if waited_s > STARTS_S:
                self._here.violate("for ever", f"{machine.name} does not start")
                return

    def _learned(self, machine: Machine) -> int:
        predictor = learner_of(_resumption(machine)).predictor
        return predictor.busiest.turns.added if isinstance(predictor, Predictor) else 0

    def _restored(self, machine: Machine) -> str:
        restored: str = learner_of(_resumption(machine)).restored
        return restored


def _resumption(machine: Machine) -> object:
    assert machine.node is not None
    return machine.node.resumption
