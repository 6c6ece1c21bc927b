"""Streams over a real socket: the openai client, keep-alives, failures and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai._streaming import SSEDecoder

from samovar.replicas.messages import Admitted, Delta, Failed, GenerateRequest, Refused, TokenLogprob
from samovar.router.openai import PING, PING_BEHIND_IDS
from samovar.router.openai.dialect import DONE
from samovar.router.routing.replica_client import ReplicaLost
from tests.support.router.fake_replica import Script, say
from tests.support.router.router_harness import MODEL, House, chat, make_settings, spoken, until

CHAT = "/v1/chat/completions"


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def chunks_of(text: str) -> list[Any]:
    """The JSON of all data lines; a stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_openai_client_streams_chat_with_usage() -> None:
    house = House(lambda request: say(["Hel", "lo", "!"], cached=32))
    async with house.server() as url, client_of(url) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_bytes_headers_and_continuous_usage() -> None:
    async with House().server() as url, httpx.AsyncClient() as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await client.post(url + CHAT, json=chat(stream=True, stream_options=options))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-cache"] == "miss"
    assert response.headers["x-replica"] == "replica-1"
    chunks = chunks_of(response.text)
    usages = [chunk["usage"] for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 2, 2]
    assert all(usage["prompt_tokens"] > 0 for usage in usages)
    assert chunks[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_openai_client_without_stream_and_errors() -> None:
    house = House()
    async with house.server() as url, client_of(url) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices[0].message.content == "Hello"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=[], n=99)
        assert bad.value.code == "invalid_value"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
        house.replicas.script = lambda request: [Refused("queue_full", "full", 1.0)]
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
            )
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_openai_client_streams_n_choices_and_logprobs() -> None:
    token = TokenLogprob(8, "a", b"a", -0.25, (TokenLogprob(9, "b", b"b", -1.5),))

    def script(request: GenerateRequest) -> Script:
        deltas = [Delta(index, "a", (8,), (token,), "stop") for index in range(request.n)]
        return [Admitted("replica-1", 0, 0.0), *deltas]

    async with House(script).server() as url, client_of(url) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=3,
            logprobs=True,
            top_logprobs=1,
            stream=True,
        )
        chunks = [chunk async for chunk in stream]
        plain = await client.completions.create(model=MODEL, prompt=["p", "q"], n=2, stream=True)
        texts = {(chunk.choices[0].index, chunk.choices[0].text) async for chunk in plain}
    with_text = [chunk.choices[0] for chunk in chunks if chunk.choices[0].delta.content]
    assert {choice.index for choice in with_text} == {0, 1, 2}
    logprobs = with_text[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs[0].logprob == -1.5
    assert {index for index, text in texts if text == "a"} == {0, 1, 2, 3}


async def test_pings_during_silence() -> None:
    gate = asyncio.Event()
    house = House(lambda request: [gate, *say(["x"])], settings=make_settings(sse_keepalive_s=0.02))
    async with (
        house.server() as url,
        httpx.AsyncClient() as client,
        client.stream("POST", url + CHAT, json=chat(stream=True)) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            if text.count(": ping") >= 2:
                gate.set()
    assert "x-cache" not in response.headers  # not known when the headers had to go
    chunks = chunks_of(text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[1]["choices"][0]["delta"]["content"] == "x"


async def test_pings_while_tokens_come_that_are_held_back() -> None:
    """A client waits for bytes, whatever the engine says meanwhile."""
    held = '<tool_call>{"arguments": {"k": "' + "x" * 40
    said = spoken(held)
    # A machine that stalls between two tokens pings in any case: so much longer is the silence than a gap.
    steps: Script = [one for step in said for one in (0.01, step)]
    house = House(lambda request: steps, settings=make_settings(sse_keepalive_s=0.4))
    tools = [{"type": "function", "function": {"name": "get"}}]
    async with house.server() as url, httpx.AsyncClient() as client:
        response = await client.post(url + CHAT, json=chat(stream=True, tools=tools))
    role, *others = response.text.split("\n\n")
    assert '"role":"assistant"' in role
    assert others[0] == ": ping"


@pytest.mark.parametrize(
    "end", [Failed("inside"), ReplicaLost("ActorDiedError"), None], ids=["f", "l", "cut"]
)
async def test_a_failure_in_mid_stream_is_an_error_event_never_a_cut(end: Any) -> None:
    steps: Script = [Admitted("replica-1", 0, 0.0), Delta(0, "Hel", (1,))]
    house = House(lambda request: [*steps, end] if end else steps)
    async with house.server() as url, httpx.AsyncClient() as client, client_of(url) as openai_client:
        response = await client.post(url + CHAT, json=chat(stream=True))
        stream = await openai_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
    chunks = chunks_of(response.text)
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "inside" not in response.text


async def test_wall_time_in_mid_stream_is_an_error_event() -> None:
    steps: Script = [Admitted("replica-1", 0, 0.0), Delta(0, "a", (1,)), asyncio.Event()]
    house = House(lambda request: steps, settings=make_settings(limits={"request_timeout_s": 1}))
    async with house.server() as url, httpx.AsyncClient() as client:
        response = await client.post(url + CHAT, json=chat(stream=True))
    assert chunks_of(response.text)[-1]["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_replica_at_once(stream: bool) -> None:
    steps: Script = [Admitted("replica-1", 0, 0.0), Delta(0, "a", (1,)), asyncio.Event()]
    house = House(lambda request: steps)
    async with house.server() as url:
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(client.post(url + CHAT, json=chat(stream=stream)))
            await house.replicas.began.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(house.replicas.cancelled.wait(), 5)
        await until(lambda: house.service.concurrency.open_total == 0)
        async with httpx.AsyncClient() as client:
            text = (await client.get(url + "/metrics")).text
    assert f'samovar_requests_total{{route="{CHAT}",status="499"}} 1.0' in text


async def test_a_client_that_leaves_while_queued_cancels_before_admission() -> None:
    house = House(lambda request: [asyncio.Event()])
    async with house.server() as url:
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(client.post(url + CHAT, json=chat(stream=True)))
            await house.replicas.began.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(house.replicas.cancelled.wait(), 5)


async def test_a_client_that_reads_nothing_is_cut() -> None:
    big = "x" * 200_000
    words: Script = [Admitted("replica-1", 0, 0.0), *(Delta(0, big, (1,)) for _ in range(200))]
    house = House(
        lambda request: [*words, asyncio.Event()], settings=make_settings(limits={"write_idle_s": 1})
    )
    async with house.server() as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await asyncio.wait_for(house.replicas.cancelled.wait(), 10)
        writer.transport.abort()
        del reader


async def test_finished_streams_cancel_nothing() -> None:
    house = House()
    async with house.server() as url, httpx.AsyncClient() as client:
        await client.post(url + CHAT, json=chat(stream=True))
        await client.post(url + CHAT, json=chat())
    assert not house.replicas.cancelled.is_set()


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
async def test_what_some_clients_take_for_a_line_end_is_escaped(char: str) -> None:
    house = House(lambda request: say([f"a{char}b"]))
    async with house.server() as url, httpx.AsyncClient() as client:
        async with client.stream("POST", url + CHAT, json=chat(stream=True)) as response:
            lines = [line async for line in response.aiter_lines() if line]
        whole = await client.post(url + CHAT, json=chat())
    assert all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[1].removeprefix("data: "))["choices"][0]["delta"]["content"] == f"a{char}b"
    assert whole.content.isascii()
    assert whole.json()["choices"][0]["message"]["content"] == f"a{char}b"


async def test_a_failure_in_a_half_sent_json_body_adds_no_event() -> None:
    house = House()
    await house.service.readiness.poll()
    body = json.dumps(chat()).encode()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            raise RuntimeError("the socket broke")

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
    read = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in read:
            return message
        return await asyncio.Future()

    await house.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert json.loads(sent[1]["body"])["object"] == "chat.completion"


def test_a_ping_is_no_event_for_openais_client_also_behind_an_id() -> None:
    event = b"id: abc-1\ndata: {}\n\n"
    whole = [
        one.data
        for one in SSEDecoder().iter_bytes(iter([event, PING_BEHIND_IDS, PING_BEHIND_IDS, event, DONE]))
    ]
    assert whole == ["{}", "{}", "[DONE]"]
    alone = SSEDecoder().iter_bytes(iter([event, PING, event]))
    assert "" in [one.data for one in alone], "an empty line would do as well: the client has changed"
