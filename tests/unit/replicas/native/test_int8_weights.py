"""What rounding weights to int8 costs, on the default model and three kinds of text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from samovar.replicas.scheduling.step import Chunk
from tests.support.engines.forward_bench import Bench

TOKENS = 160
ROOT = Path(__file__).parents[4]
TEXTS = {
    "talk": "User: My tea is always bitter. What do I do wrong?\n"
    "Assistant: Probably you let it steep for too long, or the water is too hot. Green tea wants water of "
    "about 80 degrees and two minutes, black tea may have boiling water and four. Take the leaves out then.\n"
    "User: And how much tea do I need for a pot of one litre?\nAssistant: Four or five teaspoons. "
    "If it is too strong, add hot water to the cup: in Russia a small pot of very strong tea stands on the "
    "samovar all day, and everybody thins it as they like.\nUser: What is a samovar?\nAssistant: A metal "
    "urn that keeps water hot, with a tap below and a place for the teapot above. It was heated with coal, "
    "pine cones or wood; today with electricity.\n",
    "prose": (ROOT / "SECURITY.md").read_text(),
    "code": (ROOT / "replicas" / "turns" / "fair_queue.py").read_text(),
}
KL_MAX = 0.012
"""To the float32 model; transformers' modules in bfloat16 have 0.0015, weights in int8 had 0.005 at most."""
AGREEMENT_MIN = 0.92
"""Share of greedy tokens that are the float32 model's: 0.945 at least; in bfloat16 0.967."""


@dataclass(frozen=True)
class Quality:
    kl: float
    agreement: float


@pytest.fixture(scope="module")
def benches(smollm2: Path) -> dict[str, Bench]:
    ours = ("native", "native-bf16", "native int8")
    return {
        "truth": Bench(smollm2, torch.float32, 16),
        **{name: Bench(smollm2, torch.bfloat16, 16, step=name) for name in ours},
    }


def _logprobs(bench: Bench, tokens: list[int]) -> torch.Tensor:
    sequence, rows = bench.sequence(tokens), list[torch.Tensor]()
    sequence.score_from = 0
    chunk = Chunk(sequence, 0, len(tokens))
    last = bench.runner.run([chunk], score=lambda _, start, logits: rows.append(logits.clone()))
    return torch.cat([*rows, last])[: len(tokens)].double().log_softmax(-1)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_int8_is_near_the_float32_model(smollm2: Path, benches: dict[str, Bench], text: str) -> None:
    tokens = AutoTokenizer.from_pretrained(smollm2)(text).input_ids[:TOKENS]
    assert len(tokens) == TOKENS
    truth = _logprobs(benches["truth"], tokens)

    def quality(name: str) -> Quality:
        ours = _logprobs(benches[name], tokens)
        kl = float((truth.exp() * (truth - ours)).sum(-1).mean())
        return Quality(kl, float((truth.argmax(-1) == ours.argmax(-1)).double().mean()))

    rounded, kept, multiplied = map(quality, ("native int8", "native", "native-bf16"))
    assert rounded.kl <= KL_MAX, rounded
    assert rounded.agreement >= AGREEMENT_MIN, rounded
    assert kept.kl <= KL_MAX / 100, kept
    assert multiplied.kl <= KL_MAX / 20, multiplied
