"""What goes over a link: MessagePack, plain data only. Pure.

First both ends prove themselves (`handshake.py`): nothing is parsed before. Then batches: lists of
`[ticket, payload]`. The ticket names a stream; a payload of None opens it, and says later that it lives.
`[ticket, payload, CALL]` begins a call, `[ticket, payload]` is more of it, and `[ticket, None, LEAVE]` says
that its caller has left. Backwards go batches of `[ticket, whether to go on]`, or `[ticket, why a call is
refused]`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import msgpack

PROBES, UNTAKEN = 3, 12
SECRET_BYTES = 32
TICKET_CHARS_MAX = 64
CALL, LEAVE = 1, 2

Batch = list[list[Any]]


class LinkLost(Exception):
    """The connection of a stream is gone, or what came over it makes no sense."""


def packed(batch: Batch) -> bytes:
    """Return the bytes of a batch."""
    data: bytes = msgpack.packb(batch, unicode_errors="surrogatepass")
    return data


class Parser:
    """Takes bytes as they come, and returns whole batches. `bytes_max`: of one that is not whole yet."""

    def __init__(self, bytes_max: int) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=bytes_max, unicode_errors="surrogatepass")

    def feed(self, data: bytes) -> Iterator[Batch]:
        """Yield the batches that are whole now. Raises `LinkLost` at what is none."""
        try:
            self._unpacker.feed(data)
            for batch in self._unpacker:
                if not _is_batch(batch):
                    raise LinkLost("not a batch")
                yield batch
        except (ValueError, msgpack.UnpackException) as error:
            raise LinkLost(f"no MessagePack: {type(error).__name__}") from error


def _is_batch(batch: object) -> bool:
    return isinstance(batch, list) and all(
        isinstance(item, list)
        and (len(item) == 2 or _has_word(item))
        and isinstance(item[0], str)
        and len(item[0]) <= TICKET_CHARS_MAX
        for item in batch
    )


def _has_word(item: list[Any]) -> bool:
    return len(item) == 3 and type(item[2]) is int and item[2] in (CALL, LEAVE)


def notice_loss(transport: asyncio.BaseTransport, silence_s: int) -> None:
    """Have a TCP connection end when the other machine is gone: after `silence_s` if this end only reads.

    A machine without power ends no connections. If this end writes, what is not taken ends it after
    `UNTAKEN` times as long: also by a process that hangs, which is given longer.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silence_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, silence_s // PROBES))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNTAKEN * silence_s)


class Pace:
    """Decides when the readers of a link are woken. Pure: times are from the caller's clock.

    At once, as long as the process has time: waking them all then takes little of it. After it took t they
    are left alone for `REST` t, at most `wait_s_max`, and find more tokens at once: a token costs less the
    more there is to do.
    """

    REST = 4.0

    def __init__(self, wait_s_max: float) -> None:
        self._wait_s_max = wait_s_max
        self._next_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Return how long readers are still left alone."""
        return min(max(0.0, self._next_s - now_s), self._wait_s_max)

    def woke(self, began_s: float, ended_s: float) -> None:
        """Note that all readers were woken and have run."""
        self._next_s = ended_s + min(self._wait_s_max, self.REST * max(0.0, ended_s - began_s))
