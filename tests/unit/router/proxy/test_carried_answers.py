"""Answers to requests that came over links, through the proxy's guard: what they are through Serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from samovar.configs.settings import LimitsSettings
from samovar.configs.tls import CertificateRefused, tls_in
from samovar.replicas.links import open_inlet
from samovar.replicas.messages import Admitted, Delta, ReplyTo
from samovar.router.generation import ResponseSender
from samovar.router.ingress.app import build_api
from samovar.router.proxy import are_proxies_guarded, inlet_from_environment, links_environment
from samovar.router.proxy.proxy_guard import ProxyGuard, proxy_environment
from samovar.router.routing import ReplicaFailed
from tests.support.constants import tuned
from tests.support.inside import boxes_of, bytes_in, carrier_of, links_of
from tests.support.router.fake_replica import say
from tests.support.router.linked_replicas import (
    LINKS,
    LOOPBACK,
    Proxied,
    deltas,
    proxied,
    through_proxy,
)
from tests.support.router.router_harness import KEY, House, make_settings, until

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
WORDS = ["Hel", "lo", " \u2028", "world"]
HELLO = [Admitted("replica-1", 0, 0.0), Delta(0, "Hel", (1,))]


def worded_house(script: Any = None) -> House:
    return House(script or (lambda request: say(WORDS)))


def text_of(body: str) -> str:
    return "".join(
        choice["delta"].get("content") or "" for one in deltas(body) for choice in one.get("choices", ())
    )


async def test_a_stream_over_links_says_what_it_says_without() -> None:
    async with House(lambda request: say(WORDS)).client() as client:
        plain = await client.post(CHAT, json=STREAM)
    house = worded_house()
    async with through_proxy(house) as (client, there):
        linked = await client.post(CHAT, json=STREAM)
        assert linked.status_code == 200
        assert text_of(linked.text) == text_of(plain.text) == "".join(WORDS)
        ends = [deltas(one.text)[-1] for one in (linked, plain)]  # usage and receipt
        assert all(end["receipt"].pop("request_id") for end in ends)
        assert ends[0] == ends[1]
        assert linked.text.endswith("data: [DONE]\n\n")
        assert linked.headers["x-replica"] == "replica-1"
        assert len(linked.headers.get_list("x-request-id")) == 1
        assert not there.serve.carried
        assert (there.serve.counted, there.serve.ongoing) == (1, 0)
        assert not boxes_of(there.inlet)
        await until(lambda: there.ingress.calls.open == 0)
    house.check()


ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", CHAT, {"json": BODY}),
    ("POST", CHAT, {"json": {**BODY, "model": "other"}}),
    ("POST", CHAT, {"content": b"{"}),
    ("POST", CHAT, {"content": b"x", "headers": {"content-type": "text/plain"}}),
    ("GET", CHAT, {}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/tiny?x=%C3%A9", {}),
    ("HEAD", "/health", {}),
    ("GET", "/health", {}),
    ("OPTIONS", "/v1/models", {}),
    ("OPTIONS", "/v1/models", {"headers": {"origin": "http://a", "access-control-request-method": "POST"}}),
    ("DELETE", "/v1/sessions/s%2F1", {}),
    ("GET", "/nothing/here", {}),
    ("GET", "/v1/models", {"headers": {"authorization": "Bearer wrong"}}),
    ("POST", "/tokenize", {"json": {"prompt": "é" * 20_000}}),
    ("GET", "/openapi.json", {}),
    ("GET", "/version", {"headers": {"x-request-id": "mine"}}),
]


def _without_times(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name != "created"}


@pytest.mark.parametrize(("method", "path", "options"), ASKED)
async def test_both_roads_give_the_same_answer(method: str, path: str, options: dict[str, Any]) -> None:
    answers = []
    for takes in (True, False):
        house = House(lambda request: say(WORDS), settings=make_settings(keys={"t": KEY}))
        async with through_proxy(house, takes=takes) as (client, there):
            headers = {"authorization": f"Bearer {KEY}", "x-request-id": "r", **options.get("headers", {})}
            answer = await client.request(method, path, **{**options, "headers": headers})
            assert (len(there.serve.carried), there.serve.counted) == ((0, 1) if takes else (1, 1))
            told = answer.content
            if told.startswith(b"{"):
                told = json.loads(told, object_hook=_without_times)
                told.pop("id", None)
            head = sorted(one for one in answer.headers.multi_items() if one[0] != "x-ingress")
            answers.append((answer.status_code, head, told))
            await until(lambda there=there: there.ingress.calls.open == 0)  # type: ignore[misc]
        house.check()
    assert answers[0] == answers[1]


async def test_an_ingress_that_reaches_no_proxy_leaves_the_request_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = worded_house()

    async def elsewhere(self: Any) -> ReplyTo:
        return ReplyTo(LOOPBACK, 1, "0" * 64)

    async with through_proxy(house) as (client, there):
        monkeypatch.setattr(there.inlet, "address", elsewhere.__get__(there.inlet))
        assert text_of((await client.post(CHAT, json=STREAM)).text) == "".join(WORDS)
        assert len(there.serve.carried) == 1


@pytest.mark.parametrize("why", ["closing", "full", "gone", "elsewhere", "no app", "control"])
async def test_what_no_ingress_takes_serve_brings(why: str) -> None:
    house = worded_house()
    async with through_proxy(house, tuned(LINKS, calls_max=1)) as (client, there):
        holding, path = None, "/v1/models"
        if why == "closing":
            there.taker.refuse()
        elif why == "full":
            house.replicas.script = lambda request: [*HELLO, asyncio.Event()]
            holding = asyncio.create_task(client.post(CHAT, json=STREAM))
            await until(lambda: there.ingress.calls.open == 1)
        elif why == "gone":
            there.ingress.close()
        elif why == "elsewhere":  # another application of the same cluster
            there.serve.route = "/other"
        elif why == "no app":
            there.serve.route = None
        else:
            path = "/-/healthz"
        assert (await client.get(path)).status_code == (404 if why == "control" else 200)
        assert [scope["path"] for scope in there.serve.carried] == [path]
        if holding is not None:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await until(lambda: house.service.concurrency.open_total == 0)


async def test_behind_another_serve_all_requests_are_serve_s() -> None:
    house = worded_house()
    async with through_proxy(house) as (_, there):
        served: list[Scope] = []

        async def unknown(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope)
            await house.app(scope, receive, send)

        guard = ProxyGuard(unknown, limits=LimitsSettings(), carrier=carrier_of(there.guard))
        sent: list[Any] = []
        await posted(guard, sent)
        assert len(served) == 1
        assert sent[0]["status"] == 200


async def test_an_ingress_that_is_lost_in_mid_stream_ends_it_with_an_error() -> None:
    house = worded_house(lambda request: [*HELLO, asyncio.Event()])
    async with through_proxy(house) as (client, there):
        asking = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: any(box.has_spoken for box in boxes_of(there.inlet).values()))
        there.ingress.close()  # the process ends
        body = (await asking).text
        assert text_of(body) == "Hel"
        assert '"code":"ingress_lost"' in body
        assert body.endswith("data: [DONE]\n\n")
        assert not there.serve.carried
        await until(lambda: house.service.concurrency.open_total == 0)
        assert there.serve.ongoing == 0


async def test_an_answer_that_fails_in_mid_stream_says_so_over_the_link() -> None:
    gate = asyncio.Event()
    house = worded_house(lambda request: [*HELLO, gate, ReplicaFailed("a bug")])
    async with through_proxy(house) as (client, there):
        asking = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: any(box.has_spoken for box in boxes_of(there.inlet).values()))
        gate.set()
        body = (await asking).text
        assert text_of(body) == "Hel"
        assert "internal_error" in body
        assert body.endswith("data: [DONE]\n\n")


async def posted(
    guard: ProxyGuard, sent: list[Any] | None = None, left: asyncio.Event | None = None, send: Any = None
) -> None:
    """Post a chat that is to be streamed, as a server does that reports a disconnect after `left`."""
    request = [{"type": "http.request", "body": json.dumps(STREAM).encode(), "more_body": False}]

    async def receive() -> Any:
        if request:
            return request.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def keep(message: Any) -> None:
        if sent is not None:
            sent.append(message)

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
    await guard(scope, receive, send or keep)


async def test_a_client_that_leaves_cancels_its_request() -> None:
    house = worded_house(lambda request: [*HELLO, asyncio.Event()])
    there, left, sent = await proxied(house.app), asyncio.Event(), list[Any]()
    await house.service.readiness.poll()
    serving = asyncio.create_task(posted(there.guard, sent, left))
    await until(lambda: len(sent) > 1)
    assert house.service.concurrency.open_total == 1
    left.set()
    await asyncio.wait_for(serving, 10)
    await until(lambda: house.service.concurrency.open_total == 0 and there.ingress.calls.open == 0)
    assert not boxes_of(there.inlet)
    assert not there.serve.carried
    there.close()


async def test_a_client_that_does_not_read_holds_its_replica_back_at_the_proxy() -> None:
    """The proxy keeps `stream_bytes_max`; the ingress waits, and ends the request in `write_idle_s`."""
    limits = {"write_idle_s": 1}
    house = House(lambda request: say(["x" * 200] * 40), settings=make_settings(limits=limits))
    gate, sent = asyncio.Event(), asyncio.Event()
    there = await proxied(house.app, tuned(LINKS, stream_bytes_max=1024), limits=LimitsSettings(**limits))
    await house.service.readiness.poll()

    async def send(message: Any) -> None:
        sent.set()
        await gate.wait()  # a full socket

    serving = asyncio.create_task(posted(there.guard, left=gate, send=send))
    await asyncio.wait_for(sent.wait(), 10)
    await until(lambda: house.service.concurrency.open_total == 0)
    held = [bytes_in(box) for box in boxes_of(there.inlet).values()]
    assert not held or max(held) < 4 * 1024
    gate.set()
    await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 10)
    assert not boxes_of(there.inlet)
    there.close()


def front(write: Any) -> Any:
    """An ingress that streams what `write` sends, without anything else."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await write(send)

    return app


