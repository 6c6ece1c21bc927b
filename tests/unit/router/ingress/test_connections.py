"""Connections that send on after, or in the middle of, a request: bounded, and closed in the end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from samovar.router.proxy import http_guard as http_protocol_guard
from samovar.router.proxy.http_guard import ConnectionLimits, guarded_protocol
from tests.support.router.router_harness import KEY, House, chat, make_settings

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = CHAT + b"Transfer-Encoding: chunked\r\n"
WITH_KEY = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
HEADER_BYTES_MAX = 2048

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(house: House, header_read_s: float = 30.0) -> AsyncIterator[Stream]:
    """One connection to `house` behind the guarded protocol."""
    protocol = guarded_protocol(ConnectionLimits(HEADER_BYTES_MAX, header_read_s, 5.0))
    async with house.server(http=protocol) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        yield reader, writer
        writer.close()


async def sent_until_closed(stream: Stream, piece: bytes, pieces: int) -> bool:
    """Send `piece` again and again; whether the other side hung up before all of them were taken."""
    reader, writer = stream
    try:
        for _ in range(pieces):
            writer.write(piece)
            await writer.drain()
        await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.guarantee("F31")
@pytest.mark.parametrize("piece", [b"x-a: " + b"b" * 800 + b"\r\n", b"x-endless" * 100], ids=["many", "one"])
async def test_endless_trailers_are_cut(piece: bytes) -> None:
    async with connected(House()) as stream:
        stream[1].write(CHUNKED + b"\r\n1\r\n{\r\n0\r\n")
        assert await sent_until_closed(stream, piece, 50)


@pytest.mark.guarantee("F31")
async def test_an_endless_chunk_extension_is_cut() -> None:
    async with connected(House()) as stream:
        stream[1].write(CHUNKED + b"\r\n1;")
        assert await sent_until_closed(stream, b"a" * 800, 50)


async def test_trailers_are_no_headers() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    body = json.dumps(chat()).encode()
    raw = CHUNKED + b"Connection: close\r\n\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, WITH_KEY)
    async with connected(house) as (reader, writer):
        writer.write(raw)
        assert b" 401 " in await asyncio.wait_for(reader.read(), 5)


async def test_small_trailers_are_let_pass() -> None:
    body = json.dumps(chat()).encode()
    raw = CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with connected(House()) as (reader, writer):
        for _ in range(3):
            for piece in (raw, b"x-a: 1\r\n", b"x-b: 2\r\n\r\n"):
                writer.write(piece)
                await writer.drain()
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}}}"), 5)


@pytest.mark.parametrize(
    ("first", "later", "status"),
    [
        (CHAT + b"Content-Length: 100\r\n\r\n{", b"", b"401"),
        (CHAT + b"Content-Length: 100\r\n\r\n{", b"x", b"401"),
        (CHAT + WITH_KEY + b"Content-Length: 100\r\n\r\n{", b"x", b"408"),
        (CHUNKED + b"\r\n1\r\n{\r\n0\r\n", b"x-a: b\r\n", b"401"),
    ],
    ids=["silence", "401", "408", "trailer"],
)
async def test_an_answer_before_the_bodys_end_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch, first: bytes, later: bytes, status: bytes
) -> None:
    monkeypatch.setattr(http_protocol_guard, "LINGER_S", 0.1)
    house = House(settings=make_settings(limits={"body_read_s": 0.1}, keys={"alpha": KEY}))
    async with connected(house) as (reader, writer):
        writer.write(first)
        assert status in await asyncio.wait_for(reader.readline(), 5)
        writer.write(later)
        try:
            rest = await asyncio.wait_for(reader.read(), 3)  # sooner than uvicorn's 5 s of keep-alive
        except ConnectionResetError:
            return
        assert rest.endswith(b"}}")


async def test_pipelined_requests_whose_body_comes_later_are_answered() -> None:
    body = json.dumps(chat()).encode()
    head = CHAT + b"Content-Length: %d\r\n\r\n" % len(body)
    async with connected(House()) as (reader, writer):
        writer.write(head + body + head + body[:5])
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}}}"), 5)
        writer.write(body[5:])
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}}}"), 5)


# Offers of other protocols, and HTTP/1.0 ------------------------------------------------------


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


def request(body: bytes, *headers: bytes, target: bytes = CHAT) -> bytes:
    return b"".join([target, *headers, b"Content-Length: %d\r\n\r\n" % len(body), body])


@pytest.mark.parametrize("piece_bytes", [10**6, 1, 7, 64])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["sized", "chunked"])
async def test_an_offer_of_h2c_leaves_the_body_alone(piece_bytes: int, is_chunked: bool) -> None:
    """As the JDK's HttpClient and `curl --http2` send it: before, the body was lost."""
    body = json.dumps(chat("é" * 100)).encode()
    raw = request(body, OFFER)
    if is_chunked:
        raw = CHUNKED + OFFER + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    plain = request(body)
    house = House()
    async with connected(house) as (reader, writer):
        for sent in (raw, plain, raw):  # the connection stays good
            for start in range(0, len(sent), piece_bytes):
                writer.write(sent[start : start + piece_bytes])
                await writer.drain()
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"upgrade" not in head.lower()
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
    assert len({tuple(call.prompt_token_ids) for call in house.replicas.calls}) == 1


async def test_offers_in_pipelined_requests_are_all_declined() -> None:
    body = json.dumps(chat()).encode()
    house = House()
    async with connected(house) as (reader, writer):
        writer.write(
            request(body, OFFER) * 3 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n"
        )
        for _ in range(3):
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}}}"), 10)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b'"replicas":1}'), 10)
    assert len(house.replicas.calls) == 3


async def test_an_offer_does_not_hide_other_headers() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    body = json.dumps(chat()).encode()
    async with connected(house) as (reader, writer):
        writer.write(request(body, OFFER, WITH_KEY, b"Connection: close\r\n"))
        answer = await asyncio.wait_for(reader.read(), 10)
    assert b" 200 " in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.guarantee("F31")
async def test_headers_of_an_offer_are_bounded_and_timed() -> None:
    async with connected(House()) as stream:
        stream[1].write(CHAT + OFFER)
        assert await sent_until_closed(stream, b"x-a: " + b"b" * 800 + b"\r\n", 50)
    async with connected(House(), header_read_s=0.2) as (reader, writer):
        writer.write(CHAT + OFFER)
        assert b" 408 " in await asyncio.wait_for(reader.read(), 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_gets_no_chunks_and_the_connection_ends(stream: bool) -> None:
    old = CHAT.replace(b"HTTP/1.1", b"HTTP/1.0")
    body = json.dumps(chat(stream=stream)).encode()
    async with connected(House()) as (reader, writer):
        writer.write(request(body, b"Connection: keep-alive\r\n", target=old))
        answer = await asyncio.wait_for(reader.read(), 10)
    head, _, sent = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if stream:
        events = [line for line in sent.split(b"\n\n") if line]
        assert all(event.startswith(b"data: ") for event in events)
        assert events[-1] == b"data: [DONE]"
    else:
        assert json.loads(sent)["choices"][0]["message"]["content"] == "Hello"
