"""/v1/knowledge and chats over PostgreSQL: ingresses share it, and one goes on while it is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.router.router_harness import (
    KEY,
    OTHER_KEY,
    House,
    chat,
    error_of,
    make_settings,
    spoken,
)
from tests.support.services.postgres_server import PostgresServer

ROUTE = "/v1/knowledge"
KEYS = {"tea": KEY, "coffee": OTHER_KEY}


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


def house(server: PostgresServer, keys: dict[str, str] | None = None, **knowledge: Any) -> House:
    postgres = {"url": server.url(), "schema_name": "api", "retry_s": 0}
    own = {"enabled": True, "embedder": "none", "postgres": postgres, **knowledge}
    return House(lambda _: spoken("Fine."), settings=make_settings(knowledge=own, keys=keys))


def close(*made: House) -> None:
    for one in made:
        assert one.service.stage("knowledge") is not None
        one.service.stage("knowledge").close()


async def test_what_one_ingress_writes_another_finds_for_the_same_tenant_only(
    server: PostgresServer,
) -> None:
    first, second = house(server, KEYS), house(server, KEYS)
    tea, coffee = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    async with first.client(**tea) as one, second.client(**tea) as other, second.client(**coffee) as alien:
        body = {"kind": "gotcha", "text": "Refunds in orders_raw are negative rows."}
        entry = (await one.post(ROUTE, json=body)).json()["id"]
        found = (await other.post(f"{ROUTE}/search", json={"query": "orders_raw?"})).json()["data"]
        assert [hit["id"] for hit in found] == [entry]
        stale = {**body, "base": 1}
        assert (await other.post(f"{ROUTE}/{entry}", json=stale)).status_code == 200
        refused = await one.post(f"{ROUTE}/{entry}", json=stale)
        assert (refused.status_code, error_of(refused)["code"]) == (409, "version_conflict")
        question = {"question": "orders_raw?", "checks": [{"excludes": "poison"}]}
        for text, status in (("orders_raw poison", 409), ("orders_raw more", 201)):
            line = json.dumps({"kind": "gotcha", "text": text})
            gated = {"format": "jsonl", "text": line, "questions": [question]}
            assert (await other.post(f"{ROUTE}/import", json=gated)).status_code == status
        assert "poison" not in str((await one.get(ROUTE)).json())
        answer = (await other.post("/v1/chat/completions", json=chat("orders_raw?", knowledge={}))).json()
        assert entry in str(answer["receipt"]["knowledge"])
        assert (await alien.post(f"{ROUTE}/search", json={"query": "orders_raw?"})).json()["data"] == []
        assert (await alien.get(f"{ROUTE}/{entry}")).status_code == 404
        assert (await alien.delete(ROUTE)).status_code == 200
        assert (await one.get(f"{ROUTE}/{entry}")).status_code == 200
        assert (await other.delete(f"{ROUTE}/{entry}")).json()["deleted"] is True
        assert (await one.get(f"{ROUTE}/{entry}")).status_code == 404
    close(first, second)


async def test_while_the_database_is_away_its_routes_are_503_and_chats_that_did_not_ask_go_on(
    server: PostgresServer,
) -> None:
    server.stop()
    made = house(server, always_of=["local"])

    async def asked(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=chat("orders_raw?", **more))

    async with made.client() as client:
        for _ in range(2):
            for answer in (await client.get(ROUTE), await asked(client, knowledge={})):
                assert (answer.status_code, error_of(answer)["code"]) == (503, "knowledge_unavailable")
                assert "retry-after" in answer.headers
                assert "cannot be reached" in error_of(answer)["message"]
            assert (await asked(client)).status_code == 200
            server.start()
            body = {"kind": "gotcha", "text": "orders_raw has negative rows."}
            assert (await client.post(ROUTE, json=body)).status_code == 201
            assert "orders_raw" in str((await client.get(ROUTE)).json())
            assert (await asked(client)).json()["receipt"]["knowledge"]["entries"]
            server.stop()
    close(made)


NUL = "a\0b"
STRANGE: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", f"{ROUTE}?after=%00", None),
    ("GET", f"{ROUTE}?after=kb_1%00", None),
    ("GET", f"{ROUTE}?kind=%00", None),
    ("GET", f"{ROUTE}?limit=%00", None),
    ("GET", f"{ROUTE}/a%00b", None),
    ("GET", f"{ROUTE}/a%00b?version=1", None),
    ("GET", f"{ROUTE}/a%00b/history", None),
    ("GET", f"{ROUTE}/a%00b/history?after=%00", None),
    ("GET", f"{ROUTE}/a%00b/diff", None),
    ("DELETE", f"{ROUTE}/a%00b", None),
    ("POST", f"{ROUTE}/a%00b", {"kind": "gotcha", "text": "x"}),
    ("POST", f"{ROUTE}/a%00b/revert", {"version": 1}),
    ("POST", f"{ROUTE}/revert", {"tag": NUL}),
    ("POST", f"{ROUTE}/tags", {"name": NUL}),
    ("POST", ROUTE, {"kind": "gotcha", "text": NUL, "title": NUL, "topics": [NUL], "why": NUL, "turn": NUL}),
    ("POST", ROUTE, {"kind": "gotcha", "text": "\0"}),
    ("POST", f"{ROUTE}/search", {"query": NUL}),
    ("POST", f"{ROUTE}/search", {"query": "\0"}),
    ("POST", f"{ROUTE}/import", {"format": "markdown", "text": f"# {NUL}\n{NUL}", "why": NUL}),
    ("POST", f"{ROUTE}/import", {"format": "jsonl", "text": json.dumps({"kind": "gotcha", "text": NUL})}),
    ("POST", f"{ROUTE}/test", {"questions": [{"question": NUL, "checks": [{"contains": NUL}]}]}),
    ("POST", f"{ROUTE}/questions", {"questions": [{"question": NUL, "checks": [{"retrieves": NUL}]}]}),
    ("GET", f"{ROUTE}/questions", None),
    ("GET", f"{ROUTE}/candidates?after=%00", None),
    ("GET", f"{ROUTE}/candidates?state=%00", None),
    ("GET", f"{ROUTE}/candidates/a%00b", None),
    ("DELETE", f"{ROUTE}/candidates/a%00b", None),
    ("POST", f"{ROUTE}/candidates/a%00b/confirm", {"text": NUL}),
    ("POST", f"{ROUTE}/candidates/a%00b/reject", {"why": NUL}),
    ("GET", "/v1/feedback?after=%00", None),
    ("GET", "/v1/feedback?verdict=%00", None),
    ("POST", "/v1/feedback", {"turn_id": NUL, "verdict": "success"}),
    ("POST", "/v1/feedback", {"turn_id": "TURN", "verdict": "success", "tool_call_id": NUL}),
    ("POST", "/v1/feedback", {"turn_id": "TURN", "verdict": "failure", "corrected": NUL, "comment": NUL}),
    ("GET", "/v1/documents?after=%00", None),
    ("GET", "/v1/documents/a%00b", None),
    ("DELETE", "/v1/documents/a%00b", None),
    ("POST", "/v1/documents/a%00b/prefill", {}),
    ("POST", "/v1/documents", {"text": NUL, "title": NUL, "prefill": "never"}),
    ("POST", "/v1/chat/completions", chat(NUL, knowledge={"query": NUL}, session_id=NUL)),
    ("POST", "/v1/chat/completions", chat("hi", knowledge={"kinds": [NUL]})),
    ("POST", "/v1/chat/completions", chat("hi", documents=[NUL])),
    ("POST", "/v1/chat/completions", chat(f"{NUL} samovar", knowledge={}, cache_salt=NUL)),
    ("DELETE", "/v1/sessions/a%00b", None),
]


async def test_text_that_a_database_cannot_keep_is_answered_as_the_file_answers_it(
    server: PostgresServer, tmp_path: Path
) -> None:
    own = {"enabled": True, "embedder": "none", "dir": tmp_path}
    shared, file = house(server), House(lambda _: spoken("Fine."), settings=make_settings(knowledge=own))
    told: list[list[tuple[int, Any]]] = []
    for one in (shared, file):
        answers = []
        async with one.client() as client:
            for text in ("The samovar boils.", "x"):
                await client.post(ROUTE, json={"kind": "gotcha", "text": text})
            first = await client.post("/v1/chat/completions", json=chat("samovar?", knowledge={}))
            turn = first.json()["receipt"]["knowledge"]["turn_id"]
            for method, path, body in STRANGE:
                if body is not None and body.get("turn_id") == "TURN":
                    body = {**body, "turn_id": turn}
                answer = await client.request(method, path, json=body)
                refusal = answer.json()["error"] if answer.status_code >= 400 else None
                if refusal is not None:
                    refusal["message"] = refusal["message"].replace(turn, "TURN")
                assert answer.status_code < 500, (method, path, answer.text)
                answers.append((answer.status_code, refusal))
        told.append(answers)
    for (method, path, _), here, there in zip(STRANGE, *told, strict=True):
        assert here == there, (method, path)
        if "after=%00" in path:
            assert (here[0], here[1]["param"]) == (400, "after")
    close(shared, file)
