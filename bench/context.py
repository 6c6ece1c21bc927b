"""What retrieval finds, and what its order in the prompt costs.

Recall: is a planted fact among the first five found, by words only, by meaning only, and by both with names
fused, on the generated base of `_context_facts.py`. `--hidden`: by meaning also with the served model's mean
hidden state in place of the packaged embedder (minutes; of one seed).

Order: a conversation of 30 turns with retrieval, built by the product's own code, in the order that keeps
prefixes (`cache_aware`) and with what was retrieved in front (`naive_order`); tokens that a cache without
bounds would not have, counted by block keys.

Window: a conversation of three times the window, compacted and truncated (`_context_window.py`).

Then both with a service (`_context_served.py`): times to first token, and tokens computed as its receipts
say. Two are started one after the other, unless there is one: `--url`, with `knowledge.enabled`;
`--window-url`, with a window of 2,048 tokens and `compaction.enabled`. `--offline`: without a service.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench import _report as report
from bench._context_facts import PlantedFact, planted
from bench._context_served import Guest, guest_at, guest_of_service, orders_served, window_served
from bench._context_window import WINDOW_TOKENS, beyond_window
from samovar.cache_tiers.blocks import chain_keys
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.configs.settings import Settings
from samovar.replicas.messages import SamplingParams
from samovar.router.context.knowledge import (
    RANKINGS,
    Change,
    Content,
    Embedder,
    KnowledgeBase,
    Provenance,
    SqliteStore,
    canonical,
    fenced,
    open_embedder,
)
from samovar.router.generation import AskedTurn
from samovar.router.ingress.app import open_prompts
from samovar.router.ingress.knowledge_routes import ServedText
from samovar.router.openai import ChatMessage, KnowledgeWish, ParsedChat
from samovar.router.prompt import PromptBuilder

TENANT = "bench"
SEEDS = (1, 2, 3)
FACTS = 40
FOUND_AT = 5
TURNS = 30
BLOCK_TOKENS = 16
ROOT = bytes(32)
SYSTEM = "You are a careful assistant. Answer from the reference data where there is any, and briefly."
ANSWER_WORDS = 60


class HiddenStates:
    """The mean of a model's last hidden state over a text, as a vector of meaning."""

    name = "hidden-states"

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        from samovar.replicas.model import ensure_model

        path = ensure_model(settings.model)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        self._made: dict[str, Any] = {}

    def embed(self, texts: Sequence[str]) -> list[Any]:
        """Return a vector of length 1 for each text."""
        with self._torch.inference_mode():
            for text in texts:
                if text not in self._made:
                    ids = self._tokenizer(text, return_tensors="pt")
                    mean = self._model(**ids).last_hidden_state[0].mean(0).numpy().astype(np.float32)
                    self._made[text] = mean / np.linalg.norm(mean)
        return [self._made[text] for text in texts]


def base_of(
    folder: Path, embedder: Embedder | None, text: ServedText, facts: Sequence[str], kinds: Sequence[str]
) -> KnowledgeBase:
    """A knowledge base in `folder` that holds the facts, each of one of the kinds in turn."""
    settings = KnowledgeSettings(session_tokens_max=10**6)  # all turns get something
    store = SqliteStore(folder / "kb.sqlite", embedder="" if embedder is None else embedder.name)
    base = KnowledgeBase(store, embedder, text, settings)
    changes = [
        Change(Content(kind, "", fact), Provenance("bench"))  # type: ignore[arg-type]
        for fact, kind in zip(facts, itertools.cycle(kinds))
    ]
    base.write(TENANT, changes)
    return base


