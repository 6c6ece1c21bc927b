"""G12: what is forgotten is gone, also from a bucket: beyond the index, by dead nodes, after restarts."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks.extent import Address, Clear, Placement
from samovar.cache_tiers.blocks.record import Record, TierError, TierFull
from samovar.cache_tiers.media.guard import TierDown
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.s3 import S3Clears, S3Tier
from samovar.cache_tiers.media.s3_client import S3Keys
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.node.build import build_tiers
from samovar.cache_tiers.node.manager import NodeIdentity, NodePorts, TierNode
from samovar.cache_tiers.node.state import PendingDeletes
from samovar.configs.sections import FaultSettings, S3TierSettings, TierSettings
from tests.support.inside import clears_of, guards_of, join_scans, scans_of, state_of
from tests.support.nodes.node_faults import FAILING, MemoryTier, SharedBucket, faulty
from tests.support.nodes.node_harness import (
    MIB,
    OTHER_TENANT,
    SESSION,
    TENANT,
    Bench,
    Sample,
    bench,
    nvme,
    records_of,
    sample,
)
from tests.support.nodes.nvme_harness import SickCalls
from tests.support.nodes.s3_stub import Answering, Request, Stub, s3_stub

IN_S3 = Placement(first="s3", write_behind=())
RESCAN_S = 60.0
LONG_AGO_S = 100.0


@pytest.fixture
def stub() -> Iterator[Stub]:
    with s3_stub() as server:
        yield server


def start(stub: Stub, name: str = "node", pending: Path | None = None, **more: object) -> Bench:
    """A node whose first listing is over."""
    tombstones_max = more.pop("tombstones_max", 1000)
    s3 = stub.settings(rescan_s=RESCAN_S, **more)
    settings = TierSettings(s3=s3, tombstones_max=tombstones_max, load_s_max=20.0)  # type: ignore[arg-type]
    node = bench([S3Tier(s3, time.time)], settings=settings, incarnation=name, pending_path=pending)
    join_scans(node.node, 20)
    return node


def put(stub: Stub, wanted: Sample, *, ago_s: float = LONG_AGO_S) -> str:
    """What a node that is dead by now has put into the bucket."""
    key = S3Keys(S3TierSettings().prefix).record(wanted.header.address)
    with stub.lock:
        stub.objects[key] = (wanted.record.tobytes(), time.time() - ago_s)
    return key


def tick(node: Bench) -> None:
    """The next rescan is due, and over."""
    node.clock.now_s += RESCAN_S + 1
    node.node.tick()
    join_scans(node.node, 20)
    clears_of(node.node).join(20)
    node.node.check_integrity()


def records(stub: Stub) -> list[str]:
    with stub.lock:
        return [key for key in stub.objects if "/v1/" in key]


def marks(stub: Stub) -> list[str]:
    with stub.lock:
        return [key for key in stub.objects if "/clears/" in key]


# -- a tenant's clear, beyond what is indexed (S3 a) --------------------------------------------------


def test_a_clear_of_a_tenant_deletes_also_what_the_index_has_no_room_for(stub: Stub) -> None:
    samples = [sample(number, placement=IN_S3) for number in range(5)]
    theirs = sample(9, tenant=OTHER_TENANT, placement=IN_S3)
    for wanted in (*samples, theirs):
        put(stub, wanted)
    node = start(stub, index_objects_max=2)
    assert node.node.clear(Clear(TENANT)).unreachable == ()
    assert records(stub) == [put(stub, theirs)]
    again = start(stub, "again", index_objects_max=2)
    assert not any(again.look(wanted).spans for wanted in samples)
    assert again.load(theirs) is not None
    for one in (node, again):
        one.node.close()


def test_a_clear_that_runs_out_of_time_says_so_and_is_gone_on_with(stub: Stub, tmp_path: Path) -> None:
    for number in range(5):
        put(stub, sample(number, placement=IN_S3))
    node = start(stub, pending=tmp_path / "owed.json", index_objects_max=2)

    def no_listing(to: Answering, request: Request) -> None:
        if "list-type" in request.query:
            to.error(500, "InternalError")
        else:
            stub.behave(to, request)

    stub.misbehave = no_listing
    assert node.node.clear(Clear(TENANT)).unreachable == ("s3",)
    assert records(stub)
    assert json.loads((tmp_path / "owed.json").read_text())["clears"] == [["s3", TENANT.hex(), None]]
    node.node.close()
    stub.misbehave = stub.behave  # still pending after a restart
    again = start(stub, "again", pending=tmp_path / "owed.json", index_objects_max=2)
    tick(again)
    assert records(stub) == []
    assert (tmp_path / "owed.json").read_text() == ""
    assert again.node.clear(Clear(TENANT)).unreachable == ()
    again.node.close()


def test_a_purge_ends_by_its_deadline_and_says_that_there_is_more(stub: Stub) -> None:
    put(stub, sample(1, placement=IN_S3))
    tier = S3Tier(stub.settings(), time.time)
    tier.mark_cleared([Clear(TENANT)], Deadline(20.0))
    assert not tier.purge(TENANT, lambda address: False, Deadline(0.0))
    assert records(stub)
    assert tier.purge(TENANT, lambda address: False, Deadline(20.0))
    assert records(stub) == []
    tier.close()


def test_g12_a_purge_goes_by_its_own_mark_which_no_listing_shows_yet(stub: Stub) -> None:
    """It found no mark, and said that all was deleted."""
    put(stub, sample(1, placement=IN_S3))
    tier = S3Tier(stub.settings(), time.time)

    def lags(to: Answering, request: Request) -> None:
        if "list-type" in request.query and "/clears/" in request.query["prefix"][0]:
            to.answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
        else:
            stub.behave(to, request)

    stub.misbehave = lags
    tier.mark_cleared([Clear(TENANT)], Deadline(20.0))
    assert tier.purge(TENANT, lambda address: False, Deadline(20.0))
    assert records(stub) == []
    assert not tier.purge(TENANT, lambda address: False, Deadline(20.0)), "of whom no mark is known"
    tier.close()


def test_g12_bad_records_of_a_tenant_go_with_it(stub: Stub) -> None:
    wanted = sample(1, placement=IN_S3)
    put(stub, wanted)
    node = start(stub)
    state_of(node.node).bad(wanted.header.address, "s3", "checksum")
    assert [key for key in stub.objects if "/bad/" in key]
    node.node.clear(Clear(TENANT, SESSION))
    assert not [key for key in stub.objects if "/bad/" in key]
    node.node.close()


def put_aside(stub: Stub, wanted: Sample) -> str:
    """What a node that is gone by now has put aside as bad."""
    key = S3Keys(S3TierSettings().prefix).bad(wanted.header.address)
    with stub.lock:
        stub.objects[key] = (wanted.record.tobytes(), time.time())
    return key


def test_g12_bad_records_that_others_have_put_aside_since_the_listing_go_with_a_session(stub: Stub) -> None:
    theirs = sample(2, tenant=OTHER_TENANT, placement=IN_S3)
    node = start(stub)
    mine, kept = put_aside(stub, sample(1, placement=IN_S3)), put_aside(stub, theirs)
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ()
    assert mine not in stub.objects
    assert kept in stub.objects
    node.node.close()


def test_g12_a_pending_clear_of_a_session_deletes_bad_records_of_who_is_gone(
    stub: Stub, tmp_path: Path
) -> None:
    node = start(stub, pending=tmp_path / "owed.json")
    stub.misbehave = lambda to, request: to.error(500, "InternalError")
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ("s3",)
    node.node.close()
    stub.misbehave = stub.behave
    again = start(stub, "again", pending=tmp_path / "owed.json")
    key = put_aside(stub, sample(1, placement=IN_S3))  # after the listing: it is not known of
    again.node.tick()
    clears_of(again.node).join(20)
    assert key not in stub.objects
    assert (tmp_path / "owed.json").read_text() == ""
    again.node.close()


def test_g12_a_listing_deletes_bad_records_of_who_was_cleared_by_a_node_that_is_gone(stub: Stub) -> None:
    dead = S3Tier(stub.settings(), time.time)
    dead.mark_cleared([Clear(TENANT, SESSION)], Deadline(20.0))  # and it came no further
    dead.close()
    mine = put_aside(stub, sample(1, placement=IN_S3))
    kept = put_aside(stub, sample(2, tenant=OTHER_TENANT, placement=IN_S3))
    node = start(stub)
    assert mine not in stub.objects
    assert kept in stub.objects
    node.node.close()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_g12_a_clear_of_another_node_deletes_also_what_is_bad_on_this_ones_disk(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    s3, files = stub.settings(rescan_s=RESCAN_S), nvme(tmp_path / "kv")
    node = bench(
        [HeapTier(MIB), files, S3Tier(s3, time.time)],
        settings=TierSettings(s3=s3),
        pending_path=tmp_path / "owed.json",
    )
    join_scans(node.node, 20)
    wanted = sample(1, placement=Placement(first="nvme", write_behind=(), lowest="nvme"))
    node.store(wanted)
    state_of(node.node).bad(wanted.header.address, "nvme", "checksum")
    assert list((tmp_path / "kv").rglob("*.bad"))
    other = start(stub, "other")
    other.node.clear(Clear(TENANT, SESSION))
    if is_stuck:
        with monkeypatch.context() as broken:
            broken.setattr(files, "purge_quarantine", no_purge)
            tick(node)
        assert json.loads((tmp_path / "owed.json").read_text())["clears"], "a restart has to know of it"
    tick(node)
    assert not list((tmp_path / "kv").rglob("*.bad"))
    for one in (other, node):
        one.node.close()


def no_purge(_tenant: bytes) -> int:
    raise TierError("it is stuck")


# -- a session's clear, and nodes that are no more (S3 b) ---------------------------------------------


@pytest.mark.parametrize(
    "what", [Clear(TENANT, SESSION), Clear(TENANT, b"other" * 3 + b"!", (SESSION,)), Clear(TENANT)]
)
@pytest.mark.parametrize("keeps_disk", [True, False])
def test_what_a_dead_node_left_is_gone_after_a_restart_too(
    stub: Stub, tmp_path: Path, what: Clear, keeps_disk: bool
) -> None:
    """`keeps_disk` False: a node that is new, or has lost its own."""
    node = start(stub, pending=tmp_path / "owed.json")
    wanted = sample(1, placement=IN_S3)
    foreign = [
        sample(2, session=b"session2" * 2, placement=IN_S3),
        sample(3, tenant=OTHER_TENANT, placement=IN_S3),
    ]
    for one in (wanted, *foreign):
        put(stub, one)  # since this node has looked
    cleared = node.node.clear(what)
    assert cleared.unreachable == ()
    # Killed: it writes down nothing more.
    again = start(stub, "again", pending=tmp_path / ("owed.json" if keeps_disk else "new.json"))
    assert again.look(wanted).spans == ()
    assert put(stub, foreign[1]) in records(stub)
    assert again.load(foreign[1]) is not None
    assert (again.load(foreign[0]) is not None) == (what.session is not None)
    assert len(records(stub)) == (2 if what.session is not None else 1), "deleted, not only hidden"
    for one in (node, again):
        one.node.close()


@pytest.mark.parametrize("what", [Clear(TENANT, SESSION), Clear(TENANT)])
def test_what_is_stored_after_a_clear_stays(stub: Stub, what: Clear) -> None:
    node = start(stub)
    old, new = sample(1, placement=IN_S3), sample(2, placement=IN_S3)
    put(stub, new, ago_s=-LONG_AGO_S)
    node.node.clear(what)
    assert len(records(stub)) == 1
    put(stub, old)
    tick(node)
    assert node.look(old).spans == ()
    assert node.load(new) is not None
    node.node.close()


def test_a_clear_without_the_bucket_says_so_and_is_marked_as_soon_as_it_answers(
    stub: Stub, tmp_path: Path
) -> None:
    node = start(stub, pending=tmp_path / "owed.json")
    wanted = sample(1, placement=IN_S3)
    put(stub, wanted)
    stub.misbehave = lambda to, request: to.error(500, "InternalError")
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ("s3",)
    node.node.close()
    stub.misbehave = stub.behave
    again = start(stub, "again", pending=tmp_path / "owed.json")
    assert again.look(wanted).spans == (), "judged by what is written down"
    assert marks(stub) == []
    tick(again)
    assert len(marks(stub)) == 1
    assert (tmp_path / "owed.json").read_text() == ""
    again.node.close()


def test_a_node_that_was_away_forgets_what_was_cleared_meanwhile_on_its_own_disk(
    stub: Stub, tmp_path: Path
) -> None:
    def node_with_disk(name: str) -> Bench:
        s3 = stub.settings(rescan_s=RESCAN_S)
        files = nvme(tmp_path / "kv")
        node = bench(
            [HeapTier(MIB), files, S3Tier(s3, time.time)],
            settings=TierSettings(s3=s3),
            incarnation=name,
            pending_path=tmp_path / "owed.json",
        )
        join_scans(node.node, 20)
        return node

    mine, hers = (
        sample(number, session=session, placement=Placement(first="nvme", write_behind=(), lowest="nvme"))
        for number, session in ((1, SESSION), (2, b"session2" * 2))
    )
    away = node_with_disk("away")
    for wanted in (mine, hers):
        away.store(wanted)
    away.node.close()
    other = start(stub, "other")
    other.node.clear(Clear(TENANT, SESSION))
    back = node_with_disk("back")
    assert back.look(mine).spans == ()
    assert back.load(hers) is not None
    for one in (other, back):
        one.node.close()


def test_g12_what_a_listing_could_not_read_is_looked_at_again_soon(stub: Stub) -> None:
    """Found by the world (677000001102): it was erased, and lay there until the bucket's next turn."""
    key, is_away = put(stub, sample(1, placement=IN_S3)), True
    stub.misbehave = lambda to, request: (
        to.error(503, "SlowDown") if is_away and request.key == key else stub.behave(to, request)
    )
    node = start(stub)

    def listings(after_s: float) -> int:
        before = sum("list-type" in request.query for request in stub.requests)
        node.clock.now_s += after_s
        node.node.tick()
        join_scans(node.node, 20)
        return sum("list-type" in request.query for request in stub.requests) - before

    def listed_ago_s() -> float | None:
        return next(row.listed_ago_s for row in node.node.stats().tiers if row.name == "s3")

    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == (), "it is marked"
    soon_s = TierSettings().breaker_open_s
    assert [listings(soon_s) > 0 for _ in range(7)] == [True, False, True, False, False, False, True]
    assert (records(stub), listed_ago_s()) == ([key], None)
    is_away = False
    assert listings(8 * soon_s) > 0
    assert (records(stub), listed_ago_s()) == ([], 0.0)
    assert listings(soon_s) == 0, "from now on as often as is set"
    node.node.check_integrity()
    node.node.close()


