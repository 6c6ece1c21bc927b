"""What a replica keeps of named answers: bounded in bytes, answers and seconds, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.configs.optional_sections import AnswerSettings
from samovar.replicas.answers import AnswerLog, AnswerLogs, SweepTimer
from samovar.replicas.answers.answer_log import PIECE_BYTES
from samovar.replicas.links import said_events
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    GenerateRequest,
    Keep,
    Receipt,
    SamplingParams,
    TokenLogprob,
)
from tests.support.amounts import examples
from tests.support.clock import Clock
from tests.support.constants import tuned

SETTINGS = tuned(
    AnswerSettings(kept_s=10, unread_s=5, answers_max=4, bytes_max=64 * 1024), unread_per_tenant_max=2
)
TOKEN = TokenLogprob(3, "\ud83d", b"\xf0", -0.5, (TokenLogprob(4, "é", b"\xc3\xa9", -1.5),), 1)
ADMITTED = Admitted("r1", 5, 0.25, Receipt({"cpu": 3}, "load"), (TOKEN,))


@dataclass
class Heard:
    """A reader that notes what it is told."""

    events: list[Event] = field(default_factory=list)

    choices_open: int = -1
    pieces: list[int] = field(default_factory=list)

    def put(self, event: Event) -> None:
        self.events.append(event)

    def put_packed(self, piece: bytes) -> None:
        self.pieces.append(len(piece))
        self.events += said_events([piece])

    def caught_up(self, choices_open: int) -> None:
        self.choices_open = choices_open


def tell(book: AnswerLogs, log: AnswerLog, reader: Heard, has: tuple[Event, ...] = ()) -> None:
    """Attach a reader that reads as fast as it is told."""
    for _ in book.attach(log, reader, has):
        book.check_integrity()


def asked(name: int, tenant: int = 0, *, n: int = 1, before: tuple[Event, ...] = ()) -> GenerateRequest:
    keep = Keep(bytes([name]) * 16, b"body", 7, before=before)
    tags = {"tenant": bytes([tenant]) * TAG_BYTES, "session": bytes([name]) * TAG_BYTES}
    return GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=9), n, keep=keep, **tags)  # type: ignore[arg-type]


class Book(AnswerLogs):
    """With what it has aborted."""

    def __init__(self, settings: AnswerSettings = SETTINGS) -> None:
        self.aborted: list[int] = []
        self.clock = Clock()
        super().__init__(settings, self.aborted.append, self.clock)


def test_a_reader_hears_every_event_as_it_was_said_whenever_it_comes() -> None:
    book, first, second, third = Book(), Heard(), Heard(), Heard()
    log = book.begin(1, asked(1, n=2), first)
    said: list[Event] = [
        ADMITTED,
        Delta(0, "naïve \u2028", (7, 8), (TOKEN,)),
        Delta(0, "", (9,)),
        Delta(1, "b", (4,), (), "stop"),
        Delta(0, "c", (5,), (), "length"),
    ]
    for place, event in enumerate(said):
        if place == 2:
            tell(book, log, second)
        book.put(log, event)
        book.check_integrity()
    assert log.is_over
    tell(book, log, third)
    assert first.events == second.events == third.events == said
    told = log.told("r1")
    assert (told.body, told.created, told.is_over) == (b"body", 7, True)


def test_what_another_replica_said_comes_before_but_not_to_who_has_it() -> None:
    book, reader, late = Book(), Heard(), Heard()
    before: tuple[Event, ...] = (ADMITTED, Delta(0, "a", (1,)))
    log = book.begin(1, asked(1, before=before), reader)
    book.put(log, Delta(0, "b", (2,), (), "stop"))
    assert reader.events == [Delta(0, "b", (2,), (), "stop")]
    tell(book, log, late)
    assert late.events == [*before, *reader.events]


def test_who_has_its_begin_hears_the_rest() -> None:
    book, first = Book(), Heard()
    log = book.begin(1, asked(1), first)
    said: tuple[Event, ...] = (ADMITTED, Delta(0, "a", (1,), (TOKEN,)), Delta(0, "b", (2,)))
    for event in said:
        book.put(log, event)
    for has in range(len(said) + 1):
        assert log.begins_with(said[:has])
        back = Heard()
        tell(book, log, back, said[:has])
        assert back.events == list(said[has:])
        book.detach(log, back)
    assert not log.begins_with((ADMITTED, Delta(0, "another", (1,), (TOKEN,))))
    assert not log.begins_with((*said, Delta(0, "c", (3,))))


def test_an_answer_that_fails_is_not_kept() -> None:
    book, reader = Book(), Heard()
    request = asked(1)
    log = book.begin(1, request, reader)
    book.put(log, Failed("gone", replica_lost=True))
    assert reader.events == [Failed("gone", replica_lost=True)]
    assert book.find(request.tenant, bytes([1]) * 16) is None
    assert not book.aborted, "the engine has ended it"
    book.check_integrity()


def test_who_reads_behind_an_answer_that_fails_meanwhile_hears_its_end() -> None:
    book, first, late = Book(), Heard(), Heard()
    log = book.begin(1, asked(1), first)
    book.put(log, Delta(0, "x" * 2 * PIECE_BYTES, (1,)))
    book.put(log, Delta(0, "y", (2,)))
    telling = book.attach(log, late, ())
    next(telling)
    book.put(log, Failed("gone"))
    for _ in telling:
        book.check_integrity()
    assert late.events[-1] == Failed("gone")
    assert late.choices_open == 0, "its call would stay open for ever"
    book.check_integrity()


def test_one_larger_than_the_bound_goes_on_for_its_reader_alone() -> None:
    book, reader = Book(), Heard()
    request = asked(1)
    log = book.begin(1, request, reader)
    for _ in range(3):
        book.put(log, Delta(0, "x" * 30_000, (1,)))
        book.check_integrity()
    assert len(reader.events) == 3
    assert book.find(request.tenant, bytes([1]) * 16) is None
    assert not book.aborted
    book.detach(log, reader)
    assert book.aborted == [1]


def test_a_new_answer_of_a_dropped_ones_name_is_another() -> None:
    book, first, second = Book(), Heard(), Heard()
    old = book.begin(1, asked(1), first)
    assert book.forget({bytes(TAG_BYTES)}) == 1
    new = book.begin(2, asked(1), second)
    book.put(old, Failed("gone"))
    book.check_integrity()
    assert new.is_kept
    assert len(book) == 1
    assert second.events == []


@pytest.mark.parametrize("tags", [{bytes(16)}, {bytes(16) + bytes([1]) * 16}])
def test_what_is_erased_is_computed_no_further_unless_somebody_reads_it(tags: set[bytes]) -> None:
    book, reader, gone = Book(), Heard(), Heard()
    book.begin(1, asked(1), reader)
    book.begin(2, asked(1, tenant=1), reader)
    unread = book.begin(3, asked(2), gone)
    book.detach(unread, gone)
    assert book.forget(tags | {bytes(16) + bytes([2]) * 16}) == 2
    assert book.aborted == [3]
    assert len(book) == 1
    book.check_integrity()


def kept_whole(book: Book, key: int, tenant: int, texts: int = 1, size: int = 10) -> AnswerLog:
    """Return the log of an answer that is over, of so many deltas."""
    log = book.begin(key, asked(key, tenant), Heard())
    for number in range(texts):
        book.put(log, Delta(0, "x" * size, (number,)))
    book.put(log, Delta(0, "", (), (), "stop"))
    return log


def test_a_large_answer_is_told_again_in_pieces_that_its_reader_asks_for() -> None:
    book, reader = Book(), Heard()
    log = kept_whole(book, 1, 0, texts=1000)
    telling = book.attach(log, reader)
    for told, _ in enumerate(telling, 1):
        assert len(reader.pieces) == told, "the next piece came before it was asked for"
    assert len(reader.pieces) > 2
    assert max(reader.pieces) <= PIECE_BYTES
    assert [event.token_ids for event in reader.events] == [*((number,) for number in range(1000)), ()]  # type: ignore[union-attr]
    assert reader.choices_open == 0


def test_one_event_larger_than_a_piece_is_told_whole() -> None:
    book, reader = Book(), Heard()
    tell(book, kept_whole(book, 1, 0, texts=2, size=3 * PIECE_BYTES), reader)
    assert [len(event.text) for event in reader.events] == [3 * PIECE_BYTES, 3 * PIECE_BYTES, 0]  # type: ignore[union-attr]


def test_what_is_said_while_it_is_told_again_comes_behind() -> None:
    book, reader = Book(), Heard()
    log = book.begin(1, asked(1), Heard())
    said = [Delta(0, "x" * 100, (number,)) for number in range(200)]
    for event in said:
        book.put(log, event)
    for number, _ in enumerate(book.attach(log, reader)):
        if number < 2:
            said.append(Delta(0, "meanwhile", (number,)))
            book.put(log, said[-1])
    said.append(Delta(0, "c", (3,), (), "stop"))
    book.put(log, said[-1])
    assert reader.events == said


@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_dropped_while_it_is_told_again_is_told_to_its_end(is_over: bool) -> None:
    book, first, reader = Book(), Heard(), Heard()
    log = book.begin(1, asked(1), first)
    said: list[Event] = [Delta(0, "x" * 100, (number,)) for number in range(200)]
    said += [Delta(0, "", (), (), "stop")] if is_over else []
    for event in said:
        book.put(log, event)
    telling = book.attach(log, reader)
    next(telling)
    assert book.forget({bytes(TAG_BYTES)}) == 1
    assert book.nbytes == 0
    if not is_over:
        book.detach(log, first)
        assert not book.aborted, "somebody is told it"
        said.append(Delta(0, "later", (7,)))
        book.put(log, said[-1])
    for _ in telling:
        pass
    assert reader.events == said
    assert log.nbytes < PIECE_BYTES, "what was dropped is still there"
    if not is_over:
        book.detach(log, reader)
        assert book.aborted == [1]
    book.check_integrity()


def test_an_answer_that_is_told_again_is_not_due_before_its_reader_has_left() -> None:
    book = Book()
    log = kept_whole(book, 1, 0, texts=1000)
    telling = book.attach(log, Heard())
    next(telling)
    book.clock.now_s += 11
    book.sweep()
    assert len(book) == 1
    telling.close()
    book.sweep()
    assert len(book) == 0


def test_one_tenants_answers_take_no_room_of_anothers() -> None:
    book = Book()
    small = kept_whole(book, 1, 1)
    for key in range(2, 5):
        kept_whole(book, key, 0, texts=20, size=1000)  # 60 KB of 64
    kept_whole(book, 5, 0, texts=20, size=1000)
    assert small.is_kept
    kept_whole(book, 6, 1)
    kept_whole(book, 7, 1)  # by number now: the first has two, the second three
    assert not small.is_kept
    assert sum(log.name[0] == bytes(TAG_BYTES) for log in book._logs.values()) == 2
    book.check_integrity()


class Timers:
    """A `call_later` that a test runs by hand."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, delay_s: float, call: Callable[[], None]) -> Timers.Entry:
        entry = Timers.Entry(self, (self._clock() + delay_s, call))
        self.waiting.append(entry.what)
        return entry

    def run(self) -> None:
        at_s, call = min(self.waiting, key=lambda one: one[0])
        self.waiting.remove((at_s, call))
        self._clock.now_s = max(self._clock.now_s, at_s)
        call()

    @dataclass
    class Entry:
        timers: Timers
        what: tuple[float, Callable[[], None]]

        def cancel(self) -> None:
            self.timers.waiting.remove(self.what)


