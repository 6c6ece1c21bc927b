"""The tiers engage where they pay, whatever was believed at first.

Within 20 turns stores and loads are those of an oracle. On an H200 every extent was once refused by a price
that no load had ever taken; since nothing was stored nothing was loaded, and no load corrected the price.
Here first prices are wrong by ten times, both ways, on many machines; the simulator decides by the product's
own classes. `tests/faults/test_price_doubted.py` has the same with an engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from samovar.cache_tiers.blocks.tiers import LoadSource
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cache_tiers.pricing.load_plan import BURST_EXTENTS, DOUBT_SHARE, Doubt
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierMeter, TierPrice
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.node import PIECE_BLOCKS
from samovar.cluster.plan.simulator.sim import Sim
from samovar.cluster.plan.simulator.tier import SimLink
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicySettings, TierSettings
from tests.support.traffic import turn

BLOCK = 32
SESSIONS, LEARNED, COUNTED = 4, 20, 40
INTERVAL_S = 2.0
MINUTE_S = 60.0


@dataclass(frozen=True)
class Machine:
    """What a model on a machine takes. `tier`: the uppermost, with its loads' price; `tokens`: a prompt's."""

    prefill: PrefillPrice
    token_bytes: int
    load: TierPrice
    tier: LoadSource = "cpu"
    tokens: int = 8192
    pays: bool = True

    @property
    def chain_bytes(self) -> int:
        return self.tokens * self.token_bytes

    @property
    def interval_s(self) -> float:
        """Seconds from turn to turn: a prompt is computed before the next comes."""
        return max(INTERVAL_S, 2 * self.prefill.seconds(self.tokens, 0))

    def fleet(self, first: TierPrice) -> Fleet:
        """A pool that holds one conversation and a half, over a tier that holds all."""
        room = 100 * self.chain_bytes
        return replace(
            Fleet(),
            gpu_bytes=3 * self.chain_bytes // 2,
            bytes_per_token=self.token_bytes,
            prefill=self.prefill,
            loads_parallel=TierSettings().io_threads,
            policy=PolicySettings(name="lru"),
            first={self.tier: first},
            **{"cpu_bytes" if self.tier == "cpu" else "nvme_bytes": room, self.tier: self.load},
        )


H200 = PrefillPrice(0.025, 26e-6, 8e-10, step_tokens=8192)
KV_8B, KV_70B, KV_135M = 131_072, 327_680, 23_040
MACHINES = {
    "8B on an H200, RAM 6 GB/s": Machine(H200, KV_8B, TierPrice(5e-4, 6e9)),
    "8B on an H200, RAM 20 GB/s": Machine(H200, KV_8B, TierPrice(5e-4, 20e9)),
    "8B on an H200, RAM 50 GB/s": Machine(H200, KV_8B, TierPrice(5e-4, 50e9)),
    "8B on an H200, NVMe 3 GB/s": Machine(H200, KV_8B, TierPrice(1e-3, 3e9), "nvme", tokens=32_768),
    "70B on two": Machine(PrefillPrice(0.04, 9e-5, 2e-9, 8192), KV_70B, TierPrice(5e-4, 20e9)),
    "8B on an L4": Machine(PrefillPrice(0.03, 2.7e-4, 9e-9, 4096), KV_8B, TierPrice(5e-4, 12e9)),
    "135M on a CPU": Machine(
        PrefillPrice(0.04, 1.1e-3, 4.5e-7, 512), KV_135M, TierPrice(1e-3, 4e9), tokens=1024
    ),
    "7B on a CPU": Machine(PrefillPrice(0.4, 5e-2, 2e-6, 512), KV_8B, TierPrice(1e-3, 4e9), tokens=1024),
    "never, RAM": Machine(H200, KV_8B, TierPrice(5e-4, 0.3e9), pays=False),
    "never, NVMe": Machine(H200, KV_8B, TierPrice(1e-3, 0.2e9), "nvme", pays=False),
}
"""Where it never pays, loading takes more than nine times as long as computing: nor does meeting half-way."""


class Knowing(TierMeter):
    """The oracle's: it knows what a load takes now."""

    def __init__(self, link: SimLink) -> None:
        super().__init__(link.price)
        self._link = link

    def price(self, is_up: bool = True) -> TierPrice:
        return self._link.price


@dataclass
class Moved:
    """What was done by a turn and later: bytes stored and loaded, and the times to first tokens."""

    stored: float = 0.0
    loaded: float = 0.0
    ttft_s: float = 0.0
    offered: float = 0.0


