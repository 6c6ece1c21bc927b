"""An ingress whose texts are sealed, over HTTP: it answers as a plain one does, and its files say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.cache_tiers.blocks import SEALED_TEXT
from samovar.configs.sections import TierSettings
from samovar.router.context.knowledge import KnowledgeError
from samovar.router.ingress import app, places
from tests.support.router.fake_directory import FakeLink
from tests.support.router.router_harness import MODEL, TOKENIZER, House, error_of, make_settings, spoken
from tests.support.router.sealed_desks import KeyRing

MARKER = "the eagle lands at noon: 0123456789abcde"
ENTRY = {"kind": "schema", "title": f"Orders {MARKER}", "text": f"orders_raw: {MARKER}", "why": MARKER}
SESSION = "talk-1"


def house(folder: Path, ring: KeyRing | None, monkeypatch: pytest.MonkeyPatch) -> House:
    own = {"enabled": True, "dir": folder / "kb", "embedder": "none"}
    monkeypatch.setattr(app, "open_sealing", lambda settings: None if ring is None else ring.opened())
    settings = make_settings(
        knowledge=own,
        compaction={"enabled": True, "dir": folder / "kb", "embedder": "none"},
        tiers=TierSettings(encryption_key_file=None if ring is None else ring.outer),
    )
    return House(lambda _: spoken(f"Fine: {MARKER}.", cached=64), settings=settings, link=FakeLink())


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (folder / "kb").iterdir())


async def talk(client: httpx.AsyncClient) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "max_tokens": 40,
        "session_id": SESSION,
        "knowledge": {},
        "messages": [{"role": "user", "content": f"What of orders_raw? {MARKER}"}],
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def test_it_answers_as_a_plain_one_and_an_erased_session_takes_its_key_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    ring = KeyRing(tmp_path / "keys")
    for folder, own in ((tmp_path / "plain", None), (tmp_path / "sealed", ring)):
        made = house(folder, own, monkeypatch)
        async with made.client() as client:
            created = await client.post("/v1/knowledge", json=ENTRY)
            assert created.status_code == 201, created.text
            found = (await client.post("/v1/knowledge/search", json={"query": "orders_raw"})).json()
            document = {"title": f"Manual {MARKER}", "format": "text", "text": f"It boils. {MARKER}"}
            sent = await client.post("/v1/documents", json=document)
            assert sent.status_code in (200, 201, 202), sent.text
            whole = await talk(client)
            prompt = TOKENIZER.decode(made.replicas.calls[-1].prompt_token_ids)
            prompt = prompt.replace(created.json()["id"], "the entry's id")
            (turn,) = made.service.stage("knowledge").store.records.find("local", "turn")  # type: ignore[union-attr]
            assert MARKER in turn.body
            seen.append((found["data"][0]["text"], prompt, whole["choices"][0]["message"]["content"]))
            raw = files(folder)
            assert (MARKER.encode() in raw) == (own is None)
            assert (SEALED_TEXT.encode() in raw) == (own is not None)
            if own is not None:
                cleared = await client.delete(f"/v1/sessions/{SESSION}")
                assert cleared.status_code == 200, cleared.text
                assert cleared.json()["cleared"]["keys"] == 1
                assert made.service.stage("knowledge").store.records.find("local", "turn") == []  # type: ignore[union-attr]
                assert (await client.get(f"/v1/knowledge/{created.json()['id']}")).json()["text"] == ENTRY[
                    "text"
                ]
        for stage in made.service.stages:
            stage.close()
    assert seen[0] == seen[1]
    with pytest.raises(KnowledgeError, match="is encrypted"):
        house(tmp_path / "sealed", None, monkeypatch)


async def test_without_the_operators_key_knowledge_is_refused_and_other_chats_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = KeyRing(tmp_path / "keys")
    made = house(tmp_path, ring, monkeypatch)
    ring.outer.unlink()
    async with made.client() as client:
        refused = await client.post("/v1/knowledge", json=ENTRY)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "knowledge_unavailable")
        assert "tiers.encryption_key_file" in error_of(refused)["message"]
        body = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert MARKER.encode() not in files(tmp_path)


def test_a_service_without_a_key_seals_nothing() -> None:
    assert places.open_sealing(make_settings()) is None
