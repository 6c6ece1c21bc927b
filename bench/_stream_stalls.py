"""A running stream beside somebody's long prompt: how long its tokens take, and how long the prompt does.

One engine, the same steps with several limits of their time, in turns. Seconds are those of `clock`: CPU
seconds of this process say the same on a machine that others use, too, where the engine has one thread.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import GenerateRequest, SamplingParams
from samovar.replicas.scheduling.step import StepBudget

STREAM_TOKENS_MAX = 4000
ALONE_TOKENS = 24
_keys = itertools.count(1_000_000)


@dataclass(frozen=True)
class Limits:
    """Limits of a step's time beside streams: seconds, and times what its decodes take alone."""

    target_s: float | None = None
    stretch: float | None = None


@dataclass
class _Seen:
    """What was measured with some limits: seconds between tokens, and until the prompt's first token."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)


def stream_rows(
    engine: Engine,
    prompt: Callable[[int, int], list[int]],
    limits: Sequence[Limits],
    *,
    streams: Sequence[int],
    prompt_tokens: int,
    repeats: int,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """A row for each number of streams and each of `limits`; `prompt(tokens, salt)` makes a new one."""
    seen: dict[tuple[int, Limits], _Seen] = {}
    engine.requests.clock = clock  # the meter has to learn in the seconds that are measured
    budget = engine.scheduler.budget
    tokens_max = engine.scheduler.budget.tokens_max
    jobs = [(n, one) for _ in range(repeats) for n in streams for one in limits]
    for number, (count, one) in enumerate(tqdm([(streams[0], limits[-1]), *jobs], unit="job")):
        engine.scheduler.budget = StepBudget(
            tokens_max, one.target_s, lambda: engine.meter.price, stretch=one.stretch, pace=budget.pace
        )
        into = seen.setdefault((count, one), _Seen()) if number else _Seen()  # the first one warms up
        _beside(engine, prompt, into, count, prompt_tokens, clock)
    engine.scheduler.budget = budget
    rows = []
    for (count, one), found in seen.items():
        alone_ms = 1000 * statistics.median(found.alone_s)
        gap_ms = [1000 * s for s in found.beside_s]
        p99_ms = statistics.quantiles(gap_ms, n=100, method="inclusive")[98]
        first_s, plain_s = (statistics.median(seen[count, key].first_s) for key in (one, limits[0]))
        rows.append(
            {
                "name": "stream beside prefill",
                "streams": count,
                "prompt_tokens": prompt_tokens,
                "step_s_target": one.target_s,
                "step_stretch": one.stretch,
                "itl_ms_alone": round(alone_ms, 1),
                "itl_ms_p50": round(statistics.median(gap_ms), 1),
                "itl_ms_p99": round(p99_ms, 1),
                "itl_ms_max": round(max(gap_ms), 1),
                "p99_per_alone": round(p99_ms / alone_ms, 2),
                "prefill_ttft_s": round(first_s, 2),
                "ttft_ratio": round(first_s / plain_s, 2),
            }
        )
    return rows


def _beside(
    engine: Engine,
    prompt: Callable[[int, int], list[int]],
    into: _Seen,
    streams: int,
    prompt_tokens: int,
    clock: Callable[[], float],
) -> None:
    """Let some streams write alone, and then while a prompt is computed."""

    def submit(tokens: int, max_tokens: int) -> int:
        key = next(_keys)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        refused = engine.requests.add(key, GenerateRequest(f"bench-{key}", prompt(tokens, key), params))
        if refused is not None:
            raise RuntimeError(refused.message)
        return key

    def steps(gaps_s: list[float], goes_on: Callable[[], bool]) -> None:
        before_s = clock()
        while goes_on():
            engine.step()  # each running stream gets a token in every step
            now_s = clock()
            gaps_s.append(now_s - before_s)
            before_s = now_s

    running = [submit(128, STREAM_TOKENS_MAX) for _ in range(streams)]
    while sum(s.output_tokens > 1 for s in engine.scheduler.running) < streams:
        engine.step()
    alone_s: list[float] = []
    steps(alone_s, lambda: len(alone_s) < ALONE_TOKENS)
    into.alone_s += alone_s
    late = submit(prompt_tokens, 1)
    started_s = clock()
    steps(into.beside_s, lambda: late in engine.requests.open_keys())
    into.first_s.append(clock() - started_s)
    for key in running:
        engine.requests.abort(key)
