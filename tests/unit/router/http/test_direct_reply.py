"""Streams over links, from a replica through the front door and the proxy's guard: as through Serve."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from configs.cluster import ClusterSettings, LinkSettings
from configs.settings import LimitsSettings, Settings
from replicas.links import Inlet
from replicas.messages import Admitted, Delta, ReplyTo
from router.http.direct_reply import (
    CALLBACK_VARIABLE,
    LINKED,
    REPLY_TO,
    DirectReplies,
    ReplySender,
    inlet_from_environment,
    links_environment,
    open_inlet,
)
from router.http.proxy_guard import ProxyGuard, proxy_environment
from router.routing import ReplicaFailed
from tests.support.router.fake_replica import INFO, say
from tests.support.router.linked_replicas import LINKS, LOOPBACK, LinkedReplicas, deltas, through_proxy
from tests.support.router.router_harness import House, make_settings, until

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
WORDS = ["Hel", "lo", " \u2028", "world"]


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster whose proxies have the guard."""
    for name, value in proxy_environment(make_settings()).items():
        monkeypatch.setenv(name, value)


def linked_house(script: Any = None) -> tuple[House, LinkedReplicas]:
    house = House(script or (lambda request: say(WORDS)))
    replicas = LinkedReplicas(house.replicas.script)
    house.replicas = replicas
    object.__setattr__(house.service, "client", replicas)
    object.__setattr__(house.service.readiness, "_client", replicas)
    return house, replicas


def text_of(body: str) -> str:
    return "".join(
        choice["delta"].get("content") or "" for one in deltas(body) for choice in one.get("choices", ())
    )


async def test_a_stream_over_links_says_what_it_says_without() -> None:
    async with House(lambda request: say(WORDS)).client() as client:
        plain = await client.post(CHAT, json=STREAM)
    house, replicas = linked_house()
    async with through_proxy(house) as (client, inlet):
        linked = await client.post(CHAT, json=STREAM)
        assert linked.status_code == 200
        assert text_of(linked.text) == text_of(plain.text) == "".join(WORDS)
        ends = [deltas(one.text)[-1] for one in (linked, plain)]  # usage and receipt
        assert all(end["receipt"].pop("request_id") for end in ends)
        assert ends[0] == ends[1]
        assert linked.text.endswith("data: [DONE]\n\n")
        assert linked.headers["x-replica"] == "replica-1"
        assert LINKED[0].decode() not in linked.headers
        assert len(linked.headers.get_list("x-request-id")) == 1
        assert not inlet._boxes
        assert not replicas.inlet._boxes
    replicas.inlet.close()
    house.check()


async def test_what_is_no_stream_and_what_fails_before_it_comes_through_serve() -> None:
    house, replicas = linked_house()
    async with through_proxy(house) as (client, inlet):
        whole = await client.post(CHAT, json=BODY)
        assert whole.json()["choices"][0]["message"]["content"] == "".join(WORDS)
        refused = await client.post(CHAT, json={**STREAM, "model": "other"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/v1/models")).status_code == 200
        assert not inlet._links
    replicas.inlet.close()


async def test_a_front_door_that_reaches_no_proxy_answers_through_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, replicas = linked_house()

    async def elsewhere(self: Any) -> ReplyTo:
        return ReplyTo(LOOPBACK, 1, "0" * 64)

    async with through_proxy(house) as (client, inlet):
        monkeypatch.setattr(inlet, "address", elsewhere.__get__(inlet))
        assert text_of((await client.post(CHAT, json=STREAM)).text) == "".join(WORDS)
    replicas.inlet.close()


async def test_a_front_door_without_links_behind_proxies_that_have_them_answers_through_serve() -> None:
    """The application was changed, and the proxies were not: they watch its clients all the same."""
    off = ClusterSettings(links=LinkSettings(enabled=False))
    house = House(lambda request: say(WORDS), settings=make_settings().model_copy(update={"cluster": off}))
    async with through_proxy(house) as (client, inlet):
        assert text_of((await client.post(CHAT, json=STREAM)).text) == "".join(WORDS)
        whole = await client.post(CHAT, json=BODY)
        assert whole.json()["choices"][0]["message"]["content"] == "".join(WORDS)
        assert not inlet._links


async def test_a_front_door_that_is_lost_in_mid_stream_ends_it_with_an_error() -> None:
    gate = asyncio.Event()
    house, replicas = linked_house(
        lambda request: [Admitted("replica-1", 0, 0.0), Delta(0, "Hel", (1,)), gate]
    )

    async def dying(scope: Scope, receive: Receive, send: Send) -> None:
        """The process ends: its link breaks, and Serve's call with it."""
        call = asyncio.create_task(house.app(scope, receive, send))
        await until(lambda: bool(inlet._links) and house.replicas.began.is_set())
        await until(lambda: any(box.has_spoken for box in inlet._boxes.values()))
        for link in inlet._links:
            assert link.transport is not None
            link.transport.abort()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        raise RuntimeError("the actor died")

    async with through_proxy(house, guard_app=dying) as (client, inlet):
        body = (await client.post(CHAT, json=STREAM)).text
        assert text_of(body) == "Hel"
        assert '"error"' in body
        assert body.endswith("data: [DONE]\n\n")
    await until(lambda: house.service.concurrency.open_total == 0)
    replicas.inlet.close()


async def test_an_answer_that_fails_in_mid_stream_says_so_over_the_link() -> None:
    gate = asyncio.Event()
    said = [Admitted("replica-1", 0, 0.0), Delta(0, "Hel", (1,))]
    house, replicas = linked_house(lambda request: [*said, gate, ReplicaFailed("a bug")])
    async with through_proxy(house) as (client, inlet):
        asking = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: any(box.has_spoken for box in inlet._boxes.values()))
        gate.set()
        body = (await asking).text
        assert text_of(body) == "Hel"
        assert "internal_error" in body
        assert body.endswith("data: [DONE]\n\n")
    replicas.inlet.close()


async def posted(guard: ProxyGuard, send: Send, left: asyncio.Event | None = None) -> None:
    """Post a chat that is to be streamed, as a server does that reports a disconnect after `left`."""
    request = [{"type": "http.request", "body": json.dumps(STREAM).encode(), "more_body": False}]

    async def receive() -> Any:
        if request:
            return request.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "state": {},
    }
    await guard(scope, receive, send)


