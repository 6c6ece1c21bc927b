"""Entries of the reply memory on their way to other ingresses, and from them.

Packed, an entry carries a digest under its tenant's salt. What was changed on its way, or was not packed for
this salt, is refused: token ids of another text would be a wrong prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import msgpack

from samovar.router.openai import ParsedChat
from samovar.router.prompt.reply_memory import Owner, RememberedReply, ReplyMemory, key_of

NAME_BYTES = 16
DIGEST_BYTES = hashlib.sha256().digest_size


class NotOurs(ValueError):
    """Packed bytes that were not packed under this salt, or have changed since."""


def packed(salt: bytes, reply: RememberedReply) -> tuple[bytes, bytes]:
    """Return the name of an entry, by which the same one is known, and its bytes."""
    ids = array("I", reply.token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    fields = [reply.reply, reply.chars, reply.whole, reply.is_lost, ids.tobytes(), reply.turns]
    body: bytes = msgpack.packb(fields)
    place = hmac.digest(salt, b"%b%b%d" % (reply.reply, reply.whole, reply.chars), "sha256")
    return place[:NAME_BYTES], hmac.digest(salt, body, "sha256") + body


def unpacked(salt: bytes, data: bytes, vocab_tokens: int) -> RememberedReply:
    """Return the entry in packed bytes. Raises `NotOurs`."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, hmac.digest(salt, body, "sha256")):
        raise NotOurs("its digest is another")
    reply, chars, whole, is_lost, raw, turns = _fields(body)
    ids = array("I")
    ids.frombytes(raw)
    if sys.byteorder == "big":
        ids.byteswap()
    if any(one >= vocab_tokens for one in ids):
        raise NotOurs("a token is not of this vocabulary")
    return RememberedReply(reply, chars, whole, is_lost, ids, turns)


def _fields(body: bytes) -> tuple[bytes, int, bytes, bool, bytes, int]:
    try:
        fields: Any = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise NotOurs(f"no MessagePack: {type(error).__name__}") from error
    kinds = (bytes, int, bytes, bool, bytes, int)
    if not isinstance(fields, list) or list(map(type, fields)) != list(kinds) or len(fields[4]) % 4:
        raise NotOurs("of another form")
    reply, chars, whole, is_lost, raw, turns = fields
    return reply, chars, whole, is_lost, raw, turns


def turns_of(asked: ParsedChat | None) -> int:
    """Return how many replies a conversation has with the answer that it asks for."""
    return 1 + sum(one.role == "assistant" for one in asked.messages) if asked is not None else 0


class SharedReplies:
    """Entries of a reply memory, packed. Thread-safe."""

    def __init__(self, memory: ReplyMemory, lock: threading.Lock, vocab_tokens: int) -> None:
        self._memory = memory
        self._lock = lock
        self._vocab_tokens = vocab_tokens

    def knows_last(self, salt: bytes, owner: Owner, request: ParsedChat) -> bool:
        """Return whether the last reply in a conversation is remembered; also if it has none."""
        replies = [one for one in request.messages if one.role == "assistant"]
        if not replies:
            return True
        with self._lock:
            last = replies[-1]
            return self._memory.knows(salt.hex(), owner, last.content, key_of(last), len(replies))

    def newest(self, salt: bytes, owner: Owner, count: int) -> list[tuple[bytes, bytes]]:
        """Return name and bytes of the `count` entries of an owner that were stored last."""
        with self._lock:
            found = self._memory.newest(salt.hex(), owner, count)
        return [packed(salt, one) for one in found]

    def take(self, salt: bytes, owner: Owner, bodies: Sequence[bytes], *, forgets: int) -> tuple[int, int]:
        """Store packed entries; return how many were new, and how many refused: see `NotOurs`."""
        good: list[RememberedReply] = []
        for body in bodies:
            try:
                good.append(unpacked(salt, body, self._vocab_tokens))
            except NotOurs:
                continue
        with self._lock:
            return self._memory.take(salt.hex(), owner, good, forgets=forgets), len(bodies) - len(good)
