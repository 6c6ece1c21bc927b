"""The guard in front of Serve's proxy, on raw sockets: a plain uvicorn server with the same swap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn.config
from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.configs.settings import LimitsSettings, Settings
from samovar.router.proxy import proxy_guard
from samovar.router.proxy.proxy_guard import limits_from_environment, proxy_environment
from tests.support.clock import Clock
from tests.support.router.router_harness import serving, until

LIMITS: dict[str, Any] = {
    "header_bytes_max": 2048,
    "header_read_s": 0.2,
    "body_bytes_max": 4096,
    "write_idle_s": 1,
}


class FakeServe:
    """Answers like Serve's proxy: `/echo` by an app, all else by text pages of its own."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.disconnected = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        path = scope["path"]
        if path == "/lost":
            return
        if path == "/health-stuck":
            await asyncio.Event().wait()
        if path == "/flood":
            await self._flood(receive, send)
            return
        if path == "/stream-lost":
            await self._start(send, 200, b"text/event-stream")
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            return
        if path == "/echo":
            body = b""
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return  # Serve cancels the request and sends nothing
                body += message["body"]
                if not message["more_body"]:
                    break
            await self._start(send, 200, b"application/json")
            await send({"type": "http.response.body", "body": b'{"bytes": %d}' % len(body)})
            return
        status = {"/busy": 503, "/many": 429, "/broken": 500}.get(path, 404)
        await self._start(send, status, b"text/plain; charset=utf-8")
        await send({"type": "http.response.body", "body": b"Ping http://.../-/routes"})

    async def _start(self, send: Send, status: int, kind: bytes) -> None:
        headers = [(b"content-type", kind), (b"x-request-id", b"a"), (b"X-Request-ID", b"b")]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _flood(self, receive: Receive, send: Send) -> None:
        await receive()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnected.set()

        watching = asyncio.create_task(watch())
        await self._start(send, 200, b"application/octet-stream")
        while not self.disconnected.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await watching


@asynccontextmanager
async def guarded(
    monkeypatch: pytest.MonkeyPatch,
    app: ASGIApp | None = None,
    tls: Mapping[str, str] | None = None,
    **limits: Any,
) -> AsyncIterator[tuple[str, int, FakeServe]]:
    """The guard as Serve installs it, over `FakeServe`. `tls`: as Serve gives it to uvicorn."""
    settings = Settings(limits=LimitsSettings(**{**LIMITS, **limits}))
    for name, value in proxy_environment(settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    serve = FakeServe()
    guard: Any = app or serve
    monkeypatch.setattr(uvicorn.config, "create_ssl_context", uvicorn.config.create_ssl_context)
    for middleware in proxy_guard.install():
        guard = middleware.cls(guard, *middleware.args, **middleware.kwargs)
    async with serving(guard, lifespan="off", **(tls or {})) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port), serve


