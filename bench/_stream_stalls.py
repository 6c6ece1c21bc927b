"""A running stream beside somebody's long prompt: how long its tokens take, and how long the prompt does.

One engine, the same steps with and without a time target, in turns. Seconds are those of `clock`: CPU
seconds of this process say the same on a machine that others use, too, where the engine has one thread.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from replicas.engine.engine import Engine
from replicas.messages import GenerateRequest, SamplingParams
from replicas.scheduling.step import StepBudget

STREAM_TOKENS_MAX = 4000
_keys = itertools.count(1_000_000)


def stream_rows(
    engine: Engine,
    prompt: Callable[[int, int], list[int]],
    targets_s: Sequence[float | None],
    *,
    streams: Sequence[int],
    prompt_tokens: int,
    repeats: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """A row for each number of streams and each target; `prompt(tokens, salt)` makes a new one."""
    gaps: dict[tuple[int, float | None], list[float]] = {}
    firsts: dict[tuple[int, float | None], list[float]] = {}
    engine._clock = clock  # the meter has to learn in the seconds that are measured
    tokens_max = engine.scheduler.step_tokens_max
    jobs = [(n, target_s) for _ in range(repeats) for n in streams for target_s in targets_s]
    for number, (count, target_s) in enumerate(tqdm([jobs[0], *jobs], unit="job")):
        engine.scheduler.budget = StepBudget(tokens_max, target_s, lambda: engine.meter.price)
        took_s, first_s = _beside(engine, prompt, count, prompt_tokens, clock)
        if number:  # the first warms up, and the meter learns
            gaps.setdefault((count, target_s), []).extend(took_s)
            firsts.setdefault((count, target_s), []).append(first_s)
    rows = []
    for count, target_s in gaps:
        gap_ms = [1000 * s for s in gaps[count, target_s]]
        first_s, plain_s = (statistics.median(firsts[count, key]) for key in (target_s, targets_s[0]))
        rows.append(
            {
                "name": "stream beside prefill",
                "streams": count,
                "prompt_tokens": prompt_tokens,
                "step_s_target": target_s,
                "itl_ms_p50": round(statistics.median(gap_ms)),
                "itl_ms_p99": round(statistics.quantiles(gap_ms, n=100, method="inclusive")[98]),
                "itl_ms_max": round(max(gap_ms)),
                "prefill_ttft_s": round(first_s, 2),
                "ttft_ratio": round(first_s / plain_s, 2),
            }
        )
    return rows


def _beside(
    engine: Engine,
    prompt: Callable[[int, int], list[int]],
    streams: int,
    prompt_tokens: int,
    clock: Callable[[], float],
) -> tuple[list[float], float]:
    """Seconds between the tokens of the streams while the prompt is computed, and until its first token."""

    def submit(tokens: int, max_tokens: int) -> int:
        key = next(_keys)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        refused = engine.add(key, GenerateRequest(f"bench-{key}", prompt(tokens, key), params))
        if refused is not None:
            raise RuntimeError(refused.message)
        return key

    running = [submit(128, STREAM_TOKENS_MAX) for _ in range(streams)]
    while sum(s.output_tokens > 1 for s in engine.scheduler.running) < streams:
        engine.step()
    late = submit(prompt_tokens, 1)
    gaps: list[float] = []
    started_s = before_s = clock()
    while late in engine.open_keys():
        engine.step()  # each running stream gets a token in every step
        now_s = clock()
        gaps.append(now_s - before_s)
        before_s = now_s
    for key in running:
        engine.abort(key)
    return gaps, before_s - started_s
