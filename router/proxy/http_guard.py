"""A uvicorn HTTP protocol that bounds what one connection may cost before a request exists.

Request line and headers are bounded in bytes and in time, a client that reads nothing is disconnected, and
protocol errors get OpenAI's shape. A connection that is closed with an unread body is closed gently, so
that the client sees the reason. An offer to speak another protocol (`Upgrade: h2c`) is not taken, and leaves
the request's body alone; a client of HTTP/1.0 gets no chunks. Where clients need certificates, who has none
is answered whether it serves, and no more. Based on uvicorn's httptools protocol.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from samovar.router.auth import OPEN_PATH
from samovar.router.openai import ApiError, BadHttp, Forbidden, HeadersTooLarge, RequestTimeout

WRITE_BUFFER_BYTES, TAKEN_BYTES = 1 << 16, 1 << 14
LINGER_S = 2.0  # how long further input of a refused client is read and dropped


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection: see the fields of the same names in `LimitsSettings`."""

    header_bytes_max: int
    header_read_s: float
    write_idle_s: float


class _Refused(Exception):
    """Aborts the parser; the connection's `_refusal` has the reason."""


CONTROL_OPEN = "/-/healthz"
OPEN_URLS = frozenset({OPEN_PATH.encode(), CONTROL_OPEN.encode()})
"""What a client without a certificate may ask: a load balancer has none."""
STRANGER = (
    "This endpoint needs a certificate of yours, by an authority of server.tls_client_ca. Send it with the "
    "connection (curl: --cert and --key)."
)
HSTS = (b"strict-transport-security", b"max-age=31536000")
UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})


