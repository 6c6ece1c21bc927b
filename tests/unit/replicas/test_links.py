"""Links: what goes in comes out, by stream and in order, and nobody else is listened to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.configs.cluster import LinkSettings
from samovar.replicas.links import (
    EventSender,
    Inlet,
    Link,
    LinkLost,
    Links,
    Mailbox,
    Pace,
    events_of,
    pack_event,
)
from samovar.replicas.links.handshake import NUMBER_BYTES
from samovar.replicas.links.wire import Parser, packed
from samovar.replicas.messages import Admitted, Delta, Event, Failed, Receipt, Refused, ReplyTo, TokenLogprob
from tests.support.clock import Clock
from tests.support.constants import tuned
from tests.support.inside import boxes_of, bytes_in, connecting_by, links_of, unreached_by
from tests.support.link_ends import admit
from tests.support.router.linked_replicas import LINKS
from tests.support.router.router_harness import until

SECRET = "0" * 64
SETTINGS = tuned(LINKS, stream_bytes_max=1024)
TOKEN = TokenLogprob(3, "\ud83d", b"\xf0\x9f", -0.25, (TokenLogprob(4, "é", b"\xc3\xa9", -1.5),), 1)
EVENTS: list[Event] = [
    Admitted("r1", 5, 0.25, Receipt({"cpu": 3, "compute": 2}, "load", miss="late"), (TOKEN,)),
    Refused("invalid", "no", 1.5, "prompt"),
    Failed("gone", replica_lost=True, replica_id="r1"),
    Delta(1, "naïve \u2028", (7, 8), (TOKEN,), "stop"),
]


@asynccontextmanager
async def linked(
    settings: LinkSettings = SETTINGS, heartbeat_s: float = 60.0, wait_s_max: float = 0.0
) -> AsyncIterator[tuple[Inlet, Link]]:
    """An inlet and a link to it, over a real socket."""
    inlet = Inlet("127.0.0.1", settings, wait_s_max)
    try:
        link = await Links(settings, heartbeat_s).reach(await inlet.address())
        assert link is not None
        yield inlet, link
    finally:
        inlet.close()


async def read(box: Mailbox, count: int) -> list[Any]:
    """Read until there are as many payloads."""
    found: list[Any] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            found += await box.next()
    return found


def lose() -> None:
    """Nothing to be done."""


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_comes_out_as_it_went_in(event: Event) -> None:
    ((_, payload),) = next(Parser(1 << 20).feed(packed([["t", pack_event(event)]])))
    assert events_of([payload]) == [event]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)),
        max_size=12,
    )
)
def test_deltas_that_come_together_are_one_of_each_choice(said: list[tuple[int, str, list[int]]]) -> None:
    deltas = [Delta(index, text, tuple(token_ids)) for index, text, token_ids in said]
    joined = events_of([pack_event(delta) for delta in deltas])
    assert len(joined) == len({index for index, _, _ in said})
    for delta in joined:
        assert isinstance(delta, Delta)
        own = [one for one in deltas if one.index == delta.index]
        assert delta.text == "".join(one.text for one in own)
        assert list(delta.token_ids) == [token_id for one in own for token_id in one.token_ids]


@pytest.mark.parametrize(
    "payload", [[], ["unknown", {}], ["refused", {"nothing": 1}], [0, 1, 2, 3], ["admitted"], [None], 7]
)
def test_what_is_no_event_is_a_lost_link(payload: Any) -> None:
    with pytest.raises(LinkLost):
        events_of([payload])


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        msgpack.packb({"a": 1}),
        msgpack.packb([["t"]]),
        msgpack.packb([[1, 2]]),
        packed([["t" * 65, 0]]),
    ],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(LinkLost):
        list(Parser(1 << 20).feed(data))


def test_a_batch_that_never_ends_is_refused() -> None:
    parser, data = Parser(1024), packed([["t", b"x" * 2000]])
    assert list(parser.feed(data[:700])) == []
    with pytest.raises(LinkLost):
        list(parser.feed(data[700:1400]))


@given(st.lists(st.integers(1, 40), max_size=8))
def test_bytes_may_come_in_any_pieces(cuts: list[int]) -> None:
    batches: list[list[list[Any]]] = [[["a", 1], ["b", None]], [], [["c", b"\x00" * 30]]]
    data, found, parser = b"".join(map(packed, batches)), [], Parser(1 << 20)
    for cut in [*cuts, len(data)]:
        found += list(parser.feed(data[:cut]))
        data = data[cut:]
    assert found == batches


async def test_streams_of_one_link_come_apart_and_in_order() -> None:
    async with linked() as (inlet, link):
        boxes = {name: inlet.expect(name) for name in "ab"}
        for name in "ab":
            link.open(name, lose)
        for number in range(50):
            for name in "ab":
                link.send(name, [name, number])
        for name, box in boxes.items():
            assert await read(box, 50) == [[name, number] for number in range(50)]
        link.close("a")
        link.send("a", "late")  # of a stream that is closed: dropped here
        inlet.forget("b")
        link.send("b", "unread")  # of one whose reader has left: dropped there
        last = inlet.expect("c")
        link.open("c", lose)
        link.send("c", "last")
        assert await read(last, 1) == ["last"]
        inlet.forget("c")
        assert not boxes_of(inlet).keys() - {"a"}


async def test_a_silent_stream_shows_that_it_lives_and_a_closed_one_does_not() -> None:
    async with linked(heartbeat_s=0.02) as (inlet, link):
        box = inlet.expect("t")
        link.open("t", lose)
        async with asyncio.timeout(10):
            assert await box.next() == []
            assert await box.next() == []
        link.close("t")
        await until(lambda: link._beat is None)


async def test_no_stream_that_lives_is_silent_for_longer_than_a_heartbeat() -> None:
    async with linked(heartbeat_s=60.0) as (inlet, link):
        box = inlet.expect("t")
        link.open("t", lose)
        link.send("t", "said")  # just after one look, so the next finds that it has spoken
        assert await read(box, 1) == ["said"]
        assert link._beat is not None
        assert link._beat.when() - link._loop.time() <= 30.0
        link._heartbeat()
        assert link._beat.when() - link._loop.time() <= 30.0
        link._heartbeat()
        assert await asyncio.wait_for(box.next(), 10) == []


async def test_a_writer_waits_while_the_connection_takes_no_more() -> None:
    lost, gate = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await admit(reader, writer, SECRET)
        await gate.wait()
        while await reader.read(1 << 20):
            pass
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0, limit=1024)
    to = ReplyTo("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    link = await Links(tuned(LINKS, unread_bytes_max=1 << 20), 60.0).reach(to)
    assert link is not None
    link.open("t", lost.set)

    async def write() -> None:
        for _ in range(512):
            await link.drained("t")
            link.send("t", b"x" * (1 << 16))

    writing = asyncio.create_task(write())
    await until(lambda: link._full is not None or lost.is_set() or writing.done())
    assert not writing.done()
    assert not lost.is_set()
    gate.set()
    await asyncio.wait_for(writing, 20)
    link.cut()
    server.close()


@pytest.mark.parametrize("side", ["reader", "writer"])
async def test_an_end_of_the_connection_is_known_at_both_ends_after_what_came_before(side: str) -> None:
    lost = asyncio.Event()
    async with linked() as (inlet, link):
        box = inlet.expect("t")
        link.open("t", lost.set)
        link.send("t", "said")
        await until(lambda: bool(box._items))
        if side == "reader":
            inlet.close()
        else:
            link.cut()
        assert await read(box, 1) == ["said"]
        with pytest.raises(LinkLost):
            await asyncio.wait_for(box.next(), 10)
        await asyncio.wait_for(lost.wait(), 10)
        assert not link.is_open
        with pytest.raises(LinkLost):
            link.open("u", lose)


async def test_what_cannot_be_packed_loses_its_link_and_leaves_nobody_waiting() -> None:
    lost = asyncio.Event()
    async with linked() as (inlet, link):
        box = inlet.expect("t")
        link.open("t", lost.set)
        await asyncio.sleep(0)
        link.send("t", object())
        await asyncio.wait_for(lost.wait(), 10)
        with pytest.raises(LinkLost):
            await read(box, 1)


async def test_a_sender_of_events_says_when_its_link_is_lost_before_the_end() -> None:
    async with linked() as (inlet, link):
        inlet.expect("t")
        sender = EventSender(1, link, "t")
        sender.put(Delta(0, "a", (1,)))
        link.cut()
        with pytest.raises(LinkLost):
            await sender.over()
        assert not sender.is_over


async def test_a_writer_waits_while_its_reader_has_enough_and_goes_on_when_it_is_read() -> None:
    async with linked() as (inlet, link):
        box, other = inlet.expect("t"), inlet.expect("u")
        link.open("t", lose)
        link.open("u", lose)
        link.send("t", b"x" * 2048)
        await until(lambda: "t" in link._paused)
        waiting = asyncio.create_task(link.drained("t"))
        await asyncio.wait_for(link.drained("u"), 10)  # another stream is not held up
        link.send("u", b"y")
        assert await read(other, 1) == [b"y"]
        assert not waiting.done()
        assert await read(box, 1) == [b"x" * 2048]
        await asyncio.wait_for(waiting, 10)


async def test_a_reader_that_never_reads_costs_the_link_not_the_memory() -> None:
    """The other end's process hangs: what is unread is bounded, and its streams are lost."""
    lost, gate = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await admit(reader, writer, SECRET)
        await gate.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0, limit=1024)
    to = ReplyTo("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    settings = tuned(SETTINGS, unread_bytes_max=1 << 20)
    link = await Links(settings, 60.0).reach(to)
    assert link is not None
    link.open("t", lost.set)
    async with asyncio.timeout(20):
        while not lost.is_set():
            link.send("t", b"x" * (1 << 20))
            await asyncio.sleep(0)
    gate.set()
    server.close()


@pytest.mark.guarantee("F33")
async def test_nothing_is_read_from_a_connection_without_a_proof() -> None:
    async with linked() as (inlet, _):
        box = inlet.expect("t")
        to = await inlet.address()
        assert to.secret not in repr(to)
        for stranger in (to.secret.encode(), b"0" * NUMBER_BYTES * 2, b""):
            reader, writer = await asyncio.open_connection(to.host, to.port)
            writer.write(stranger + packed([["t", "forged"]]) * 9)
            await reader.readexactly(NUMBER_BYTES)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 10)
            writer.close()
        assert not box._items


