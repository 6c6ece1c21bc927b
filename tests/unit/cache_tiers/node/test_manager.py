"""A node without faults: store, find, fetch, move, clear, restart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.blocks.record import header_bytes
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.messages import BlockRange, Fetched, FetchFailed, LoadReport, Lookup
from samovar.configs.sections import TierSettings
from tests.support.inside import state_of
from tests.support.nodes.node_faults import MemoryTier
from tests.support.nodes.node_harness import (
    MIB,
    OTHER_TENANT,
    SESSION,
    SHAPE,
    TENANT,
    Sample,
    bench,
    heap_bench,
    nvme,
    sample,
)
from tests.support.services.service import until

BEHIND = Placement(first="cpu", write_behind=("nvme",))


def two_tiers(path: Path) -> list[HeapTier | NvmeTier]:
    return [HeapTier(4 * MIB), nvme(path)]


def test_what_is_stored_is_found_and_fetched() -> None:
    node = heap_bench()
    wanted = sample(1)
    assert node.look(wanted).spans == ()
    assert node.store(wanted) == "taken"
    (span,) = node.look(wanted).spans
    assert (span.tier, span.first, span.blocks) == ("cpu", 0, 3)
    loaded = node.load(wanted)
    assert loaded is not None
    assert np.array_equal(loaded, wanted.payload)
    assert node.store(wanted) == "held"
    assert node.outbox.nbytes == 0


def test_a_copy_goes_behind_and_a_part_of_it_can_be_fetched(tmp_path: Path) -> None:
    node = bench([*two_tiers(tmp_path)])
    wanted = sample(1, blocks=4, placement=BEHIND)
    node.store(wanted)
    assert node.node.stats().moves["cpu>nvme:done"] == 1
    span = node.look(wanted).spans[0]
    part = BlockRange(span.extent_id, span.tenant, 1, 1, 1, "nvme", 0)
    fetched = node.fetch(wanted, part)
    assert isinstance(fetched, Fetched)
    assert fetched.first == 1
    head = header_bytes(4, SHAPE.layers)
    start = head + SHAPE.block_bytes
    assert fetched.data is not None
    assert np.array_equal(fetched.data[:head], wanted.record[:head])
    assert np.array_equal(fetched.data[head:], wanted.record[start : start + SHAPE.block_bytes])
    assert fetched.tier == "nvme"


def test_most_of_an_extent_brings_all_of_it_up(tmp_path: Path) -> None:
    """A turn's tail is stored anew by the next turn, so a returning one never asks for the whole extent."""
    node = bench([*two_tiers(tmp_path)])
    wanted = sample(1, blocks=4, placement=BEHIND)
    node.store(wanted)
    node.node.close()
    again = bench([*two_tiers(tmp_path)], incarnation="second")
    span = again.look(wanted).spans[0]
    fetched = again.fetch(wanted, BlockRange(span.extent_id, span.tenant, 0, 0, 3, "nvme", 0))
    assert isinstance(fetched, Fetched)
    assert fetched.tier == "nvme"
    assert again.tiers_of(wanted) == ["cpu"]


def test_a_restart_finds_the_files_and_promotes_what_is_read_whole(tmp_path: Path) -> None:
    node = bench([*two_tiers(tmp_path)])
    wanted = sample(1, placement=BEHIND)
    node.store(wanted)
    node.node.close()
    again = bench([*two_tiers(tmp_path)], incarnation="second")
    assert again.tiers_of(wanted) == ["nvme"]
    assert again.load(wanted) is not None
    assert again.tiers_of(wanted) == ["cpu"]
    loaded = again.load(wanted)
    assert loaded is not None
    assert np.array_equal(loaded, wanted.payload)
    again.node.check_integrity()
    again.node.close()


def test_what_was_promised_to_the_actor_before_is_not_taken(tmp_path: Path) -> None:
    node = heap_bench()
    again = heap_bench(incarnation="second")
    assert again.offer(sample(1), node.look(sample(1))) == "refused:incarnation"
    assert again.called == []


@pytest.mark.guarantee("G10")
def test_more_stores_than_may_wait_are_refused() -> None:
    node = heap_bench(settings=TierSettings(store_queue_max=2))
    assert [node.offer(sample(n)) for n in range(3)] == ["taken", "taken", "refused:queue"]
    assert node.offer(sample(0)) == "refused:queue"
    node.work()
    assert node.offer(sample(2)) == "taken"


