"""Orders from rank 0 to the other ranks of a replica: a ring in shared memory, and a bell.

The bell is a Unix socket to each rank. A byte one way says that a message lies in the ring, a byte back that
it is done. So no rank polls, memory is ordered by system calls on every processor, and the kernel itself
tells at once when the other side has died, however it died: the socket is closed.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence

from samovar.replicas.ranks.ring import RingMessage, RingReader, RingShape, RingWriter, Words

_DRAIN = 4096


class RankLost(RuntimeError):
    """A rank of this replica has died or does not answer: the replica cannot go on."""


class ReplicaGone(RuntimeError):
    """Rank 0 has gone, so this rank must go."""


class Orders:
    """Rank 0's end of a channel: tells all ranks the same, in order. For one thread at a time.

    `bells`: a socket to each rank, from rank 1 on. `wait_s`: how long a rank may take to have room for an
    order.
    """

    def __init__(
        self,
        ring: RingWriter,
        shape: RingShape,
        bells: Sequence[socket.socket],
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = ring
        self._shape = shape
        self._bells = list(bells)
        self._wait_s = wait_s
        self._clock = clock
        self._done = [0] * len(bells)
        self._of_descriptor = {bell.fileno(): place for place, bell in enumerate(bells)}
        self._poll = _poll_of(bells, select.POLLIN)

    @property
    def told(self) -> int:
        """The number of the last order."""
        return self._ring.written

    def tell(self, kind: int, *parts: Words) -> int:
        """Tell every rank; return the order's number. Raises `RankLost`, `ValueError` if it is too long."""
        self._await(self.told + 1 - self._shape.slots, self._wait_s)
        number = self._ring.put(kind, parts)
        for place, bell in enumerate(self._bells):
            try:
                bell.send(b"\0", socket.MSG_NOSIGNAL)
            except OSError as error:
                raise RankLost(f"{self._named(place)} has died") from error
        return number

    def await_done(self, number: int, wait_s: float | None = None) -> None:
        """Wait until every rank has done this order and those before. Raises `RankLost`."""
        self._await(number, self._wait_s if wait_s is None else wait_s)

    def check(self) -> None:
        """Raise `RankLost` if a rank has died. Returns at once; for any thread."""
        for descriptor, _ in _poll_of(self._bells, 0).poll(0):  # a poll of its own: one is one thread's
            raise RankLost(f"{self._named(self._of_descriptor[descriptor])} has died")

    def close(self) -> None:
        """Close the sockets: the ranks then end."""
        for bell in self._bells:
            bell.close()

    def _await(self, number: int, wait_s: float) -> None:
        ends_s = self._clock() + wait_s
        self._drain(0)
        while min(self._done, default=number) < number:
            left_s = ends_s - self._clock()
            if left_s <= 0:
                slow = self._done.index(min(self._done))
                raise RankLost(
                    f"{self._named(slow)} has not done an order for {wait_s:g} s (engine.rank_wait_s)"
                )
            self._drain(left_s)

    def _drain(self, wait_s: float) -> None:
        """Count what the ranks say that they have done, and wait for more if they say nothing."""
        for descriptor, events in self._poll.poll(1000 * wait_s):
            place = self._of_descriptor[descriptor]
            said = self._bells[place].recv(_DRAIN, socket.MSG_DONTWAIT) if events & select.POLLIN else b""
            if not said:
                raise RankLost(f"{self._named(place)} has died")
            self._done[place] += len(said)

    def _named(self, place: int) -> str:
        return f"rank {place + 1} of {len(self._bells) + 1}"


def _poll_of(bells: Sequence[socket.socket], events: int) -> select.poll:
    poll = select.poll()
    for bell in bells:
        poll.register(bell, events | select.POLLRDHUP)
    return poll


class Obeyed:
    """A rank's end of a channel: takes the orders one after the other."""

    def __init__(self, ring: RingReader, bell: socket.socket) -> None:
        self._ring = ring
        self._bell = bell

    def next(self) -> RingMessage:
        """Wait for the next order. Raises `ReplicaGone` when rank 0 ends, `RingBroken`."""
        try:
            is_rung = self._bell.recv(1)
        except OSError as error:
            raise ReplicaGone("rank 0 has gone") from error
        if not is_rung:
            raise ReplicaGone("rank 0 has gone")
        return self._ring.take()

    def done(self) -> None:
        """Say that the last order is done. Raises `ReplicaGone`."""
        try:
            self._bell.send(b"\0", socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ReplicaGone("rank 0 has gone") from error

    def close(self) -> None:
        """Wake the thread that waits in `next`, which then raises `ReplicaGone`."""
        try:
            self._bell.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already
