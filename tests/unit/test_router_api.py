"""The HTTP API over scripted replicas: shapes, headers, limits, keys, and every bad input a 4xx."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from replicas.messages import Admitted, Delta, Failed, GenerateRequest, Refused, TokenLogprob
from router.replica_client import ReplicaLost
from tests.unit.fake_replica import INFO, Script, say
from tests.unit.router_harness import (
    CONTEXT,
    KEY,
    MODEL,
    OTHER_KEY,
    TOKENIZER,
    House,
    chat,
    error_of,
    make_settings,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def test_chat_answer_has_openai_shape() -> None:
    house = House(lambda request: say(["Hel", "lo"], cached=16))
    async with house.client() as client:
        response = await client.post(CHAT, json=chat(max_tokens=5, temperature=0, seed=3))
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 2
    details = body["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 16
    assert details["cached_tokens_by_tier"] == {"gpu": 16, "cpu": 0, "nvme": 0, "s3": 0}
    assert response.headers["x-replica"] == "replica-1"
    assert response.headers["x-cache"] == "hit; tokens=16"
    asked = house.replicas.calls[0].sampling
    assert (asked.max_tokens, asked.temperature, asked.seed) == (5, 0.0, 3)


async def test_cached_tokens_is_an_integer_zero_on_a_miss() -> None:
    async with House().client() as client:
        response = await client.post(CHAT, json=chat())
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert response.headers["x-cache"] == "miss"


async def test_max_tokens_defaults_to_what_is_left() -> None:
    house = House()
    async with house.client() as client:
        response = await client.post(CHAT, json=chat())
        await client.post(CHAT, json=chat(max_tokens=7, max_completion_tokens=9))
    prompt_tokens = response.json()["usage"]["prompt_tokens"]
    assert house.replicas.calls[0].sampling.max_tokens == CONTEXT - prompt_tokens
    assert house.replicas.calls[1].sampling.max_tokens == 9


@pytest.mark.parametrize("over", [0, 1])
async def test_context_limit_is_exact_and_names_both_numbers(over: int) -> None:
    house = House()
    async with house.client() as client:
        fits = CONTEXT - 10
        response = await client.post(
            COMPLETIONS, json={"model": MODEL, "prompt": [5] * fits, "max_tokens": 10 + over}
        )
        if over == 0:
            assert response.status_code == 200
            return
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(CONTEXT) in error["message"]
        assert str(fits) in error["message"]


@pytest.mark.parametrize(("tokens", "status"), [(CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400)])
async def test_prompt_may_be_one_token_shorter_than_the_context(tokens: int, status: int) -> None:
    async with House().client() as client:
        response = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": [5] * tokens})
        assert response.status_code == status
        if status == 400:
            assert error_of(response)["code"] == "context_length_exceeded"


async def test_a_replica_with_few_pages_lowers_the_context() -> None:
    house = House()
    house.replicas.infos = [_with_context(100)]
    async with house.client() as client:
        response = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": [5] * 100})
        assert "100 tokens" in error_of(response)["message"]
        models = (await client.get("/v1/models")).json()
    assert models["data"][0]["max_model_len"] == 100


async def test_models_routes() -> None:
    async with House().client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == [MODEL]
        one = (await client.get(f"/v1/models/{MODEL}")).json()
        assert one["max_model_len"] == CONTEXT
        assert one["object"] == "model"
        assert isinstance(one["created"], int)
        missing = await client.get("/v1/models/other/name")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
        unknown = await client.post(CHAT, json=chat(model="gpt-9"))
        assert (unknown.status_code, error_of(unknown)["param"]) == (404, "model")


async def test_health_metrics_version_and_unknown_routes() -> None:
    house = House()
    async with house.client() as client:
        assert (await client.get("/health")).json() == {"status": "ok", "replicas": 1}
        assert "version" in (await client.get("/version")).json()
        await client.post(CHAT, json=chat())
        text = (await client.get("/metrics")).text
        assert 'samovar_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'samovar_ttft_seconds_count{cache="miss"} 1.0' in text
        assert 'samovar_tokens_total{source="compute"}' in text
        assert 'samovar_pages{replica="replica-1",state="free"} 7.0' in text
        assert 'samovar_replica_steps_total{replica="replica-1"} 42.0' in text
        for path in ("/", "/docs", "/openapi.json", "/v1", "/v1/", "/health/", "//health"):
            response = await client.get(path)
            assert (response.status_code, error_of(response)["code"]) == (404, "unknown_route"), path
        wrong = await client.get(CHAT)
        assert (wrong.status_code, error_of(wrong)["code"], wrong.headers["allow"]) == (
            405,
            "method_not_allowed",
            "POST",
        )


async def test_health_is_503_until_ready_and_while_draining() -> None:
    house = House()
    house.replicas.infos = []
    async with house.client() as client:
        loading = await client.get("/health")
        assert (loading.status_code, loading.json()["status"]) == (503, "loading")
        assert loading.headers["retry-after"] == "1"
        early = await client.post(CHAT, json=chat())
        assert (early.status_code, error_of_loading(early)) == (503, "loading")
        house.replicas.infos = [_with_context(CONTEXT)]
        await house.service.readiness.poll()
        assert (await client.get("/health")).status_code == 200
        house.service.readiness.drain()
        assert (await client.get("/health")).json()["status"] == "draining"
        late = await client.post(CHAT, json=chat())
        assert (late.status_code, error_of(late)["code"]) == (503, "draining")
        assert late.headers["retry-after"]


async def test_completions_for_texts_ids_and_several_prompts() -> None:
    house = House(lambda request: say([str(len(request.prompt_token_ids))]))
    async with house.client() as client:
        one = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "abc"})
        assert one.json()["choices"][0]["text"] == str(len(TOKENIZER.encode("abc")))
        assert one.json()["object"] == "text_completion"
        many = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": [[5], [6, 7]], "n": 1})
        assert [choice["text"] for choice in many.json()["choices"]] == ["1", "2"]
        assert many.json()["usage"]["prompt_tokens"] == 3
        assert many.json()["usage"]["completion_tokens"] == 2
        for prompt in ([], [[]], "", [600], [[5], [600]], ["a"] * 9, 5):
            response = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt})
            assert response.status_code == 400, prompt
            error_of(response)


async def test_n_choices_and_logprobs() -> None:
    def script(request: GenerateRequest) -> Script:
        assert request.sampling.logprobs == 1
        best = TokenLogprob(7, "a", b"a", -0.5)
        token = TokenLogprob(8, "é", "é".encode(), -math.inf, (best,))
        return [
            Admitted("replica-1", 0, 0.0),
            Delta(1, "x", (8,), (token,)),
            Delta(0, "é", (8,), (token,), "length"),
            Delta(1, "y", (8,), (token,), "stop"),
        ]

    house = House(script)
    async with house.client() as client:
        body = (await client.post(CHAT, json=chat(n=2, logprobs=True, top_logprobs=1))).json()
        assert [choice["message"]["content"] for choice in body["choices"]] == ["é", "xy"]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
        entry = body["choices"][0]["logprobs"]["content"][0]
        assert entry == {
            "token": "é",
            "logprob": -9999.0,
            "bytes": [195, 169],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
        }
        plain = await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "p", "n": 2, "logprobs": 1})
        logprobs = plain.json()["choices"][1]["logprobs"]
        assert logprobs["text_offset"] == [0, 1]
        assert logprobs["top_logprobs"][0] == {"a": -0.5, "é": -9999.0}


async def test_ignored_fields_are_named_safely() -> None:
    async with House().client() as client:
        response = await client.post(CHAT, json=chat(**{"foo": [1], "b\r\nx: y": 1, "store": True}))
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "foo, b??x??y, store"


async def test_request_id_is_echoed_only_when_sane() -> None:
    async with House().client() as client:
        echoed = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert echoed.headers["x-request-id"] == "abc-1"
        odd = await client.get("/health", headers={"x-request-id": "a b"})
        assert odd.headers["x-request-id"] != "a b"


async def test_refusals_of_replicas_become_429_and_503() -> None:
    house = House(lambda request: [Refused("queue_full", "full", 2.5)])
    async with house.client() as client:
        for stream in (False, True):
            full = await client.post(CHAT, json=chat(stream=stream))
            assert (full.status_code, full.headers["retry-after"]) == (429, "3")
            assert error_of(full)["type"] == "rate_limit_error"
        house.replicas.script = lambda request: [Refused("draining", "later")]
        assert (await client.post(CHAT, json=chat())).status_code == 503
        house.replicas.script = lambda request: [Refused("too_long", "too long")]
        assert (await client.post(CHAT, json=chat())).status_code == 400


async def test_lost_and_failed_replicas() -> None:
    house = House(lambda request: [Admitted("replica-1", 0, 0.0), ReplicaLost("ActorDiedError")])
    async with house.client() as client:
        lost = await client.post(CHAT, json=chat())
        assert (lost.status_code, error_of(lost)["code"]) == (503, "replica_lost")
        house.replicas.script = lambda request: [Admitted("replica-1", 0, 0.0), Failed("secret inside")]
        failed = await client.post(CHAT, json=chat())
        assert failed.status_code == 500
        assert "secret" not in failed.text
        assert failed.headers["x-request-id"] in error_of(failed)["message"]
        house.replicas.script = lambda request: [Admitted("replica-1", 0, 0.0), ZeroDivisionError("inside")]
        bug = await client.post(CHAT, json=chat())
        assert bug.status_code == 500
        assert "inside" not in bug.text
        house.replicas.script = lambda request: [Admitted("replica-1", 0, 0.0), Delta(0, "cut", (1,))]
        assert (await client.post(CHAT, json=chat())).status_code == 500


async def test_concurrency_limits_give_429() -> None:
    gate = asyncio.Event()
    settings = make_settings(limits={"concurrent_per_key": 1})
    house = House(lambda request: [gate, *say(["x"])], settings=settings)
    async with house.client() as client:
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        await house.replicas.began.wait()
        second = await client.post(CHAT, json=chat())
        assert (second.status_code, error_of(second)["code"]) == (429, "concurrency_limit")
        assert second.headers["retry-after"] == "1"
        gate.set()
        assert (await first).status_code == 200


async def test_request_wall_time_ends_a_request() -> None:
    settings = make_settings(limits={"request_wall_s": 1})
    house = House(lambda request: [asyncio.Event()], settings=settings)
    async with house.client() as client:
        response = await client.post(CHAT, json=chat())
    assert (response.status_code, error_of(response)["code"]) == (408, "request_timeout")
    assert response.headers["x-should-retry"] == "false"
    assert house.replicas.cancelled.is_set()


# F31: bad bodies -----------------------------------------------------------------------------

USER = b'{"model":"tiny","messages":[{"role":"user","content":"x"}]'
BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not json": b"{",
    "not utf-8": b'{"model":"\xff"}',
    "a list": b"[]",
    "a string": b'"x"',
    "nested 10k": b"[" * 10_000 + b"]" * 10_000,
    "nested 10k inside": USER + b',"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "a million messages": b'{"model":"tiny","messages":[' + b"{}," * 999_999 + b"{}]}",
    "140k valid messages": b'{"model":"tiny","messages":['
    + b'{"role":"user","content":""},' * 139_999
    + b'{"role":"user","content":""}]}',
    "1025 messages": b'{"model":"tiny","messages":['
    + b'{"role":"user","content":""},' * 1024
    + b'{"role":"user","content":""}]}',
    "NaN temperature": USER + b',"temperature":NaN}',
    "infinite temperature": USER + b',"temperature":1e999}',
    "temperature as text": USER + b',"temperature":"1"}',
    "n=1e9": USER + b',"n":1000000000}',
    "n=0": USER + b',"n":0}',
    "n=true": USER + b',"n":true}',
    "max_tokens=-1": USER + b',"max_tokens":-1}',
    "max_tokens=1e12": USER + b',"max_tokens":1000000000000}',
    "max_tokens of 5000 digits": USER + b',"max_tokens":' + b"9" * 5000 + b"}",
    "max_tokens over the context": USER + b',"max_tokens":100000}',
    "1e5 stops": USER + b',"stop":[' + b'"a",' * 99_999 + b'"a"]}',
    "an empty stop": USER + b',"stop":[""]}',
    "a long stop": USER + b',"stop":"' + b"a" * 300 + b'"}',
    "lone surrogate": USER[:-3] + b'\\ud800"}]}',
    "unknown role": b'{"model":"tiny","messages":[{"role":"alien","content":"x"}]}',
    "tool role": b'{"model":"tiny","messages":[{"role":"tool","content":"x"}]}',
    "empty messages": b'{"model":"tiny","messages":[]}',
    "no messages": b'{"model":"tiny"}',
    "no model": b'{"messages":[{"role":"user","content":"x"}]}',
    "null content": b'{"model":"tiny","messages":[{"role":"user","content":null}]}',
    "image part": b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url",'
    b'"image_url":{"url":"http://169.254.169.254/"}}]}]}',
    "tools": USER + b',"tools":[{"type":"function"}]}',
    "response_format": USER + b',"response_format":{"type":"json_object"}}',
    "logit_bias": USER + b',"logit_bias":{"5":1}}',
    "metadata": USER + b',"metadata":{"a":"' + b"x" * 5000 + b'"}}',
    "long user": USER + b',"user":"' + b"x" * 600 + b'"}',
    "null byte in user": USER + b',"user":"a\\u0000"}',
    "top_logprobs alone": USER + b',"top_logprobs":2}',
    "stream_options alone": USER + b',"stream_options":{}}',
    "min over max tokens": USER + b',"min_tokens":5,"max_tokens":2}',
    "bad retention": USER + b',"prompt_cache_retention":"forever"}',
    "one mebibyte of one character": USER[:-3] + b"a" * (1 << 20) + b'"}]}',
    "a mebibyte of emoji": USER[:-3] + "👩‍👩‍👧‍👦".encode() * 30_000 + b'"}]}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_f31_bad_bodies_are_400(name: str) -> None:
    house = House()
    async with house.client() as client:
        response = await client.post(CHAT, content=BAD_BODIES[name])
    assert response.status_code == 400, response.text
    error_of(response)
    assert house.replicas.calls == []


async def test_f31_null_bytes_in_text_are_text() -> None:
    async with House().client() as client:
        assert (await client.post(CHAT, json=chat("a\0b"))).status_code == 200


async def test_f31_bodies_over_the_limit_are_413() -> None:
    house = House(settings=make_settings(limits={"body_bytes_max": 1024}))
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += 512
            yield b"x" * 512

    async with house.client() as client:
        declared = await client.post(CHAT, content=b"x" * 2000)
        assert (declared.status_code, error_of(declared)["code"]) == (413, "body_too_large")
        streamed = await client.post(CHAT, content=endless())
        assert streamed.status_code == 413
        assert read < 8192
        odd = await client.post(CHAT, content=b"{}", headers={"content-length": "-5"})
        assert odd.status_code == 400


async def test_f31_a_slow_body_is_408() -> None:
    house = House(settings=make_settings(limits={"body_read_s": 0.05}))
    never = asyncio.Event()

    async def slow() -> Any:
        yield b"{"
        await never.wait()

    async with house.client() as client:
        response = await client.post(CHAT, content=slow())
    assert (response.status_code, error_of(response)["code"]) == (408, "request_timeout")


# F32: the tokenizer --------------------------------------------------------------------------


async def test_f32_tokenizer_queue_is_bounded_and_off_the_loop() -> None:
    settings = make_settings(limits={"tokenizer_threads": 1, "tokenizer_queue_max": 2})
    house = House(settings=settings)
    text = "the tale of the hare " * 90  # fits, just
    lags_s: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.005)
            lags_s.append(time.monotonic() - before_s - 0.005)

    async with house.client() as client:
        watcher = asyncio.create_task(watch())
        responses = await asyncio.gather(*(client.post(CHAT, json=chat(text)) for _ in range(16)))
        watcher.cancel()
    statuses = {response.status_code for response in responses}
    assert statuses == {200, 429}
    full = next(response for response in responses if response.status_code == 429)
    assert error_of(full)["code"] == "tokenizer_queue_full"
    assert max(lags_s) < 1.0  # the bound of F32 is measured on a quiet machine by the e2e tests


# F33: keys -----------------------------------------------------------------------------------

PATHS = (
    "/v1/models",
    "/metrics",
    "/version",
    "/",
    "/docs",
    "//v1/models",
    "/%2e/health",
    "/health/",
    "//health",
    "/HEALTH",
    "/-/routes",
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE", "TRACE"])
async def test_f33_everything_but_health_needs_a_key(path: str, method: str) -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    async with house.client() as client:
        for headers in ({}, {"authorization": "Bearer sk-wrong-wrong-wrong"}, {"authorization": KEY}):
            response = await client.request(method, path, headers=headers)
            assert response.status_code == 401, (path, method)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert error_of(response)["type"] == "authentication_error"


@pytest.mark.parametrize(
    "path", ["/v1/../health", "/health/../v1/models", "/./health", "", "health", "/health\0"]
)
async def test_f33_paths_that_http_clients_would_tidy_up(path: str) -> None:
    house = House(settings=make_settings(keys={"alpha": KEY}))
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body of a request without a key is not read")

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    await house.app(scope, receive, send)
    assert sent[0]["status"] == 401
    websocket = {**scope, "type": "websocket", "path": "/health"}
    sent.clear()
    await house.app(websocket, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_f33_good_keys_health_and_keys_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    house = House(settings=make_settings(keys={"alpha": KEY, "beta": OTHER_KEY}))
    async with house.client() as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.head("/health")).status_code == 200
        assert (await client.options("/health")).status_code == 401
        for key in (KEY, OTHER_KEY):
            ok = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert ok.status_code == 200
        for bad in (
            {"params": {"key": KEY, "api_key": KEY, "access_token": KEY}},
            {"headers": {"x-api-key": KEY}},
            {"headers": {"authorization": f"Bearer {KEY.upper()}"}},
            {"headers": {"authorization": f"Basic {KEY}"}},
            {"headers": {"authorization": f"Bearer {KEY} x"}},
            {"headers": {"authorization": "Bearer "}},
            {"headers": [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")]},
            {"headers": {b"authorization": b"Bearer \xff\xfe"}},
        ):
            response = await client.get("/v1/models", **bad)  # type: ignore[arg-type]
            assert response.status_code == 401, bad
            assert KEY not in response.text
    assert KEY not in "".join(record.getMessage() for record in caplog.records if record.name != "httpx")


async def test_f33_tenants_get_different_salts_and_sessions() -> None:
    house = House(settings=make_settings(keys={"alpha": KEY, "beta": OTHER_KEY}))
    async with house.client() as client:
        for key in (KEY, OTHER_KEY):
            headers = {"authorization": f"Bearer {key}"}
            await client.post(CHAT, json=chat(session_id="s"), headers=headers)
            await client.post(CHAT, json=chat(session_id="s", cache_salt="alpha"), headers=headers)
    salts = [call.salt for call in house.replicas.calls]
    assert len(set(salts)) == 4
    assert len(set(house.replicas.session_keys)) == 2


# F34: ids and URLs ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["../../etc/passwd", "a" * 512, "日本", "'; drop table--"])
async def test_f34_odd_ids_are_only_hashed(value: str) -> None:
    house = House()
    async with house.client() as client:
        response = await client.post(CHAT, json=chat(session_id=value))
    assert response.status_code == 200
    key = house.replicas.session_keys[0]
    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "headers",
    [{"x-session-id": "a" * 600}, {"x-session-affinity": "a\tb"}, {b"x-user-id": b"\x80\x81"}],
    ids=["long", "tab", "c1"],
)
async def test_f34_bad_header_ids_are_400(headers: Any) -> None:
    async with House().client() as client:
        response = await client.post(CHAT, json=chat(), headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] in {"x-session-id", "x-session-affinity", "x-user-id"}


@pytest.mark.parametrize("value", ["\0", "a\nb", "x" * (1 << 20)])
async def test_f34_bad_body_ids_are_400(value: str) -> None:
    async with House().client() as client:
        for field in ("session_id", "prompt_cache_key", "user", "cache_salt"):
            response = await client.post(CHAT, json=chat(**{field: value}))
            assert (response.status_code, error_of(response)["param"]) == (400, field)


async def test_f34_no_connection_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    async with house.client() as client:

        def refuse(*args: object) -> None:
            raise AssertionError(f"outbound connection: {args}")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket.socket, "connect_ex", refuse)
        url = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [url]}]}
        response = await client.post(CHAT, json=body)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == "messages[0].content[0].type"


# The memory of our own replies ---------------------------------------------------------------


async def test_a_reply_sent_back_unchanged_hits_the_tokens_that_were_generated() -> None:
    vocab = TOKENIZER.get_vocab()
    ids = [vocab[letter] for letter in "the"]  # not how the tokenizer would cut "the"
    house = House(lambda request: say(["t", "h", "e"], ids=ids))
    first = chat("tell me")
    async with house.client() as client:
        reply = (await client.post(CHAT, json=first)).json()["choices"][0]["message"]
        messages = [*first["messages"], {"role": "assistant", "content": reply["content"]}]
        more = {"role": "user", "content": "more"}
        await client.post(CHAT, json={"model": MODEL, "messages": [*messages, more]})
        edited = [messages[0], {"role": "assistant", "content": "thé"}, more]
        await client.post(CHAT, json={"model": MODEL, "messages": edited})
    turn1, turn2, turn3 = (call.prompt_token_ids for call in house.replicas.calls)
    assert turn2[: len(turn1) + 3] == turn1 + ids
    assert turn3[: len(turn1) + 1] != [*turn1, ids[0]]
    assert len({*house.replicas.session_keys}) == 1  # headerless turns keep their session


def _with_context(tokens: int) -> Any:
    return replace(INFO, context_tokens_max=tokens)


def error_of_loading(response: httpx.Response) -> str:
    body = json.loads(response.text)
    assert body["status"] == "loading"
    code: str = body["error"]["code"]
    return code
