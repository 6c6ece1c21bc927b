"""What a replica keeps of named answers: bounded in bytes, answers and seconds, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers.blocks import TAG_BYTES
from configs.optional_sections import AnswerSettings
from replicas.answers import KeptAnswers, KeptLog
from replicas.messages import (
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

SETTINGS = AnswerSettings(kept_s=10, unread_s=5, answers_max=4, unread_per_tenant_max=2, bytes_max=64 * 1024)
TOKEN = TokenLogprob(3, "\ud83d", b"\xf0", -0.5, (TokenLogprob(4, "é", b"\xc3\xa9", -1.5),), 1)
ADMITTED = Admitted("r1", 5, 0.25, Receipt({"cpu": 3}, "load"), (TOKEN,))


@dataclass
class Heard:
    """A reader that notes what it is told."""

    events: list[Event] = field(default_factory=list)

    def put(self, event: Event) -> None:
        self.events.append(event)


def asked(name: int, tenant: int = 0, *, n: int = 1, before: tuple[Event, ...] = ()) -> GenerateRequest:
    keep = Keep(bytes([name]) * 16, b"body", 7, before=before)
    tags = {"tenant": bytes([tenant]) * TAG_BYTES, "session": bytes([name]) * TAG_BYTES}
    return GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=9), n, keep=keep, **tags)  # type: ignore[arg-type]


class Book(KeptAnswers):
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
            book.attach(log, second)
        book.put(log, event)
        book.check_integrity()
    assert log.is_over
    book.attach(log, third)
    assert first.events == second.events == third.events == said
    told = log.told("r1")
    assert (told.body, told.created, told.is_over) == (b"body", 7, True)


def test_what_another_replica_said_comes_before_but_not_to_who_has_it() -> None:
    book, reader, late = Book(), Heard(), Heard()
    before: tuple[Event, ...] = (ADMITTED, Delta(0, "a", (1,)))
    log = book.begin(1, asked(1, before=before), reader)
    book.put(log, Delta(0, "b", (2,), (), "stop"))
    assert reader.events == [Delta(0, "b", (2,), (), "stop")]
    book.attach(log, late)
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
        book.attach(log, back, said[:has])
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


@given(st.lists(st.tuples(st.sampled_from("bdpafstx"), st.integers(0, 7), st.integers(0, 9)), max_size=60))
@settings(max_examples=examples(300))
def test_the_bounds_hold_in_any_history(steps: list[tuple[str, int, int]]) -> None:
    book, key = Book(), 0
    logs: dict[int, tuple[KeptLog, list[Heard]]] = {}
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
                book.attach(log, readers[-1])
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
