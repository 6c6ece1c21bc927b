"""Records that wait in a replica: bounded in bytes and in time, each handed over once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from samovar.cache_tiers.actors.staging import StagingBuffer, hand_over, open_outbox
from samovar.cache_tiers.blocks.record import TierError
from tests.support.clock import Clock


def record(nbytes: int, fill: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(nbytes, fill, dtype=np.uint8)


def test_a_record_is_handed_over_once() -> None:
    outbox = StagingBuffer(100, keep_s=10)
    ticket = outbox.put(record(40, 7))
    assert ticket is not None
    assert outbox.nbytes == 40
    assert (outbox.take(ticket) == 7).all()
    outbox.check_integrity()
    assert outbox.nbytes == 0
    with pytest.raises(TierError):
        outbox.take(ticket)


@pytest.mark.guarantee("G10")
def test_no_more_bytes_than_allowed() -> None:
    outbox = StagingBuffer(100, keep_s=10)
    first = outbox.put(record(60))
    assert first is not None
    assert outbox.put(record(41)) is None
    assert outbox.put(record(40)) is not None
    outbox.drop(first)
    outbox.drop(first)
    outbox.check_integrity()
    assert outbox.nbytes == 40


def test_what_nobody_calls_for_expires() -> None:
    clock = Clock()
    outbox = StagingBuffer(100, keep_s=10, clock=clock)
    ticket = outbox.put(record(60))
    assert ticket is not None
    clock.now_s += 9
    assert outbox.nbytes == 60
    clock.now_s += 1
    assert len(outbox) == 0
    assert outbox.nbytes == 0
    outbox.check_integrity()
    with pytest.raises(TierError):
        outbox.take(ticket)


def test_tickets_are_never_used_twice() -> None:
    outbox = StagingBuffer(100, keep_s=10)
    first = outbox.put(record(10))
    assert first is not None
    outbox.drop(first)
    assert outbox.put(record(10)) != first


def test_hand_over_serves_the_open_outbox() -> None:
    outbox = StagingBuffer(100, keep_s=10)
    open_outbox(outbox)
    ticket = outbox.put(record(10, 3))
    assert ticket is not None
    assert (hand_over(object(), ticket) == 3).all()
    with pytest.raises(TierError):
        hand_over(object(), ticket)


def test_many_threads_keep_the_books() -> None:
    outbox = StagingBuffer(1000, keep_s=100)
    taken: list[int] = []

    def work() -> None:
        for _ in range(200):
            ticket = outbox.put(record(10))
            if ticket is not None:
                taken.append(outbox.take(ticket).nbytes)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outbox.check_integrity()
    assert outbox.nbytes == 0
    assert len(taken) == 800
