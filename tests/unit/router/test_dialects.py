"""What holds of every API alike: each `Dialect` asks replicas the same and tells the same of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from samovar.replicas.messages import GenerateRequest, Refused
from samovar.router.routing.replica_client import ReplicaFailed, ReplicaLost
from tests.support.router.chat_templates import QWEN3, tokenizer_with
from tests.support.router.fake_replica import Script
from tests.support.router.media_parts import media_requests
from tests.support.router.router_harness import CONTEXT, KEY, MODEL, House, bearer, make_settings, spoken

THINKS = "<think>\nhm\n</think>\n\nLet me see é."
CALL = '<tool_call>\n{"name": "get", "arguments": {"k": "é"}}\n</tool_call>'


@dataclass(frozen=True)
class Api:
    """A route as its clients know it. `prompt`, `most`: fields of the prompt and of the most tokens.

    `cut`: what the end of an answer is called that was cut by its length. `counts`: keys of usage: input,
    output, cached.
    """

    path: str
    prompt: str
    most: str
    cut: str
    counts: tuple[str, str, str]
    id_prefix: str

    def body(self, text: str = "hi", *, stream: bool = False, most: int = 64, **more: Any) -> dict[str, Any]:
        said: Any = [{"role": "user", "content": text}] if self.prompt == "messages" else text
        body = {"model": MODEL, self.prompt: said, self.most: most, "stream": stream, **more}
        if stream and self.path in (CHAT.path, TEXT.path):
            body["stream_options"] = {"include_usage": True}
        return body

    def tools(self) -> list[dict[str, Any]]:
        schema = {"type": "object"}
        if self is MESSAGES:
            return [{"name": "get", "input_schema": schema}]
        if self is RESPONSES:
            return [{"type": "function", "name": "get", "parameters": schema}]
        return [{"type": "function", "function": {"name": "get", "parameters": schema}}]

    def told(self, answer: dict[str, Any]) -> tuple[str, str]:
        """Return the text of a whole answer, and why it ended."""
        if self is CHAT:
            choice = answer["choices"][0]
            return choice["message"]["content"] or "", choice["finish_reason"]
        if self is TEXT:
            return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        if self is MESSAGES:
            return "".join(block.get("text", "") for block in answer["content"]), answer["stop_reason"]
        parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts), (answer["incomplete_details"] or {}).get("reason", "")

    def streamed(self, text: str) -> tuple[str, str, dict[str, Any]]:
        """Return the text of a stream's deltas, why it ended, and its usage."""
        said, end, usage = "", "", {}
        for event in events(text):
            assert "error" not in event, event
            if self in (CHAT, TEXT):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    said += (choice["delta"].get("content") if self is CHAT else choice["text"]) or ""
                    end = choice["finish_reason"] or end
            elif self is MESSAGES:
                said += event.get("delta", {}).get("text", "")
                end = event.get("delta", {}).get("stop_reason") or end
                usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
            else:
                said += event["delta"] if event["type"] == "response.output_text.delta" else ""
                usage = event.get("response", {}).get("usage") or usage
                end = (event.get("response", {}).get("incomplete_details") or {}).get("reason", end)
        return said, end, usage

    def used(self, usage: dict[str, Any]) -> tuple[int, int, int]:
        """Return the tokens of the input, of the output, and of the input that were cached."""
        whole, out, cached = self.counts
        details = usage.get(f"{whole}_details") or usage
        known = details[cached]
        rest = usage.get("cache_creation_input_tokens", 0) + known if self is MESSAGES else 0
        return usage[whole] + rest, usage[out], known

    def error(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the error of a document, after a check of its shape."""
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}, document
        assert (document.get("type") == "error") == (self is MESSAGES)
        return error


OPENAI = ("prompt_tokens", "completion_tokens", "cached_tokens")
CHAT = Api("/v1/chat/completions", "messages", "max_tokens", "length", OPENAI, "chatcmpl-")
TEXT = Api("/v1/completions", "prompt", "max_tokens", "length", OPENAI, "cmpl-")
MESSAGES = Api(
    "/v1/messages",
    "messages",
    "max_tokens",
    "max_tokens",
    ("input_tokens", "output_tokens", "cache_read_input_tokens"),
    "msg_",
)
RESPONSES = Api(
    "/v1/responses",
    "input",
    "max_output_tokens",
    "max_output_tokens",
    ("input_tokens", "output_tokens", "cached_tokens"),
    "resp_",
)
APIS = (CHAT, TEXT, MESSAGES, RESPONSES)
every_api = pytest.mark.parametrize("api", APIS, ids=[api.path.removeprefix("/v1/") for api in APIS])


def events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a stream's events."""
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def house(text: str = "Hello é", **more: Any) -> House:
    return House(lambda request: spoken(text, **more), tokenizer=tokenizer_with(QWEN3))


async def post(house: House, api: Api, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with house.client(**headers) as client:
        return await client.post(api.path, json=body)


def one_of_a_kind(told: Sequence[Any]) -> Any:
    assert all(one == told[0] for one in told), told
    return told[0]


@every_api
async def test_a_stream_says_what_the_whole_answer_says(api: Api) -> None:
    asked = house(cached=16)
    whole = (await post(asked, api, api.body())).json()
    streamed = (await post(asked, api, api.body(stream=True))).text
    assert whole["id"].startswith(api.id_prefix)
    text, end = api.told(whole)
    said, ended, usage = api.streamed(streamed)
    assert (text, end) == (said, ended) == ("Hello é", end)
    assert end != api.cut
    prompt = len(one_of_a_kind([call.prompt_token_ids for call in asked.replicas.calls]))
    for counts in (whole["usage"], usage):
        inp, out, cached = api.used(counts)
        assert (inp, cached) == (prompt, 16)
        assert out == len(asked.replicas.script(asked.replicas.calls[0])) - 1
    assert whole["receipt"]["tokens"]["gpu"] == 16


async def test_all_ask_the_replicas_for_the_same() -> None:
    asked = house()
    for api in (CHAT, MESSAGES, RESPONSES):
        more = {"temperature": 0.5, "top_p": 0.9}
        assert (await post(asked, api, api.body(most=9, **more), **{"x-session-id": "s"})).status_code == 200
    calls = asked.replicas.calls
    one_of_a_kind([call.prompt_token_ids for call in calls])
    one_of_a_kind(
        [(call.sampling.temperature, call.sampling.top_p, call.sampling.max_tokens) for call in calls]
    )
    one_of_a_kind(asked.replicas.session_keys)


@every_api
async def test_an_answer_cut_by_its_length_says_so(api: Api) -> None:
    asked = house("ab", finish="length")
    assert api.told((await post(asked, api, api.body(most=2))).json()) == ("ab", api.cut)
    assert api.streamed((await post(asked, api, api.body(most=2, stream=True))).text)[:2] == ("ab", api.cut)
    assert {call.sampling.max_tokens for call in asked.replicas.calls} == {2}


@every_api
@pytest.mark.parametrize("has_tools", [False, True], ids=["text", "a call"])
async def test_a_replica_lost_anywhere_changes_nothing(api: Api, has_tools: bool) -> None:
    """Failover lies below the dialects: what was said goes on, is not said twice and counts once."""
    if has_tools and api is TEXT:
        pytest.skip("a completion has no tools")
    words = THINKS + CALL if has_tools else THINKS
    more = {"tools": api.tools()} if has_tools else {}

    def lost_after(count: int) -> House:
        def script(request: GenerateRequest) -> Script:
            whole = spoken(words)
            if request.resume is None:
                return [*whole[: 1 + count], ReplicaLost("gone")]
            return [whole[0], *whole[1 + len(request.resume.token_ids) :]]

        return House(script, tokenizer=tokenizer_with(QWEN3))

    steps = len(spoken(words)) - 1
    for is_streamed in (False, True):
        sent = api.body(stream=is_streamed, **more)
        truth = told(await post(house(words), api, sent))
        for count in (1, steps // 2, steps - 1):
            lost = lost_after(count)
            assert told(await post(lost, api, sent)) == truth, count
            assert len(lost.replicas.calls) == 2


def told(response: httpx.Response) -> Any:
    """Return what an answer says, without ids, times and how its events are cut."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        return bare(response.json())
    deltas: dict[str, str] = {}
    ends = []
    for event in events(response.text):
        for place, text in strings(event):
            if place.endswith(PIECES):
                deltas[place] = deltas.get(place, "") + text
        if event.get("usage") or "completed" in event.get("type", ""):
            ends.append(bare(event))
    return deltas, ends[-1]


PIECES = ("/content", "/reasoning_content", "/text", "/thinking", "/partial_json", "/arguments", "/delta")
IDS = ("id", "call_id", "request_id", "item_id", "created", "created_at", "completed_at", "signature")
ASIDE = ("receipt", "encrypted_content", "system_fingerprint")


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if key not in IDS + ASIDE}
    return [bare(one) for one in value] if isinstance(value, list) else value


def strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the strings of a document with their places, without the numbers of events and items."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from strings(one, f"{place}/{key}")
    elif isinstance(value, list):
        for one in value:
            yield from strings(one, place)
    elif isinstance(value, str):
        yield place, value


@every_api
async def test_a_replica_that_fails_is_an_error_in_the_apis_own_shape(api: Api) -> None:
    def broken(request: GenerateRequest) -> Script:
        return [*spoken("Hello there")[:3], ReplicaFailed("secret inside")]

    asked = House(broken)
    whole = await post(asked, api, api.body())
    assert whole.status_code == 500
    assert api.error(whole.json())["message"]
    streamed = await post(asked, api, api.body(stream=True))
    last = list(events(streamed.text))[-1]
    if api is RESPONSES:
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    else:
        assert api.error(last)["message"]
    assert "secret" not in whole.text + streamed.text


@every_api
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_is_refused_before_an_answer_is_a_status(api: Api, is_streamed: bool) -> None:
    full = House(lambda request: [Refused("queue_full", "full", 2.5)])
    response = await post(full, api, api.body(stream=is_streamed))
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert api.error(response.json())["type"] == "rate_limit_error"
    long = await post(House(), api, api.body("x " * 3 * CONTEXT, stream=is_streamed))
    assert long.status_code == 400
    assert str(CONTEXT) in api.error(long.json())["message"]
    other = await post(House(), api, api.body(stream=is_streamed, model="claude"))
    assert other.status_code == 404
    assert "claude" in api.error(other.json())["message"]
    locked = House(settings=make_settings(keys={"alpha": KEY}))
    nobody = await post(locked, api, api.body(stream=is_streamed), **bearer("sk-none"))
    assert nobody.status_code == 401
    assert "sk-none" not in nobody.text


@every_api
async def test_a_client_that_leaves_ends_the_replicas_work(api: Api) -> None:
    asked = House(lambda request: [*spoken("ab")[:2], asyncio.Event()])
    async with asked.server() as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", api.path, json=api.body(stream=True)) as response:
            await anext(response.aiter_lines())
        await asyncio.wait_for(asked.replicas.cancelled.wait(), 10)


@every_api
async def test_a_keys_open_requests_are_counted_over_all(api: Api) -> None:
    gate = asyncio.Event()
    settings = make_settings(limits={"concurrent_per_key": 1}, keys={"alpha": KEY})
    asked = House(lambda request: [gate, *spoken("x")], settings=settings)
    async with asked.client(**bearer(KEY)) as client:
        first = asyncio.create_task(client.post(CHAT.path, json=CHAT.body()))
        await asked.replicas.began.wait()
        second = await client.post(api.path, json=api.body())
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert api.error(second.json())["type"] == "rate_limit_error"
        gate.set()
        assert (await first).status_code == 200


async def test_images_and_documents_are_refused_by_their_place_in_every_api() -> None:
    wrong = []
    async with House(lambda request: spoken("hi")).client() as client:
        for path, body, field in media_requests(MODEL):
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            named = error["param"] if path != "/v1/messages" else error["message"].partition("=")[0]
            if (answer.status_code, named) != (400, field):
                wrong.append((path, body, answer.status_code, error))
    assert wrong == []
