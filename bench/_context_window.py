"""A conversation of three times the window, and what compaction does to it against truncation.

Facts are told in the first turns and asked for when they are long out of the window. `truncation` is what
clients do that drop the oldest turns so that the rest fits: a sliding window. `beyond_window` is compaction
with retrieval. What a model writes and what times are needs a service: `_context_served.py`.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench._context_facts import ADVICE, PEOPLE, PLACES, THINGS
from samovar.configs.optional_sections import CompactionSettings
from samovar.replicas.messages import SamplingParams
from samovar.router.context.compaction import CutMemory, Fitter, MessageTokens, SummaryStore
from samovar.router.context.knowledge import Embedder
from samovar.router.openai import ChatMessage, CompactionWish, ParsedChat
from samovar.router.prompt import PromptBuilder

TENANT, SESSION = "bench", b"session".ljust(16, b"\0")
SYSTEM = "You are a careful assistant. Answer in a few words."
WINDOW_TOKENS = 2048
TOLD, ASKED = 48, 20


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