def test_the_same_extent_is_taken_once() -> None:
    node = heap_bench()
    assert [node.offer(sample(1)), node.offer(sample(1))] == ["taken", "refused:busy"]
    node.work()
    assert len(node.called) == 1


def test_an_offer_of_another_size_than_its_header_is_refused() -> None:
    node = heap_bench()
    wanted = sample(1)
    assert node.offer(Sample(wanted.header, wanted.record[:-1])) == "refused:size"


@pytest.mark.parametrize("spoil", ["bytes", "header", "other"])
def test_g5_a_record_that_is_not_what_was_offered_is_not_stored(spoil: str) -> None:
    node = heap_bench()
    wanted = sample(1)
    record = wanted.record.copy()
    if spoil == "bytes":
        record[-1] ^= 1
    elif spoil == "header":
        record = sample(1, session=b"another!" * 2).record
    else:
        record = sample(2).record
    assert node.store(Sample(wanted.header, record)) == "taken"
    assert node.look(wanted).spans == ()
    assert node.look(sample(2)).spans == ()
    assert node.tiers["cpu"].bytes_held() == 0


def test_a_tier_that_is_too_full_gives_up_its_oldest() -> None:
    nbytes = sample(0).record.nbytes
    node = heap_bench(bytes_max=3 * nbytes)
    for number in range(6):
        node.clock.now_s += 1
        assert node.store(sample(number, placement=Placement(write_behind=(), min_ttl_s=0.0))) == "taken"
        assert node.tiers["cpu"].bytes_held() <= 3 * nbytes
    held = [number for number in range(6) if node.look(sample(number)).spans]
    assert 5 in held
    assert 0 not in held
    assert node.node.stats().tiers[0].evicted_extents >= 3


def test_what_main_memory_has_no_room_for_sinks(tmp_path: Path) -> None:
    nbytes = sample(0).record.nbytes
    cpu = HeapTier(10 * nbytes)
    node = bench([cpu, nvme(tmp_path)], bytes_max=10 * nbytes)
    for number in range(10):
        node.clock.now_s += 1
        node.store(sample(number))
    assert cpu.bytes_held() == 10 * nbytes
    node.node.tick()
    node.work()
    stats = node.node.stats()
    assert stats.moves["cpu>nvme:dropping"] >= 1
    assert cpu.bytes_held() < 10 * nbytes
    assert node.tiers_of(sample(0)) == ["nvme"]
    assert all(node.look(sample(number)).spans for number in range(10))


def test_flush_writes_down_what_only_memory_holds(tmp_path: Path) -> None:
    node = bench([*two_tiers(tmp_path)])
    kept = sample(0, placement=Placement(write_behind=(), lowest="cpu"))
    node.store(kept)
    for number in range(1, 4):
        node.store(sample(number))
    assert node.node.flush(5.0) == {"written": 3, "failed": 0, "left": 0}
    assert node.node.flush(5.0) == {"written": 0, "failed": 0, "left": 0}
    node.node.close()
    again = bench([nvme(tmp_path)])
    assert [bool(again.look(sample(number)).spans) for number in range(4)] == [False, True, True, True]
    again.node.close()


def test_flush_without_time_leaves_it(tmp_path: Path) -> None:
    node = bench([*two_tiers(tmp_path)])
    node.store(sample(1))
    assert node.node.flush(0.0) == {"written": 0, "failed": 0, "left": 1}
    node.node.close()


def test_g12_clear_of_a_session_and_of_a_tenant(tmp_path: Path) -> None:
    node = bench([*two_tiers(tmp_path)])
    other = b"session2" * 2
    mine, hers = sample(1, placement=BEHIND), sample(2, session=other, placement=BEHIND)
    foreign = sample(3, tenant=OTHER_TENANT, placement=BEHIND)
    for wanted in (mine, hers, foreign):
        node.store(wanted)
    cleared = node.node.clear(Clear(TENANT, SESSION))
    assert (cleared.extents, cleared.unreachable) == (1, ())
    assert [node.tiers_of(wanted) for wanted in (mine, hers, foreign)] == [[], ["cpu"], ["cpu"]]
    assert node.node.clear(Clear(TENANT)).extents == 1
    assert [node.tiers_of(wanted) for wanted in (mine, hers, foreign)] == [[], [], ["cpu"]]
    left = [scanned.header.tenant for scanned in node.tiers["nvme"].scan()]
    assert left == [OTHER_TENANT]
    node.node.close()


