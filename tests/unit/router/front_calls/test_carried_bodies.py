"""A small body goes to the front door in the request's scope: before Serve brings it, once, not for long.

And a front door asks the proxy for nothing after it: a client that leaves is Serve's proxy's to see.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray.serve._private.http_util import ASGIReceiveProxy
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.cluster import LinkSettings
from configs.settings import LimitsSettings
from replicas.links import Inlet
from router.doors import KeptBodies
from router.http.direct_reply import EARLY_BODY, IS_WATCHED, BodyOver, DirectReplies, ReplySender
from router.http.proxy_guard import ProxyGuard
from tests.support.router.linked_replicas import LINKS, LOOPBACK
from tests.support.router.router_harness import make_settings, serving

CHAT, OTHER = "/v1/chat/completions", "/cache/clear"
BODY = bytes(range(256)) * 8
DISCONNECT = {"type": "http.disconnect"}


def in_another_process(sent: Any) -> Any:
    """As Serve sends it."""
    return pickle.loads(pickle.dumps(sent))  # noqa: S301


class Door:
    """Serve's proxy, and behind it a front door that answers with the body it was sent.

    `brings`: whether Serve brings the body, too, as it always does in the end. `dies`: how many requests are
    lost before their answers begin. `gate`: what an answer waits for. `is_bare`: of an app without our
    middleware.
    """

    def __init__(
        self,
        *,
        brings: bool = True,
        dies: int = 0,
        gate: asyncio.Event | None = None,
        is_bare: bool = False,
    ) -> None:
        self.early: list[tuple[bytes, bool] | None] = []
        self.came = asyncio.Event()
        self.has_body = asyncio.Event()
        self.left = asyncio.Event()
        """Serve's proxy knows that the client is gone."""
        self.told: list[Message] = []
        """What the front door was told after the body."""
        self.asks_on = False
        """Whether it would still ask the proxy for more, when its answer is made."""
        self.scopes: list[Scope] = []
        self.dies = dies
        self._brings = brings
        self._gate = gate
        self._app: ASGIApp = self._answer if is_bare else ReplySender(self._answer, settings=make_settings())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do as Serve: send the scope, then what `receive` gives, to another process."""
        sent = in_another_process({name: scope[name] for name in scope if name not in ("app", "state")})
        self.scopes += [scope, sent]
        self.early.append(scope.get(EARLY_BODY))
        self.came.set()
        self.asks_on = True
        queue: asyncio.Queue[Message] = asyncio.Queue()

        async def watch() -> None:
            while True:
                message = await receive()
                if self._brings or message["type"] != "http.request":
                    there = in_another_process(message)
                    queue.put_nowait(there)
                    self.asks_on = self.asks_on and there != DISCONNECT
                if message["type"] == "http.disconnect":
                    self.left.set()
                    return

        watching = asyncio.ensure_future(watch())
        serving_it = asyncio.ensure_future(self._app(sent, queue.get, send))
        await asyncio.wait({watching, serving_it}, return_when=asyncio.FIRST_COMPLETED)
        serving_it.cancel() if not serving_it.done() else watching.cancel()
        await asyncio.gather(watching, serving_it, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request", "the client is there"
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.has_body.set()
        self.dies -= 1
        if self.dies >= 0:
            return
        leaving = asyncio.ensure_future(receive())
        leaving.add_done_callback(lambda done: None if done.cancelled() else self.told.append(done.result()))
        for _ in range(20):
            await asyncio.sleep(0)
        if self._gate is not None:
            await self._gate.wait()
        leaving.cancel()
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def proxy(door: Door, links: LinkSettings = LINKS) -> AsyncIterator[str]:
    """The proxy's guard before the front door, as a server; its address."""
    inlet = Inlet(LOOPBACK, links, 0.0)
    replies, bodies = DirectReplies(inlet), KeptBodies(1 << 20)
    guard = ProxyGuard(door, limits=LimitsSettings(), replies=replies, bodies=bodies)
    async with serving(guard, lifespan="off") as url:
        yield url
    inlet.close()


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


async def test_the_front_door_needs_nothing_from_serve_to_begin() -> None:
    door = Door(brings=False)
    async with proxy(door) as url:
        assert await asyncio.wait_for(posted(url, BODY), 30) == BODY
    assert door.early == [(BODY, False)]


@pytest.mark.parametrize("path", [CHAT, OTHER])
async def test_the_part_that_comes_twice_is_read_once(path: str) -> None:
    door = Door()
    async with proxy(door) as url:
        for _ in range(3):
            assert await asyncio.wait_for(posted(url, BODY, path=path), 30) == BODY
    assert door.early == [(BODY, False)] * 3
    assert not door.told, "the client is there"


