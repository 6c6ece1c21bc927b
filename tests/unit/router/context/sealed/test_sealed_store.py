"""What a sealed knowledge base adds to the laws of stores: files that say nothing, and keys that change."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from samovar.cache_tiers.blocks import SEALED_TEXT, Clear, TierError
from samovar.cache_tiers.encryption import TenantWrapper
from samovar.cache_tiers.encryption.outer import Unwrapped
from samovar.router.context.compaction import Summary, SummaryStore
from samovar.router.context.documents import Document, DocumentStore, Quota
from samovar.router.context.documents.store import FILE_NAME, SCHEMAS
from samovar.router.context.knowledge import (
    Change,
    EntryRef,
    KnowledgeError,
    LoopRecord,
    RecordBounds,
    RecordKind,
    Records,
    SqliteStore,
)
from samovar.router.context.sealed import SealedSummaries
from samovar.router.context.sealed.store import LEASE_S, TenantKeys
from samovar.router.ingress.knowledge_routes import refuse_sealed
from tests.support.clock import Clock
from tests.support.nodes.encrypted import OTHER_OUTER, OUTER, outer_file
from tests.support.router.knowledge_desks import LIMITS, ME, SqliteDesk, axis, content
from tests.support.router.sealed_desks import KeyRing, SealedDesk, tag_of

MARKER = "the eagle lands at noon: 0123456789abcde"
SESSION = b"s" * 8 + bytes(8)
BOUNDS = RecordBounds(99, 2**20)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[SealedDesk]:
    made = SealedDesk(tmp_path / "data" / "knowledge.sqlite")
    yield made
    made.store.close()


def files(desk: SqliteDesk) -> bytes:
    return b"".join(path.read_bytes() for path in desk.path.parent.iterdir())


def plain_of(desk: SealedDesk) -> SqliteDesk:
    """The same file, without keys."""
    made = SqliteDesk(desk.path)
    made.now_s = desk.now_s
    return made


def ranked(names: dict[str, str], found: list[tuple[EntryRef, float]]) -> set[tuple[str, int, float]]:
    """What a search has found, whatever the order of equals; `names`: an entry's in the other store."""
    return {(names.get(ref.entry, ref.entry), ref.number, round(score, 6)) for ref, score in found}


def document(tenant: str = "tea") -> Document:
    return Document("doc-1", tenant, f"On {MARKER}", "text", "processing", "auto", 9, 1.0)


def test_no_text_is_readable_in_any_file_and_all_of_it_is_there_for_who_has_the_keys(
    desk: SealedDesk,
) -> None:
    ref = desk.add(f"{MARKER} Xylophone-7", title=f"T {MARKER}", topics=(f"topic {MARKER}",), place=1)  # type: ignore[arg-type]
    desk.change(ref.entry, f"changed: {MARKER}")
    record = LoopRecord(
        "turn", "t1", f'"{MARKER}"', "t1", SESSION, key=MARKER.encode(), at_s=2e9, vector=axis(2)
    )
    asked = LoopRecord("questions", "q", f'"{MARKER}"', at_s=1.0)
    for one in (record, asked):
        desk.store.records.put("tea", one, BOUNDS)
    shop = DocumentStore(desk.store.beside(FILE_NAME, SCHEMAS))
    shop.add(document(), MARKER.encode(), Quota(9, 2**20))
    assert shop.source("tea", "doc-1") == MARKER.encode()
    shop.put_text("tea", "doc-1", MARKER, Quota(9, 2**20))
    raw = files(desk)
    for word in (MARKER, "eagle", "xylophone", axis(2).tobytes()):
        assert (word if isinstance(word, bytes) else word.encode()) not in raw.lower(), word
    assert SEALED_TEXT.encode() in raw
    again = desk.open()
    assert [one.content.text for one in again.history("tea", ref.entry)] == [
        f"{MARKER} Xylophone-7",
        f"changed: {MARKER}",
    ]
    assert again.head("tea", ref.entry).provenance == ME
    assert again.by_words("tea", ["eagle"], (), 9)[0][0] == EntryRef(ref.entry, 2)
    assert again.records.find("tea", "turn", key=MARKER.encode())[0].body == f'"{MARKER}"'
    assert again.records.similar("tea", "turn", axis(2), 0.5, 9) == [("t1", 1.0)]
    assert again.records.find("tea", "questions") == [asked]
    own = DocumentStore(again.beside(FILE_NAME, SCHEMAS))
    assert own.get("tea", "doc-1").title == f"On {MARKER}"
    assert own.text("tea", "doc-1") == MARKER
    again.close()


