"""What a replica keeps of answers that their clients have named: every event, as it was said. Pure.

A kept answer goes on without a reader, for a bounded time, and any ingress may read it from its first
event on. What is kept is bounded in answers, bytes and seconds; it is dropped with its session.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Protocol

import msgpack

from samovar.cache_tiers.blocks import TAG_BYTES, session_owner
from samovar.configs.optional_sections import AnswerSettings
from samovar.replicas.links import pack_event, whole_bytes
from samovar.replicas.messages import Delta, Event, Failed, GenerateRequest, LoggedAnswer, Refused

ANSWER_BYTES = 2048
"""What an answer takes beside its events and its prompt."""
PIECE_BYTES = 1 << 13
"""What was said is told again in pieces: all readers of an ingress wait while one is written."""

Name = tuple[bytes, bytes]
"""The tenant's tag, and `Keep.ref`."""


class Reader(Protocol):
    """What events are told to."""

    def put(self, event: Event) -> None: ...

    def put_packed(self, piece: bytes) -> None:
        """Take several events, packed one behind the other."""

    def caught_up(self, choices_open: int) -> None:
        """Note that the packed ones were all so far, and how many choices go on."""


class AnswerLog:
    """The events of one answer and who reads them. `key`: of its request in the engine."""

    def __init__(self, key: int, request: GenerateRequest, now_s: float) -> None:
        assert request.keep is not None, "an answer without a name"
        self.key = key
        self.keep = request.keep
        self.name: Name = (request.tenant, request.keep.ref)
        self.owner = request.tenant + request.session
        self.readers: list[Reader] = []
        self.followers = 0  # readers that are still told what was said before they came
        self.is_over = False
        self.is_kept = True
        self.since_s = now_s  # when its last reader left, or when it was over
        self.choices_open = request.n
        self._prompt = array("I", request.prompt_token_ids).tobytes()
        self._packed = bytearray()
        for event in request.keep.before:
            self._add(event)

    @property
    def nbytes(self) -> int:
        """What it takes in memory, about."""
        return ANSWER_BYTES + len(self._prompt) + len(self._packed)

    @property
    def is_read(self) -> bool:
        """Whether it has a reader now."""
        return bool(self.readers) or self.followers > 0

    @property
    def has_failed(self) -> bool:
        """Whether it ended without its answers' ends: it is of no use."""
        return self.is_over and self.choices_open > 0

    def told(self, replica_id: str) -> LoggedAnswer:
        """Return what an ingress has to know to read it."""
        return LoggedAnswer(replica_id, self.keep.body, self.keep.created, self._prompt, is_over=self.is_over)

    def begins_with(self, said: Sequence[Event]) -> bool:
        """Return whether these were its first events: to who has them, the rest may be told."""
        return self._packed.startswith(b"".join(map(_packed, said)))

    def pieces(self, has: Sequence[Event]) -> Iterator[bytes]:
        """Yield whole events, packed, without those that the reader `has`; also those that come meanwhile."""
        begin = sum(len(_packed(event)) for event in has)
        while begin < len(self._packed):
            piece = self._piece(begin)
            begin += len(piece)
            yield piece

    def _piece(self, begin: int) -> bytes:
        """Return about `PIECE_BYTES` of whole events, at least one."""
        size = PIECE_BYTES
        while True:
            data = bytes(self._packed[begin : begin + size])
            if whole := whole_bytes(data):
                return data[:whole]
            size *= 2

    def put(self, event: Event) -> None:
        """Note an event and tell it to the readers."""
        if self.is_kept or self.followers:
            self._add(event)
        elif isinstance(event, Delta):
            self.choices_open -= event.finish_reason is not None
        self.is_over = self.choices_open <= 0 or isinstance(event, Refused | Failed)
        for reader in self.readers:
            reader.put(event)

    def drop(self) -> None:
        """Keep no events any more; those who read go on, to the end of what they are still to be told."""
        self.is_kept = False
        if not self.followers:
            self._packed.clear()

    def _add(self, event: Event) -> None:
        self._packed += _packed(event)
        if isinstance(event, Delta):
            self.choices_open -= event.finish_reason is not None


def _packed(event: Event) -> bytes:
    packed: bytes = msgpack.packb(pack_event(event), unicode_errors="surrogatepass")
    return packed


