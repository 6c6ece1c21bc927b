"""What goes over the tiers' socket: frames of MessagePack, plain data, checked against the messages' types.

A frame is `LENGTH` bytes of its length, then a list: `[method, arguments]` from a client, `[whether it was
done, result or why not]` back. A dataclass is the list of its fields in order, an enum of words its word, a
mapping is one. File descriptors travel beside the length (`socket.send_fds`). Nothing is ever executed, and
numbers that are not finite come from no client.
"""

from __future__ import annotations

import math
import socket
import struct
import time
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack

PROTOCOL = 1
FRAME_BYTES_MAX = 8 * 1024 * 1024
"""Of keys, 32 bytes a block: a prompt of four million tokens in blocks of 16."""
FDS_MAX = 16
"""Memory files of one frame."""
FRAME_S = 10.0
"""A frame that has begun is whole by then, and an answer taken, or the connection is closed."""
ARRAY_MAX = 16384
"""Values in one list: room for them is taken before they are there."""
VALUES_MAX = 8 * ARRAY_MAX
LENGTH = struct.Struct("<I")
INT = struct.Struct("i")


class SocketError(Exception):
    """The other end is gone, late, or has sent what makes no sense."""


class BadMessage(SocketError):
    """What came is no message of that type; the connection can go on."""


def encoded(value: Any) -> Any:
    """Return a message as plain data."""
    if is_dataclass(value) and not isinstance(value, type):
        return [encoded(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple):
        return [encoded(one) for one in value]
    if isinstance(value, dict):
        return {key: encoded(one) for key, one in value.items()}
    return value


def decoded(kind: Any, data: Any, *, is_finite: bool = True) -> Any:
    """Return plain data as a value of a type. `is_finite`: refuse infinite numbers, too.

    Raises `BadMessage`.
    """
    try:
        return _decoder(kind, is_finite)(data)
    except BadMessage:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"no {getattr(kind, '__name__', kind)}: {error}") from error


Decoder = Callable[[Any], Any]


@cache
def _decoder(kind: Any, is_finite: bool) -> Decoder:
    origin, args = get_origin(kind), get_args(kind)
    if kind in (bytes, str, int, bool, type(None)):
        return lambda data: _of_type(data, kind)
    if kind is float:
        return lambda data: _number(data, is_finite)
    if origin is Literal:
        return lambda data: _of_words(data, args)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (one for one in args if one is not type(None))
        one = _decoder(inner, is_finite)
        return lambda data: None if data is None else one(data)
    if origin is tuple and args[-1:] == (...,):
        each = _decoder(args[0], is_finite)
        return lambda data: tuple(map(each, _of_type(data, list)))
    if origin is tuple:
        parts = [_decoder(one, is_finite) for one in args]
        return lambda data: tuple(part(one) for part, one in _paired(parts, data))
    if origin is list:
        element = _decoder(args[0], is_finite)
        return lambda data: list(map(element, _of_type(data, list)))
    if origin is dict:
        key, value = (_decoder(one, is_finite) for one in args)
        return lambda data: {key(name): value(one) for name, one in _of_type(data, dict).items()}
    if is_dataclass(kind):
        made, hints = typing.cast(type, kind), get_type_hints(kind)
        fill = [_decoder(hints[field.name], is_finite) for field in fields(kind)]
        return lambda data: made(*(part(one) for part, one in _paired(fill, data)))
    if kind is object or kind is Any:
        return lambda data: data
    raise TypeError(f"{kind} does not go over the socket")


def _of_type(data: Any, kind: type) -> Any:
    if type(data) is not kind:
        raise BadMessage(f"{type(data).__name__} instead of {kind.__name__}")
    return data


def _number(data: Any, is_finite: bool) -> float:
    if type(data) not in (int, float):
        raise BadMessage(f"{type(data).__name__} instead of a number")
    number = float(data)
    if math.isnan(number) or (is_finite and math.isinf(number)):
        raise BadMessage(f"{number} is no number of seconds or bytes")
    return number


def _of_words(data: Any, words: Sequence[Any]) -> Any:
    if data not in words:
        raise BadMessage(f"{data!r} is none of {', '.join(map(str, words))}"[:200])
    return data


