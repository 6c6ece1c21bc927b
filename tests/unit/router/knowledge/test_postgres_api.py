"""/v1/knowledge and chats over PostgreSQL: front doors share it, and one goes on while it is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
        assert one.service.knowledge is not None
        one.service.knowledge.close()


async def test_what_one_front_door_writes_another_finds_for_the_same_tenant_only(
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
