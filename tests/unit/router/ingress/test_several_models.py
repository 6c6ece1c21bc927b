"""Several models before one front: each request goes to its own, and what names none is asked of all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from samovar.configs.settings import Settings
from samovar.replicas.messages import Admitted, EngineStats, Forgotten, GenerateRequest
from samovar.router.generation.services import ModelTable
from samovar.router.ingress.app import build_api, build_front, build_further
from samovar.router.prompt.prompt import PromptBuilder
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.replica_client import ReplicasOfAll
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer
from tests.support.router.fake_directory import FakeLink
from tests.support.router.fake_replica import INFO, FakeReplicas, Script, say
from tests.support.router.router_harness import MODEL, House, chat, error_of, make_settings, spoken

SMALL, TUNED, NODE = "small", "small-tuned", "node-2"
FINGERPRINT = "ab" * 32
OTHER = replace(INFO, replica_id="replica-2", model_name=SMALL, context_tokens_max=512, model=FINGERPRINT)
TOKENIZER = make_tiny_tokenizer(400)


def said_by_small(request: GenerateRequest) -> Script:
    admitted, *rest = spoken(f"small {request.adapter or 'talk'}", tokenizer=TOKENIZER)
    assert isinstance(admitted, Admitted)
    return [replace(admitted, replica_id="replica-2"), *rest]


class TwoModels(House):
    """The house of one model, with another beside it that has an adapter. Both keep sessions in one table."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.link = FakeLink()
        super().__init__(lambda request: spoken("Hello"), settings=settings, link=self.link)
        models = {
            SMALL: {
                "model": {"path": "/small", "aliases": ["little"]},
                "engine": {"kind": "vllm", "vllm": {"adapters": {TUNED: "/tuned"}}},
            }
        }
        given = self.settings.model_dump() | {"models": models}
        own = Settings.model_validate(given).of_models()[SMALL]
        self.others = FakeReplicas(said_by_small)
        self.others.infos = [OTHER]
        self.others.stats_now = [EngineStats("replica-2", steps=7)]
        self.book = ReplicaLoadTracker()
        self.book.update_replicas({"replica-2": NODE}, {})
        card: Any = SimpleNamespace(
            name="small", fingerprint=bytes.fromhex(FINGERPRINT), generation={"top_k": 9}, commit=None
        )
        card.context_tokens = lambda limit: 1024
        self.small = build_further(
            self.service,
            own,
            client=self.others,
            prompts=PromptBuilder(
                TOKENIZER, vocab_tokens=400, context_tokens_max=1024, eos_token_ids=[EOS_ID], settings=own
            ),
            card=card,
            book=self.book,
        )
        self.service = build_front([self.service, self.small])
        self.app = build_api(self.service)

    @asynccontextmanager
    async def client(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        async with super().client(**headers) as client:
            yield client
        self.small.prompts.check_integrity()
        assert self.others.open == 0


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_to_the_model_that_it_names(path: str, stream: bool) -> None:
    house = TwoModels()
    async with house.client() as client:
        for name, taken in ((MODEL, house.replicas), (SMALL, house.others), ("little", house.others)):
            before = len(taken.calls)
            answer = await client.post(path, json={"model": name, "stream": stream, **BODIES[path]})
            assert answer.status_code == 200, answer.text
            assert len(taken.calls) == before + 1
    assert [call.model for call in house.others.calls] == [FINGERPRINT] * 2
    assert len(house.replicas.calls) == 1
    ids = house.others.calls[0].prompt_token_ids
    assert max(ids) < 400, "its own tokenizer has made them"


async def test_an_adapter_of_a_further_model_answers_by_its_name() -> None:
    house = TwoModels()
    async with house.client() as client:
        answers = [
            (await client.post("/v1/chat/completions", json=chat() | {"model": name})).json()
            for name in (SMALL, TUNED, "little")
        ]
    assert [one["model"] for one in answers] == [SMALL, TUNED, SMALL]
    assert [one["choices"][0]["message"]["content"] for one in answers] == [
        "small talk",
        f"small {TUNED}",
        "small talk",
    ]
    plain, tuned, alias = house.others.calls
    assert plain.salt == alias.salt != tuned.salt


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_an_unknown_model_is_refused_with_the_names_of_all(path: str) -> None:
    house = TwoModels()
    body = BODIES.get(path, {"prompt": "a", "tokens": [1], "messages": [{"role": "user", "content": "a"}]})
    async with house.client() as client:
        answer = await client.post(path, json={"model": "nobody", **body})
    assert answer.status_code == 404, answer.text
    error = answer.json()["error"]
    assert MODEL in error["message"]
    assert SMALL in error["message"]
    assert path.startswith("/v1/messages") or error["code"] == "model_not_found"
    assert not house.replicas.calls
    assert not house.others.calls


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 3}', b'{"model": ""}', b"{}", b"\xff"])
async def test_a_body_that_names_no_model_is_refused_as_with_one(body: bytes) -> None:
    house, alone = TwoModels(), House()
    async with house.client() as client, alone.client() as other:
        headers = {"content-type": "application/json"}
        answers = [
            await one.post("/v1/chat/completions", content=body, headers=headers) for one in (client, other)
        ]
    assert answers[0].status_code == answers[1].status_code == 400
    assert error_of(answers[0]) == error_of(answers[1])