def test_s3_marks_go_when_a_listing_was_judged_by_them_whole(stub: Stub) -> None:
    node = start(stub, clears_retention_s=0.001)
    node.node.clear(Clear(TENANT, SESSION))
    assert len(marks(stub)) == 1
    tick(node)
    tick(node)
    assert marks(stub) == []
    node.node.close()


def test_s3_marks_stay_where_the_index_has_no_room_for_all(stub: Stub) -> None:
    for number in range(3):
        put(stub, sample(number, session=b"session2" * 2, placement=IN_S3), ago_s=LONG_AGO_S - number)
    node = start(stub, clears_retention_s=0.001, index_objects_max=2)
    node.node.clear(Clear(TENANT, SESSION))
    for _ in range(3):
        tick(node)
    assert len(marks(stub)) == 1
    assert len(records(stub)) == 3
    node.node.close()


def test_s3_too_many_marks_of_a_tenant_clear_what_is_older_and_nobody_elses(stub: Stub) -> None:
    mine, theirs = sample(1, placement=IN_S3), sample(2, tenant=OTHER_TENANT, placement=IN_S3)
    node = start(stub)
    node.node.clear(Clear(OTHER_TENANT, SESSION))
    for number in range(4):
        node.node.clear(Clear(TENANT, bytes([number]) * 16))
    put(stub, mine)
    put(stub, theirs, ago_s=-LONG_AGO_S)
    again = start(stub, "again", clears_max=3)
    assert again.look(mine).spans == ()
    assert again.load(theirs) is not None
    for one in (node, again):
        one.node.close()


