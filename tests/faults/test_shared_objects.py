"""Objects of a bucket that several nodes use: who deletes them, and who notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.media import s3
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.s3_client import S3Keys
from samovar.configs.sections import TierSettings
from tests.support.clock import Clock
from tests.support.inside import join_scans, scans_of
from tests.support.nodes.node_harness import Bench, bench, sample
from tests.support.nodes.s3_stub import Stub, s3_stub

BEGAN_S, UNIX_S = 1000.0, 1_700_000_000.0
TTL_S = 100.0
SHARED = sample(1, placement=Placement(first="s3", write_behind=(), ttl_s=TTL_S))
KEYS = S3Keys("samovar/kv")
KEY = KEYS.record(SHARED.header.address)


@pytest.fixture
def clock() -> Clock:
    return Clock(BEGAN_S)


@pytest.fixture
def stub(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(s3, "LISTING_LAG_S", 0.0)  # else what was put just now may be missed for a minute
    with s3_stub() as server:
        server.clock = lambda: UNIX_S + clock.now_s - BEGAN_S
        yield server


def node(stub: Stub, clock: Clock, name: str, **more: object) -> Bench:
    """A node whose first listing is over; the next ones are by hand."""
    settings = stub.settings(rescan_s=86400.0, attempts_max=1, **more)
    made = bench(
        [S3Tier(settings, stub.clock)],
        settings=TierSettings(s3=settings),
        incarnation=name,
        clock=clock,
        wall_clock=stub.clock,
    )
    join_scans(made.node, 20)
    return made


def put_s(stub: Stub) -> float | None:
    """When the object was put, or put again; None: it is not there."""
    with stub.lock:
        found = stub.objects.get(KEY)
    return None if found is None else found[1] - UNIX_S


def test_what_was_put_again_since_is_not_deleted_by_a_node_that_has_not_used_it(
    stub: Stub, clock: Clock
) -> None:
    writer, other = node(stub, clock, "writer"), node(stub, clock, "other")
    assert writer.store(SHARED) == "taken"
    scans_of(other.node).look(20.0)
    assert other.copies(SHARED) == ("s3",)
    with stub.lock:  # as after a drop and a store by another node
        data, at_unix_s = stub.objects[KEY]
        stub.objects[KEY] = (data, at_unix_s + 60.0)
    clock.now_s = BEGAN_S + 110.0
    other.node.tick()
    assert other.copies(SHARED) == (), "it has not used it"
    assert put_s(stub) == 60.0
    scans_of(other.node).look(20.0)
    assert other.copies(SHARED) == ("s3",)
    clock.now_s = BEGAN_S + 170.0
    other.node.tick()
    assert other.copies(SHARED) == ()
    assert put_s(stub) is None, "nor did any other"
    scans_of(writer.node).look(20.0)
    assert writer.copies(SHARED) == ()
    for one in (writer, other):
        one.node.check_integrity()
        one.node.close()


def test_an_expired_object_that_cannot_be_asked_for_is_forgotten_and_found_again(
    stub: Stub, clock: Clock
) -> None:
    only = node(stub, clock, "only")
    assert only.store(SHARED) == "taken"
    clock.now_s = BEGAN_S + 110.0
    stub.misbehave = lambda to, request: to.error(500, "InternalError")
    only.node.tick()
    stub.misbehave = stub.behave
    assert only.copies(SHARED) == ()
    assert only.node.stats().pending_deletes == 0, "nothing that would delete it whatever is there by then"
    assert put_s(stub) == 0.0
    scans_of(only.node).look(20.0)
    assert only.copies(SHARED) == ("s3",)
    clock.now_s = BEGAN_S + 130.0
    only.node.tick()
    assert put_s(stub) is None
    only.node.check_integrity()
    only.node.close()


def test_what_another_node_has_deleted_is_forgotten_with_the_next_listing(stub: Stub, clock: Clock) -> None:
    """It was held for good: never written again, and each load of it failed."""
    holder = node(stub, clock, "holder")
    assert holder.store(SHARED) == "taken"
    with stub.lock:
        del stub.objects[KEY]
    scans_of(holder.node).look(20.0)
    assert holder.copies(SHARED) == ()
    assert holder.store(SHARED) == "taken"
    scans_of(holder.node).look(20.0)
    assert holder.copies(SHARED) == ("s3",)
    assert put_s(stub) is not None
    holder.node.check_integrity()
    holder.node.close()


def test_of_what_is_not_listed_for_want_of_room_nothing_is_forgotten(stub: Stub, clock: Clock) -> None:
    holder = node(stub, clock, "holder", index_objects_max=0)
    assert holder.store(SHARED) == "taken"
    scans_of(holder.node).look(20.0)
    assert holder.copies(SHARED) == ("s3",)
    holder.node.close()
