"""F10, G4, G8: what a server acknowledged and does not have, or has differently, is never served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.blocks.record import BadRecord, Record, TierError, TierFull, TierMiss, decode_header
from samovar.cache_tiers.media.guard import TierLate
from samovar.cache_tiers.media.s3 import PROBE_OLD_S, SCAN_FAILURES_MAX, S3Tier
from samovar.cache_tiers.media.s3_client import S3Keys
from samovar.cache_tiers.media.tier import Deadline
from tests.faults.test_s3_faults import (
    HEADER,
    NOW_UNIX_S,
    RECORD,
    WELL_S,
    error,
    guarded,
    make,
    put,
    read,
    stub,
)
from tests.support.clock import Clock
from tests.support.nodes.s3_extents import sealed
from tests.support.nodes.s3_stub import Answering, Misbehaviour, Request, Stub

__all__ = ["make", "stub"]  # fixtures

MakeTier = Callable[..., S3Tier]
KEYS = S3Keys("samovar/kv")
KEY = KEYS.record(HEADER.address)
BYTES = RECORD.data.tobytes()


@pytest.fixture
def tier(make: MakeTier) -> Iterator[S3Tier]:
    made = make()
    assert list(made.scan()) == []
    return made


def stores(stub: Stub, change: Callable[[bytes], bytes | None]) -> Misbehaviour:
    """Acknowledges a put and keeps something else."""

    def answer(to: Answering, request: Request) -> None:
        stub.behave(to, request)
        if request.method == "PUT":
            kept = change(request.body)
            if kept is None:
                del stub.objects[request.key]
            else:
                stub.objects[request.key] = (kept, 0.0)

    return answer


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "nothing": lambda body: None,
    "empty": lambda body: b"",
    "short": lambda body: body[:-1],
    "long": lambda body: body + b"x",
    "first bit": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "last bit": lambda body: body[:-1] + bytes([body[-1] ^ 1]),
    "zeros": lambda body: bytes(len(body)),
    "another extent": lambda body: sealed(2)[1].data.tobytes(),
}


@pytest.mark.parametrize("kept", CHANGES)
def test_f10_g8_a_put_counts_only_when_it_reads_back(stub: Stub, tier: S3Tier, kept: str) -> None:
    stub.misbehave = stores(stub, CHANGES[kept])
    with pytest.raises(TierError, match="other bytes were read back"):
        put(tier)
    tier.check_integrity()
    assert tier.bytes_held() == 0
    assert stub.objects == {}, "what nobody is told of must not stay"
    with pytest.raises(TierMiss):
        read(tier)
    with pytest.raises(TierError, match="probe"):
        tier.probe()
    stub.misbehave = stub.behave
    put(tier)
    assert read(tier) == BYTES


def gets(answer: Callable[[Answering], None]) -> Callable[[Stub], Misbehaviour]:
    def made(stub: Stub) -> Misbehaviour:
        return lambda to, request: answer(to) if request.method == "GET" else stub.behave(to, request)

    return made


def range_header(first: int, last: int, total: int | str) -> dict[str, str]:
    return {"Content-Range": f"bytes {first}-{last}/{total}"}


def cut(to: Answering, body: bytes, headers: dict[str, str]) -> None:
    to.answer(206, body, headers)
    to.close_connection = True


N = RECORD.nbytes
GETS: dict[str, tuple[Callable[[Answering], None], type[Exception], str]] = {
    "cut in the body": (
        lambda to: cut(to, BYTES[:100], {**range_header(0, N - 1, N), "Content-Length": str(N)}),
        TierError,
        "IncompleteRead|Protocol|ended after",
    ),
    "a shorter body than its range": (
        lambda to: to.answer(206, BYTES[:100], range_header(0, N - 1, N)),
        TierError,
        "ended after 100 of",
    ),
    "a longer body than its range": (
        lambda to: to.answer(206, BYTES + b"x", range_header(0, N - 1, N)),
        TierError,
        "goes on",
    ),
    "no range": (lambda to: to.answer(200, BYTES), TierError, "no range"),
    "a range of unknown size": (
        lambda to: to.answer(206, BYTES, range_header(0, N - 1, "*")),
        TierError,
        "no range",
    ),
    "a range elsewhere": (
        lambda to: to.answer(206, BYTES, range_header(1, N, N + 1)),
        TierError,
        "another range",
    ),
    "a range that ends early": (
        lambda to: to.answer(206, BYTES, range_header(0, N - 2, N)),
        TierError,
        "another range",
    ),
    "a short object": (
        lambda to: to.answer(206, BYTES[:100], range_header(0, 99, 100)),
        BadRecord,
        "truncated",
    ),
    "another size than was put": (
        lambda to: to.answer(206, BYTES, range_header(0, N - 1, N + 1)),
        BadRecord,
        "oversized",
    ),
}


@pytest.mark.parametrize("name", GETS)
def test_f10_g7_a_wrong_answer_is_never_handed_on(stub: Stub, tier: S3Tier, name: str) -> None:
    answer, kind, said = GETS[name]
    put(tier)
    assert read(tier) == BYTES
    stub.misbehave = gets(answer)(stub)
    with pytest.raises(kind, match=said):
        read(tier)
    # Nor does a put count that reads it back like that.
    other, other_record = sealed(2)
    with pytest.raises(TierError):
        tier.put(other.address, other_record, deadline=Deadline(WELL_S))
    stub.misbehave = stub.behave
    assert read(tier) == BYTES
    assert tier.bytes_held() == N
    assert KEYS.record(other.address) not in stub.objects


def test_f10_g4_one_put_an_extent_and_no_multipart(stub: Stub, make: MakeTier) -> None:
    tier = make(read_s_max=20.0)
    big = Record(np.random.default_rng(0).integers(0, 256, 20 * 2**20, dtype=np.uint8))
    tier.put(HEADER.address, big, deadline=Deadline(20))
    assert np.array_equal(tier.read(HEADER.address, 0, big.nbytes, deadline=Deadline(20)), big.data)
    assert stub.asked("PUT") == 1
    assert stub.asked("POST") == 0
    assert not any({"uploads", "partNumber", "uploadId"} & set(request.query) for request in stub.requests)
    (sent,) = (request for request in stub.requests if request.method == "PUT")
    assert sent.headers["if-none-match"] == "*"
    assert sent.headers["content-md5"]


def test_an_object_that_is_there_is_not_sent_again(stub: Stub, tier: S3Tier, make: MakeTier) -> None:
    put(tier)
    put(tier)
    put(make())
    assert stub.asked("PUT") == 3  # all with a condition: refused before the body counts
    assert stub.asked("DELETE") == 0
    assert stub.objects.keys() == {KEY}


def test_the_same_blocks_sealed_at_another_time_are_replaced(stub: Stub, tier: S3Tier) -> None:
    """The directory describes the record that was put last, to the byte."""
    put(tier)
    _, later = sealed(1, created_unix_s=2000.0)
    assert later.data.tobytes() != BYTES
    tier.put(HEADER.address, later, deadline=Deadline(WELL_S))
    assert read(tier) == later.data.tobytes()
    assert tier.bytes_held() == N


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "InvalidRequest")]
)
def test_a_server_without_conditional_puts(stub: Stub, tier: S3Tier, status: int, code: str) -> None:
    def picky(to: Answering, request: Request) -> None:
        if "if-none-match" in request.headers:
            to.error(status, code)
        else:
            stub.behave(to, request)

    stub.misbehave = picky
    for _ in range(3):
        put(tier)
    assert stub.asked("PUT") == 4, "asked once, then remembered"
    assert read(tier) == BYTES
    # An error that has another cause is not taken for this.
    stub.misbehave = error(status, code)
    with pytest.raises(TierError, match=code):
        put(tier)


def test_a_bad_request_is_not_remembered_as_no_conditions(stub: Stub, tier: S3Tier) -> None:
    stub.misbehave = error(400, "InvalidArgument")
    with pytest.raises(TierError):
        put(tier)
    stub.misbehave = stub.behave
    put(tier)
    assert "if-none-match" in stub.requests[-2].headers


def test_a_refused_put_leaves_all_as_it_was(stub: Stub, tier: S3Tier) -> None:
    put(tier)
    stub.misbehave = error(403, "AccessDenied")
    with pytest.raises(TierError):
        put(tier)
    assert stub.asked("DELETE") == 0
    stub.misbehave = stub.behave
    assert read(tier) == BYTES
    assert tier.bytes_held() == N


def test_a_put_that_may_have_worked_is_undone(stub: Stub, tier: S3Tier) -> None:
    def stored_but_500(to: Answering, request: Request) -> None:
        if request.method == "PUT":
            stub.objects[request.key] = (request.body, 0.0)
            to.error(500, "InternalError")
        else:
            stub.behave(to, request)

    stub.misbehave = stored_but_500
    with pytest.raises(TierError):
        put(tier)
    assert stub.objects == {}
    assert tier.bytes_held() == 0


def test_a_put_whose_reading_back_is_refused_is_undone(stub: Stub, tier: S3Tier) -> None:
    stub.misbehave = lambda to, request: (
        to.error(403, "AccessDenied") if request.method == "GET" else stub.behave(to, request)
    )
    with pytest.raises(TierError):
        put(tier)
    assert stub.objects == {}
    assert tier.bytes_held() == 0


def test_a_put_that_lands_after_its_deadline_is_undone(stub: Stub, make: MakeTier) -> None:
    """Else a block that was cleared meanwhile would be back."""
    tier = make(read_s_max=20.0)
    list(tier.scan())
    landed = threading.Event()

    def late(to: Answering, request: Request) -> None:
        if request.method == "PUT":
            stub.released.wait()
            landed.set()
        stub.behave(to, request)

    stub.misbehave = late
    ended = threading.Event()
    with pytest.raises(TierLate):
        guarded(tier).put(HEADER.address, RECORD, 0.2, ended.set)
    assert tier.bytes_held() == N, "it may be there: it counts"
    stub.released.set()
    assert ended.wait(10)
    assert landed.is_set()
    assert stub.objects == {}
    assert tier.bytes_held() == 0


def test_a_put_given_up_while_it_reads_back_is_undone(stub: Stub, make: MakeTier) -> None:
    """The last moment at which it can be given up."""
    tier = make(read_s_max=20.0)
    list(tier.scan())

    def slow_end(to: Answering, request: Request) -> None:
        if request.method != "GET":
            return stub.behave(to, request)
        to.send_response(206)
        to.send_header("Content-Length", str(N))
        to.send_header("Content-Range", stub.content_range(0, N, N))
        to.end_headers()
        to.wfile.write(BYTES[:-1])
        to.wfile.flush()
        stub.released.wait()
        to.wfile.write(BYTES[-1:])
        return None

    stub.misbehave = slow_end
    ended = threading.Event()
    with pytest.raises(TierLate):
        guarded(tier).put(HEADER.address, RECORD, 0.3, ended.set)
    assert not ended.is_set()
    stub.released.set()
    assert ended.wait(10)
    assert stub.objects == {}
    assert tier.bytes_held() == 0


def test_a_pending_delete_is_made_up_for(stub: Stub, tier: S3Tier) -> None:
    def no_way_back(to: Answering, request: Request) -> None:
        if request.method == "PUT":
            stub.behave(to, request)
        else:
            to.error(500, "InternalError")

    stub.misbehave = no_way_back
    with pytest.raises(TierError):
        put(tier)
    assert stub.objects.keys() == {KEY}
    assert tier.bytes_held() == N, "it is there: it counts"
    tier.check_integrity()
    stub.misbehave = stub.behave
    tier.probe()
    assert stub.objects == {}
    assert tier.bytes_held() == 0


@pytest.mark.guarantee("G10")
def test_g10_what_a_failed_probe_leaves_is_deleted_by_a_later_one(stub: Stub, tier: S3Tier) -> None:
    def no_deletes(to: Answering, request: Request) -> None:
        if request.method == "DELETE":
            to.error(500, "InternalError")
        else:
            stub.behave(to, request)

    stub.misbehave = no_deletes
    with pytest.raises(TierError):
        tier.probe()
    ((left, (data, _)),) = stub.objects.items()
    stub.objects[left] = (data, NOW_UNIX_S)
    stub.misbehave = stub.behave
    tier.probe()
    assert stub.objects.keys() == {left}, "another node's probe may be under way"
    stub.objects[left] = (data, NOW_UNIX_S - PROBE_OLD_S - 5)
    stub.objects["samovar/kv/probe-of-theirs"] = (b"not ours", 0.0)
    tier.probe()
    assert stub.objects.keys() == {"samovar/kv/probe-of-theirs"}


def test_what_is_put_again_is_no_longer_pending(stub: Stub, tier: S3Tier) -> None:
    stub.misbehave = error(500, "InternalError")
    with pytest.raises(TierError):
        put(tier)
    stub.misbehave = stub.behave
    put(tier)
    tier.probe()
    assert read(tier) == BYTES


def test_g10_no_more_than_its_bytes(stub: Stub, make: MakeTier) -> None:
    tier = make(bytes_max=2 * N)
    extents = [sealed(seed) for seed in range(3)]
    for header, record in extents[:2]:
        tier.put(header.address, record, deadline=Deadline(WELL_S))
    with pytest.raises(TierFull):
        tier.put(extents[2][0].address, extents[2][1], deadline=Deadline(WELL_S))
    assert stub.asked("PUT") == 2
    tier.put(extents[0][0].address, extents[0][1], deadline=Deadline(WELL_S))  # there already
    tier.delete(extents[0][0].address)
    tier.put(extents[2][0].address, extents[2][1], deadline=Deadline(WELL_S))
    # What lies there from before counts as well.
    after = make(bytes_max=2 * N)
    list(after.scan())
    with pytest.raises(TierFull):
        after.put(extents[0][0].address, extents[0][1], deadline=Deadline(WELL_S))


def test_a_listing_of_many_pages(stub: Stub, make: MakeTier) -> None:
    stub.page_keys = 3
    for number in range(5):
        stub.objects[f"samovar/kv/v1/{number}"] = (b"foreign", 0.0)
    extents = [sealed(seed) for seed in range(10)]
    for number, (header, record) in enumerate(extents):
        stub.objects[KEYS.record(header.address)] = (record.data.tobytes(), 1000.0 + number)
    tier = make(index_objects_max=4)
    found = list(tier.scan())
    assert [one.last_used_unix_s for one in found] == [1009, 1008, 1007, 1006], "the newest, newest first"
    assert tier.bytes_held() == 10 * N
    assert len(stub.objects) == 15


def test_what_is_put_or_deleted_during_a_listing_counts(stub: Stub, make: MakeTier) -> None:
    stub.page_keys = 1
    extents = sorted((sealed(seed) for seed in range(3)), key=lambda pair: KEYS.record(pair[0].address))
    first, second, third = extents
    for header, record in (first, third):
        stub.objects[KEYS.record(header.address)] = (record.data.tobytes(), 1000.0)
    tier = make()
    pages = 0

    def meanwhile(to: Answering, request: Request) -> None:
        nonlocal pages
        stub.behave(to, request)
        if request.query.get("prefix") == [KEYS.records]:
            pages += 1
            if pages == 2:  # when the first two of three pages have been made up
                tier.put(second[0].address, second[1], deadline=Deadline(WELL_S))
                tier.delete(first[0].address)

    stub.misbehave = meanwhile
    found = {one.header.extent_id for one in tier.scan()}
    assert found == {third[0].extent_id}
    tier.check_integrity()
    assert tier.bytes_held() == second[1].nbytes + third[1].nbytes


@pytest.mark.guarantee("G10")
def test_g10_what_a_listing_does_not_show_yet_counts(stub: Stub, tier: S3Tier) -> None:
    put(tier)
    (there,) = stub.objects.items()
    stub.objects.clear()  # for the listing alone
    assert list(tier.rescan(lambda _address: True)) == []
    stub.objects.update([there])
    assert tier.bytes_held() == N
    assert list(tier.rescan(lambda _address: True)) == []
    assert tier.bytes_held() == N
    tier.delete(HEADER.address)
    assert tier.bytes_held() == 0


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("asks", ["GET", "DELETE"])
def test_g10_what_is_put_while_the_server_says_that_it_is_gone_counts(
    stub: Stub, tier: S3Tier, asks: str
) -> None:
    stub.objects[KEY] = (BYTES, 1000.0)

    def put_meanwhile(to: Answering, request: Request) -> None:
        if (request.method, request.key) != (asks, KEY):
            stub.behave(to, request)
            return
        stub.misbehave = stub.behave
        del stub.objects[KEY]
        put(tier)
        if asks == "GET":
            to.error(404, "NoSuchKey")
        else:
            to.answer(204)

    stub.misbehave = put_meanwhile
    if asks == "GET":
        assert list(tier.scan()) == []
    else:
        tier.mark_cleared([Clear(HEADER.tenant)], Deadline(WELL_S))
        assert tier.purge(HEADER.tenant, lambda _address: False, Deadline(WELL_S))
    assert stub.objects[KEY][0] == BYTES
    assert tier.bytes_held() == N


@pytest.mark.guarantee("G12")
def test_g12_the_bucket_is_asked_whether_a_record_was_cleared_after_it_was_put(
    stub: Stub, tier: S3Tier
) -> None:
    address, session, now_s = HEADER.address, HEADER.session, time.time()
    stub.objects[KEY] = (BYTES, now_s - 100.0)
    assert not tier.is_marked(address, session, Deadline(WELL_S))
    tier.mark_cleared([Clear(HEADER.tenant, bytes(reversed(session)))], Deadline(WELL_S))
    assert not tier.is_marked(address, session, Deadline(WELL_S)), "another session's"
    tier.mark_cleared([Clear(HEADER.tenant, session)], Deadline(WELL_S))
    assert tier.is_marked(address, session, Deadline(WELL_S))
    stub.objects[KEY] = (BYTES, now_s + 100.0)
    assert not tier.is_marked(address, session, Deadline(WELL_S)), "it was put again"
    tier.mark_cleared([Clear(HEADER.tenant)], Deadline(WELL_S))
    stub.objects[KEY] = (BYTES, now_s - 100.0)
    assert tier.is_marked(address, bytes(reversed(session)), Deadline(WELL_S)), "all of the tenant's"
    stub.misbehave = lambda to, request: to.error(500, "InternalError")
    with pytest.raises(TierError):
        tier.is_marked(address, session, Deadline(WELL_S))


@pytest.mark.guarantee("G9")
def test_g9_asking_whether_a_record_was_cleared_lists_no_longer_than_there_is_time(
    stub: Stub, tier: S3Tier
) -> None:
    now, listed = Clock(), list[str]()
    stub.objects[KEY] = (BYTES, time.time())
    for name in (b"a", b"b", b"c"):
        tier.mark_cleared([Clear(HEADER.tenant, 16 * name)], Deadline(WELL_S))
    stub.page_keys = 1

    def late(to: Answering, request: Request) -> None:
        if "prefix" in request.query:
            listed.append(request.query["prefix"][0])
            now.now_s += WELL_S
        stub.behave(to, request)

    stub.misbehave = late
    with pytest.raises(TierError):
        tier.is_marked(HEADER.address, HEADER.session, Deadline(WELL_S, now))
    assert len(listed) == 1


def test_an_object_that_goes_during_a_scan(stub: Stub, make: MakeTier) -> None:
    header, record = sealed(2)
    for one in (HEADER, header):
        stub.objects[KEYS.record(one.address)] = (BYTES if one is HEADER else record.data.tobytes(), 1000.0)

    def goes(to: Answering, request: Request) -> None:
        stub.behave(to, request)
        if "list-type" in request.query:
            stub.objects.pop(KEY, None)

    stub.misbehave = goes
    tier = make()
    assert [one.header.extent_id for one in tier.scan()] == [header.extent_id]
    assert tier.bytes_held() == record.nbytes


@pytest.mark.parametrize("failures", [SCAN_FAILURES_MAX - 1, SCAN_FAILURES_MAX])
def test_a_scan_gives_up_after_some_failures_in_a_row(stub: Stub, make: MakeTier, failures: int) -> None:
    extents = [sealed(seed) for seed in range(SCAN_FAILURES_MAX + 1)]
    for number, (header, record) in enumerate(extents):
        stub.objects[KEYS.record(header.address)] = (record.data.tobytes(), 1000.0 - number)
    broken = {KEYS.record(header.address) for header, _ in extents[:failures]}
    stub.misbehave = lambda to, request: (
        to.error(500, "InternalError") if request.key in broken else stub.behave(to, request)
    )
    tier = make(connections=1)
    scan = tier.scan()
    if failures < SCAN_FAILURES_MAX:
        assert len(list(scan)) == len(extents) - failures
    else:
        with pytest.raises(TierError):
            next(scan)
    assert len(stub.objects) == len(extents), "what could not be read is not bad"


def test_a_bad_record_that_cannot_be_put_aside_is_not_yielded(stub: Stub, make: MakeTier) -> None:
    stub.objects[KEY] = (bytes(N), 1000.0)
    stub.misbehave = lambda to, request: (
        stub.behave(to, request) if request.method == "GET" else to.error(500, "InternalError")
    )
    tier = make()
    assert list(tier.scan()) == []
    assert tier.bytes_held() >= N
    tier.check_integrity()


def test_a_server_that_cannot_copy_still_loses_the_bad_record(stub: Stub, tier: S3Tier) -> None:
    put(tier)
    stub.misbehave = lambda to, request: (
        to.error(501, "NotImplemented") if request.method == "PUT" else stub.behave(to, request)
    )
    tier.quarantine(HEADER.address)
    assert stub.objects == {}
    assert tier.bytes_held() == 0


def test_g1_a_header_that_is_not_its_keys_is_bad(stub: Stub, make: MakeTier) -> None:
    """A whole, good record under another extent's key."""
    stub.objects[KEYS.record(sealed(2)[0].address)] = (BYTES, 1000.0)
    assert decode_header(RECORD.data, record_bytes=N).address == HEADER.address
    tier = make()
    assert list(tier.scan()) == []
    found = tier.bad_found()
    assert (found.kinds, found.quarantined) == ({"key": 1}, 1)