async def test_a_body_larger_than_a_connection_may_hold_arrives_and_harms_no_other_stream() -> None:
    got = bytearray()

    async def write(send: Send) -> None:
        await send({"type": "http.response.body", "body": b"x" * (8 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    there = await proxied(front(write), tuned(LINKS, unread_bytes_max=1 << 20))

    async def send(message: Any) -> None:
        got.extend(message.get("body", b""))

    await asyncio.wait_for(posted(there.guard, send=send), 20)
    assert len(got) == (8 << 20) + 3
    assert bytes(got[-3:]) == b"end"
    there.close()


async def test_an_app_that_ends_without_an_answer_is_a_lost_one() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        """Without a word."""

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a bug below all middleware")

    for app in (silent, failing):
        there, sent = await proxied(app), list[Any]()
        await asyncio.wait_for(posted(there.guard, sent), 10)
        assert sent[0]["status"] == 503
        assert b"ingress_lost" in sent[1]["body"]
        assert not there.serve.carried
        there.close()


async def test_an_ingress_that_stops_refuses_and_waits_for_what_it_has_taken() -> None:
    gate = asyncio.Event()
    house = worded_house(lambda request: [*HELLO, gate, *say(["lo"])[1:]])
    async with through_proxy(house) as (client, there):
        asking = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: any(box.has_spoken for box in boxes_of(there.inlet).values()))
        there.taker.refuse()
        finishing = asyncio.create_task(there.taker.finish(60.0))
        assert (await client.get("/v1/models")).status_code == 200
        assert len(there.serve.carried) == 1
        assert not finishing.done()
        gate.set()
        assert text_of((await asking).text) == "Hello"
        await asyncio.wait_for(finishing, 10)


@pytest.mark.guarantee("F33")
async def test_a_client_cannot_name_where_its_answer_is_sent() -> None:
    house = worded_house()
    seen: list[tuple[bytes, bytes]] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        await house.app(scope, receive, send)

    for takes in (True, False):
        async with through_proxy(house, app=noting, takes=takes) as (client, _):
            for name in ("x-samovar-reply-to", "X_Samovar_Reply_To"):
                headers = {name: f"10.0.0.1 80 {'0' * 64} mine"}
                assert (await client.post(CHAT, json=STREAM, headers=headers)).status_code == 200
    assert seen
    assert not [name for name, _ in seen if b"reply" in name]


@pytest.mark.guarantee("F33")
async def test_who_does_not_know_the_secret_calls_no_ingress() -> None:
    served = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.set()

    there = await proxied(app)
    to = await there.ingress.address()
    wrong = ReplyTo(to.host, to.port, "0" * len(to.secret))
    assert carrier_of(there.guard) is not None
    assert await links_of(carrier_of(there.guard)).reach(wrong) is None
    assert not served.is_set()
    assert there.ingress.calls.open == 0
    there.close()


def test_the_proxy_learns_from_its_environment_whether_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings()
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: LOOPBACK)
    inlet = inlet_from_environment(links_environment(settings))
    assert inlet is not None
    assert inlet._host == LOOPBACK
    assert inlet_from_environment({}) is None
    assert open_inlet(LINKS.model_copy(update={"enabled": False}), 0.02) is None
    assert are_proxies_guarded(proxy_environment(settings))
    assert not are_proxies_guarded(links_environment(settings)), "somebody else's proxies"
    assert inlet.tls is None
    for name, value in tls_in(Path("/x")).environment().items():
        monkeypatch.setenv(name, value)
    assert (told := open_inlet(LINKS, 0.02)) is not None
    assert told.tls == tls_in(Path("/x")), "where Ray speaks TLS, links do"
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    with pytest.raises(CertificateRefused, match="RAY_TLS_CA_CERT"):
        open_inlet(LINKS, 0.02)


async def test_a_client_that_reads_slowly_is_not_one_that_reads_nothing() -> None:
    """Each 16 KB that a client reads lets the ingress go on: it never waits for all that is held."""
    pieces, reads, sizes = [0], asyncio.Semaphore(0), list[int]()
    written, waited_for = [0], [0]

    async def write(send: Send) -> None:
        for _ in range(128):
            began = pieces[0]
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
            written[0] += 1
            waited_for[0] = max(waited_for[0], pieces[0] - began)
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    there: Proxied = await proxied(front(write))

    async def send(message: Any) -> None:
        body = message.get("body", b"")
        if body:
            await reads.acquire()
            pieces[0] += 1
            sizes.append(len(body))

    serving = asyncio.create_task(posted(there.guard, send=send))
    await until(lambda: any(box._is_paused for box in boxes_of(there.inlet).values()))
    while not serving.done():
        before = written[0], pieces[0]
        reads.release()
        await until(lambda before=before: serving.done() or pieces[0] > before[1])  # type: ignore[misc]
        if written[0] < 128:  # the client has read a piece: the ingress soon writes more
            await until(lambda before=before: written[0] > before[0] or waited_for[0] > 3)  # type: ignore[misc]
    await serving
    assert (sum(sizes), max(sizes)) == (128 * 8192 + 3, 1 << 14)
    assert waited_for[0] <= 3
    there.close()


async def test_a_large_answer_is_written_in_pieces_each_with_its_own_time() -> None:
    """A client that takes a piece within `write_idle_s` reads, however long the whole takes."""
    sizes, ends = list[int](), list[bool]()
    body = bytes(range(256)) * 1024 + b"end"

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))
        ends.append(not message.get("more_body", False))
        got.extend(message.get("body", b""))

    got = bytearray()
    sender = ResponseSender(send, 60.0)
    await sender({"type": "http.response.start", "status": 200, "headers": []})
    await sender({"type": "http.response.body", "body": body, "more_body": False})
    assert bytes(got) == body
    assert (max(sizes), sender.is_complete) == (1 << 14, True)
    assert ends[1:] == [False] * 16 + [True]
    sender.close()


