"""Conversations of three times the window: compaction against truncation, and against a short conversation.

Facts are told in the first turns and asked for when they are long out of the window. `truncation` is what
clients do that drop the oldest turns so that the rest fits: a sliding window. `beyond_window` is compaction
with retrieval, `beyond_window_summarise` with summaries: the model writes these, so that row is of a running
service only.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from bench._context_facts import ADVICE, PEOPLE, PLACES, THINGS
from configs.optional_sections import CompactionSettings
from replicas.messages import SamplingParams
from router.compaction import CutMemory, Fitter, MessageTokens, SummaryStore
from router.knowledge import Embedder
from router.openai import ChatMessage, CompactionWish, ParsedChat
from router.prompt import PromptBuilder

TENANT, SESSION = "bench", b"session".ljust(16, b"\0")
SYSTEM = "You are a careful assistant. Answer in a few words."
WINDOW_TOKENS = 2048
TOLD, ASKED = 48, 20
SHORT_TURNS = 12
THINK_S = 0.8


@dataclass(frozen=True, slots=True)
class Told:
    """A turn: what the user says, what is answered, and, of a question, the fact and what an answer names."""

    said: str
    answer: str
    fact: str = ""
    names: str = ""


class Count(Protocol):
    """Counts computed tokens, as `bench.context.BlockCount` does."""

    def computed(self, prompt: Sequence[int], answer: Sequence[int]) -> int: ...


def long_talk(seed: int) -> list[Told]:
    """Return a conversation that tells facts in its first turns and asks for them in its last."""
    rng = random.Random(seed)
    pairs = rng.sample([(thing, place) for thing in THINGS for place in PLACES], TOLD)
    turns, facts = [], []
    for thing, place in pairs:
        person, year = rng.choice(PEOPLE), rng.randrange(1950, 2025)
        fact = f"The {thing} in {place} was installed by {person} in {year}."
        facts.append((f"Who installed the {thing} in {place}?", fact, person))
        chatter = " ".join(rng.sample(ADVICE, 3))
        turns.append(
            Told(f"For your notes: {fact} {chatter}", f"Noted. {rng.choice(ADVICE)} {rng.choice(ADVICE)}")
        )
    for question, fact, person in facts[:ASKED]:
        chatter = rng.choice(ADVICE)
        turns.append(Told(f"{chatter} {question}", f"It was {person}. {rng.choice(ADVICE)}", fact, person))
    return turns


def truncated(
    text: MessageTokens, like: ParsedChat, messages: Sequence[ChatMessage], limit_tokens: int
) -> list[ChatMessage]:
    """Return the system prompt and the last turns that fit."""
    kept = list(messages)
    while (
        len(kept) > 2
        and text.front(kept[:1], like) + sum(text.message(m, like) for m in kept[1:]) > limit_tokens
    ):
        del kept[1:3]
    return kept


def beyond_window(
    prompts: PromptBuilder, embedder: Embedder | None, counts: Iterator[Count], seed: int = 1
) -> list[dict[str, Any]]:
    """The same conversation truncated and compacted, without a model: is each fact in its question's prompt?

    `idle_tokens`: computed when the user was not waiting, before the turn that begins with them.
    """
    text, settings = MessageTokens(prompts), CompactionSettings()
    rows = []
    for name in ("truncation", "beyond_window"):
        with tempfile.TemporaryDirectory() as folder:
            store = SummaryStore(Path(folder) / "s.sqlite", of_session_max=4, rows_max=4, busy_s=5)
            memory = CutMemory(8, 4096, 2**26)
            fitter = Fitter(settings, text, memory, store, embedder, lambda: WINDOW_TOKENS)
            rows.append({"name": name, **_talk(prompts, fitter, next(counts), long_talk(seed), name)})
            store.close()
    return rows


def _talk(
    prompts: PromptBuilder, fitter: Fitter, count: Count, turns: Sequence[Told], name: str
) -> dict[str, Any]:
    wish = CompactionWish("retrieve")
    messages = [ChatMessage("system", SYSTEM)]
    sizes, computed, idle, found = [], [], 0, 0
    for turn in turns:
        messages.append(ChatMessage("user", turn.said))
        asked = ParsedChat(
            model="m",
            sampling=SamplingParams(),
            messages=tuple(messages),
            is_length_default=True,
            compaction=wish,
        )
        own = fitter.wish(asked, TENANT)
        assert own is not None
        plan, _ = fitter.plan(own)
        if name == "truncation":
            kept = truncated(fitter.text, asked, messages, plan.limit_tokens)
            made = ParsedChat(model="m", sampling=SamplingParams(), messages=tuple(kept))
        else:
            made = fitter.fit((TENANT, SESSION), own, asked, asked).request
        ids = prompts.tokens_of_chat(made, add_special_tokens=False)
        assert len(ids) <= WINDOW_TOKENS
        sizes.append(len(ids))
        computed.append(count.computed(ids, prompts.tokens_of_text(turn.answer, add_special_tokens=False)))
        found += bool(turn.fact) and any(turn.fact in one.content for one in made.messages)
        messages.append(ChatMessage("assistant", turn.answer))
        if name != "truncation":  # as the service does in an idle moment
            later = ParsedChat(
                model="m", sampling=SamplingParams(), messages=tuple(messages), is_length_default=True,
                begins_turn=False, compaction=wish,
            )  # fmt: skip
            fitted = fitter.fit((TENANT, SESSION), own, later, later)
            if fitted.cut.first != fitted.before.first:
                ids = prompts.tokens_of_chat(fitted.request, add_special_tokens=False)
                idle += count.computed(ids, ())
    whole = ParsedChat(model="m", sampling=SamplingParams(), messages=tuple(messages))
    return {
        "facts": ASKED,
        "facts_found": found,
        "turns": len(turns),
        "window_tokens": WINDOW_TOKENS,
        "history_tokens": len(prompts.tokens_of_chat(whole, add_special_tokens=False)),
        "prompt_tokens": sum(sizes),
        "computed_tokens": sum(computed),
        "idle_tokens": idle,
        "cached_share": 1 - sum(computed) / sum(sizes),
        "computed_by_turn": computed,
    }


def served_window(url: str, api_key: str | None, seed: int = 1) -> Iterator[dict[str, Any]]:
    """The same with a running service of this window and `compaction.enabled`: times, receipts, answers.

    A turn of a short conversation is between any two, so that both have the machine as it is then.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    talk = long_talk(seed)
    with httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
        card = client.get("/v1/models").json()["data"][0]
        assert card["max_model_len"] == WINDOW_TOKENS, f"--model.context_tokens_max {WINDOW_TOKENS}"
        for name, mode in (
            ("beyond_window_served", "retrieve"),
            ("beyond_window_summarise_served", "summarise"),
            ("truncation_served", "truncation"),
        ):
            yield {"name": name, **_served(_Guest(client, card["id"]), talk, mode)}


