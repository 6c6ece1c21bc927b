"""A stream beside somebody's long prompt: how long its steps are. Seconds pass by a price."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.cache_tiers.pricing.meters import PrefillPrice
from tests.support.clock import Clock
from tests.support.engines.engines import Driver, prompt_of, small_engine

TARGET_S = 0.4  # the default
SLOW = PrefillPrice(0.085, 4.7e-3, 0.0)  # a 512-token chunk of one CPU core: 2.4 s


def chunk_s(price: PrefillPrice, tokens: int, context: int) -> float:
    """What a chunk adds to a step."""
    return price.a_s * tokens + price.b_s * (2 * context * tokens + tokens * tokens)


class Steps:
    """An engine on which seconds pass by a price; what each step took, and whether it wrote answers."""

    def __init__(self, model_dir: Path, truth: PrefillPrice, told: PrefillPrice, **engine: object) -> None:
        clock = Clock()
        self.built = small_engine(
            model_dir, prefill=told, step_tokens_max=512, pool_tokens=8192, sequences_max=32, **engine
        )
        self.built.engine.requests.clock = clock
        self.driver = Driver(self.built.engine, check=False)
        self.took: list[tuple[float, bool]] = []
        self.slower = 1.0
        run = self.built.engine.runner.run

        def timed(chunks, copies=(), score=None):  # type: ignore[no-untyped-def]
            took_s = truth.c0_s + sum(chunk_s(truth, chunk.rows, chunk.start) for chunk in chunks)
            took_s *= self.slower
            clock.now_s += took_s
            self.took.append((took_s, any(chunk.sequence.is_decode for chunk in chunks)))
            return run(chunks, copies, score)

        self.built.engine.runner.run = timed  # type: ignore[method-assign]

    def beside_a_stream(self, tokens: int, alone: int = 2, slows_after: int = 10_000) -> list[float]:
        """Seconds of the steps that a stream waits for while a prompt of `tokens` comes and is computed.

        It writes alone for some steps before. The machine takes twice as long `slows_after` steps beside it.
        """
        stream = self.driver.submit(prompt_of(8), max_tokens=1000)
        for _ in range(alone):
            self.driver.step()
        self.took.clear()
        late = self.driver.submit(prompt_of(tokens, seed=1), max_tokens=1)
        while 0 not in self.driver.answers[late].finish:
            self.slower = 2.0 if len(self.took) >= slows_after else 1.0
            self.driver.step()
        assert 0 not in self.driver.answers[stream].finish
        assert all(decodes for _, decodes in self.took)
        self.driver.engine.requests.abort(stream)
        self.driver.drain()
        self.driver.engine.check_integrity()
        return [seconds for seconds, _ in self.took]


@pytest.mark.parametrize("truth", [SLOW, PrefillPrice(0.085, 4.1e-3, 1.5e-6)], ids=["flat", "attention"])
def test_a_running_stream_does_not_wait_for_somebodys_chunk(tiny_llama: Path, truth: PrefillPrice) -> None:
    steps = Steps(tiny_llama, truth, truth, step_stretch=None)
    took = steps.beside_a_stream(1500)
    assert max(took) <= 1.1 * TARGET_S
    # Alone, a prompt gets full steps.
    steps.took.clear()
    steps.driver.run(prompt_of(1500, seed=2), max_tokens=1)
    assert len(steps.took) == 3


def test_a_wrong_price_is_found_out_beside_a_stream(tiny_llama: Path) -> None:
    """Both ways: streams do not wait for long, and a prompt does not crawl."""
    cheap = Steps(tiny_llama, SLOW, PrefillPrice(0.03, 1.5e-3, 1e-9), step_stretch=None).beside_a_stream(1500)
    assert max(cheap[-5:]) <= 1.25 * TARGET_S
    dear = Steps(tiny_llama, SLOW, PrefillPrice(0.85, 4.7e-2, 0.0), step_stretch=None).beside_a_stream(1500)
    assert max(dear) <= 1.25 * TARGET_S
    assert max(dear[-5:]) >= 0.7 * TARGET_S


NATIVE = PrefillPrice(0.023, 2e-3, 1e-7)  # a decode of 25 ms, and 2 ms for each token of a prompt
LEAN = PrefillPrice(0.05, 3e-3, 1.5e-7)


@pytest.mark.parametrize("truth", [NATIVE, LEAN], ids=["native", "lean"])
@pytest.mark.parametrize(
    "told",
    [None, PrefillPrice(0.003, 5e-4, 1e-9), PrefillPrice(0.3, 1e-2, 1e-6)],
    ids=["right", "low", "high"],
)
def test_a_stream_stays_within_three_times_its_pace_while_a_long_prompt_comes(
    tiny_llama: Path, truth: PrefillPrice, told: PrefillPrice | None
) -> None:
    """Whatever the start has measured: a few tokens of the stream alone tell what it is used to."""
    steps = Steps(tiny_llama, truth, told or truth)
    took = sorted(steps.beside_a_stream(2000, alone=40))
    alone_s = truth.seconds(1, 50)
    assert took[int(0.99 * len(took))] <= 3 * alone_s
    # And the prompt is not held up for more than that: it has two thirds of the time, less the small steps.
    assert sum(took) <= 2.2 * truth.seconds(2000, 0)


def test_a_machine_that_becomes_half_as_fast_is_followed_within_a_few_steps(tiny_llama: Path) -> None:
    steps = Steps(tiny_llama, SLOW, SLOW, step_stretch=None)
    took = steps.beside_a_stream(3000, slows_after=20)
    assert max(took[:20]) <= 1.1 * TARGET_S
    assert max(took[20:23]) > 1.5 * TARGET_S, "it cannot be known before"
    assert max(took[24:]) <= 1.15 * TARGET_S
    stretched = Steps(tiny_llama, NATIVE, NATIVE).beside_a_stream(2000, alone=40, slows_after=20)
    assert max(stretched[24:]) <= 2.2 * 3 * NATIVE.seconds(1, 50), "its decodes take twice as long, too"


def test_answers_do_not_depend_on_the_target(tiny_llama: Path) -> None:
    answers, seconds = [], []
    for price in (SLOW, PrefillPrice(0.0, 1e-6, 0.0)):
        steps = Steps(tiny_llama, price, price, exact=True, step_stretch=None)
        keys = [steps.driver.submit(prompt_of(9), max_tokens=30)]
        steps.driver.step()
        keys += [
            steps.driver.submit(prompt_of(length, seed=length), max_tokens=5) for length in (300, 77, 513)
        ]
        steps.driver.drain()
        answers.append([steps.driver.answers[key].ids for key in keys])
        seconds.append(max(took_s for took_s, _ in steps.took[1:]))
    assert answers[0] == answers[1]
    assert chunk_s(SLOW, 64, 0) < seconds[0] <= TARGET_S  # cut ...
    assert seconds[1] > 400 * 1e-6  # ... and not
