"""An S3 server in memory that can be told to misbehave, one request at a time."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from pydantic import SecretStr

from samovar.configs.sections import S3TierSettings

BUCKET = "kv"


@dataclass
class Request:
    """One request as it came in. `key` is without the bucket."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class Answering(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer: else each waits 40 ms for a delayed ACK
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()  # boto3 sends no body before it has seen this
        return going_on

    def do(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(
            self.command,
            unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/"),
            parse_qs(parts.query, keep_blank_values=True),
            {name.lower(): value for name, value in self.headers.items()},
            body,
        )
        stub = self.server.stub
        with stub.lock:
            stub.requests.append(request)
        stub.misbehave(self, request)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = do

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode())

    def reset(self) -> None:
        """End the connection with RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def hang(self) -> None:
        """Say nothing until the stub is released or closed."""
        self.server.stub.released.wait()
        self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    stub: Stub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what these tests are about."""


Misbehaviour = Callable[[Answering, Request], None]


@dataclass
class Stub:
    """`misbehave` answers each request; `behave` is the well-behaved server."""

    port: int
    page_keys: int = 1000
    honours_if_none_match: bool = True
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)
    misbehave: Misbehaviour = field(init=False)
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.misbehave = self.behave

    def settings(self, **changes: Any) -> S3TierSettings:
        values: dict[str, Any] = {
            "bucket": BUCKET,
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": SecretStr("AKIDSTUB"),
            "secret_access_key": SecretStr("verysecretindeed"),
            "read_s_max": 5.0,
            "connect_s": 5.0,
            "connections": 2,
            "warm_connections": 0,
            **changes,
        }
        return S3TierSettings(**values)

    def asked(self, method: str) -> int:
        """How many requests of this method came in."""
        with self.lock:
            return sum(request.method == method for request in self.requests)

    def behave(self, to: Answering, request: Request) -> None:
        with self.lock:
            getattr(self, f"_{request.method.lower()}")(to, request)

    def _put(self, to: Answering, request: Request) -> None:
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            found = self.objects.get(unquote(source).lstrip("/").removeprefix(f"{BUCKET}/"))
            if found is None:
                return to.error(404, "NoSuchKey")
            self.objects[request.key] = (found[0], self.clock())
            return to.answer(200, b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")
        if self.honours_if_none_match and "if-none-match" in request.headers and request.key in self.objects:
            return to.error(412, "PreconditionFailed")
        self.objects[request.key] = (request.body, self.clock())
        return to.answer(200, headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})

    def _delete(self, to: Answering, request: Request) -> None:
        self.objects.pop(request.key, None)
        to.answer(204)

    def _get(self, to: Answering, request: Request) -> None:
        if "list-type" in request.query:
            return self._list(to, request)
        found = self.objects.get(request.key)
        if found is None:
            return to.error(404, "NoSuchKey")
        body = found[0]
        start, stop = self.range_of(request)
        if start >= len(body):
            return to.error(416, "InvalidRange")
        part = body[start:stop]
        ranged = self.content_range(start, len(part), len(body))
        put_at = formatdate(found[1], usegmt=True)
        return to.answer(206, part, {"Content-Range": ranged, "Last-Modified": put_at})

    def _list(self, to: Answering, request: Request) -> None:
        prefix = request.query.get("prefix", [""])[0]
        after = request.query.get("continuation-token", [""])[0]
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page = keys[: self.page_keys]
        more = len(keys) > len(page)
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key][0])}</Size><LastModified>"
            f"{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(self.objects[key][1]))}"
            "</LastModified></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
        to.answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())

    @staticmethod
    def range_of(request: Request) -> tuple[int, int]:
        first, last = request.headers["range"].removeprefix("bytes=").split("-")
        return int(first), int(last) + 1

    @staticmethod
    def content_range(start: int, nbytes: int, total: int) -> str:
        return f"bytes {start}-{start + nbytes - 1}/{total}"


@contextmanager
def s3_stub() -> Iterator[Stub]:
    server = Server(("127.0.0.1", 0), Answering)
    server.stub = stub = Stub(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