@pytest.mark.guarantee("F33")
async def test_who_does_not_prove_itself_takes_no_place_of_those_that_do() -> None:
    settings = tuned(SETTINGS, links_max=2)
    inlet = Inlet("127.0.0.1", settings, 0.0)
    to = await inlet.address()
    strangers = [await asyncio.open_connection(to.host, to.port) for _ in range(4)]
    await until(lambda: len(inlet._strangers) == 2)
    for reader, _ in strangers[:2]:  # the oldest made room
        await reader.readexactly(NUMBER_BYTES)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 10)
    box = inlet.expect("t")
    link = await Links(settings, 60.0).reach(to)
    assert link is not None
    link.open("t", lose)
    link.send("t", 1)
    assert await read(box, 1) == [1]
    for _, writer in strangers:
        writer.close()
    inlet.close()


async def test_a_process_that_takes_no_more_links_is_not_reached_so_that_serve_carries_the_streams() -> None:
    settings = tuned(SETTINGS, links_max=1)
    async with linked(settings) as (inlet, first):
        to = await inlet.address()
        links = Links(settings, 60.0)
        assert await links.reach(to) is None
        assert to in unreached_by(links)
        assert await Links(settings, 60.0).reach(replace(to, secret=SECRET)) is None
        assert first.is_open