def test_s3_marks_tell_their_clears_and_nothing_else_does() -> None:
    keys = S3Keys("some/where")
    sessions = [bytes([number]) * 16 for number in range(16)]
    assert keys.parse_mark(keys.mark(TENANT, [None], "a1")) == (Clear(TENANT),)
    longest = keys.mark(TENANT, sessions, "0" * 16)
    assert keys.parse_mark(longest) == tuple(Clear(TENANT, session) for session in sessions)
    assert len(S3Keys("p" * 256).mark(TENANT, sessions, "0" * 16)) <= 1024
    record = keys.record(Address(TENANT, bytes(32), bytes(32)))
    for other in (
        record,
        longest + "/x",
        longest[:-3] + "xyz",
        keys.clears,
        longest.replace("clears", "clear"),
    ):
        assert keys.parse_mark(other) == ()
    assert keys.parse(longest) is None, "an older version leaves it alone"


def test_s3_marks_are_read_back(stub: Stub) -> None:
    """A bucket that says yes and keeps nothing."""

    def forgetful(to: Answering, request: Request) -> None:
        if request.method == "PUT" and "/clears/" in request.key:
            to.answer(200)
        else:
            stub.behave(to, request)

    stub.misbehave = forgetful
    node = start(stub)
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ("s3",)
    assert isinstance(clears_of(node.tiers["s3"]), S3Clears)
    node.node.close()


