"""A process is killed, and another user listens on its port: it is told nothing, and nothing it says counts.

The other user is `nobody` where tests run as root; elsewhere it is ourselves, which is as much as a test can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from samovar.configs.settings import EngineSettings
from samovar.replicas.links import EventSender, LinkCall, Links, Mailbox
from samovar.replicas.messages import Delta, GenerateRequest, ReplyTo, Route, SamplingParams
from samovar.replicas.serving.deployment import places
from samovar.replicas.serving.served import UNREACHED, call_handler, pack_request
from samovar.router.proxy import ListedIngress
from samovar.router.proxy.carrier import packed_request
from samovar.router.routing import roster
from tests.faults.dead_listener import NOBODY
from tests.support.engines.engines import prompt_of
from tests.support.inside import carrier_of, connecting_by, direct_calls, links_of, replicas_in, unreached_by
from tests.support.router.called_replicas import called
from tests.support.router.linked_replicas import LINKS, LOOPBACK, Proxied, proxied
from tests.support.router.router_harness import until
from tests.support.router.tiny_replicas import tiny_replicas

ROOT = Path(__file__).parents[2]
MODULE = Path(__file__).with_name("dead_listener.py")
KEY, PROMPT = "alice-key-0123456789abcdef", "what nobody else is to read"
LIVES = "from an ingress that lives"
HOW = ["welcome", "number", "proof"]

pytestmark = pytest.mark.guarantee("F33")


class Doomed:
    """A process that takes requests over links. `to`: where, with its secret."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.dead_listener", "listen"], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        to = ReplyTo.of(json.loads(self._process.stdout.readline()))
        assert to is not None
        self.to = to

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def squatter(to: ReplyTo, how: str, *secrets: str) -> Iterator[None]:
    """Let another user listen there meanwhile; then it must have been told none of the secrets."""
    command = [sys.executable, str(MODULE), "squat", str(to.port), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            uid = int(process.stdout.readline())
            assert uid == (NOBODY if os.geteuid() == 0 else os.geteuid())
            yield
            process.stdin.close()
            told = bytes.fromhex(process.stdout.readline().decode())
        finally:
            process.kill()
    assert len(told) <= 64, "a number and a proof: it was told more"
    for secret in (to.secret, KEY, PROMPT, *secrets):
        assert secret.encode() not in told
        assert told.count(bytes.fromhex(to.secret)) == 0


@pytest.fixture
def doomed() -> Iterator[Doomed]:
    made = Doomed()
    try:
        yield made
    finally:
        made.kill()


async def die(doomed: Doomed, links: Links) -> None:
    """Kill it, and wait until its callers have seen that their connections have ended."""
    doomed.kill()
    await until(lambda: not any(link.is_open for link in links_of(links).values()))


async def forget(links: Links) -> None:
    """Have the address tried again at once; wait until it has been found out."""
    await until(lambda: not connecting_by(links))
    assert unreached_by(links)
    assert not links_of(links)
    unreached_by(links).clear()


def posted(there: Proxied) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(there.guard)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{LOOPBACK}", timeout=60)


async def test_f33_on_a_dead_ingresses_port(doomed: Doomed) -> None:
    there = await proxied(PlainTextResponse(LIVES))
    there.known.update([ListedIngress("ingress-1", "here", doomed.to)], "here")
    headers, body = {"authorization": f"Bearer {KEY}"}, {"prompt": PROMPT}
    assert carrier_of(there.guard) is not None
    links = links_of(carrier_of(there.guard))
    async with posted(there) as client:
        before = await client.post("/v1/completions", json=body, headers=headers)
        assert before.text == "from the ingress that will die"
        assert not there.serve.carried
        await die(doomed, links)
        for how in HOW:
            with squatter(doomed.to, how, (await there.inlet.address()).secret):
                after = [await client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
            assert [answer.text for answer in after] == [LIVES, LIVES]
            await forget(links)
    assert len(there.serve.carried) == 2 * len(HOW)
    there.close()


async def test_f33_on_a_dead_replicas_port(doomed: Doomed, tiny_llama: Path) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with tiny_replicas(tiny_llama) as replicas, called(replicas) as front:
        (listed,) = replicas_in(roster.ROSTER)
        roster.ROSTER.update([replace(listed, address=doomed.to)], roster.RankOptions())
        assert direct_calls(front.client) is not None
        links = direct_calls(front.client)._links
        assert await links.reach(doomed.to) is not None
        await die(doomed, links)
        for number, how in enumerate(HOW, 1):
            asked = GenerateRequest(how, prompt_of(20), sampling)
            with squatter(doomed.to, how, (await front.inlet.address()).secret):
                events = [one async for some in front.client.generate(asked, "session") for one in some]
            assert len(front.handle.calls) == number
            assert sum(len(getattr(event, "token_ids", ())) for event in events) == 4
            await forget(links)


async def test_f33_on_a_dead_proxys_port(doomed: Doomed) -> None:
    """The ingress is to answer a request there: it must not say its answer to who has the port now."""
    ran, refused = list[Scope](), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        ran.append(scope)
        await PlainTextResponse(PROMPT)(scope, receive, send)

    there = await proxied(app)
    links = there.taker._links
    assert await links.reach(doomed.to) is not None
    await die(doomed, links)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    payload = packed_request(scope, doomed.to, "t", b"", more=False)
    for how in HOW:
        with squatter(doomed.to, how):
            await there.taker._serve(LinkCall(payload, Mailbox(), refused.append))
        await forget(links)
    assert refused == [UNREACHED] * len(HOW)
    assert not ran
    there.close()


async def test_f33_on_a_dead_ingresses_port_for_answers(doomed: Doomed) -> None:
    """The same of a replica, whose events go to the ingress that asked."""
    ran, refused, links = list[GenerateRequest](), list[str](), Links(LINKS, 60.0)

    @asynccontextmanager
    async def answering(request: GenerateRequest, sender: EventSender) -> AsyncIterator[None]:
        ran.append(request)
        sender.put(Delta(0, PROMPT, (1,), (), "stop"))
        yield

    assert await links.reach(doomed.to) is not None
    await die(doomed, links)
    request = GenerateRequest("r", [1, 2], SamplingParams(), reply_to=doomed.to, route=Route(ticket="t"))
    handle = call_handler(links, places(EngineSettings()), answering)
    for how in HOW:
        with squatter(doomed.to, how):
            await handle(LinkCall(pack_request(request), Mailbox(), refused.append))
        await forget(links)
    assert refused == [UNREACHED] * len(HOW)
    assert not ran
