"""One contract over each way to a node: in its process and by its socket. Over Ray: `tests/faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks import Bytes, Clear
from samovar.cache_tiers.messages import Fetch, FetchFailed, LookupResult, StoreRequest
from tests.laws.tier_link import Way, each_law, lookup_of, made
from tests.support.nodes.node_harness import MIB, Sample, records_of
from tests.support.nodes.socket_world import BySocket, World


class InProcess:
    """Calls of the node itself, which calls for records."""

    def __init__(self, world: World, outbox: StagingBuffer) -> None:
        self._node = world.node
        self._outbox = outbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def offer(self, one: Sample, found: LookupResult) -> str:
        ticket = self._outbox.put(one.record)
        assert ticket is not None
        offer = StoreRequest(ticket, one.header, one.record.nbytes, found.incarnation, found.clear_seq)
        return self._node.offer([offer]).outcomes[0]

    def fetch(self, fetch: Fetch) -> tuple[int, Bytes] | FetchFailed:
        reply = self._node.fetch(fetch)
        if isinstance(reply, FetchFailed):
            return reply
        data = reply.ref[0].data if reply.data is None else reply.data  # type: ignore[attr-defined]
        return reply.first, data


@pytest.fixture(params=["in process", "by its socket"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    outbox = StagingBuffer(MIB, keep_s=60)
    is_here = request.param == "in process"
    world = World(tmp_path, call_for=records_of(outbox) if is_here else None)
    yield InProcess(world, outbox) if is_here else BySocket(world.link)
    world.node.check_integrity()
    world.close()


@each_law
def test_the_contract_holds(way: Way, law: Callable[[Way], None]) -> None:
    law(way)


def test_a_node_that_is_away_has_nothing_and_takes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    found = world.link.lookup(lookup_of(made(1)))
    assert found is not None
    world.close()
    way, one = BySocket(world.client()), made(1)
    assert way.lookup(lookup_of(one)) is None
    assert way.offer(one, found) == "refused:no answer"
    assert (way.stats(), way.ping(), way.report([], [])) == (None,) * 3
    with pytest.raises(TimeoutError):
        way.clear(Clear(one.header.tenant))
