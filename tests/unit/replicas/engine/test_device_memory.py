"""A step that does not fit into the device's memory, and a device that is lost. The device is a limit."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.settings import Settings
from replicas.build import _hold_step_memory
from replicas.engine.engine import Engine
from replicas.engine.lost_device import is_device_lost
from replicas.forward.attention import GatherSdpa
from replicas.forward.runner import Runner, load_model
from replicas.kv.kv_pool import KvGeometry, KvPool
from replicas.measure import run_largest_steps
from replicas.messages import ModelRefused
from replicas.model.spec import inspect_model
from replicas.scheduling.sequence import Sequence
from replicas.scheduling.shortage import halved
from replicas.scheduling.step import CHUNK_TOKENS, Chunk
from tests.support.engines.engines import Answer, Driver, prompt_of, small_engine
from tests.unit.replicas.engine.test_audit import Audited

LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
Fits = Callable[[Listing[Chunk]], bool]


class Limited(Runner):
    """Runs on a device on which only steps that `fits` says fit; others fail when they are computed."""

    fits: Fits = staticmethod(lambda chunks: True)

    def run(self, chunks: Listing[Chunk], *args: Any) -> torch.Tensor:
        logits = super().run(chunks, *args)  # as on a device: what it has written until then is written
        if not self.fits(chunks):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return logits


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    engine = small_engine(tiny_llama).engine
    engine.runner.__class__ = Limited
    return engine


def on_device(engine: Engine, fits: Fits) -> Driver:
    """The engine with an empty cache, counting from 0."""
    engine.scheduler.pool.clear_cache()
    engine._shortages.clear()
    engine.scheduler.preemptions = 0
    cast(Limited, engine.runner).fits = fits
    return Driver(engine)


def answers_of(driver: Driver, **params: Any) -> list[Answer]:
    """Of prompts of several lengths that are asked for at once."""
    keys = [driver.submit(prompt_of(length, seed=length), **params) for length in (60, 9, 33, 100)]
    driver.drain()
    return [driver.answers[key] for key in keys]


def test_a_prompt_that_does_not_fit_is_computed_in_smaller_steps(engine: Engine) -> None:
    truth = answers_of(on_device(engine, lambda _: True))
    driver = on_device(engine, lambda chunks: sum(chunk.count for chunk in chunks) <= 24)
    got = answers_of(driver)
    assert [one.ids for one in got] == [one.ids for one in truth]
    shortages = driver.engine.stats().memory_shortages
    assert shortages["halved"] > 0
    assert "failed" not in shortages


def test_sequences_are_preempted_when_there_is_no_room_for_their_decodes_any_more(engine: Engine) -> None:
    truth = answers_of(on_device(engine, lambda _: True))
    steps = itertools.count()
    driver = on_device(engine, lambda chunks: len(chunks) <= 2 or next(steps) < 6)
    got = answers_of(driver)
    assert [one.ids for one in got] == [one.ids for one in truth]
    shortages = driver.engine.stats().memory_shortages
    assert shortages["preempted"] == driver.engine.stats().preemptions > 0
    assert "failed" not in shortages


def test_at_last_the_one_request_fails_with_the_numbers_and_the_others_finish(engine: Engine) -> None:
    truth = answers_of(on_device(engine, lambda _: True))
    driver = on_device(engine, lambda chunks: all(chunk.start + chunk.count <= 80 for chunk in chunks))
    got = answers_of(driver)
    assert [one.ids for one in got[:3]] == [one.ids for one in truth[:3]]
    assert got[3].failed is not None
    numbers = r"the device's memory is too short for a step of \d+ tokens behind \d+"
    assert re.fullmatch(numbers, got[3].failed.message)
    assert driver.engine.stats().memory_shortages["failed"] == 1
    again = driver.run(prompt_of(9, seed=9))
    assert again.ids == truth[1].ids


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_answers_do_not_depend_on_which_steps_did_not_fit(engine: Engine, seed: int) -> None:
    """With shared pages, choices that copy them, and log-probabilities of prompts."""
    rng = random.Random(seed)

    def fits(chunks: Listing[Chunk]) -> bool:
        is_least = len(chunks) == 1 and chunks[0].count <= CHUNK_TOKENS
        return is_least or rng.random() < 0.6

    truth = _mixed(on_device(engine, lambda _: True))
    assert _mixed(on_device(engine, fits)) == truth


def _mixed(driver: Driver) -> list[object]:
    prompt = prompt_of(50)
    keys = [
        driver.submit(prompt, n=3, temperature=0.9, seed=3),
        driver.submit(prompt_of(40, seed=2), prompt_logprobs=1, max_tokens=2),
        driver.submit([*prompt, *prompt_of(20, seed=4)]),
    ]
    driver.drain()
    answers = [driver.answers[key] for key in keys]
    assert all(answer.failed is None for answer in answers)
    scored = answers[1].admitted
    assert scored is not None
    return [*(answer.token_ids for answer in answers), [row.logprob for row in scored.prompt_logprobs]]


def sequence_at(pending: int, computed: int) -> Sequence:
    sequence = Audited(exact=True, dtype=torch.float32).sequence
    sequence.computed, sequence.tokens = computed, sequence.tokens[:1] * (computed + pending)
    return sequence


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 300)), max_size=5),
    st.integers(0, 4),
)
def test_halving_ends_with_the_decodes_or_with_the_least_of_a_prompt(
    prompts: list[tuple[int, int]], decodes: int
) -> None:
    chunks = [Chunk(sequence_at(1, 30), 30, 1) for _ in range(decodes)]
    chunks += [Chunk(sequence_at(pending + 1, 0), 0, min(count, pending + 1)) for pending, count in prompts]
    while (fewer := halved(chunks)) is not None:
        tokens, before = (sum(one.count for one in some[decodes:]) for some in (fewer, chunks))
        assert fewer[:decodes] == chunks[:decodes]
        assert tokens <= max(before // 2, CHUNK_TOKENS)
        assert all(one.count % CHUNK_TOKENS == 0 or one in chunks for one in fewer)
        chunks = fewer
    assert sum(one.count for one in chunks[decodes:]) <= (0 if decodes else CHUNK_TOKENS)


# -- what the largest steps take --------------------------------------------------------------


def test_the_largest_steps_run_on_two_pages(tiny_llama: Path) -> None:
    spec, device = inspect_model(tiny_llama), torch.device("cpu")
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, torch.float32)
    model = load_model(spec, torch.float32, device)
    runner = Runner(model, KvPool(geometry, 2, device), GatherSdpa(False, torch.float32), exact=False)
    sizes = list[tuple[int, int, int]]()
    run = runner.run

    def noting(chunks: Listing[Chunk]) -> torch.Tensor:
        sizes.append((len(chunks), chunks[0].start, chunks[0].count))
        return run(chunks)

    runner.run = noting  # type: ignore[method-assign, assignment]
    run_largest_steps(runner, spec.vocab, step_tokens=64, sequences=8, context_tokens=200)
    assert sizes == [(1, 136, 64), (8, 199, 1)]


def test_a_model_whose_largest_step_does_not_fit_is_refused_with_the_settings_to_lower(
    engine: Engine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 GiB")

    monkeypatch.setattr("replicas.build.run_largest_steps", too_large)
    with pytest.raises(ModelRefused, match=r"30\.00 GiB.*engine\.step_tokens_max"):
        _hold_step_memory(Settings(), engine.runner, inspect_model(tiny_llama))


# -- a device that is lost --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (LOST, True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("the size of tensor a must match"), False),
        (ValueError("CUDA error"), False),
    ],
    ids=str,
)
def test_every_cuda_error_but_short_memory_loses_the_device(error: Exception, is_lost: bool) -> None:
    assert is_device_lost(error) is is_lost


@pytest.mark.parametrize("place", ["a step", "sampling", "an audit"])
def test_a_lost_device_ends_the_engine_wherever_it_is_noticed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def lost(*_: object, **__: object) -> Any:
        raise LOST

    if place == "an audit":
        audited = Audited(exact=True, dtype=torch.float32)
        monkeypatch.setattr(audited.runner, "run", lost)
        with pytest.raises(torch.AcceleratorError):
            audited.outcome()
        assert audited.auditor.outcomes == {"error": 1}
        return
    driver = on_device(engine, lambda _: True)
    if place == "a step":
        monkeypatch.setattr(engine.runner, "run", lost)
    else:
        monkeypatch.setattr(engine.sampler, "sample", lost)
    with pytest.raises(torch.AcceleratorError):
        driver.run(prompt_of(20), temperature=1.0)
    for key in engine.open_keys():
        engine.abort(key)
