"""Who serves a request: the router's own ranking (`router/score.py`) over what the simulation knows.

Large fleets are not ranked as a whole: a request's home and a few others drawn at random (the power of
choices: Mitzenmacher, 2001) are, so that a turn takes the same time whatever the fleet's size. The product's
router looks at all replicas.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from cache_tiers.messages import TierPrice
from cluster.sim_fleet import Fleet
from router.score import Ask, LoadPrice, Outcome, ReplicaView, Way, rank


class SimRouter:
    """`view(number)`: how replica `number` looks now."""

    def __init__(self, fleet: Fleet, view: Callable[[int], ReplicaView], *, seed: int = 0) -> None:
        self._fleet = fleet
        self._view = view
        self._rng = random.Random(seed)
        self._home: dict[int, int] = {}
        self._chain: dict[int, int] = {}
        self.outcomes: dict[Outcome, int] = {"home": 0, "moved": 0, "spilled": 0, "new": 0}
        self._loads: dict[Way, LoadPrice] = {}
        if fleet.cpu_bytes or fleet.nvme_bytes:
            ways: dict[Way, TierPrice] = {"node": fleet.cpu, "peer": fleet.peer}
            for way, price in ways.items():
                seconds = fleet.bytes_per_token / price.bytes_per_s
                self._loads[way] = LoadPrice(price.latency_s, seconds)

    def choose(self, session: int, prompt_tokens: int) -> int:
        """The replica's number; from now on it is the session's home."""
        home = self._home.get(session)
        views = [self._view(number) for number in self._candidates(home)]
        if len(views) > 1:
            ask = Ask(
                session=str(session),
                prompt_tokens=prompt_tokens,
                cached_tokens=min(self._chain.get(session, 0), prompt_tokens),
                home="" if home is None else str(home),
                nodes=() if home is None else (str(home // self._fleet.replicas_per_node),),
            )
            ranking = rank(
                ask,
                views,
                self._loads,
                leave_home_s=self._fleet.leave_home_s,
                spill_factor=self._fleet.spill_factor,
            )
            best = ranking.names[0]
            self.outcomes[ranking.outcomes[best]] += 1
            home = int(best)
        else:
            self.outcomes["new" if home is None else "home"] += 1
            home = int(views[0].name)
        self._home[session] = home
        return home

    def home(self, session: int) -> int | None:
        return self._home.get(session)

    def ended(self, session: int, chain_tokens: int) -> None:
        """A turn is over, and its session's chain so long."""
        self._chain[session] = chain_tokens

    def _candidates(self, home: int | None) -> list[int]:
        replicas, most = self._fleet.replicas, self._fleet.candidates
        if replicas <= most:
            return list(range(replicas))
        drawn = {self._rng.randrange(replicas) for _ in range(most - (home is not None))}
        return sorted(drawn if home is None else drawn | {home})
