"""Orders to the ranks: bounded waits, and whoever dies is noticed at once."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from samovar.replicas.ranks.channel import Obeyed, Orders, RankLost, ReplicaGone
from samovar.replicas.ranks.meeting import ChannelPlan, Listener, connect
from samovar.replicas.ranks.orders import words_of
from samovar.replicas.ranks.ring import RingReader, RingShape, RingWriter

SHAPE = RingShape(slots=2, message_words=4)


class Ends:
    """Both ends of a channel to two ranks, in one process."""

    def __init__(self) -> None:
        memory, pairs = bytearray(SHAPE.nbytes), [socket.socketpair() for _ in range(2)]
        self.sockets = [theirs for _, theirs in pairs]
        self.orders = Orders(RingWriter(memory, SHAPE), SHAPE, [ours for ours, _ in pairs], wait_s=0.05)
        self.ranks = [Obeyed(RingReader(memory, SHAPE), theirs) for _, theirs in pairs]


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_all_ranks_are_told_the_same_and_are_waited_for(ends: Ends) -> None:
    for number in range(1, 6):
        assert ends.orders.tell(7, words_of([number])) == ends.orders.told == number
        for rank in ends.ranks:
            order = rank.next()
            assert (order.number, order.kind, order.words.tolist()) == (number, 7, [number])
            rank.done()
        ends.orders.await_done(number)
    ends.orders.check()


def test_a_rank_that_does_not_come_along_is_not_waited_for_longer_than_the_setting_says(ends: Ends) -> None:
    for _ in range(SHAPE.slots):
        ends.orders.tell(1)
        ends.ranks[0].next()
        ends.ranks[0].done()
    with pytest.raises(RankLost, match=r"rank 2 of 3 .* 0\.05 s \(engine.rank_wait_s\)"):
        ends.orders.tell(1)  # no slot is free
    with pytest.raises(RankLost, match="rank 2 of 3"):
        ends.orders.await_done(1)
    ends.orders.check()  # slow, and alive


def test_a_dead_rank_is_noticed_without_telling_it_anything(ends: Ends) -> None:
    ends.orders.tell(1)
    ends.ranks[1].next()
    ends.ranks[1].done()  # what it has said before it died does not hide its death
    ends.sockets[1].close()
    with pytest.raises(RankLost, match="rank 2 of 3 has died"):
        ends.orders.check()
    with pytest.raises(RankLost, match="rank 2 of 3 has died"):
        ends.orders.tell(1)


def test_a_rank_ends_when_rank_0_dies_or_its_own_channel_is_closed(ends: Ends) -> None:
    ends.orders.close()
    for rank in ends.ranks:
        with pytest.raises(ReplicaGone):
            rank.next()
        with pytest.raises(ReplicaGone):
            rank.done()
    other = Ends()

    def wait() -> None:
        with pytest.raises(ReplicaGone):
            other.ranks[0].next()

    waiting = threading.Thread(target=wait)
    waiting.start()
    other.ranks[0].close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_the_ranks_share_memory_that_has_no_name(tmp_path: Path) -> None:
    plan = ChannelPlan(step_words=10, move_words=5, staging_bytes=100)
    listener, found = Listener(tmp_path / "s"), {}

    def rank(number: int) -> None:
        found[number] = connect(tmp_path / "s", plan, number, 10)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    ours = listener.meet(plan, 3, order_wait_s=10, start_wait_s=10, failure=lambda: None)
    for thread in threads:
        thread.join(10)
    ours.steps.tell(3, words_of([1, 2]))
    ours.moves.tell(4)
    for theirs in found.values():
        assert (theirs.steps.next().words.tolist(), theirs.moves.next().kind) == ([1, 2], 4)
    np.frombuffer(ours.staging, dtype=np.uint8)[99] = 7
    assert all(np.frombuffer(theirs.staging, dtype=np.uint8)[99] == 7 for theirs in found.values())
    assert os.listdir(tmp_path) == ["s"]
    ours.close()
    for theirs in found.values():
        with pytest.raises(ReplicaGone):
            theirs.steps.next()


def test_a_rank_that_dies_while_it_connects_is_named_with_its_reason(tmp_path: Path) -> None:
    plan = ChannelPlan(step_words=10, move_words=5, staging_bytes=100)
    listener = Listener(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as torn:
        torn.connect(str(tmp_path / "s"))
        torn.send(b"\1\0\0")
    with pytest.raises(RankLost, match="rank 1 was killed"):
        listener.meet(plan, 2, order_wait_s=1, start_wait_s=5, failure=lambda: "rank 1 was killed")


@pytest.mark.parametrize(
    ("failure", "why"),
    [("out of memory", "out of memory"), (None, r"2 connections are missing after 0\.3 s")],
)
def test_ranks_that_do_not_start_are_not_waited_for(tmp_path: Path, failure: str | None, why: str) -> None:
    plan = ChannelPlan(step_words=10, move_words=5, staging_bytes=100)
    with pytest.raises(RankLost, match=why):
        Listener(tmp_path / "s").meet(plan, 2, order_wait_s=1, start_wait_s=0.3, failure=lambda: failure)
