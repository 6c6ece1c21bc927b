"""A desk: the product's threads for work of tenants, of whom some send more than their share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from samovar.replicas.turns import PlacesTaken, TenantThreads
from tests.world.scheduler import Scheduler

PIECE_S = 0.5
"""The longest that work runs before it ends or passes its thread on, as a rule of knowledge may."""
QUIET_S = 0.02
TURN_S = 0.05
"""What a tenant's turn is worth, as in the product."""
SLACK_S = 0.2
FLOODS = (24, 24, 80)
"""What the others together always have there; the last is more than they find places for."""
PLACES = 64
BOUND_S = 200.0
"""By then everything that found a place is over: there are not more places than that."""


class Desk:
    """Tenant 0 asks for little, the others have a flood of work there, long work among it."""

    def __init__(self, here: Scheduler, seen: Counter[str], seed: int) -> None:
        self._here = here
        self._seen = seen
        self._rng = random.Random(f"desk {seed}")
        self._threads, self._noisy = self._rng.choice((1, 2, 4)), self._rng.choice((1, 2, 3))
        self._lasts_s, self._flood = self._rng.choice((5.0, 15.0)), self._rng.choice(FLOODS)
        self._process = here.process("desk")
        self._turns: TenantThreads | None = None
        self._open = 0

    def start(self) -> None:
        self._here.spawn(self._process, "desk", self._live)

    @property
    def is_over(self) -> bool:
        """Whether nothing is open any more."""
        return self._turns is not None and not self._open and self._turns.is_idle

    def _live(self) -> None:
        turns = TenantThreads(
            "desk", self._threads, places=PLACES, tenant_share=0.6, clock=lambda: self._here.now_s
        )
        self._turns = turns
        ends_s = self._here.now_s + self._lasts_s
        for number in range(self._noisy):
            self._here.spawn(self._process, f"noisy-{number}", partial(self._ask_on, turns, number, ends_s))
        self._quiet(turns, ends_s)
        turns.check_integrity()

    def _quiet(self, turns: TenantThreads, ends_s: float) -> None:
        """Ask for something short, now and then: it waits for what runs, and for one turn of each other."""
        bound_s = PIECE_S + self._noisy * (TURN_S + PIECE_S) + SLACK_S
        while self._here.now_s < ends_s:
            self._here.sleep(self._rng.uniform(0.5, 1.5))
            came_s = self._here.now_s
            began_s = self._submitted(turns, "quiet", partial(self._takes, QUIET_S), is_long=False)
            if began_s is None:
                continue
            if began_s - came_s > bound_s:
                what = f"{began_s - came_s:.2f} s behind {self._noisy} others, more than {bound_s:.2f} s"
                self._here.violate("starved", f"a tenant's work waits {what}")
            else:
                self._seen["desk: in turn"] += 1

    def _ask_on(self, turns: TenantThreads, number: int, ends_s: float) -> None:
        tenant = f"noisy-{number}"
        while self._here.now_s < ends_s:
            if turns.waiting(tenant) >= self._flood // self._noisy:
                self._here.sleep(0.1)
                continue
            is_long = self._rng.random() < 0.2
            work = partial(self._pieces, turns, self._rng.randint(2, 6)) if is_long else partial(
                self._takes, PIECE_S * self._rng.choice((0.1, 1.0))
            )  # fmt: skip
            ask = partial(self._submitted, turns, tenant, work, is_long=is_long)
            self._here.spawn(self._process, tenant, ask)
            self._here.sleep(0.05)

    def _submitted(
        self, turns: TenantThreads, tenant: str, work: Callable[[], float], *, is_long: bool
    ) -> float | None:
        """Have work done; return when it began, None if it found no place."""
        try:
            future = turns.submit(tenant, work, is_long=is_long)
        except PlacesTaken as refused:
            self._seen["desk: no place"] += 1
            if refused.is_of_tenant and tenant == "quiet":
                self._here.violate("starved", "a tenant that has nothing there has too much there")
            if not refused.is_of_tenant and self._open < PLACES:
                self._here.violate("starved", f"no place with {self._open} of {PLACES} taken")
            return None
        self._open += 1
        try:
            return future.result(BOUND_S)
        except TimeoutError:
            self._here.violate("starved", f"work of {tenant} is not done in {BOUND_S:.0f} s")
            return self._here.now_s
        finally:
            self._open -= 1

    def _takes(self, seconds: float) -> float:
        began_s = self._here.now_s
        self._here.sleep(seconds)
        return began_s

    def _pieces(self, turns: TenantThreads, pieces: int) -> float:
        began_s = self._here.now_s
        for _ in range(pieces):
            self._here.sleep(PIECE_S)
            turns.pass_on()
        self._seen["desk: passed on"] += 1
        return began_s
