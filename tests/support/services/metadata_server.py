"""An HTTP server that answers as EC2's instance metadata service does (version 2), or as `fault` says."""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

ACTION_PATH = "/latest/meta-data/spot/instance-action"


class MetadataServer:
    """On 127.0.0.1. `fault`: "" | error | garbage | hang | reset | no-http. `asked`: requests so far."""

    def __init__(self) -> None:
        self.fault = ""
        self.has_tokens = True
        self.tokens = 0
        self.asked = 0
        self._token = ""
        self._notice: bytes | None = None
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def announce(self, action: str, at: datetime) -> None:
        """From now on there is a spot notice."""
        self.answer(json.dumps({"action": action, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}).encode())

    def answer(self, body: bytes) -> None:
        """From now on the spot notice is this."""
        self._notice = body

    def expire_tokens(self) -> None:
        self._token = ""

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                if self._is_spoilt():
                    return
                ttl_s = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0))
                if self.path != "/latest/api/token" or not server.has_tokens:
                    self._say(404, b"")
                elif not 0 < ttl_s <= 21600:
                    self._say(400, b"")
                else:
                    server.tokens += 1
                    server._token = secrets.token_urlsafe(40)
                    self._say(200, server._token.encode())

            def do_GET(self) -> None:
                if self._is_spoilt():
                    return
                token = self.headers.get("X-aws-ec2-metadata-token")
                if not token or token != server._token:
                    self._say(401, b"")
                elif self.path != ACTION_PATH or server._notice is None:
                    self._say(404, b"<html>Not Found</html>")
                else:
                    self._say(200, server._notice)

            def _say(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _is_spoilt(self) -> bool:
                server.asked += 1
                if server.fault == "error":
                    self._say(500, b"oops")
                elif server.fault == "garbage":
                    self._say(200, b"\xff{{")
                elif server.fault == "hang":
                    server._closed.wait(5)
                elif server.fault == "no-http":
                    self.wfile.write(b"nonsense\r\n\r\n")
                elif server.fault == "reset":
                    linger = struct.pack("ii", 1, 0)  # close sends RST
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.close_connection = bool(server.fault)
                return bool(server.fault)

            def log_message(self, format: str, *args: Any) -> None:
                """Not on the terminal."""

        return Handler
