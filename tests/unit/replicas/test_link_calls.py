"""Calls over links: served once, within bounds, until the caller leaves; who cannot serve says so at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest

from samovar.configs.cluster import LinkSettings
from samovar.replicas.links import CLOSING, FAILED, FULL, Inlet, Link, LinkCall, LinkLost, Links
from samovar.replicas.links.wire import CALL, LEAVE, Parser, packed
from tests.support.constants import tuned
from tests.support.inside import paused_on, queue_of
from tests.support.router.linked_replicas import LINKS
from tests.support.router.router_harness import until

SETTINGS = tuned(LINKS, stream_bytes_max=1024, calls_max=2)


class Callee:
    """A process that takes calls, and a link to it. Its handler answers by what the payload says."""

    def __init__(self, inlet: Inlet, link: Link) -> None:
        self.inlet = inlet
        self.link = link
        self.seen: list[Any] = []
        self.cancelled: list[Any] = []
        self.gate = asyncio.Event()
        inlet.calls.take(self.handle)

    async def handle(self, call: LinkCall) -> None:
        self.seen.append(call.payload)
        try:
            if call.payload == "raise":
                raise RuntimeError("a bug")
            if call.payload == "body":
                while self.seen[-1] != "end":
                    self.seen += await call.more()
            elif call.payload == "wait":
                await self.gate.wait()
            elif call.payload == "refuse":
                call.refuse("not here")
        except asyncio.CancelledError:
            self.cancelled.append(call.payload)
            raise

    def call(self, ticket: str, payload: Any) -> list[str]:
        """LinkCall, and return what will be said of it: `lost`, or why it is refused."""
        said: list[str] = []
        self.link.call(ticket, payload, lambda: said.append("lost"), said.append)
        return said


@asynccontextmanager
async def callee(settings: LinkSettings = SETTINGS) -> AsyncIterator[Callee]:
    inlet = Inlet("127.0.0.1", settings, 0.0)
    try:
        link = await Links(settings, 60.0).reach(await inlet.address())
        assert link is not None
        yield Callee(inlet, link)
    finally:
        inlet.close()


async def test_a_call_is_served_with_its_payload_and_more_of_it_in_order() -> None:
    async with callee() as far:
        said = far.call("t", "body")
        for number in range(20):
            far.link.send("t", number)
        far.link.send("t", "end")
        await until(lambda: far.inlet.calls.open == 0 and "end" in far.seen)
        assert far.seen == ["body", *range(20), "end"]
        far.link.send("t", "late")  # of a call that is over: dropped there
        far.link.close("t")
        far.link.send("t", "later")  # of one that is closed: dropped here
        far.call("u", {"ids": b"\x00\x01", "text": "naïve \u2028"})
        await until(lambda: len(far.seen) == 23)
        assert far.seen[-1] == {"ids": b"\x00\x01", "text": "naïve \u2028"}
        assert not said


async def test_a_call_runs_in_a_context_of_its_own() -> None:
    """Where the process began to listen may have been within another request (Serve has variables of it)."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
    found: list[str] = []

    async def handle(call: LinkCall) -> None:
        found.append(variable.get())
        variable.set(call.payload)

    variable.set("the first request")
    async with callee() as far:
        far.inlet.calls.take(handle)
        far.call("a", "a")
        far.call("b", "b")
        await until(lambda: len(found) == 2)
        assert found == ["", ""]


async def test_a_caller_that_leaves_cancels_its_call_and_no_other() -> None:
    async with callee() as far:
        left, stays = far.call("a", "wait"), far.call("b", "wait")
        await until(lambda: far.inlet.calls.open == 2)
        far.link.close("a")
        await until(lambda: far.inlet.calls.open == 1)
        assert far.cancelled == ["wait"]
        far.gate.set()
        await until(lambda: far.inlet.calls.open == 0)
        assert far.cancelled == ["wait"]
        assert not left
        assert not stays


async def test_a_call_that_is_closed_at_once_is_never_served() -> None:
    async with callee() as far:
        far.call("a", "wait")
        far.link.close("a")
        far.call("b", "plain")
        await until(lambda: far.seen == ["plain"] and far.inlet.calls.open == 0)


async def test_a_caller_that_has_all_it_wants_lets_the_call_end_by_itself() -> None:
    async with callee() as far:
        far.call("a", "wait")
        await until(lambda: far.inlet.calls.open == 1)
        far.link.close("a", is_over=True)
        far.call("b", "plain")
        await until(lambda: "plain" in far.seen)
        assert not far.cancelled
        far.gate.set()
        assert await far.inlet.calls.over(10)


@pytest.mark.parametrize("side", ["caller", "callee"])
async def test_an_end_of_the_connection_cancels_calls_and_is_told_to_the_caller(side: str) -> None:
    async with callee() as far:
        said = far.call("a", "wait")
        await until(lambda: far.inlet.calls.open == 1)
        far.link.cut() if side == "caller" else far.inlet.close()
        await until(lambda: said == ["lost"] and far.inlet.calls.open == 0)
        assert far.cancelled == ["wait"]
        with pytest.raises(LinkLost):
            far.call("b", "plain")


