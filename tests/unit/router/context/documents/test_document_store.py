"""The laws of the documents' store, held in a file and in PostgreSQL: leases, quotas, uses, tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from samovar.router.context.documents import Document, DocumentStore, Quota
from samovar.router.context.documents.document import new_document_id
from samovar.router.context.documents.store import FILE_NAME, SCHEMAS
from samovar.router.context.knowledge import EntryNotFound, KnowledgeError, QuotaExceeded
from tests.support.router.knowledge_desks import Desk, PostgresDesk, SqliteDesk
from tests.support.router.sealed_desks import SealedDesk, SealedPostgresDesk

QUOTA = Quota(100, 2**20)


class Shop:
    """A store of documents on a desk, and a clock. `open`: as another ingress does."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.now_s = 1000.0
        self.store = self.open(self.desk.store)

    def open(self, of: object) -> DocumentStore:
        tables = of.beside(FILE_NAME, SCHEMAS)  # type: ignore[attr-defined]
        return DocumentStore(tables, lease_s=30.0, clock=lambda: self.now_s)

    def add(self, tenant: str = "tea", quota: Quota = QUOTA, text: bytes = b"text") -> Document:
        document = Document(
            id=new_document_id(),
            tenant=tenant,
            title="Manual",
            format="text",
            state="processing",
            prefill="auto",
            source_bytes=len(text),
            created_s=self.now_s,
        )
        return self.store.add(document, text, quota)


