"""The HTTP API over scripted replicas: shapes, headers, limits, keys, and every bad input a 4xx."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import httpx
import pytest
from ray.serve.exceptions import RayServeException

from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import Admitted, Delta, Failed, GenerateRequest, Refused, TokenLogprob
from samovar.router.routing.ray_clients import RayReplicaClient
from samovar.router.routing.replica_client import ReplicaLost
from tests.support.router.fake_replica import INFO, Script, say
from tests.support.router.router_harness import (
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
    assert details["cached_tokens_by_tier"] == {"gpu": 16, "cpu": 0, "nvme": 0, "s3": 0, "peer": 0}
    assert response.headers["x-replica"] == "replica-1"
    assert response.headers["x-cache"] == "hit; tokens=16; gpu=16"
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


async def test_aliases_are_names_of_the_model_and_are_listed() -> None:
    settings = make_settings()
    settings = settings.model_copy(update={"model": ModelSettings(aliases=("gpt-4o", "tea/pot", MODEL))})
    async with House(settings=settings).client() as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("root")) for card in cards] == [
            (MODEL, None),
            ("gpt-4o", MODEL),
            ("tea/pot", MODEL),
        ]
        assert (await client.get("/v1/models/tea/pot")).json()["id"] == "tea/pot"
        answer = await client.post(CHAT, json=chat(model="gpt-4o"))
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        asked = await client.post("/tokenize", json={"model": "tea/pot", "prompt": "a"})
        assert asked.status_code == 200
        unknown = await client.post(CHAT, json=chat(model="gpt-4"))
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 33}


async def test_the_models_own_sampling_holds_where_a_request_says_nothing() -> None:
    house = House(generation=RECOMMENDED, commit="c1899de2")
    async with house.client() as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["generation_defaults"], card["revision"]) == (RECOMMENDED, "c1899de2")
        await client.post(CHAT, json=chat())
        await client.post(
            CHAT, json=chat(temperature=0, top_k=-1, top_p=1, repetition_penalty=1, max_tokens=7)
        )
        await client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a"})
        await client.post(CHAT, json=chat(min_tokens=40))
    said, own, completion, longer = (request.sampling for request in house.replicas.calls)
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty, said.max_tokens) == (
        0.6,
        0.95,
        20,
        1.05,
        33,
    )
    assert (own.temperature, own.top_p, own.top_k, own.repetition_penalty, own.max_tokens) == (0, 1, 0, 1, 7)
    assert (completion.temperature, completion.max_tokens) == (0.6, 16)
    assert longer.max_tokens == 40


async def test_a_recommended_length_is_lowered_to_what_is_left() -> None:
    house = House(generation={"max_tokens": 10 * CONTEXT})
    async with house.client() as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert (await client.post(CHAT, json=chat(truncate_prompt_tokens=-1))).status_code == 200
    for request in house.replicas.calls:
        assert request.sampling.max_tokens == CONTEXT - len(request.prompt_token_ids)


async def test_openai_defaults_hold_if_the_setting_says_so() -> None:
    settings = make_settings()
    settings = settings.model_copy(update={"model": ModelSettings(generation_config="none")})
    house = House(settings=settings, generation=RECOMMENDED)
    async with house.client() as client:
        assert "generation_defaults" not in (await client.get("/v1/models")).json()["data"][0]
        await client.post(CHAT, json=chat())
    (request,) = house.replicas.calls
    assert (request.sampling.temperature, request.sampling.top_k) == (1.0, 0)


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
        for path in ("/docs", "/openapi.yaml", "/v1", "/v1/", "/health/"):
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


async def test_text_offsets_are_right_behind_a_character_of_several_tokens() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b\xc3", b"\xa9", b"c"]
    tokens = [TokenLogprob(5 + at, one.decode(errors="replace"), one, -1.0) for at, one in enumerate(pieces)]
    texts = ["a", "", "", "\U0001f600", "b", "é", "c"]
    told = [Delta(0, text, (token.token_id,), (token,)) for text, token in zip(texts, tokens, strict=True)]
    script: list[Any] = [Admitted("replica-1", 0, 0.0), *told, Delta(0, "", (2,), (), "stop")]
    async with House(lambda request: script).client() as client:
        sent = {"model": MODEL, "prompt": "p", "logprobs": 0}
        choice = (await client.post(COMPLETIONS, json=sent)).json()["choices"][0]
        streamed = (await client.post(COMPLETIONS, json=sent | {"stream": True})).text
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 3, 4]
    text = choice["text"]
    assert [text[one] for one in offsets] == ["a", *["\U0001f600"] * 3, "b", "é", "c"]
    lines = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    shown = [one for line in lines for one in (line["choices"][0]["logprobs"] or {}).get("text_offset", [])]
    assert shown == offsets


async def test_parts_of_characters_keep_their_own_logprobs() -> None:
    first = TokenLogprob(5, "\ufffd", b"\xe4\xbd", -1.0)
    other = TokenLogprob(6, "\ufffd", b"\x96", -2.0)
    real = TokenLogprob(7, "\ufffd", "\ufffd".encode(), -3.0)
    token = replace(first, top=(first, other, real))
    house = House(lambda request: [Admitted("r", 0, 0.0), Delta(0, "", (5,), (token,), "length")])
    async with house.client() as client:
        body = {"model": MODEL, "prompt": "p", "logprobs": 3}
        logprobs = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [r"bytes:\xe4\xbd"]
    assert logprobs["top_logprobs"] == [{r"bytes:\xe4\xbd": -1.0, r"bytes:\x96": -2.0, "\ufffd": -3.0}]


async def test_metrics_are_served_when_no_replica_can_be_asked() -> None:
    house = House()

    class Unreachable:
        def broadcast(self, method: str) -> None:
            raise RayServeException("the controller is gone")

    house.replicas.stats = RayReplicaClient(Unreachable(), retry_after_s=1).stats  # type: ignore[method-assign]
    async with house.client() as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert "samovar_requests_in_flight" in response.text
    assert "replica-1" not in response.text


async def test_ignored_fields_are_named_safely() -> None:
    async with House().client() as client:
        response = await client.post(CHAT, json=chat(**{"foo": [1], "b\r\nx: y": 1, "store": True}))
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "foo, b??x??y, store"


async def test_ignored_parts_are_named_by_their_places() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    answered = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    async with House().client() as client:
        response = await client.post(CHAT, json={"model": MODEL, "messages": [*said, *answered]})
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == "messages[0].content[1]"


async def test_a_priority_is_within_its_tenants_right() -> None:
    rights = {"tenant_priorities": {"beta": -5}}
    house = House(settings=make_settings(keys={"alpha": KEY, "beta": OTHER_KEY}, limits=rights))
    async with house.client() as client:
        for key, asked, given in ((KEY, -7, 0), (KEY, 3, 3), (OTHER_KEY, -7, -5), (OTHER_KEY, -2, -2)):
            response = await client.post(
                CHAT, json=chat(priority=asked), headers={"authorization": f"Bearer {key}"}
            )
            assert response.status_code == 200
            assert house.replicas.calls[-1].priority == given
            assert (response.headers.get("x-ignored-fields") == "priority") == (asked != given)
    async with House().client() as client:  # without API keys all is allowed
        assert (await client.post(CHAT, json=chat(priority=-7))).headers.get("x-ignored-fields") is None


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
        house.replicas.script = lambda request: [Failed("going away", replica_lost=True)]
        assert (await client.post(CHAT, json=chat())).status_code == 503
        house.replicas.script = lambda request: [Refused("invalid", "no such token id")]
        assert (await client.post(CHAT, json=chat())).status_code == 400
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
    settings = make_settings(limits={"concurrent_per_key": 1}, keys={"alpha": KEY})
    house = House(lambda request: [gate, *say(["x"])], settings=settings)
    async with house.client(authorization=f"Bearer {KEY}") as client:
        first = asyncio.create_task(client.post(CHAT, json=chat()))
        await house.replicas.began.wait()
        second = await client.post(CHAT, json=chat())
        assert (second.status_code, error_of(second)["code"]) == (429, "concurrency_limit")
        assert second.headers["retry-after"] == "1"
        gate.set()
        assert (await first).status_code == 200


async def test_request_wall_time_ends_a_request() -> None:
    settings = make_settings(limits={"request_timeout_s": 1})
    house = House(lambda request: [asyncio.Event()], settings=settings)
    async with house.client() as client:
        response = await client.post(CHAT, json=chat())
    assert (response.status_code, error_of(response)["code"]) == (408, "request_timeout")
    assert response.headers["x-should-retry"] == "false"
    assert house.replicas.cancelled.is_set()


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


@pytest.mark.guarantee("G2")
async def test_replies_are_not_shared_across_cache_salts() -> None:
    vocab = TOKENIZER.get_vocab()
    ids = [vocab[letter] for letter in "the"]
    house = House(lambda request: say(["t", "h", "e"], ids=ids))
    turn2 = [
        *chat("hi")["messages"],
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": "x"},
    ]
    async with house.client() as client:
        await client.post(CHAT, json=chat("hi", cache_salt="a"))
        for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
            await client.post(CHAT, json={"model": MODEL, "messages": turn2, **salt})
    _, same, other, none = (call.prompt_token_ids for call in house.replicas.calls)
    fresh = TOKENIZER.apply_chat_template(turn2, add_generation_prompt=True, return_dict=False)
    assert same != fresh
    assert other == none == fresh


def _with_context(tokens: int) -> Any:
    return replace(INFO, context_tokens_max=tokens)


def error_of_loading(response: httpx.Response) -> str:
    body = json.loads(response.text)
    assert body["status"] == "loading"
    code: str = body["error"]["code"]
    return code


@pytest.mark.guarantee("G13")
async def test_a_node_without_its_tier_actor_is_seen_and_goes_on_serving() -> None:
    house = House()
    house.replicas.tiers_up_now = {"0123456789abcdef": True, "fedcba9876543210": False}
    readiness = house.service.readiness
    async with house.client() as client:
        for _ in range(2):
            assert (await client.get("/health")).json() == {"status": "ok", "replicas": 1}
            await readiness.poll_tiers()  # one that does not answer once may be busy
        sick = await client.get("/health")
        assert sick.status_code == 200, "a load balancer goes by this, and requests are served"
        assert sick.json()["status"] == "ok"
        assert "no tier actor answers on node fedcba98:" in sick.json()["detail"]
        text = (await client.get("/metrics")).text
        assert 'samovar_tier_actor_up{node="fedcba9876543210"} 0.0' in text
        assert 'samovar_tier_actor_up{node="0123456789abcdef"} 1.0' in text
        house.replicas.tiers_up_now["fedcba9876543210"] = True
        await readiness.poll_tiers()
        assert "detail" not in (await client.get("/health")).json()
        house.replicas.tiers_up_now = {}  # its replica has gone, or has no tiers
        assert "samovar_tier_actor_up{" not in (await client.get("/metrics")).text


async def test_embeddings_are_refused_in_words() -> None:
    async with House().client() as client:
        response = await client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert (response.status_code, error_of(response)["code"]) == (400, "embeddings_not_served")