# -- one tenant's clears, and the others (S4) ---------------------------------------------------------


def test_a_flood_of_clears_of_one_tenant_touches_no_object_of_another(stub: Stub) -> None:
    node = start(stub, tombstones_max=10)
    samples = [sample(number, placement=IN_S3) for number in range(4)]
    for wanted in samples:
        put(stub, wanted)
    for number in range(11):
        node.node.clear(Clear(OTHER_TENANT, number.to_bytes(16, "little")))
    tick(node)
    assert len(records(stub)) == 4
    for wanted in samples:
        assert node.load(wanted) is not None
    node.node.close()


def test_a_thousand_clears_while_the_bucket_is_looked_through() -> None:
    """The same without a network: 1,001 clears, tombstones_max=1000, objects put by another node."""
    bucket = SharedBucket(MIB)
    settings = TierSettings(tombstones_max=1000, s3=S3TierSettings(rescan_s=RESCAN_S))
    node = bench([SharedBucket(MIB, bucket)], settings=settings)
    join_scans(node.node, 20)
    other = bench([bucket], settings=settings, incarnation="other")
    samples = [sample(number, placement=IN_S3) for number in range(4)]
    for wanted in samples:
        assert other.store(wanted) == "taken"
    for number in range(1001):
        node.node.clear(Clear(OTHER_TENANT, number.to_bytes(16, "little")))
    tick(node)
    assert all(node.load(wanted) is not None for wanted in samples)
    assert bucket.bytes_held() == sum(wanted.record.nbytes for wanted in samples)


