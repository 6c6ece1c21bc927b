"""A request whose ingress dies before its answer begins goes to another, by the proxy's own hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from samovar.configs.settings import LimitsSettings
from samovar.router.proxy import RetryBuffer
from samovar.router.proxy.proxy_guard import ProxyGuard
from tests.support.router.asgi_bodies import whole_body
from tests.support.router.router_harness import serving

CHAT = "/v1/chat/completions"
BODY = bytes(range(256)) * 600


class DyingIngresses:
    """Serve's proxy before ingresses of which the first `lost` die: `begins`: after the answer's head."""

    def __init__(self, lost: int, *, begins: bool = False) -> None:
        self.lost = lost
        self.begins = begins
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append(await whole_body(receive))
        gone = asyncio.ensure_future(receive())  # as Serve does: it watches for a client that leaves
        self.lost -= 1
        if self.lost < 0 or self.begins:
            head = [(b"content-type", b"application/json"), (b"content-length", b"4")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        if self.lost < 0:
            await send({"type": "http.response.body", "body": b"true"})
        gone.cancel()


@asynccontextmanager
async def proxy(
    ingresses: DyingIngresses, bytes_max: int = 1 << 20
) -> AsyncIterator[tuple[httpx.AsyncClient, RetryBuffer]]:
    bodies = RetryBuffer(bytes_max)
    guard = ProxyGuard(ingresses, limits=LimitsSettings(), bodies=bodies)
    async with serving(guard, lifespan="off") as url, httpx.AsyncClient(base_url=url) as client:
        yield client, bodies
        assert bodies.held_bytes == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_it_is_sent_once_more_with_the_same_body(path: str) -> None:
    ingresses = DyingIngresses(1)
    async with proxy(ingresses) as (client, bodies):
        answer = await client.post(path, content=BODY)
        assert (answer.status_code, answer.json()) == (200, True)
        assert ingresses.bodies == [BODY, BODY]
        assert bodies.repeated == 1
        assert (await client.get("/v1/models")).status_code == 200
        assert bodies.repeated == 1


async def test_and_not_a_third_time() -> None:
    ingresses = DyingIngresses(2)
    async with proxy(ingresses) as (client, _):
        answer = await client.post(CHAT, content=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ingress_lost")
        assert len(ingresses.bodies) == 2


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/files"), ("DELETE", "/v1/responses/r"), ("POST", "/cache/clear")]
)
async def test_what_may_change_something_is_the_clients_to_repeat(method: str, path: str) -> None:
    ingresses = DyingIngresses(1)
    async with proxy(ingresses) as (client, bodies):
        answer = await client.request(method, path, content=b"x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ingress_lost")
        assert bodies.repeated == 0


async def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    ingresses = DyingIngresses(1, begins=True)
    async with proxy(ingresses) as (client, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, content=BODY)
        assert len(ingresses.bodies) == 1


@pytest.mark.parametrize("bytes_max", [0, len(BODY) - 1])
async def test_a_body_without_room_is_not_repeated(bytes_max: int) -> None:
    ingresses = DyingIngresses(1)
    async with proxy(ingresses, bytes_max) as (client, _):
        assert (await client.post(CHAT, content=BODY)).status_code == 503
        assert ingresses.bodies == [BODY]


async def test_the_room_is_that_of_all_requests_together() -> None:
    bodies = RetryBuffer(10)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"123456", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": CHAT}
    first, second = bodies.of(scope, receive), bodies.of(scope, receive)
    await first()
    await second()
    assert bodies.held_bytes == 6
    assert first.rewind()
    assert not first.rewind(), "once"
    assert not second.rewind()
    first.drop()
    first.drop()
    assert bodies.held_bytes == 0
    assert json.loads((await first())["body"]) == 123456, "what is being given again is given to its end"
