"""What people see of a service, whichever engine computes: one suite for ours and vLLM.

Where they differ, `@differs` names the row of `differences.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from tests.api.test_failover import FORM
from tests.support.router.media_parts import media_requests
from tests.support.services.guests import Conversation
from tests.support.services.service import MODEL
from tests.vllm_serve.conftest import (
    ADAPTER,
    ENGINES,
    GREEN,
    RED,
    Engine,
    EngineService,
    bearer,
    differs,
    flags,
    start,
    talk,
)


class TestReturns:
    def test_a_second_turn_lands_where_the_first_was_and_finds_pages(self, service: EngineService) -> None:
        for seed in range(4):
            chat = talk(100 + seed)
            first, second = service.turn(chat), service.turn(chat)
            assert first.cached == 0
            assert second.by_tier["gpu"] >= 0.7 * first.prompt_tokens
            assert second.receipt["replica"] == first.receipt["replica"]

    def test_what_left_the_pool_comes_back_from_memory(self, service: EngineService) -> None:
        chat = talk(200, words=200)
        first = service.turn(chat)
        service.settled()
        service.forget_pages()
        second = service.turn(chat)
        assert second.by_tier["cpu"] >= 0.7 * first.prompt_tokens, second.receipt
        assert second.receipt["decision"] == "load"

    @pytest.mark.parametrize("engine", ENGINES)
    def test_and_from_disk_after_a_restart_of_all(self, engine: Engine, tmp_path: Path) -> None:
        given = flags(engine, **{"cluster.replicas": 1})
        service = start(tmp_path, given, engine=engine)
        chat = talk(300, words=200)
        try:
            first = service.turn(chat)
            service.settled()
            assert service.stop() == 0
            service = start(tmp_path, given, engine=engine)
            second = service.turn(chat)
            assert second.by_tier["nvme"] >= 0.7 * first.prompt_tokens, second.receipt
        finally:
            assert service.stop() == 0, service.text

    @differs("a block at a prompt's end that is not full")
    def test_of_a_prompt_that_goes_on_whole_blocks_come_back_and_what_of_the_last(
        self, service: EngineService
    ) -> None:
        draws = random.Random(250)
        ids, more = (draws.choices(range(1000, 40000), k=count) for count in (300, 20))

        def cached(prompt: list[int]) -> int:
            said = service.openai(RED).completions.create(
                model=MODEL, prompt=prompt, max_tokens=1, temperature=0
            )
            assert said.usage is not None
            assert said.usage.prompt_tokens_details is not None
            return said.usage.prompt_tokens_details.cached_tokens or 0

        assert cached(ids) == 0
        service.settled()
        service.forget_pages()  # the pool shares whole blocks only; the tiers keep what is behind them, too
        assert cached([*ids, *more]) == (288 if service.is_vllm else 300)


class TestAnswers:
    def test_a_stop_string_is_not_told_and_nothing_behind_it(self, service: EngineService) -> None:
        client = service.openai(RED)
        ask: dict[str, Any] = {
            "model": MODEL,
            "prompt": "Count: one two three four",
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = client.completions.create(**ask).choices[0].text
        stop = whole[6:10]
        cut = client.completions.create(**ask, stop=[stop])
        assert cut.choices[0].text == whole[: whole.index(stop)]
        assert cut.choices[0].finish_reason == "stop"

    def test_answers_have_their_form(self, service: EngineService) -> None:
        client = service.openai(RED)
        asked: Any = {"type": "json_schema", "json_schema": {"name": "tea", "schema": FORM}}
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about tea."}],
            temperature=1,
            seed=7,
            max_tokens=300,
            response_format=asked,
        )
        assert set(json.loads(answer.choices[0].message.content or "")) == set(FORM["required"])
        for grammar in ({"guided_regex": "(black|green) tea"}, {"guided_choice": ["black tea", "green tea"]}):
            said = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Which tea?"}],
                temperature=1,
                extra_body=grammar,
            )
            assert said.choices[0].message.content in ("black tea", "green tea")

    def test_a_call_of_a_tool_has_its_arguments(self, service: EngineService) -> None:
        answer = service.openai(RED).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Brew some tea."}],
            tools=[{"type": "function", "function": {"name": "brew", "parameters": FORM}}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
            seed=3,
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert set(json.loads(call.function.arguments)) == set(FORM["required"])  # type: ignore[union-attr]

    def test_several_answers_and_their_log_probabilities(self, service: EngineService) -> None:
        answer = service.openai(RED).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about tea."}],
            n=3,
            temperature=1,
            seed=1,
            max_tokens=8,
            logprobs=True,
            top_logprobs=3,
        )
        assert len({choice.message.content for choice in answer.choices}) == 3
        for choice in answer.choices:
            assert choice.logprobs is not None
            tokens = choice.logprobs.content or []
            assert len(tokens) == 8
            assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
            assert "".join(token.token for token in tokens) == choice.message.content

    def test_a_seed_draws_the_same_again(self, service: EngineService) -> None:
        def drawn(seed: int) -> str:
            answer = service.openai(RED).completions.create(
                model=MODEL, prompt="Tea is", temperature=1, seed=seed, max_tokens=12
            )
            return str(answer.choices[0].text)

        assert drawn(5) == drawn(5)
        assert len({drawn(seed) for seed in range(4)}) > 1

    def test_what_cannot_be_is_refused_by_the_fields_name(self, service: EngineService) -> None:
        with service.http() as http:
            bad = http.post(
                "/v1/chat/completions",
                json={
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "?"}],
                    "guided_regex": "(?=a)",
                },
                headers={"authorization": f"Bearer {RED}"},
            )
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "guided_regex")

    def test_images_and_documents_are_refused_by_their_place(self, service: EngineService) -> None:
        with service.http() as http:
            for path, body, field in media_requests(MODEL):
                bad = http.post(path, json=body, headers=bearer(RED))
                error = bad.json()["error"]
                assert bad.status_code == 400, (path, bad.text)
                assert error.get("param", error["message"].partition("=")[0]) == field

    def test_all_apis_tell_the_same_greedy_text(self, service: EngineService) -> None:
        said = [{"role": "user", "content": "Tell me about tea."}]
        more = {"model": MODEL, "temperature": 0}
        with service.http() as http:

            def post(path: str, **body: object) -> dict[str, Any]:
                done = http.post(path, json=more | body, headers=bearer(RED)).raise_for_status()
                whole: dict[str, Any] = done.json()
                return whole

            chat = post("/v1/chat/completions", messages=said, max_tokens=16)
            response = post("/v1/responses", input=said, max_output_tokens=16)
            message = post("/v1/messages", messages=said, max_tokens=16)
        texts = {
            chat["choices"][0]["message"]["content"],
            response["output"][-1]["content"][0]["text"],
            message["content"][0]["text"],
        }
        assert len(texts) == 1
        assert all(len(text) > 20 for text in texts)

    def test_a_receipt_counts_each_token_of_a_prompt_once(self, service: EngineService) -> None:
        chat = talk(350)
        for reply in (service.turn(chat), service.turn(chat)):
            assert sum(reply.receipt["tokens"].values()) == reply.prompt_tokens
            assert reply.cached == reply.prompt_tokens - reply.receipt["tokens"]["compute"]

    @differs("exact mode, drafts, audits of restored blocks")
    def test_only_ours_says_that_it_is_exact(self, service: EngineService) -> None:
        with service.http() as http:
            (card, *_) = http.get("/v1/models", headers=bearer(RED)).raise_for_status().json()["data"]
        assert card["id"] == MODEL
        if service.is_vllm:
            assert not service.says_exact()
        else:
            assert "exact mode" in service.text.lower() or service.says_exact()


class TestAdapters:
    @differs("LoRA adapters (`engine.vllm.adapters`)")
    def test_an_adapter_is_a_model_of_its_own_with_a_cache_of_its_own(self, vllm: EngineService) -> None:
        service, client = vllm, vllm.openai(RED)
        cards = {card.id: card.model_extra for card in client.models.list()}
        assert (cards[ADAPTER] or {})["parent"] == MODEL
        ids = random.Random(700).choices(range(1000, 40000), k=300)

        def answer(model: str) -> tuple[str, str, int]:
            said = client.completions.create(model=model, prompt=ids, max_tokens=8, temperature=0)
            assert said.usage is not None
            assert said.usage.prompt_tokens_details is not None
            return said.model, said.choices[0].text, said.usage.prompt_tokens_details.cached_tokens or 0

        base, tuned = answer(MODEL), answer(ADAPTER)
        assert (base[0], tuned[0]) == (MODEL, ADAPTER)
        assert base[1] != tuned[1]
        assert (base[2], tuned[2]) == (0, 0)
        service.settled()
        assert [answer(name)[1:] for name in (MODEL, ADAPTER)] == [(base[1], 288), (tuned[1], 288)]
        service.forget_pages()
        assert [answer(name)[1:] for name in (MODEL, ADAPTER)] == [(base[1], 288), (tuned[1], 288)]

    def test_a_model_that_is_none_is_refused(self, service: EngineService) -> None:
        with pytest.raises(NotFoundError):
            service.openai(RED).completions.create(model="another", prompt="Tea")


class TestSessions:
    @differs("bytes of a session in the pool")
    def test_a_session_tells_where_its_bytes_are(self, service: EngineService) -> None:
        chat = talk(450, words=150)
        service.turn(chat)
        service.turn(chat)
        service.settled()
        with service.http() as http:
            card = http.get(f"/v1/sessions/{chat.session}", headers=bearer(RED)).raise_for_status().json()
            usage = http.get("/v1/usage", headers=bearer(RED)).raise_for_status().json()
            hidden = http.get(f"/v1/sessions/{chat.session}", headers=bearer(GREEN))
        assert card["turns"] == 2
        assert card["bytes"]["cpu"] > 0
        assert usage["bytes_held"]["cpu"] >= card["bytes"]["cpu"]
        assert hidden.status_code == 404
        for told in (card["bytes"], card["lineages"][0]["bytes"], usage["bytes_held"]):
            assert told["gpu"] is None if service.is_vllm else told["gpu"] > 0


class TestTenants:
    @pytest.mark.guarantee("G2")
    def test_g2_a_tenant_finds_nothing_of_another(self, service: EngineService) -> None:
        mine = talk(400)
        service.turn(mine)
        assert service.turn(mine).cached > 0
        theirs = talk(400, GREEN)
        assert service.turn(theirs).cached == 0

    @pytest.mark.guarantee("G12")
    @differs("erasing")
    def test_g12_what_a_tenant_forgets_is_found_nowhere_and_whether_pages_remain_is_said(
        self, service: EngineService
    ) -> None:
        chat, other = talk(500, words=150), talk(501)
        service.turn(chat)
        service.turn(other)
        service.settled()
        with service.http() as http:
            assert http.get("/v1/sessions", headers=bearer(RED)).raise_for_status().json()["data"]
            done = http.delete(f"/v1/sessions/{chat.session}", headers=bearer(RED))
        assert done.status_code == 200, done.text
        told = done.json()
        if service.is_vllm:
            assert told["pages"] == "unreachable until overwritten, in 2 of 2 replicas"
        else:
            assert "pages" not in told
            assert told["cleared"]["pages"] > 0
        assert told["cleared"]["extents"] > 0
        again = Conversation(500, session=chat.session, turn_words=150, key=RED)
        assert service.turn(again).cached == 0
        assert service.turn(other).cached > 0, "the tiers have the other session still"
