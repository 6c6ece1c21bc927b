"""The engine's thread: whatever its callers do, everybody gets an answer and nobody takes it down."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.replicas.engine.engine import Engine
from samovar.replicas.engine.thread import STOPPED, EngineThread
from samovar.replicas.messages import Delta, Event, GenerateRequest, SamplingParams
from tests.support.engines.engines import prompt_of, small_engine


class Inbox:
    """Delivered events, in order."""

    def __init__(self) -> None:
        self._events: queue.Queue[tuple[int, Event]] = queue.Queue()

    def deliver(self, events: list[tuple[int, Event]]) -> None:
        assert events, "an empty delivery"
        for event in events:
            self._events.put(event)

    def until_over(self, key: int) -> Event:
        while True:
            got, event = self._events.get(timeout=60)
            is_end = event.finish_reason is not None if isinstance(event, Delta) else event == STOPPED
            if got == key and is_end:
                return event


def request(max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(
        "r", prompt_of(20), SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    )


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def thread(tiny_llama: Path, inbox: Inbox) -> Iterator[EngineThread]:
    thread = EngineThread(small_engine(tiny_llama).engine, inbox.deliver, idle_check_s=0.01)
    thread.start()
    yield thread
    thread.stop(30)


def test_serves_and_stays_healthy(thread: EngineThread, inbox: Inbox) -> None:
    for key in range(3):
        thread.submit(key, request())
        event = inbox.until_over(key)
        assert isinstance(event, Delta)
        assert event.finish_reason == "length"
    thread.check_health(60)
    thread.call(lambda engine: engine.check_integrity()).result(30)
    assert thread.integrity_failures == 0


def test_a_step_is_held_until_an_answer_arrives_or_its_time_is_up(
    thread: EngineThread, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = iter([0.01] * 4)
    monkeypatch.setattr(Engine, "hold_s", property(lambda _: next(holds, 0.0)))
    thread.submit(0, request())
    assert isinstance(inbox.until_over(0), Delta)
    assert next(holds, None) is None, "the thread has asked"
    monkeypatch.setattr(Engine, "hold_s", 600.0)
    monkeypatch.setattr(Engine, "has_arrivals", True)
    thread.submit(1, request())
    assert isinstance(inbox.until_over(1), Delta)


def test_a_caller_who_went_away_does_no_harm(thread: EngineThread, inbox: Inbox) -> None:
    """A client that hangs up on /metrics cancels the future that the engine is about to answer."""
    gate = thread.call(lambda engine: engine.stats())
    futures = [thread.call(lambda engine: engine.stats()) for _ in range(50)]
    for future in futures:
        future.cancel()
    gate.result(30)
    thread.submit(1, request())
    assert isinstance(inbox.until_over(1), Delta)
    thread.check_health(60)


def test_a_fault_in_a_call_is_the_callers(thread: EngineThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(30)
    thread.check_health(60)


def test_a_failed_step_is_told_to_all_and_to_the_health_check(
    tiny_llama: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_llama).engine

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.runner, "run", broken)
    thread = EngineThread(engine, inbox.deliver, idle_check_s=0.01)
    thread.start()
    thread.submit(1, request())
    assert inbox.until_over(1) == STOPPED
    thread.submit(2, request())
    assert inbox.until_over(2) == STOPPED
    with pytest.raises(RuntimeError, match="planted"):
        thread.check_health(60)
    thread.stop(30)


def test_wrong_books_stop_the_replica(tiny_llama: Path, inbox: Inbox) -> None:
    engine = small_engine(tiny_llama).engine
    thread = EngineThread(engine, inbox.deliver, idle_check_s=0.0)
    thread.start()
    thread.call(lambda e: e.scheduler.pool.allocate()).result(30)  # a page that nobody will give back
    for key in range(1000):  # the books are checked when nobody has called between two requests
        thread.submit(key, request(max_tokens=1))
        if inbox.until_over(key) == STOPPED:
            break
    with pytest.raises(RuntimeError, match="page tables"):
        thread.check_health(60)
    assert thread.integrity_failures == 1
    thread.stop(30)


def test_stop_answers_what_is_open_and_what_comes_later(thread: EngineThread, inbox: Inbox) -> None:
    thread.submit(1, request(max_tokens=3000))
    thread.stop(30)
    assert inbox.until_over(1) == STOPPED
    thread.submit(2, request())
    assert inbox.until_over(2) == STOPPED
    assert thread.call(lambda engine: engine.stats().steps).result(30) >= 0


def test_stop_without_a_request(tiny_llama: Path, inbox: Inbox) -> None:
    thread = EngineThread(small_engine(tiny_llama).engine, inbox.deliver, idle_check_s=1.0)
    thread.start()
    thread.stop(30)
    assert thread._failure is None
