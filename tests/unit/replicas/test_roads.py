"""What a start measures of loads is their whole way: found, fetched, verified, copied into pages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks.extent import Address, Bytes, Clear
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline, Tier
from samovar.cache_tiers.node.transfer import SAMPLES_TENANT
from samovar.cache_tiers.pricing.meters import TierPrice
from samovar.configs.sections import MIB, TierSettings
from samovar.replicas.kv.block_io import PageIo, Ticket
from samovar.replicas.kv.copy_device import CopyEvent, HostDevice
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.kv.page_pool import TRASH_PAGE
from samovar.replicas.measurement_cache import NotMeasured
from samovar.replicas.offload.tier_client import TierAccess, WorkerPools
from samovar.replicas.start.measure import ROAD_BYTES, Roads
from tests.support.clock import Clock
from tests.support.engines.tier_engines import InlineExecutor, make_node, nvme
from tests.support.inside import guards_of
from tests.support.nodes.encrypted import encrypted, key_file

GEOMETRY = KvGeometry(
    layers=4, block_tokens=16, kv_heads=4, head_dim=64, dtype=torch.float32, groups=1, is_int8=False
)
EXTENTS = 4


class Timed(HeapTier):
    """Main memory whose reads take their time, by `clock`, which a copy into pages lets pass as well."""

    def __init__(self, clock: Clock, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(256 * MIB)
        self.clock, self.latency_s, self.bytes_per_s = clock, latency_s, bytes_per_s
        self.is_bad = False

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        self.clock.now_s += self.latency_s + nbytes / self.bytes_per_s
        data = super().read(address, start, nbytes, deadline=deadline)
        if self.is_bad:
            data = data.copy()
            data[-1] ^= 1
        return data


class SlowCopies(PageIo):
    def __init__(self, pool: KvPool, clock: Clock, bytes_per_s: float) -> None:
        super().__init__(HostDevice(pool.page_bytes.numpy()), pool.geometry)
        self.clock, self.bytes_per_s = clock, bytes_per_s

    def begin_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        self.clock.now_s += payload.nbytes / self.bytes_per_s
        return super().begin_in(payload, pages, read)


def roads_over(
    tiers: dict[TierName, Tier], clock: Clock, *, pages: int = 1100, copies_bytes_per_s: float = 1e12
) -> tuple[Roads, TierAccess, KvPool]:
    settings = TierSettings()
    outbox = StagingBuffer(settings.staged_bytes_max, keep_s=600.0, clock=clock)
    node = make_node(tiers, outbox, settings, clock)
    access = TierAccess(node, outbox, WorkerPools(*(InlineExecutor() for _ in range(7))), clock)
    pool = KvPool(GEOMETRY, pages, torch.device("cpu"))
    io = SlowCopies(pool, clock, copies_bytes_per_s)
    roads = Roads(access, io, GEOMETRY.record_shape, pages=pages, extents=EXTENTS, clock=clock)
    return roads, access, pool


@pytest.mark.parametrize(("reads", "copies"), [(2e9, 1e12), (1e12, 2e9), (4e9, 4e9), (0.5e9, 1e9)])
def test_the_price_is_of_the_whole_road(reads: float, copies: float) -> None:
    clock = Clock()
    roads, _, pool = roads_over({"cpu": Timed(clock, 1e-3, reads)}, clock, copies_bytes_per_s=copies)
    price = roads.measure("cpu")
    byte_s = 1 / reads + 1 / copies
    assert price.bytes_per_s == pytest.approx(1 / byte_s, rel=0.05)
    assert price.latency_s == pytest.approx(EXTENTS * 1e-3, rel=0.3)  # one after the other here
    assert not pool.data.any()


def test_nothing_of_it_stays_and_nothing_is_evicted_for_it(tmp_path: Path) -> None:
    clock = Clock()
    tiers: dict[TierName, Tier] = {"cpu": Timed(clock, 1e-3, 2e9), "nvme": nvme(tmp_path)}
    roads, access, _ = roads_over(tiers, clock)
    for tier in ("cpu", "nvme"):
        roads.measure(tier)
    assert [one.bytes_held() for one in tiers.values()] == [0, 0]
    stats = access.link.stats()
    assert stats is not None
    assert {(row.evicted_extents, row.hits_blocks) for row in stats.tiers} == {(0, 0)}


def test_a_tier_whose_records_are_encrypted_has_a_price(tmp_path: Path) -> None:
    """Also where keys of samples were destroyed before: what is made after that is nobody's erased record."""
    clock, keys = Clock(), key_file(tmp_path, now_s=time.time())
    for _ in range(2):
        tier = encrypted(tmp_path, keys)
        roads, _, _ = roads_over({"nvme": tier}, clock)
        assert 0 < roads.measure("nvme").bytes_per_s < math.inf
        assert tier.bytes_held() == 0
        tier.close()
        keys.destroy([Clear(SAMPLES_TENANT, SAMPLES_TENANT)])


