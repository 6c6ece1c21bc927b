"""Reads the bodies that ASGI's `receive` brings, as applications do."""

from __future__ import annotations

from starlette.types import Receive


async def whole_body(receive: Receive) -> bytes:
    """Return a request's body. Raises `AssertionError` if the client leaves before it is whole."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request", "the client is there"
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body