async def test_all_models_and_names_are_listed() -> None:
    house = TwoModels()
    async with house.client() as client:
        cards = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        one = (await client.get("/v1/models/little")).json()
        missing = await client.get("/v1/models/nobody")
    assert list(cards) == [MODEL, SMALL, "little", TUNED]
    assert (cards["little"]["root"], cards[TUNED]["parent"]) == (SMALL, SMALL)
    assert cards[MODEL]["max_model_len"] == 2048
    assert cards[SMALL]["max_model_len"] == 512, "the least of model and replicas"
    assert cards[SMALL]["generation_defaults"] == {"top_k": 9}
    assert "generation_defaults" not in cards[MODEL]
    assert one == cards["little"]
    assert missing.status_code == 404


async def test_the_tokenizers_routes_are_of_the_model_that_is_named() -> None:
    house = TwoModels()
    async with house.client() as client:
        asked = {"prompt": "a samovar keeps the tea hot"}
        first = (await client.post("/tokenize", json=asked)).json()
        named = (await client.post("/tokenize", json={**asked, "model": MODEL})).json()
        small = (await client.post("/tokenize", json={**asked, "model": SMALL})).json()
        text = await client.post("/detokenize", json={"model": SMALL, "tokens": small["tokens"]})
        messages = {"messages": [{"role": "user", "content": "hi"}]}
        counts = [
            (await client.post("/v1/messages/count_tokens", json={"model": name, **messages})).json()
            for name in (MODEL, SMALL)
        ]
    assert first == named != small
    assert (named["max_model_len"], small["max_model_len"]) == (2048, 512)
    assert text.json()["prompt"] == asked["prompt"]
    assert all(one["input_tokens"] > 0 for one in counts)


async def test_a_session_may_talk_to_both_and_each_finds_its_own_home() -> None:
    house = TwoModels()
    headers = {"x-session-id": "a"}
    async with house.client() as client:
        for name in (MODEL, SMALL, MODEL, SMALL):
            answer = await client.post("/v1/chat/completions", json=chat() | {"model": name}, headers=headers)
            assert answer.status_code == 200, answer.text
        card = (await client.get("/v1/sessions/a")).json()
    assert [call.route.home for call in house.replicas.calls] == ["", "replica-1"]
    assert [call.route.home for call in house.others.calls] == ["", "replica-2"]
    assert house.others.calls[1].route.node == NODE
    first, small = house.replicas.calls[0], house.others.calls[0]
    assert first.salt != small.salt
    assert first.session != small.session, "a lineage is of one model"
    assert {one["home"] for one in card["lineages"]} == {"replica-1", "replica-2"}
    assert card["turns"] == 4


async def test_it_is_ready_when_every_model_is_and_serves_those_that_are() -> None:
    house = TwoModels()
    house.others.infos = []
    async with house.client() as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["models"]) == (503, {MODEL: 1, SMALL: 0})
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        refused = await client.post("/v1/chat/completions", json=chat() | {"model": SMALL})
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "loading"
        house.others.infos = [OTHER]
        await house.service.readiness.poll()
        health = await client.get("/health")
        assert (health.status_code, health.json()["replicas"]) == (200, 2)
        assert (await client.post("/v1/chat/completions", json=chat() | {"model": SMALL})).status_code == 200
        house.service.readiness.drain()
        for name in (MODEL, SMALL):
            refused = await client.post("/v1/chat/completions", json=chat() | {"model": name})
            assert error_of(refused)["code"] == "draining"


