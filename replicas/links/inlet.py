"""The listening end of links. All methods run on one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from samovar.configs.cluster import LinkSettings
from samovar.configs.tls import CertificateRefused, NodeTls, RenewedContext, node_tls
from samovar.replicas.links.calls import Calls, LinkCall
from samovar.replicas.links.handshake import PROOF_WAIT_S, Handshake
from samovar.replicas.links.mailbox import Mailbox
from samovar.replicas.links.wire import CALL, SECRET_BYTES, LinkLost, Pace, Parser, notice_loss, packed
from samovar.replicas.messages import ReplyTo

logger = logging.getLogger(__name__)


class _Incoming(asyncio.Protocol):
    """One connection: first both ends prove themselves, then batches come."""

    def __init__(self, inlet: Inlet) -> None:
        self._inlet = inlet
        self._handshake = inlet.handshake()
        self._parser: Parser | None = None
        self._streams: set[str] = set()
        self._calls: dict[str, tuple[asyncio.Task[None], Mailbox]] = {}
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._inlet.watch(transport)
        self._inlet.meet(self)
        self.transport.write(self._handshake.begin())
        asyncio.get_running_loop().call_later(PROOF_WAIT_S, self._is_proven_or_ends)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        if self._parser is None:
            try:
                said, data = self._handshake.take(data)
            except LinkLost as stranger:
                logger.warning("a connection is closed: %s", stranger)
                self.transport.abort()
                return
            if not self._handshake.is_proven:
                return
            if not self._inlet.admit(self):
                self.transport.abort()
                return
            self._parser = self._inlet.parser()
            self.transport.write(said)  # our proof, which is also the welcome
        try:
            for batch in self._parser.feed(data):
                for ticket, payload, *word in batch:
                    if word or ticket in self._calls:
                        self._called(ticket, payload, word)
                    elif self._inlet.put(self, ticket, payload):
                        self._streams.add(ticket)
        except LinkLost as lost:
            logger.warning("a link is cut: %s", lost)
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        for task, _ in self._calls.values():
            task.cancel()
        self._calls.clear()
        self._inlet.lost(self, self._streams)

    def answer(self, ticket: str, said: bool | str) -> None:
        """Tell the writer of a stream whether to go on, or the caller why its call is refused."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(packed([[ticket, said]]))

    def _called(self, ticket: str, payload: Any, word: list[int]) -> None:
        """Take what is said of a call: its beginning, more of it, or that its caller has left."""
        known = self._calls.get(ticket)
        if word == [CALL]:
            if known is not None:
                raise LinkLost("a call with the ticket of another")
            box = Mailbox(self._inlet.settings.stream_bytes_max, partial(self.answer, ticket))
            task = self._inlet.calls.begin(LinkCall(payload, box, partial(self.answer, ticket)))
            if task is not None:
                self._calls[ticket] = task, box
                task.add_done_callback(lambda _: self._calls.pop(ticket, None))
        elif known is not None:
            task, box = known
            if word:
                task.cancel()
            elif payload is not None:
                box.put(payload)
                box.wake()

    def forget(self, ticket: str) -> None:
        self._streams.discard(ticket)

    def _is_proven_or_ends(self) -> None:
        if self._parser is None and self.transport is not None:
            self.transport.abort()