def recall(text: ServedText, embedders: dict[str, Embedder | None]) -> Iterator[dict[str, Any]]:
    """Share of planted facts among the first five, by how they are asked for."""
    for made_by, embedder in embedders.items():
        ways: dict[str, Sequence[str]] = {"words_only": ["words"], "words_and_names": ["words", "names"]}
        if embedder is not None:
            ways = {"meaning_only": ["meaning"], "hybrid": RANKINGS}
        hits: dict[str, dict[str, list[bool]]] = {}
        took_s: dict[str, list[float]] = {}
        for seed in SEEDS[:1] if isinstance(embedder, HiddenStates) else SEEDS:
            facts, distractors = planted(seed, FACTS)
            with tempfile.TemporaryDirectory() as folder:
                texts = [*(fact.text for fact in facts), *distractors]
                base = base_of(Path(folder), embedder, text, texts, ["gotcha"])
                for name, rankings in ways.items():
                    for fact in facts:
                        began_s = time.perf_counter()
                        found = base.search(TENANT, fact.question, limit=FOUND_AT, rankings=rankings)
                        took_s.setdefault(name, []).append(time.perf_counter() - began_s)
                        is_found = fact.text in (one.version.content.text for one in found)
                        hits.setdefault(name, {}).setdefault(fact.asks, []).append(is_found)
                base.close()
        for name, by_kind in hits.items():
            every = [hit for kind in by_kind.values() for hit in kind]
            yield {
                "name": name,
                "vectors": made_by,
                "facts": len(every),
                "facts_found": sum(every),
                "recall_at_5": statistics.mean(every),
                **{f"asked_by_{kind}": statistics.mean(hit) for kind, hit in sorted(by_kind.items())},
                "search_ms": round(statistics.median(took_s[name]) * 1000, 2),
            }


class BlockCount:
    """Counts the tokens that a cache without bounds would not have, by block keys."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def computed(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Return how many tokens of a prompt are computed; its blocks and its answer's are known then."""
        keys = chain_keys(ROOT, ROOT, prompt, BLOCK_TOKENS)
        cached = sum(1 for _ in itertools.takewhile(self._known.__contains__, keys))
        self._known.update(chain_keys(ROOT, ROOT, [*prompt, *answer], BLOCK_TOKENS))
        return len(prompt) - cached * BLOCK_TOKENS


def conversation(seed: int, turns: int) -> tuple[list[PlantedFact], list[str], list[str]]:
    """The facts that are asked for, one a turn; an answer to each; and all that the base holds."""
    facts, distractors = planted(seed, FACTS)
    rng = random.Random(seed)
    words = " ".join(fact.text for fact in facts).split()
    answers = [" ".join(rng.choices(words, k=ANSWER_WORDS)) for _ in range(turns)]
    return facts[:turns], answers, [*(fact.text for fact in facts), *distractors]


Built = Callable[[list[ChatMessage]], tuple[tuple[ChatMessage, ...], Sequence[str]]]


def cache_aware(base: KnowledgeBase) -> Built:
    """The product's own order."""

    def build(messages: list[ChatMessage]) -> tuple[tuple[ChatMessage, ...], Sequence[str]]:
        asked = ParsedChat(
            model="m",
            sampling=SamplingParams(max_tokens=64),
            messages=tuple(messages),
            knowledge=KnowledgeWish(),
        )
        turn = AskedTurn(TENANT, b"session", "", b"", 0, None, asked, asked)
        turn, context = asyncio.run(base.place(turn))
        assert context is not None
        return turn.placed.messages, [version.content.text for version in context.versions.values()]

    return build


def naive_order(base: KnowledgeBase) -> Built:
    """What was retrieved for this question in front of the history, as most do it."""

    def build(messages: list[ChatMessage]) -> tuple[tuple[ChatMessage, ...], Sequence[str]]:
        found = [one.version for one in base.excerpt(TENANT, messages[-1].content)]
        front = ChatMessage("system", f"{messages[0].content}\n\n{fenced(canonical(found), ())}")
        return (front, *messages[1:]), [version.content.text for version in found]

    return build