@dataclass
class Run:
    """One simulated run. `first`: what the start has measured, None: nothing.

    `change`: what loads take from a time on; `from_turn`: the first that is counted.
    """

    machine: Machine
    first: TierPrice | None
    knows: bool = False
    change: tuple[float, TierPrice] = (math.inf, TierPrice(1.0, 1.0))
    from_turn: int = LEARNED
    turns: int = LEARNED + COUNTED
    before: Moved = field(default_factory=Moved)

    def moved(self) -> Moved:
        first = self.first or self.machine.load
        sim = Sim(self.machine.fleet(first), make_policy(PolicySettings(name="lru")), BLOCK)
        link = sim.nodes[0].links[self.machine.tier]
        if self.knows:
            link.meter = Knowing(link)
        elif self.first is None:
            link.meter = TierMeter(clock=lambda: sim._now_s)
        sim.run(self._watched(sim))
        sim.check_integrity()
        end = self._so_far(sim)
        return Moved(
            end.stored - self.before.stored,
            end.loaded - self.before.loaded,
            end.ttft_s - self.before.ttft_s,
            self.machine.chain_bytes * (self.turns - self.from_turn),
        )

    def _watched(self, sim: Sim) -> Iterator[TraceTurn]:
        for number, one in enumerate(conversations(self.machine, self.turns)):
            if number == self.from_turn:
                self.before = self._so_far(sim)
            if one.started_s >= self.change[0]:
                sim.nodes[0].links[self.machine.tier].price = self.change[1]
            yield one

    def _so_far(self, sim: Sim) -> Moved:
        tier = self.machine.tier
        return Moved(
            sim.moved_bytes().get(f"gpu->{tier}", 0),
            sim.nodes[0].links[tier].demand_bytes,
            sum(sim.tally.ttft_s),
        )


def conversations(machine: Machine, turns: int) -> Iterator[TraceTurn]:
    """Sessions that return in turns, each with two blocks more than before."""
    for number in range(turns):
        session, rounds = number % SESSIONS, number // SESSIONS
        blocks = machine.tokens // BLOCK + 2 * rounds
        ids = tuple((session << 32) + at for at in range(blocks))
        kept_tokens = (blocks - 2) * BLOCK if rounds else 0
        yield turn(session, number * machine.interval_s, ids, kept_tokens=kept_tokens, block_tokens=BLOCK)


def wrong_by(factor: float, load: TierPrice) -> TierPrice:
    return TierPrice(load.latency_s * factor, load.bytes_per_s / factor)


def bound_bytes(machine: Machine, offered: float) -> float:
    """What may be moved against the price: see `Doubt`; each for stores and loads."""
    extent = max(TierSettings().extent_bytes_max, PIECE_BLOCKS * BLOCK * machine.token_bytes)
    return BURST_EXTENTS * extent + 1.3 * DOUBT_SHARE * offered  # prompts grow


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_within_20_turns_stores_and_loads_are_an_oracles(machine: Machine, factor: float) -> None:
    found = Run(machine, wrong_by(factor, machine.load)).moved()
    truth = Run(machine, machine.load, knows=True).moved()
    assert (truth.loaded > 0) == machine.pays, "the machine is not what it says"
    if machine.pays:
        assert found.loaded == pytest.approx(truth.loaded, rel=0.1)
        assert found.stored == pytest.approx(truth.stored, rel=0.1)
        assert found.ttft_s == pytest.approx(truth.ttft_s, rel=0.1)
    else:
        assert found.loaded <= bound_bytes(machine, found.offered)
        assert found.stored <= bound_bytes(machine, found.offered)
        assert found.ttft_s <= 1.1 * truth.ttft_s


@pytest.mark.parametrize("machine", ["8B on an H200, RAM 20 GB/s", "8B on an H200, NVMe 3 GB/s"])
def test_a_tier_that_nothing_is_known_of_is_used_and_learned(machine: str) -> None:
    """As S3 and other nodes are: no start measures them."""
    one = MACHINES[machine]
    found = Run(one, None).moved()
    truth = Run(one, one.load, knows=True).moved()
    assert found.loaded == pytest.approx(truth.loaded, rel=0.1)
    assert found.ttft_s == pytest.approx(truth.ttft_s, rel=0.1)


@pytest.mark.parametrize("factor", [5.0, 0.2], ids=["slower", "quicker"])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_a_machine_that_changes_is_followed_within_a_minute(machine: Machine, factor: float) -> None:
    """Or within as many turns, where a turn takes longer."""
    changed_s = LEARNED * machine.interval_s
    later = TierPrice(machine.load.latency_s, machine.load.bytes_per_s / factor)
    counted = LEARNED + math.ceil(MINUTE_S / INTERVAL_S)
    found, truth = (
        Run(machine, machine.load, knows, (changed_s, later), counted, counted + COUNTED).moved()
        for knows in (False, True)
    )
    if truth.loaded:
        assert found.loaded == pytest.approx(truth.loaded, rel=0.1)
        assert found.ttft_s == pytest.approx(truth.ttft_s, rel=0.1)
    else:
        assert found.loaded <= bound_bytes(machine, found.offered)
        assert found.ttft_s <= 1.1 * truth.ttft_s


def test_planted_a_price_that_nobody_doubts_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: a first price ten times too high is never corrected."""
    monkeypatch.setattr(Doubt, "tries", lambda *_: False)
    machine = MACHINES["8B on an H200, RAM 20 GB/s"]
    found = Run(machine, wrong_by(10.0, machine.load)).moved()
    assert found.loaded == found.stored == 0