def test_it_finds_what_a_plain_one_finds_whatever_is_written(desk: SealedDesk, tmp_path: Path) -> None:
    rng, plain = random.Random(7), SqliteDesk(tmp_path / "plain" / "knowledge.sqlite")
    other = desk.open()  # as another ingress
    words, ids = ["alpha", "beta", "gamma", "Delta_7", "epsilon", "ERR-42", "zeta"], dict[str, str]()
    for step in range(60):
        text = " ".join(rng.choices(words, k=rng.randrange(1, 9)))
        known = rng.choice([None, *ids])
        how = "create" if known is None else rng.choice(["update", "retire"])
        vector = axis(rng.randrange(4))
        for at, own in (("plain", plain.store), ("sealed", rng.choice([desk.store, other]))):
            entry = None if known is None else (known if at == "plain" else ids[known])
            change = Change(content(text, title=words[step % 7]), ME, entry, how, vector=vector)  # type: ignore[arg-type]
            (made,) = own.write("tea", [change], LIMITS)
            assert made.content == change.content
            if at == "plain":
                name = made.ref.entry
            else:
                ids[name] = made.ref.entry
        translated = {b: a for a, b in ids.items()}
        same = partial(ranked, translated)
        for own in (desk.store, other):
            word = rng.choice(words)
            assert same(own.by_words("tea", [word], (), 99)) == same(
                plain.store.by_words("tea", [word], (), 99)
            )
            assert same(own.by_names("tea", ["err-42"], (), 99)) == same(
                plain.store.by_names("tea", ["err-42"], (), 99)
            )
            assert same(own.by_meaning("tea", vector, (), 99)) == same(
                plain.store.by_meaning("tea", vector, (), 99)
            )
    other.close()
    plain.store.close()


def test_a_search_in_a_transaction_sees_what_is_written_in_it_and_nothing_of_it_stays(
    desk: SealedDesk,
) -> None:
    desk.add("before")
    with suppress(ZeroDivisionError), desk.store.transaction():
        desk.add("inside")
        assert len(desk.found("inside")) == len(desk.found("before")) == 1
        raise ZeroDivisionError
    desk.add("since")  # the same count of changes as what was undone
    assert len(desk.found("since")) == 1
    assert not desk.found("inside")


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE versions SET text = (SELECT text FROM versions WHERE seq = 1) WHERE seq = 4",
        "UPDATE versions SET text = (SELECT text FROM versions WHERE seq = 2) WHERE seq = 4",
        "UPDATE versions SET text = (SELECT text FROM versions WHERE seq = 3) WHERE seq = 4",
        "UPDATE versions SET tenant = 'other' WHERE tenant = 'tea'",
        "UPDATE versions SET who = 'another' WHERE seq = 4",
        "UPDATE versions SET kind = 'schema' WHERE seq = 4",
        "UPDATE versions SET operation = 'revert' WHERE seq = 4",
    ],
)
def test_a_version_in_the_place_of_another_is_no_answer(desk: SealedDesk, change: str) -> None:
    ref = desk.add("one")
    desk.change(ref.entry, "two")
    desk.add("three")
    desk.change(ref.entry, "two once more")
    with sqlite3.connect(desk.path) as db:
        db.execute(change)
    db.close()
    fresh = desk.open()
    if "tenant = 'other'" in change:
        desk.add("their own", tenant="other")
        assert fresh.versions("other", [EntryRef(ref.entry, 1)]) == {}, "their keys do not open it"
    else:
        with pytest.raises(KnowledgeError, match="not what its key has sealed"):
            fresh.head("tea", ref.entry)
    fresh.close()