def test_a_clear_of_ids_that_nobody_has_leaves_no_tombstone_on_a_node(stub: Stub, tmp_path: Path) -> None:
    node = start(stub, pending=tmp_path / "owed.json")
    node.node.clear(Clear(TENANT, SESSION, tuple(bytes([number]) * 16 for number in range(6))))
    assert state_of(node.node).catalog.clears.tombstones == 0
    assert len(state_of(node.node).pending) == 0
    assert len(marks(stub)) == 1, "another node may have put some of it there: one mark for all of them"
    node.node.close()


# -- while a scan is under way ------------------------------------------------------------------------


class Slow(SharedBucket):
    """Calls `between` after what a scan lists was listed."""

    def rescan(self, is_known):  # type: ignore[no-untyped-def]
        listed = list(super().rescan(is_known))
        self.between()
        yield from listed

    def between(self) -> None:
        """Nothing, until a test says what."""


@pytest.mark.parametrize("what", [Clear(TENANT, SESSION), Clear(TENANT)])
def test_g12_what_is_cleared_while_a_scan_runs_is_not_taken_in_by_it(what: Clear) -> None:
    """It is listed before the clear, which finds nothing of it in the books."""
    bucket = Slow(MIB)
    node = bench([bucket], settings=TierSettings(s3=S3TierSettings(rescan_s=RESCAN_S)))
    join_scans(node.node, 20)
    wanted, foreign = sample(1, placement=IN_S3), sample(2, tenant=OTHER_TENANT, placement=IN_S3)
    for one in (wanted, foreign):
        SharedBucket.put(bucket, one.header.address, Record(one.record), deadline=Deadline(1.0))
    bucket.purge = lambda tenant, is_known, deadline: True  # type: ignore[method-assign]
    bucket.between = lambda: void(node.node.clear(what))  # type: ignore[method-assign]
    tick(node)
    bucket.between = lambda: None  # type: ignore[method-assign]
    assert node.copies(wanted) == ()
    assert node.copies(foreign) == ("s3",)
    assert bucket.bytes_held() == foreign.record.nbytes


def test_g12_what_was_cleared_before_a_scan_is_not_taken_in_though_that_is_settled_meanwhile() -> None:
    """Found by the world (seed 7000006): the mark came behind the scan's own look at the marks."""
    bucket = Slow(MIB)
    node = bench([bucket], settings=TierSettings(s3=S3TierSettings(rescan_s=RESCAN_S)))
    join_scans(node.node, 20)
    wanted, pending = sample(1, placement=IN_S3), state_of(node.node).pending
    SharedBucket.put(bucket, wanted.header.address, Record(wanted.record), deadline=Deadline(1.0))
    clear = Clear(TENANT, SESSION)
    number = pending.add_clear("s3", clear)
    assert number is not None
    bucket.between = lambda: pending.settle_clear("s3", clear, number)  # type: ignore[method-assign]
    scans_of(node.node).look(20.0)  # and not `tick`, which goes on with the clear beside it
    join_scans(node.node, 20)
    assert pending.clears_of("s3") == []
    assert node.copies(wanted) == ()
    assert bucket.bytes_held() == 0


def void(_result: object) -> None:
    """For callables that return nothing."""


# -- written down before anything is deleted -----------------------------------------------------------


