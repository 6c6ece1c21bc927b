"""The bodies of requests that go over links: once, whole, and to Serve if no ingress takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from samovar.configs.cluster import LinkSettings
from samovar.configs.settings import LimitsSettings
from samovar.router.proxy import RetryBuffer
from samovar.router.proxy.carrier import packed_request, read_request
from samovar.router.proxy.proxy_guard import ProxyGuard
from tests.support.constants import tuned
from tests.support.inside import carrier_of, links_of
from tests.support.router.linked_replicas import LINKS, Proxied, proxied
from tests.support.router.router_harness import serving, until

CHAT, OTHER = "/v1/chat/completions", "/v1/documents"
BODY = bytes(range(256)) * 8
LARGE = bytes(range(256)) * 2048


class Ingress:
    """An ingress that answers with the body it was sent. `gate`: what an answer waits for."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.came, self.has_body, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.scopes: list[Scope] = []
        self.parts: list[int] = []
        self.told: list[Message] = []
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.came.set()
        try:
            await self._answer(receive, send)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _answer(self, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request", "the client is there"
            self.parts.append(len(message.get("body", b"")))
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.has_body.set()
        leaving = asyncio.ensure_future(receive())
        leaving.add_done_callback(lambda done: None if done.cancelled() else self.told.append(done.result()))
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            if self._gate is not None:
                await self._gate.wait()
        finally:
            leaving.cancel()
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def proxy(
    ingress: Ingress, links: LinkSettings = LINKS, **options: Any
) -> AsyncIterator[tuple[str, Proxied]]:
    """The proxy's guard before the ingress, as a server; its address."""
    there = await proxied(ingress, links, bodies=RetryBuffer(1 << 20), **options)
    async with serving(there.guard, lifespan="off") as url:
        yield url, there
    there.close()


async def posted(url: str, *parts: bytes, wait: asyncio.Event | None = None, path: str = CHAT) -> bytes:
    """Send a body in parts, those after the first when `wait` says so; return the answer's bytes."""
    host, port = httpx.URL(url).host, httpx.URL(url).port
    reader, writer = await asyncio.open_connection(host, port)
    length = sum(map(len, parts))
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {length}", "", ""]
    first, *others = parts
    try:
        writer.write("\r\n".join(lines).encode() + first)
        for part in others:
            if wait is not None:
                await wait.wait()
            writer.write(part)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        nbytes = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(nbytes)
    finally:
        writer.close()
    return body


@pytest.mark.parametrize("path", [CHAT, OTHER])
async def test_a_small_body_goes_with_its_request(path: str) -> None:
    ingress = Ingress()
    async with proxy(ingress) as (url, there):
        for _ in range(3):
            assert await asyncio.wait_for(posted(url, BODY, path=path), 30) == BODY
        assert not there.serve.carried
    assert ingress.parts == [len(BODY)] * 3
    assert not ingress.told, "the client is there"


@pytest.mark.parametrize("path", [CHAT, OTHER])
@pytest.mark.parametrize("first", [0, 1, len(BODY) - 1])
async def test_a_body_in_parts_arrives_whole(path: str, first: int) -> None:
    ingress = Ingress()
    async with proxy(ingress) as (url, there):
        parts = BODY[:first], BODY[first:]
        assert await asyncio.wait_for(posted(url, *parts, wait=ingress.came, path=path), 30) == BODY
        assert not there.serve.carried


@pytest.mark.parametrize("bytes_max", [0, len(BODY), 1 << 20])
async def test_a_large_body_comes_in_pieces(bytes_max: int) -> None:
    ingress = Ingress()
    async with proxy(ingress, tuned(LINKS, body_bytes_max=bytes_max, stream_bytes_max=1 << 15)) as (
        url,
        there,
    ):
        assert await asyncio.wait_for(posted(url, LARGE), 30) == LARGE
        assert not there.serve.carried


@pytest.mark.parametrize("why", ["closing", "lost"])
@pytest.mark.parametrize("body", [BODY, LARGE])
async def test_an_ingress_that_does_not_take_a_request_loses_nothing_of_it(why: str, body: bytes) -> None:
    """Not of one either that is not to be repeated."""
    ingress = Ingress()
    async with proxy(ingress) as (url, there):
        there.taker.refuse() if why == "closing" else there.ingress.close()
        assert await asyncio.wait_for(posted(url, body, path=OTHER), 30) == body
        assert len(there.serve.carried) == len(ingress.scopes) == 1


@pytest.mark.parametrize("path", [CHAT, OTHER])
async def test_an_ingress_that_dies_with_a_request(path: str) -> None:
    """What only reads or generates is sent once more, by Serve; the rest is the client's to repeat."""
    ingress = Ingress(asyncio.Event())
    second = Ingress()
    async with proxy(ingress, serve=second) as (url, there), httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(url + path, content=LARGE))
        await asyncio.wait_for(ingress.has_body.wait(), 30)
        there.ingress.close()
        answer = await asking
        if path == CHAT:
            assert (answer.status_code, answer.content) == (200, LARGE)
            assert len(second.scopes) == 1
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ingress_lost")
            assert not second.scopes
        await asyncio.wait_for(ingress.cancelled.wait(), 30)


