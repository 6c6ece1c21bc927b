"""What prefill takes on this machine, measured at start: a few real steps of the real model."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cache_tiers.cost import PrefillPrice, fit_prefill
from replicas.page_pool import TRASH_PAGE
from replicas.probe import bare_sequence
from replicas.runner import Runner
from replicas.scheduler import Chunk

# (new tokens, tokens in context): enough to tell the three parts of the price apart.
SAMPLES = ((16, 0), (128, 0), (256, 0), (128, 256))


def measure_prefill(
    runner: Runner, vocab: int, step_tokens_max: int, clock: Callable[[], float] = time.perf_counter
) -> PrefillPrice:
    """Runs on the pool's own pages before anybody has blocks in them; they stay unowned."""
    block_tokens, usable = runner.pool.geometry.block_tokens, runner.pool.pages - 1 - TRASH_PAGE
    tokens_max = min(usable * block_tokens, max(n + m for m, n in SAMPLES))
    tokens = [(7919 * i + 13) % vocab for i in range(tokens_max)]
    pages = list(range(TRASH_PAGE + 1, TRASH_PAGE + 1 + -(-tokens_max // block_tokens)))
    sequence = bare_sequence(tokens, pages)
    samples = []
    runner.run([Chunk(sequence, 0, min(16, tokens_max))])  # the first step of a process pays for everything
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    for new, context in SAMPLES:
        if new > step_tokens_max or new + context > tokens_max:
            continue
        started_s = clock()
        runner.run([Chunk(sequence, context, new)])
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)  # else it is only launched
        samples.append((new, context, clock() - started_s))
    return fit_prefill(samples)
