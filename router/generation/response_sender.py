"""What is sent to a client, and work that ends when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Send

from samovar.router.openai import ClientClosedRequest
from samovar.router.waits import BoundedWaits

logger = logging.getLogger(__name__)


class ResponseSender:
    """ASGI `send` that records whether the whole response has been sent. Call `close` at the end.

    Waits at most `write_idle_s` for a client that does not read; then raises `ClientClosedRequest`.
    """

    def __init__(self, send: Send, write_idle_s: float) -> None:
        self._send = send
        self._waits = BoundedWaits()
        self._write_idle_s = write_idle_s
        self.is_complete = False

    def close(self) -> None:
        self._waits.close()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True  # set before sending: servers report a disconnect right after it
        try:
            await self._waits.wait(self._send(message), self._write_idle_s)
        except TimeoutError:
            logger.info("a client reads nothing: its connection is closed")
            raise ClientClosedRequest from None


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], sender: ResponseSender
) -> None:
    """Run `work` to its end, or cancel it as soon as the client disconnects.

    The body must have been read, and `work` must write to `sender`. Raises what `work` raises, or
    `ClientClosedRequest`.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            leaving.result()  # a server error is not a client disconnect
            if not sender.is_complete:
                raise ClientClosedRequest
        await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
