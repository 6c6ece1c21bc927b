"""F18: offers sent twice, writes that end too late, two nodes that move the same extent into one bucket."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from samovar.cache_tiers.blocks.extent import Address, Bytes, Clear, Placement
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog.transfers import no_fault
from samovar.cache_tiers.messages import StoreRequest
from samovar.configs.sections import S3TierSettings, TierSettings
from tests.support.amounts import seeds
from tests.support.inside import join_scans, state_of
from tests.support.nodes.node_faults import MemoryTier, SharedBucket
from tests.support.nodes.node_harness import (
    MIB,
    OTHER_TENANT,
    SESSION,
    TENANT,
    Bench,
    Sample,
    bench,
    sample,
)
from tests.support.services.service import until

IN_S3 = Placement(first="s3", write_behind=())
IN_NVME = Placement(first="nvme", write_behind=(), lowest="nvme")
NBYTES = sample(1).record.nbytes


# -- one node ------------------------------------------------------------------------------


def message(node: Bench, wanted: Sample) -> StoreRequest:
    """An offer as it is sent, and as it may be sent again."""
    found = node.look(wanted)
    ticket = node.outbox.put(wanted.record)
    assert ticket is not None
    return StoreRequest(ticket, wanted.header, wanted.record.nbytes, found.incarnation, found.clear_seq)


def told(node: Bench, *offers: StoreRequest) -> tuple[str, ...]:
    outcomes = node.node.offer(offers, node.outbox).outcomes
    node.node.check_integrity()
    return outcomes


def accounted(node: Bench, tier: TierName) -> int:
    return state_of(node.node).catalog.usage(tier).bytes_accounted


def test_f18_an_offer_that_comes_twice_is_called_for_once() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([tier])
    wanted = sample(1, placement=IN_NVME)
    offer = message(node, wanted)
    assert told(node, offer, offer) == ("taken", "refused:busy")
    assert told(node, offer) == ("refused:busy",)
    node.work()
    assert node.called == [offer.ticket]
    assert told(node, offer) == ("held",), "sent again after its commit"
    node.work()
    assert node.called == [offer.ticket]
    assert (tier.bytes_held(), accounted(node, "nvme")) == (NBYTES, NBYTES)
    assert node.load(wanted) is not None


def test_f18_an_offer_sent_again_when_all_is_over_stores_nothing() -> None:
    """What it offered is handed over, and what came of that is evicted: nothing can come of it any more."""
    tier = MemoryTier("nvme", MIB)
    node = bench([tier])
    wanted = sample(1, placement=IN_NVME)
    offer = message(node, wanted)
    assert told(node, offer) == ("taken",)
    node.work()
    state_of(node.node).lost(wanted.header.address, "nvme")
    assert told(node, offer) == ("taken",)
    node.work()
    assert node.node.stats().stores["failed:call"] == 1
    assert (tier.bytes_held(), accounted(node, "nvme")) == (0, 0)
    assert node.look(wanted).spans == ()
    node.node.clear(Clear(TENANT, SESSION))
    assert told(node, offer) == ("refused:tombstone",)
    assert node.store(wanted) == "taken"
    assert node.load(wanted) is not None


def test_f18_a_write_that_ends_after_a_clear_makes_way_for_the_new_one() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], workers=1)
    wanted = sample(1, placement=IN_NVME)
    tier.gate.clear()
    try:
        assert told(node, message(node, wanted)) == ("taken",)
        assert tier.waiting.acquire(timeout=20), "it is being written"
        node.node.clear(Clear(TENANT, SESSION))
        node.node.check_integrity()
        again = message(node, wanted)  # looked up after the clear: it is new
        assert told(node, again) == ("refused:busy",), "the old record would come over it"
        tier.gate.set()
        until("the old one is fenced", lambda: node.node.stats().stores.get("failed:fenced") == 1)
        until("... and gone", lambda: accounted(node, "nvme") == tier.bytes_held() == 0)
        assert told(node, again) == ("taken",)
        until("the new one is there", lambda: node.copies(wanted) == ("nvme",))
        assert node.load(wanted) is not None
        node.node.check_integrity()
    finally:
        tier.gate.set()
        node.node.close()


# -- two nodes, one bucket -----------------------------------------------------------------


class Ingress(MemoryTier):
    """One node's way to a bucket that others use, too, with a gate of its own."""

    def __init__(self, bucket: dict[Address, Bytes]) -> None:
        super().__init__("s3", 16 * MIB)
        self._records = bucket

    def bytes_held(self) -> int:
        return sum(data.nbytes for data in self._records.values())


