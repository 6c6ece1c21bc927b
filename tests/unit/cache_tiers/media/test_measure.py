"""Measuring a tier at start: right on a clock of its own, bounded, and None for what does not work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import Address, Bytes
from samovar.cache_tiers.blocks.record import BadRecord, Record, TierError, TierMiss
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.measure import RESERVED_NAMESPACE, SMALL_BYTES, measure_tier
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier
from samovar.configs.sections import FaultSettings
from tests.support.clock import Clock

MIB = 1024 * 1024


class Paced(Tier):
    """A tier whose reads take `latency_s + nbytes / bytes_per_s` of a clock; `extra_s` for some."""

    name = "nvme"

    def __init__(self, clock: Clock, latency_s: float, bytes_per_s: float) -> None:
        self.clock = clock
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.records: dict[Address, Bytes] = {}
        self.headers: list[codec.ExtentHeader] = []
        self.reads: list[int] = []
        self.deadlines_s: list[float] = []
        self.extra_s: dict[int, float] = {}
        self.deletes_fail = False

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        header = codec.decode_header(record.data, record_bytes=record.nbytes)
        assert header.address == address
        self.headers.append(header)
        self.records[address] = record.data.copy()
        self.clock.now_s += record.nbytes / self.bytes_per_s

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        if address not in self.records:
            raise TierMiss("not there")
        self.deadlines_s.append(deadline.seconds)
        self.clock.now_s += self.latency_s + nbytes / self.bytes_per_s + self.extra_s.get(len(self.reads), 0)
        self.reads.append(nbytes)
        return self.records[address][start : start + nbytes]

    def delete(self, address: Address) -> None:
        if self.deletes_fail:
            raise TierError("no")
        self.records.pop(address, None)

    def quarantine(self, address: Address) -> None:
        raise AssertionError("nothing to quarantine")

    def scan(self) -> Iterator[Scanned]:
        return iter(())

    def touch(self, address: Address) -> None:
        raise AssertionError("nothing to touch")

    def bytes_held(self) -> int:
        return sum(data.nbytes for data in self.records.values())

    def probe(self) -> None:
        raise AssertionError("nothing to probe")

    def close(self) -> None:
        raise AssertionError("not ours to close")


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.05, 200e6), (1e-3, 3e9), (0.0, 1e9), (0.2, 1e6)])
def test_it_finds_what_the_tier_does(latency_s: float, bytes_per_s: float) -> None:
    tier = Paced(Clock(50.0), latency_s, bytes_per_s)
    measured = measure_tier(tier, 4 * MIB, 3, tier.clock, budget_s=60.0)
    assert measured is not None
    assert measured[0] == pytest.approx(latency_s + SMALL_BYTES / bytes_per_s, rel=1e-6)
    assert measured[1] == pytest.approx(bytes_per_s, rel=1e-6)
    assert tier.records == {}
    assert sorted(set(tier.reads)) == [SMALL_BYTES, 4 * MIB + codec.header_bytes(1, 1)]
    assert len(tier.reads) == 6


def test_it_uses_a_namespace_that_no_model_has() -> None:
    tier = Paced(Clock(50.0), 0.01, 1e9)
    for _ in range(2):
        measure_tier(tier, MIB, 1, tier.clock)
    assert {header.namespace for header in tier.headers} == {RESERVED_NAMESPACE}
    assert {header.tenant for header in tier.headers} == {bytes(16)}
    assert len({header.extent_id for header in tier.headers}) == 2  # two nodes do not meet
    assert tier.headers[0].placement.ttl_s == 0.0


def test_one_slow_read_does_not_matter() -> None:
    tier = Paced(Clock(50.0), 0.01, 1e9)
    tier.extra_s = {2: 1.0, 5: 1.0}
    measured = measure_tier(tier, 4 * MIB, 5, tier.clock, budget_s=60.0)
    assert measured is not None
    assert measured[0] == pytest.approx(0.01, rel=1e-2)
    assert measured[1] == pytest.approx(1e9, rel=1e-2)


def test_it_stops_when_its_time_is_up() -> None:
    tier = Paced(Clock(50.0), 1.0, 1e9)
    begun_s = tier.clock()
    measured = measure_tier(tier, MIB, 1000, tier.clock, budget_s=5.0)
    assert measured is not None
    assert tier.clock() - begun_s < 6.1
    assert all(0 < deadline_s <= 5.0 for deadline_s in tier.deadlines_s)
    assert tier.deadlines_s == sorted(set(tier.deadlines_s), reverse=True)  # what is left, each time less
    assert tier.records == {}


def test_too_slow_to_measure_is_none() -> None:
    tier = Paced(Clock(50.0), 1.0, 1e5)
    assert measure_tier(tier, MIB, 3, tier.clock, budget_s=5.0) is None  # the put alone takes longer
    assert tier.records == {}
    tier = Paced(Clock(50.0), 3.0, 1e9)
    assert measure_tier(tier, MIB, 3, tier.clock, budget_s=5.0) is None  # the whole read ends too late
    assert tier.records == {}


@pytest.mark.parametrize(
    "faults",
    [
        FaultSettings(error_rate=1.0),
        FaultSettings(full_rate=1.0),
        FaultSettings(flip_rate=1.0),
        FaultSettings(truncate_rate=1.0),
    ],
)
def test_f09_a_tier_that_fails_is_none(faults: FaultSettings) -> None:
    inner = Paced(Clock(50.0), 0.01, 1e9)
    assert measure_tier(FaultyTier(inner, faults), MIB, 3, inner.clock) is None
    if not faults.error_rate:
        assert inner.records == {}


def test_a_tier_that_cannot_delete_is_none() -> None:
    tier = Paced(Clock(50.0), 0.01, 1e9)
    tier.deletes_fail = True
    assert measure_tier(tier, MIB, 3, tier.clock) is None


class Torn(Paced):
    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        raise BadRecord("truncated", "half of it")


def test_a_bad_record_is_none() -> None:
    tier = Torn(Clock(50.0), 0.01, 1e9)
    assert measure_tier(tier, MIB, 3, tier.clock) is None
    assert tier.records == {}


def test_the_cache_is_dropped_before_each_read() -> None:
    tier = Paced(Clock(50.0), 0.01, 1e9)
    dropped: list[tuple[Address, int]] = []
    measure_tier(
        tier, MIB, 2, tier.clock, drop_cache=lambda address: dropped.append((address, len(tier.reads)))
    )
    assert [reads for _, reads in dropped] == [0, 1, 2, 3]
    assert {address for address, _ in dropped} == {tier.headers[0].address}


def test_a_clock_that_stands_still_gives_finite_numbers() -> None:
    tier = Paced(Clock(50.0), 0.0, float("inf"))
    measured = measure_tier(tier, MIB, 2, tier.clock)
    assert measured is not None
    assert all(np.isfinite(measured))
    assert min(measured) > 0


@pytest.mark.parametrize(("nbytes", "repeats"), [(SMALL_BYTES - 1, 3), (MIB, 0)])
def test_nothing_to_measure_with_is_refused(nbytes: int, repeats: int) -> None:
    tier = Paced(Clock(50.0), 0.01, 1e9)
    with pytest.raises(ValueError, match="nothing to measure with"):
        measure_tier(tier, nbytes, repeats, tier.clock)