async def test_an_address_that_is_not_reached_is_left_alone_for_a_while() -> None:
    links = Links(SETTINGS, 60.0)
    async with linked() as (inlet, _):
        to = await inlet.address()
        gone = replace(to, port=1)
        assert await links.reach(None) is None
        assert await links.reach(gone) is None
        assert gone in unreached_by(links)
        first = await links.reach(to)
        assert first is not None
        assert await links.reach(to) is first
        first.cut()
        await until(lambda: not first.is_open)
        second = await links.reach(to)
        assert second is not None
        assert second is not first


def test_readers_are_woken_at_once_when_there_is_time_and_rest_at_most_as_long_as_is_set() -> None:
    clock, pace = Clock(), Pace(0.02)
    assert pace.wait_s(clock()) == 0
    for took_s, rest_s in ((0.0, 0.0), (0.001, 0.004), (0.1, 0.02)):
        began_s = clock()
        clock.now_s += took_s
        pace.woke(began_s, clock())
        assert pace.wait_s(clock()) == pytest.approx(rest_s)
        clock.now_s += rest_s
        assert pace.wait_s(clock()) == pytest.approx(0)


async def test_the_first_payload_waits_for_nothing_and_later_ones_come_together_under_load() -> None:
    async with linked(wait_s_max=5.0) as (inlet, link):
        busy, new = inlet.expect("busy"), inlet.expect("new")
        link.open("busy", lose)
        link.send("busy", 0)
        assert await read(busy, 1) == [0]
        inlet._pace.woke(0.0, 1e9)  # as if readers had taken long
        link.send("busy", 1)
        reading = asyncio.create_task(busy.next())
        link.open("new", lose)
        link.send("new", "first")
        assert await asyncio.wait_for(new.next(), 4) == ["first"]
        assert not reading.done()
        reading.cancel()


