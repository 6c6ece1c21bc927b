"""One node for replicas and for engines of others: the tier actor in a real Ray, and its socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from samovar.cache_tiers.actors.staging import StagingBuffer, open_outbox
from samovar.cache_tiers.actors.tier import tier_actor, tier_actors
from samovar.cache_tiers.blocks import Bytes, Clear
from samovar.cache_tiers.messages import Fetch, FetchFailed, LookupResult, StoreRequest
from samovar.cache_tiers.socket.client import SocketLink
from samovar.configs.sections import MIB, CpuTierSettings, NvmeTierSettings, TierSettings
from samovar.replicas.offload.ray_link import RayLink
from tests.laws.tier_link import Way, assert_loads, each_law, look, made, store
from tests.support.nodes.node_harness import Sample
from tests.support.nodes.socket_world import BySocket
from tests.support.ray_start import start_small_ray

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]


@ray.remote(num_cpus=0)
class StubReplica:
    """Stages records as a replica does."""

    def __init__(self) -> None:
        self._outbox = StagingBuffer(64 * MIB, keep_s=60)
        open_outbox(self._outbox)

    def stage(self, record: Bytes) -> int | None:
        return self._outbox.put(record.copy())


class OverRay:
    """A replica's way to its node (`tests/laws/tier_link.py`)."""

    def __init__(self, find: Callable[[], Any], settings: TierSettings) -> None:
        self._replica: Any = StubReplica.remote()
        self._link = RayLink(find, self._replica, settings, control_s=30.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def offer(self, one: Sample, found: LookupResult) -> str:
        ticket = ray.get(self._replica.stage.remote(one.record), timeout=60)
        offer = StoreRequest(ticket, one.header, one.record.nbytes, found.incarnation, found.clear_seq)
        return self._link.offer([offer]).outcomes[0]

    def fetch(self, fetch: Fetch) -> tuple[int, Bytes] | FetchFailed:
        reply = self._link.fetch(fetch)
        if isinstance(reply, FetchFailed):
            return reply
        assert reply.data is not None
        return reply.first, reply.data


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Way]]:
    folder = tmp_path_factory.mktemp("node")
    settings = TierSettings(
        cpu=CpuTierSettings(bytes_max=16 * MIB),
        nvme=NvmeTierSettings(bytes_max=0),
        socket=folder / "own" / "tiers.sock",
    )
    start_small_ray()
    node_id = ray.get_runtime_context().get_node_id()
    actor = tier_actor(settings, node_id, folder)
    ray.get(actor.ping.remote(), timeout=120)
    assert settings.socket is not None
    link = SocketLink(settings.socket, "test", call_s=30.0)
    yield {"over Ray": OverRay(lambda: actor, settings), "by the socket": BySocket(link)}
    link.close()
    ray.kill(actor)
    ray.shutdown()


@each_law
@pytest.mark.parametrize("name", ["over Ray", "by the socket"])
def test_the_contract_holds(ways: dict[str, Way], name: str, law: Callable[[Way], None]) -> None:
    way = ways[name]
    for number in range(99, 112):  # of the other way's laws
        way.clear(Clear(made(number).header.tenant))
    law(way)


@pytest.mark.parametrize(("by", "there"), [("over Ray", "by the socket"), ("by the socket", "over Ray")])
def test_what_one_kind_stores_the_other_loads(ways: dict[str, Way], by: str, there: str) -> None:
    one = made(1 if by == "over Ray" else 2)
    store(ways[by], one)
    assert look(ways[there], one).spans == look(ways[by], one).spans
    assert_loads(ways[there], one)
    assert_loads(ways[by], one)
    assert ways[by].ping() == ways[there].ping()


def test_the_actor_that_comes_after_it_listens_again(ways: dict[str, Way]) -> None:
    """With another incarnation, and nothing in main memory."""
    way, one = ways["by the socket"], made(3)
    store(way, one)
    former = way.ping()
    (actor,) = tier_actors().values()
    ray.kill(actor, no_restart=False)
    ends_s = time.monotonic() + 120
    while (now := way.ping()) is None or now == former:
        assert time.monotonic() < ends_s
        time.sleep(0.1)
    assert not look(way, one).spans
    store(way, one)
    assert_loads(ways["over Ray"], one)
