"""After the faults: how much of what returning sessions have said is found, beside a world without faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from tests.world.clients import PLACEMENTS, TURNS_MAX, Clients
from tests.world.machine import SCAN_S_MAX, Machine
from tests.world.model import SHAPE, Conversation, tag
from tests.world.scheduler import Scheduler

GUESTS = 4
NUMBERS = 1_000_000
"""Of guests, from here on: they say nothing that others have said."""
IDLE_S = 8.0
STARTS_S = 60.0
FOUND, POSSIBLE = "tokens found after the faults", "tokens possible after the faults"


def bring_up(here: Scheduler, machines: Sequence[Machine]) -> None:
    """Start what is down, and wait until all answer."""
    ends_s = here.now_s + STARTS_S
    for machine in machines:
        if machine.process is None or machine.process.is_dead:
            machine.start()
    while not all(machine.is_up for machine in machines):
        if here.now_s > ends_s:
            here.violate("for ever", f"{[one.name for one in machines if not one.is_up]} does not start")
            return
        here.sleep(1.0)
    here.sleep(SCAN_S_MAX)


class Recovery:
    """Has new sessions of the life's tenants come and return, at any node. `seen`: gets tokens, by name."""

    def __init__(
        self,
        here: Scheduler,
        clients: Clients,
        machines: Sequence[Machine],
        tenants: int,
        seen: Counter[str],
        seed: int,
    ) -> None:
        self._here = here
        self._clients = clients
        self._machines = machines
        self._tenants = tenants
        self._seen = seen
        self._rng = random.Random(f"recovery {seed}")

    def run(self) -> None:
        """All is quiet: count what turns find of what the turns before them have stored."""
        bring_up(self._here, self._machines)
        guests = [self._guest(number) for number in range(GUESTS)]
        names = [machine.name for machine in self._machines]
        for _ in range(TURNS_MAX + 1):
            for guest in self._rng.sample(guests, len(guests)):
                if self._here.violations:
                    return
                machine, possible = self._rng.choice(self._machines), sum(guest.sizes[: guest.turns])
                found = self._clients.turn(guest, machine, peers=names)
                self._seen[FOUND] += found * SHAPE.block_tokens
                self._seen[POSSIBLE] += possible * SHAPE.block_tokens
                self._here.sleep(self._rng.uniform(0.0, IDLE_S))

    def _guest(self, number: int) -> Conversation:
        tenant, session = tag("tenant", number % self._tenants), tag("guest", number)
        sizes = tuple(self._rng.randint(1, 3) for _ in range(TURNS_MAX))
        guest = Conversation(tenant, session, NUMBERS + number, sizes, self._rng.choice(PLACEMENTS))
        self._clients.now[tenant, session] = guest
        return guest
