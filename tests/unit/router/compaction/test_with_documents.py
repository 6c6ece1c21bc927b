"""Chats that name documents and outgrow their window: both are put into the prompt of one request."""

from __future__ import annotations

import asyncio
from pathlib import Path

from router.documents import DocumentShelf
from tests.support.router.router_harness import CONTEXT, House, make_settings, spoken
from tests.unit.router.compaction.test_compaction_api import Guest, question, settings_in, text_of


def house(folder: Path) -> House:
    settings = make_settings(
        compaction=settings_in(folder),
        knowledge={"enabled": True, "dir": folder / "kb", "embedder": "none"},
    )
    return House(lambda _: spoken("Fine."), settings=settings)


async def test_a_conversation_without_a_system_prompt_is_cut_and_keeps_its_document(tmp_path: Path) -> None:
    made = house(tmp_path)
    shelf = made.service.documents
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