async def test_a_writer_goes_on_before_all_that_came_is_read() -> None:
    """Else a slow reader of much looks like one that reads nothing."""
    told: list[bool] = []
    box = Mailbox(100, told.append)
    for _ in range(5):
        box.put(b"x" * 40)
    box.put("no bytes")
    assert told == [False]
    read = [await box.next(40) for _ in range(3)]
    assert read == [[b"x" * 40]] * 3
    assert told == [False, True]
    assert await box.next() == [b"x" * 40, b"x" * 40, "no bytes"]
    assert bytes_in(box) == 0


async def test_an_address_that_keeps_silent_holds_up_no_other() -> None:
    """One machine that is gone must not add its connect_s to streams of all others."""
    settings = SETTINGS.model_copy(update={"connect_s": 60.0})
    gate = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.close()

    silent = await asyncio.start_server(hold, "127.0.0.1", 0)
    inlet, links = Inlet("127.0.0.1", settings, 0.0), Links(settings, 60.0)
    to = ReplyTo("127.0.0.1", silent.sockets[0].getsockname()[1], SECRET)
    waiting = [asyncio.create_task(links.reach(to)) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await links.reach(await inlet.address()) is not None
    assert not any(one.done() for one in waiting)
    waiting[0].cancel()  # who gives up takes nothing from who still waits
    gate.set()
    async with asyncio.timeout(20):
        assert await waiting[1] is None
    assert to in unreached_by(links)
    assert not connecting_by(links)
    silent.close()
    inlet.close()


async def test_both_ends_of_a_link_notice_that_the_other_machine_is_gone() -> None:
    async with linked() as (inlet, link):
        await until(lambda: bool(links_of(inlet)))
        for end in (link, *links_of(inlet)):
            transport = end._transport if isinstance(end, Link) else end.transport
            assert transport is not None
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == SETTINGS.keepalive_s
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
