"""The ring of orders: every message once, in order, whole, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from samovar.replicas.ranks.ring import RingBroken, RingReader, RingShape, RingWriter, Words

SHAPE = RingShape(slots=3, message_words=8)


def words(*numbers: int) -> Words:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SHAPE.nbytes)


def test_each_reader_gets_every_message_in_order_however_often_the_ring_goes_round(memory: bytearray) -> None:
    writer = RingWriter(memory, SHAPE)
    readers = [RingReader(memory, SHAPE) for _ in range(3)]
    for number in range(1, 20):
        assert (
            writer.put(number % 5, [words(*range(number % 9))[:3], words(*range(number % 9))[3:]]) == number
        )
        for reader in readers:
            message = reader.take()
            assert (message.number, message.kind) == (number, number % 5)
            assert message.words.tolist() == list(range(number % 9))


def test_what_is_not_the_next_message_is_an_error(memory: bytearray) -> None:
    writer, reader = RingWriter(memory, SHAPE), RingReader(memory, SHAPE)
    with pytest.raises(RingBroken, match="message 1 is not whole"):
        reader.take()  # nothing was written
    for _ in range(SHAPE.slots + 1):
        writer.put(1, [words(1, 2)])
    with pytest.raises(RingBroken):
        reader.take()  # it was overwritten before it was read


@pytest.mark.parametrize("word", [0, 2, 5], ids=["first number", "length", "last number"])
def test_a_torn_message_is_an_error(memory: bytearray, word: int) -> None:
    RingWriter(memory, SHAPE).put(1, [words(1, 2)])
    slot = SHAPE.slots_of(memory)[1]
    slot[word] = -slot[word] if word == 2 else slot[word] + 1
    with pytest.raises(RingBroken):
        RingReader(memory, SHAPE).take()


def test_a_message_that_is_too_long_is_refused_and_changes_nothing(memory: bytearray) -> None:
    writer, reader = RingWriter(memory, SHAPE), RingReader(memory, SHAPE)
    with pytest.raises(ValueError, match="9 words"):
        writer.put(1, [words(*range(9))])
    writer.put(2, [words(*range(8))])
    assert reader.take().kind == 2
