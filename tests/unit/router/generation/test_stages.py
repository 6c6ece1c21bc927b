"""One more stage of a chat's prompt: it is in this file, and no part of the product knows of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from samovar.router.generation import AnsweredTurn, AskedTurn, PromptStage
from samovar.router.openai import InvalidValue
from tests.support.router.router_harness import TOKENIZER, House, error_of

LINE = "Answer like a pirate."
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Where to?"}], "max_tokens": 8}
SESSION = {"x-session-id": "one"}


class PlacedLine:
    """What the receipt says of the line."""

    def __init__(self, turn: AskedTurn) -> None:
        self.turn = turn
        self.rendered: str | None = None
        self.answers = 0

    def told(self, cached_tokens: int) -> dict[str, Any]:
        return {"is_rendered": LINE in (self.rendered or ""), "answers": self.answers}


class LineStage(PromptStage):
    """Puts a line in front of the user's last message, and counts the answers of each session."""

    name = "line"
    keeps = "counts of lines"

    def __init__(self, fails: type[Exception] | None = None) -> None:
        self.fails = fails
        self.answers: dict[tuple[str, bytes], list[str]] = {}
        self.seen: list[str] = []

    async def place(self, turn: AskedTurn) -> tuple[AskedTurn, PlacedLine | None]:
        *before, last = turn.placed.messages
        if last.content == "Refuse.":
            raise InvalidValue("messages", "There is no line for that.")
        messages = (*before, replace(last, content=f"{LINE}\n{last.content}"))
        return replace(turn, placed=replace(turn.placed, messages=messages)), PlacedLine(turn)

    async def measured(self, context: PlacedLine, rendered: str | None) -> None:
        context.rendered = rendered

    async def answered(self, turn: AskedTurn, context: PlacedLine, answer: AnsweredTurn) -> None:
        if self.fails is not None:
            raise self.fails
        assert turn is context.turn, "as it came to this stage"
        kept = self.answers.setdefault((turn.tenant, turn.session), [])
        kept.append(answer.choice.text)
        context.answers = len(kept)

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        for owner in list(self.answers):
            if owner[0] == tenant and (sessions is None or owner[1] in sessions):
                del self.answers[owner]

    def card(self, tenant: str, session: bytes) -> dict[str, Any]:
        return {self.name: len(self.answers.get((tenant, session), []))}

    def start(self) -> None:
        self.seen.append("start")

    async def stop(self) -> None:
        self.seen.append("stop")

    def close(self) -> None:
        self.seen.append("close")


async def test_a_stage_places_is_told_and_forgets() -> None:
    stage = LineStage()
    house = House(stages=(stage,))
    async with house.client() as client:
        for turn in (1, 2):
            answer = (await client.post("/v1/chat/completions", json=CHAT, headers=SESSION)).json()
            assert answer["receipt"]["line"] == {"is_rendered": True, "answers": turn}
        prompt = TOKENIZER.decode(house.replicas.calls[-1].prompt_token_ids)
        assert f"{LINE}\nWhere to?" in prompt
        assert list(stage.answers.values()) == [["Hello", "Hello"]]
        assert (await client.get("/v1/sessions/one")).json()["line"] == 2
        (await client.delete("/v1/sessions/one")).raise_for_status()
        assert stage.answers == {}


async def test_a_stream_has_the_stages_part_in_its_last_receipt() -> None:
    async with House(stages=(LineStage(),)).client() as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert '"line":{"is_rendered":true,"answers":1}' in answer.text


@pytest.mark.parametrize("fails", [RuntimeError, TimeoutError])
async def test_a_stage_that_fails_at_the_end_costs_no_answer(fails: type[Exception]) -> None:
    async with House(stages=(LineStage(fails), LineStage())).client() as client:
        answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["receipt"]["line"]["answers"] == 1, "the one behind it is told all the same"


async def test_what_a_stage_refuses_is_the_clients_error_and_completions_pass_none() -> None:
    stage = LineStage()
    async with House(stages=(stage,)).client() as client:
        refused = {**CHAT, "messages": [{"role": "user", "content": "Refuse."}]}
        assert error_of(await client.post("/v1/chat/completions", json=refused))["param"] == "messages"
        plain = await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 4})
        assert "line" not in plain.json()
    assert stage.answers == {}


async def test_stages_start_and_end_with_the_ingress() -> None:
    stage = LineStage()
    house = House(stages=(stage,))
    async with house.app.router.lifespan_context(house.app):
        assert stage.seen == ["start"]
    assert stage.seen == ["start", "stop", "close"]


@pytest.mark.parametrize("wish", [{"documents": ["doc-1"]}, {"knowledge": {}}, {"compaction": {}}])
async def test_a_wish_that_no_stage_serves_is_refused(wish: dict[str, Any]) -> None:
    async with House().client() as client:
        refused = error_of(await client.post("/v1/chat/completions", json={**CHAT, **wish}))
    (name,) = wish
    assert refused["param"] == name
    assert "not served here" in refused["message"]


async def test_chats_and_completions_do_not_touch_the_stored_responses() -> None:
    house = House()
    object.__setattr__(house.service, "responses", None)
    async with house.client() as client:
        for stream in (False, True):
            told = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert "receipt" in told.text
            assert "error" not in told.text
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
        (await client.post("/v1/completions", json=body)).raise_for_status()
