"""L14 with drafts: what a step guesses and checks changes nothing but the number of steps.

Answers, their log-probabilities and what is cached of them are those without drafts: alone and side by side,
greedy and drawn, with penalties, grammars, stops and choices, and when pages are short.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import Grammar
from samovar.replicas.scheduling import Chunk, Sequence, StepPlan
from samovar.replicas.scheduling.drafts import Drafter
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.support.engines.other_cpu import is_played

BLOCK = 16
LISTED = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 6, "maxItems": 9}
JSON = Grammar("json_schema", json.dumps(LISTED), "guided_json")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.3, "seed": 3},
    "nucleus": {"temperature": 0.4, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 4},
    "logprobs": {"logprobs": 3},
    "penalties": {"presence_penalty": 0.05, "frequency_penalty": 0.01, "repetition_penalty": 1.01},
    "biased": {"logit_bias": ((40, 2.5), (41, -100.0))},
    "grammar": {"grammar": JSON, "ignore_eos": False},
    "ends": {"ignore_eos": False, "min_tokens": 20, "stop": ("zq",)},
    "choices": {"n": 3, "temperature": 0.3, "seed": 5},
}
PROMPTS = [prompt_of(length, seed=length) for length in (60, 9, 33)]
PROMPTS += [prompt_of(11, seed=1) * 4, prompt_of(5, seed=2) * 7]


def driver(model_dir: Path, drafted: int, **engine: Any) -> Driver:
    if is_played():
        pytest.skip("nothing is drafted where steps are not exact, as on the CPU that is played")
    built = small_engine(model_dir, draft_tokens_max=drafted, **engine)
    if not built.info.exact:
        pytest.skip(f"nothing is drafted where steps are not exact: {built.info.exactness}")
    return Driver(built.engine)


def answers(driver: Driver, prompts: list[list[int]], **params: Any) -> list[Answer]:
    """Of prompts that are asked for at once, each with a seed of its own."""
    keys = []
    for number, prompt in enumerate(prompts):
        seeded = {"seed": params["seed"] + number} if "seed" in params else {}
        keys.append(driver.submit(prompt, **{"max_tokens": 70, **params, **seeded}))
    driver.drain()
    return [driver.answers[key] for key in keys]


def assert_same(got: list[Answer], expected: list[Answer]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.failed is None
        assert one.token_ids == other.token_ids
        assert one.texts == other.texts
        assert one.finish == other.finish
        for choice in one.token_ids:
            mine, theirs = (
                [delta for delta in answer.deltas if delta.index == choice] for answer in (one, other)
            )
            assert mine == theirs


class Foresight:
    """Drafts what the answers are known to be, with errors: guesses right and wrong, of any number."""

    def __init__(self, truth: list[Answer], seed: int) -> None:
        self._rng = random.Random(seed)
        self._truth = {
            (*prompt, choice): ids
            for prompt, answer in zip(PROMPTS, truth, strict=True)
            for choice, ids in answer.token_ids.items()
        }

    def drafts(self, sequences: list[Sequence]) -> list[tuple[int, ...]]:
        return [self._draft(one) for one in sequences]

    def _draft(self, one: Sequence) -> tuple[int, ...]:
        ids = self._truth[(*one.tokens[: one.prompt_tokens], one.index)]
        count = min(self._rng.randrange(8), one.tokens_left - 1)
        guesses = ids[one.output_tokens : one.output_tokens + count]
        return tuple(self._rng.randrange(3, 512) if self._rng.random() < 0.2 else token for token in guesses)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", ["native", "lean", "transformers"])
def test_answers_are_the_same_however_they_are_drawn(tiny_llama: Path, step: str, way: str) -> None:
    plain, drafting = driver(tiny_llama, 0, step=step), driver(tiny_llama, 7, step=step)
    expected = answers(plain, PROMPTS, **WAYS[way])
    drafting.engine.scheduler.drafter = cast(Drafter, Foresight(expected, seed=1))
    assert_same(answers(drafting, PROMPTS, **WAYS[way]), expected)
    stats, of_plain = drafting.engine.stats(), plain.engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.generated_tokens == of_plain.generated_tokens
    assert stats.steps < of_plain.steps
    assert of_plain.drafted_tokens == 0


def test_what_repeats_itself_takes_fewer_steps(tiny_llama: Path) -> None:
    plain, drafting = driver(tiny_llama, 0), driver(tiny_llama, 7)
    assert_same(answers(drafting, PROMPTS), answers(plain, PROMPTS))
    assert 0 < drafting.engine.stats().accepted_tokens <= drafting.engine.stats().drafted_tokens
    assert drafting.engine.stats().steps < plain.engine.stats().steps


@pytest.mark.parametrize("drafted", [1, 64])
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_next_turns_find_as_much_and_go_on_the_same(
    tiny_llama: Path, drafted: int, block_tokens: int
) -> None:
    """Blocks that were written by guesses that were right, and behind some that were not."""
    plain = driver(tiny_llama, 0, block_tokens=block_tokens)
    drafting = driver(tiny_llama, drafted, block_tokens=block_tokens)
    first, expected = answers(drafting, PROMPTS), answers(plain, PROMPTS)
    assert_same(first, expected)
    turns = [
        prompt + answer.ids + prompt_of(6, seed=9) for prompt, answer in zip(PROMPTS, first, strict=True)
    ]
    again, truth = answers(drafting, turns), answers(plain, turns)
    assert_same(again, truth)
    fresh = answers(driver(tiny_llama, 0, block_tokens=block_tokens, prefix_reuse=False), turns)
    assert_same(again, fresh)
    for one, other in zip(again, truth, strict=True):
        assert one.admitted is not None
        assert other.admitted is not None
        assert one.admitted.cached_tokens == other.admitted.cached_tokens > 0
    assert drafting.engine.stats().accepted_tokens > 0


def test_answers_are_the_same_when_pages_are_short(tiny_llama: Path) -> None:
    plain = driver(tiny_llama, 0)
    expected = answers(plain, PROMPTS, n=2, temperature=0.3, seed=5)
    narrow = driver(tiny_llama, 7, pool_tokens=16 * BLOCK)
    assert_same(answers(narrow, PROMPTS, n=2, temperature=0.3, seed=5), expected)
    stats = narrow.engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0
    assert stats.pages_active == 0


def test_drafts_take_no_page_that_another_answer_needs(tiny_llama: Path) -> None:
    """Nothing is preempted with them that is not without them."""
    pages = sum(-(-(len(prompt) + 70 - 1) // BLOCK) for prompt in PROMPTS)
    tight = driver(tiny_llama, 64, pool_tokens=pages * BLOCK)
    answers(tight, PROMPTS)
    assert tight.engine.stats().accepted_tokens > 0
    assert tight.engine.stats().preemptions == 0


def test_steps_that_are_not_exact_draft_nothing(tiny_llama: Path) -> None:
    fast = Driver(small_engine(tiny_llama, exact=False, step="transformers").engine)
    answers(fast, PROMPTS)
    assert fast.engine.stats().drafted_tokens == 0


def test_the_real_model_answers_the_same(smollm2: Path) -> None:
    prompts = [prompt_of(40, seed=1, vocab=40000), prompt_of(12, seed=2, vocab=40000) * 4]
    plain, drafting = (driver(smollm2, count, dtype="bfloat16") for count in (0, 7))
    for params in ({"max_tokens": 48}, {"max_tokens": 48, "temperature": 0.4, "seed": 8}):
        assert_same(answers(drafting, prompts, **params), answers(plain, prompts, **params))
    assert drafting.engine.stats().accepted_tokens > 0


def _always(engine: Engine, chunk: Chunk, guess: int) -> bool:
    return chunk.sequence in engine.requests.key_of and guess < len(chunk.draft)


def _not_behind_the_first(engine: Engine, chunk: Chunk, guess: int) -> bool:
    return _always(engine, chunk, guess) and (guess > 0 or chunk.sequence.tokens[-1] == chunk.draft[0])


@pytest.mark.parametrize("fault", [_always, _not_behind_the_first])
def test_a_guess_that_is_not_checked_is_seen(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    expected = answers(driver(tiny_llama, 0), PROMPTS)
    monkeypatch.setattr(Engine, "_is_right", fault)
    faulty = driver(tiny_llama, 7)
    faulty.engine.scheduler.drafter = cast(Drafter, Foresight(expected, seed=1))
    with pytest.raises(AssertionError):
        assert_same(answers(faulty, PROMPTS), expected)


def test_a_row_of_another_answer_is_seen(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each answer had one row of logits, drafts or not."""
    expected = answers(driver(tiny_llama, 0), PROMPTS)
    one_each = lambda plan: list(enumerate(chunk for chunk in plan.chunks if chunk.samples))  # noqa: E731
    monkeypatch.setattr(StepPlan, "sampling", one_each)
    with pytest.raises(AssertionError):
        assert_same(answers(driver(tiny_llama, 7), PROMPTS), expected)
