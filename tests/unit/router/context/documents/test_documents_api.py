"""/v1/documents and chats that name documents, over the whole ingress with scripted replicas.

All of it holds where documents are in a file, and where they are in PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.cache_tiers.blocks import session_of, tenant_tag
from samovar.configs.optional_sections import DocumentsSettings
from samovar.replicas.messages import Failed, GenerateRequest
from samovar.router.context.documents import DocumentShelf, document_session, place_documents
from samovar.router.context.documents.store import FILE_NAME
from samovar.router.context.knowledge import KnowledgeBase, KnowledgeError, StoreBusy
from samovar.router.routing import SessionDirectory
from tests.support.constants import move
from tests.support.router.knowledge_desks import PostgresDesk
from tests.support.router.router_harness import (
    KEY,
    OTHER_KEY,
    TOKENIZER,
    House,
    chat,
    error_of,
    make_settings,
    spoken,
    until,
)

ROUTE = "/v1/documents"
TEXT = "The samovar boils at ninety-six degrees.\n\nIts tap is called Zarya-7."
BOTH = {"mine": KEY, "other": OTHER_KEY}
SHARED: dict[str, Any] = {}
"""The settings of a PostgreSQL, while a test has its documents there."""


@pytest.fixture(autouse=True, params=["file", "postgres"])
def desk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresDesk | None]:
    if request.param == "file":
        yield None
        return
    server = request.getfixturevalue("postgres_server")
    made = PostgresDesk(server)
    url = {"url": server.url(), "schema_name": made.schema, "connections_max": 8}
    monkeypatch.setitem(SHARED, "postgres", url)
    yield made
    made.store.check_integrity()
    made.store.close()
    made.drop()


def house(folder: Path, keys: dict[str, str] | None = None, **documents: Any) -> House:
    own_dir = {"enabled": True, "dir": folder / "kb", "embedder": "none", **SHARED}
    settings = make_settings(knowledge=own_dir, keys=keys)
    own = {"prefill_stored_s": 0.0, "prefill_idle_s": 0.0, **documents}
    settings = settings.model_copy(
        update={"documents": settings.documents.model_validate({**settings.documents.model_dump(), **own})}
    )
    return House(lambda _: spoken("Fine.", cached=64), settings=settings)


def shelf_of(made: House) -> DocumentShelf:
    assert isinstance(made.service.stage("documents"), DocumentShelf)
    return made.service.stage("documents")


@asynccontextmanager
async def opened(made: House, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """Clients of an ingress whose documents are worked on only when a test says so."""
    try:
        async with made.client(**headers) as client:
            yield client
    finally:
        shelf_of(made).close()
        assert made.service.stage("knowledge") is not None
        made.service.stage("knowledge").close()


async def worked(made: House) -> None:
    """Do all that is left to do of all documents."""
    async with asyncio.timeout(60):
        while await shelf_of(made).work():
            pass


async def added(made: House, client: httpx.AsyncClient, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    """Add a document and return its card once it is worked on."""
    headers = fields.pop("headers", None)
    answer = await client.post(ROUTE, json={"text": text, **fields}, headers=headers)
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == "processing"
    await worked(made)
    card: dict[str, Any] = (await client.get(f"{ROUTE}/{answer.json()['id']}", headers=headers)).json()
    return card


def prompt_of(made: House, call: int = -1) -> str:
    return str(TOKENIZER.decode(made.replicas.calls[call].prompt_token_ids))


def questions(made: House) -> list[GenerateRequest]:
    """What reached the replicas but for prefills."""
    return [call for call in made.replicas.calls if not call.request_id.startswith("doc-")]


def steps(made: House) -> list[GenerateRequest]:
    return [call for call in made.replicas.calls if call.request_id.startswith("doc-")]


async def test_a_document_is_read_chunked_prefilled_and_erased(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        card = await added(made, client, TEXT * 9, title="Manual")
        assert (card["state"], card["reason"], card["chunks"] > 0) == ("ready", None, True)
        assert card["prefill"]["state"] == "computed", "the fake directory has no tiers"
        assert card["prefill"]["tokens"] == card["tokens"] == steps(made)[-1].prompt_token_ids.__len__()
        found = await client.post("/v1/knowledge/search", json={"query": "Zarya-7"})
        assert found.json()["data"][0]["kind"] == "document_chunk"
        assert found.json()["data"][0]["title"] == "Manual"
        listed = (await client.get(ROUTE)).json()
        assert [one["id"] for one in listed["data"]] == [card["id"]]
        assert (await client.get(ROUTE, params={"after": card["id"]})).json()["data"] == []
        unknown = await client.get(ROUTE, params={"after": "doc_nobody"})
        assert (unknown.status_code, error_of(unknown)["param"]) == (400, "after")
        gone = await client.delete(f"{ROUTE}/{card['id']}")
        assert gone.json() == {
            "id": card["id"],
            "object": "document",
            "deleted": True,
            "chunks": card["chunks"],
        }
        for again in (
            await client.get(f"{ROUTE}/{card['id']}"),
            await client.delete(f"{ROUTE}/{card['id']}"),
        ):
            assert (again.status_code, error_of(again)["code"]) == (404, "document_not_found")
        assert (await client.post("/v1/knowledge/search", json={"query": "Zarya-7"})).json()["data"] == []


async def test_a_chat_begins_with_exactly_what_was_prefilled(tmp_path: Path) -> None:
    made = house(tmp_path, prefill_step_tokens=32)
    async with opened(made) as client:
        card = await added(made, client, TEXT * 6, title="Manual")
        prefilled = steps(made)[-1]
        for messages in (
            [{"role": "user", "content": "How hot?"}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How hot?"}],
            [
                {"role": "system", "content": "Date: today\nBe brief."},
                {"role": "user", "content": "How hot?"},
            ],
        ):
            body = chat(documents=[card["id"]]) | {"messages": messages}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            asked = questions(made)[-1]
            ids = prefilled.prompt_token_ids
            assert asked.prompt_token_ids[: len(ids)] == ids
            assert asked.salt == prefilled.salt
            assert asked.tenant == prefilled.tenant
            told = answer.json()["receipt"]["documents"]
            assert told["ids"] == [card["id"]]
            assert len(ids) <= told["tokens"] + 16 <= len(ids) + 48
            assert 0 < told["cached_tokens"] <= 64
            assert "| Its tap is called Zarya-7." in prompt_of(made)
        lengths = [len(step.prompt_token_ids) for step in steps(made)]
        assert lengths == sorted(lengths)
        assert all(length % 16 == 0 for length in lengths), "whole blocks"
        assert max(after - before for before, after in zip([0, *lengths], lengths, strict=False)) <= 32
        sessions = {session_of(step.session) for step in steps(made)}
        assert sessions == {document_session(b"secret", "local", card["id"])}
        assert prefilled.placement is not None
        assert prefilled.placement.first == "nvme", "the lowest tier that there is"


async def test_the_first_chat_asks_the_node_that_has_computed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"replica-1": "node-a"}
    monkeypatch.setattr(SessionDirectory, "nodes", property(lambda _: nodes))
    made = house(tmp_path)
    async with opened(made) as client:
        cards = [await added(made, client, f"{TEXT} {number}. " * 9) for number in range(2)]
        never = await added(made, client, TEXT, prefill="never")
        nodes["replica-1"] = "node-b"
        late = await added(made, client, TEXT * 9)
        asked: tuple[tuple[list[str], tuple[str, ...]], ...] = (
            ([cards[0]["id"]], ("node-a",)),
            ([one["id"] for one in cards], ("node-a",)),
            ([late["id"]], ("node-b",)),
            ([never["id"]], ()),
            ([], ()),
        )
        for number, (ids, expected) in enumerate(asked):
            body = chat("Why?", documents=ids, session_id=f"s{number}")
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert questions(made)[-1].route.peers == expected
        both = [late["id"], cards[0]["id"]]
        await client.post("/v1/chat/completions", json=chat("Why?", documents=both, session_id="s"))
        assert set(questions(made)[-1].route.peers) == {"node-a", "node-b"}


async def test_a_prefix_that_is_not_the_chats_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: a prefill without the document, and one of another place in the prompt."""

    def left_out(messages: Any, wholes: Any, **more: Any) -> Any:
        return place_documents(messages, [], **more)

    def behind(messages: Any, wholes: Any, **more: Any) -> Any:
        return place_documents(messages, wholes, **{**more, "has_system": False})

    for number, (planted, is_computed) in enumerate(((left_out, False), (behind, True))):
        monkeypatch.setattr("samovar.router.context.documents.prefill.place_documents", planted)
        made = house(tmp_path / str(number))
        async with opened(made) as client:
            card = await added(made, client, TEXT * 6)
            assert card["prefill"]["state"] == ("computed" if is_computed else "failed")
            assert (await client.post("/v1/chat/completions", json=chat(documents=[card["id"]]))).is_success
            for step in steps(made):
                ids = step.prompt_token_ids
                assert questions(made)[-1].prompt_token_ids[: len(ids)] != ids, "so the test above fails"


