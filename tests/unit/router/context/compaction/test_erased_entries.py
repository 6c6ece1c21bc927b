"""What is erased from the knowledge base is in no summary either, whoever erased it and whenever."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from samovar.replicas.messages import EngineStats, GenerateRequest
from samovar.router.context.compaction import Summary, SummaryStore
from samovar.router.context.documents import DocumentShelf
from samovar.router.context.knowledge import KnowledgeBase, KnowledgeError
from tests.support.inside import connections_of, file_of
from tests.support.router.fake_replica import Script
from tests.support.router.router_harness import House, error_of, keeper, make_settings, spoken
from tests.unit.router.context.compaction.test_compaction_api import (
    Guest,
    bytes_in,
    is_summary,
    question,
    rest,
    settings_in,
    text_of,
)

SECRET = "Zarya-7"
FACT = {"kind": "gotcha", "text": f"The samovar's tap is called {SECRET}."}
ASKS = "What is the samovar's tap called?"


def house(folder: Path, summary: Any = None) -> House:
    settings = make_settings(
        compaction=settings_in(folder), knowledge={"enabled": True, "dir": folder / "kb", "embedder": "none"}
    )

    def script(request: GenerateRequest) -> Script:
        if not is_summary(request):
            return spoken("Fine.")
        if summary is not None:
            summary()
        return spoken(f"The tap is {SECRET}." if SECRET in text_of(request) else "There are rooms.")

    made = House(script, settings=settings)
    made.replicas.stats_now = [EngineStats("replica-1")]  # idle
    return made


def base(of: House) -> KnowledgeBase:
    assert isinstance(of.service.stage("knowledge"), KnowledgeBase)
    return of.service.stage("knowledge")


async def fills(guest: Guest, turns: int = 26) -> None:
    """Ask for the fact, and go on until it is in a summary."""
    wish: dict[str, Any] = {"compaction": {"mode": "summarise"}, "knowledge": {}}
    await guest.says(ASKS, **wish)
    assert guest.receipts[-1]["knowledge"]["entries"], "the fact was placed"
    for number in range(turns):
        await guest.says(question(number), **{**wish, "knowledge": {"retrieve": False}})
        await rest(guest.house)


async def test_an_entry_that_is_erased_leaves_every_summary_that_was_made_of_it(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with made.client() as client:
        entry = (await client.post("/v1/knowledge", json=FACT)).json()["id"]
        guest, other = Guest(client, made), Guest(client, made, "other")
        await fills(guest)
        await other.talks(30, rests=True, compaction={"mode": "summarise"})
        assert SECRET in text_of(made.replicas.calls[-1]) or SECRET.encode() in bytes_in(tmp_path)
        assert guest.receipts[-1]["compaction"]["summarised_messages"]
        assert (await client.delete(f"/v1/knowledge/{entry}")).status_code == 200
        assert SECRET.encode() not in bytes_in(tmp_path)
        assert b"There are rooms." in bytes_in(tmp_path), "those of others stay"
        await guest.says("And now?", compaction={"mode": "summarise"}, knowledge={"retrieve": False})
        assert SECRET not in text_of(made.replicas.calls[-1])
        await rest(made)
        assert SECRET.encode() not in bytes_in(tmp_path)
        assert all(SECRET.encode() not in one.read_bytes() for one in (tmp_path / "kb").iterdir())


@pytest.mark.parametrize("whole", [True, False])
async def test_a_document_whose_chunk_was_only_found_leaves_them_too(tmp_path: Path, whole: bool) -> None:
    made = house(tmp_path)
    shelf = made.service.stage("documents")
    assert isinstance(shelf, DocumentShelf)
    async with made.client() as client:
        body = {"text": FACT["text"], "prefill": "never"}
        named = (await client.post("/v1/documents", json=body)).json()["id"]
        async with asyncio.timeout(60):
            while await shelf.work():
                pass
        await fills(Guest(client, made))
        assert SECRET.encode() in bytes_in(tmp_path)
        gone = await client.delete("/v1/knowledge" if whole else f"/v1/documents/{named}")
        assert gone.status_code == 200, gone.text
        assert SECRET.encode() not in bytes_in(tmp_path)


async def test_what_another_ingress_erased_is_not_served_and_leaves_the_file(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with made.client() as client:
        entry = (await client.post("/v1/knowledge", json=FACT)).json()["id"]
        guest = Guest(client, made)
        await fills(guest)
        assert SECRET.encode() in bytes_in(tmp_path)
        base(made).store.erase("local", entry)
        await guest.says("And now?", compaction={"mode": "summarise"}, knowledge={"retrieve": False})
        assert SECRET not in text_of(made.replicas.calls[-1])
        assert SECRET.encode() not in bytes_in(tmp_path)


async def test_an_entry_that_is_erased_while_its_summary_is_written_is_in_none(tmp_path: Path) -> None:
    erased: list[str] = []

    def erase() -> None:
        if entries and not erased:
            erased.extend(entries)
            base(made).store.erase("local", entries[0])

    entries: list[str] = []
    made = house(tmp_path, erase)
    async with made.client() as client:
        entries.append((await client.post("/v1/knowledge", json=FACT)).json()["id"])
        await fills(Guest(client, made))
        assert erased
        assert any(is_summary(one) and SECRET in text_of(one) for one in made.replicas.calls)
        assert SECRET.encode() not in bytes_in(tmp_path)


async def test_a_store_that_fails_is_told_and_the_deletion_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = house(tmp_path)
    async with made.client() as client:
        entry = (await client.post("/v1/knowledge", json=FACT)).json()["id"]
        await fills(Guest(client, made))
        store = keeper(made).fitter.summaries
        with monkeypatch.context() as broken:
            broken.setattr(file_of(store), "_busy_s", 0.0)
            with sqlite3.connect(tmp_path / "compaction.sqlite") as held:
                held.execute("BEGIN IMMEDIATE")
                for connection, _ in connections_of(file_of(store)):
                    connection.execute("PRAGMA busy_timeout=0")
                refused = await client.delete(f"/v1/knowledge/{entry}")
                held.execute("ROLLBACK")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        assert SECRET.encode() in bytes_in(tmp_path)
        again = await client.delete(f"/v1/knowledge/{entry}")
        assert again.status_code == 404, "the entry itself was erased"
        assert SECRET.encode() not in bytes_in(tmp_path)


def test_a_summary_that_may_not_stay_is_never_there(tmp_path: Path) -> None:
    """It was written, judged and erased again: not if the process died, or the file was busy, in between."""
    store = SummaryStore(tmp_path / "compaction.sqlite", of_session_max=4, rows_max=100, busy_s=5.0)
    owner, links = ("t", b"a"), [b"0", b"1", b"2"]
    assert store.put(owner, b"1", Summary(1, "of before"))

    def fails() -> bool:
        raise KnowledgeError("the knowledge base is busy")

    assert not store.put(owner, b"1", Summary(1, "of now"), lambda: False)
    with pytest.raises(KnowledgeError):
        store.put(owner, b"1", Summary(1, "of now"), fails)
    assert store.latest(owner, links) == Summary(1, "of before")
    assert store.put(owner, b"1", Summary(1, "of now"), lambda: store.latest(owner, links) is not None)
    assert store.latest(owner, links) == Summary(1, "of now")


def test_a_summary_of_before_its_session_was_deleted_is_not_read(tmp_path: Path) -> None:
    """The ingress was not there when all were asked; the session directory knows of the deletion."""
    now_s, cleared = [100.0], {("t", b"a"): -math.inf, ("t", b"b"): -math.inf}
    store = SummaryStore(
        tmp_path / "compaction.sqlite",
        of_session_max=4,
        rows_max=100,
        busy_s=5.0,
        wall_clock=lambda: now_s[0],
        cleared_unix_s=cleared.__getitem__,
    )
    for owner in cleared:
        store.put(owner, b"1", Summary(1, SECRET))
    cleared["t", b"a"], now_s[0] = 150.0, 200.0
    assert store.latest(("t", b"b"), [b"0", b"1", b"2"]) == Summary(1, SECRET)
    store.forget("t", [b"b"])
    store.put(("t", b"a"), b"2", Summary(2, "of now"))
    assert store.latest(("t", b"a"), [b"0", b"1"]) is None
    assert SECRET.encode() not in bytes_in(tmp_path)
    assert store.latest(("t", b"a"), [b"0", b"1", b"2"]) == Summary(2, "of now")


def test_summaries_of_before_entries_were_written_down_go_with_any(tmp_path: Path) -> None:
    path = tmp_path / "compaction.sqlite"

    def opened() -> SummaryStore:
        return SummaryStore(path, of_session_max=4, rows_max=100, busy_s=5.0)

    store = opened()
    store.put(("t", b"a"), b"1", Summary(1, "of one", ("kb_1",)))
    store.put(("t", b"b"), b"1", Summary(1, "of another", ("kb_2",)))
    store.put(("t", b"c"), b"1", Summary(1, "of none"))
    store.put(("u", b"d"), b"1", Summary(1, "another tenant's", ("kb_1",)))
    store.put(("t", b"e"), b"1", Summary(1, "older"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE summaries SET entries = NULL WHERE text = 'older'")
    db.close()

    def kept() -> set[str]:
        with file_of(store).reading() as db:
            return {row[0] for row in db.execute("SELECT text FROM summaries")}

    store.forget_entries("t", ["kb_1", "kb_9"])
    assert kept() == {"of another", "of none", "another tenant's"}
    store.forget_entries("t", None)
    assert kept() == {"of none", "another tenant's"}
    assert b"of one" not in path.read_bytes()
    store.close()