class Inlet:
    """Listens for links, and sorts what they carry by stream.

    Who knows the address may call, if there is a handler (`calls.take`). `host`: the interface.
    `wait_s_max`: how long payloads may wait for more while the process is busy. `tls`: what callers must
    speak, with a certificate of the same authority.
    """

    def __init__(
        self,
        host: str,
        settings: LinkSettings,
        wait_s_max: float,
        clock: Callable[[], float] = time.monotonic,
        tls: NodeTls | None = None,
    ) -> None:
        self._host = host
        self.tls = tls
        self.settings = settings
        self.calls = Calls(settings.calls_max)
        self._clock = clock
        self._pace = Pace(wait_s_max)
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._boxes: dict[str, Mailbox] = {}
        self._from: dict[str, _Incoming] = {}
        self._links: set[_Incoming] = set()
        self._strangers: dict[_Incoming, None] = {}  # have not proved themselves; the oldest first
        self._unwoken: set[Mailbox] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_waking = False
        self._opening: asyncio.Task[ReplyTo] | None = None
        self._server: asyncio.Server | None = None

    async def address(self) -> ReplyTo:
        """Return where this listens; it begins to at the first call. Raises `OSError`."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._listen())
        return await asyncio.shield(self._opening)

    async def _listen(self) -> ReplyTo:
        loop = asyncio.get_running_loop()
        made = partial(loop.create_server, lambda: _Incoming(self), self._host, 0)
        if self.tls is None:
            self._server = await made()
        else:
            try:
                context = RenewedContext(self.tls).context
            except CertificateRefused as error:
                raise OSError(str(error)) from error
            self._server = await made(ssl=context, ssl_handshake_timeout=PROOF_WAIT_S)
        port = self._server.sockets[0].getsockname()[1]
        return ReplyTo(self._host, port, self._secret)

    def expect(self, ticket: str) -> Mailbox:
        """Return the mailbox of a stream that will come; call `forget` in the end."""
        box = Mailbox(self.settings.stream_bytes_max, lambda goes_on: self._answer(ticket, goes_on))
        self._boxes[ticket] = box
        return box

    def forget(self, ticket: str) -> None:
        """Drop a stream: what still comes for it is not kept."""
        box = self._boxes.pop(ticket, None)
        if box is not None:
            self._unwoken.discard(box)
        link = self._from.pop(ticket, None)
        if link is not None:
            link.forget(ticket)

    def close(self) -> None:
        """Stop listening and end all links, with the calls that came over them."""
        self.calls.stop()
        if self._server is not None:
            self._server.close()
        for link in [*self._links, *self._strangers]:
            if link.transport is not None:
                link.transport.abort()

    # -- of the connections ------------------------------------------------------------

    def meet(self, stranger: _Incoming) -> None:
        """Note a connection whose caller has not proved itself; the oldest such makes room.

        They take no place of those that have: any local user can open connections.
        """
        if len(self._strangers) >= self.settings.links_max:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()
        self._strangers[stranger] = None

    def admit(self, link: _Incoming) -> bool:
        """Whether one more connection may be there; its caller has proved itself."""
        self._strangers.pop(link, None)
        if len(self._links) >= self.settings.links_max:
            logger.warning("a link is refused: there are %d", len(self._links))
            return False
        self._links.add(link)
        return True

    def handshake(self) -> Handshake:
        return Handshake("listener", self._secret)

    def watch(self, transport: asyncio.BaseTransport) -> None:
        notice_loss(transport, self.settings.keepalive_s)

    def parser(self) -> Parser:
        return Parser(self.settings.unread_bytes_max)

    def put(self, link: _Incoming, ticket: str, payload: Any) -> bool:
        """Take a payload; return whether the stream is new to this link."""
        box = self._boxes.get(ticket)
        if box is None:
            return False  # its reader has left
        is_new = self._from.get(ticket) is not link
        self._from[ticket] = link
        if payload is None:
            if not is_new:  # that a stream was opened says nothing about its answer
                box.beat()
            return is_new
        box.put(payload)
        if not box.has_spoken:
            box.wake()  # the first token waits for nothing
        else:
            self._unwoken.add(box)
            self._wake_in_time()
        return is_new

    def lost(self, link: _Incoming, streams: set[str]) -> None:
        """Tell the readers of a connection's streams that it is gone."""
        self._links.discard(link)
        self._strangers.pop(link, None)
        for ticket in streams:
            if self._from.get(ticket) is link:
                del self._from[ticket]
                if (box := self._boxes.get(ticket)) is not None:
                    box.fail(LinkLost("the connection has ended"))

    def _answer(self, ticket: str, goes_on: bool) -> None:
        if (link := self._from.get(ticket)) is not None:
            link.answer(ticket, goes_on)

    def _wake_in_time(self) -> None:
        if self._timer is None and not self._is_waking:
            loop, wait_s = asyncio.get_running_loop(), self._pace.wait_s(self._clock())
            self._is_waking = wait_s <= 0
            if wait_s > 0:
                self._timer = loop.call_later(wait_s, self._wake)
            else:
                loop.call_soon(self._wake)  # with all that this read brings

    def _wake(self) -> None:
        self._timer, self._is_waking = None, False
        began_s = self._clock()
        boxes, self._unwoken = self._unwoken, set()
        for box in boxes:
            box.wake()
        # Behind the readers, which run in the order in which they were woken.
        asyncio.get_running_loop().call_soon(lambda: self._pace.woke(began_s, self._clock()))


def open_inlet(links: LinkSettings, wait_s_max: float) -> Inlet | None:
    """Return an inlet on Ray's address of this node, loopback in a private cluster; None: without links."""
    if not links.enabled:
        return None
    import ray  # an engine runs where it is not installed

    return Inlet(ray.util.get_node_ip_address(), links, wait_s_max, tls=node_tls())
