"""What the measurement of context says of the product: recall of planted facts, and what the order costs."""

from __future__ import annotations

import importlib.util

import pytest

from bench.context import BlockCount, orders, recall
from samovar.router.context.knowledge import open_embedder
from samovar.router.ingress.knowledge_routes import ServedText
from samovar.router.prompt import PromptBuilder
from tests.support.engines.tiny_models import EOS_ID
from tests.support.router.router_harness import TOKENIZER, make_settings

HAS_MEANING = importlib.util.find_spec("wordllama") is not None


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(
        TOKENIZER,
        vocab_tokens=512,
        context_tokens_max=10**6,
        eos_token_ids=[EOS_ID],
        settings=make_settings(),
    )


def test_thirty_turns_in_the_order_that_keeps_prefixes_compute_a_fifth_of_the_naive_order(
    prompts: PromptBuilder,
) -> None:
    naive, aware = orders(prompts, None)
    assert (naive["name"], aware["name"]) == ("naive_order", "cache_aware")
    assert naive["computed_tokens"] >= 5 * aware["computed_tokens"]
    assert aware["facts_found"] >= naive["facts_found"] - 1
    assert max(aware["computed_by_turn"]) < 2500, "no turn computes the history again"


def test_a_block_is_computed_once_and_a_changed_front_computes_all() -> None:
    count = BlockCount()
    assert count.computed(range(40), range(40, 50)) == 40
    assert count.computed(range(60), []) == 60 - 48
    assert count.computed([1, *range(1, 60)], []) == 60


@pytest.mark.skipif(not HAS_MEANING, reason="wordllama is not installed (extra `knowledge`)")
def test_hybrid_finds_more_planted_facts_than_words_or_meaning_alone(prompts: PromptBuilder) -> None:
    embedder = open_embedder("auto")
    assert embedder is not None
    rows = {row["name"]: row for row in recall(ServedText(prompts, 10**6), {"none": None, "own": embedder})}
    found = {name: row["recall_at_5"] for name, row in rows.items()}
    assert found["hybrid"] > 0.85
    assert found["hybrid"] - max(found["words_only"], found["meaning_only"]) > 0.1
    assert min(rows["hybrid"]["asked_by_words"], rows["hybrid"]["asked_by_names"]) == 1
    assert rows["hybrid"]["asked_by_meaning"] > 0.6