def talk(prompts: PromptBuilder, build: Built, seed: int, turns: int) -> dict[str, Any]:
    """Tokens of one conversation: in prompts, computed, by turn; and whether each fact was in its prompt."""
    facts, answers, _ = conversation(seed, turns)
    messages, count = [ChatMessage("system", SYSTEM)], BlockCount()
    prompt_tokens, computed, found = [], [], 0
    for fact, answer in zip(facts, answers, strict=True):
        messages.append(ChatMessage("user", fact.question))
        placed, texts = build(messages)
        asked = ParsedChat(model="m", sampling=SamplingParams(), messages=placed)
        ids = prompts.tokens_of_chat(asked, add_special_tokens=False)
        computed.append(count.computed(ids, prompts.tokens_of_text(answer, add_special_tokens=False)))
        prompt_tokens.append(len(ids))
        found += fact.text in texts
        messages.append(ChatMessage("assistant", answer))
    return {
        "facts": turns,
        "facts_found": found,
        "prompt_tokens": sum(prompt_tokens),
        "computed_tokens": sum(computed),
        "cached_share": 1 - sum(computed) / sum(prompt_tokens),
        "computed_by_turn": computed,
    }


def orders(
    prompts: PromptBuilder, embedder: Embedder | None, seed: int = 1, turns: int = TURNS
) -> list[dict[str, Any]]:
    """The same conversation in both orders, without an answer of a model."""
    text = ServedText(prompts, 10**6)
    _, _, everything = conversation(seed, turns)
    rows = []
    for name, order in (("naive_order", naive_order), ("cache_aware", cache_aware)):
        with tempfile.TemporaryDirectory() as folder:
            base = base_of(Path(folder), embedder, text, everything, ["gotcha", "document_chunk"])
            rows.append({"name": name, **talk(prompts, order(base), seed, turns)})
            base.close()
    return rows


def _guest(
    stack: ExitStack, url: str | None, args: argparse.Namespace, flags: Mapping[str, object]
) -> Guest | None:
    """Return who asks the service at `url`, or one that is started with `flags`; None: none is wanted."""
    if url:
        return stack.enter_context(guest_at(url, args.api_key))
    return None if args.offline else stack.enter_context(guest_of_service(flags))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write `bench/out/context.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hidden", action="store_true", help="also vectors of the served model's hidden states"
    )
    parser.add_argument("--url", help="a running service with knowledge.enabled")
    parser.add_argument("--window-url", help="a running service with compaction.enabled and a small window")
    parser.add_argument("--api-key", help="of these")
    parser.add_argument("--offline", action="store_true", help="start no service")
    args = parser.parse_args(argv)
    settings = Settings()
    _, prompts = open_prompts(settings, None)
    text, packaged = ServedText(prompts, 10**6), open_embedder("auto")
    embedders: dict[str, Embedder | None] = {"none": None}
    if packaged is not None:
        embedders[packaged.name] = packaged
    if args.hidden:
        embedders["hidden-states"] = HiddenStates(settings)
    found = list(recall(text, embedders))
    report.show("Planted facts among the first five", found)
    order = orders(prompts, packaged)
    with ExitStack() as stack:
        guest = _guest(stack, args.url, args, {"knowledge.enabled": True})
        if guest is not None:
            order += orders_served(guest, conversation(1, TURNS), SYSTEM)
    shown = (
        "name",
        "facts",
        "facts_found",
        "prompt_tokens",
        "computed_tokens",
        "cached_share",
        "ttft_s_median",
    )
    report.show("A conversation of 30 turns", [{key: row.get(key, "") for key in shown} for row in order])
    window = beyond_window(prompts, packaged, iter(BlockCount, None))
    small = {"compaction.enabled": True, "model.context-tokens-max": WINDOW_TOKENS}
    with ExitStack() as stack:
        guest = _guest(stack, args.window_url, args, small)
        if guest is not None:
            window += window_served(guest)
    columns = (
        "name",
        "facts_found",
        "facts_answered",
        "computed_tokens",
        "idle_tokens",
        "ttft_s_median",
        *("ttft_to_short", "cpu_to_short", "computed_to_short"),
    )
    report.show(
        "A conversation of three windows", [{key: row.get(key, "") for key in columns} for row in window]
    )
    print(report.write("context", [*found, *order, *window]))
    prompts.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