async def test_the_live_stream_ends_when_its_reader_leaves() -> None:
    house = worded_house()
    async with through_proxy(house) as (client, there):
        live = asyncio.create_task(client.get("/v1/live"))
        await until(lambda: there.ingress.calls.open == 1 and bool(there.inlet._from))
        live.cancel()
        await asyncio.gather(live, return_exceptions=True)
        await until(lambda: not boxes_of(there.inlet) and there.ingress.calls.open == 0)


async def test_the_end_of_the_app_waits_for_what_came_over_links_but_not_for_live_streams() -> None:
    """Serve ends the app's lifespan when it stops an ingress, and does not count these requests."""
    gate = asyncio.Event()
    house = worded_house(lambda request: [*HELLO, gate, *say(["lo"])[1:]])
    async with through_proxy(house) as (client, there):
        app = there.taker.app = build_api(house.service, there.taker)
        begun, ending = asyncio.Event(), asyncio.Event()

        async def lifespan() -> None:
            async with app.router.lifespan_context(app):
                begun.set()
                await ending.wait()

        living = asyncio.create_task(lifespan())
        await asyncio.wait_for(begun.wait(), 10)
        live = asyncio.create_task(client.get("/v1/live"))
        asking = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: there.ingress.calls.open == 2 and len(there.inlet._from) == 2)
        ending.set()
        assert (await asyncio.wait_for(live, 10)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200  # through Serve, as long as that calls it
        assert not living.done()
        assert len(there.serve.carried) == 1
        gate.set()
        assert text_of((await asking).text) == "Hello"
        await asyncio.wait_for(living, 30)