class _DecliningParser:
    """httptools' parser, which reads on where a client's offer of another protocol is not taken.

    httptools takes the bytes behind the headers of such a request for the other protocol's, so its body would
    be lost. Here the headers are parsed again without the offer, and the body after them.
    """

    def __init__(self, protocol: GuardedHttpProtocol) -> None:
        self._protocol = protocol
        self._real = _new_parser(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def feed_data(self, data: bytes) -> None:
        while True:  # it may hold several requests, with an offer in each
            try:
                self._real.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._protocol.has_declined:
                    raise
                data = data[offer.args[0] :]
            head = self._protocol.head_without_offer()
            self._real = _new_parser(self._protocol)
            self._real.feed_data(head)


def _new_parser(protocol: GuardedHttpProtocol) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
    return parser


class GuardedHttpProtocol(HttpToolsProtocol):
    """uvicorn protocol with bounded headers and writes.

    Use a subclass with its `limits` set: see `guarded_protocol`.
    """

    limits: ClassVar[ConnectionLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Serve makes uvicorn's configuration; hide which server answers.
        self.config.encoded_headers = _headers_of(self.config.encoded_headers, self.config.is_ssl)
        self.server_state.default_headers = _headers_of(self.server_state.default_headers, self.config.is_ssl)
        self.parser = cast(Any, _DecliningParser(self))
        self.has_declined = False  # an offer in the request whose headers have just ended
        self._in_headers = True  # from before a request's first byte until its headers end
        self._messages = 0  # requests received completely
        self._header_bytes = 0
        self._body_pieces = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._outlet: _GentleTransport | None = None
        self._is_stranger = False  # without the certificate that clients need

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._outlet = _GentleTransport(cast(asyncio.Transport, transport), self)
        # The writer goes on as soon as a client takes a little: it must not look like one that takes none.
        self._outlet.set_write_buffer_limits(WRITE_BUFFER_BYTES, WRITE_BUFFER_BYTES - TAKEN_BYTES)
        super().connection_made(cast(asyncio.Transport, self._outlet))
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        # With `CERT_OPTIONAL`, one that was shown and is wrong has ended the handshake.
        self._is_stranger = tls is not None and bool(tls.context.verify_mode) and not tls.getpeercert()
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        if self._outlet is not None:
            self._outlet.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._outlet is None or self._outlet.is_closing() or self._refusal is not None:
            return  # further input of a refused client
        if self._in_headers:
            self._start_header_timer()
        before = (self._messages, self._in_headers, self._body_pieces)
        super().data_received(data)
        if before != (self._messages, self._in_headers, self._body_pieces):
            self._header_bytes = 0
            return
        # Nothing was completed: headers, trailers or chunk extensions, which the parser buffers silently.
        self._header_bytes += len(data)
        if self._header_bytes > self.limits.header_bytes_max and self._refusal is None:
            self._refuse(HeadersTooLarge(self.limits.header_bytes_max))

    def on_headers_complete(self) -> None:
        spoken = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if spoken > self.limits.header_bytes_max:
            self._refusal = HeadersTooLarge(self.limits.header_bytes_max)
            raise _Refused
        if self._is_stranger and self.url.partition(b"?")[0] not in OPEN_URLS:
            self._refusal = Forbidden(STRANGER)
            raise _Refused
        is_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        self.has_declined = is_offer and not self._should_upgrade()
        if self.has_declined:
            return  # they are parsed again, without the offer
        self._in_headers = False
        self._header_bytes = 0
        self._stop_header_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_unchunked(self.cycle)

    def head_without_offer(self) -> bytes:
        """Return the request line and the headers of a request whose offer was declined, without it."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in UPGRADE_HEADERS)
            if name not in UPGRADE_HEADERS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are not used
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body_pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.has_declined:
            return
        self._messages += 1
        self._in_headers = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # `cycle` is the newest request: a pipelined one that is still queued is not complete.
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self.transport.close()  # else uvicorn waits forever for the rest of the body

    def send_400_response(self, msg: str) -> None:
        """Answer a parser error. uvicorn calls this for all of them; our refusal may have another reason."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or BadHttp("This is not a valid HTTP/1.1 request."))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(None)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    @property
    def has_unread_input(self) -> bool:
        """Whether the client may still be sending input that will not be read."""
        return self._refusal is not None or (self.cycle is not None and self.cycle.more_body)

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error` and close; only close if another answer is half sent."""
        self._refusal = error
        self._stop_header_timer()
        if self.cycle is None or self.cycle.response_complete:
            body = error.body_bytes()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                **error.headers,
                "connection": "close",
            }
            lines = [STATUS_LINE[error.status]]
            lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
            self.transport.write(b"".join([*lines, b"\r\n", body]))
        self.transport.close()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_read_s, self._headers_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_header_timer()  # the next request must wait for this answer
        else:
            self._refuse(RequestTimeout("Sending the request headers", self.limits.header_read_s))

    def _watch_writing(self, buffered_before: int | None) -> None:
        """Abort the connection if the write buffer has not shrunk for `write_idle_s`."""
        buffered = self.transport.get_write_buffer_size()
        if buffered_before is not None and buffered >= buffered_before:
            self.transport.abort()
            return
        self._write_timer = self.loop.call_later(self.limits.write_idle_s, self._watch_writing, buffered)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _GentleTransport:
    """A transport whose `close` lets the client read the last answer first.

    Closing a socket with unread input resets the connection, and the reset can overtake the answer. So the
    input is read and dropped until the client is done or `LINGER_S` has passed.
    """

    def __init__(self, real: asyncio.Transport, protocol: GuardedHttpProtocol) -> None:
        self._real = real
        self._protocol = protocol
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._real.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._protocol.has_unread_input:
            self._real.close()
            return
        self._timer = self._protocol.loop.call_later(LINGER_S, self._real.abort)
        if self._real.can_write_eof():  # TLS cannot: `connection: close` has told the client to close
            self._real.write_eof()
        self._real.resume_reading()

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Have an answer of unknown length end with its connection: HTTP/1.0 knows no chunks."""
    send, has_length = cycle.send, True

    async def unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # for uvicorn
        await send(message)  # type: ignore[arg-type]

    cycle.send = unchunked  # type: ignore[method-assign, assignment]


def _headers_of(headers: list[tuple[bytes, bytes]], is_tls: bool) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name not in (b"server", HSTS[0])]
    return [*kept, HSTS] if is_tls else kept


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedHttpProtocol]:
    """Return the protocol class with `limits`, as uvicorn's `http` option takes it."""
    return type("GuardedHttpProtocol", (GuardedHttpProtocol,), {"limits": limits})
