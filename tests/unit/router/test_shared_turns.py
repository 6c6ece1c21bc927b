"""What one tenant sends holds no other's work where threads and workers are shared: knowledge, documents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from samovar.configs.optional_sections import DocumentsSettings
from samovar.router.context.compaction import IdleQueue
from samovar.router.context.documents import DocumentShelf, shelf
from samovar.router.context.knowledge import KnowledgeBase, harness
from samovar.router.context.knowledge.knowledge import QuestionTime
from tests.support.router.router_harness import (
    KEY,
    OTHER_KEY,
    House,
    chat,
    error_of,
    make_settings,
    spoken,
    until,
)

ALICE = {"authorization": f"Bearer {KEY}"}
BOB = {"authorization": f"Bearer {OTHER_KEY}"}
TEXT = "The tap is opened by two turns to the left, and closed by two to the right. " * 4
SLOW = {"checks": [{"regex": "(?:a|aa)+[0-9]{1}"}] * 64, "question": "tap"}


def house(folder: Path, **knowledge: Any) -> House:
    own = {"enabled": True, "dir": folder / "kb", "embedder": "none", **knowledge}
    settings = make_settings(knowledge=own, keys={"alice": KEY, "bob": OTHER_KEY})
    return House(lambda _: spoken("Fine."), settings=settings)


@asynccontextmanager
async def opened(made: House) -> AsyncIterator[Any]:
    try:
        async with made.client() as client:
            for headers in (ALICE, BOB):
                entry = {"kind": "gotcha", "title": "tap", "text": "a" * 300}
                assert (await client.post("/v1/knowledge", json=entry, headers=headers)).status_code == 201
            yield client
    finally:
        made.service.stage("documents").close()  # type: ignore[union-attr]
        made.service.stage("knowledge").close()  # type: ignore[union-attr]


@pytest.mark.guarantee("G10")
async def test_no_check_of_a_flood_ends_before_another_tenants_chat_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of 64 slow checks at once, each check held until bob is served: he waits for none."""
    made, gate, ended = house(tmp_path), threading.Event(), list[str]()
    broken = harness.broken

    def slow(*given: Any) -> str | None:
        gate.wait(60)
        ended.append("check")
        return broken(harness.Check(contains="b"), *given[1:])

    monkeypatch.setattr(harness, "broken", slow)
    base = made.service.stage("knowledge")
    assert isinstance(base, KnowledgeBase)
    async with opened(made) as client:
        body = {"questions": [SLOW] * 2}
        flood = [
            asyncio.create_task(client.post("/v1/knowledge/test", json=body, headers=ALICE)) for _ in range(8)
        ]
        await until(lambda: base.turns.waiting("alice") == 8)
        asked = await client.post(
            "/v1/chat/completions", json=chat("Where is the tap?", knowledge={}), headers=BOB
        )
        assert asked.status_code == 200, asked.text
        assert (await client.get("/v1/knowledge", headers=BOB)).status_code == 200
        hers = await client.get("/v1/knowledge", headers=ALICE)
        assert hers.status_code in (200, 429), "her own reads are her own matter"
        assert not ended, "he has waited for one of her checks"
        gate.set()
        answers = await asyncio.gather(*flood)
        assert {one.status_code for one in answers} == {200}
        base.turns.check_integrity()