class Watched(MemoryTier):
    """Remembers what was written down when its first delete came."""

    def __init__(self, pending: Path) -> None:
        super().__init__("nvme", MIB)
        self._pending = pending
        self.seen: list[str] = []

    def delete(self, address: Address) -> None:
        self.seen.append(self._pending.read_text() if self._pending.exists() else "")
        super().delete(address)


@pytest.mark.parametrize("what", [Clear(TENANT, SESSION), Clear(TENANT)])
def test_g12_a_clear_is_written_down_before_the_first_record_is_deleted(tmp_path: Path, what: Clear) -> None:
    path = tmp_path / "owed.json"
    tier = Watched(path)
    node = bench([tier], pending_path=path)
    samples = [sample(number, placement=Placement(first="nvme", write_behind=())) for number in range(3)]
    for wanted in samples:
        node.store(wanted)
    row = ["nvme", TENANT.hex(), None if what.session is None else what.session.hex()]
    node.node.clear(what)
    assert [json.loads(text)["clears"] for text in tier.seen] == [[row]] * 3
    assert path.read_text() == ""
    node.node.check_integrity()


def test_g12_a_crash_in_the_middle_of_a_clear_brings_nothing_back(tmp_path: Path) -> None:
    path = tmp_path / "owed.json"
    tier = MemoryTier("nvme", MIB)

    def crash(state: str) -> None:
        if state == "dropping":
            raise KeyboardInterrupt

    node = bench([tier], pending_path=path, reach=crash)
    samples = [sample(number, placement=Placement(first="nvme", write_behind=())) for number in range(3)]
    for wanted in samples:
        node.store(wanted)
    with pytest.raises(KeyboardInterrupt):
        node.node.clear(Clear(TENANT, SESSION))
    assert tier.bytes_held() == sum(wanted.record.nbytes for wanted in samples)
    again = bench([tier], pending_path=path, incarnation="again")
    assert not any(again.look(wanted).spans for wanted in samples)
    assert tier.bytes_held() == 0
    again.node.tick()
    assert path.read_text() == ""


def test_g12_a_write_under_way_for_a_clear_is_pending_before_the_deletes(tmp_path: Path) -> None:
    """The crash comes between the clear and the end of a write that it has fenced."""
    path = tmp_path / "owed.json"
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], pending_path=path, workers=1)
    wanted = sample(1, placement=Placement(first="nvme", write_behind=()))
    tier.gate.clear()
    try:
        assert node.offer(wanted) == "taken"
        assert tier.waiting.acquire(timeout=20)
        node.node.clear(Clear(TENANT, SESSION))
        address = wanted.header.address
        row = ["nvme", *(part.hex() for part in (address.tenant, address.namespace, address.extent_id))]
        assert json.loads(path.read_text())["deletes"] == [row]
    finally:
        tier.gate.set()
        node.node.close()


@pytest.mark.parametrize("dies", [True, False])
def test_g12_what_is_to_make_room_when_it_is_cleared_does_not_come_back(tmp_path: Path, dies: bool) -> None:
    """Found by the world (177000000512): what needs the room waits for a worker, and the process dies.

    The books had forgotten what was evicted, so the clear was done without it, and a scan took it in.
    """
    path, tier, on_disk = tmp_path / "owed.json", MemoryTier("nvme", MIB), Placement("nvme", ())
    old, new = sample(1, placement=on_disk), sample(2, tenant=OTHER_TENANT, placement=on_disk)
    node = bench([tier], pending_path=path, budgets={"nvme": old.record.nbytes})
    node.store(old)
    assert node.offer(new) == "taken"
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ()
    assert tier.bytes_held() == old.record.nbytes
    if dies:
        node = bench([tier], pending_path=path, incarnation="again")
        assert node.look(old).spans == ()
        assert tier.bytes_held() == 0
    else:
        node.node.tick()  # it may be deleted before the room is needed
        assert node.offer(old, node.look(old)) != "taken"
        node.work()
        assert node.load(new) is not None
    node.node.tick()
    assert path.read_text() == ""
    node.node.check_integrity()


def test_g12_what_could_not_make_room_is_left_of_a_clear(tmp_path: Path) -> None:
    """Its tier was asked, and does not answer: a delete of it is tried again, and the clear says so."""
    path, tier, on_disk = tmp_path / "owed.json", MemoryTier("nvme", MIB), Placement("nvme", ())
    files = faulty(tier)
    old, new = sample(1, placement=on_disk), sample(2, tenant=OTHER_TENANT, placement=on_disk)
    node = bench([files], pending_path=path, budgets={"nvme": old.record.nbytes})
    node.store(old)
    assert node.offer(new) == "taken"
    files.update(FAILING)
    node.work()
    cleared = node.node.clear(Clear(TENANT, SESSION))
    assert (cleared.unreachable, cleared.is_noted) == (("nvme",), True)
    files.update(FaultSettings())
    again = bench([tier], pending_path=path, incarnation="again")
    assert again.look(old).spans == ()
    assert tier.bytes_held() == 0


