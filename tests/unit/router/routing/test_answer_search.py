"""The search for a kept answer: the first that is found ends it, and who hangs is waited for once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from samovar.replicas.messages import LoggedAnswer
from samovar.router.routing.ray_clients import SILENT_S, AnswerSearch, Told
from tests.support.clock import Clock

FOREVER_S = 600.0


def answer(replica: str, *, is_over: bool = False) -> LoggedAnswer:
    return LoggedAnswer(replica, b"body", 7, b"", is_over)


async def told(replica: str, kept: LoggedAnswer | None = None) -> Told:
    return replica, kept


async def hangs() -> Told:
    return await asyncio.get_running_loop().create_future()


async def fails() -> Told:
    raise RuntimeError("its process has ended")


async def test_the_first_that_has_it_is_taken_and_nobody_else_is_waited_for() -> None:
    search = AnswerSearch(FOREVER_S)
    asked: list[Awaitable[Told]] = [hangs(), told("b", answer("b")), told("c")]
    found, is_whole = await search.find(asked, ["a", "b", "c"])
    assert found == answer("b")
    assert not is_whole
    assert not search._silent, "it was not waited for: nothing says that it hangs"


async def test_of_two_that_have_it_the_one_that_is_over_counts() -> None:
    asked = [told("a", answer("a")), told("b", answer("b", is_over=True))]
    assert await AnswerSearch(FOREVER_S).find(asked, []) == (answer("b", is_over=True), True)


async def test_nobody_has_it_when_all_have_said_so() -> None:
    assert await AnswerSearch(FOREVER_S).find([told("a"), told("b")], ["a", "b"]) == (None, True)
    assert await AnswerSearch(FOREVER_S).find([told("a"), fails()], ["a", "b"]) == (None, False)
    assert await AnswerSearch(FOREVER_S).find([], []) == (None, False)


async def test_one_that_hangs_is_waited_for_once_in_a_while() -> None:
    clock = Clock()
    search = AnswerSearch(0.01, clock)
    assert await search.find([told("a"), hangs()], ["a", "b"]) == (None, False)
    patient = AnswerSearch(FOREVER_S, clock)
    patient._silent = search._silent  # what it knows, with all the time of the world
    assert await patient.find([hangs(), told("a")], ["a", "b"]) == (None, False)
    assert await patient.find([told("a"), told("b", answer("b"))], ["a", "b"]) != (None, False)
    clock.now_s += SILENT_S + 1
    assert await search.find([told("a"), hangs()], ["a", "b"]) == (None, False)
    assert set(search._silent) == {"b"}, "it was waited for again"


async def test_one_that_answers_again_is_waited_for_again() -> None:
    search = AnswerSearch(FOREVER_S, Clock())
    search._silent = {"b": 1e9}
    assert await search.find([told("a"), told("b")], ["a", "b"]) == (None, True)
    assert not search._silent


async def test_without_names_all_are_waited_for() -> None:
    late = asyncio.get_running_loop().create_future()
    search = asyncio.create_task(AnswerSearch(FOREVER_S).find([told("a"), late], []))
    await asyncio.sleep(0)
    assert not search.done()
    late.set_result(("b", answer("b")))
    assert await search == (answer("b"), True)
