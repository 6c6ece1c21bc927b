"""A short conversation beside a long one has to compute what it says, as the long one has."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bench import _context_served as served
from bench._context_window import WINDOW_TOKENS, long_talk
from bench.context import BlockCount

TURNS = 52
"""Among them questions."""
SAID = next(one.names for one in long_talk(1) if one.fact)


class Cache:
    """A service whose model has one token a word, and whose cache forgets nothing."""

    def __init__(self, *, is_salted: bool) -> None:
        self.is_salted = is_salted
        self.blocks: dict[str, BlockCount] = {}
        self.ids: dict[str, int] = {}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://service", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": WINDOW_TOKENS}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text='samovar_compaction_jobs_total{outcome="done"} 3.0\n')
        body = json.loads(request.content)
        if request.url.path == "/detokenize":
            words = list(self.ids)
            return httpx.Response(200, json={"prompt": " ".join(words[one] for one in body["tokens"])})
        return httpx.Response(200, text=self.streamed(body))

    def streamed(self, body: dict[str, Any]) -> str:
        words = " ".join(one["content"] for one in body["messages"]).split()
        prompt = [self.ids.setdefault(word, len(self.ids)) for word in words]
        salt = body["cache_salt"] if self.is_salted else ""
        computed = self.blocks.setdefault(salt, BlockCount()).computed(prompt, ())
        tokens = {"compute": computed, "gpu": len(prompt) - computed}
        receipt = {"tokens": tokens, "decision": "none", "load_ms": 0.0}
        first = {"choices": [{"delta": {"content": SAID}}], "prompt_token_ids": prompt}
        return f"data: {json.dumps(first)}\n\ndata: {json.dumps({'choices': [], 'receipt': receipt})}\n\n"


def row_of(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(served, "THINK_S", 0)
    monkeypatch.setattr(served, "MODES", served.MODES[:1])
    monkeypatch.setattr(served, "long_talk", lambda seed: long_talk(seed)[:TURNS])
    with cache.client() as client:
        (row,) = served.window_served(served.Guest(client))
    return row


def test_both_conversations_compute_as_much_a_turn_where_nothing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = row_of(Cache(is_salted=True), monkeypatch)
    assert row["name"] == "beyond_window_served"
    assert 0.9 < row["computed_to_short"] < 1.1
    assert (row["turns"], len(row["by_turn"])) == (TURNS, TURNS)
    assert len(row["short_by_turn"]) == TURNS - -(-TURNS // served.SHORT_TURNS), "none that is a first turn"
    assert row["facts_found"] == row["facts"] > 2, "the whole history is in each prompt"
    assert 0 < row["facts_answered"] < row["facts"], "the model says the same each time"


@pytest.mark.parametrize("is_salted", [True, False])
def test_what_an_earlier_run_has_said_is_not_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, is_salted: bool
) -> None:
    """Without salts, which the service here then overlooks, the second run would be one of hits only."""
    cache = Cache(is_salted=is_salted)
    first, second = (row_of(cache, monkeypatch) for _ in range(2))
    is_same = first["computed_tokens"] == second["computed_tokens"]
    assert is_same == is_salted
    assert is_salted or second["computed_tokens"] < first["computed_tokens"] / 3
