"""The laws of a store, held by both, SQLite's and PostgreSQL's: versions, rankings, tenants, quotas, crashes.

And what erasing leaves.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge import (
    Authorship,
    Change,
    EntryNotFound,
    EntryRef,
    KnowledgeBase,
    KnowledgeError,
    Limits,
    LoopRecord,
    PlacedTurn,
    Provenance,
    QuotaExceeded,
    RecordBounds,
    SqliteStore,
    StateChanged,
    VersionConflict,
    diff,
)
from samovar.router.context.knowledge.sqlite_file import SqliteFile
from samovar.router.context.knowledge.sqlite_schema import SCHEMAS
from tests.house import ROOT
from tests.support.router.knowledge_desks import LIMITS, ME, Desk, PostgresDesk, SqliteDesk, axis, content
from tests.support.router.sealed_desks import SealedDesk, SealedPostgresDesk


@pytest.fixture(params=["sqlite", "postgres", "sealed", "sealed-postgres"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    if request.param == "sqlite":
        made: Desk = SqliteDesk(tmp_path / "data" / "knowledge.sqlite")
    elif request.param == "sealed":
        made = SealedDesk(tmp_path / "data" / "knowledge.sqlite")
    elif request.param == "sealed-postgres":
        made = SealedPostgresDesk(request.getfixturevalue("postgres_server"), tmp_path / "keys")
    else:
        made = PostgresDesk(request.getfixturevalue("postgres_server"))
    yield made
    made.store.check_integrity()
    made.store.close()
    if isinstance(made, PostgresDesk):
        made.drop()


def test_versions_are_appended_with_who_when_why_and_from_which_turn(desk: Desk) -> None:
    ref = desk.add("orders are in euro")
    desk.now_s = 2000.0
    assert desk.change(ref.entry, "orders are in cents", base=1) == EntryRef(ref.entry, 2)
    with pytest.raises(VersionConflict, match=r"version 2 of kb_[0-9a-f]{20} is the newest"):
        desk.change(ref.entry, "orders are in yen", base=1)
    first, second = desk.store.history("tea", ref.entry)
    assert (first.provenance, first.at_s, second.at_s) == (ME, 1000.0, 2000.0)
    assert (first.operation, second.operation) == ("create", "update")
    assert desk.store.head("tea", ref.entry) == second
    assert desk.store.version("tea", ref) == first
    assert "-orders are in euro\n+orders are in cents" in diff(first.content, second.content)
    assert desk.found("euro") == []
    assert desk.found("cent") == [ref.entry]


def test_a_retired_entry_is_not_found_and_its_history_stays(desk: Desk) -> None:
    ref = desk.add("the ORD_7 table is stale", place=1)
    desk.change(ref.entry, "the ORD_7 table is stale", operation="retire")
    assert (
        desk.found("stale") == desk.store.heads("tea") == desk.store.by_names("tea", ["ord_7"], (), 9) == []
    )
    assert desk.store.by_meaning("tea", axis(1), (), 9) == []
    assert len(desk.store.history("tea", ref.entry)) == 2
    desk.change(ref.entry, "the ORD_7 table is stale", operation="revert")
    assert desk.found("stale") == [ref.entry]


def test_each_ranking_finds_its_own_and_kinds_filter_them(desk: Desk) -> None:
    words = desk.add("invoices are late", kind="schema")
    names = desk.add("join on order_items first", kind="gotcha")
    meaning = desk.add("something else", place=2)
    assert desk.found("invoice") == [words.entry]
    assert desk.store.by_names("tea", ["order_items"], (), 9) == [(names, 1.0)]
    assert desk.store.by_meaning("tea", axis(2), (), 1) == [(meaning, 1.0)]
    assert desk.store.by_words("tea", ["invoice"], ["gotcha"], 9) == []
    assert desk.store.by_names("tea", ["order_items"], ["schema"], 9) == []
    assert desk.store.by_meaning("tea", axis(2), ["schema"], 9) == []
    assert desk.store.by_words("tea", ['a" OR text:*', "NEAR(", "", "-"], (), 9) == []


def test_what_has_no_vector_of_this_embedder_is_known_and_gets_one(tmp_path: Path, desk: Desk) -> None:
    ref, other = desk.add("without"), desk.add("with", place=3)
    (missing,) = desk.store.without_vector("tea", 9)
    assert missing.ref == ref
    desk.store.put_vectors("tea", [(ref, axis(0)), (EntryRef(other.entry, 7), axis(0))])
    assert desk.store.without_vector("tea", 9) == []
    assert desk.store.by_meaning("tea", axis(0), (), 1) == [(ref, 1.0)]
    again = desk.open("another")
    assert (len(again.without_vector("tea", 9)), again.by_meaning("tea", axis(0), (), 9)) == (2, [])
    again.close()


def test_nothing_of_a_tenant_is_another_tenants_and_no_count_of_it_either(desk: Desk) -> None:
    own = desk.add("samovar boils water", place=0)
    before = desk.store.by_words("tea", ["samovar", "water"], (), 9)
    for number in range(20):
        desk.add(f"samovar samovar number {number}", tenant="other", place=0)
    assert desk.store.by_words("tea", ["samovar", "water"], (), 9) == before, "scores count own entries only"
    assert desk.store.by_meaning("tea", axis(0), (), 99) == [(own, 1.0)]
    assert [one.ref for one in desk.store.heads("tea")] == [own]
    for call in (
        lambda: desk.store.head("other", own.entry),
        lambda: desk.store.history("other", own.entry),
        lambda: desk.store.version("other", own),
        lambda: desk.store.write("other", [Change(content("x"), ME, own.entry, "update")], LIMITS),
    ):
        with pytest.raises(EntryNotFound):
            call()
    desk.store.note_turn("tea", b"s", b"k", PlacedTurn(front=(own,)))
    assert desk.store.turns("other", b"s", [b"k"]) == {}
    assert desk.store.recent_fronts("other", 9) == []
    desk.store.tag("tea", "v1", LIMITS)
    assert desk.store.tags("other") == {}
    assert desk.store.erase("other", own.entry) == 0
    assert desk.store.erase("other", None) == 20
    assert desk.store.head("tea", own.entry).ref == own


def test_quotas_hold_and_a_refused_write_leaves_nothing(desk: Desk) -> None:
    small = Limits(entries_max=2, bytes_max=400, tags_max=1)
    some = [Change(content(text), ME) for text in ("one", "two")]
    desk.store.write("tea", some, small)
    with pytest.raises(QuotaExceeded, match=r"knowledge\.entries_max"):
        desk.store.write("tea", some, small)
    entry = desk.store.heads("tea")[0].ref.entry
    with pytest.raises(QuotaExceeded, match=r"knowledge\.bytes_max"):
        desk.store.write("tea", [Change(content("x"), ME, entry, "update")], small)
    assert len(desk.store.heads("tea")) == 2
    assert len(desk.store.history("tea", entry)) == 1
    desk.store.tag("tea", "v1", small)
    desk.store.tag("tea", "v1", small)
    with pytest.raises(QuotaExceeded, match="there are 1 tags"):
        desk.store.tag("tea", "v2", small)


def test_a_trial_shows_a_change_to_its_thread_and_keeps_nobody_waiting(desk: Desk) -> None:
    kept = desk.add("kept words", place=1)
    gone = desk.add("changed words", place=3)
    changed = desk.change(gone.entry, "changed otherwise")
    desk.add("kept words", tenant="other", place=1)
    state = desk.store.state("tea")
    planted = [Change(content("planted"), ME, vector=axis(1)), Change(content("x"), ME, gone.entry, "retire")]
    with desk.store.trial("tea", []) as same:
        for word in ("kept", "words", "changed", "otherwise", "planted"):
            assert same.by_words("tea", [word], (), 9) == desk.store.by_words("tea", [word], (), 9)
        assert same.by_meaning("tea", axis(1), (), 9) == desk.store.by_meaning("tea", axis(1), (), 9)
        assert same.heads("other") == []
    with desk.store.trial("tea", planted) as tried:
        assert len(tried.by_words("tea", ["planted"], (), 9)) == 1
        assert [cosine for _, cosine in tried.by_meaning("tea", axis(1), (), 9)].count(1.0) == 2
        assert tried.by_words("tea", ["otherwise"], (), 9) == []
        desk.add("meanwhile")  # with the lock of the file: nobody holds it
    assert desk.found("planted") == []
    assert desk.found("otherwise") == [changed.entry]
    assert [ref for ref, cosine in desk.store.by_meaning("tea", axis(1), (), 9) if cosine > 0.5] == [kept]
    with pytest.raises(StateChanged):
        desk.store.write("tea", planted, LIMITS, since=state)
    assert desk.found("planted") == []
    assert desk.store.write("tea", planted, LIMITS, since=desk.store.state("tea"))
    with desk.store.trial("new tenant", planted[:1]) as tried:
        assert len(tried.heads("new tenant")) == 1
    assert desk.store.state("new tenant") == 0


def record(name: str, body: str = "{}", **fields: Any) -> LoopRecord:
    return LoopRecord("candidate", name, body, at_s=1000.0, **fields)


def test_records_are_kept_within_bounds_and_found_by_what_is_given(desk: Desk) -> None:
    records, few = desk.store.records, RecordBounds(3, 10_000, leaving=("rejected",))
    records.put("tea", record("a", session=b"s", state="open", key=b"k", vector=axis(0)), few)
    records.put("tea", record("b", session=b"t", state="rejected", vector=axis(1)), few)
    records.put("tea", record("c", session=b"s", state="open"), few)
    records.put("coffee", record("a", session=b"s", key=b"k", vector=axis(0)), few)

    def ids(**fit: Any) -> list[str]:
        return [one.id for one in records.find("tea", "candidate", **fit)]

    assert ids() == ["c", "b", "a"]
    assert (ids(session=b"s"), ids(key=b"k"), ids(ids=["b", "x"])) == (["c", "a"], ["a"], ["b"])
    assert (ids(limit=1), ids(limit=1, after="c"), ids(after="a"), ids(state="open")) == (
        ["c"], ["b"], [], ["c", "a"]
    )  # fmt: skip
    assert records.similar("tea", "candidate", axis(1), 0.5, 9) == [("b", 1.0)]
    assert records.count("tea", "candidate", session=b"s") == 2
    assert records.count("tea", "candidate", since_s=1001.0) == 0
    records.put("tea", record("d", state="open"), few)
    assert ids() == ["d", "c", "a"], "the oldest that may leave has left"
    with pytest.raises(QuotaExceeded, match="3 with 10000 are kept"):
        records.put("tea", record("e", state="open"), few)
    with pytest.raises(QuotaExceeded):
        records.put("tea", record("a", "x" * 9500, state="open"), few)
    assert ids() == ["d", "c", "a"]
    records.put("tea", record("c", '{"new": 1}', state="rejected", expires_s=2000.0), few)
    (changed,) = records.find("tea", "candidate", ids=["c"])
    assert (changed.body, changed.state, changed.session) == ('{"new": 1}', "rejected", b"")
    desk.now_s = 2000.0
    assert ids() == ["d", "a"], "what has expired is not there"
    again = desk.open("another")
    assert again.records.similar("tea", "candidate", axis(0), 0.0, 9) == []
    assert again.records.find("tea", "candidate", ids=["a"])[0].vector is None
    again.close()
    assert records.erase("tea", kind="candidate", sessions=[b"s"]) == 1
    assert (ids(), records.erase("tea"), ids()) == (["d"], 2, [])
    assert records.count("coffee", "candidate") == 1


def test_entries_and_records_are_written_together_or_not_at_all(desk: Desk) -> None:
    bounds = RecordBounds(9, 10_000)

    def write(end: int) -> float:
        with desk.store.transaction():
            desk.add("both")
            desk.store.records.put("tea", record("a"), bounds)
            return 1 / end

    with pytest.raises(ZeroDivisionError):
        write(0)
    assert desk.store.heads("tea") == []
    assert desk.store.records.find("tea", "candidate") == []
    write(1)
    with desk.store.transaction():
        with pytest.raises(QuotaExceeded):
            desk.store.records.put("tea", record("b"), RecordBounds(0, 10_000, ()))
        with pytest.raises(QuotaExceeded):
            desk.store.write("tea", [Change(content("both"), ME)], Limits(0, 10_000, 9))
    assert len(desk.found("both")) == 1
    assert len(desk.store.heads("tea")) == len(desk.store.records.find("tea", "candidate")) == 1
    assert desk.store.authorship("tea", "me", 1000.0) == Authorship(1, 1, 1)
    assert desk.store.authorship("tea", "me", 1000.5) == Authorship(1, 1, 0)
    assert desk.store.authorship("tea", "another", 0.0) == Authorship(1, 0, 0)


def test_records_go_with_their_entry_session_and_tenant_and_leave_no_byte(desk: Desk) -> None:
    bounds, ref = RecordBounds(9, 10_000), desk.add("an entry learned from turn-1")
    for name, turn, session in (("a", "turn-1", b"s"), ("b", "turn-2", b"t"), ("c", "turn-3", b"u")):
        desk.store.records.put("tea", record(name, f'"xylophone-{name}"', turn=turn, session=session), bounds)
    desk.store.records.put("tea", LoopRecord("questions", "q", '"xylophone-q"'), bounds)

    def left() -> str:
        seen = "".join(name for name in "abcq" if desk.seen([f"xylophone-{name}".encode()]))
        kept = [one for kind in ("candidate", "questions") for one in desk.store.records.find("tea", kind)]
        assert seen == ("" if desk.is_sealed else "".join(sorted(one.id for one in kept)))
        return "".join(sorted(one.id for one in kept))

    assert left() == "abcq"
    desk.store.erase("tea", ref.entry)
    assert left() == "bcq"
    desk.store.forget_sessions("tea", [b"t"])
    assert left() == "cq"
    desk.store.forget_sessions("tea", None)
    assert left() == "q"
    desk.store.erase("tea", None)
    assert left() == ""


def test_an_entry_whose_turn_is_empty_takes_no_record_without_a_turn_with_it(desk: Desk) -> None:
    """Versions of before have one: what a client sent is now cleaned to none."""
    (made,) = desk.store.write("tea", [Change(content("kept"), Provenance("me", turn=""))], LIMITS)
    desk.store.records.put("tea", LoopRecord("questions", "q", "[]"), RecordBounds(9, 10_000))
    assert desk.store.erase("tea", made.ref.entry) == 1
    assert [one.id for one in desk.store.records.find("tea", "questions")] == ["q"]


@pytest.mark.guarantee("G12")
async def test_a_late_erasure_of_all_leaves_no_byte_of_before_and_what_came_since(desk: Desk) -> None:
    """Also of retired entries, of their history, and of records that no entry was learned from."""
    base = KnowledgeBase(desk.store, None, None, KnowledgeSettings())  # type: ignore[arg-type]
    bounds, words = RecordBounds(9, 10_000), [b"xylophoneninety", b"zanzibarsixty", b"quartzkey", b"oldtag"]
    retired, retired_since = desk.add("xylophoneninety", place=1), desk.add("xylophoneninety", place=2)
    desk.change(retired.entry, "zanzibarsixty")
    desk.change(retired.entry, "zanzibarsixty", operation="retire")
    desk.add("xylophoneninety")
    kept = LoopRecord("turn", "turn-9", '"quartzkey"', turn="turn-9", session=b"s", at_s=1000.0)
    desk.store.records.put("tea", kept, bounds)
    desk.store.note_turn("tea", b"s", b"oldtag", PlacedTurn((retired,)))
    desk.store.tag("tea", "oldtag", LIMITS)
    assert len(desk.seen(words)) == (1 if desk.is_sealed else 4), "names of tags are readable"
    desk.now_s = 1002.0
    desk.change(retired_since.entry, "xylophoneninety", operation="retire")
    new = desk.add("since then")
    desk.store.records.put("tea", LoopRecord("turn", "turn-10", '"since"', at_s=1002.0), bounds)
    desk.store.tag("tea", "newtag", LIMITS)
    desk.add("of another xylophone", tenant="coffee")
    assert await base.erase("tea", None, 1001.0) == 3
    assert desk.seen(words) == []
    assert [one.ref for one in desk.store.heads("tea")] == [new]
    assert desk.found("since") == [new.entry]
    assert [one.id for one in desk.store.records.find("tea", "turn")] == ["turn-10"]
    assert list(desk.store.tags("tea")) == ["newtag"]
    assert len(desk.store.heads("coffee")) == 1
    base.turns.close(wait=True)


def test_history_has_pages(desk: Desk) -> None:
    ref = desk.add("one")
    for text in ("two", "three"):
        desk.change(ref.entry, text)

    def texts(**page: int) -> list[str]:
        return [one.content.text for one in desk.store.history("tea", ref.entry, **page)]

    assert (texts(), texts(limit=2), texts(before=2), texts(before=1)) == (
        ["one", "two", "three"], ["two", "three"], ["one"], []
    )  # fmt: skip
    with pytest.raises(EntryNotFound):
        desk.store.history("tea", "kb_" + "0" * 20, before=1)


def test_a_file_of_the_first_format_gets_what_it_lacks(tmp_path: Path) -> None:
    SqliteFile(tmp_path / "file", SCHEMAS[:1], 1.0).close()
    store = SqliteStore(tmp_path / "file")
    store.records.put("tea", record("a"), RecordBounds(1, 1000))
    store.check_integrity()
    store.close()
    SqliteFile(tmp_path / "old", SCHEMAS[:1], 1.0).close()
    store.restore(tmp_path / "old")
    assert store.records.find("tea", "candidate") == []
    store.close()
    with pytest.raises(KnowledgeError, match="format 2, and this version reads 1"):
        SqliteFile(tmp_path / "file", SCHEMAS[:1], 1.0)


def test_turns_are_remembered_within_bounds_and_forgotten_by_session(desk: Desk) -> None:
    ref = desk.add("x")
    desk.store.note_turn("other", b"s", b"the first", PlacedTurn())
    for number in range(300):
        desk.store.note_turn("tea", bytes([number % 2]), str(number).encode(), PlacedTurn((ref,), (ref, ref)))
    keys = [str(number).encode() for number in range(300)]
    kept = {**desk.store.turns("tea", b"\0", keys), **desk.store.turns("tea", b"\1", keys)}
    assert 0 < len(kept) < 100
    assert desk.store.turns("other", b"s", [b"the first"]), "one tenant's turns do not push out another's"
    assert kept[b"299"] == PlacedTurn((ref,), (ref, ref))
    assert desk.store.recent_fronts("tea", 9) == [(ref,)]
    desk.store.forget_sessions("tea", [b"\1"])
    assert desk.store.turns("tea", b"\1", keys) == {}
    assert desk.store.turns("tea", b"\0", keys)
    desk.store.forget_sessions("tea", None)
    assert desk.store.recent_fronts("tea", 9) == []


@pytest.mark.parametrize("whole_tenant", [False, True])
def test_erasing_leaves_no_byte_in_any_file(desk: Desk, whole_tenant: bool) -> None:
    secret = desk.add("the vault code is xylophoneninety", place=1, title="Quartzkey")
    desk.change(secret.entry, "the vault code was zanzibarsixty")
    for number in range(50):
        desk.add(f"filler {number} " + "words " * 40, tenant="tea" if number % 2 else "other")
    words = [b"xylophoneninety", b"xylophonenineti", b"quartzkey", b"zanzibarsixty", b"zanzibarsixti"]

    assert (len(desk.seen(words)) > 2) != desk.is_sealed, "the search finds nothing at all"
    assert desk.store.erase("tea", None if whole_tenant else secret.entry)
    assert desk.seen(words) == []
    assert desk.found("xylophoneninety") == []
    with pytest.raises(EntryNotFound):
        desk.store.history("tea", secret.entry)
    assert len(desk.store.heads("other")) == 25


def test_writers_in_threads_and_processes_lose_nothing(desk: Desk) -> None:
    ref = desk.add("start")
    code = f"""
        store = {desk.code}
        for number in range(10):
            said = Content("gotcha", "", f"process {{number}}")
            both = [Change(said, Provenance("p"), {ref.entry!r}, "update"), Change(said, Provenance("p"))]
            store.write("tea", both, Limits(9999, 10**9, 9))
        """
    command = [sys.executable, "-c", desk.IMPORTS + textwrap.dedent(code)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: desk.change(ref.entry, f"thread {number}"), range(10)))
    assert [process.wait(120) for process in processes] == [0, 0]
    texts = [one.content.text for one in desk.store.history("tea", ref.entry)]
    assert len(texts) == 31
    assert sorted(texts[1:]) == sorted(
        [f"thread {number}" for number in range(10)] + 2 * [f"process {number}" for number in range(10)]
    )
    assert len(desk.store.heads("tea")) == 21


CRASH = """
import os, signal, sys
entry, point = sys.argv[1], sys.argv[2]
changes = [Change(Content("gotcha", "", "new"), Provenance("p"), entry, "update")]
many = [Content("gotcha", "", f"beside {number} " + "x" * 5000) for number in range(50)]
changes += [Change(content, Provenance("p")) for content in many]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
if point == "before commit":
    with store.transaction():
        store.write("tea", changes, Limits(9999, 10**9, 9))
        die()