@pytest.fixture(params=["file", "postgres", "sealed", "sealed-postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    desk: Desk
    if request.param == "file":
        desk = SqliteDesk(tmp_path / "data" / "knowledge.sqlite")
    elif request.param == "sealed":
        desk = SealedDesk(tmp_path / "data" / "knowledge.sqlite")
    elif request.param == "sealed-postgres":
        desk = SealedPostgresDesk(request.getfixturevalue("postgres_server"), tmp_path / "keys")
    else:
        desk = PostgresDesk(request.getfixturevalue("postgres_server"))
    made = Shop(desk)
    yield made
    made.store.close()
    desk.store.close()
    if isinstance(desk, PostgresDesk):
        desk.drop()


def test_a_document_is_kept_changed_and_erased(shop: Shop) -> None:
    first, second = shop.add(), shop.add()
    assert first.seq < second.seq
    assert shop.store.get("tea", first.id) == first
    assert shop.store.source("tea", first.id) == b"text"
    shop.store.put_text("tea", first.id, "tëxt", QUOTA)
    assert (shop.store.text("tea", first.id), shop.store.source("tea", first.id)) == ("tëxt", None)
    changed = shop.store.change("tea", first.id, entries=["kb_1", "kb_2"], prefill_s=1.5, pages=3)
    expected = replace(first, text_bytes=5, entries=("kb_1", "kb_2"), prefill_s=1.5, pages=3)
    assert changed == expected
    ids = sorted([first.id, second.id])
    assert [one.id for one in shop.store.all("tea", 9)] == ids
    assert [one.id for one in shop.store.all("tea", 1)] == ids[:1]
    assert [one.id for one in shop.store.all("tea", 9, ids[0])] == ids[1:]
    shop.store.erase("tea", first.id)
    with pytest.raises(EntryNotFound):
        shop.store.get("tea", first.id)
    assert [one.id for one in shop.store.all("tea", 9)] == [second.id]


def test_a_backup_of_before_a_document_takes_no_key_of_it(shop: Shop, tmp_path: Path) -> None:
    """Documents lie elsewhere, and are in no backup; their key is."""
    shop.desk.add("in the backup")
    shop.desk.store.backup(tmp_path / "copy")
    one, read = shop.add("coffee"), shop.add()
    shop.store.put_text("tea", read.id, "text", QUOTA)
    shop.desk.add("new since")
    shop.desk.store.restore(tmp_path / "copy")
    for store in (shop.store, shop.open(shop.desk.open())):
        assert (store.text("tea", read.id), store.source("coffee", one.id)) == ("text", b"text")
    assert [one.content.text for one in shop.desk.store.heads("tea")] == ["in the backup"]
    shop.desk.store.check_integrity()
    shop.store.erase("tea", read.id)
    assert shop.store.all("tea", 9) == []


def test_a_document_without_its_key_is_refused_and_can_be_deleted(shop: Shop) -> None:
    waiting, read = shop.add(), shop.add()
    shop.store.put_text("tea", read.id, "text", QUOTA)
    assert shop.desk.store.records.erase("tea", kind="key") == shop.desk.is_sealed
    if not shop.desk.is_sealed:
        return
    for ask in (partial(shop.store.text, "tea", read.id), partial(shop.store.source, "tea", waiting.id)):
        with pytest.raises(KnowledgeError, match="key that has sealed this document is gone"):
            ask()
    assert {one.title for one in shop.store.all("tea", 9)} == {""}
    assert shop.store.mark_deleting("tea", read.id).title == shop.store.text("tea", read.id) == ""
    shop.store.mark_deleting("tea", waiting.id)
    assert shop.store.source("tea", waiting.id) == b""


def test_of_another_tenant_nothing_is_seen_changed_or_counted(shop: Shop) -> None:
    made = shop.add(quota=Quota(1, 8))
    calls: tuple[Callable[[], object], ...] = (
        lambda: shop.store.get("coffee", made.id),
        lambda: shop.store.text("coffee", made.id),
        lambda: shop.store.change("coffee", made.id, pages=9),
        lambda: shop.store.mark_deleting("coffee", made.id),
        lambda: shop.store.note_uses("coffee", [made.id], b"s", 9),
        lambda: shop.store.put_text("coffee", made.id, "x", QUOTA),
        lambda: shop.store.get("tea", "a\0b"),
        lambda: shop.store.mark_deleting("tea", "\0"),
    )
    for call in calls:
        with pytest.raises(EntryNotFound):
            call()
    shop.store.erase("coffee", made.id)
    assert shop.store.get("tea", made.id) == made
    assert shop.store.all("coffee", 9) == []
    assert shop.add("coffee", Quota(1, 8)).tenant == "coffee"
    with pytest.raises(QuotaExceeded, match="documents_max"):
        shop.add(quota=Quota(1, 80))
    with pytest.raises(QuotaExceeded, match="bytes_max"):
        shop.add(quota=Quota(2, 7))


def test_many_that_add_at_once_hold_the_quota_together(shop: Shop) -> None:
    def add(_: int) -> bool:
        try:
            shop.add(quota=Quota(5, 2**20))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(add, range(24))) == 5
    assert len(shop.store.all("tea", 99)) == 5


def test_each_document_is_worked_on_by_one_ingress_until_its_lease_ends(shop: Shop) -> None:
    made = [shop.add("tea" if number % 2 else "coffee") for number in range(12)]
    other = shop.open(shop.desk.store)

    def claims(number: int) -> list[int]:
        store, got = (shop.store, other)[number % 2], []
        while tenants := store.waiting():
            found = [store.claim(f"owner-{number}", one) for one in tenants]
            if not any(found):
                break
            got += [one.seq for one in found if one is not None]
        return got

    with ThreadPoolExecutor(4) as pool:
        claimed = [seq for got in pool.map(claims, range(4)) for seq in got]
    # One that passes over a row which another holds may end early; whoever looks again finds the rest.
    claimed += claims(0)
    assert sorted(claimed) == [one.seq for one in made], "each once"
    assert not shop.store.renew("tea", made[1].id, "nobody")
    shop.now_s += 31
    assert other.waiting() == ["coffee", "tea"], "the longest waiting first"
    found = other.claim("late", "coffee")
    assert found is not None
    assert found.seq == made[0].seq, "the longest waiting first"
    assert other.renew("coffee", found.id, "late")
    other.put_back(found, "late", later=False)
    assert other.claim("next", "coffee") == found
    for write in (
        lambda: other.change("coffee", found.id, owner="late", entries=["kb_1"]),
        lambda: other.put_text("coffee", found.id, "text", QUOTA, owner="late"),
    ):
        with pytest.raises(EntryNotFound):
            write()
    other.put_back(found, "late", later=False)
    assert other.get("coffee", found.id) == found
    assert (other.waiting(), other.claim("third", "coffee").seq > found.seq) == (["tea", "coffee"], True)  # type: ignore[union-attr]
    other.release("third")
    other.put_back(found, "next", later=True)
    assert other.waiting() == ["tea", "coffee"]
    next_one = other.claim("next", "coffee")
    assert next_one is not None
    assert next_one.seq == made[2].seq
    other.release("next")
    assert shop.store.claim("again", "coffee") == next_one


def test_a_session_that_is_about_to_hold_a_document_is_known_before_it_goes(shop: Shop) -> None:
    for _ in range(6):
        made = shop.add()
        sessions = [f"s{number}".encode() for number in range(8)]

        def note(session: bytes, document: str = made.id) -> bool:
            try:
                shop.store.note_uses("tea", [document], session, 100)
            except EntryNotFound:
                return False
            return True

        def delete(document: str = made.id) -> list[bytes]:
            shop.store.mark_deleting("tea", document)
            return shop.store.sessions_of("tea", document)

        with ThreadPoolExecutor(4) as pool:
            notes = [pool.submit(note, one) for one in sessions[:4]]
            gone = pool.submit(delete)
            notes += [pool.submit(note, one) for one in sessions[4:]]
            noted = {one for one, done in zip(sessions, notes, strict=True) if done.result()}
            assert noted == set(gone.result()), "who deletes it clears them all"
        shop.store.erase("tea", made.id)


def test_beyond_the_most_sessions_it_is_told_that_not_all_are_known(shop: Shop) -> None:
    made = shop.add()
    for number in range(9):
        shop.store.note_uses("tea", [made.id], b"%d" % number, 3)
        shop.store.note_uses("tea", [made.id], b"%d" % number, 3)
    assert len(shop.store.sessions_of("tea", made.id)) == 4
