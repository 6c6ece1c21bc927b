"""An answer that another replica began goes on as if nothing had happened: tokens, text, logprobs, end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.replicas.answers import TextOut
from samovar.replicas.answers import output as answer_rules
from samovar.replicas.messages import Delta, GenerateRequest, Refused, Resume, SamplingParams
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.support.engines.exactness import assert_same_deltas
from tests.support.engines.tiny_models import EOS_ID

TOKENS = 24
PROMPT = prompt_of(37, seed=5)
DRAWN = {"temperature": 1.3, "seed": 11}

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {**DRAWN, "top_p": 0.95, "top_k": 200},
    "logprobs": {"logprobs": 3},
    "penalties": {
        **DRAWN,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
        "logprobs": 1,
    },
    "min_tokens": {**DRAWN, "min_tokens": 15, "stop": (" ",), "stop_token_ids": (7, 40)},
}


@pytest.fixture(scope="module")
def driver(tiny_llama: Path) -> Driver:
    return Driver(small_engine(tiny_llama).engine)


@pytest.fixture(scope="module")
def other(tiny_llama: Path) -> Driver:
    """Another replica: it has computed nothing of what the first one has."""
    return Driver(small_engine(tiny_llama, prefix_reuse=False).engine)


def sampling(max_tokens: int = TOKENS, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})


def submit(driver: Driver, params: SamplingParams, resume: Resume | None, n: int = 1) -> Answer:
    key = driver.next_key()
    answer = driver.answers[key] = Answer()
    request = GenerateRequest(f"r{key}", PROMPT, params, n, resume=resume)
    answer.refused = driver.engine.requests.add(key, request)
    return answer


def resumed(driver: Driver, params: SamplingParams, choice: int, token_ids: list[int]) -> Answer:
    answer = submit(driver, params, Resume(choice, tuple(token_ids)))
    driver.drain()
    return answer


def assert_goes_on(driver: Driver, params: SamplingParams, deltas: list[Delta], is_exact: bool) -> None:
    """From every token of an undisturbed answer (one token a delta) the rest is the same.

    They go on beside each other, which is quicker. Log-probabilities, where the CPU is not exact: within the
    bound.
    """
    ids = [token for delta in deltas for token in delta.token_ids]
    resumes = [Resume(deltas[0].index, tuple(ids[:cut])) for cut in range(len(deltas))]
    rests = [submit(driver, params, resume) for resume in resumes]
    driver.drain()
    for cut, rest in enumerate(rests):
        assert rest.refused is None, rest.refused
        assert_same_deltas(rest.deltas, deltas[cut:], torch.float32, is_exact)


@pytest.mark.guarantee("F20")
@pytest.mark.parametrize("name", VARIANTS)
def test_f20_goes_on_the_same_from_every_token(
    driver: Driver, other: Driver, tiny_is_exact: bool, name: str
) -> None:
    params = sampling(**VARIANTS[name])
    whole = driver.run(PROMPT, **{**asdict(params), "stop": params.stop})
    assert len(whole.deltas) > 8
    assert_goes_on(other, params, whole.deltas, tiny_is_exact)


@pytest.mark.guarantee("F20")
def test_f20_every_choice_goes_on_with_its_own_draws(
    driver: Driver, other: Driver, tiny_is_exact: bool
) -> None:
    params = sampling(**DRAWN)
    whole = submit(driver, params, None, n=3)
    driver.drain()
    assert len({tuple(ids) for ids in whole.token_ids.values()}) == 3
    for choice in range(3):
        own = [delta for delta in whole.deltas if delta.index == choice]
        assert_goes_on(other, params, own, tiny_is_exact)


@pytest.mark.guarantee("F20")
def test_f20_what_was_held_back_for_a_stop_string_or_a_character_is_not_lost(
    driver: Driver, other: Driver, tiny_is_exact: bool
) -> None:
    plain = driver.run(PROMPT, max_tokens=TOKENS, **DRAWN)
    assert any(not delta.text for delta in plain.deltas), "no token ended inside a character"
    nearly = plain.text[9:11] + "no such text"  # begins, and turns out to be none
    params = sampling(**DRAWN, stop=(plain.text[14:17], nearly))
    whole = driver.run(PROMPT, **asdict(params))
    assert whole.finish[0] == "stop"
    assert plain.text.startswith(whole.text)
    assert_goes_on(other, params, whole.deltas, tiny_is_exact)


def test_the_prompt_is_the_prompt(driver: Driver) -> None:
    """Usage and receipt count what the client has sent, not what was generated elsewhere."""
    whole = driver.run(PROMPT, max_tokens=TOKENS)
    before = driver.engine.stats()
    rest = resumed(driver, sampling(), 0, whole.ids[:20])
    after = driver.engine.stats()
    assert rest.admitted is not None
    assert sum(rest.admitted.receipt.tokens.values()) == len(PROMPT)
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
    assert after.generated_tokens - before.generated_tokens == TOKENS - 20


@pytest.mark.parametrize(
    ("resume", "n"),
    [
        (Resume(0, (5, 6)), 2),
        (Resume(-1, (5,)), 1),
        (Resume(99, (5,)), 1),
        (Resume(0, tuple(range(5, 5 + TOKENS))), 1),
        (Resume(0, (512,)), 1),
        (Resume(0, (-1,)), 1),
        (Resume(0, (5, EOS_ID, 6)), 1),
        (Resume(0, (5, EOS_ID)), 1),
    ],
    ids=["n=2", "negative", "choice", "full", "vocab", "id", "beyond its end", "over"],
)
def test_a_bad_resume_is_refused(driver: Driver, resume: Resume, n: int) -> None:
    answer = submit(driver, sampling(ignore_eos=False), resume, n)
    assert isinstance(answer.refused, Refused)
    assert answer.refused.reason == "invalid"
    driver.engine.check_integrity()
    assert not driver.engine.has_work


def test_tokens_that_cannot_be_read_are_refused_and_take_nobody_down(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> tuple[str, bool]:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(TextOut, "push", broken)
        answer = submit(driver, sampling(), Resume(0, (5, 6)))
    assert answer.refused is not None
    assert not driver.engine.requests.open_keys()
    assert driver.run(PROMPT, max_tokens=2).refused is None


@pytest.fixture(scope="module")
def small(tiny_llama: Path) -> Driver:
    """Its pool is too small for a handful of answers at once."""
    small = Driver(small_engine(tiny_llama, pool_tokens=128).engine)
    for first in range(5):
        submit(small, sampling(), Resume(0, tuple(range(5 + first, 15 + first))))
    small.drain()
    assert small.engine.stats().preemptions > 0
    return small


@pytest.fixture(scope="module")
def wholes(driver: Driver) -> dict[bool, dict[int, list[int]]]:
    """Undisturbed answers by choice: greedy (False) and drawn."""
    answers = {drawn: submit(driver, sampling(**(DRAWN if drawn else {})), None, n=4) for drawn in (0, 1)}
    driver.drain()
    return {bool(drawn): answer.token_ids for drawn, answer in answers.items()}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, TOKENS - 1), st.booleans()), min_size=2, max_size=5)
)
def test_f20_together_and_preempted(
    small: Driver, wholes: dict[bool, dict[int, list[int]]], asks: list[tuple[int, int, bool]]
) -> None:
    """Resumed answers that lose their pages to each other lose nothing else."""
    answers = []
    for choice, cut, drawn in asks:
        params, ids = sampling(**(DRAWN if drawn else {})), wholes[drawn][choice]
        answers.append((submit(small, params, Resume(choice, tuple(ids[:cut]))), choice, ids[cut:]))
    small.drain()
    for answer, choice, rest in answers:
        assert answer.token_ids[choice] == rest
    small.engine.check_integrity()


@pytest.mark.parametrize("is_exact", [True, False], ids=["equal", "bound"])
@pytest.mark.parametrize("fault", ["position", "token"])
def test_a_planted_fault_is_noticed(
    driver: Driver, other: Driver, monkeypatch: pytest.MonkeyPatch, fault: str, is_exact: bool
) -> None:
    params = sampling(**DRAWN)
    whole = driver.run(PROMPT, max_tokens=TOKENS, **DRAWN)
    assert_goes_on(other, params, whole.deltas, is_exact)
    resume = answer_rules.OutputProcessor.resume

    def faulty(
        self: answer_rules.OutputProcessor,
        opened: answer_rules.OpenAnswers,
        sequence: answer_rules.AnswerTokens,
        token_ids: tuple[int, ...],
    ) -> Refused | None:
        refused = resume(self, opened, sequence, token_ids)
        if fault == "position":
            sequence.prompt_tokens = len(sequence.tokens)
        elif len(sequence.tokens) > len(PROMPT):
            sequence.tokens.pop()
        return refused

    monkeypatch.setattr(answer_rules.OutputProcessor, "resume", faulty)
    with pytest.raises(AssertionError):
        assert_goes_on(other, params, whole.deltas, is_exact)