async def talk(host: str, port: int, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send raw bytes, read to the end of the connection: status, headers, body."""
    reader, writer = await asyncio.open_connection(host, port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, _, value = line.partition(": ")
        assert name.lower() not in headers, f"{name} twice"
        headers[name.lower()] = value
    return int(lines[0].split()[1]), headers, body


def request(path: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", *headers]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def code_of(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


def test_environment_carries_the_limits() -> None:
    limits = LimitsSettings(**LIMITS)
    environment = proxy_environment(Settings(limits=limits))
    assert (
        environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == "samovar.router.proxy.proxy_guard.install"
    )
    assert limits_from_environment(environment) == limits
    assert limits_from_environment({}) == LimitsSettings()


def test_serve_accepts_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    made = call_function_from_import_path(proxy_guard.CALLBACK)
    assert validate_http_proxy_callback_return(made) == made
    config = uvicorn.Config(lambda: None, factory=True, lifespan="off")
    config.load()
    assert config.http_protocol_class.__name__ == "GuardedHttpProtocol"


async def test_good_requests_pass_with_one_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, serve):
        raw = request("/echo", "x-request-id: mine", method="POST", body=b"x" * 4096)
        status, headers, body = await talk(host, port, raw)
        assert (status, headers["x-request-id"]) == (200, "mine")
        assert b'{"bytes": 4096}' in body
        await talk(
            host,
            port,
            request(
                "/echo",
                "x-request-id: " + "a" * 200,
                "x-request-timeout-seconds: 0",
                "X-Request-Disconnect-Disabled: ?1",
                "serve-multiplexed-model-id: m",
                "serve_multiplexed_model_id: m",
                "x-session-id: s",
            ),
        )
    names = [name for name, _ in serve.scopes[1]["headers"]]
    assert sorted(names) == [b"connection", b"host", b"x-request-id", b"x-session-id"]
    assert dict(serve.scopes[1]["headers"])[b"x-request-id"] != b"a" * 200


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/-/routes", 404, "unknown_route"),
        ("/-/anything", 404, "unknown_route"),
        ("/-/", 404, "unknown_route"),
        ("/%2d/routes", 404, "unknown_route"),
        ("/v1/models", 503, "loading"),
        ("/health", 503, "loading"),
        ("/busy", 503, "unavailable"),
        ("/many", 429, "rate_limit_exceeded"),
        ("/broken", 500, "internal_error"),
        ("/lost", 503, "ingress_lost"),
    ],
)
async def test_answers_of_serve_itself_get_our_shape(
    monkeypatch: pytest.MonkeyPatch, path: str, status: int, code: str
) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        got, headers, body = await talk(host, port, request(path))
    assert (got, code_of(body)) == (status, code)
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert b"/-/routes" not in body or status == 404
    if status in (429, 503):
        assert headers["retry-after"] == "1"
    if path == "/health":
        assert json.loads(body)["status"] == "loading"


async def test_healthz_of_serve_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, serve):
        await talk(host, port, request("/-/healthz"))
    assert [scope["path"] for scope in serve.scopes] == ["/-/healthz"]


async def test_health_does_not_wait_for_an_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(proxy_guard, "HEALTH_WAIT_S", 0.05)
    async with guarded(monkeypatch, stuck) as (host, port, _):
        status, _, body = await talk(host, port, request("/health"))
    assert (status, json.loads(body)["status"]) == (503, "loading")


async def test_a_stream_whose_ingress_dies_ends_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        status, _, body = await talk(host, port, request("/stream-lost"))
    assert status == 200
    assert b'"code":"ingress_lost"' in body
    assert b"data: [DONE]\n\n" in body


@pytest.mark.guarantee("F31")
async def test_large_bodies_are_413_and_the_client_gets_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, serve):
        declared = request("/echo", "content-length: 100000000", method="POST")
        status, headers, body = await talk(host, port, declared, b"x" * 2_000_000)
        assert (status, code_of(body), headers["connection"]) == (413, "body_too_large", "close")
        assert serve.scopes == []
        chunked = request("/echo", "transfer-encoding: chunked", method="POST")
        status, _, body = await talk(host, port, chunked, *[b"1000\r\n" + b"x" * 4096 + b"\r\n"] * 200)
        assert (status, code_of(body)) == (413, "body_too_large")


@pytest.mark.guarantee("F31")
async def test_large_headers_are_431(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, serve):
        for raw in (
            request("/echo", "x-big: " + "a" * 3000),
            request("/echo", *(f"x-{number}: {'a' * 20}" for number in range(100))),
            b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nx-endless: " + b"a" * 100_000,
            b"\r\n" * 2000,
            b"GET /" + b"a" * 100_000,
        ):
            status, headers, body = await talk(host, port, raw)
            assert (status, code_of(body), headers["connection"]) == (431, "headers_too_large", "close")
        trickle = [b"GET / HTTP/1.1\r\n", *(b"x-%d: aaaaaaaaaaaaaaaaaaaaa\r\n" % n for n in range(100))]
        assert (await talk(host, port, *trickle))[0] == 431
    assert serve.scopes == []


async def test_body_bytes_are_not_header_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        keep_alive = request("/echo", method="POST", body=b"x" * 4000).replace(b"connection: close\r\n", b"")
        for _ in range(5):
            half = len(keep_alive) // 2
            writer.write(keep_alive[:half])
            await writer.drain()
            writer.write(keep_alive[half:])
            assert b"200 OK" in await reader.readuntil(b'{"bytes": 4000}')
        writer.close()


@pytest.mark.guarantee("F31")
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n", b"POST"])
async def test_slow_headers_are_408(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        status, headers, body = await talk(host, port, sent)
    assert (status, code_of(body), headers["connection"]) == (408, "request_timeout", "close")


@pytest.mark.guarantee("F31")
@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"CONNECT evil:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_a_400_of_our_shape(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        status, headers, body = await talk(host, port, raw)
    assert status == 400, body
    assert headers["content-type"] == "application/json"
    assert code_of(body) == "bad_http_request"


async def test_options_of_no_path_does_not_reach_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve knows no route `*`, and 404 is what it says while it loads, too."""
    async with guarded(monkeypatch) as (host, port, serve):
        raw = b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        status, _, body = await talk(host, port, raw)
    assert (status, code_of(body)) == (400, "bad_http_request")
    assert serve.scopes == []


async def test_no_answer_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        for path in ("/echo", "/busy", "/nothing", "/-/routes"):
            _, headers, _ = await talk(host, port, request(path, "connection: close"))
            assert "server" not in headers, path
            assert "date" in headers
        _, headers, _ = await talk(host, port, b"no http\r\n\r\n")
        assert "server" not in headers


async def test_session_ids_that_serve_cannot_decode_are_400(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        raw = b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\nX-Session_Id: \xff\xfe\r\n\r\n"
        status, _, body = await talk(host, port, raw)
    assert (status, json.loads(body)["error"]["param"]) == (400, "x-session-id")


@pytest.mark.guarantee("F31")
async def test_a_client_that_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(monkeypatch) as (host, port, serve):
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(request("/flood"))
        await asyncio.wait_for(serve.disconnected.wait(), 10)
        writer.transport.abort()
        del reader


async def test_websockets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    async with guarded(monkeypatch) as (host, port, serve):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(upgrade)
        head = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        await until(lambda: writer.is_closing())
    assert b"101" not in head
    assert serve.scopes == []


async def test_an_app_that_is_gone_is_stopping_and_one_that_never_was_is_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with guarded(monkeypatch) as (host, port, _):
        _, _, before = await talk(host, port, request("/v1/models"))
        await talk(host, port, request("/echo", method="POST", body=b"x"))
        status, headers, after = await talk(host, port, request("/v1/models"))
        _, _, health = await talk(host, port, request("/health"))
    assert code_of(before) == "loading"
    assert (status, code_of(after), headers["retry-after"]) == (503, "stopping", "1")
    assert "stopping" in json.loads(after)["error"]["message"]
    assert json.loads(health)["status"] == "stopping"


def test_after_a_while_a_new_app_is_awaited() -> None:
    clock = Clock()
    presence = proxy_guard.AppPresence(clock)
    codes = [presence.missed(1.0).code]
    presence.answered()
    codes.append(presence.missed(1.0).code)
    clock.now_s += proxy_guard.STOPPING_S
    codes.append(presence.missed(1.0).code)
    presence.answered()
    codes.append(presence.missed(1.0).code)
    assert codes == ["loading", "stopping", "loading", "stopping"]
