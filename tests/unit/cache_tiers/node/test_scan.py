"""Scans beside a node that answers, and when a shared tier is looked through because a node is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from samovar.cache_tiers.blocks import Address, Clear, Placement, Record, TierError
from samovar.cache_tiers.media import Deadline, Scanned
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.node.scan import AGAIN_S, NODES_MAX, RescanCoalescer
from samovar.configs.sections import TierSettings
from tests.support.inside import join_scans, scans_of, state_of
from tests.support.nodes.node_faults import MemoryTier, SharedBucket
from tests.support.nodes.node_harness import MIB, OTHER_TENANT, SESSION, TENANT, Bench, bench, sample


class SlowDisk(MemoryTier):
    """A disk whose scan waits for each record until it is let on."""

    def __init__(self) -> None:
        super().__init__("nvme", MIB)
        self.steps = threading.Semaphore(0)
        self.seen = threading.Semaphore(0)

    def scan(self) -> Iterator[Scanned]:
        for one in super().scan():
            self.seen.release()
            self.steps.acquire()
            yield one


def state(house: Bench) -> str:
    return next(tier.state for tier in house.node.stats().tiers if tier.name == "nvme")


@pytest.fixture
def disk() -> SlowDisk:
    """It holds two records of one tenant and two of another."""
    disk = SlowDisk()
    house = bench([disk])
    for number in range(4):
        assert house.store(sample(number, tenant=TENANT if number < 2 else OTHER_TENANT)) == "taken"
    house.node.close()
    return disk


def test_a_node_answers_before_a_large_disk_is_known(disk: SlowDisk) -> None:
    house = bench([HeapTier(MIB), disk], scan_s_max=0.0)
    disk.seen.acquire()
    assert state(house) != "up"
    new = sample(9)
    assert house.store(new) == "taken"
    assert [span.tier for span in house.look(new).spans] == ["cpu"]
    assert not house.look(sample(0)).spans
    # Of a tenant that is cleared meanwhile nothing is taken in, scanned already or not.
    disk.steps.release()
    disk.seen.acquire()
    house.node.clear(Clear(TENANT))
    disk.steps.release(3)
    join_scans(house.node, 30.0)
    house.node.check_integrity()
    assert state(house) == "up"
    assert not house.look(sample(0)).spans
    assert not house.look(sample(1)).spans
    for number in (2, 3):
        kept = sample(number, tenant=OTHER_TENANT)
        assert [span.tier for span in house.look(kept).spans] == ["nvme"]
    house.node.close()


def test_a_scan_ends_with_its_node(disk: SlowDisk) -> None:
    house = bench([HeapTier(MIB), disk], scan_s_max=0.0)
    disk.seen.acquire()
    disk.steps.release(4)
    house.node.close()
    join_scans(house.node, 30.0)
    assert not any(thread.name == "scan-nvme" for thread in threading.enumerate())


class Sick(MemoryTier):
    """Its first look fails behind the first record."""

    is_sick = True

    def scan(self) -> Iterator[Scanned]:
        for scanned in super().scan():
            yield scanned
            if self.is_sick:
                self.is_sick = False
                raise TierError("it is sick")


def test_what_has_gone_between_two_looks_is_not_held() -> None:
    """Found by the world (377000000208): a record that the second look put aside stayed in the books."""
    disk = Sick("nvme", MIB)
    samples = [sample(number, placement=Placement("nvme", ())) for number in range(2)]
    for wanted in samples:
        disk.put(wanted.header.address, Record(wanted.record), deadline=Deadline(1.0))
    node = bench([disk])
    assert [node.copies(wanted) for wanted in samples] == [("nvme",), ()]
    disk.delete(samples[0].header.address)
    node.clock.now_s += TierSettings().breaker_open_s + 1
    node.node.tick()
    join_scans(node.node, 20)
    assert [node.copies(wanted) for wanted in samples] == [(), ("nvme",)]
    assert state_of(node.node).catalog.usage("nvme").bytes_accounted == disk.bytes_held()
    node.node.check_integrity()


class SlowBucket(SharedBucket):
    """Its first look waits for `gate`."""

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        self._pass()
        return super().rescan(is_known)


@pytest.mark.parametrize("answers", [True, False])
def test_what_a_bucket_says_was_erased_meanwhile_is_heard_before_a_disk_is_served(answers: bool) -> None:
    """Found by the world (377000000846): a node that had left came back with its disk."""
    disk, bucket = MemoryTier("nvme", MIB), SlowBucket(MIB)
    erased, kept = sample(1, placement=Placement("nvme", ())), sample(2, tenant=OTHER_TENANT)
    for wanted in (erased, kept):
        disk.put(wanted.header.address, Record(wanted.record), deadline=Deadline(1.0))
    bucket.mark_cleared([Clear(TENANT, SESSION)], Deadline(1.0))
    bucket.gate.clear()
    bucket.down = not answers
    house = bench([HeapTier(MIB), disk, bucket], scan_s_max=0.0)
    assert bucket.waiting.acquire(timeout=20)
    assert state(house) != "up"
    assert house.tiers_of(erased) == []
    new = sample(9)
    assert house.store(new) == "taken", "main memory has nothing that could be old"
    bucket.gate.set()
    join_scans(house.node, 20)
    assert state(house) == "up"
    assert house.tiers_of(kept) == ["nvme"]
    assert (house.tiers_of(erased) == []) == answers, "a bucket that is down keeps no disk from serving"
    house.node.close()


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []
        self.works = True
        self.begun = self.ended = 0
        self.is_running = False
        self.meanwhile: Callable[[], object] = lambda: None
        self.looks = RescanCoalescer(self._look, lambda: (self.begun, self.ended), lambda: self.now_s)

    def _look(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.begun += not self.is_running
        number, self.is_running = self.begun, False
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if self.works:
            self.ended = max(self.ended, number)

    def after(self, **silent: bool) -> bool:
        done = self.looks.after(silent, 0.5)
        self.looks.check_integrity()
        return done


def test_one_look_is_enough_for_a_node_that_is_lost() -> None:
    world = World()
    assert world.after(a=True)
    assert not world.after(a=True)
    assert world.waits == [0.5]
    assert world.after(a=True, b=True)  # another one


def test_a_look_that_saw_not_all_is_taken_again() -> None:
    world = World()
    world.works = False
    assert not world.after(a=True)
    world.works = True
    assert world.after(a=True)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_look_that_takes_longer_than_a_request_waits_is_not_taken_again(is_lost: bool) -> None:
    world = World()
    world.works = False
    assert not world.after(a=is_lost)
    world.ended = world.begun  # a while later
    assert not world.after(a=is_lost)
    assert not world.after(a=is_lost)
    assert world.waits == [0.5]


def test_a_look_that_ran_as_the_node_was_lost_has_not_seen_what_it_put_there_last() -> None:
    world = World()
    world.begun, world.is_running = 1, True
    assert not world.after(a=True)
    assert world.after(a=True)
    assert not world.after(a=True)
    assert world.waits == [0.5, 0.5]


def test_a_look_from_before_a_silent_node_was_lost_does_not_count_behind_it() -> None:
    world = World()
    world.works = False
    assert not world.after(a=False)
    world.meanwhile = lambda: setattr(world, "ended", 1)  # the first look, while the second is waited for
    assert not world.after(a=True)
    world.works = True
    assert world.after(a=True)


def test_listings_are_numbered_and_those_that_fail_are_not_taken_in() -> None:
    bucket = SlowBucket(MIB)
    house = bench([bucket])
    join_scans(house.node, 20)
    scans = scans_of(house.node)
    assert scans.listings() == (1, 1)
    bucket.down = True
    scans.look(20.0)
    assert scans.listings() == (2, 1)
    bucket.down = False
    bucket.gate.clear()
    scans.look(0.0)
    assert bucket.waiting.acquire(timeout=20)
    scans.look(0.0)
    assert scans.listings() == (3, 1), "one at a time"
    bucket.gate.set()
    join_scans(house.node, 20)
    assert scans.listings() == (3, 3)
    house.node.close()


def test_a_node_that_only_does_not_answer_is_looked_for_now_and_then() -> None:
    world = World()
    assert world.after(a=False)
    assert not world.after(a=False)
    world.now_s += AGAIN_S
    assert world.after(a=False)
    assert world.after(a=True)  # now it is lost: what it put there last
    world.now_s += AGAIN_S
    assert not world.after(a=False)


def test_two_lookups_may_see_one_node_before_and_behind_its_loss() -> None:
    world = World()
    world.meanwhile = lambda: world.after(a=True)
    assert world.after(a=False)
    world.now_s += AGAIN_S
    assert not world.after(a=False), "it is known as lost"


def test_nobody_silent_is_no_reason() -> None:
    world = World()
    assert not world.after()
    assert world.waits == []


def test_what_is_remembered_is_bounded() -> None:
    world = World()
    for number in range(NODES_MAX + 10):
        world.looks.after({f"node-{number}": True}, 0.5)
    world.looks.check_integrity()
    assert not world.after(**{f"node-{NODES_MAX + 9}": True})
    assert world.after(**{"node-0": True})  # forgotten
