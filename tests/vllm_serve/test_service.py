"""What people see of a service whose replicas are vLLM's: the same as of ours, but for what is listed here.

Differences: greedy text is vLLM's own, and the same only as far as vLLM is the same with itself; pages are
not dropped one by one; the session's blocks in the pool are not counted.
"""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import NotFoundError

from tests.api.test_failover import FORM, pids_of, replicas
from tests.e2e.test_rollout import Crowd
from tests.support.services.guests import Conversation, Reply
from tests.support.services.service import MODEL, until
from tests.vllm_serve.conftest import ADAPTER, KEYS, VllmService, flags, start

RED, GREEN = KEYS["red"], KEYS["green"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def talk(seed: int, key: str = RED, words: int = 80) -> Conversation:
    return Conversation(seed, turn_words=words, key=key)


def settled(service: VllmService) -> None:
    def is_stored() -> bool:
        return not any(one["running"] + one["loading"] for one in service.stats()["replicas"])

    until("everything is stored", is_stored, 60)


def overrun(service: VllmService) -> None:
    """Have both pools forget what was in them, by asking other things."""

    def fill(number: int) -> None:
        ids = random.Random(f"fill {number} {os.urandom(4).hex()}").choices(range(1000, 40000), k=1500)
        service.openai(GREEN).completions.create(model=MODEL, prompt=ids, max_tokens=1, temperature=0)

    with ThreadPoolExecutor(4) as pool:  # several at once, so that none of the replicas is left out
        list(pool.map(fill, range(12)))


class TestReturns:
    def test_a_second_turn_lands_where_the_first_was_and_finds_its_pages(self, service: VllmService) -> None:
        for seed in range(4):
            chat = talk(100 + seed)
            first, second = service.turn(chat), service.turn(chat)
            assert first.cached == 0
            assert second.by_tier["gpu"] >= 0.7 * first.prompt_tokens
            assert second.receipt["replica"] == first.receipt["replica"]

    def test_what_left_the_pool_comes_back_from_memory(self, service: VllmService) -> None:
        chat = talk(200, words=200)
        first = service.turn(chat)
        settled(service)
        overrun(service)
        second = service.turn(chat)
        assert second.by_tier["cpu"] >= 0.7 * first.prompt_tokens, second.receipt
        assert second.receipt["decision"] == "load"

    def test_and_from_disk_after_a_restart_of_all(self, tmp_path: Path) -> None:
        given = flags(**{"cluster.replicas": 1})
        service = start(tmp_path, given)
        chat = talk(300, words=200)
        try:
            first = service.turn(chat)
            settled(service)
            assert service.stop() == 0
            service = start(tmp_path, given)
            second = service.turn(chat)
            assert second.by_tier["nvme"] >= 0.7 * first.prompt_tokens, second.receipt
        finally:
            assert service.stop() == 0, service.text


class TestAnswers:
    def test_a_stop_string_is_not_told_and_nothing_behind_it(self, service: VllmService) -> None:
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

    def test_answers_have_their_form(self, service: VllmService) -> None:
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

    def test_a_call_of_a_tool_has_its_arguments(self, service: VllmService) -> None:
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

    def test_several_answers_and_their_log_probabilities(self, service: VllmService) -> None:
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

    def test_a_seed_draws_the_same_again(self, service: VllmService) -> None:
        def drawn(seed: int) -> str:
            answer = service.openai(RED).completions.create(
                model=MODEL, prompt="Tea is", temperature=1, seed=seed, max_tokens=12
            )
            return str(answer.choices[0].text)

        assert drawn(5) == drawn(5)
        assert len({drawn(seed) for seed in range(4)}) > 1

    def test_what_cannot_be_is_refused_by_the_fields_name(self, service: VllmService) -> None:
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


class TestAdapters:
    def test_an_adapter_is_a_model_of_its_own_with_a_cache_of_its_own(self, service: VllmService) -> None:
        client = service.openai(RED)
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
        settled(service)
        assert [answer(name)[1:] for name in (MODEL, ADAPTER)] == [(base[1], 288), (tuned[1], 288)]
        overrun(service)
        assert [answer(name)[1:] for name in (MODEL, ADAPTER)] == [(base[1], 288), (tuned[1], 288)]

    def test_a_model_that_is_none_is_refused(self, service: VllmService) -> None:
        with pytest.raises(NotFoundError):
            service.openai(RED).completions.create(model="another", prompt="Tea")


class TestTenants:
    @pytest.mark.guarantee("G2")
    def test_g2_a_tenant_finds_nothing_of_another(self, service: VllmService) -> None:
        mine = talk(400)
        service.turn(mine)
        assert service.turn(mine).cached > 0
        theirs = talk(400, GREEN)
        assert service.turn(theirs).cached == 0

    @pytest.mark.guarantee("G12")
    def test_g12_what_a_tenant_forgets_is_found_nowhere_and_it_is_said_that_pages_remain(
        self, service: VllmService
    ) -> None:
        chat, other = talk(500, words=150), talk(501)
        service.turn(chat)
        service.turn(other)
        settled(service)
        with service.http() as http:
            assert http.get("/v1/sessions", headers=bearer(RED)).raise_for_status().json()["data"]
            done = http.delete(f"/v1/sessions/{chat.session}", headers=bearer(RED))
        assert done.status_code == 200, done.text
        assert done.json()["pages"] == "unreachable until overwritten, in 2 of 2 replicas"
        assert done.json()["cleared"]["extents"] > 0
        again = Conversation(500, session=chat.session, turn_words=150, key=RED)
        assert service.turn(again).cached == 0
        assert service.turn(other).cached > 0, "the tiers have the other session still"


class TestFailures:
    def test_killed_replicas_and_one_and_the_same_greedy_text(self, service: VllmService) -> None:
        kill_and_compare(service, 2)

    @pytest.mark.slow
    @pytest.mark.timeout(7200)
    def test_20_kills_20_texts(self, service: VllmService) -> None:
        kill_and_compare(service, 20)

    def test_an_engine_core_that_dies_has_its_replica_replaced(self, service: VllmService) -> None:
        wait_for_both(service)
        before = replicas(service)
        whole = answer(service)
        os.kill(service.core_pids()[0], signal.SIGKILL)
        assert answer(service) == whole
        until("another replica is there", lambda: len(replicas(service) - before) == 1, 300)
        wait_for_both(service)


def answer(service: VllmService, disturb: Any = None) -> str:
    """A long greedy answer. `disturb`: is called once with the replica's id, somewhere in it."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about tea."}],
        "max_tokens": 96,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    text, pieces, done = "", 0, False
    headers = {"authorization": f"Bearer {RED}"}
    with (
        service.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            done = done or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            pieces += 1
            if disturb is not None and pieces > 5:
                disturb(response.headers["x-replica"])
                disturb = None
    assert done, "a silent cut"
    return text


def wait_for_both(service: VllmService) -> None:
    until("two replicas are up", lambda: len(replicas(service)) == 2, 300)


def kill_and_compare(service: VllmService, kills: int) -> None:
    """Each kill hits a stream; the reader sees the text of vLLM undisturbed."""
    for _ in range(kills):
        wait_for_both(service)
        whole, pids = answer(service), pids_of(service, replicas(service))
        before = service.total("samovar_failovers_total", outcome="resumed")

        def kill(replica_id: str, pids: dict[str, int] = pids) -> None:
            os.kill(pids[replica_id], signal.SIGKILL)

        assert answer(service, kill) == whole
        assert service.total("samovar_failovers_total", outcome="resumed") > before


def cached_after(service: VllmService, chats: list[Conversation]) -> list[Reply]:
    return [service.turn(chat, max_tokens=4) for chat in chats]


@pytest.mark.timeout(2400)
def test_from_our_engine_to_vllm_and_back_under_traffic(tmp_path: Path) -> None:
    """Nobody sees an error. What one engine has stored the other does not find; then it is there again."""
    file, apart = tmp_path / "samovar.yaml", ("engine.kind", "cluster.replicas", "engine.vllm.options")
    vllm = {"kind": "vllm", "vllm": {"options": {"enforce_eager": True}}}
    file.write_text(yaml.safe_dump({"cluster": {"replicas": 1}}))
    given = {name: value for name, value in flags(config=file).items() if name not in apart}
    service = start(tmp_path / "service", given, has_keys=False)
    service.file = file
    try:
        chats = [Conversation(600 + number, turn_words=80) for number in range(3)]
        cached_after(service, chats)
        with Crowd(service) as crowd:
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            service.write(1, engine=vllm)
            service.reload()
            assert [reply.cached for reply in cached_after(service, chats)] == [0, 0, 0]
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            crowd.goes_on()
            service.write(1)
            service.reload()
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            crowd.goes_on()
        assert not crowd.failures
    finally:
        assert service.stop() == 0, service.text