def test_a_tier_without_room_or_with_bad_records_has_no_price() -> None:
    clock = Clock()
    tier = Timed(clock, 1e-3, 2e9)
    roads, _, _ = roads_over({"cpu": tier}, clock, pages=8)
    with pytest.raises(NotMeasured):
        roads.measure("cpu")
    roads, _, _ = roads_over({"cpu": tier}, clock)
    tier.is_bad = True
    with pytest.raises(NotMeasured):
        roads.measure("cpu")
    assert tier.bytes_held() == 0


def test_a_node_takes_it_over_until_a_load_has_said_more() -> None:
    clock = Clock()
    node = make_node(
        {"cpu": HeapTier(MIB)}, StagingBuffer(MIB, keep_s=1.0, clock=clock), TierSettings(), clock
    )
    guards_of(node)["cpu"]._meter._proved_at_s = None
    node.measured({"cpu": TierPrice(0.5, 1e6), "nvme": TierPrice(1.0, 1.0)})
    assert guards_of(node)["cpu"].price() == TierPrice(0.5, pytest.approx(1e6), is_proved=False)


def test_where_larger_samples_find_no_room_smaller_ones_are_the_price() -> None:
    """A quick tier that is small, or nearly full: 64 MiB of samples do not fit."""
    clock = Clock()
    tier = Timed(clock, 1e-5, 20e9)
    roads, access, _ = roads_over({"cpu": tier}, clock)
    guards_of(access.link)["cpu"].bytes_max = 40 * MIB
    assert roads.measure("cpu").bytes_per_s == pytest.approx(20e9, rel=0.1)
    assert tier.bytes_held() == 0


def test_memory_that_runs_out_costs_the_measurement_and_not_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object) -> Ticket:
        raise MemoryError("16 MiB of pinned memory")

    clock = Clock()
    tier = Timed(clock, 1e-3, 2e9)
    roads, _, _ = roads_over({"cpu": tier}, clock)
    monkeypatch.setattr(SlowCopies, "begin_in", no_memory)
    with pytest.raises(NotMeasured):
        roads.measure("cpu")
    assert tier.bytes_held() == 0


def test_pages_that_no_sample_needed_are_not_touched() -> None:
    """The system has handed out no memory for them; the larger samples were of a quicker road."""
    clock = Clock()
    roads, _, pool = roads_over({"cpu": Timed(clock, 1e-3, 0.5e9)}, clock)
    pool.page_bytes.fill_(1)
    roads.measure("cpu")
    loaded = EXTENTS * (ROAD_BYTES // (EXTENTS * GEOMETRY.block_bytes))
    assert loaded < EXTENTS * roads.blocks_max
    first = TRASH_PAGE + 1
    assert not pool.page_bytes[first : first + loaded].any()
    assert (pool.page_bytes[first + loaded :] == 1).all()


def test_what_a_road_without_a_price_has_loaded_is_no_number_in_a_page() -> None:
    """Small samples find room, larger ones do not: of random bytes some are NaN, and 0 times NaN is NaN."""
    clock = Clock()
    roads, access, pool = roads_over({"cpu": Timed(clock, 1e-3, 2e9)}, clock)
    guards_of(access.link)["cpu"].bytes_max = 2 * EXTENTS * GEOMETRY.block_bytes
    with pytest.raises(NotMeasured):
        roads.measure("cpu")
    assert not pool.page_bytes.any()