def test_the_timer_moves_forward_for_an_answer_that_is_due_before_the_others() -> None:
    book = Book(AnswerSettings(kept_s=100, unread_s=5, answers_max=4))
    timers = Timers(book.clock)
    sweeps = SweepTimer(book, timers, book.clock)
    sweeps.set()
    assert not timers.waiting
    kept_whole(book, 1, 0)
    sweeps.set()
    begun_s = book.clock.now_s
    assert [at_s - begun_s for at_s, _ in timers.waiting] == [100]
    reader = Heard()
    unread = book.begin(2, asked(2), reader)
    book.detach(unread, reader)
    sweeps.set()
    assert [at_s - begun_s for at_s, _ in timers.waiting] == [5]
    timers.run()
    assert book.aborted == [2]
    assert [at_s - begun_s for at_s, _ in timers.waiting] == [100]
    timers.run()
    assert len(book) == 0
    assert not timers.waiting


@given(st.lists(st.tuples(st.sampled_from("bdpafstx"), st.integers(0, 7), st.integers(0, 9)), max_size=60))
@settings(max_examples=examples(300))
def test_the_bounds_hold_in_any_history(steps: list[tuple[str, int, int]]) -> None:
    book, key = Book(), 0
    logs: dict[int, tuple[AnswerLog, list[Heard]]] = {}
    for step, name, size in steps:
        request: Any = asked(name, tenant=name % 2)
        found = logs.get(name)
        if step == "b" and book.find(request.tenant, request.keep.ref) is None:
            reader = Heard()
            key += 1
            logs[name] = (book.begin(key, request, reader), [reader])
        elif step in "dpaf" and found is not None and not found[0].is_over:
            log, readers = found
            if step == "d" and readers:
                book.detach(log, readers.pop())
            elif step == "a" and log.is_kept:
                readers.append(Heard())
                tell(book, log, readers[-1])
            elif step == "p" and log.key not in book.aborted:
                book.put(log, Delta(0, "x" * 4000 * size, (1,)))
            elif step == "f" and log.key not in book.aborted:
                book.put(log, Delta(0, "", (1,), (), "stop"))
        elif step == "s":
            book.clock.now_s += size
            book.sweep()
        elif step == "t":
            book.forget({request.tenant})
        elif step == "x":
            due_in_s = book.due_in_s
            if due_in_s is not None:
                kept = len(book)
                book.clock.now_s += due_in_s
                book.sweep()
                assert len(book) < kept, "nothing was due"
        book.check_integrity()
        for log, readers in logs.values():
            is_computed = not log.is_over and log.key not in book.aborted
            assert is_computed or log.is_over or not log.is_kept
            assert not is_computed or log.is_kept or readers, "computed for nobody"