def test_g2_a_tenant_never_finds_another_tenants(tmp_path: Path) -> None:
    node = heap_bench()
    mine = sample(1)
    node.store(mine)
    (span,) = node.look(mine).spans
    theirs = sample(1, tenant=OTHER_TENANT)
    assert node.look(theirs).spans == ()
    assert isinstance(node.fetch(theirs, span), FetchFailed)


def test_what_nobody_uses_expires() -> None:
    node = heap_bench()
    node.store(sample(1, placement=Placement(write_behind=(), ttl_s=100)))
    node.clock.now_s += 99
    node.node.tick()
    assert node.tiers["cpu"].bytes_held() > 0
    node.clock.now_s += 2
    node.node.tick()
    assert node.tiers["cpu"].bytes_held() == 0
    node.node.check_integrity()


def test_a_placement_keeps_blocks_out_of_lower_tiers(tmp_path: Path) -> None:
    node = bench([nvme(tmp_path)])
    assert node.offer(sample(1, placement=Placement(write_behind=(), lowest="cpu"))) == "refused:down"
    node.node.close()


def test_the_next_tier_takes_what_the_first_cannot(tmp_path: Path) -> None:
    node = bench([nvme(tmp_path)])
    assert node.store(sample(1)) == "taken"
    assert node.tiers_of(sample(1)) == ["nvme"]
    node.node.close()


def test_loads_that_are_reported_move_the_price() -> None:
    node = heap_bench()
    before = node.look(sample(1)).prices["cpu"]
    for _ in range(20):
        node.node.report(loads=[LoadReport("cpu", 1000, 1.0)])
    assert node.look(sample(1)).prices["cpu"].latency_s > before.latency_s


def test_a_lookup_of_no_keys_is_refused() -> None:
    node, header = heap_bench(), sample(1).header
    with pytest.raises(ValueError, match="key"):
        node.node.lookup(Lookup(header.namespace, header.keys[0][:-1], TENANT, SESSION))


def test_what_sinks_from_a_tier_makes_room_in_that_tier(tmp_path: Path) -> None:
    """An extent that lies in `cpu` and `nvme`: `nvme` is too full, so it is the file that goes."""
    bottom = HeapTier(4 * MIB)
    bottom.name = "s3"
    node = bench([*two_tiers(tmp_path), bottom])
    until("the lowest tier is looked through", lambda: state_of(node.node).guards["s3"].ready)
    wanted = sample(1, placement=BEHIND)
    node.store(wanted)
    assert set(node.copies(wanted)) == {"cpu", "nvme"}
    address = wanted.header.address
    assert node.node._stores.copy(address, "s3", sinks_from="nvme")
    while node.node.work():
        pass
    assert set(node.copies(wanted)) == {"cpu", "s3"}
    node.node.check_integrity()


@pytest.mark.parametrize(("room", "reads"), [(4 * MIB, 1), (1, 3)])
def test_fetches_of_the_same_record_at_once_read_it_once(room: int, reads: int) -> None:
    """Sub-agents begin together on several replicas; without room in main memory everyone reads it."""
    below = MemoryTier("nvme", 4 * MIB)
    one = bench([HeapTier(4 * MIB), below], budgets={"cpu": room, "nvme": 4 * MIB})
    wanted = sample(1, placement=Placement(first="nvme", write_behind=()))
    assert one.store(wanted) == "taken"
    (span,) = one.look(wanted).spans
    counted: list[int] = []
    read = below.read

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return read(*args, **kwargs)

    below.read = counting  # type: ignore[method-assign]
    below.gate.clear()
    with ThreadPoolExecutor(3) as threads:
        fetches = [threads.submit(one.fetch, wanted, span) for _ in range(3)]
        assert below.waiting.acquire(timeout=30)
        until("all have asked", lambda: state_of(one.node).fetches == 3)
        below.gate.set()
        answers = [fetch.result(30) for fetch in fetches]
    assert all(isinstance(answer, Fetched) for answer in answers)
    assert len(counted) == reads
    one.node.check_integrity()
