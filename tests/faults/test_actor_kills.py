"""The real tier actor in a real Ray: killed in each state of a move; replicas and owners that die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectLostError, RayActorError

from samovar.cache_tiers.actors.staging import StagingBuffer, open_outbox
from samovar.cache_tiers.actors.tier import actor_name, tier_actor
from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import BlockShape, Bytes, Clear, Placement
from samovar.cache_tiers.blocks.record import BadRecord, Record, SumsSetup, TierError, TierFull, TierMiss
from samovar.cache_tiers.media.memory import ObjectStoreTier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.messages import BadReport, Fetch, FetchFailed, LoadReport, Lookup, StoreRequest
from samovar.cache_tiers.node.build import build_tiers
from samovar.configs.sections import MIB, CpuTierSettings, FaultsSettings, NvmeTierSettings, TierSettings
from samovar.configs.settings import Settings
from tests.support.nodes.node_harness import SESSION, TENANT, Sample, sample
from tests.support.ray_start import start_ray, start_small_ray

ROOT = Path(__file__).resolve().parents[2]
SHAPE = BlockShape(layers=2, layer_bytes=64 * 1024, block_tokens=4)
BEHIND = Placement(first="cpu", write_behind=("nvme",), min_ttl_s=0.0)
T = TypeVar("T")


def big(number: int) -> Sample:
    """Large enough not to travel inside Ray's messages."""
    return sample(number, blocks=2, shape=SHAPE, placement=BEHIND)


NBYTES = big(0).record.nbytes


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    start_small_ray()
    yield
    ray.shutdown()


