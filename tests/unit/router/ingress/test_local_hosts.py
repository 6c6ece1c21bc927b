"""Without keys, only requests to and from this machine's own names are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from samovar.configs.settings import ServerSettings
from tests.support.router.router_harness import KEY, House, chat, error_of, make_settings

CHAT = "/v1/chat/completions"
OURS = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "127.8.9.1", "[::1]", "[::1]:8000"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil.localhost",
    "127.0.0.1.evil.example",
    "user@localhost",
    "localhost:8000@evil.example",
    "[localhost]",
    "[::1",
    "::1",
    "[::2]:8000",
    "0.0.0.0:8000",
    "192.168.1.4",
    "127.1",
    "localhost:x",
    "localhost, evil.example",
    "",
]


@pytest.mark.parametrize("host", OURS)
async def test_our_own_names_are_answered(host: str) -> None:
    async with House().client(host=host, origin=f"http://{host}") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
async def test_other_hosts_are_403(host: str) -> None:
    house = House()
    async with house.client(host=host) as client:
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            response = await client.get(path)
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
        assert (await client.post(CHAT, json=chat())).status_code == 403
        assert (await client.post("/health")).status_code == 403
        assert (await client.get("/health")).status_code == 200
    assert house.replicas.calls == []


@pytest.mark.parametrize(
    "origin",
    ["null", "", "localhost", "file://", "https://evil.example", *(f"http://{host}" for host in FOREIGN)],
)
async def test_other_origins_are_403(origin: str) -> None:
    house = House()
    async with house.client(origin=origin) as client:
        # What a page may send without asking: a form's content type.
        response = await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
        assert (await client.options(CHAT)).status_code == 403
    assert house.replicas.calls == []


@pytest.mark.parametrize(
    ("hosts", "status"), [([], 403), ([b"localhost"], 200), ([b"localhost", b"evil.example"], 403)]
)
async def test_there_must_be_one_host(hosts: list[bytes], status: int) -> None:
    house = House()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"host", host) for host in hosts]
    scope = {"type": "http", "method": "GET", "path": "/version", "headers": headers, "query_string": b""}
    await house.app(scope, receive, send)
    assert sent[0]["status"] == status
    sent.clear()
    await house.service.readiness.poll()
    await house.app({**scope, "path": "/health"}, receive, send)
    assert sent[0]["status"] == 200


BESIDE = [
    "http://localhost:3000",  # a development server, or another user's
    "http://127.0.0.1:8000",
    "http://localhost",
    "http://localhost:80",
    "http://localhost:80000",
    "http://localhost:8000:8000",
    "http://localhost.:8000",
    "http://[::1]:8000",
]


@pytest.mark.parametrize("origin", BESIDE)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
async def test_pages_of_other_ports_and_names_of_this_machine_are_403(origin: str, kind: str | None) -> None:
    """Any user of the machine may serve them, and a browser sends what has no type without asking."""
    house = House()
    headers = {"host": "localhost:8000", "origin": origin} | ({"content-type": kind} if kind else {})
    async with house.client() as client:
        for path in (CHAT, "/v1/knowledge", "/reset_prefix_cache"):
            response = await client.post(path, content=json.dumps(chat()), headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (403, "forbidden")
            assert "server.cors_origins" in error_of(response)["message"]
        assert (await client.delete("/v1/cache", headers=headers)).status_code == 403
    assert house.replicas.calls == []


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("LocalHost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost:443", "https://localhost"),
        ("localhost", "https://localhost:443"),
    ],
)
async def test_our_own_page_may_write_where_it_says_json(host: str, origin: str) -> None:
    house = House()
    async with house.client(host=host, origin=origin) as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        untyped = await client.post(CHAT, content=json.dumps(chat()))
        assert (untyped.status_code, error_of(untyped)["code"]) == (415, "unsupported_media_type")
        assert "application/json" in error_of(untyped)["message"]
    async with house.client(host=host) as client:  # no page: curl without a type
        assert (await client.post(CHAT, content=json.dumps(chat()))).status_code == 200


async def test_a_page_that_is_allowed_by_the_setting_may_write() -> None:
    house = House(settings=make_settings(cors_origins=("http://localhost:3000",)))
    async with house.client(host="localhost:8000", origin="http://localhost:3000") as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert (await client.post(CHAT, content=json.dumps(chat()))).status_code == 415
    async with house.client(host="localhost:8000", origin="http://localhost:3001") as client:
        assert (await client.post(CHAT, json=chat())).status_code == 403


async def test_allowed_hosts_are_answered_on_any_port() -> None:
    house = House(settings=make_settings(allowed_hosts=("Chat.Example", "192.168.1.4")))
    async with house.client() as client:
        for host in ("chat.example", "CHAT.example:443", "192.168.1.4:80", "localhost"):
            headers = {"host": host, "origin": f"https://{host}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200, host
        for host in ("a.chat.example", "example"):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == 403, host


async def test_with_keys_any_host_may_be_in_front() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    async with house.client(host="chat.example", origin="https://app.example") as client:
        good = await client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert good.status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_the_403_names_the_setting_and_prints_no_raw_bytes() -> None:
    async with House().client() as client:
        response = await client.get("/version", headers={b"host": b"\xff\x1b[31m" + b"a" * 500})
    message = error_of(response)["message"]
    assert "server.allowed_hosts" in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize("name", ["", "a b", "http://x", "x:8000", "*", "x/", "a" * 254])
def test_allowed_hosts_are_names_without_port(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=(name,))
    with pytest.raises(ValidationError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=("x",) * 65)