async def test_texts_in_memory_are_bounded_in_bytes_not_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of these texts have fewer characters, and more bytes.
    move(monkeypatch, DocumentsSettings, text_cache_bytes_max=1500)
    made, reads = house(tmp_path), list[str]()
    store = shelf_of(made).store
    text = store.text

    def seen(tenant: str, document: str) -> str | None:
        reads.append(document)
        return text(tenant, document)

    async with opened(made) as client:
        one, other = [(await added(made, client, word * 300, prefill="never"))["id"] for word in "яю"]
        monkeypatch.setattr(store, "text", seen)
        for named in (one, one, other, one):
            answer = await client.post("/v1/chat/completions", json=chat(documents=[named]))
            assert answer.status_code == 200, answer.text
        assert reads == [one, other, one]


async def test_documents_stand_in_one_order_and_once(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        one, other = [(await added(made, client, f"text {n}"))["id"] for n in range(2)]
        prompts = set()
        for named in ([one, other], [other, one], [one, other, one]):
            answer = await client.post("/v1/chat/completions", json=chat(documents=named))
            assert answer.json()["receipt"]["documents"]["ids"] == sorted([one, other])
            prompts.add(prompt_of(made))
        assert len(prompts) == 1


async def test_prefill_is_asked_for_refused_and_repeated(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        never = await added(made, client, prefill="never")
        assert (never["prefill"]["state"], steps(made)) == ("none", [])
        always = await added(made, client, prefill="always")
        assert [step.stores_all for step in steps(made)] == [True] * len(steps(made))
        assert steps(made)
        count = len(steps(made))
        again = await client.post(f"{ROUTE}/{never['id']}/prefill", json={"prefill": "auto"})
        assert (again.status_code, again.json()["prefill"]["state"]) == (202, "waiting")
        await worked(made)
        assert len(steps(made)) > count
        assert not steps(made)[-1].stores_all
        assert (await client.get(f"{ROUTE}/{always['id']}")).json()["prefill"]["wanted"] == "always"


async def test_a_wish_that_comes_while_its_document_is_prefilled_counts(tmp_path: Path) -> None:
    made = house(tmp_path, prefill_step_tokens=32)
    never, plain = asyncio.Event(), made.replicas.script
    made.replicas.script = lambda request: [never, *plain(request)]
    async with opened(made) as client:
        answer = await client.post(ROUTE, json={"text": TEXT * 9, "prefill": "auto"})
        path = f"{ROUTE}/{answer.json()['id']}"
        working = asyncio.create_task(worked(made))
        await until(lambda: bool(steps(made)))
        made.replicas.script = plain
        changed = await client.post(f"{path}/prefill", json={"prefill": "always"})
        assert changed.status_code == 202, changed.text
        await working
        await worked(made)
        assert [step.stores_all for step in steps(made)] == [False, *[True] * (len(steps(made)) - 1)]
        card = (await client.get(path)).json()
        assert (card["prefill"]["wanted"], card["prefill"]["state"]) == ("always", "computed")
        again = await client.post(f"{path}/prefill")
        assert (again.status_code, again.json()["prefill"]["wanted"]) == (202, "auto"), (
            "no body: the defaults"
        )


async def test_a_wish_at_another_ingress_counts_while_its_document_is_prefilled(tmp_path: Path) -> None:
    made, other = (house(tmp_path, prefill_step_tokens=32) for _ in range(2))
    gate, plain = asyncio.Event(), made.replicas.script
    made.replicas.script = lambda request: [gate, *plain(request)]
    async with opened(made) as client, opened(other) as elsewhere:
        answer = await client.post(ROUTE, json={"text": TEXT * 9, "prefill": "auto"})
        path = f"{ROUTE}/{answer.json()['id']}"
        working = asyncio.create_task(worked(made))
        await until(lambda: bool(steps(made)))
        changed = await elsewhere.post(f"{path}/prefill", json={"prefill": "always"})
        assert changed.status_code == 202, changed.text
        await worked(other)
        gate.set()
        await working
        assert {step.stores_all for step in steps(other)} == {True}
        assert [step.stores_all for step in steps(made)] == [False], "it has lost the document"
        card = (await client.get(path)).json()
        assert (card["prefill"]["wanted"], card["prefill"]["state"]) == ("always", "computed")
        assert card["prefill"]["tokens"] == card["tokens"]


async def test_a_replica_that_is_lost_leaves_the_prefill_for_later(tmp_path: Path) -> None:
    made = house(tmp_path, lease_s=1.0)
    good = made.replicas.script
    made.replicas.script = lambda _: [Failed("gone", replica_lost=True)]
    now_s = [1000.0]
    shelf_of(made).store._clock = lambda: now_s[0]
    async with opened(made) as client:
        card = await added(made, client)
        assert (card["state"], card["prefill"]["state"]) == ("ready", "waiting")
        assert not await shelf_of(made).work(), "not at once"
        made.replicas.script = good
        now_s[0] += 2
        await worked(made)
        assert (await client.get(f"{ROUTE}/{card['id']}")).json()["prefill"]["state"] == "computed"


async def test_what_a_step_stored_after_another_ingress_had_deleted_it_is_cleared(tmp_path: Path) -> None:
    made = house(tmp_path)
    good, shelf = made.replicas.script, shelf_of(made)

    def late(request: GenerateRequest) -> Any:
        one = request.request_id.rpartition("-")[0]
        shelf.store.mark_deleting("local", one)
        shelf.store.erase("local", one)  # all of it, as another ingress does that
        return good(request)

    made.replicas.script = late
    async with opened(made) as client:
        named = (await client.post(ROUTE, json={"text": TEXT})).json()["id"]
        await worked(made)
        assert (await client.get(f"{ROUTE}/{named}")).status_code == 404
        assert steps(made), "a step was computed"
        assert made.replicas.clears == [
            (tenant_tag(b"secret", "local"), (document_session(b"secret", "local", named),))
        ]


async def test_what_a_stopped_ingress_left_is_gone_on_with(tmp_path: Path) -> None:
    first = house(tmp_path)
    async with opened(first) as client:
        answer = await client.post(ROUTE, json={"text": TEXT, "title": "Manual"})
        assert await shelf_of(first)._base.run(
            "", lambda: shelf_of(first).store.claim("a crashed one", "local")
        )
    second = house(tmp_path, lease_s=1.0)
    now_s = [0.0]
    shelf_of(second).store._clock = lambda: now_s[0]
    async with opened(second) as client:
        path = f"{ROUTE}/{answer.json()['id']}"
        await worked(second)
        assert (await client.get(path)).json()["state"] == "processing", "another one has the lease"
        now_s[0] = 1e12
        await worked(second)
        card = (await client.get(path)).json()
        assert (card["state"], card["title"], card["prefill"]["state"]) == ("ready", "Manual", "computed")


async def test_chunks_of_an_attempt_before_are_not_there_twice(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        await client.post(ROUTE, json={"text": TEXT, "prefill": "never"})
        shelf, kept = shelf_of(made), shelf_of(made).store.change

        def crash(*given: Any, **fields: Any) -> Any:
            if "entries" in fields:
                raise KeyboardInterrupt
            return kept(*given, **fields)

        shelf.store.change = crash  # type: ignore[method-assign]
        document = await shelf._base.run("", lambda: shelf.store.claim(shelf._owner, "local"))
        assert document is not None
        with pytest.raises(KeyboardInterrupt):
            shelf._write_chunks(document, [("", "one"), ("", "two")])
        shelf.store.change = kept  # type: ignore[method-assign]
        shelf._write_chunks(document, [("", "one"), ("", "two")])
        entries = (await client.get("/v1/knowledge")).json()["data"]
        assert sorted(one["text"] for one in entries) == ["one", "two"]


async def test_deleting_clears_every_session_that_had_it(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        card, other = await added(made, client), await added(made, client, "another text")
        for number in range(3):
            body = chat(documents=[card["id"]], session_id=f"s{number}")
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        await client.post("/v1/chat/completions", json=chat(documents=[other["id"]], session_id="else"))
        users = {session_of(call.session) for call in questions(made)[:3]}
        assert len(users) == 3
        assert (await client.delete(f"{ROUTE}/{card['id']}")).status_code == 200
        cleared = {one for tenant, some in made.replicas.clears for one in some or ()}
        assert cleared == users | {document_session(b"secret", "local", card["id"])}
        assert {tenant for tenant, _ in made.replicas.clears} == {tenant_tag(b"secret", "local")}
        refused = await client.post(
            "/v1/chat/completions", json=chat(documents=[card["id"]], session_id="s1")
        )
        assert (refused.status_code, error_of(refused)["param"]) == (404, "documents[0]")
        assert (await client.get(f"{ROUTE}/{other['id']}")).json()["state"] == "ready"


async def test_with_more_sessions_than_are_remembered_all_of_the_tenant_is_cleared(tmp_path: Path) -> None:
    made = house(tmp_path, sessions_max=2)
    async with opened(made) as client:
        card = await added(made, client)
        for number in range(4):
            body = chat(documents=[card["id"]], session_id=f"s{number}")
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        await client.delete(f"{ROUTE}/{card['id']}")
        assert made.replicas.clears == [(tenant_tag(b"secret", "local"), None)]


async def test_a_deletion_that_does_not_reach_everything_says_so_and_is_gone_on_with(tmp_path: Path) -> None:
    made = house(tmp_path)
    now_s = [1000.0]
    shelf_of(made).store._clock = lambda: now_s[0]
    async with opened(made) as client:
        card = await added(made, client)
        good, made.replicas.clear_answers = made.replicas.clear_answers, [OSError("gone")]
        refused = await client.delete(f"{ROUTE}/{card['id']}")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        named = await client.post("/v1/chat/completions", json=chat(documents=[card["id"]]))
        assert (named.status_code, error_of(named)["code"]) == (404, "document_not_found")
        assert (await client.get(f"{ROUTE}/{card['id']}")).json()["state"] == "deleting"
        made.replicas.clear_answers = good
        await worked(made)
        now_s[0] += 100
        await worked(made)
        assert (await client.get(f"{ROUTE}/{card['id']}")).status_code == 404


async def test_a_deletion_that_fails_in_an_unknown_way_is_not_tried_without_a_pause(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        card = await added(made, client, prefill="never")
        shelf, tries = shelf_of(made), 0

        async def broken(tenant: str, sessions: tuple[bytes, ...] | None) -> None:
            nonlocal tries
            tries += 1
            raise RuntimeError("planted")

        shelf.clears = broken
        refused = await client.delete(f"{ROUTE}/{card['id']}")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        for _ in range(4):
            await shelf.work()
        assert tries == 2, "one call, and one look in the background"


@pytest.mark.guarantee("G12")
async def test_chunks_that_are_written_beside_a_deletion_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ingress deletes their document just before, and who writes them cannot take them back."""
    first = house(tmp_path)
    monkeypatch.setitem(SHARED, "busy_s", 0.05)
    second, loop, answers = house(tmp_path), asyncio.get_running_loop(), list[httpx.Response]()
    base = first.service.stage("knowledge")
    assert isinstance(base, KnowledgeBase)
    write = base.store.write

    def full(tenant: str, entries: Any) -> int:
        raise StoreBusy("another one writes")

    async with opened(first) as client, opened(second) as other:
        path = f"{ROUTE}/{(await client.post(ROUTE, json={'text': TEXT, 'prefill': 'never'})).json()['id']}"

        def late(*given: Any, **more: Any) -> Any:
            deletion = asyncio.run_coroutine_threadsafe(other.delete(path), loop)
            answers.append(deletion.result(60))
            return write(*given, **more)

        with monkeypatch.context() as patched:
            patched.setattr(base.store, "write", late)
            patched.setattr(base.store, "erase_all", full)
            await worked(first)
        (answer,) = answers
        assert (answer.status_code, error_of(answer)["code"]) == (503, "clear_incomplete"), "it has to wait"
        again = await other.delete(path)
        assert (again.status_code, again.json()["chunks"]) == (200, 1)
        assert (await client.get("/v1/knowledge")).json()["data"] == []
        assert (await client.get(path)).status_code == 404


async def test_nothing_of_an_erased_document_is_in_any_file(
    tmp_path: Path, desk: PostgresDesk | None
) -> None:
    made = house(tmp_path)
    word = "Quincunxial-4711"
    async with opened(made) as client:
        card = await added(made, client, f"{TEXT}\n\nThe word is {word}. " * 40, title=f"About {word}")
        kept = await added(made, client, TEXT)
        if desk is not None:
            texts = [one.encode() for one in (word.lower(), "uincunx", card["id"])]
            assert desk.seen(texts) == texts, "the check can see it"
            assert (await client.delete(f"{ROUTE}/{card['id']}")).status_code == 200
            assert desk.seen(texts) == []
            assert (await client.get(f"{ROUTE}/{kept['id']}")).json()["state"] == "ready"
            return
        folder = tmp_path / "kb"
        assert any(word.encode() in one.read_bytes() for one in folder.iterdir()), "the check can see it"
        assert (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600
        assert (await client.delete(f"{ROUTE}/{card['id']}")).status_code == 200
        for one in folder.iterdir():
            data = one.read_bytes()
            for text in (word, word.lower(), "uincunx", card["id"]):
                assert text.encode() not in data, (one.name, text)
        assert (await client.get(f"{ROUTE}/{kept['id']}")).json()["state"] == "ready"


async def test_tenants_see_share_and_count_nothing_of_each_other(tmp_path: Path) -> None:
    made = house(tmp_path, keys=BOTH, documents_max=1)
    mine, other = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    async with opened(made) as client:
        card = await added(made, client, headers=mine)
        path = f"{ROUTE}/{card['id']}"
        for refused in (
            await client.get(path, headers=other),
            await client.delete(path, headers=other),
            await client.post(f"{path}/prefill", json={}, headers=other),
            await client.post("/v1/chat/completions", json=chat(documents=[card["id"]]), headers=other),
        ):
            assert (refused.status_code, error_of(refused)["code"]) == (404, "document_not_found")
        assert (await client.get(ROUTE, headers=other)).json()["data"] == []
        found = await client.post("/v1/knowledge/search", json={"query": "Zarya-7"}, headers=other)
        assert found.json()["data"] == []
        same = await added(made, client, headers=other)
        assert same["state"] == "ready", "another tenant's document does not count"
        full = await client.post(ROUTE, json={"text": "x"}, headers=other)
        assert (full.status_code, error_of(full)["code"]) == (400, "quota_exceeded")
        of_mine, of_other = (
            [step for step in steps(made) if step.request_id.startswith(one["id"])] for one in (card, same)
        )
        assert of_mine[0].salt != of_other[0].salt, "blocks of equal text are no other tenant's"
        assert of_mine[0].tenant != of_other[0].tenant
        assert of_mine[0].session != of_other[0].session
        await client.delete(f"{ROUTE}/{same['id']}", headers=other)
        assert {tenant for tenant, _ in made.replicas.clears} == {tenant_tag(b"secret", "other")}
        assert (await client.get(path, headers=mine)).json()["state"] == "ready"


async def test_a_document_is_named_only_when_it_is_ready_and_fits(tmp_path: Path) -> None:
    made = house(tmp_path, chars_max=20_000, chunks_max=40, per_request_max=2)
    async with opened(made) as client:
        waiting = (await client.post(ROUTE, json={"text": TEXT})).json()
        named = await client.post("/v1/chat/completions", json=chat(documents=[waiting["id"]]))
        assert (named.status_code, error_of(named)["code"]) == (409, "document_not_ready")
        many = await client.post("/v1/chat/completions", json=chat(documents=["doc-1", "doc-2", "doc-3"]))
        assert (many.status_code, error_of(many)["param"]) == (400, "documents")
        await worked(made)
        long = await added(made, client, "word " * 3990)
        assert (long["state"], long["prefill"]["state"]) == ("ready", "failed")
        assert "no chat can name it" in long["prefill"]["reason"]
        named = await client.post("/v1/chat/completions", json=chat(documents=[long["id"]]))
        assert (named.status_code, error_of(named)["code"]) == (400, "context_length_exceeded")
        longer = await added(made, client, "word " * 4001)
        assert (longer["state"], "documents.chars_max" in longer["reason"]) == ("failed", True)
        named = await client.post("/v1/chat/completions", json=chat(documents=[longer["id"]]))
        assert (named.status_code, error_of(named)["code"]) == (409, "document_failed")
        many_chunks = await added(made, client, "\n\n".join(["# a\n" + "x" * 90] * 100), format="markdown")
        assert "documents.chunks_max" in many_chunks["reason"]
        assert (await client.delete(f"{ROUTE}/{longer['id']}")).status_code == 200


async def test_a_service_without_a_knowledge_base_has_no_documents() -> None:
    made = House()
    async with made.client() as client:
        assert (await client.get(ROUTE)).status_code == 404
        refused = await client.post("/v1/chat/completions", json=chat(documents=["doc-1"]))
        assert (refused.status_code, error_of(refused)["param"]) == (400, "documents")
        assert "knowledge.enabled" in error_of(refused)["message"]
        assert (await client.post("/v1/chat/completions", json=chat(documents=[]))).status_code == 200


async def test_the_openapi_document_has_the_routes(tmp_path: Path) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {path for path in paths if path.startswith(ROUTE)} == {
            ROUTE,
            f"{ROUTE}/{{document}}",
            f"{ROUTE}/{{document}}/prefill",
        }


async def test_each_part_of_a_document_is_erased_whatever_becomes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = house(tmp_path)
    async with opened(made) as client:
        card = await added(made, client)
        base = made.service.stage("knowledge")
        assert isinstance(base, KnowledgeBase)
        with monkeypatch.context() as broken:

            def full(tenant: str, entries: Any) -> int:
                raise KnowledgeError("the disk is full")

            broken.setattr(base.store, "erase_all", full)
            refused = await client.delete(f"{ROUTE}/{card['id']}")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "clear_incomplete")
        assert len(made.replicas.clears) == 1, "its blocks are cleared"
        assert (await client.get(f"{ROUTE}/{card['id']}")).json()["state"] == "deleting"
        (what,) = made.service.clears.unfinished
        await made.service.clears.go_on_with(what)
        assert not made.service.clears.unfinished
        assert (await client.get(f"{ROUTE}/{card['id']}")).status_code == 404
        assert not base.store.heads("local")