@pytest.mark.parametrize("path", [CHAT, OTHER])
@pytest.mark.parametrize("first", [1, len(BODY) - 1])
async def test_a_body_in_parts_arrives_whole(path: str, first: int) -> None:
    door = Door()
    async with proxy(door) as url:
        parts = BODY[:first], BODY[first:]
        assert await asyncio.wait_for(posted(url, *parts, wait=door.came, path=path), 30) == BODY
    assert door.early == [(BODY[:first], True)]


async def test_a_body_that_comes_later_than_its_head_comes_through_serve() -> None:
    door = Door()
    async with proxy(door) as url:
        assert await asyncio.wait_for(posted(url, b"", BODY, wait=door.came), 30) == BODY
    assert door.early == [None]


@pytest.mark.parametrize(("bytes_max", "is_early"), [(len(BODY), True), (len(BODY) - 1, False), (0, False)])
async def test_larger_bodies_come_through_serve(bytes_max: int, is_early: bool) -> None:
    door = Door()
    async with proxy(door, LinkSettings(body_bytes_max=bytes_max)) as url:
        assert await asyncio.wait_for(posted(url, BODY), 30) == BODY
    assert [one is not None for one in door.early] == [is_early]


async def test_nobody_keeps_it_while_the_answer_is_made() -> None:
    door = Door()
    async with proxy(door) as url:
        await asyncio.wait_for(posted(url, BODY), 30)
    assert len(door.scopes) == 2
    assert not any(EARLY_BODY in scope for scope in door.scopes)


async def test_the_next_front_door_gets_it_too() -> None:
    door = Door(dies=1)
    async with proxy(door) as url:
        assert await asyncio.wait_for(posted(url, BODY), 30) == BODY
    assert door.early == [(BODY, False)] * 2


async def test_while_an_answer_is_made_no_call_is_open_to_the_proxy() -> None:
    door = Door()
    async with proxy(door) as url:
        assert await asyncio.wait_for(posted(url, BODY), 30) == BODY
        assert not door.asks_on
        assert not door.left.is_set()


async def test_a_client_that_leaves_is_seen_by_serves_proxy() -> None:
    door = Door(gate=asyncio.Event())
    async with proxy(door) as url:
        asking = asyncio.create_task(posted(url, BODY))
        await asyncio.wait_for(door.has_body.wait(), 30)
        assert not door.left.is_set()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(door.left.wait(), 30)
    assert not door.told, "Serve cancels its call"


async def test_apps_that_are_not_ours_are_told_as_ever() -> None:
    """Another app behind the same proxies, at another path: told only when its client leaves."""
    door = Door(is_bare=True)
    async with proxy(door) as url:
        assert await asyncio.wait_for(posted(url, BODY, path="/other"), 30) == BODY
    assert not door.told
    assert not any(IS_WATCHED in scope for scope in door.scopes)


@pytest.mark.parametrize(("more", "asked"), [(False, 0), (True, 1)])
async def test_serve_asks_for_nothing_if_all_of_the_body_came_with_the_request(
    more: bool, asked: int
) -> None:
    """With Serve's own `receive`, whose task runs beside the front door."""
    calls = 0

    async def fetch(_: object) -> bytes:
        nonlocal calls
        calls += 1
        rest = {"type": "http.request", "body": b"!", "more_body": False}
        return pickle.dumps([{"type": "http.request", "body": BODY, "more_body": more}, rest, BodyOver()])

    scope: Scope = {"type": "http", "headers": [], EARLY_BODY: (BODY, more), IS_WATCHED: True}
    receive = ASGIReceiveProxy(scope, None, fetch)
    bodies = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append((await receive())["body"])
        if more:
            bodies.append((await receive())["body"])

    async def send(message: Message) -> None:
        raise AssertionError(message)

    fetching = asyncio.create_task(receive.fetch_until_disconnect())
    await ReplySender(app, settings=make_settings())(scope, receive, send)
    await asyncio.wait_for(fetching, 30)
    assert calls == asked
    assert b"".join(bodies) == BODY + b"!" * more


def test_the_end_of_a_body_is_a_disconnect_in_another_process_only() -> None:
    end = BodyOver()
    assert end["type"] not in ("http.disconnect", "http.request", "websocket.disconnect")
    there = in_another_process([end])
    assert there == [DISCONNECT]
    assert type(there[0]) is dict
