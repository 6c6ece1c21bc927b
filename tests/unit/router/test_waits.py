"""Waits that one timer bounds end as those of `asyncio.timeout` do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from samovar.router.generation.response_sender import BoundedWaits

LONG_S = 60.0
SHORT_S = 0.01


@contextmanager
def timers(loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The times for which timers are set meanwhile."""
    seen: list[float] = []
    call_at = loop.call_at

    def noted(when: float, callback: Callable[..., object], *args: Any, **more: Any) -> asyncio.TimerHandle:
        seen.append(when)
        return call_at(when, callback, *args, **more)

    monkeypatch.setattr(loop, "call_at", noted)
    yield seen


async def test_a_wait_returns_or_raises_what_its_awaitable_does() -> None:
    async def failing() -> None:
        raise LookupError("its own")

    with closing(BoundedWaits()) as waits:
        assert await waits.wait(asyncio.sleep(0, "given"), LONG_S) == "given"
        with pytest.raises(LookupError, match="its own"):
            await waits.wait(failing(), LONG_S)


async def test_a_long_wait_times_out_and_the_next_one_is_as_usual() -> None:
    task = asyncio.current_task()
    assert task is not None
    with closing(BoundedWaits()) as waits:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await waits.wait(asyncio.Event().wait(), SHORT_S)
            assert task.cancelling() == 0
            assert await waits.wait(asyncio.sleep(0, "given"), LONG_S) == "given"


async def test_a_wait_counts_from_its_own_beginning() -> None:
    """The timer of the waits before it finds one that has time left."""
    loop = asyncio.get_running_loop()
    with closing(BoundedWaits()) as waits:
        began_s = loop.time()
        await waits.wait(asyncio.sleep(0.03), 0.05)
        assert await waits.wait(asyncio.sleep(0.04, "given"), LONG_S) == "given"
        with pytest.raises(TimeoutError):
            await waits.wait(asyncio.Event().wait(), 0.05)
        assert loop.time() - began_s >= 0.03 + 0.04 + 0.05 - 0.001


async def test_between_waits_nothing_is_cancelled() -> None:
    with closing(BoundedWaits()) as waits:
        await waits.wait(asyncio.sleep(0), SHORT_S)
        await asyncio.sleep(5 * SHORT_S)
        assert await waits.wait(asyncio.sleep(0, "given"), LONG_S) == "given"


async def test_a_shorter_wait_does_not_wait_for_the_timer_of_a_longer_one() -> None:
    with closing(BoundedWaits()) as waits:
        await waits.wait(asyncio.sleep(0), LONG_S)
        async with asyncio.timeout(LONG_S / 2):
            with pytest.raises(TimeoutError):
                await waits.wait(asyncio.Event().wait(), SHORT_S)


async def test_thousands_of_waits_set_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def soon() -> None:
        await asyncio.sleep(0)

    with timers(asyncio.get_running_loop(), monkeypatch) as seen, closing(BoundedWaits()) as waits:
        for _ in range(1000):
            await waits.wait(soon(), LONG_S)
        assert len(seen) == 1


async def test_who_waits_can_be_cancelled() -> None:
    waits = BoundedWaits()
    task = asyncio.create_task(waits.wait(asyncio.Event().wait(), LONG_S))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    waits.close()


async def test_a_cancellation_is_not_taken_for_a_timeout_that_comes_with_it() -> None:
    waits = BoundedWaits()

    async def cancelled_late(task: Callable[[], asyncio.Task[Any]]) -> None:
        try:
            await asyncio.Event().wait()
        finally:  # the time is over, and now somebody wants to end the task, too
            task().cancel()

    def wait() -> Awaitable[None]:
        return waits.wait(cancelled_late(lambda: task), SHORT_S)

    async def run() -> None:
        await wait()

    task = asyncio.create_task(run())
    with pytest.raises(asyncio.CancelledError):
        await task
    waits.close()


async def test_a_closed_one_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = BoundedWaits()
    await waits.wait(asyncio.sleep(0), LONG_S)
    timer = waits._timer
    assert timer is not None
    waits.close()
    assert timer.cancelled()
