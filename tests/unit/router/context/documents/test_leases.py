"""Leases of documents: kept while their work takes, and nothing that is written without one stays."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from samovar.router.context.knowledge import Change, Content, EntryNotFound, Provenance
from tests.unit.router.context.documents.test_documents_api import ROUTE, TEXT, house, opened, shelf_of


async def test_a_lease_is_kept_while_a_stage_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now_s, gate = house(tmp_path, lease_s=1.0), [1000.0], asyncio.Event()
    shelf = shelf_of(made)
    store, renewed, reading = shelf.store, asyncio.Event(), asyncio.Event()
    store._clock = lambda: now_s[0]
    renew, loop = store.renew, asyncio.get_running_loop()

    def seen(tenant: str, document: str, owner: str) -> bool:
        is_own = renew(tenant, document, owner)
        loop.call_soon_threadsafe(renewed.set)
        return is_own

    async def slow(data: bytes, settings: Any) -> tuple[str, int]:
        reading.set()
        await gate.wait()
        return TEXT, 1

    store.renew = seen  # type: ignore[method-assign]
    monkeypatch.setattr("samovar.router.context.documents.shelf.read_pdf", slow)
    async with opened(made) as client:
        body = {"format": "pdf", "data": base64.b64encode(b"%PDF-1.4").decode(), "prefill": "never"}
        sent = await client.post(ROUTE, json=body)
        assert sent.status_code == 202, sent.text
        work = asyncio.create_task(shelf.work())
        await reading.wait()
        for _ in range(2):
            now_s[0] += 0.9
            renewed.clear()
            async with asyncio.timeout(60):
                await renewed.wait()
            assert store.claim("another", "local") is None
        gate.set()
        await work
        assert (await client.get(f"{ROUTE}/{sent.json()['id']}")).json()["state"] == "ready"


@pytest.mark.guarantee("G12")
async def test_no_chunk_of_two_ingresses_outlives_its_document(tmp_path: Path) -> None:
    """One of them was away for longer than its lease, and writes when another has done its work."""
    first, second, now_s = house(tmp_path), house(tmp_path), [1000.0]
    chunks = [("", "zarya one"), ("", "zarya two")]
    for made in (first, second):
        shelf_of(made).store._clock = lambda: now_s[0]
    slow, quick = shelf_of(first), shelf_of(second)
    async with opened(first) as client, opened(second):
        sent = (await client.post(ROUTE, json={"text": TEXT, "prefill": "never"})).json()["id"]
        lost = slow.store.claim(slow._owner, "local")
        assert lost is not None
        now_s[0] += 1000.0
        taken = quick.store.claim(quick._owner, "local")
        assert taken is not None
        done = quick._write_chunks(taken, chunks)
        with pytest.raises(EntryNotFound):
            slow._write_chunks(lost, chunks)
        listed = (await client.get("/v1/knowledge")).json()["data"]
        assert sorted(one["id"] for one in listed) == sorted(done.entries), "each once, and in the list"
        # As one that was killed between its chunks and their list leaves them.
        stray = Change(Content("document_chunk", "", "zarya three"), Provenance("local", f"document {sent}"))
        slow._base.write("local", [stray])
        assert (await client.delete(f"{ROUTE}/{sent}")).json()["chunks"] == 3
        assert (await client.get("/v1/knowledge")).json()["data"] == []