async def test_a_client_that_does_not_read_holds_its_replica_back_at_the_proxy() -> None:
    """The proxy keeps `stream_bytes_max`; the front door waits, and ends the request in `write_idle_s`."""
    house = House(
        lambda request: say(["x" * 200] * 40),
        settings=make_settings(limits={"write_idle_s": 1}),
    )
    links, gate, sent = LinkSettings(stream_bytes_max=1024), asyncio.Event(), asyncio.Event()
    inlet = Inlet(LOOPBACK, links, 0.0)
    guard = ProxyGuard(house.app, limits=LimitsSettings(write_idle_s=1), replies=DirectReplies(inlet))
    await house.service.readiness.poll()

    async def send(message: Any) -> None:
        sent.set()
        await gate.wait()  # a full socket

    serving = asyncio.create_task(posted(guard, send, gate))
    await asyncio.wait_for(sent.wait(), 10)
    await until(lambda: house.service.concurrency.open_total == 0)
    held = [box._nbytes for box in inlet._boxes.values()]
    assert not held or max(held) < 4 * 1024
    gate.set()
    await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 10)
    assert not inlet._boxes
    inlet.close()


def front(write: Any) -> Any:
    """A front door that streams what `write` sends, without anything else."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await write(send)

    return app


async def test_serve_does_not_see_a_client_leave_that_has_its_whole_answer() -> None:
    """The link is faster than Serve, which would cancel the call and count an error (499)."""
    inlet, over, ends = Inlet(LOOPBACK, LINKS, 0.0), asyncio.Event(), []

    async def write(send: Send) -> None:
        await send({"type": "http.response.body", "body": b"all", "more_body": False})

    sender = ReplySender(front(write), settings=make_settings())

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        """Serve's proxy: it hears of the end later, and listens for a disconnect until then."""
        late: list[Any] = []

        async def keep(message: Any) -> None:
            late.append(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        await sender(scope, receive, keep)
        leaving = asyncio.ensure_future(watch())
        await over.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        ends.append(leaving.done())
        leaving.cancel()
        for message in late:
            await send(message)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            over.set()

    await asyncio.wait_for(
        posted(ProxyGuard(serve, limits=LimitsSettings(), replies=DirectReplies(inlet)), send, over), 10
    )
    assert ends == [False]
    inlet.close()


async def test_a_body_larger_than_a_connection_may_hold_arrives_and_harms_no_other_stream() -> None:
    links = LinkSettings(unread_bytes_max=1 << 20)
    inlet, got = Inlet(LOOPBACK, links, 0.0), bytearray()

    async def write(send: Send) -> None:
        await send({"type": "http.response.body", "body": b"x" * (8 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    settings = Settings(cluster=ClusterSettings(links=links))
    guard = ProxyGuard(
        ReplySender(front(write), settings=settings), limits=LimitsSettings(), replies=DirectReplies(inlet)
    )

    async def send(message: Any) -> None:
        got.extend(message.get("body", b""))

    await asyncio.wait_for(posted(guard, send), 20)
    assert len(got) == (8 << 20) + 3
    assert bytes(got[-3:]) == b"end"
    inlet.close()


async def test_a_client_that_reads_slowly_gets_the_rest_after_serve_is_done() -> None:
    inlet, got, done = Inlet(LOOPBACK, LINKS, 0.0), bytearray(), asyncio.Event()

    async def write(send: Send) -> None:
        for _ in range(4):
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})
        done.set()

    app = ReplySender(front(write), settings=make_settings())
    limits = LimitsSettings(write_idle_s=1).model_copy(update={"write_idle_s": 0.02})

    async def send(message: Any) -> None:
        await done.wait()
        if message.get("body"):
            await asyncio.sleep(0.1)  # several times `write_idle_s`, in which the socket does take bytes
        got.extend(message.get("body", b""))

    await asyncio.wait_for(posted(ProxyGuard(app, limits=limits, replies=DirectReplies(inlet)), send), 10)
    assert bytes(got) == b"x" * 4000 + b"end"
    inlet.close()


@pytest.mark.guarantee("F33")
async def test_a_client_cannot_name_where_its_answer_is_sent() -> None:
    house, replicas = linked_house()
    seen: list[bytes] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == REPLY_TO)
        await house.app(scope, receive, send)

    async with through_proxy(house, guard_app=noting) as (client, inlet):
        to = await inlet.address()
        for name in ("x-samovar-reply-to", "X_Samovar_Reply_To"):
            headers = {name: f"10.0.0.1 80 {'0' * 64} mine"}
            assert (await client.post(CHAT, json=STREAM, headers=headers)).status_code == 200
        assert len(seen) == 2
        assert all(value.startswith(f"{to.host} {to.port} ".encode()) for value in seen)
    replicas.inlet.close()


def test_the_proxy_learns_from_its_environment_whether_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings()
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: LOOPBACK)
    inlet = inlet_from_environment(links_environment(settings))
    assert inlet is not None
    assert inlet._host == LOOPBACK
    assert inlet_from_environment({}) is None
    assert open_inlet(LINKS.model_copy(update={"enabled": False}), 0.02) is None
    monkeypatch.setenv("RAY_USE_TLS", "1")  # links are not encrypted
    assert open_inlet(LINKS, 0.02) is None