def ingress_bench(bucket: dict[Address, Bytes], name: str, reach: Callable[[str], None] = no_fault) -> Bench:
    node = bench([Ingress(bucket)], incarnation=name, reach=reach, settings=TierSettings(store_s_max=0.2))
    join_scans(node.node, 20)
    return node


def calm(*nodes: Bench) -> None:
    for node in nodes:
        node.work()
        node.node.tick()
        node.node.check_integrity()
        assert len(state_of(node.node).catalog.transfers) == 0


@pytest.mark.parametrize("state", ["planned", "reserved", "copying", "verified", "committed"])
def test_f18_two_nodes_move_the_same_extent_into_one_bucket(state: str) -> None:
    """The other node's whole move falls between two steps of this one's."""
    bucket: dict[Address, Bytes] = {}
    wanted = sample(1, placement=IN_S3)
    theirs = ingress_bench(bucket, "theirs")
    between: list[str] = []

    def reach(reached: str) -> None:
        if reached == state and not between:
            between.append(theirs.store(wanted))

    ours = ingress_bench(bucket, "ours", reach)
    assert ours.store(wanted) == "taken"
    assert between == ["taken"]
    for node in (ours, theirs):
        assert node.copies(wanted) == ("s3",)
        assert node.load(wanted) is not None
    assert list(bucket) == [wanted.header.address]
    calm(ours, theirs)
    # One node forgets it: the other has a miss, then knows, and neither counts what is not there.
    ours.node.clear(Clear(TENANT, SESSION))
    assert bucket == {}
    assert theirs.load(wanted) is None
    calm(ours, theirs)
    assert accounted(ours, "s3") == accounted(theirs, "s3") == 0
    assert theirs.store(wanted) == "taken"
    assert theirs.load(wanted) is not None
    calm(ours, theirs)


def test_f18_a_write_taken_back_on_one_node_costs_the_other_a_miss_at_most() -> None:
    bucket: dict[Address, Bytes] = {}
    wanted = sample(1, placement=IN_S3)
    ours, theirs = ingress_bench(bucket, "ours"), ingress_bench(bucket, "theirs")
    ingress = ours.tiers["s3"]
    assert isinstance(ingress, Ingress)
    ingress.gate.clear()
    try:
        assert ours.store(wanted) == "taken"  # and ends as a late one: nobody waits for it any more
        assert theirs.store(wanted) == "taken"
        assert theirs.load(wanted) is not None
    finally:
        ingress.gate.set()
    until("the late write is taken back", lambda: len(state_of(ours.node).catalog.transfers) == 0)
    assert accounted(ours, "s3") == 0
    assert bucket == {}, "it took the other's with it"
    assert theirs.load(wanted) is None
    calm(ours, theirs)
    assert accounted(theirs, "s3") == 0
    for node in (theirs, ours):
        assert node.store(wanted) == "taken"
        assert node.load(wanted) is not None
    calm(ours, theirs)


@pytest.mark.parametrize("seed", seeds(6))
def test_f18_nodes_that_share_a_bucket_never_serve_a_wrong_byte(seed: int) -> None:
    """Stores, clears, losses and restarts on either side; in the end both know what is there."""
    rng = random.Random(seed)
    bucket: dict[Address, Bytes] = {}
    samples = [sample(number, session=bytes([number % 3]) * 16, placement=IN_S3) for number in range(5)]
    nodes = [ingress_bench(bucket, f"{side}-0") for side in "ab"]
    hits = 0
    for step in range(80):
        side, wanted = rng.randrange(2), rng.choice(samples)
        node, what = nodes[side], rng.choice("ssslllctr")
        if what == "s":
            assert node.store(wanted) in ("taken", "held")
        elif what == "l":
            loaded = node.load(wanted)
            assert loaded is None or (loaded == wanted.payload).all(), "a wrong byte"
            hits += loaded is not None
        elif what == "c":
            node.node.clear(Clear(TENANT, wanted.header.session))
        elif what == "t":
            node.node.tick()
        else:
            node.node.close()
            nodes[side] = ingress_bench(bucket, f"{side}-{step + 1}")
        for either in nodes:
            either.node.check_integrity()
    assert hits > 5
    for node in nodes:
        for wanted in samples:
            loaded = node.load(wanted)  # whoever finds nothing there forgets it
            assert (loaded is not None) == bool(node.copies(wanted))
        calm(node)
        held = [wanted for wanted in samples if node.copies(wanted)]
        assert accounted(node, "s3") == NBYTES * len(held)
        assert {wanted.header.address for wanted in held} <= set(bucket)