class _Guest:
    """Asks a service, and measures."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self.client = client
        self._model = model

    def fitting(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Drop the oldest turns until the rest fits, as a client would that counts tokens."""
        kept = list(messages)
        while len(kept) > 2:
            body = {"model": self._model, "messages": kept}
            if self.client.post("/tokenize", json=body).json()["count"] <= WINDOW_TOKENS - 256:
                break
            del kept[1:3]
        return kept

    def ask(
        self, session: str, messages: list[dict[str, str]], mode: str
    ) -> tuple[float, str, str, dict[str, Any]]:
        """Return the time to the first token, the answer, the prompt as text, and the receipt."""
        body: dict[str, Any] = {
            "model": self._model, "temperature": 0, "max_tokens": 16, "session_id": session, "stream": True,
            "stream_options": {"include_usage": True}, "messages": messages, "return_token_ids": True,
        }  # fmt: skip
        if mode in ("retrieve", "summarise"):
            body["compaction"] = {"mode": mode}
        first_s, text = 0.0, ""
        receipt: dict[str, Any] = {}
        prompt: list[int] = []
        began_s = time.perf_counter()
        with self.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                receipt, prompt = event.get("receipt", receipt), event.get("prompt_token_ids") or prompt
                for choice in event["choices"]:
                    prompt = choice.get("prompt_token_ids") or prompt
                    if choice["delta"].get("content"):
                        first_s = first_s or time.perf_counter() - began_s
                        text += choice["delta"]["content"]
        shown = self.client.post("/detokenize", json={"model": self._model, "tokens": prompt}).json()[
            "prompt"
        ]
        return first_s or time.perf_counter() - began_s, text, shown, receipt


def _served(guest: _Guest, talk: Sequence[Told], mode: str) -> dict[str, Any]:
    """Have one conversation. The answers in the history are the planned ones, so that all are the same."""
    began = time.time_ns()
    messages, beside = [{"role": "system", "content": SYSTEM}], [{"role": "system", "content": SYSTEM}]
    ttft_s, short_s, receipts = [], [], []
    answered = in_prompt = cuts = 0
    for number, turn in enumerate(talk):
        other = talk[number % SHORT_TURNS]
        if number % SHORT_TURNS == 0:
            del beside[1:]
        beside.append({"role": "user", "content": other.said})
        took_s, _, _, _ = guest.ask(f"{mode}-short-{number // SHORT_TURNS}-{began}", beside, "")
        if len(beside) > 2:  # the first turn of a conversation has nothing in the cache
            short_s.append(took_s)
        beside.append({"role": "assistant", "content": other.answer})
        time.sleep(THINK_S)
        messages.append({"role": "user", "content": turn.said})
        sent = guest.fitting(messages) if mode == "truncation" else messages
        took_s, text, prompt, receipt = guest.ask(f"{mode}-{began}", sent, mode)
        ttft_s.append(took_s)
        receipts.append(receipt["tokens"])
        cuts += receipt.get("compaction", {}).get("messages_cut", 0) > 0
        if turn.fact:
            answered += turn.names in text
            in_prompt += turn.fact in prompt
        messages.append({"role": "assistant", "content": turn.answer})
        time.sleep(THINK_S)  # the user reads, thinks and types
    every = sum(sum(one.values()) for one in receipts)
    computed = sum(one["compute"] for one in receipts)
    beyond = ttft_s[SHORT_TURNS:]
    return {
        "facts": sum(bool(turn.fact) for turn in talk),
        "facts_found": in_prompt,
        "facts_answered": answered,
        "turns": len(talk),
        "turns_cut": cuts,
        "window_tokens": WINDOW_TOKENS,
        "prompt_tokens": every,
        "computed_tokens": computed,
        "cached_share": 1 - computed / every,
        "think_s": THINK_S,
        "ttft_s_median": statistics.median(beyond),
        "ttft_s_p90": statistics.quantiles(beyond, n=10)[-1],
        "short_ttft_s_median": statistics.median(short_s),
        "ttft_to_short": statistics.median(beyond) / statistics.median(short_s),
        "ttft_s_by_turn": [round(one, 4) for one in ttft_s],
    }
