"""A stream beside somebody's long prompt: how long its steps are. Seconds pass by a price."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_tiers.pricing.meters import PrefillPrice
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
        self.built.engine._clock = clock
        self.driver = Driver(self.built.engine, check=False)
        self.took: list[tuple[float, bool]] = []
        run = self.built.engine.runner.run

        def timed(chunks, copies=(), score=None):  # type: ignore[no-untyped-def]
            took_s = truth.c0_s + sum(chunk_s(truth, chunk.count, chunk.start) for chunk in chunks)
            clock.now_s += took_s
            self.took.append((took_s, any(chunk.sequence.is_decode for chunk in chunks)))
            return run(chunks, copies, score)

        self.built.engine.runner.run = timed  # type: ignore[method-assign]

    def beside_a_stream(self, tokens: int) -> list[float]:
        """Seconds of the steps that a stream waits for while a prompt of `tokens` comes and is computed."""
        stream = self.driver.submit(prompt_of(8), max_tokens=400)
        self.driver.step()
        self.driver.step()
        self.took.clear()
        late = self.driver.submit(prompt_of(tokens, seed=1), max_tokens=1)
        while 0 not in self.driver.answers[late].finish:
            self.driver.step()
        assert 0 not in self.driver.answers[stream].finish
        assert all(decodes for _, decodes in self.took)
        self.driver.engine.abort(stream)
        self.driver.drain()
        self.driver.engine.check_integrity()
        return [seconds for seconds, _ in self.took]


@pytest.mark.parametrize("truth", [SLOW, PrefillPrice(0.085, 4.1e-3, 1.5e-6)], ids=["flat", "attention"])
def test_p8_a_running_stream_does_not_wait_for_somebodys_chunk(tiny_llama: Path, truth: PrefillPrice) -> None:
    steps = Steps(tiny_llama, truth, truth)
    took = steps.beside_a_stream(1500)
    assert max(took) <= 1.1 * TARGET_S
    # Alone, a prompt gets full steps.
    steps.took.clear()
    steps.driver.run(prompt_of(1500, seed=2), max_tokens=1)
    assert len(steps.took) == 3


def test_p8_a_wrong_price_is_found_out_beside_a_stream(tiny_llama: Path) -> None:
    """Both ways: streams do not wait for long, and a prompt does not crawl."""
    cheap = Steps(tiny_llama, SLOW, PrefillPrice(0.03, 1.5e-3, 1e-9)).beside_a_stream(1500)
    assert max(cheap[-5:]) <= 1.25 * TARGET_S
    dear = Steps(tiny_llama, SLOW, PrefillPrice(0.85, 4.7e-2, 0.0)).beside_a_stream(1500)
    assert max(dear) <= 1.25 * TARGET_S
    assert max(dear[-5:]) >= 0.7 * TARGET_S


def test_answers_do_not_depend_on_the_target(tiny_llama: Path) -> None:
    answers, seconds = [], []
    for price in (SLOW, PrefillPrice(0.0, 1e-6, 0.0)):
        steps = Steps(tiny_llama, price, price, exact=True)
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
