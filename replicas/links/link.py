"""The sending end of a link. All methods run on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from samovar.configs.cluster import LinkSettings
from samovar.configs.tls import CertificateRefused, NodeTls
from samovar.replicas.links.handshake import PROOF_WAIT_S, Handshake
from samovar.replicas.links.wire import CALL, LEAVE, Batch, LinkLost, Parser, notice_loss, packed
from samovar.replicas.messages import ReplyTo

logger = logging.getLogger(__name__)

UNREACHED_S = 60.0
"""After an address could not be reached, it is not tried again for this long."""
ANSWER_BYTES_MAX = 1 << 20
BATCH_BYTES = 1 << 16
"""So many bytes of bodies go out before the turn is over: a writer of many must learn that it has to wait."""


class Link(asyncio.Protocol):
    """A connection to a process that listens. Nothing is sent to it before it has proved itself.

    What is sent in one turn of the event loop goes out in one write. `heartbeat_s`: how often an open stream
    that says nothing is said to live.
    """

    def __init__(self, settings: LinkSettings, secret: str, heartbeat_s: float) -> None:
        self._settings = settings
        self._handshake = Handshake("caller", secret)
        self._heartbeat_s = heartbeat_s
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._parser = Parser(ANSWER_BYTES_MAX)
        self._open: dict[str, Callable[[], None]] = {}
        self._calls: dict[str, tuple[Callable[[], None], Callable[[str], None]]] = {}
        self._pending: Batch = []
        self._spoken: set[str] = set()
        self._paused: dict[str, asyncio.Future[None]] = {}
        self._beat: asyncio.TimerHandle | None = None
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._full: asyncio.Future[None] | None = None  # while the socket takes no more
        self._pending_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the other end has proved itself, and the connection stands, as far as is known."""
        is_up = self._transport is not None and not self._transport.is_closing()
        return is_up and self._handshake.is_proven

    async def is_welcome(self) -> bool:
        """Return whether the other end is who it is to be, and takes this connection. Else it is cut."""
        await asyncio.wait({self._answered}, timeout=PROOF_WAIT_S)
        if not self.is_open:
            self.cut()
        return self.is_open

    def open(self, ticket: str, on_lost: Callable[[], None]) -> None:
        """Open a stream; `on_lost` is called if the connection ends before `close`. Raises `LinkLost`."""
        if not self.is_open:
            raise LinkLost("the connection has ended")
        self._open[ticket] = on_lost
        self._queue([ticket, None])
        if self._beat is None:
            self._beat = self._loop.call_later(self._heartbeat_s / 2, self._heartbeat)

    def call(
        self, ticket: str, payload: Any, on_lost: Callable[[], None], on_refused: Callable[[str], None]
    ) -> None:
        """Begin a call of the other end with its first payload; `send` adds more. Raises `LinkLost`.

        Before `close`, `on_lost` is called if the connection ends, `on_refused` with the reason if there will
        be no answer (`calls.py`).
        """
        if not self.is_open:
            raise LinkLost("the connection has ended")
        self._calls[ticket] = on_lost, on_refused
        self._queue([ticket, payload, CALL])

    def send(self, ticket: str, payload: Any) -> None:
        """Send more of an open stream or call; without effect on one that is closed, or lost."""
        if ticket in self._open:
            self._spoken.add(ticket)
            self._queue([ticket, payload])
        elif ticket in self._calls:
            self._queue([ticket, payload])

    def close(self, ticket: str, *, is_over: bool = False) -> None:
        """Forget a stream; what was sent before still arrives. A call is cancelled, unless it `is_over`."""
        self._open.pop(ticket, None)
        self._spoken.discard(ticket)
        if self._calls.pop(ticket, None) is not None and not is_over and self.is_open:
            self._queue([ticket, None, LEAVE])
        self._go_on(ticket)

    async def drained(self, ticket: str) -> None:
        """Wait while the reader of a stream has more than enough to read, or the connection is full."""
        while (held := self._paused.get(ticket) or self._full) is not None:
            await asyncio.shield(held)

    def cut(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        notice_loss(transport, self._settings.keepalive_s)

    def pause_writing(self) -> None:
        if self._full is None:
            self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        full, self._full = self._full, None
        if full is not None:
            full.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            if not self._handshake.is_proven:
                data = self._proven_by(data)
            for batch in self._parser.feed(data):
                for ticket, said, *word in batch:
                    if word:
                        raise LinkLost("a word that only callers say")
                    self._answered_by(ticket, said)
        except LinkLost as lost:
            logger.warning("a link is cut: %s", lost)
            self.cut()

    def connection_lost(self, error: Exception | None) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if not self._answered.done():
            self._answered.set_result(None)
        self.resume_writing()
        lost = [*self._open.values(), *(on_lost for on_lost, _ in self._calls.values())]
        self._open, self._calls = {}, {}
        self._pending.clear()
        for ticket in list(self._paused):
            self._go_on(ticket)
        for on_lost in lost:
            on_lost()

    # -- ours --------------------------------------------------------------------------

    def _proven_by(self, data: bytes) -> bytes:
        """Take in the other end's part of the handshake; return what came behind it. Raises `LinkLost`."""
        said, rest = self._handshake.take(data)
        if said and self._transport is not None:
            self._transport.write(said)
        if self._handshake.is_proven:
            self._answered.set_result(None)
        return rest

    def _answered_by(self, ticket: str, said: Any) -> None:
        """Take in what the other end says of a stream or call."""
        if isinstance(said, str):
            if (call := self._calls.pop(ticket, None)) is not None:
                self._go_on(ticket)
                call[1](said)
        elif said:
            self._go_on(ticket)
        elif (ticket in self._open or ticket in self._calls) and ticket not in self._paused:
            self._paused[ticket] = self._loop.create_future()

    def _queue(self, item: list[Any]) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(item)
        if isinstance(item[1], bytes):
            self._pending_bytes += len(item[1])
            if self._pending_bytes > BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        if not self._pending or self._transport is None or not self.is_open:
            return
        batch, self._pending, self._pending_bytes = self._pending, [], 0
        try:
            self._transport.write(packed(batch))
        except (TypeError, ValueError, OverflowError):  # a payload that is no plain data: a bug, said at once
            logger.exception("a link is cut: what is to be sent cannot be packed")
            self.cut()
            return
        if self._transport.get_write_buffer_size() > self._settings.unread_bytes_max:
            logger.warning("a link is cut: its reader has not read for long")
            self.cut()

    def _heartbeat(self) -> None:
        self._beat = None
        if not self.is_open or not self._open:
            return
        for ticket in self._open.keys() - self._spoken:
            self._queue([ticket, None])
        self._spoken.clear()
        # Twice as often: a stream that has just spoken at one look is silent until the next but one.
        self._beat = self._loop.call_later(self._heartbeat_s / 2, self._heartbeat)

    def _go_on(self, ticket: str) -> None:
        paused = self._paused.pop(ticket, None)
        if paused is not None and not paused.done():
            paused.set_result(None)


class Links:
    """The links of a process to those that listen, by their address. Runs on one event loop.

    `tls`: what is spoken with them; who listens must have a certificate of its address.
    """

    def __init__(self, settings: LinkSettings, heartbeat_s: float, tls: NodeTls | None = None) -> None:
        self._settings = settings
        self._tls = tls
        self._heartbeat_s = heartbeat_s
        self._links: dict[ReplyTo, Link] = {}
        self._unreached: dict[ReplyTo, float] = {}
        self._connecting: dict[
            ReplyTo, tuple[asyncio.Task[Link | None], float]
        ] = {}  # until when it is awaited

    async def reach(self, to: ReplyTo | None) -> Link | None:
        """Return the link to an address, None if it cannot be reached: then Serve carries the stream.

        A process that is too busy to prove itself within `connect_s` gets what comes later.
        """
        if to is None:
            return None
        link = self._links.get(to)
        if link is not None and link.is_open:
            return link
        now_s = asyncio.get_running_loop().time()
        if to not in self._connecting:
            connecting = asyncio.create_task(self._connect(to))
            connecting.add_done_callback(lambda _: self._connecting.pop(to, None))
            self._connecting[to] = connecting, now_s + self._settings.connect_s
        connecting, until_s = self._connecting[to]  # others wait for it, too
        await asyncio.wait({connecting}, timeout=max(0.0, until_s - now_s))
        return connecting.result() if connecting.done() else None

    async def _connect(self, to: ReplyTo) -> Link | None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._links = {known: link for known, link in self._links.items() if link.is_open}
        self._unreached = {known: until_s for known, until_s in self._unreached.items() if until_s > now_s}
        if to in self._unreached:
            return None
        try:
            context = None if self._tls is None else self._tls.calling()
            # A busy process accepts at once, by the kernel, but shakes hands when it has time.
            async with asyncio.timeout(self._settings.connect_s if context is None else PROOF_WAIT_S):
                _, link = await loop.create_connection(
                    lambda: Link(self._settings, to.secret, self._heartbeat_s), to.host, to.port, ssl=context
                )
        except (OSError, TimeoutError, CertificateRefused) as error:
            logger.warning("%s:%d is not reached (%s): Serve carries its streams", to.host, to.port, error)
            self._unreached[to] = now_s + UNREACHED_S
            return None
        if not await link.is_welcome():
            logger.warning(
                "%s:%d takes no more links, or is another process by now: Serve carries its streams",
                to.host,
                to.port,
            )
            self._unreached[to] = now_s + UNREACHED_S
            return None
        self._links[to] = link
        return link