async def test_what_is_forgotten_is_forgotten_of_all_models() -> None:
    house = TwoModels()
    house.others.clear_answers = [Forgotten(pages=4, extents=1, nbytes=10, leaves_pages=True)]
    headers = {"x-session-id": "a"}
    async with house.client() as client:
        for name in (MODEL, SMALL):
            await client.post("/v1/chat/completions", json=chat() | {"model": name}, headers=headers)
        done = (await client.delete("/v1/sessions/a")).json()
    assert done["cleared"]["pages"] == 7
    assert done["replicas"] == 2
    assert done["pages"] == "unreachable until overwritten, in 1 of 2 replicas"
    assert done["cleared"]["replies"] >= 2, "of both models"
    assert house.replicas.clears == house.others.clears != []


async def test_a_clear_that_misses_one_models_replicas_is_not_complete() -> None:
    house = TwoModels()
    house.others.clear_answers = [RuntimeError("lost")]
    async with house.client() as client:
        answer = await client.request("DELETE", "/v1/cache")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "clear_incomplete")
    assert "1 of 2 replicas did not answer" in error_of(answer)["message"]


async def test_limits_hold_for_all_models_together() -> None:
    house = TwoModels(make_settings(limits={"concurrent_total": 1}))
    async with house.client() as client:
        with house.service.concurrency.lease(""):
            for name in (MODEL, SMALL):
                answer = await client.post("/v1/chat/completions", json=chat() | {"model": name})
                assert answer.status_code == 429


async def test_metrics_say_which_model() -> None:
    house = TwoModels()
    async with house.client() as client:
        for name in (MODEL, SMALL, SMALL):
            await client.post("/v1/chat/completions", json=chat() | {"model": name})
        text = (await client.get("/metrics")).text
        stats = (await client.get("/cache/stats")).json()
    assert f'samovar_e2e_seconds_count{{model="{MODEL}"}} 1.0' in text
    assert f'samovar_e2e_seconds_count{{model="{SMALL}"}} 2.0' in text
    assert 'samovar_replica_steps_total{replica="replica-1"} 42.0' in text
    assert 'samovar_replica_steps_total{replica="replica-2"} 7.0' in text
    assert [one["replica_id"] for one in stats["replicas"]] == ["replica-1", "replica-2"]
    assert {one["model_name"] for one in stats["serving"]} == {"tiny", SMALL}


async def test_the_metrics_of_one_model_have_no_such_label() -> None:
    house = House()
    async with house.client() as client:
        await client.post("/v1/chat/completions", json=chat())
        text = (await client.get("/metrics")).text
    assert "model=" not in text


async def test_a_hint_and_a_look_reach_all_replicas() -> None:
    house = TwoModels()
    headers = {"x-session-id": "a"}
    async with house.client() as client:
        await client.post("/v1/chat/completions", json=chat() | {"model": SMALL}, headers=headers)
        await client.post("/v1/sessions/a/hint", json={"event": "closed"})
    assert house.others.hinted == house.replicas.hinted != []
    assert house.others.cooled


async def test_only_the_generating_client_is_chosen_by_fingerprint() -> None:
    first, second = FakeReplicas(lambda request: say(["a"])), FakeReplicas(lambda request: say(["b"]))
    second.tiers_up_now, first.tiers_up_now = {"n": True}, {"n": False, "m": False}
    client = ReplicasOfAll({"x": first, "y": second})
    assert await client.tiers_up() == {"n": True, "m": False}
    assert len(await client.describe()) == 2
    second.all_asked = False
    assert await client.kept(b"t", b"r") == (None, False), "not all were asked"
    assert await client.pool_bytes(b"t", b"s") == 2 * 4096


def test_a_table_of_models_goes_by_name_alone() -> None:
    house = TwoModels()
    table = ModelTable(house.service, ["one", "two"])
    found = [table.of_body(b'{"model": "%s"}' % name.encode()) for name in (MODEL, SMALL, TUNED)]
    assert found == ["one", "two", "two"]
    assert table.of_body(b'{"model": "tiny", "model": "small"}') == "two", "as all that read JSON here"
