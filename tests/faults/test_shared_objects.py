"""Objects of a bucket that several nodes use: who puts them again, who deletes them, who notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.media import s3
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.s3_client import MARK, S3Keys
from samovar.configs.sections import TierSettings
from tests.support.clock import Clock
from tests.support.inside import join_scans, scans_of
from tests.support.nodes.node_harness import SESSION, TENANT, Bench, bench, sample
from tests.support.nodes.s3_stub import Answering, Request, Stub, s3_stub
from tests.support.services.service import until

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


def test_what_one_node_reads_another_does_not_delete_and_what_none_reads_one_does(
    stub: Stub, clock: Clock
) -> None:
    reader, other = node(stub, clock, "reader"), node(stub, clock, "other")
    assert reader.store(SHARED) == "taken"
    scans_of(other.node).look(20.0)
    assert other.copies(SHARED) == ("s3",)

    clock.now_s = BEGAN_S + 40.0
    assert reader.load(SHARED) is not None
    clock.now_s = BEGAN_S + 60.0
    assert reader.load(SHARED) is not None
    until("it is put again in the second half of its time", lambda: put_s(stub) == 60.0)
    clock.now_s = BEGAN_S + 110.0
    other.node.tick()
    assert other.copies(SHARED) == (), "it has not used it"
    assert put_s(stub) == 60.0, "the reader has"
    clock.now_s = BEGAN_S + 120.0
    assert reader.load(SHARED) is not None
    until("and again", lambda: put_s(stub) == 120.0)
    clock.now_s = BEGAN_S + 130.0
    assert reader.tiers_of(SHARED) == ["s3"]
    assert reader.load(SHARED) is not None

    clock.now_s = BEGAN_S + 300.0  # no one any more
    scans_of(other.node).look(20.0)
    assert other.copies(SHARED) == ("s3",)
    clock.now_s = BEGAN_S + 320.0
    other.node.tick()
    assert other.copies(SHARED) == ()
    assert put_s(stub) is None
    for one in (reader, other):
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


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("is_answered", [True, False])
def test_g12_what_is_erased_while_it_is_put_again_goes(stub: Stub, clock: Clock, is_answered: bool) -> None:
    """It is newer than the mark then, and every listing would take it for stored afterwards."""
    reader = node(stub, clock, "reader")
    assert reader.store(SHARED) == "taken"
    mark = KEYS.mark(TENANT, [SESSION], "ab" * 8)
    assert KEYS.parse_mark(mark) == (Clear(TENANT, SESSION),)

    def erased_meanwhile(to: Answering, request: Request) -> None:
        is_listing = "list-type" in request.query
        if "x-amz-copy-source" in request.headers:
            with stub.lock:
                stub.objects[mark] = (MARK, stub.clock())
        if is_listing and mark in stub.objects and not is_answered:
            to.error(500, "InternalError")
        else:
            stub.behave(to, request)

    stub.misbehave = erased_meanwhile
    clock.now_s = BEGAN_S + 60.0
    assert reader.load(SHARED) is not None
    until("the object is gone", lambda: put_s(stub) is None)
    assert mark in stub.objects
    reader.node.close()


@pytest.mark.guarantee("G12")
def test_g12_what_is_marked_as_erased_is_not_put_again(stub: Stub, clock: Clock) -> None:
    """By a node that has not heard of it: a read is no reason to keep it."""
    reader = node(stub, clock, "reader")
    assert reader.store(SHARED) == "taken"
    clock.now_s = BEGAN_S + 40.0
    with stub.lock:
        stub.objects[KEYS.mark(TENANT, [SESSION], "ab" * 8)] = (MARK, stub.clock())
        asked = len(stub.requests)
    clock.now_s = BEGAN_S + 60.0
    assert reader.load(SHARED) is not None

    def has_listed_marks() -> bool:
        with stub.lock:
            return any("list-type" in request.query for request in stub.requests[asked:])

    until("it has asked for marks", has_listed_marks)
    clock.now_s = BEGAN_S + 61.0
    other = node(stub, clock, "other")  # whose listing goes by the mark
    assert other.copies(SHARED) == ()
    until("it is deleted", lambda: put_s(stub) is None)
    for one in (reader, other):
        one.node.close()