@pytest.mark.guarantee("G5")
def test_a_record_in_the_place_of_another_is_no_answer(desk: SealedDesk) -> None:
    for name in "ab":
        desk.store.records.put("tea", LoopRecord("log", name, f'"{name}"'), BOUNDS)
    with sqlite3.connect(desk.path) as db:
        db.execute(
            "UPDATE records SET body = (SELECT body FROM records WHERE record = 'a') WHERE record = 'b'"
        )
    db.close()
    with pytest.raises(KnowledgeError, match="not what its key has sealed"):
        desk.store.records.find("tea", "log", ids=["b"])
    assert desk.store.records.find("tea", "log", ids=["a"])[0].body == '"a"'


@pytest.mark.guarantee("G12")
def test_a_session_that_is_erased_takes_its_turns_with_it_also_from_a_backup(
    desk: SealedDesk, tmp_path: Path
) -> None:
    for name, session in (("t1", SESSION), ("t2", b"u" * 8 + bytes(8)), ("t3", b"")):
        desk.store.records.put(
            "tea", LoopRecord("turn", name, f'"{MARKER}"', name, session, at_s=1.0), BOUNDS
        )
    desk.store.backup(tmp_path / "backup")
    desk.ring.sealing.sessions.destroy([Clear(tag_of("tea"), SESSION)])
    desk.store.restore(tmp_path / "backup")
    assert [one.id for one in desk.open().records.find("tea", "turn")] == ["t3", "t2"]


@pytest.mark.guarantee("G12")
def test_a_tenant_that_erases_all_leaves_no_key_and_others_keep_theirs(desk: SealedDesk) -> None:
    mine, theirs = desk.add("mine"), desk.add("theirs", tenant="other")
    before = sqlite3.connect(desk.path)
    rows = before.execute("SELECT * FROM versions WHERE tenant = 'tea'").fetchall()
    (key,) = before.execute("SELECT body FROM records WHERE kind = 'key' AND tenant = 'tea'").fetchone()
    before.close()
    late = desk.open()
    assert late.by_words("tea", ["mine"], (), 9)
    desk.store.erase("tea", None)
    assert key.encode() not in files(desk)
    with sqlite3.connect(desk.path) as db:  # from a backup of that table
        db.executemany(f"INSERT INTO versions VALUES({', '.join('?' * len(rows[0]))})", rows)
        db.execute("INSERT INTO heads VALUES('tea', ?, ?, 0)", (mine.entry, rows[0][0]))
    db.close()
    for store in (desk.store, late, desk.open()):
        assert store.heads("tea") == []
        assert store.by_words("tea", ["mine"], (), 9) == []
    assert late.head("other", theirs.entry).content.text == "theirs"
    desk.add("new")
    assert [one.content.text for one in desk.store.heads("tea")] == ["new"]


def test_what_erases_some_leaves_the_key_of_what_stays(desk: SealedDesk) -> None:
    desk.now_s = 1000.0
    old = desk.add("old")
    desk.now_s = 2000.0
    desk.add("young")
    desk.store.erase_before("tea", 1500.0)
    desk.store.records.erase("tea")
    desk.store.forget_sessions("tea", None)
    desk.store.erase("tea", old.entry)
    assert [one.content.text for one in desk.open().heads("tea")] == ["young"]


