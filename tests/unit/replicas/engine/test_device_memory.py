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

from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.attention_choice import ChosenAttention
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.runner import Runner
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.device_errors import is_device_lost, is_memory_short
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.ranks.channel import RankLost
from samovar.replicas.sampling.draws import BegunDraws
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import CHUNK_TOKENS, Chunk, halved
from samovar.replicas.start import build
from samovar.replicas.start.measure import hold_step_memory, run_largest_steps
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
    engine.requests.counts.shortages.clear()
    engine.scheduler.queues.preemptions = 0
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
    def fits(chunks: Listing[Chunk]) -> bool:
        """Return whether at most two decode, however the prompts were cut: that depends on the time taken."""
        return sum(not chunk.sequence.is_prefill for chunk in chunks) <= 2

    truth = answers_of(on_device(engine, lambda _: True), max_tokens=32)
    driver = on_device(engine, fits)
    got = answers_of(driver, max_tokens=32)
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


def test_pages_are_copied_once_however_often_a_step_is_tried(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source of a copy may belong to a sequence whose tokens the first try has written."""
    copied: list[tuple[int, int]] = []
    copy_page = KvPool.copy_page

    def noting(pool: KvPool, source: int, target: int) -> None:
        copied.append((source, target))
        copy_page(pool, source, target)

    monkeypatch.setattr(KvPool, "copy_page", noting)
    copies, tries = 0, itertools.count()
    driver = on_device(engine, lambda chunks: len(chunks) == 1 or next(tries) % 3 == 2)
    driver.submit(prompt_of(41), n=3, temperature=0.9, seed=3)
    driver.submit(prompt_of(60, seed=2))
    while driver.engine.has_work:
        driver.step()
        assert len(set(copied)) == len(copied)
        copies += len(copied)
        copied.clear()
    assert copies > 0
    assert sum(driver.engine.stats().memory_shortages.values()) > 0


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
    engine: Engine,
) -> None:
    on_device(engine, lambda _: False)
    with pytest.raises(ModelRefused, match=r"2\.00 GiB.*engine\.step_tokens_max"):
        hold_step_memory(EngineSettings(step_tokens_max=32), engine.runner, vocab=99, context_tokens=64)


def test_a_long_context_that_no_pool_would_hold_refuses_no_model(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small device: it has room for a pool of 20 pages at most, and for steps within such a context."""
    spec, cpu, longest = inspect_model(tiny_llama), torch.device("cpu"), list[int]()
    geometry = KvGeometry(spec.layers, 16, spec.kv_heads, spec.head_dim, torch.float32)

    class Small(Runner):
        def run(self, chunks: Listing[Chunk], *args: Any) -> torch.Tensor:
            longest.append(max(chunk.start + chunk.count for chunk in chunks))
            if longest[-1] > 19 * 16:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 GiB")
            return super().run(chunks, *args)

    def cuda(*_: object, **__: object) -> torch.device:
        return torch.device("cuda")

    def sdpa(*_: object, **__: object) -> ChosenAttention:
        return ChosenAttention(GatherSdpa(False, torch.float32), "gather+sdpa")

    monkeypatch.setattr(build, "choose_device", cuda)
    monkeypatch.setattr(build, "choose_attention", sdpa)
    monkeypatch.setattr(build, "KvPool", lambda geometry, pages, _: KvPool(geometry, pages, cpu))
    monkeypatch.setattr(build, "Runner", Small)
    monkeypatch.setattr(build, "free_memory_bytes", lambda _: 20 * geometry.block_bytes)
    wanted = Settings(
        model=ModelSettings(path=tiny_llama, dtype="float32"),
        engine=EngineSettings(pool_memory_fraction=0.95, step_tokens_max=64, block_tokens=16, threads=1),
    )
    built = build.Start(
        wanted, tiny_llama, "r", load=lambda spec, dtype, _: load_model(spec, dtype, cpu)
    ).run()
    assert spec.context_tokens_max > 19 * 16
    assert max(longest) == built.info.context_tokens_max == 18 * 16


# -- draws that do not fit --------------------------------------------------------------------


def test_draws_that_do_not_fit_are_done_again_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    truth = answers_of(on_device(engine, lambda _: True), **params)
    freed, held = list[int](), [0]

    def scarce(logits: torch.Tensor, draws: Listing[Any], greedy: torch.Tensor) -> Any:
        if len(draws) > 1:
            held[0] = len(draws)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        assert held[0] == 0, "tried again before memory was given back"
        return BegunDraws(logits, draws, greedy)

    def free() -> None:
        freed.append(held[0])
        held[0] = 0

    monkeypatch.setattr("samovar.replicas.sampling.sampler.BegunDraws", scarce)
    monkeypatch.setattr(engine.runner, "free_memory", free)
    driver = on_device(engine, lambda _: True)
    got = answers_of(driver, **params)
    assert [one.ids for one in got] == [one.ids for one in truth]
    assert driver.engine.stats().memory_shortages == {"resampled": len(freed)}
    assert len(freed) > 0


def test_a_draw_that_never_fits_fails_its_request_alone_and_is_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(logits: torch.Tensor, draws: Listing[Any], greedy: torch.Tensor) -> Any:
        if any(draw.params.logprobs for draw in draws):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return BegunDraws(logits, draws, greedy)

    truth = on_device(engine, lambda _: True).run(prompt_of(20, seed=1), temperature=1.0, seed=3)
    monkeypatch.setattr("samovar.replicas.sampling.sampler.BegunDraws", scarce)
    driver = on_device(engine, lambda _: True)
    good = driver.submit(prompt_of(20, seed=1), temperature=1.0, seed=3)
    bad = driver.submit(prompt_of(20, seed=2), temperature=1.0, logprobs=1)
    driver.drain()
    assert driver.answers[good].ids == truth.ids
    failed = driver.answers[bad].failed
    assert failed is not None
    assert failed.message == "OutOfMemoryError: the device's memory is too short to draw a token"
    assert driver.engine.stats().memory_shortages == {"resampled": 1, "failed": 1}


# -- a device that is lost --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (LOST, True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"), True),
        (RankLost("what all ranks do failed on rank 0: CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("the size of tensor a must match"), False),
        (ValueError("CUDA error"), False),
    ],
    ids=str,
)
def test_every_cuda_error_but_short_memory_and_recordings_loses_the_device(
    error: Exception, is_lost: bool
) -> None:
    assert is_device_lost(error) is is_lost
    says_short = any(word in str(error) for word in ("out of memory", "ALLOC_FAILED"))
    assert is_memory_short(error) is (says_short and not isinstance(error, RankLost))


def test_a_library_that_finds_no_memory_makes_the_step_smaller(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = answers_of(on_device(engine, lambda _: True))
    driver, run = on_device(engine, lambda _: True), engine.runner.run

    def scarce(chunks: Listing[Chunk], *args: Any) -> torch.Tensor:
        if sum(chunk.count for chunk in chunks) > 24:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return run(chunks, *args)

    monkeypatch.setattr(engine.runner, "run", scarce)
    assert [one.ids for one in answers_of(driver)] == [one.ids for one in truth]
    assert driver.engine.stats().memory_shortages["halved"] > 0


@pytest.mark.parametrize("place", ["a step", "sampling", "a draw", "an audit"])
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
    elif place == "sampling":
        monkeypatch.setattr(engine.sampler, "sample", lost)
    else:
        monkeypatch.setattr("samovar.replicas.sampling.sampler.BegunDraws", lost)
    with pytest.raises(torch.AcceleratorError):
        driver.run(prompt_of(20), temperature=1.0)
    for key in engine.requests.open_keys():
        engine.requests.abort(key)
