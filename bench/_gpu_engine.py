"""Whole engines on the device: steps, sampling, prefill, and a step that does not fit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench._gpu_device import Ceilings, share
from bench._gpu_model import Caller, tokens_of
from bench._gpu_run import Rows, at_least, at_most, must_be
from samovar.replicas.forward import FusedForward


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Contexts and prompts in tokens."""

    batch: int
    streams: tuple[int, ...]
    context: int
    long_context: int
    returns: tuple[int, ...]
    turn: int
    turns: tuple[int, ...]
    moved_blocks: int
    steps: int
    repeats: int
    early_reads: int

    def pages(self, block_tokens: int) -> int:
        """Return the pages that hold the largest batch with its answers, and the longest return."""
        answers = 8 * self.steps
        tokens = max(
            self.batch * (self.context + answers), self.long_context + answers, 2 * max(self.returns)
        )
        return 1 + -(-tokens // block_tokens) + self.batch


PEAKED = 4.0
"""Logits of random weights have a deviation of 1.3 in an 8B model; then of 5."""

FULL = Sizes(32, (1, 8, 32, 64, 128), 8192, 65536, (8192, 32768, 65536), 32, (20, 100, 500), 256, 40, 10, 100)
SMALL = Sizes(4, (1, 4), 96, 256, (1024, 2048), 8, (4, 20), 8, 3, 2, 3)

STREAM_PROMPT = 512
STREAM_MS_MAX = {1: 5.5, 8: 5.7, 32: 6.5, 64: 7.5, 128: 10.0}
"""1.1 of vLLM 0.22's gaps between tokens on an H200, served, behind prompts of 512 tokens."""
TURN_MS_MAX = {(8192, 20): 20.0, (32768, 20): 30.0}
"""By history and new tokens: what is served may take so long on an H200."""


def shape_of(batch: int, context: int) -> str:
    return f"B={batch} x {context // 1024}k" if context >= 1024 else f"B={batch} x {context}"


@dataclass(slots=True)
class Alone:
    """The median step of one greedy sequence, to compare others with; None: not measured."""

    step_s: float | None = None


def check_start(rows: Rows, caller: Caller) -> None:
    """Hold the start against what a GPU is to be served by, and tell its stages."""
    runner, info, is_cuda = caller.engine.runner, caller.info, caller.device.is_cuda
    bar = must_be(">=", 1) if is_cuda else None
    is_fused = isinstance(runner.forward, FusedForward)
    rows.add("steps are fused", info.step, float(is_fused), "of 1", bar)
    rows.add("steps are graphs", info.graphs or "none", float(runner.records_chunks), "of 1", bar)


def measure_steps(rows: Rows, caller: Caller, sizes: Sizes, into: Alone) -> None:
    """Measure decoding steps of whole batches, greedy and sampled, behind long contexts.

    The prompts are computed once; later requests find their blocks in the pool.
    """
    prompts = [tokens_of(sizes.context, 100 + number, caller.shape) for number in range(sizes.batch)]
    shape = shape_of(sizes.batch, sizes.context)
    greedy = _decode(caller, prompts, sizes)
    rows.add("engine step, greedy", greedy.told(shape), 1e3 * greedy.token_s, "ms", at_most(18.0))
    rows.add("tokens of all sequences", shape, sizes.batch / greedy.token_s, "token/s")
    alone = _decode(caller, prompts[:1], sizes)
    into.step_s = alone.token_s
    told = alone.told(shape_of(1, sizes.context))
    rows.add("engine step, greedy", told, 1e3 * into.step_s, "ms", at_most(7.0))
    for kind in ("flat", "peaked"):
        with _logits(caller, kind):
            sampled_s = _decode(caller, prompts, sizes, temperature=0.8, top_p=0.9).token_s
        added_ms = 1e3 * (sampled_s - greedy.token_s)
        rows.add(f"sampling with T=0.8, top_p=0.9, {kind} logits, added", shape, added_ms, "ms", at_most(1.0))


def measure_streams(rows: Rows, caller: Caller, sizes: Sizes) -> None:
    """Measure decoding steps of few and many short streams."""
    for batch in sizes.streams:
        prompts = [tokens_of(STREAM_PROMPT, 9000 + number, caller.shape) for number in range(batch)]
        steps = _decode(caller, prompts, sizes)
        most_ms = STREAM_MS_MAX.get(batch)
        bar = None if most_ms is None else at_most(most_ms)
        told = steps.told(f"B={batch} x {STREAM_PROMPT}")
        rows.add("engine step, greedy", told, 1e3 * steps.token_s, "ms", bar)


def measure_turns(rows: Rows, caller: Caller, sizes: Sizes) -> None:
    """Measure short turns on histories that the pool has, from the request to the first token."""
    for history in sizes.returns[:2]:
        told = tokens_of(history, 500 + history, caller.shape)
        caller.drain(caller.ask(told, 1))
        for new in sizes.turns:
            took_s = []
            for number in range(sizes.repeats):
                key = caller.ask([*told, *tokens_of(new, 600 + number, caller.shape)], 1)
                caller.drain(key)
                took_s.append(caller.asked[key].ttft_s)
            most_ms = TURN_MS_MAX.get((history, new))
            bar = None if most_ms is None else at_most(most_ms)
            name = f"first token of {new} more tokens, history in the pool"
            rows.add(name, shape_of(1, history), 1e3 * statistics.median(took_s[1:]), "ms", bar)


@contextmanager
def _logits(caller: Caller, kind: str) -> Iterator[None]:
    """Let the model's logits be as random weights have them, or `peaked`, as those of a trained one are.

    A power of two, so that the weights are what they were afterwards; graphs read them where they are.
    """
    if kind != "peaked":
        yield
        return
    runner = caller.engine.runner
    is_fused = isinstance(runner.forward, FusedForward)
    weights: torch.Tensor = runner.forward.plain.head if is_fused else runner.model.lm_head.weight
    weights.mul_(PEAKED)
    try:
        yield
    finally:
        weights.mul_(1 / PEAKED)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of decodes. `token_s`: seconds a token of a sequence, a mean; `call_s`: of each call.

    Where the step behind is launched ahead, one call may wait for two steps and the next one for none.
    """

    token_s: float
    call_s: list[float]

    def told(self, shape: str) -> str:
        """Return the shape, and how long calls took: their median and the longest."""
        return f"{shape}, {1e3 * statistics.median(self.call_s):.1f} to {1e3 * max(self.call_s):.0f} ms"


def _decode(caller: Caller, prompts: list[list[int]], sizes: Sizes, **params: float) -> _Steps:
    """Measure steps in which all of `prompts` decode. Raises `RuntimeError` if an answer ends before.

    The prompts are computed first: beside answers they come in small parts, and the first answers would be
    over before the last prompt is.
    """
    caller.drain(*[caller.ask(prompt, 1) for prompt in prompts])
    keys = [caller.ask(prompt, 8 * sizes.steps, **params) for prompt in prompts]
    caller.decode_all(keys)
    for _ in range(sizes.repeats):
        caller.step()
    before = sum(len(caller.asked[key].tokens) for key in keys)
    call_s = [caller.step() for _ in range(sizes.steps)]
    tokens = sum(len(caller.asked[key].tokens) for key in keys) - before
    if any(caller.asked[key].is_over for key in keys):
        raise RuntimeError("some answers were over before all had been measured together")
    caller.abort(keys)
    return _Steps(sum(call_s) * len(keys) / tokens, call_s)


def measure_prefill_rate(rows: Rows, caller: Caller, sizes: Sizes, ceilings: Ceilings) -> None:
    """Measure a long prompt that no block is known of, from the request to its first token."""
    took_s = []
    for number in range(1 + min(3, sizes.repeats)):
        key = caller.ask(tokens_of(sizes.context, 300 + number, caller.shape), 1)
        caller.drain(key)
        took_s.append(caller.asked[key].ttft_s)
    median_s = statistics.median(took_s[1:])
    rate = caller.shape.prefill_flop(sizes.context) / median_s
    shape = shape_of(1, sizes.context)
    rows.add("prefill", shape, median_s, "s")
    rows.add("prefill", shape, share(rate, ceilings.gemm), "of G", at_least(0.45))
    price = caller.engine.meter.price
    told_s = price.seconds(sizes.context, 0)
    rows.add(
        "price of that prefill, as the engine has it", shape, told_s / median_s, "of its time", at_most(2.0)
    )
