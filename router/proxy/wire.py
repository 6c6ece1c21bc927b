"""A request and its response as payloads of a link: plain data. Pure.

A request is one payload: where its answer is awaited, its head, and what of its body had come. The rest of
the body follows in pieces, once the ingress has said `GO`. A response is its head, pieces of its body, and
`WHOLE` or `CUT`.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Scope

from samovar.replicas.messages import ReplyTo

GO = "go"
"""The ingress has taken the request, and wants the rest of its body."""
WHOLE, CUT = True, False
"""The last payload of a body: that it was all; of a response also that it failed."""
UNREACHED = "unreached"
"""Why an ingress takes no request: it cannot reach the proxy with its answer."""
READ_BYTES = 1 << 14
"""A body goes over a link, and to its client, in pieces: one message must not fill what all streams share,
and each piece that the client takes tells the ingress that it reads."""
PLAIN = ("asgi", "http_version", "method", "scheme", "root_path", "path", "raw_path", "query_string")
PAIRS = ("client", "server")


def packed_request(scope: Scope, to: ReplyTo, ticket: str, body: bytes, *, more: bool) -> list[Any]:
    """Return the first payload of a request. `more`: whether more of its body comes."""
    head = {name: scope[name] for name in (*PLAIN, *PAIRS, "headers") if name in scope}
    return [[to.host, to.port, to.secret], ticket, head, body, more]


def read_request(payload: Any) -> tuple[ReplyTo, str, Scope, bytes, bool]:
    """Return what `packed_request` was given, with a scope that an app may write to. Raises `ValueError`."""
    try:
        (host, port, secret), ticket, head, body, more = payload
        scope: Scope = {"type": "http", **head, "state": {}}
        scope["headers"] = [(name, value) for name, value in head["headers"]]
        scope.update({name: tuple(head[name]) for name in PAIRS if head.get(name) is not None})
        return ReplyTo(host, port, secret), ticket, scope, body, more
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"no request: {error}") from error


def packed_head(message: Message) -> list[Any]:
    """Return the head of a response."""
    return [message["status"], [list(pair) for pair in message.get("headers", [])]]


def read_head(payload: Any) -> Message:
    """Return the ASGI message of a response's head."""
    status, headers = payload
    return {"type": "http.response.start", "status": status, "headers": [tuple(pair) for pair in headers]}