async def test_more_calls_than_are_allowed_are_refused_at_once_and_there_is_room_again() -> None:
    async with callee() as far:
        said = [far.call(f"t{number}", "wait") for number in range(3)]
        await until(lambda: said[2] == [FULL])
        assert far.inlet.calls.open == 2
        far.gate.set()
        await until(lambda: far.inlet.calls.open == 0)
        again = far.call("t4", "plain")
        await until(lambda: far.seen == ["wait", "wait", "plain"])
        assert not again
        assert said[:2] == [[], []]


async def test_a_process_that_closes_refuses_new_calls_and_finishes_those_it_has() -> None:
    async with callee() as far:
        open_one = far.call("a", "wait")
        await until(lambda: far.inlet.calls.open == 1)
        far.inlet.calls.stop()
        refused = far.call("b", "plain")
        await until(lambda: refused == [CLOSING])
        assert not await far.inlet.calls.over(0.01)
        far.gate.set()
        assert await far.inlet.calls.over(10)
        assert not open_one
        assert far.seen == ["wait"]


async def test_a_process_without_a_handler_refuses() -> None:
    inlet = Inlet("127.0.0.1", SETTINGS, 0.0)
    link = await Links(SETTINGS, 60.0).reach(await inlet.address())
    assert link is not None
    said: list[str] = []
    link.call("a", 1, lambda: said.append("lost"), said.append)
    await until(lambda: said == [CLOSING])
    inlet.close()


@pytest.mark.parametrize(("payload", "reason"), [("raise", FAILED), ("refuse", "not here")])
async def test_a_call_without_an_answer_says_why(payload: str, reason: str) -> None:
    async with callee() as far:
        said = far.call("a", payload)
        await until(lambda: said == [reason])
        assert far.inlet.calls.open == 0
        assert far.link.is_open


async def test_a_caller_waits_while_the_callee_has_enough_to_read() -> None:
    async with callee() as far:
        gate = asyncio.Event()
        read: list[Any] = []

        async def handle(call: LinkCall) -> None:
            await gate.wait()
            while len(read) < 4:
                read.extend(await call.more())

        far.inlet.calls.take(handle)
        far.call("a", 1)

        async def write() -> None:
            for _ in range(4):
                await far.link.drained("a")
                far.link.send("a", b"x" * 2048)
                await asyncio.sleep(0)
                await until(lambda: "a" in paused_on(far.link) or gate.is_set())

        writing = asyncio.create_task(write())
        await until(lambda: "a" in paused_on(far.link))
        assert not writing.done()
        gate.set()
        await asyncio.wait_for(writing, 10)
        await until(lambda: len(read) == 4)
        assert "a" not in paused_on(far.link)


async def test_streams_and_calls_share_a_link_and_late_words_of_a_stream_begin_no_call() -> None:
    async with callee() as far:
        box = far.inlet.expect("s")
        far.link.open("s", lambda: None)
        far.call("c", "plain")
        far.link.send("s", 1)
        assert await asyncio.wait_for(box.next(), 10) == [1]
        far.inlet.forget("s")
        far.link.send("s", "late")
        far.call("d", "last")
        await until(lambda: far.seen == ["plain", "last"])


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb([["t", 1, 3]]),
        msgpack.packb([["t", 1, True]]),
        msgpack.packb([["t", 1, "call"]]),
        msgpack.packb([["t", 1, CALL, 0]]),
        packed([["t" * 65, 1, CALL]]),
    ],
)
def test_a_word_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(LinkLost):
        list(Parser(1 << 20).feed(data))


async def test_a_ticket_serves_one_call_and_who_uses_it_twice_is_cut_off() -> None:
    async with callee() as far:
        said = far.call("a", "wait")
        queue_of(far.link)(["b", None, LEAVE])  # of none: nothing
        queue_of(far.link)(["a", "wait", CALL])
        await until(lambda: said == ["lost"])
        await until(lambda: far.inlet.calls.open == 0)
        assert far.seen in ([], ["wait"])


async def test_a_caller_cuts_off_who_answers_with_a_callers_word() -> None:
    async with callee() as far:
        said = far.call("a", "wait")
        await until(lambda: far.inlet.calls.open == 1)
        (incoming,) = far.inlet._links
        assert incoming.transport is not None
        incoming.transport.write(packed([["a", "x", CALL]]))
        await until(lambda: said == ["lost"])


async def test_another_connection_cannot_end_or_feed_a_call() -> None:
    async with callee() as far:
        said = far.call("a", "wait")
        await until(lambda: far.inlet.calls.open == 1)
        other = await Links(SETTINGS, 60.0).reach(await far.inlet.address())
        assert other is not None
        queue_of(other)(["a", None, LEAVE])
        queue_of(other)(["a", "more"])
        answered: list[str] = []
        other.call("b", "refuse", lambda: None, answered.append)
        await until(lambda: answered == ["not here"])
        assert far.inlet.calls.open == 1
        assert not far.cancelled
        assert not said
        far.gate.set()
