"""A ring of int32 messages in shared memory: one writer, some readers. Nothing is ever unpickled.

A slot is int32: the message's number, its kind, its length, the words, the number again. A reader takes a
message only if both numbers are those of the message that must come next: what is half written, overwritten
or foreign is an error, never a message. Who waits for whom is in `channel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
Memory = Any
"""What numpy takes as a writable buffer: an `mmap`, a bytearray."""

_FRAME = 4  # words of a slot that are not the message's


class RingBroken(RuntimeError):
    """A slot does not hold the message that must come next; the text says what it holds."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """`slots` messages, 2 or more, of at most `message_words` int32 each."""

    slots: int
    message_words: int

    @property
    def nbytes(self) -> int:
        return 4 * self.slots * (self.message_words + _FRAME)

    def slots_of(self, memory: Memory) -> Words:
        """Return the slots in shared memory, `[slots, words]`."""
        words = np.frombuffer(memory, dtype=np.int32, count=self.nbytes // 4)
        return words.reshape(self.slots, self.message_words + _FRAME)


@dataclass(frozen=True, slots=True)
class RingMessage:
    """A message in place: `words` are the ring's own, and are overwritten when it is done."""

    number: int
    kind: int
    words: Words


def _mark(number: int) -> int:
    """Return what stands for a message's number in its slot; never 0, which unused memory holds."""
    return number % 0x7FFFFFFF + 1


class RingWriter:
    """Writes messages; `written`: the number of the last one. The first has number 1."""

    def __init__(self, memory: Memory, shape: RingShape) -> None:
        self._slots = shape.slots_of(memory)
        self._shape = shape
        self.written = 0

    def put(self, kind: int, parts: Sequence[Words]) -> int:
        """Write a message made of `parts` over the oldest one, which must be done; return its number.

        Raises `ValueError` if it is longer than a slot.
        """
        length, number = sum(len(part) for part in parts), self.written + 1
        if length > self._shape.message_words:
            raise ValueError(f"a message of {length} words, and a slot holds {self._shape.message_words}")
        slot = self._slots[number % self._shape.slots]
        slot[0] = slot[3 + length] = 0
        slot[1], slot[2], at = kind, length, 3
        for part in parts:
            slot[at : at + len(part)] = part
            at += len(part)
        slot[0] = slot[at] = _mark(number)
        self.written = number
        return number


class RingReader:
    """Reads every message once, in their order."""

    def __init__(self, memory: Memory, shape: RingShape) -> None:
        self._slots = shape.slots_of(memory)
        self._shape = shape
        self._taken = 0

    def take(self) -> RingMessage:
        """Return the next message, which must have been written. Raises `RingBroken` if it is not there."""
        number = self._taken + 1
        slot = self._slots[number % self._shape.slots]
        length = int(slot[2])
        is_whole = 0 <= length <= self._shape.message_words and slot[3 + length] == _mark(number)
        if slot[0] != _mark(number) or not is_whole:
            raise RingBroken(f"message {number} is not whole: its slot begins with {slot[:3].tolist()}")
        self._taken = number
        return RingMessage(number, int(slot[1]), slot[3 : 3 + length])