store.write("tea", changes, Limits(9999, 10**9, 9))
die()
"""


@pytest.mark.parametrize(("point", "text", "entries"), [("before commit", "old", 1), ("after it", "new", 51)])
def test_a_writer_that_is_killed_leaves_the_old_or_the_new(
    desk: Desk, point: str, text: str, entries: int
) -> None:
    ref = desk.add("old")
    code = f"{desk.IMPORTS}store = {desk.code}\n{CRASH}"
    command = [sys.executable, "-c", code, ref.entry, point]
    assert subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode == -9
    assert desk.store.head("tea", ref.entry).content.text == text
    assert len(desk.store.heads("tea")) == entries
    desk.store.check_integrity()
    assert desk.change(ref.entry, "next").number == (2 if text == "old" else 3), "its lock is gone"


def test_a_backup_is_whole_and_restores_all(desk: Desk, tmp_path: Path) -> None:
    ref = desk.add("in the backup", place=1)
    desk.store.backup(tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    with pytest.raises(KnowledgeError, match="could not be written"):
        desk.store.backup(tmp_path / "copy")
    desk.change(ref.entry, "changed since")
    desk.add("new since", place=1)
    desk.store.restore(tmp_path / "copy")
    assert [one.content.text for one in desk.store.heads("tea")] == ["in the backup"]
    assert [ref for ref, _ in desk.store.by_meaning("tea", axis(1), (), 9)] == [ref]
    for name, data in (
        ("gone", None),
        ("torn", (tmp_path / "copy").read_bytes()[:5000]),
        ("junk", b"junk" * 99),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(KnowledgeError):
            desk.store.restore(tmp_path / name)
    assert desk.found("backup") == [ref.entry]


def test_files_are_private_and_another_format_is_refused(tmp_path: Path) -> None:
    desk = SqliteDesk(tmp_path / "data" / "knowledge.sqlite")
    desk.add("x")
    assert {path.stat().st_mode & 0o777 for path in desk.path.parent.iterdir()} == {0o600}
    assert desk.path.parent.stat().st_mode & 0o777 == 0o700
    desk.store.close()
    (tmp_path / "junk").write_bytes(b"no database" * 100)
    with pytest.raises(KnowledgeError, match="cannot be opened"):
        SqliteStore(tmp_path / "junk")


@pytest.mark.parametrize("strange", ["\0", "kb_\0", "a\0b", "\ufffd"])
def test_what_no_text_holds_is_looked_up_and_not_found(desk: Desk, strange: str) -> None:
    ref = desk.add("the samovar boils", place=1)
    store, of = desk.store, EntryRef(strange, 1)
    desk.store.records.put("tea", LoopRecord("log", "fb_1", "{}", turn="t"), RecordBounds(9, 9999))
    for call in (
        lambda: store.head("tea", strange),
        lambda: store.version("tea", of),
        lambda: store.history("tea", strange),
        lambda: store.write("tea", [Change(content("x"), ME, strange, "update")], LIMITS),
    ):
        with pytest.raises(EntryNotFound):
            call()
    assert store.versions("tea", [of]) == {}
    assert store.erase("tea", strange) == 0
    assert [one.ref for one in store.heads("tea", after="a")] == [ref]
    assert store.by_words("tea", [strange], (), 9) == store.by_names("tea", [strange], (), 9) == []
    assert store.records.find("tea", "log", ids=[strange]) == []
    assert store.records.find("tea", "log", after=strange) == []
    assert store.records.count("tea", "log", state=strange) == 0
    assert store.records.erase("tea", ids=[strange]) == 0
    assert len(store.records.find("tea", "log")) == 1
    assert (store.heads(strange), store.state(strange)) == ([], 0), "a tenant of that name"


CLOSER = """
import sys, threading, time
from pathlib import Path
from samovar.router.context.knowledge import KnowledgeError
from samovar.router.context.knowledge.sqlite_file import SqliteFile

file, over = SqliteFile(Path(sys.argv[1]), ["CREATE TABLE numbers(n INTEGER)"], 0.05), threading.Event()

def work():
    while not over.is_set():
        try:
            with file.transaction() as db:
                db.execute("INSERT INTO numbers VALUES(1)")
            with file.reading() as db:
                db.execute("SELECT count(*) FROM numbers").fetchone()
        except KnowledgeError:
            pass

threads = [threading.Thread(target=work) for _ in range(4)]
for one in threads:
    one.start()
for _ in range(20):
    file.close()
    time.sleep(0.01)
over.set()
for one in threads:
    one.join()
"""


def test_a_file_is_closed_while_others_use_it_and_nothing_crashes(tmp_path: Path) -> None:
    """In a process of its own, which SQLite ended with SIGSEGV when a connection was closed in use."""
    command = [sys.executable, "-W", "error", "-c", CLOSER, str(tmp_path / "numbers.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
