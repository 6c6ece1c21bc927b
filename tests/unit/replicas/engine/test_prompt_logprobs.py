"""Log-probabilities of a prompt: the model's own, the same however they were computed, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from samovar.replicas.messages import TokenLogprob
from samovar.replicas.scheduling.queues import Preemption
from samovar.replicas.scheduling.step import StepPlan
from samovar.replicas.start.build import BuiltEngine
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.support.engines.exactness import assert_same_logprobs
from tests.support.engines.tier_engines import receipt_of, tiered

TOP = 3
PROMPT = prompt_of(75, seed=4)
BLOCK = 16


def scored(driver: Driver, prompt: list[int] = PROMPT, **params: Any) -> Answer:
    return driver.run(prompt, max_tokens=1, prompt_logprobs=TOP, **params)


def scores(answer: Answer) -> list[TokenLogprob]:
    assert answer.admitted is not None, answer.failed
    return list(answer.admitted.prompt_logprobs)


def assert_same(built: BuiltEngine, ours: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    """Bit for bit where the probe says that this CPU is exact."""
    assert [score.token_id for score in ours] == [score.token_id for score in expected]
    dtype = getattr(torch, built.info.dtype)
    assert_same_logprobs(ours, expected, dtype, built.info.exact)


def fresh(model_dir: Path, **engine: Any) -> Driver:
    return Driver(small_engine(model_dir, **engine).engine)


def test_they_are_the_models_own_with_ranks_and_the_best(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        truth = model(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)
    given = scores(scored(fresh(tiny_llama)))
    assert [score.token_id for score in given] == PROMPT
    assert (given[0].rank, given[0].logprob, given[0].top) == (0, 0.0, ())
    for place, score in enumerate(given[1:]):
        row = truth[place]
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-3)
        assert len(score.top) == TOP
        assert score.top[0].logprob == pytest.approx(float(row.max()), abs=1e-3)
        assert [top.logprob for top in score.top] == sorted((top.logprob for top in score.top), reverse=True)
        better = int((row > row[score.token_id] + 1e-3).sum())
        assert better < score.rank <= 1 + int((row > row[score.token_id] - 1e-3).sum())


@pytest.mark.parametrize(
    "how",
    [
        {"step_tokens_max": 16},
        {"step_tokens_max": 512},
        {"logit_rows_max": 4},
        {"logit_rows_max": 7},
        {"block_tokens": 32},
        {"prefix_reuse": False},
    ],
    ids=str,
)
def test_they_do_not_depend_on_chunks_pieces_or_blocks(tiny_llama: Path, how: dict[str, Any]) -> None:
    built = small_engine(tiny_llama)
    other = small_engine(tiny_llama, **how)
    assert_same(built, scores(scored(Driver(other.engine))), scores(scored(Driver(built.engine))))


def test_no_more_rows_of_logits_exist_than_allowed(tiny_llama: Path) -> None:
    driver = fresh(tiny_llama, logit_rows_max=8, step_tokens_max=64)
    seen: list[int] = []
    score = driver.engine.requests.score

    def watched(chunk: Any, start: int, logits: torch.Tensor) -> None:
        seen.append(logits.shape[0])
        score(chunk, start, logits)

    driver.engine.requests.score = watched  # type: ignore[method-assign]
    assert len(scores(scored(driver))) == len(PROMPT)
    assert sum(seen) == len(PROMPT) - 1
    assert max(seen) == 8


@pytest.mark.guarantee("G14")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("start", [0, 1, 16, 17, 33, 50, 74, 75, 999])
def test_l14_cached_is_uncached_and_blocks_before_the_first_wanted_come_from_the_cache(
    tiny_llama: Path, start: int, dtype: str
) -> None:
    built = small_engine(tiny_llama, dtype=dtype)
    warm = Driver(built.engine)
    whole = scores(scored(warm))  # computes all of it, and leaves its blocks
    again = scored(warm, prompt_logprobs_from=start)
    given = scores(again)
    first = min(max(1, start), len(PROMPT))
    assert [score.rank for score in given[:first]] == [0] * first
    assert_same(built, given[first:], whole[first:])
    reusable = min(max(0, start - 1), len(PROMPT) - 1) if start < len(PROMPT) else len(PROMPT) - 1
    assert again.admitted is not None
    assert again.admitted.cached_tokens == reusable // BLOCK * BLOCK
    bare = fresh(tiny_llama, prefix_reuse=False, dtype=dtype)
    cold = scores(scored(bare, prompt_logprobs_from=start))
    assert_same(built, given[first:], cold[first:])


def test_what_was_computed_for_them_is_found_by_the_next_request(tiny_llama: Path) -> None:
    driver = fresh(tiny_llama)
    scored(driver)
    plain = driver.run(PROMPT)
    assert plain.admitted is not None
    assert plain.admitted.cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK
    assert plain.admitted.prompt_logprobs == ()


@pytest.mark.guarantee("G14")
@pytest.mark.parametrize("start", [0, 40, 70])
def test_l14_tiers_warm_is_cold(tiny_llama: Path, tmp_path: Path, start: int) -> None:
    """From a tier comes what lies before the first wanted, and nothing behind it."""
    engine = tiered(tiny_llama, tmp_path)
    params = {"max_tokens": 1, "prompt_logprobs": TOP, "prompt_logprobs_from": start, "logprobs": TOP}
    cold = engine.run(PROMPT, **params)
    engine.forget_pool()
    warm = engine.run(PROMPT, **params)
    receipt = receipt_of(warm)
    assert receipt.tokens["cpu"] == max(0, start - 1) // BLOCK * BLOCK
    assert receipt.tokens["compute"] == len(PROMPT) - receipt.tokens["cpu"]
    first = max(1, start)
    assert_same(engine.built, scores(warm)[first:], scores(cold)[first:])
    assert_same(engine.built, list(warm.deltas[0].logprobs), list(cold.deltas[0].logprobs))
    engine.forget_pool()
    plain = engine.run(PROMPT)
    assert receipt_of(plain).tokens["cpu"] >= (len(PROMPT) - 1) // BLOCK * BLOCK, "it was not stored"


def test_a_preempted_prompt_goes_on_where_it_was(tiny_llama: Path) -> None:
    """Its pages are gone, what was found out is not: no token twice, none left out."""
    built = small_engine(tiny_llama, step_tokens_max=16)
    driver, scheduler = Driver(built.engine), built.engine.scheduler
    key = driver.submit(PROMPT, max_tokens=4, prompt_logprobs=TOP)
    for _ in range(2):
        driver.step()
    (target,) = scheduler.running
    assert target.score_from == 32
    scheduler.queues.preempt(Preemption(target, "drop"), StepPlan())
    scheduler.pool.clear_cache()  # nothing of it is left
    driver.drain()
    assert driver.engine.stats().preemptions == 1
    assert_same(built, scores(driver.answers[key]), scores(scored(fresh(tiny_llama))))


def test_several_answers_share_one_scored_prompt(tiny_llama: Path) -> None:
    driver = fresh(tiny_llama)
    answer = scored(driver, n=3, temperature=1.0, seed=1)
    assert len(scores(answer)) == len(PROMPT)
    assert sorted(answer.finish) == [0, 1, 2]


def test_beside_others_they_are_the_same(tiny_llama: Path) -> None:
    built = small_engine(tiny_llama)
    driver = Driver(built.engine)
    expected = scores(scored(fresh(tiny_llama)))
    others = [driver.submit(prompt_of(30, seed=seed), max_tokens=20) for seed in range(3)]
    for _ in range(3):
        driver.step()
    key = driver.submit(PROMPT, max_tokens=4, prompt_logprobs=TOP)
    driver.drain()
    assert_same(built, scores(driver.answers[key]), expected)
    assert all(len(driver.answers[other].ids) == 20 for other in others)


def test_logits_that_are_no_numbers_end_the_request_and_nothing_else(tiny_llama: Path) -> None:
    driver = fresh(tiny_llama)
    other = driver.submit(prompt_of(20, seed=2), max_tokens=12)
    driver.step()
    sound = driver.engine.sampler.score
    driver.engine.sampler.score = lambda rows, ids, top: sound(rows * torch.nan, ids, top)  # type: ignore[method-assign]
    key = driver.submit(PROMPT, max_tokens=4, prompt_logprobs=TOP)
    driver.drain()
    failed = driver.answers[key].failed
    assert failed is not None
    assert "NaN" in failed.message
    assert len(driver.answers[other].ids) == 12


def test_only_allowed_tokens_are_sampled(tiny_llama: Path) -> None:
    driver = fresh(tiny_llama)
    allowed = (7, 9, 300)
    greedy = driver.run(PROMPT, allowed_token_ids=allowed, max_tokens=12, logprobs=2)
    drawn = driver.run(PROMPT, allowed_token_ids=allowed, max_tokens=12, temperature=1.5, top_p=0.9, seed=1)
    assert set(greedy.ids) | set(drawn.ids) <= set(allowed)
    assert len(greedy.ids) == 12
    free = driver.run(PROMPT, max_tokens=1, logprobs=2)
    ours, theirs = greedy.deltas[0].logprobs[0].top, free.deltas[0].logprobs[0].top
    assert ours == theirs, "log-probabilities are the model's own, whatever is allowed"
    ends = driver.engine.sampler.eos_token_ids
    only_ends = driver.run(PROMPT, allowed_token_ids=ends, max_tokens=5, min_tokens=3, ignore_eos=False)
    assert set(only_ends.ids) <= set(ends)
    refused = driver.answers[driver.submit(PROMPT, allowed_token_ids=(512,))].refused
    assert refused is not None
    assert "allowed_token_ids" in refused.message
