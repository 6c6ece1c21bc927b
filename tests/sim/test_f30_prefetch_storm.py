"""F30: ten thousand sessions are predicted at once. Guesses stay within their budget, demand goes first."""

from __future__ import annotations

import numpy as np
import pytest

from samovar.cache_tiers.forecast.turns import BINS, curve_of
from samovar.cache_tiers.policy.policies import LikelyReturn
from samovar.cache_tiers.pricing.meters import TierMeter
from samovar.cluster.plan.simulator.fleet import NVME_PRICE, Fleet
from samovar.cluster.plan.simulator.node import SimNode, SimPrefetch
from samovar.cluster.plan.simulator.tier import SimLink
from samovar.configs.sections import GIB, MIB, PrefetchSettings
from tests.support.clock import Clock
from tests.support.traffic import BLOCK

SESSIONS = 10_000
SECONDS = 20
SOON = curve_of(np.full(BINS, 0.5))


def stormy_node(settings: PrefetchSettings) -> tuple[SimNode, SimPrefetch]:
    """All sessions idle with a block in nvme each, and all expected within seconds."""
    fleet = Fleet(cpu_bytes=64 * GIB, nvme_bytes=2048 * GIB, prefetch=settings)
    node = SimNode(0, fleet, LikelyReturn("learned"), BLOCK, None, Clock(), lambda _: fleet.profiles.chat)
    assert node.early is not None
    for session in range(SESSIONS):
        blocks = (session,)
        node.early.returned(session, blocks, 0.0)
        node.sessions.started(session, 0.0)
        node.sessions.ended(session, 1.0, SOON, tokens=BLOCK)
        node.tiers["nvme"].put(blocks, session, 1.0)
    return node, node.early


def test_f30_bytes_in_flight_and_a_second_are_bounded() -> None:
    settings = PrefetchSettings(by_hazard=True, bytes_per_s_max=512 * MIB, inflight_bytes_max=256 * MIB)
    node, early = stormy_node(settings)
    for second in range(2, SECONDS):
        early.tick(float(second))
        assert 0 < early.prefetcher.moving_bytes <= settings.inflight_bytes_max
        while (due_s := early.next_s(float(second))) < second + 1:
            early.arrivals(due_s + 1e-6)
            assert early.prefetcher.moving_bytes <= settings.inflight_bytes_max
        granted = settings.bytes_per_s_max * (second - 1 + settings.burst_s)
        assert early.early_bytes + early.prefetcher.moving_bytes <= granted
        node.check_integrity()
    assert early.early_bytes > 0


def test_f30_demand_goes_first() -> None:
    """A load that a request waits for takes as long in the storm as without it, and nothing new starts."""
    settings = PrefetchSettings(by_hazard=True, bytes_per_s_max=64 * GIB, inflight_bytes_max=16 * GIB)
    node, early = stormy_node(settings)
    early.tick(2.0)
    assert early.prefetcher.moving_bytes > 8 * GIB
    nbytes = 12 * GIB
    done_s = node.links["nvme"].demand(nbytes, 2.0)
    assert done_s == pytest.approx(2.0 + NVME_PRICE.seconds(nbytes))
    moving = early.prefetcher.moving_bytes
    early.tick(2.5)
    early.arrivals(done_s - 0.01)
    assert early.prefetcher.moving_bytes == moving, "a guess began or moved while demand did"
    early.arrivals(done_s + 1.0)
    assert early.prefetcher.moving_bytes < moving
    node.check_integrity()


def test_f30_who_returns_takes_the_guess_away() -> None:
    node, early = stormy_node(PrefetchSettings(by_hazard=True))
    early.tick(2.0)
    moving = early.prefetcher.moving_bytes
    for session in range(SESSIONS):
        early.returned(session, (session, SESSIONS + session), 2.0)
    assert moving > 0
    assert early.prefetcher.moving_bytes == 0
    assert early.next_s(2.0) == float("inf")
    node.check_integrity()


def test_link_gives_guesses_what_is_left() -> None:
    link = SimLink(NVME_PRICE, TierMeter(NVME_PRICE, clock=Clock()))
    size = int(NVME_PRICE.bytes_per_s)  # a second
    link.guess((1, "nvme"), size, 0.0)
    assert link.next_s(0.5) == pytest.approx(1.0)
    link.demand(size, 0.5)
    assert link.arrived(1.2) == []
    assert link.next_s(1.2) == pytest.approx(2.0)
    assert link.cancel((1, "nvme"), 1.75) == pytest.approx(size / 4, rel=1e-6)
    link.check_integrity()
