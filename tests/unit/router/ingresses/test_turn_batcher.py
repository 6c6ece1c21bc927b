"""Turns that end while the directory is being told of others are told together, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from samovar.cache_tiers.sessions import Item
from samovar.cache_tiers.sessions.session_table import SessionRow
from samovar.router.ingresses import known_sessions
from samovar.router.ingresses.known_sessions import TurnBatcher
from samovar.router.routing import DirectoryLost

NOTHING: tuple[SessionRow, ...] = ()


def item(name: int, nbytes: int = 10) -> Item:
    return Item(b"tenant", b"session", "reply", bytes([name]), bytes(nbytes), 0.0, 1.0)


class HeldLink:
    """A directory that answers when it is let."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.may = asyncio.Semaphore(0)
        self.is_lost = False

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int:
        self.told.append([one.name[0] for one in items])
        await self.may.acquire()
        if self.is_lost:
            raise DirectoryLost("it is away")
        return len(items)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_ends_meanwhile_goes_with_the_next_call() -> None:
    link, told = HeldLink(), TurnBatcher()
    first = asyncio.create_task(told.keep(link, [item(0)], NOTHING))
    await settle()
    assert link.told == [[0]], "alone, it is told at once"
    others = [asyncio.create_task(told.keep(link, [item(one)], NOTHING)) for one in (1, 2, 3)]
    await settle()
    assert link.told == [[0]]
    link.may.release()
    await first
    await settle()
    assert link.told == [[0], [1, 2, 3]]
    assert not any(one.done() for one in others), "the directory does not know it yet"
    link.may.release()
    await asyncio.gather(*others)
    assert told.calls == 2


async def test_one_that_waits_no_longer_takes_nothing_from_the_others() -> None:
    link, told = HeldLink(), TurnBatcher()
    first, second = (asyncio.create_task(told.keep(link, [item(one)], NOTHING)) for one in (1, 2))
    await settle()
    first.cancel()
    link.may.release()
    await second
    assert link.told == [[1, 2]]
    assert first.cancelled()


async def test_all_hear_that_it_failed_and_the_next_is_told() -> None:
    link, told = HeldLink(), TurnBatcher()
    link.is_lost = True
    link.may.release()
    outcomes = await asyncio.gather(
        *(told.keep(link, [item(one)], NOTHING) for one in (1, 2)), return_exceptions=True
    )
    assert [type(one) for one in outcomes] == [DirectoryLost, DirectoryLost]
    link.is_lost = False
    link.may.release()
    await told.keep(link, [item(3)], NOTHING)
    assert link.told == [[1, 2], [3]]


async def test_a_call_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_sessions, "BYTES_MAX", 5000)
    link, told = HeldLink(), TurnBatcher()
    turns = [asyncio.create_task(told.keep(link, [item(one, 3000)], NOTHING)) for one in range(5)]
    for _ in turns:
        link.may.release()
    await asyncio.gather(*turns)
    assert link.told == [[0, 1], [2, 3], [4]]
