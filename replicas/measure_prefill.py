"""What prefill takes on this machine, measured at start: a few real steps of the real model."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing

import torch

from cache_tiers.cost import PrefillMeter, Sample, fit_prefill
from replicas.page_pool import TRASH_PAGE
from replicas.probe import bare_sequence
from replicas.runner import Runner
from replicas.scheduler import Chunk

# (new tokens, tokens in context): enough to tell the three parts of the price apart, where a step takes
# longer the more there is in it.
SAMPLES = ((16, 0), (128, 0), (256, 0), (128, 256))

GROWN = 2.0
"""Where a step takes as long as launching it, longer ones are tried until one takes so many times that."""

REPEAT_S = 0.1
"""What is quicker is measured twice: the first step of a shape may pay for more than itself."""


def has_grown(samples: Listing[Sample]) -> bool:
    """Whether a step without context takes `GROWN` times what the first one took."""
    return max(seconds for _, context, seconds in samples if not context) >= GROWN * samples[0][2]


def measure_prefill(
    runner: Runner,
    vocab: int,
    step_tokens_max: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    context_tokens_max: int,
) -> PrefillMeter:
    """Runs on the pool's own pages before anybody has blocks in them; they stay unowned."""
    block_tokens, usable = runner.pool.geometry.block_tokens, runner.pool.pages - 1 - TRASH_PAGE
    tokens_max = min(usable * block_tokens, context_tokens_max)
    tokens = [(7919 * i + 13) % vocab for i in range(min(tokens_max, 2 * max(step_tokens_max, 256)))]
    pages = list(range(TRASH_PAGE + 1, TRASH_PAGE + 1 + -(-len(tokens) // block_tokens)))
    sequence = bare_sequence(tokens, pages)

    def seconds(new: int, context: int) -> float:
        started_s = clock()
        runner.run([Chunk(sequence, context, new)])
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)  # else it is only launched
        return clock() - started_s

    def measure(new: int, context: int) -> None:
        if new > step_tokens_max or new + context > len(tokens):
            return
        took_s = seconds(new, context)
        if took_s < REPEAT_S or runner.device.type == "cuda":
            took_s = min(took_s, seconds(new, context))
        samples.append((new, context, took_s))

    samples: list[Sample] = []
    seconds(min(16, len(tokens)), 0)  # the first step of a process pays for everything
    for new, context in SAMPLES:
        measure(new, context)
    largest, full = SAMPLES[-2][0], min(step_tokens_max, len(tokens))
    while samples and largest < full and not has_grown(samples):
        largest = min(2 * largest, full)
        measure(largest, 0)
        measure(largest // 2, largest)  # attention, too, may show only here
    return PrefillMeter(fit_prefill(samples, step_tokens_max), samples)
