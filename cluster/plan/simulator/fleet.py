"""Holds a simulated fleet's parameters (counts, sizes, speeds) and routes its requests.

What the service has a setting for is by default what it is there. All other defaults are assumptions. GPU
numbers are those of an 8B model with grouped attention (128 KiB of KV per token in bf16) on one H100-like GPU
that computes 20,000 prompt tokens per second; attention costs as much as all the rest at 30k tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from samovar.cache_tiers.blocks import CPU, NVME, PEER, S3, LoadSource, TierName
from samovar.cache_tiers.pricing import PrefillPrice, TierPrice
from samovar.configs.sections import (
    GIB,
    KIB,
    PolicySettings,
    PredictorSettings,
    PrefetchSettings,
    ProfilesSettings,
    TierSettings,
)
from samovar.configs.settings import EngineSettings, RouterSettings
from samovar.router.routing import LoadPrice, Outcome, ReplicaView, RoutingRequest, Way, rank

_TIERS, _ROUTER = TierSettings(), RouterSettings()
GB = 10**9
PREFILL = PrefillPrice(0.01, 1 / 20_000, 8.2e-10)
CPU_PRICE, NVME_PRICE = TierPrice(1e-4, 25.0 * GB), TierPrice(1e-3, 6.0 * GB)
S3_PRICE, PEER_PRICE = TierPrice(5e-2, 1.0 * GB), TierPrice(2e-3, 10.0 * GB)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in dollars, per GPU hour and per GiB and month (730 h). Assumed: list prices differ widely."""

    gpu_hour: float = 2.5
    cpu_gib_month: float = 2.0
    nvme_gib_month: float = 0.08
    s3_gib_month: float = 0.023


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parameters of a fleet.

    `gpus`: of one replica; `gpu_bytes`: of KV per replica; `cpu_bytes`, `nvme_bytes`: per node; `s3_bytes`:
    in total. 0: no such tier. `slots`: requests that a replica serves at a time; others wait. `peer`: loads
    from another node's tiers. `decode_token_s`: per token of an answer. `candidates`: replicas ranked for a
    request, its home among them; smaller fleets are ranked as a whole. `lead_s`: prefetching by hazard takes
    sessions that probably return within this time. `first`: what a node's start has measured of its tiers,
    where that is not what loads take; of S3 and of other nodes it measures nothing. `profiles`: how long
    tiers keep what; where a profile's blocks go first is not simulated. `prefetch`: None: none.
    """

    replicas: int = 1
    replicas_per_node: int = 8
    gpus: int = 1
    gpu_bytes: int = 64 * GIB
    cpu_bytes: int = 0
    nvme_bytes: int = 0
    s3_bytes: int = 0
    bytes_per_token: int = 128 * KIB
    slots: int = EngineSettings().sequences_max
    prefill: PrefillPrice = PREFILL
    decode_token_s: float = 0.03
    cpu: TierPrice = CPU_PRICE
    nvme: TierPrice = NVME_PRICE
    s3: TierPrice = S3_PRICE
    peer: TierPrice = PEER_PRICE
    first: Mapping[LoadSource, TierPrice] = field(default_factory=dict)
    loads_parallel: int = _TIERS.io_threads
    hedge_factor: float = _TIERS.hedge_factor
    hedge_slack_s: float = _TIERS.hedge_slack_s
    affinity_penalty_s: float = _ROUTER.affinity_penalty_s
    load_bound_factor: float = _ROUTER.load_bound_factor
    candidates: int = 4
    sessions_max: int = PredictorSettings().sessions_max
    policy: PolicySettings = field(default_factory=PolicySettings)
    profiles: ProfilesSettings = field(default_factory=ProfilesSettings)
    prefetch: PrefetchSettings | None = field(default_factory=PrefetchSettings)
    lead_s: float = PolicySettings.horizon_s_min

    def __post_init__(self) -> None:
        if min(self.replicas, self.replicas_per_node, self.gpus, self.slots, self.candidates) < 1:
            raise ValueError("a fleet has at least one of everything")
        if self.bytes_per_token < 1:
            raise ValueError("a fleet has at least one of everything")
        if min(self.gpu_bytes, self.cpu_bytes, self.nvme_bytes, self.s3_bytes) < 0:
            raise ValueError("tiers cannot have less than 0 bytes")

    @property
    def nodes(self) -> int:
        return -(-self.replicas // self.replicas_per_node)

    @property
    def tier_bytes(self) -> dict[TierName, int]:
        """The bytes of each tier, a node's or, of a shared one, the fleet's; 0 = none."""
        return {CPU.name: self.cpu_bytes, NVME.name: self.nvme_bytes, S3.name: self.s3_bytes}

    def price_of(self, tier: str) -> TierPrice:
        """Return the price of loading from `tier`. Raises `KeyError`."""
        return {CPU.name: self.cpu, NVME.name: self.nvme, S3.name: self.s3, PEER: self.peer}[tier]

    def first_price_of(self, tier: LoadSource) -> TierPrice | None:
        """Return what a node knows of loads from `tier` before the first."""
        measured = {CPU.name: self.cpu, NVME.name: self.nvme}
        return self.first.get(tier, measured.get(tier))

    def usd_per_h(self, prices: Prices) -> float:
        """Return the fleet's cost in dollars per hour, independent of load."""
        month_h = 730.0 * GIB
        nodes = self.nodes
        memory = nodes * self.cpu_bytes * prices.cpu_gib_month
        disk = nodes * self.nvme_bytes * prices.nvme_gib_month
        return (
            self.replicas * self.gpus * prices.gpu_hour
            + (memory + disk + self.s3_bytes * prices.s3_gib_month) / month_h
        )


class SimRouter:
    """Routes requests with the router's own ranking (`router/routing/score.py`) over simulated replicas.

    Of large fleets only a request's home and a few replicas drawn at random are ranked (the power of choices:
    Mitzenmacher, 2001), so that a turn takes the same time whatever the fleet's size. The product's router
    ranks all replicas. `view(number)`: the current view of replica `number`.
    """

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
        """Return the number of the replica to use and make it the session's home."""
        home = self._home.get(session)
        views = [self._view(number) for number in self._candidates(home)]
        if len(views) > 1:
            ask = RoutingRequest(
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
                affinity_penalty_s=self._fleet.affinity_penalty_s,
                load_bound_factor=self._fleet.load_bound_factor,
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
        """Record the length of a session's chain at the end of a turn."""
        self._chain[session] = chain_tokens

    def _candidates(self, home: int | None) -> list[int]:
        replicas, most = self._fleet.replicas, self._fleet.candidates
        if replicas <= most:
            return list(range(replicas))
        drawn = {self._rng.randrange(replicas) for _ in range(most - (home is not None))}
        return sorted(drawn if home is None else drawn | {home})
