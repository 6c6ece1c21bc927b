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
LENGTH = struct.Struct("<I")


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


def send(sock: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a frame within the socket's timeout. Raises `SocketError`."""
    payload: bytes = msgpack.packb(encoded(message), unicode_errors="surrogatepass")
    if len(payload) > FRAME_BYTES_MAX or len(fds) > FDS_MAX:
        raise BadMessage(f"a frame of {len(payload)} bytes and {len(fds)} files")
    data = memoryview(LENGTH.pack(len(payload)) + payload)
    try:
        sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
        if sent < len(data):
            sock.sendall(data[sent:])
    except (OSError, ValueError) as error:
        raise SocketError(f"not sent: {type(error).__name__}") from error


def receive(sock: socket.socket, begun: Callable[[], None] = lambda: None) -> tuple[Any, list[int]]:
    """Receive a frame and its file descriptors, which the caller closes. `begun`: its first bytes are here.

    Raises `SocketError`, and nothing is left open then.
    """
    fds: list[int] = []
    try:
        head, found, flags, _ = socket.recv_fds(sock, LENGTH.size, FDS_MAX)
        fds.extend(found)
        if not head:
            raise SocketError("the connection was closed")
        if flags & socket.MSG_CTRUNC:
            raise SocketError("too many files")
        begun()
        head += _exactly(sock, LENGTH.size - len(head))
        (nbytes,) = LENGTH.unpack(head)
        if nbytes > FRAME_BYTES_MAX:
            raise SocketError(f"a frame of {nbytes} bytes")
        try:
            data = msgpack.unpackb(_exactly(sock, nbytes), unicode_errors="surrogatepass")
        except (ValueError, RecursionError, msgpack.UnpackException) as error:
            raise SocketError(f"no MessagePack: {type(error).__name__}") from error
    except BaseException as error:
        close_all(fds)
        if isinstance(error, OSError):
            raise SocketError(f"nothing came: {type(error).__name__}") from error
        raise
    return data, fds


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise SocketError("the connection was closed within a frame")
        data += part
    return bytes(data)


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors that came."""
    for fd in fds:
        socket.close(fd)