async def test_replicas_that_answer_through_serve_are_heard_by_the_same_front_door() -> None:
    house, replicas = linked_house()

    async def unlinked(request: Any, session_key: str) -> Any:
        for step in say(WORDS):
            yield [step]

    replicas._replica = unlinked  # type: ignore[method-assign]
    async with through_proxy(house) as (client, _):
        assert text_of((await client.post(CHAT, json=STREAM)).text) == "".join(WORDS)
    assert INFO.replica_id in house.tracker.nodes
    replicas.inlet.close()


async def test_a_client_that_reads_slowly_is_not_one_that_reads_nothing() -> None:
    """Each 16 KB that a client reads lets the front door go on: it never waits for all that is held."""
    links, pieces, reads, sizes = LinkSettings(), [0], asyncio.Semaphore(0), list[int]()
    inlet, written, waited_for = Inlet(LOOPBACK, links, 0.0), [0], [0]

    async def write(send: Send) -> None:
        for _ in range(128):
            began = pieces[0]
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
            written[0] += 1
            waited_for[0] = max(waited_for[0], pieces[0] - began)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    sender = ReplySender(front(write), settings=Settings(cluster=ClusterSettings(links=links)))
    guard = ProxyGuard(sender, limits=LimitsSettings(), replies=DirectReplies(inlet))

    async def send(message: Any) -> None:
        body = message.get("body", b"")
        if body:
            await reads.acquire()
            pieces[0] += 1
            sizes.append(len(body))

    serving = asyncio.create_task(posted(guard, send))
    await until(lambda: any(box._is_paused for box in inlet._boxes.values()))
    while not serving.done():
        before = written[0], pieces[0]
        reads.release()
        await until(lambda before=before: serving.done() or pieces[0] > before[1])  # type: ignore[misc]
        if written[0] < 128:  # the client has read a piece: the front door soon writes more
            await until(lambda before=before: written[0] > before[0] or waited_for[0] > 3)  # type: ignore[misc]
    await serving
    assert (sum(sizes), max(sizes)) == (128 * 8192 + 3, 1 << 14)
    assert waited_for[0] <= 3
    inlet.close()


@pytest.mark.guarantee("F33")
async def test_a_front_door_behind_unguarded_proxies_believes_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a Ray cluster that somebody else has started, clients could send the header themselves."""
    monkeypatch.delenv(CALLBACK_VARIABLE)
    called = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    server = await asyncio.start_server(hold, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    headers = {REPLY_TO.decode(): f"{LOOPBACK} {port} {'0' * 64} ticket"}
    for callback in (None, "somebody.elses.guard"):
        if callback is not None:
            monkeypatch.setenv(CALLBACK_VARIABLE, callback)
        house = House(lambda request: say(WORDS))
        async with house.client() as client:
            response = await client.post(CHAT, json=STREAM, headers=headers)
            assert text_of(response.text) == "".join(WORDS)
    assert not called.is_set()
    server.close()


async def test_the_live_stream_goes_over_a_link_so_that_a_slow_reader_holds_it_back() -> None:
    house, replicas = linked_house()
    async with through_proxy(house) as (client, inlet):
        tickets = []
        expect = inlet.expect

        def noted(ticket: str) -> Any:
            tickets.append(ticket)
            return expect(ticket)

        inlet.expect = noted  # type: ignore[method-assign]
        await client.get("/health")
        assert not tickets
        live = asyncio.create_task(client.get("/v1/live"))
        await until(lambda: any(inlet._from))
        assert list(inlet._from) == tickets
        live.cancel()
        await asyncio.gather(live, return_exceptions=True)
    await until(lambda: not inlet._boxes)
    replicas.inlet.close()