@pytest.mark.parametrize("failures", [0, 2, 3])
def test_ray_is_started_again_if_its_node_did_not_come_up(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def init(**options: object) -> None:
        said.append("init")
        if said.count("init") <= failures:
            raise RuntimeError("the current node timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: said.append("shutdown"))
    with pytest.raises(RuntimeError) if failures == 3 else contextlib.nullcontext():
        start_ray(namespace="any")
    assert said == ["init", "shutdown"] * failures + ["init"] * (failures < 3)


@ray.remote(num_cpus=0)
class StubReplica:
    """Stages records as a replica does."""

    def __init__(self) -> None:
        self._outbox = StagingBuffer(64 * MIB, keep_s=60)
        open_outbox(self._outbox)

    def stage(self, numbers: list[int]) -> list[int | None]:
        return [self._outbox.put(big(number).record) for number in numbers]


class Client:
    """What a replica does with the actor: every `RayActorError` is a miss."""

    def __init__(self, path: Path, faults: FaultsSettings = FaultsSettings()) -> None:  # noqa: B008
        self.path = path
        self.replica: Any = StubReplica.remote()
        node_id = ray.get_runtime_context().get_node_id()
        settings = TierSettings(
            cpu=CpuTierSettings(bytes_max=4 * NBYTES),
            nvme=NvmeTierSettings(bytes_max=64 * MIB, direct_io=False),
            faults=faults,
        )
        self.actor = tier_actor(settings, node_id, path, sums=SumsSetup.of(Settings()))
        self.lost_calls = 0

    def call(self, method: str, *arguments: object) -> Any:
        """None when the actor is not there."""
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=60)
        except RayActorError:
            self.lost_calls += 1
            return None

    def look(self, wanted: Sample) -> Any:
        return self.call("lookup", Lookup(wanted.header.namespace, wanted.chain, TENANT, SESSION))

    def offer(self, numbers: list[int]) -> tuple[str, ...]:
        found = self.look(big(numbers[0]))
        if found is None:
            return ()
        tickets = ray.get(self.replica.stage.remote(numbers))
        offers = [
            StoreRequest(ticket, big(number).header, NBYTES, found.incarnation, found.clear_seq)
            for ticket, number in zip(tickets, numbers, strict=True)
        ]
        reply = self.call("offer", offers, [self.replica])
        return () if reply is None else reply.outcomes

    def fetch(self, wanted: Sample) -> Any:
        found = self.look(wanted)
        if found is None or not found.spans:
            return None
        (span,) = found.spans
        header = wanted.header
        return self.call(
            "fetch",
            Fetch(header.namespace, TENANT, span.extent_id, span.offset, span.blocks, span.tier, 10.0),
        )

    def load(self, number: int) -> Bytes | None:
        """The verified payload; None for a miss."""
        wanted = big(number)
        fetched = self.fetch(wanted)
        if fetched is None or isinstance(fetched, FetchFailed):
            return None
        data = fetched.data
        if fetched.ref:
            try:
                data = ray.get(fetched.ref[0], timeout=10)
            except ObjectLostError:
                return None
        header = codec.decode_header(data)
        payload: Bytes = data[codec.header_bytes(header.blocks, SHAPE.layers) :]
        assert codec.good_blocks(header, payload, 0) == 2
        assert np.array_equal(payload, wanted.payload)
        return payload

    def files(self) -> set[str]:
        return {path.stem for path in self.path.rglob("*.kv")}

    def kill(self) -> None:
        """For good; returns when its name and its directory are free."""
        ray.kill(self.actor, no_restart=True)
        ray.kill(self.replica)

        def is_gone() -> bool:
            try:
                ray.get_actor(actor_name(ray.get_runtime_context().get_node_id()))
            except ValueError:
                return True
            return False

        until("the actor's name is free", is_gone)


def until(what: str, poll: Callable[[], T], timeout_s: float = 60.0) -> T:
    ends_s = time.monotonic() + timeout_s
    while not (value := poll()):
        assert time.monotonic() < ends_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="class")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for all tests that do not kill it for good: each stores numbers of its own."""
    client = Client(tmp_path_factory.mktemp("shared") / "kv")
    yield client
    client.kill()


class TestOneActor:
    """Replicas and owners that die round one and the same tier actor."""

    def test_a_record_is_handed_out_without_a_copy_and_survives_its_replica(self, client: Client) -> None:
        assert client.offer([1]) == ("taken",)
        until("it is stored", lambda: client.look(big(1)).spans)
        assert client.offer([1]) == ("held",)
        fetched = client.fetch(big(1))
        assert len(fetched.ref) == 1
        ray.kill(client.replica)
        assert client.load(1) is not None
        assert ray.get(fetched.ref[0]).nbytes == NBYTES
        client.replica = StubReplica.remote()

    def test_f19_when_the_actor_dies_what_it_handed_out_is_lost_and_files_are_not(
        self, client: Client
    ) -> None:
        client.offer([11])
        until("its copy is made", lambda: big(11).header.extent_id.hex() in client.files())
        fetched = client.fetch(big(11))
        incarnation = client.call("ping")
        ray.kill(client.actor, no_restart=False)
        until("it is back", lambda: client.call("ping") not in (None, incarnation))
        with pytest.raises(ObjectLostError):
            ray.get(fetched.ref[0], timeout=10)
        (span,) = client.look(big(11)).spans
        assert span.tier == "nvme"
        assert client.load(11) is not None
        assert client.look(big(11)).spans[0].tier == "cpu"

    def test_f19_a_replica_that_is_gone_costs_only_its_record(self, client: Client) -> None:
        found = client.look(big(21))
        ray.kill(client.replica)
        offer = StoreRequest(1, big(21).header, NBYTES, found.incarnation, found.clear_seq)
        assert client.call("offer", [offer], [client.replica]).outcomes == ("taken",)
        until("the store was given up", lambda: client.call("stats").stores.get("failed:call"))
        client.call("check_integrity")
        assert client.look(big(21)).spans == ()
        client.replica = StubReplica.remote()

    def test_f36_clear_reports_and_flush(self, client: Client) -> None:
        client.offer([31, 32])
        names = {big(number).header.extent_id.hex() for number in (31, 32)}
        until("copies are made", lambda: names <= client.files())
        header = big(31).header
        client.call(
            "report",
            [BadReport(header.namespace, TENANT, header.extent_id, "cpu", "checksum")],
            [LoadReport("cpu", NBYTES, 0.001)],
        )
        # A file is there a moment before the node knows of it.
        until("the bad copy is gone", lambda: [span.tier for span in client.look(big(31)).spans] == ["nvme"])
        assert client.call("flush", 5.0)["failed"] == 0
        cleared = client.call("clear", Clear(TENANT))
        assert cleared.extents >= 2
        assert cleared.unreachable == ()
        assert client.files() == set()
        assert client.look(big(32)).spans == ()
        assert client.call("stats").tiers[0].bytes_held == 0

    def test_only_one_owner_of_a_directory_the_other_node_goes_on_without(self, client: Client) -> None:
        until("it is there", lambda: client.call("ping"))
        with contextlib.closing(ObjectStoreTier(MIB)) as cpu:
            built = build_tiers(
                TierSettings(nvme=NvmeTierSettings(direct_io=False)),
                client.path,
                make_cpu=lambda _bytes_max: cpu,
                wall_clock=time.time,
            )
        with contextlib.closing(built.tiers["nvme"]) as waiting:
            assert "in use by" in waiting.why_not_ours()
            with pytest.raises(TierError, match="in use by"):
                waiting.take()
        assert built.pending_path is None


@ray.remote(num_cpus=0)
class Owner:
    def put(self) -> list[object]:
        return [ray.put(np.ones(NBYTES, dtype=np.uint8))]


def test_f19_an_object_whose_owner_died_is_a_miss_and_leaves_the_books() -> None:
    tier, address = ObjectStoreTier(4 * NBYTES), big(1).header.address
    owner: Any = Owner.remote()
    (ref,) = ray.get(owner.put.remote())
    ray.kill(owner)
    tier.put(address, Record(big(1).record, owned=ref), deadline=Deadline(5))
    with pytest.raises(TierMiss):
        until("the death is known", lambda: tier.read(address, 0, 10, deadline=Deadline(5)) is None)
    assert tier.bytes_held() == 0
    with pytest.raises(TierMiss):
        tier.ref(address)


def test_f19_the_object_store_tier_refuses_more_than_its_bytes() -> None:
    tier = ObjectStoreTier(2 * NBYTES)
    for number in range(2):
        tier.put(big(number).header.address, Record(big(number).record), deadline=Deadline(5))
        tier.put(big(number).header.address, Record(big(number).record), deadline=Deadline(5))  # idempotent
    with pytest.raises(TierFull):
        tier.put(big(2).header.address, Record(big(2).record), deadline=Deadline(5))
    assert tier.bytes_held() == 2 * NBYTES
    data = tier.read(big(1).header.address, 8, 100, deadline=Deadline(5))
    assert np.array_equal(data, big(1).record[8:108])
    assert not data.flags.writeable
    with pytest.raises(BadRecord, match="truncated"):
        tier.read(big(1).header.address, 8, NBYTES, deadline=Deadline(5))
    tier.quarantine(big(1).header.address)
    tier.probe()
    assert tier.bytes_held() == NBYTES


@pytest.mark.parametrize("state", ["planned", "reserved", "copying", "verified", "committed", "dropping"])
def test_f17_killed_in_a_state_it_comes_back_with_what_is_on_the_disk(tmp_path: Path, state: str) -> None:
    faults = FaultsSettings(kill_at=state, kill_after=6)  # type: ignore[arg-type]
    client = Client(tmp_path / "kv", faults)
    first = until("it is there", lambda: client.call("ping"))
    numbers = iter(range(1000))

    def stores_until_it_is_another() -> bool:
        client.offer([next(numbers) for _ in range(2)])
        incarnation = client.call("ping")
        return incarnation is not None and incarnation != first

    until("it was killed and came back", stores_until_it_is_another)
    assert client.call("stats").restarts == 1
    client.call("check_integrity")
    files, offered = client.files(), next(numbers)
    held = [number for number in range(offered) if big(number).header.extent_id.hex() in files]
    lost_calls = client.lost_calls
    for number in range(offered):
        assert client.load(number) is not None or number not in held
    assert client.lost_calls == lost_calls, "a call failed after it was back"
    assert client.offer([offered]) == ("taken",)
    until("it works as before", lambda: client.load(offered) is not None)
    client.kill()