def test_g12_a_name_that_found_no_room_is_left_of_a_clear(tmp_path: Path) -> None:
    """Found by the world (577000000979): a record has its name, which can be neither flushed nor removed.

    Its write was called off as one of which nothing is there, so nobody deleted it, and a scan took it in.
    """
    path, files = tmp_path / "owed.json", nvme(tmp_path / "kv", calls=(calls := SickCalls()))
    node = bench([files], pending_path=path)
    wanted = sample(1, placement=Placement("nvme", ()))

    def is_full(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if "rename" in calls.seen and name in ("fsync", "unlink"):
            raise OSError(errno.ENOSPC, "no room")
        return calls.really(name, *args)

    calls.arm(is_full, 1, 1_000_000)
    assert node.store(wanted) == "taken"
    assert list((tmp_path / "kv").rglob("*.kv")), "the fault did not come about"
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ("nvme",)
    files.close()
    again = bench([nvme(tmp_path / "kv")], pending_path=path, incarnation="again")
    assert again.look(wanted).spans == ()
    again.node.tick()
    assert not list((tmp_path / "kv").rglob("*.kv"))
    assert path.read_text() == ""
    again.node.check_integrity()
    again.node.close()


def hold_deletes(tier: MemoryTier) -> tuple[threading.Semaphore, threading.Event]:
    """From now on each delete releases the first, and waits for the second."""
    asked, goes_on, delete = threading.Semaphore(0), threading.Event(), tier.delete

    def slowly(address: Address) -> None:
        asked.release()
        goes_on.wait(20)
        delete(address)

    tier.delete = slowly  # type: ignore[method-assign]
    return asked, goes_on


def test_g10_a_record_is_deleted_once_at_a_time(tmp_path: Path) -> None:
    """Found by the world (778000000581): it was stored again between the ends of two deletes of it.

    What made room was being deleted on a slow disk as its session was erased, so that a second delete began.
    """
    tier, on_disk = MemoryTier("nvme", MIB), Placement("nvme", ())
    node = bench([tier], pending_path=tmp_path / "owed.json")
    old = sample(1, placement=on_disk)
    node.store(old)
    asked, goes_on = hold_deletes(tier)
    (address,) = state_of(node.node).catalog.hottest("nvme")
    first = threading.Thread(target=state_of(node.node).lost, args=(address, "nvme"))
    first.start()
    assert asked.acquire(timeout=20)
    node.node.clear(Clear(TENANT, SESSION))  # it makes the delete pending, as of what was evicted
    second = threading.Thread(target=node.node.tick)
    second.start()
    second.join(20)
    assert not asked.acquire(blocking=False), "two are at it"
    assert node.offer(old, node.look(old)) != "taken"
    goes_on.set()
    first.join(20)
    assert node.store(old) == "taken"
    node.node.tick()
    assert state_of(node.node).delete("nvme", address), "it was pending when a thread decided so"
    assert node.load(old) is not None
    node.node.check_integrity()


def test_g10_a_delete_that_is_late_is_not_tried_again_before_it_has_ended(tmp_path: Path) -> None:
    """It could end behind the next one, when the record is stored again; and each takes a thread."""
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], pending_path=tmp_path / "owed.json")
    node.store(old := sample(1, placement=Placement("nvme", ())))
    state = state_of(node.node)
    with state.lock:
        eviction = state.catalog.lose(old.header.address, "nvme")
    assert eviction is not None
    asked, goes_on = hold_deletes(tier)
    assert state.drop([eviction], budget_s=0.05) == {"nvme"}
    assert asked.acquire(timeout=20)
    node.node.tick()
    assert not asked.acquire(blocking=False)
    goes_on.set()
    ends_s = time.monotonic() + 20
    while len(state.pending) and time.monotonic() < ends_s:
        node.node.tick()
    assert not len(state.pending)
    assert node.store(old) == "taken"
    assert state.drop([eviction]) == set(), "it was deleted before, and is stored again since"
    assert node.load(old) is not None
    node.node.check_integrity()