@pytest.mark.guarantee("G10")
async def test_between_two_of_its_checks_a_tenant_waits_for_one_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bob's two questions end behind as many checks of alice's as they have themselves, and one."""
    made, begin, order, now_s = house(tmp_path), threading.Event(), list[str](), 0.0

    def noted(check: harness.Check, *given: Any) -> str | None:
        nonlocal now_s
        begin.wait(60)
        order.append(check.contains or "")
        now_s += 0.5
        return None

    monkeypatch.setattr(harness, "broken", noted)
    base = made.service.stage("knowledge")
    assert isinstance(base, KnowledgeBase)
    monkeypatch.setattr(base.turns, "_clock", lambda: now_s)
    async with opened(made) as client:
        hers = {"questions": [{"question": "tap", "checks": [{"contains": "alice"}] * 64}] * 8}
        his = {"questions": [{"question": "tap", "checks": [{"contains": "bob"}]}] * 2}
        flood = [
            asyncio.create_task(client.post("/v1/knowledge/test", json=hers, headers=ALICE)) for _ in range(2)
        ]
        await until(lambda: base.turns.waiting("alice") == 2)
        asked = asyncio.create_task(client.post("/v1/knowledge/test", json=his, headers=BOB))
        await until(lambda: base.turns.waiting("bob") == 1)
        begin.set()
        assert (await asked).status_code == 200
        await asyncio.gather(*flood)
    assert order.count("alice") == 2 * 8 * 64
    last = len(order) - 1 - order[::-1].index("bob")
    assert order[:last].count("alice") <= 4, "he is not behind her flood"


async def test_the_time_of_questions_is_counted_for_a_tenant(tmp_path: Path) -> None:
    made = house(tmp_path)
    base = made.service.stage("knowledge")
    assert isinstance(base, KnowledgeBase)
    async with opened(made) as client:
        body = {"questions": [{"question": "tap", "checks": [{"contains": "a"}]}]}
        base.question_time.spend("alice", 2 * base.settings.questions_s + 5)
        refused = await client.post("/v1/knowledge/test", json=body, headers=ALICE)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "questions_busy")
        assert "knowledge.questions_s" in error_of(refused)["message"]
        assert int(refused.headers["retry-after"]) > 5
        assert (await client.post("/v1/knowledge/test", json=body, headers=BOB)).status_code == 200


def test_time_of_questions_comes_back_by_half_a_second_each_second() -> None:
    now_s = 0.0
    time = QuestionTime(30.0, lambda: now_s)
    assert time.spend("alice", 60.0) == 0.0
    assert time.spend("alice", 1.0) == 2.0
    assert time.spend("bob", 1.0) == 0.0
    now_s = 2.0
    assert time.spend("alice", 0.0) == 0.0
    now_s = 1e6
    assert time.spend("alice", 61.0) == 2.0, "no more than two times is saved up"


async def test_a_json_schema_of_the_context_holds_for_an_entry_that_is_such_json(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        entry = {"kind": "fact", "title": "ports", "text": '{"http": 8000}'}
        sent = await client.post("/v1/knowledge", json=entry, headers=BOB)
        if sent.status_code != 201:
            entry["kind"] = "gotcha"
            assert (await client.post("/v1/knowledge", json=entry, headers=BOB)).status_code == 201

        async def failures(question: str, schema: dict[str, Any]) -> list[str]:
            asked = {"question": question, "checks": [{"json_schema": schema}]}
            answer = await client.post("/v1/knowledge/test", json={"questions": [asked]}, headers=BOB)
            found: list[str] = answer.json()["questions"][0]["failures"]
            return found

        good = {"type": "object", "required": ["http"], "properties": {"http": {"type": "integer"}}}
        assert await failures("Which ports?", good) == []
        assert await failures("Which ports?", {"type": "object", "required": ["https"]})
        assert await failures("nothing of the sort", good) == ["json_schema: there is no entry"]


@pytest.mark.guarantee("G10")
async def test_a_pdf_that_takes_all_its_time_leaves_a_worker_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice sends twenty that never end; bob's is read while the first of hers is, and no second one is."""
    made, gate, reading = house(tmp_path), asyncio.Event(), list[bytes]()
    documents = made.service.stage("documents")
    assert isinstance(documents, DocumentShelf)

    async def read(data: bytes, settings: DocumentsSettings) -> tuple[str, int]:
        reading.append(data)
        if data == b"slow":
            await gate.wait()
        return TEXT, 1

    monkeypatch.setattr(shelf, "read_pdf", read)
    async with opened(made) as client:

        async def send(data: str, headers: dict[str, str]) -> str:
            sent = {"format": "pdf", "data": data, "prefill": "never"}
            answer = await client.post("/v1/documents", json=sent, headers=headers)
            assert answer.status_code == 202, answer.text
            return str(answer.json()["id"])

        for _ in range(20):
            await send("c2xvdw==", ALICE)  # slow
        documents.start()
        try:
            await until(lambda: bool(reading))
            named = await send("cXVpY2s=", BOB)  # quick
            await until(lambda: len(reading) > 1)
            assert reading == [b"slow", b"quick"], "no second document of a tenant at once"
            async with asyncio.timeout(60):
                while (await client.get(f"/v1/documents/{named}", headers=BOB)).json()["state"] != "ready":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert reading == [b"slow", b"quick"]
        finally:
            gate.set()
            await documents.stop()


async def test_documents_that_wait_to_be_read_are_bounded_for_a_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "PROCESSING_MAX", 2)
    made = house(tmp_path)
    async with opened(made) as client:
        sent = {"text": TEXT, "prefill": "never"}
        codes = [(await client.post("/v1/documents", json=sent, headers=ALICE)).status_code for _ in range(3)]
        assert codes == [202, 202, 429]
        refused = await client.post("/v1/documents", json=sent, headers=ALICE)
        assert error_of(refused)["code"] == "documents_processing"
        assert (await client.post("/v1/documents", json=sent, headers=BOB)).status_code == 202


def test_idle_work_goes_in_turns_and_a_flood_drops_its_own() -> None:
    async def work() -> Any:
        return "done"

    queue = IdleQueue(8, 3)
    queue.offer(("bob", b"first"), work)
    dropped = sum(queue.offer(("alice", bytes([number])), work) for number in range(50))
    queue.offer(("bob", b"second"), work)
    assert dropped == 43
    order = []
    while queue:
        (tenant, session), _ = queue.take()
        order.append((tenant, session))
        queue.spent(tenant, 5.0)
    assert [one for one in order if one[0] == "bob"] == [("bob", b"first"), ("bob", b"second")]
    assert order.index(("bob", b"second")) <= 3, order
    assert [session[0] for tenant, session in order if tenant == "alice"] == list(range(44, 50))