def test_the_operators_key_is_changed_without_a_payload_being_written(desk: SealedDesk) -> None:
    ref, _ = desk.add("kept"), desk.add("another's", tenant="other")

    def column(name: str, table: str) -> list[object]:
        db = sqlite3.connect(desk.path)
        try:
            return [row[0] for row in db.execute(f"SELECT {name} FROM {table} ORDER BY 1")]
        finally:
            db.close()

    texts, keys = column("text", "versions"), column("body", "records")
    outer_file(desk.ring.folder, OTHER_OUTER, OUTER)
    assert desk.open().head("tea", ref.entry).content.text == "kept"
    assert column("text", "versions") == texts
    assert not set(column("body", "records")) & set(keys), "also of the tenant that was not asked for"
    outer_file(desk.ring.folder, OTHER_OUTER)
    fresh = desk.open()
    assert fresh.head("tea", ref.entry).content.text == "kept"
    outer_file(desk.ring.folder, "77" * 32)
    lost = desk.open()
    with pytest.raises(KnowledgeError, match="another key than tiers"):
        lost.head("tea", ref.entry)
    with pytest.raises(KnowledgeError, match="another key than tiers"):
        lost.write("tea", [Change(content("x"), ME)], LIMITS)
    outer_file(desk.ring.folder).unlink()
    with pytest.raises(KnowledgeError, match="cannot be read"):
        desk.open().head("tea", ref.entry)


class Faulty:
    """What wraps keys of tenants, and fails for those of one. `asked`: how often it was asked for any."""

    def __init__(self, inner: TenantWrapper) -> None:
        self.wrap, self._inner, self.refused, self.asked = inner.wrap, inner, b"", 0

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        self.asked += 1
        if self.refused and self.refused in name:
            raise TierError("it is away")
        return self._inner.unwrap(name, wrapped, proof)


@pytest.fixture
def base(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "data" / "knowledge.sqlite")
    yield made
    made.close()


def by_the_one_in_use(base: SqliteStore, ring: KeyRing, *tenants: str) -> list[str]:
    """Of which of these tenants the keys open with the first line of the operator's file alone."""
    first, *_ = lines = ring.outer.read_text().split()
    outer_file(ring.folder, first)
    found = []
    for one in tenants:
        with suppress(KnowledgeError):
            found += [one for _ in TenantKeys(base.records, "x", ring.opened().tenants, Clock()).ring(one)]
    outer_file(ring.folder, *lines)
    return found


def test_a_key_that_is_leased_is_wrapped_again_too_within_a_minute_of_a_rotation(
    base: SqliteStore, tmp_path: Path
) -> None:
    ring, clock = KeyRing(tmp_path / "keys"), Clock()
    keys = TenantKeys(base.records, "x", ring.opened().tenants, clock)
    for tenant in ("tea", "coffee"):
        keys.current(tenant)
    clock.now_s += LEASE_S / 2
    keys.ring("coffee")  # leased from now on
    outer_file(ring.folder, OTHER_OUTER, OUTER)
    assert by_the_one_in_use(base, ring, "tea", "coffee") == []
    clock.now_s += LEASE_S / 2
    assert len(keys.ring("tea")) == 1
    assert by_the_one_in_use(base, ring, "tea", "coffee") == ["tea", "coffee"]