def test_g12_a_record_that_cannot_be_deleted_keeps_no_other_from_it(tmp_path: Path) -> None:
    tier, path = MemoryTier("nvme", MIB), tmp_path / "owed.json"
    samples = [sample(number, placement=Placement("nvme", ())) for number in range(3)]
    stuck, delete = samples[0].header.address, tier.delete
    node = bench([tier], pending_path=path)
    for wanted in samples:
        node.store(wanted)

    def fails(address: Address) -> None:
        raise TierError("not now")

    def fails_for_one(address: Address) -> None:
        if address == stuck:
            raise TierError("not permitted")
        delete(address)

    tier.delete = fails  # type: ignore[method-assign]
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ("nvme",)
    tier.delete = fails_for_one  # type: ignore[method-assign]
    for _ in range(20):
        node.clock.now_s += 60.0
        node.node.tick()
    assert tier.bytes_held() == samples[0].record.nbytes
    assert stuck.extent_id.hex() in path.read_text()
    node.node.check_integrity()


def test_g12_what_a_second_attempt_could_not_write_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one found no room, and left its name; the second was not made: the tier was down by then."""

    class Named(MemoryTier):
        def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
            super().put(address, record, deadline=deadline)
            if address == new.header.address:
                raise TierFull("no room for its name")

    tier, on_disk = Named("nvme", MIB), Placement("nvme", ())
    old, new = sample(1, placement=on_disk), sample(2, placement=on_disk)
    node = bench([tier])
    node.store(old)
    guard, puts = guards_of(node.node)["nvme"], list[Address]()
    put = guard.put

    def once(address: Address, *given: Any, **more: Any) -> None:
        puts.append(address)
        if len(puts) == 2:
            raise TierDown("breaker open")
        put(address, *given, **more)

    monkeypatch.setattr(guard, "put", once)
    node.store(new)
    assert puts == [new.header.address] * 2
    assert tier.bytes_held() == 0, "what made room is gone, and so is what came for it"
    node.node.check_integrity()


def test_g12_a_list_whose_name_was_not_flushed_is_written_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "owed.json", SickCalls()
    pending, address = PendingDeletes(path, 10, calls), sample(1).header.address
    pending.add("nvme", address, cleared=True)
    owed = pending.text()
    assert pending.save(owed)

    def unflushed(calls: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if "rename" in calls.seen and name == "fsync":
            raise OSError(errno.EIO, "the disk fails")
        return calls.really(name, *args)

    calls.arm(unflushed, 1, 1_000_000)
    pending.settle("nvme", address)
    assert not pending.save(pending.text())
    calls.heal()
    pending.add("nvme", address, cleared=True)
    assert pending.save(pending.text())
    assert path.read_text() == owed


def test_g12_what_waits_for_a_tier_that_is_away_waits_in_a_directory_that_was_taken_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "owed.json"
    text = json.dumps({"version": 1, "deletes": [], "clears": [["elsewhere", TENANT.hex(), None]]})
    path.write_text(text)
    pending = PendingDeletes(None, 10)
    pending.open(path)
    assert pending.text() == text


def test_g12_a_disk_that_could_not_be_opened_is_left_of_a_clear(tmp_path: Path) -> None:
    """It is off until the node starts again, and may hold what is cleared: nothing had said so."""
    settings = TierSettings.model_validate({"nvme": {"bytes_max": MIB}})
    ports = NodePorts(time.monotonic, time.time, records_of(StagingBuffer(MIB, keep_s=1.0), []))

    def started(incarnation: str) -> TierNode:
        built = build_tiers(settings, tmp_path / "kv", make_cpu=HeapTier, wall_clock=time.time)
        node = TierNode(settings, built, NodeIdentity("node", incarnation), ports, workers=0)
        node.start()
        return node

    (tmp_path / "kv").write_text("no directory")
    node = started("first")
    cleared = node.clear(Clear(TENANT, SESSION))
    assert (cleared.unreachable, cleared.is_noted) == (("nvme",), False)
    node.close()
    (tmp_path / "kv").unlink()
    node = started("again")
    assert node.clear(Clear(TENANT, SESSION)).unreachable == ()
    node.close()


def test_g12_a_bucket_that_could_not_be_opened_is_left_of_a_clear(tmp_path: Path) -> None:
    bucket = {"bucket": "kv", "prefix": "a/../b"}
    settings = TierSettings.model_validate({"nvme": {"bytes_max": 0}, "s3": bucket})
    built = build_tiers(settings, tmp_path / "kv", make_cpu=HeapTier, wall_clock=time.time)
    assert "must not climb" in built.off["s3"]
    ports = NodePorts(time.monotonic, time.time, records_of(StagingBuffer(MIB, keep_s=1.0)))
    node = TierNode(settings, built, NodeIdentity("node", "first"), ports, workers=0)
    node.start()
    cleared = node.clear(Clear(TENANT))
    assert (cleared.unreachable, cleared.is_noted) == (("s3",), False)
    node.close()
