"""F28: S3 is unreachable from one of two nodes. Sessions go on, nothing is wrong, in the end both agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.s3_client import S3Keys
from samovar.cache_tiers.messages import TierStats
from samovar.configs.sections import S3TierSettings, TierSettings
from tests.support.constants import tuned
from tests.support.inside import clears_of, join_scans, state_of
from tests.support.nodes.node_harness import MIB, TENANT, Bench, Sample, bench, nvme, sample
from tests.support.services.rclone import plain_client, s3_server
from tests.support.services.tcp_proxy import Cut, TcpProxy, tcp_proxy

EVERYWHERE = Placement(first="cpu", write_behind=("nvme", "s3"))
SETTINGS = tuned(TierSettings(breaker_open_s=2.0, load_s_max=10.0, store_s_max=10.0), breaker_failures=2)
NOW_UNIX_S = 4e9  # later than any server's clock


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3TierSettings]:
    with s3_server(tmp_path_factory.mktemp("s3")) as settings:
        yield settings.model_copy(update={"read_s_max": 2.0, "connect_s": 2.0, "attempts_max": 1})


def told(number: int) -> Sample:
    """What a session of its own stores."""
    return sample(number, session=number.to_bytes(16, "little"), placement=EVERYWHERE)


class World:
    """Two nodes with memory and a disk each, and one bucket; `theirs` reaches it through the proxy."""

    def __init__(self, folder: Path, settings: S3TierSettings, proxy: TcpProxy) -> None:
        self.folder, self.settings, self.proxy = folder, settings, proxy
        self.nodes: list[Bench] = []
        self.ours = self.start("ours", settings)
        self.theirs = self.start("theirs", self.by_proxy)

    @property
    def by_proxy(self) -> S3TierSettings:
        return self.settings.model_copy(update={"endpoint": f"http://127.0.0.1:{self.proxy.port}"})

    def start(self, name: str, settings: S3TierSettings, incarnation: str = "") -> Bench:
        (self.folder / name).mkdir(exist_ok=True)
        node = bench(
            [HeapTier(4 * MIB), nvme(self.folder / name / "kv"), S3Tier(settings, lambda: NOW_UNIX_S)],
            settings=SETTINGS,
            pending_path=self.folder / name / "owed.json",
            incarnation=incarnation or name,
        )
        join_scans(node.node, 30)
        self.nodes.append(node)
        return node

    def bucket(self) -> set[str]:
        """Keys of all records in it, seen from nowhere."""
        client = plain_client(self.settings)
        try:
            records = S3Keys(self.settings.prefix).records
            listed = client.list_objects_v2(Bucket=str(self.settings.bucket), Prefix=records)
            return {item["Key"] for item in listed.get("Contents", [])}
        finally:
            client.close()

    def keys(self, node: Bench, samples: list[Sample]) -> set[str]:
        """What a node believes to be in the bucket, of these."""
        name = S3Keys(self.settings.prefix).record
        return {name(one.header.address) for one in samples if "s3" in node.copies(one)}

    def close(self) -> None:
        for node in self.nodes:
            node.node.check_integrity()
            node.node.close()


def s3_row(node: Bench) -> TierStats:
    return next(row for row in node.node.stats().tiers if row.name == "s3")


def loads(node: Bench, wanted: Sample) -> bool:
    """False: a miss. What comes is right."""
    payload = node.load(wanted)
    node.work()
    assert payload is None or np.array_equal(payload, wanted.payload), "a wrong byte"
    return payload is not None


def forget(node: Bench, wanted: Sample, *tiers: TierName) -> None:
    for tier in tiers:
        state_of(node.node).lost(wanted.header.address, tier)
    node.node.check_integrity()


def tick(node: Bench) -> None:
    """After so long that what failed is tried again."""
    for _ in range(2):
        node.clock.now_s += 60.0
        node.node.tick()
        join_scans(node.node, 30)
        clears_of(node.node).join(30)
        node.work()


@pytest.mark.parametrize("how", ["refused", "silent", "deaf"])
def test_f28_s3_unreachable_from_one_node(tmp_path: Path, server: S3TierSettings, how: Cut) -> None:
    settings = server.model_copy(update={"prefix": f"f28-{how}"})
    with tcp_proxy(urlsplit(str(settings.endpoint)).port or 80) as proxy:
        world = World(tmp_path, settings, proxy)
        try:
            cut_and_heal(world, how)
        finally:
            proxy.cut(None)
            world.close()


def cut_and_heal(world: World, how: Cut) -> None:
    ours, theirs, proxy = world.ours, world.theirs, world.proxy
    mine, his, common, forgotten = told(1), told(2), told(3), told(4)
    for node, samples in ((ours, [mine, common]), (theirs, [his, common, forgotten])):
        for wanted in samples:
            assert node.store(wanted) == "taken"
            assert node.copies(wanted) == ("cpu", "nvme", "s3")
    assert len(world.bucket()) == 4

    proxy.cut(how)
    late, his_late = [told(number) for number in range(10, 13)], [told(number) for number in range(20, 27)]
    for node, samples in ((ours, late), (theirs, his_late[:4])):
        for wanted in samples:
            assert node.store(wanted) == "taken"
            assert loads(node, wanted)
    for node, wanted in ((ours, mine), (theirs, his), (ours, common), (theirs, common)):
        assert loads(node, wanted)
    assert (s3_row(ours).state, s3_row(ours).breaker_opened) == ("up", 0)
    assert (s3_row(theirs).state, s3_row(theirs).breaker_opened) == ("open", 1)
    # From here on nobody waits for it any more: it is not even asked.
    asked = proxy.accepted
    for wanted in (*his_late[4:], late[0]):
        assert theirs.store(wanted) == "taken"
        assert theirs.copies(wanted) == ("cpu", "nvme")
        assert loads(theirs, wanted)
    # What only S3 has is a miss there. The other node forgets what both had, and this one cannot know.
    forget(theirs, his, "cpu", "nvme")
    assert not loads(theirs, his)
    forget(ours, common, "s3")
    # A clear is told to both: the one that cannot do all of it says so.
    clear = Clear(TENANT, forgotten.header.session)
    assert ours.node.clear(clear).unreachable == ()
    assert theirs.node.clear(clear).unreachable == ("s3",)
    assert not loads(theirs, forgotten)
    assert proxy.accepted == asked

    proxy.cut(None)
    for node in (ours, theirs):
        tick(node)
    assert s3_row(theirs).state == "up"
    assert s3_row(ours).breaker_opened == 0
    everything = [mine, his, common, forgotten, *late, *his_late]
    known = world.keys(ours, everything) | world.keys(theirs, everything)
    assert world.bucket() <= known, "an object that nobody knows of: its writer never heard that it was put"
    assert loads(theirs, his)
    forget(theirs, common, "cpu", "nvme")
    assert not loads(theirs, common), "it is gone, and that is found out"
    assert theirs.copies(common) == ()
    for wanted in (*his_late, late[0]):  # the sessions' next turns: what could not be copied is copied now
        assert theirs.offer(wanted) == "held"
        theirs.work()
        assert theirs.copies(wanted) == ("cpu", "nvme", "s3")
    assert world.keys(ours, everything) | world.keys(theirs, everything) == world.bucket(), "not agreed"
    for node in (ours, theirs):
        assert len(state_of(node.node).pending) == 0
        assert not loads(node, forgotten)
    # Whoever starts now finds all of both, from S3 alone, and nothing that was forgotten.
    third = world.start("third", world.by_proxy)
    for wanted in (mine, his, *late, *his_late):
        assert third.tiers_of(wanted) == ["s3"]
        assert loads(third, wanted)
    assert third.look(forgotten).spans == ()
