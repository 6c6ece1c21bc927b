"""Work for a client, ended as soon as the client has gone. Knows ASGI; nothing of what the work is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Send

from router.errors import ClientClosedRequest


class Outlet:
    """`send` that knows whether the whole response is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True  # before it is sent: servers report a disconnect right after it
        await self._send(message)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None], outlet: Outlet) -> None:
    """Run `work` to its end, or cancel it as soon as the client disconnects.

    The body must have been read, and `work` must write to `outlet`. Raises what `work` raises, or
    `ClientClosedRequest`.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            leaving.result()  # a fault of the server is not a client that left
            if not outlet.is_complete:
                raise ClientClosedRequest
        await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