def _paired(parts: Sequence[Decoder], data: Any) -> typing.Iterable[tuple[Decoder, Any]]:
    if type(data) is not list or len(data) != len(parts):
        raise BadMessage(f"{len(parts)} values were expected")
    return zip(parts, data, strict=True)


def packed(message: Any) -> bytes:
    """Return a message as a frame. Raises `BadMessage` if it is too large, or no plain data."""
    try:
        payload: bytes = msgpack.packb(encoded(message), unicode_errors="replace")
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"not to be said: {error}") from error
    if len(payload) > FRAME_BYTES_MAX:
        raise BadMessage(f"a frame of {len(payload)} bytes")
    return LENGTH.pack(len(payload)) + payload


def send(sock: socket.socket, message: Any, fds: Sequence[int] = (), within_s: float = FRAME_S) -> None:
    """Send a frame. Raises `SocketError`; `BadMessage`: nothing was sent."""
    send_frame(sock, packed(message), fds, within_s)


def send_frame(sock: socket.socket, frame: bytes, fds: Sequence[int], within_s: float) -> None:
    """Send what `packed` returned. Raises as `send`."""
    if len(fds) > FDS_MAX:
        raise BadMessage(f"a frame with {len(fds)} files")
    data, ends_s = memoryview(frame), time.monotonic() + within_s
    try:
        _limit(sock, ends_s)
        sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
        if sent < len(data):
            _limit(sock, ends_s)
            sock.sendall(data[sent:])
    except (OSError, ValueError) as error:
        raise SocketError(f"not sent: {type(error).__name__}") from error


def receive(sock: socket.socket, frame_s: float = FRAME_S, *, waits: bool = False) -> tuple[Any, list[int]]:
    """Receive a frame and its file descriptors, which the caller closes.

    It is whole within `frame_s`, counted from its first byte if it `waits` for that. Raises `SocketError`,
    and nothing is left open then; `BadMessage`: the connection can go on.
    """
    fds: list[int] = []
    try:
        ends_s = time.monotonic() + frame_s
        if waits:
            sock.settimeout(None)
        else:
            _limit(sock, ends_s)
        head, is_cut = _head(sock, fds)
        if waits:
            ends_s = time.monotonic() + frame_s
        head += _exactly(sock, LENGTH.size - len(head), ends_s)
        (nbytes,) = LENGTH.unpack(head)
        if nbytes > FRAME_BYTES_MAX:
            raise SocketError(f"a frame of {nbytes} bytes")
        data = _unpacked(_exactly(sock, nbytes, ends_s))
        if is_cut:
            raise BadMessage(f"more than {FDS_MAX} files, or no room for them here")
    except BaseException as error:
        close_all(fds)
        if isinstance(error, OSError):
            raise SocketError(f"nothing came: {type(error).__name__}") from error
        raise
    return data, fds


def _head(sock: socket.socket, fds: list[int]) -> tuple[bytes, bool]:
    """Return a frame's first bytes, and whether files were lost; those that came are in `fds`."""
    room = socket.CMSG_LEN(FDS_MAX * INT.size)
    head, others, flags, _ = sock.recvmsg(LENGTH.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.extend(fd for (fd,) in INT.iter_unpack(data[: len(data) // INT.size * INT.size]))
    if not head:
        raise SocketError("the connection was closed")
    return head, bool(flags & socket.MSG_CTRUNC)


def _exactly(sock: socket.socket, nbytes: int, ends_s: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        _limit(sock, ends_s)
        part = sock.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise SocketError("the connection was closed within a frame")
        data += part
    return bytes(data)


def _limit(sock: socket.socket, ends_s: float) -> None:
    """Let the next call on a socket take until then. Raises `TimeoutError` if that is over."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    sock.settimeout(left_s)


def _unpacked(payload: bytes) -> Any:
    """Return what a frame says. Raises `SocketError`.

    A list is up to eighty times as large here as it was on its way, so they are counted.
    """
    left = VALUES_MAX

    def count(values: Any) -> Any:
        nonlocal left
        left -= 1 + len(values)
        if left < 0:
            raise ValueError("too many values")
        return values

    try:
        return msgpack.unpackb(
            payload,
            list_hook=count,
            object_hook=count,
            max_array_len=ARRAY_MAX,
            max_map_len=ARRAY_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise SocketError(f"no MessagePack: {type(error).__name__}") from error


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors that came."""
    for fd in fds:
        socket.close(fd)
