"""Chats that name documents and outgrow their window: both are put into the prompt of one request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from samovar.replicas.messages import EngineStats, GenerateRequest
from samovar.router.context.documents import DocumentShelf
from tests.support.engines.tiny_models import CHAT_TEMPLATE
from tests.support.router.chat_templates import tokenizer_with
from tests.support.router.fake_replica import Script
from tests.support.router.router_harness import CONTEXT, House, make_settings, spoken
from tests.unit.router.context.compaction.test_compaction_api import (
    SUMMARY,
    Guest,
    is_summary,
    question,
    rest,
    settings_in,
    text_of,
)

NO_SYSTEM = (  # as Gemma's
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT_TEMPLATE
)


def house(folder: Path, template: str | None = None, **own: Any) -> House:
    settings = make_settings(
        compaction=settings_in(folder, **own),
        knowledge={"enabled": True, "dir": folder / "kb", "embedder": "none"},
    )

    def script(request: GenerateRequest) -> Script:
        return spoken(SUMMARY) if is_summary(request) else spoken("Fine.")

    made = House(script, settings=settings, tokenizer=tokenizer_with(template))
    made.replicas.stats_now = [EngineStats("replica-1")]  # idle
    return made


async def test_a_conversation_without_a_system_prompt_is_cut_and_keeps_its_document(tmp_path: Path) -> None:
    made = house(tmp_path)
    shelf = made.service.stage("documents")
    assert isinstance(shelf, DocumentShelf)
    async with made.client() as client:
        body = {"text": "The samovar's tap is called Zarya-7.", "prefill": "never"}
        named = (await client.post("/v1/documents", json=body)).json()["id"]
        async with asyncio.timeout(60):
            while await shelf.work():
                pass
        guest = Guest(client, made)
        guest.messages.clear()
        await guest.says("How hot? " + question(0), documents=[named])
        await guest.talks(24, first=1, documents=[named])
        assert guest.receipts[-1]["compaction"]["turns_cut"] > 5
        assert all(len(prompt) <= CONTEXT for prompt in guest.prompts)
        await guest.says("Which room has K14X?", documents=[named], compaction={"budget_tokens": 300})
        prompt = text_of(made.replicas.calls[-1])
        assert prompt.count("Zarya-7") == 1, "the document stands in front, whole"
        assert prompt.index("Zarya-7") < prompt.index("messages are left out")
        assert "| user: The code of room 2 is K14X." in prompt
        assert prompt.index("room 24") < prompt.index("K14X"), "it stands beside the question"
        new = [one for one in guest.receipts[-1]["compaction"]["pieces"] if one["is_new"]]
        assert 3 in {one["turn"] for one in new}


@pytest.mark.parametrize("mode", ["retrieve", "summarise"])
async def test_a_template_without_a_system_prompt_keeps_the_document_at_a_cut(
    tmp_path: Path, mode: str
) -> None:
    made = house(tmp_path, NO_SYSTEM)
    shelf = made.service.stage("documents")
    assert isinstance(shelf, DocumentShelf)
    async with made.client() as client:
        text = "The samovar's tap is called Zarya-7. It has eleven parts, and a lid."
        body = {"text": text, "prefill": "always"}
        named = (await client.post("/v1/documents", json=body)).json()["id"]
        async with asyncio.timeout(60):
            while await shelf.work():
                pass
        ahead = text_of(made.replicas.calls[-1])
        assert "Zarya-7" in ahead
        guest = Guest(client, made)
        guest.messages.clear()
        wish = {"documents": [named], "compaction": {"mode": mode}}
        for number in range(30):
            await guest.says(question(number), **wish)
            await rest(made)
            said = made.replicas.calls[-1]
            prompts = [text_of(one) for one in (said, *made.replicas.calls[-2:])]
            assert all(prompt.count("Zarya-7") == 1 for prompt in prompts), "whole, and once"
            assert all(prompt.startswith(ahead) for prompt in prompts), "its blocks are those of the prefill"
        assert guest.receipts[-1]["compaction"]["turns_cut"] > 5
        assert all(len(prompt) <= CONTEXT for prompt in guest.prompts)
        assert guest.receipts[-1]["documents"]["tokens"]
        summaries = [one for one in made.replicas.calls if is_summary(one)]
        assert bool(summaries) == (mode == "summarise")


async def test_a_document_in_no_message_is_not_what_knowledge_is_searched_for(tmp_path: Path) -> None:
    made = house(tmp_path, NO_SYSTEM)
    shelf = made.service.stage("documents")
    assert isinstance(shelf, DocumentShelf)
    async with made.client() as client:
        body = {"text": "Zarya-7 is the samovar's tap. " * 40, "prefill": "never"}
        named = (await client.post("/v1/documents", json=body)).json()["id"]
        async with asyncio.timeout(60):
            while await shelf.work():
                pass
        fact = {"kind": "gotcha", "text": "The lid of the kettle is hot."}
        assert (await client.post("/v1/knowledge", json=fact)).status_code == 201
        guest = Guest(client, made)
        guest.messages.clear()
        wish = {"kinds": ["gotcha"]}
        await guest.says("Is the lid of the kettle hot?", documents=[named], knowledge=wish)
        prompt = text_of(made.replicas.calls[-1])
        assert len(guest.receipts[-1]["knowledge"]["entries"]) == 1
        assert prompt.index("Zarya-7") < prompt.index("| The lid of the kettle") < prompt.index("Is the lid")


@pytest.mark.parametrize("own", [{"of_tenant": {"local": "retrieve"}}, {}])
async def test_where_a_tenants_chats_are_compacted_always_knowledge_keeps_its_room(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    made = house(tmp_path, **own)
    async with made.client() as client:
        fact = {"kind": "gotcha", "text": "The lid of the kettle is hot. " + "Mind it. " * 20}
        assert (await client.post("/v1/knowledge", json=fact)).status_code == 201
        guest = Guest(client, made)
        wish: dict[str, Any] = {"compaction": None, "knowledge": {"kinds": ["gotcha"]}}
        # The conversation alone fills the window: what the first turn got has room only if old turns leave.
        await guest.says("Is the lid of the kettle hot?", **wish)
        placed = guest.receipts[-1]["knowledge"]
        assert len(placed["entries"]) == 1
        while sum(len(str(one["content"])) for one in guest.messages) < CONTEXT - placed["tokens"]:
            await guest.says("And how is the lid? " + "It is cold. " * 4, **wish)
        told = [receipt["knowledge"]["dropped"] for receipt in guest.receipts]
        assert any(told) == (not own), "without compaction it leaves, and the chat is told"
