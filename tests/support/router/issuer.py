"""An OpenID Connect issuer on loopback: discovery, keys that a test rotates, and tokens, good and forged."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey

AUDIENCE = "samovar"


def part(value: Any) -> str:
    """A part of a token: JSON, or bytes, in base64url."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Issuer:
    """What it publishes (`keys`, `told`), what it was asked for, and whether it answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: list[Key] = []
        self.more: list[dict[str, Any]] = []
        self.told: dict[str, Any] = {"issuer": url, "jwks_uri": f"{url}/keys"}
        self.asked: list[str] = []
        self.status = 200
        self.rotate()

    def rotate(self, kind: str = "RSA") -> Key:
        """Publish another key in place of all others; return it."""
        name = {"kid": f"k{time.monotonic_ns()}", "use": "sig"}
        key: Key
        if kind == "RSA":
            key = RSAKey.generate_key(2048, name)
        elif kind == "EC":
            key = ECKey.generate_key("P-256", name)
        else:
            key = OKPKey.generate_key("Ed25519", name)
        self.keys = [key]
        return key

    def answer(self, path: str) -> bytes:
        self.asked.append(path)
        if path == "/keys":
            return json.dumps(
                {"keys": [key.as_dict(private=False) for key in self.keys] + self.more}
            ).encode()
        return json.dumps(self.told).encode()

    def claims(self, **changed: Any) -> dict[str, Any]:
        """The claims of a good token of the tenant `kitchen`; None: leave it out."""
        now = int(time.time())
        good = {"iss": self.url, "aud": AUDIENCE, "exp": now + 300, "nbf": now, "sub": "u1"}
        found = {**good, "tenant": "kitchen", **changed}
        return {name: value for name, value in found.items() if value is not None}

    def token(self, *, alg: str = "RS256", key: Key | None = None, kid: str = "", **changed: Any) -> str:
        """A token, signed by the newest key, or another one."""
        signer = key or self.keys[-1]
        header = {"alg": alg, "kid": kid or signer.kid}
        return jwt.encode(header, self.claims(**changed), signer, algorithms=[alg])

    def unsigned(self, header: dict[str, Any], signature: bytes = b"", **changed: Any) -> str:
        """A token of these very parts."""
        return f"{part(header)}.{part(self.claims(**changed))}.{part(signature)}"

    def confused(self, secret: bytes, alg: str = "HS256") -> str:
        """A token whose shared secret is what the issuer publishes."""
        head = f"{part({'alg': alg, 'kid': self.keys[-1].kid})}.{part(self.claims())}"
        return f"{head}.{part(hmac.digest(secret, head.encode(), hashlib.sha256))}"


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """An issuer under a server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = issuer.answer(self.path)
            self.send_response(issuer.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer = Issuer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
