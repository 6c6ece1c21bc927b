"""Sealed records waiting in a replica until the node's tier actor calls for them.

The actor calls (rather than the replica puts) because in Ray the caller owns the result: the record then
survives the replica.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from samovar.cache_tiers.blocks import Bytes, TierError


@dataclass(frozen=True, slots=True)
class _Staged:
    record: Bytes
    until_s: float


class StagingBuffer:
    """Holds at most `bytes_max` bytes of records, each for at most `keep_s` seconds of `clock`.

    A ticket not taken within `keep_s` expires, at the next call. Thread-safe. `freed` is called when a
    record has left.
    """

    def __init__(self, bytes_max: int, *, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.freed: Callable[[], None] = lambda: None
        self._bytes_max = bytes_max
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._staged: OrderedDict[int, _Staged] = OrderedDict()  # in order of `until_s`
        self._nbytes = 0
        self._tickets = itertools.count(1)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the waiting records."""
        with self._current():
            return self._nbytes

    def __len__(self) -> int:
        with self._current():
            return len(self._staged)

    def put(self, record: Bytes) -> int | None:
        """Return a ticket for `record`, or None if there is no room.

        `record` must not be written to afterwards.
        """
        with self._current():
            if self._nbytes + record.nbytes > self._bytes_max:
                return None
            ticket = next(self._tickets)
            self._staged[ticket] = _Staged(record, self._clock() + self._keep_s)
            self._nbytes += record.nbytes
            return ticket

    def take(self, ticket: int) -> Bytes:
        """Remove and return the record. Raises `TierError` if it is gone."""
        with self._current():
            if ticket not in self._staged:
                raise TierError(f"no record under ticket {ticket} (taken, dropped or expired)")
            record = self._remove(ticket)
        self.freed()
        return record

    def drop(self, ticket: int) -> None:
        """Discard the record; no effect if it is gone already."""
        with self._lock:
            if ticket in self._staged:
                self._remove(ticket)
        self.freed()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the accounting is inconsistent."""
        with self._lock:
            held = sum(staged.record.nbytes for staged in self._staged.values())
            assert self._nbytes == held, f"{self._nbytes} bytes accounted, {held} held"
            assert self._nbytes <= self._bytes_max, f"{self._nbytes} bytes staged, {self._bytes_max} allowed"

    def _remove(self, ticket: int) -> Bytes:
        record = self._staged.pop(ticket).record
        self._nbytes -= record.nbytes
        return record

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Hold the lock, with nothing that has expired; tell of that afterwards."""
        has_expired = False
        try:
            with self._lock:
                has_expired = self._expire()
                yield
        finally:
            if has_expired:
                self.freed()

    def _expire(self) -> bool:
        now_s, count = self._clock(), len(self._staged)
        while self._staged:
            ticket, oldest = next(iter(self._staged.items()))
            if oldest.until_s > now_s:
                break
            self._remove(ticket)
        return len(self._staged) < count


_of_process: list[StagingBuffer] = []


def open_outbox(outbox: StagingBuffer) -> None:
    """Make `hand_over` serve from `outbox` from now on; one per process."""
    _of_process[:] = [outbox]


def hand_over(_replica: object, ticket: int) -> Bytes:
    """Take a record in the replica's process, called by the tier actor (`replica.__ray_call__`).

    `_replica`: the actor instance that Ray passes; unused. Raises `TierError`.
    """
    if not _of_process:
        raise TierError("this process stages no records")
    return _of_process[0].take(ticket)