async def test_an_ingress_whose_answers_are_cut_off_gets_no_request_over_its_other_connection() -> None:
    """Both end with its process, and one may be seen to end before the other."""
    ingress = Ingress(asyncio.Event())
    second = Ingress()
    async with proxy(ingress, serve=second) as (url, there), httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(url + CHAT, content=BODY))
        await asyncio.wait_for(ingress.has_body.wait(), 30)
        to = await there.ingress.address()
        there.known.update([], "here")  # only the second try matters
        assert carrier_of(there.guard) is not None
        link = links_of(links_of(carrier_of(there.guard)))[to]
        for answers in list(there.inlet._links):
            assert answers.transport is not None
            answers.transport.abort()
        assert (await asking).content == BODY
        assert not link.is_open
        assert len(second.scopes) == 1


async def test_a_client_that_leaves_cancels_what_it_asked_for() -> None:
    for body in (BODY, LARGE):
        ingress = Ingress(asyncio.Event())
        async with proxy(ingress) as (url, there):
            asking = asyncio.create_task(posted(url, body))
            await asyncio.wait_for(ingress.has_body.wait(), 30)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.wait_for(ingress.cancelled.wait(), 30)
            await until(lambda there=there: there.serve.ongoing == 0)  # type: ignore[misc]
            assert not there.serve.carried


async def test_a_client_that_leaves_before_its_body_is_whole_asks_for_nothing() -> None:
    ingress = Ingress()
    async with proxy(ingress) as (url, there):
        sending = asyncio.create_task(posted(url, b"x", BODY, wait=asyncio.Event()))
        await asyncio.wait_for(ingress.came.wait(), 30)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.wait_for(ingress.cancelled.wait(), 30)
        await until(lambda: there.serve.ongoing == 0)
        assert not there.serve.carried


@pytest.mark.guarantee("F31")
async def test_a_body_over_the_limit_is_refused_in_whatever_pieces_it_comes() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield BODY

    ingress = Ingress()
    limits = LimitsSettings(body_bytes_max=16 * len(BODY))
    async with proxy(ingress, limits=limits) as (url, there), httpx.AsyncClient() as client:
        answer = await client.post(url + OTHER, content=pieces())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert not there.serve.carried
        assert not ingress.has_body.is_set()


async def test_two_requests_of_one_connection_are_answered_in_order() -> None:
    ingress = Ingress()
    async with proxy(ingress) as (url, _):
        reader, writer = await asyncio.open_connection(httpx.URL(url).host, httpx.URL(url).port)
        for body in (b"first", b"second"):
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
        for body in (b"first", b"second"):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(body)) == body
        writer.close()


async def test_the_app_is_given_what_serve_gives_it() -> None:
    ingress = Ingress()
    async with proxy(ingress) as (url, there), httpx.AsyncClient() as client:
        for takes in (True, False):
            if not takes:
                there.taker.refuse()
            headers = {"x-a": "b", "X-Request-ID": "r"}
            await client.post(url + "/v1/a%20b/%C3%A9?x=%2F&y", content=b"1", headers=headers)
    over_link, by_serve = ingress.scopes
    assert over_link.keys() == by_serve.keys()
    assert {**over_link, "client": None} == {**by_serve, "client": None}
    assert type(over_link["client"]) is tuple


def test_what_is_no_request_is_refused() -> None:
    for payload in (None, 7, [], [["host", 1], "t", {}, b"", False], [["h", 1, "s"], "t", {}, b"", False]):
        with pytest.raises(ValueError, match="no request"):
            read_request(payload)


async def test_a_guard_without_links_leaves_all_to_serve() -> None:
    ingress = Ingress()
    guard = ProxyGuard(ingress, limits=LimitsSettings())
    async with serving(guard, lifespan="off") as url:
        assert await asyncio.wait_for(posted(url, LARGE), 30) == LARGE


def test_a_request_is_packed_without_what_is_only_the_proxy_s() -> None:
    from samovar.replicas.messages import ReplyTo

    scope: Scope = {"type": "http", "path": "/", "headers": [(b"a", b"b")], "state": {"x": object()}}
    _, _, head, body, more = packed_request(scope, ReplyTo("h", 1, "s"), "t", b"x", more=True)
    assert head == {"path": "/", "headers": [(b"a", b"b")]}
    assert (body, more) == (b"x", True)