# -- nodes that die, nodes that are new, and clears, against the truth ------------------------------------

BOTH = Placement(first="nvme", write_behind=("s3",))
CLEARERS = (TENANT, OTHER_TENANT)


class Cluster:
    """Nodes with a disk each and one bucket. `may_be_found`: what was stored since it was last cleared.

    As in the service a clear reaches the nodes that live, one after the other; those that are down, and those
    that are new, hear nothing of it.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bucket = SharedBucket(16 * MIB)
        self.samples = [
            sample(number, tenant=CLEARERS[number % 2], session=bytes([number % 4]) * 16, placement=BOTH)
            for number in range(10)
        ]
        self.may_be_found: set[int] = set()
        self.disks = [MemoryTier("nvme", 16 * MIB) for _ in range(3)]
        self.lives = 0
        self.nodes: list[Bench | None] = [self.start(number) for number in range(3)]
        self.hits = 0

    def start(self, number: int) -> Bench:
        self.lives += 1
        s3 = S3TierSettings(rescan_s=60.0)
        node = bench(
            [self.disks[number], SharedBucket(16 * MIB, self.bucket)],
            settings=TierSettings(s3=s3, tombstones_max=6),
            incarnation=f"life {self.lives}",
        )
        join_scans(node.node, 20)
        return node

    def step(self) -> None:
        number, which = self.rng.randrange(3), self.rng.randrange(len(self.samples))
        node, wanted = self.nodes[number], self.samples[which]
        what = self.rng.choice("sssslllcttdu")
        if what == "u" and node is None:
            self.nodes[number] = self.start(number)
        elif node is None:
            return
        elif what == "s":
            self.may_be_found.add(which)
            node.store(wanted)
        elif what == "l":
            self.load(node, which)
        elif what == "c":
            session = wanted.header.session if self.rng.random() < 0.7 else None
            self.clear(wanted.header.tenant, session)
        elif what == "t":
            node.clock.now_s += self.rng.choice([1.0, 61.0])
            node.node.tick()
            join_scans(node.node, 20)
        elif what == "d" and sum(one is not None for one in self.nodes) > 1:
            self.nodes[number] = None  # killed: it closes nothing
            if self.rng.random() < 0.3:
                self.disks[number] = MemoryTier("nvme", 16 * MIB)
        for one in self.nodes:
            if one is not None:
                one.node.check_integrity()

    def load(self, node: Bench, which: int) -> None:
        loaded = node.load(self.samples[which])
        if loaded is not None:
            self.hits += 1
            assert which in self.may_be_found, "it was cleared"
            assert (loaded == self.samples[which].payload).all(), "a wrong byte"

    def clear(self, tenant: bytes, session: bytes | None) -> None:
        for node in self.nodes:
            if node is not None:
                assert node.node.clear(Clear(tenant, session)).unreachable == ()
        for which, wanted in enumerate(self.samples):
            if wanted.header.tenant == tenant and session in (None, wanted.header.session):
                self.may_be_found.discard(which)


@pytest.mark.parametrize("seed", seeds(12))
def test_f18_g12_what_was_cleared_stays_so_whatever_nodes_die_and_come(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(150):
        cluster.step()
    cluster.nodes = [cluster.start(number) for number in range(3)]
    for node in cluster.nodes:
        assert node is not None
        for which in range(len(cluster.samples)):
            cluster.load(node, which)
    assert cluster.hits > 5