class AnswerLogs:
    """The kept answers of a replica, by tenant and name.

    `abort`: called with the engine's key of an answer that is to be computed no further. Nothing happens by
    itself: call `sweep` when `due_in_s` has passed.
    """

    def __init__(
        self, settings: AnswerSettings, abort: Callable[[int], None], clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._abort = abort
        self._clock = clock
        self._logs: dict[Name, AnswerLog] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._logs)

    @property
    def nbytes(self) -> int:
        """What all of them take in memory, about."""
        return self._nbytes

    def find(self, tenant: bytes, ref: bytes) -> AnswerLog | None:
        """Return the answer that a tenant's client has named so, if it is kept."""
        self.sweep()
        return self._logs.get((tenant, ref))

    def begin(self, key: int, request: GenerateRequest, reader: Reader) -> AnswerLog:
        """Return the log of a new answer, of a name that is not taken. It may be dropped for want of room.

        `reader`: it knows of the answer what came `before`.
        """
        self.sweep()
        log = AnswerLog(key, request, self._clock())
        log.readers.append(reader)
        assert log.name not in self._logs, "two answers of one name"
        self._logs[log.name] = log
        self._nbytes += log.nbytes
        self._make_room()
        return log

    def attach(self, log: AnswerLog, reader: Reader, has: Sequence[Event] = ()) -> Generator[None]:
        """Tell a reader the events so far, a piece with each step, and then have it told those that come.

        `has`: the first ones, which it has. Close it if the reader leaves before. An answer that is dropped
        meanwhile is told to its end.
        """
        assert log.begins_with(has), "the reader has read another answer"
        log.followers += 1
        try:
            for piece in log.pieces(has):
                reader.put_packed(piece)
                yield
            reader.caught_up(0 if log.is_over else log.choices_open)
            if not log.is_over:
                log.readers.append(reader)
        finally:
            log.followers -= 1
            if not log.is_kept:
                log.drop()
            self._left(log)

    def detach(self, log: AnswerLog, reader: Reader) -> None:
        """Let a reader go. An answer without readers goes on for `unread_s`, if it is kept."""
        if reader in log.readers:
            log.readers.remove(reader)
        self._left(log)

    def _left(self, log: AnswerLog) -> None:
        """Decide what becomes of an answer when one of its readers may have been the last."""
        if log.is_read or log.is_over:
            return
        log.since_s = self._clock()
        if not log.is_kept:
            self._abort(log.key)
            return
        unread = [one for one in self._unread() if one.name[0] == log.name[0]]
        for one in unread[: max(0, len(unread) - self._settings.unread_per_tenant_max)]:
            self._drop(one)

    def put(self, log: AnswerLog, event: Event) -> None:
        """Note an event of an answer and tell it to its readers."""
        before = log.nbytes
        log.put(event)
        if log.is_kept:
            self._nbytes += log.nbytes - before
        if log.is_over:
            log.readers.clear()
            log.since_s = self._clock()
            if log.has_failed:
                self._drop(log)
        self._make_room()

    def forget(self, tags: Collection[bytes]) -> int:
        """Drop the answers of these owners, sessions or tenants; return their number."""
        gone = [
            log
            for log in self._logs.values()
            if not {log.owner, session_owner(log.owner), log.owner[:TAG_BYTES]}.isdisjoint(tags)
        ]
        for log in gone:
            self._drop(log)
        return len(gone)

    @property
    def due_in_s(self) -> float | None:
        """How long until `sweep` finds something to drop; None: nothing is due."""
        dues = [due_s for log in self._logs.values() if (due_s := self._due_s(log)) is not None]
        return max(0.0, min(dues) - self._clock()) if dues else None

    def sweep(self) -> None:
        """Drop what has been kept, or has gone unread, for too long."""
        now_s = self._clock()
        for log in list(self._logs.values()):
            due_s = self._due_s(log)
            if due_s is not None and due_s <= now_s:
                self._drop(log)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        settings = self._settings
        assert len(self._logs) <= settings.answers_max, "too many answers are kept"
        assert self._nbytes == sum(log.nbytes for log in self._logs.values()), "the bytes are wrong"
        assert self._nbytes <= settings.bytes_max, "kept answers take too much"
        assert all(log.is_kept and log.name == name for name, log in self._logs.items()), "a wrong name"
        assert not any(log.readers for log in self._logs.values() if log.is_over), "an end is read on"
        assert all(log.followers >= 0 for log in self._logs.values()), "more have left than came"
        unread: dict[bytes, int] = {}
        for log in self._unread():
            unread[log.name[0]] = unread.get(log.name[0], 0) + 1
        assert max(unread.values(), default=0) <= settings.unread_per_tenant_max, "too many go on unread"

    def _unread(self) -> list[AnswerLog]:
        """Return the answers that are computed without a reader now, the longest so first."""
        found = [log for log in self._logs.values() if not log.is_over and not log.is_read]
        return sorted(found, key=lambda log: log.since_s)

    def _due_s(self, log: AnswerLog) -> float | None:
        if log.is_read:
            return None
        return log.since_s + (self._settings.kept_s if log.is_over else self._settings.unread_s)

    def _make_room(self) -> None:
        """Drop answers until the bounds hold, of the tenant that has most of what is short."""
        settings = self._settings
        while (is_large := self._nbytes > settings.bytes_max) or len(self._logs) > settings.answers_max:
            taken: Counter[bytes] = Counter()
            for log in self._logs.values():
                taken[log.name[0]] += log.nbytes if is_large else 1
            tenant = max(taken, key=taken.__getitem__)
            self._drop(_first_to_go([log for log in self._logs.values() if log.name[0] == tenant]))

    def _drop(self, log: AnswerLog) -> None:
        if log.is_kept:
            del self._logs[log.name]
            self._nbytes -= log.nbytes
            log.drop()
        if not log.is_over and not log.is_read:
            self._abort(log.key)


def _first_to_go(logs: Sequence[AnswerLog]) -> AnswerLog:
    """Return which of a tenant's answers gives way: of those that are over and unread the oldest.

    Then the largest; last one that is told again, since that takes its memory until it is told.
    """
    over = [log for log in logs if log.is_over and not log.is_read]
    if over:
        return min(over, key=lambda log: log.since_s)
    return max(logs, key=lambda log: (not log.followers, log.nbytes))


class Timer(Protocol):
    """What `call_later` of an event loop returns."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class SweepTimer:
    """Sweeps kept answers in time. `call_later`: of an event loop; `clock`: seconds, as the answers have it.

    An answer that is due before all others moves the timer forward.
    """

    def __init__(self, kept: AnswerLogs, call_later: CallLater, clock: Callable[[], float]) -> None:
        self._kept = kept
        self._call_later = call_later
        self._clock = clock
        self._timer: Timer | None = None
        self._at_s = 0.0

    def set(self) -> None:
        """Set the timer again; call it when an answer has ended or its last reader has left."""
        due_in_s = self._kept.due_in_s
        if due_in_s is None:
            return
        at_s = self._clock() + due_in_s
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._call_later(due_in_s, self._sweep)

    def stop(self) -> None:
        """Sweep no more by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        self._kept.sweep()
        self.set()