def test_what_could_not_be_wrapped_again_is_tried_a_minute_later_and_fails_no_other(
    base: SqliteStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring, clock = KeyRing(tmp_path / "keys"), Clock()
    wrapper = Faulty(ring.opened().tenants)
    keys = TenantKeys(base.records, "x", wrapper, clock)
    for tenant in ("coffee", "tea"):
        keys.current(tenant)
    outer_file(ring.folder, OTHER_OUTER, OUTER)
    wrapper.refused, clock.now_s = b"coffee", clock.now_s + LEASE_S
    assert len(keys.ring("tea")) == 1
    assert by_the_one_in_use(base, ring, "coffee", "tea") == ["tea"]
    assert "not all keys of tenants are wrapped by the operator's key in use: it is away" in caplog.text
    wrapper.refused, wrapper.asked = b"", 0
    keys.ring("tea")
    assert wrapper.asked <= 1, "not at each call"
    clock.now_s += LEASE_S
    keys.ring("tea")
    assert by_the_one_in_use(base, ring, "coffee", "tea") == ["coffee", "tea"]
    wrapper.asked, clock.now_s = 0, clock.now_s + 10 * LEASE_S
    keys.ring("tea")
    assert wrapper.asked == 1, "one tenant's request does not unwrap all others' keys each minute"


class Late:
    """Records that are erased by another ingress as soon as they were found."""

    def __init__(self, inner: Records) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def of_all(self, kind: RecordKind) -> list[tuple[str, LoopRecord]]:
        found = self._inner.of_all(kind)
        self._inner.erase("coffee", kind=kind)
        return found


@pytest.mark.guarantee("G12")
def test_a_key_that_is_destroyed_during_a_rotation_does_not_come_back(
    base: SqliteStore, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path / "keys")
    for tenant in ("coffee", "tea"):
        TenantKeys(base.records, "x", ring.opened().tenants, Clock()).current(tenant)
    outer_file(ring.folder, OTHER_OUTER, OUTER)
    late = cast(Records, Late(base.records))
    assert len(TenantKeys(late, "x", ring.opened().tenants, Clock()).ring("tea")) == 1
    assert [tenant for tenant, _ in base.records.of_all("key")] == ["tea"]
    assert by_the_one_in_use(base, ring, "tea") == ["tea"]


def test_a_backup_of_before_a_rotation_opens_when_the_old_line_is_gone(
    desk: SealedDesk, tmp_path: Path
) -> None:
    ref = desk.add("in the backup")
    desk.store.backup(tmp_path / "copy")
    outer_file(desk.ring.folder, OTHER_OUTER, OUTER)
    desk.open().head("tea", ref.entry)
    outer_file(desk.ring.folder, OTHER_OUTER)
    desk.store.restore(tmp_path / "copy")
    assert desk.open().head("tea", ref.entry).content.text == "in the backup"


def test_what_was_written_before_is_read_and_a_service_without_the_key_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "data" / "knowledge.sqlite"
    plain = SqliteDesk(path)
    old = plain.add(f"plain {MARKER}", place=1)
    plain.store.records.put("tea", LoopRecord("turn", "t1", '"plain"'), BOUNDS)
    refuse_sealed(plain.store)
    desk = SealedDesk(path)
    desk.add("sealed xylophone")
    assert desk.store.head("tea", old.entry).content.text == f"plain {MARKER}"
    assert desk.found("eagle") == [old.entry]
    assert desk.store.records.find("tea", "turn")[0].body == '"plain"'
    assert MARKER.encode() in files(desk)
    desk.change(old.entry, "again")
    desk.store.erase("tea", old.entry)
    assert MARKER.encode() not in files(desk)
    with pytest.raises(KnowledgeError, match=r"1 tenants is encrypted, and tiers\.encryption_key_file"):
        refuse_sealed(plain.store)
    desk.store.close()
    plain.store.close()


def test_summaries_are_sealed_with_their_session(desk: SealedDesk, tmp_path: Path) -> None:
    path = tmp_path / "compaction.sqlite"

    def opened(is_sealed: bool = True) -> SummaryStore:
        sealer = SealedSummaries(desk.ring.opened(), tag_of)
        return SummaryStore(
            path, of_session_max=4, rows_max=99, busy_s=5.0, seal=sealer if is_sealed else None
        )

    def seen() -> bool:
        return any(MARKER.encode() in one.read_bytes() for one in tmp_path.glob("compaction.sqlite*"))

    owner, links = ("tea", SESSION), [b"0", b"1", b"2"]
    before = opened(is_sealed=False)
    before.put(owner, b"1", Summary(1, MARKER))
    assert seen()
    store = opened()
    assert store.latest(owner, links) is None, "a plain one is not read"
    store.put(owner, b"1", Summary(1, MARKER, ("kb_1",)))
    before.close()
    store.forget("coffee", None)  # empties the log
    assert not seen()
    assert opened().latest(owner, links) == Summary(1, MARKER, ("kb_1",))
    assert opened(is_sealed=False).latest(owner, links) is None
    backup = path.read_bytes()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE summaries SET messages = 0, link = '0'")
    db.close()
    assert opened().latest(owner, links) is None, "it lies in the place of another"
    path.write_bytes(backup)
    desk.ring.sealing.sessions.destroy([Clear(tag_of("tea"), SESSION)])
    assert opened().latest(owner, links) is None
    store.close()
