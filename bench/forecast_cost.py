"""`python -m bench.forecast_cost`: what the predictor costs, in CPU and in bytes a session.

Generated chats, each session one lineage with its opening, as the service runs it. CPU of the thread (wall
time counts other processes). Bytes are those of tables by session, of `--sessions` sessions that are idle,
after those that there are without any (rings, weights) were taken off. Writes `bench/out/forecast-cost.json`.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from bench import _report as report
from samovar.cache_tiers.forecast.features import NUMBERS
from samovar.cache_tiers.forecast.kaplan_meier import TypeKm
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import Opening, Turn
from samovar.configs.sections import PredictorSettings

FORECAST_US_MAX: Final = 50.0
STEP_US_MAX: Final = 200.0
SESSION_BYTES_MAX: Final = 600.0
_TURNS: Final = 6000
_WARM: Final = 3000
_KEY_BYTES: Final = 32


def turns_of(sessions: int, turns: int, seed: int) -> Iterator[tuple[Turn, Opening]]:
    """Chats of `sessions` people at random, in the order of their turns."""
    rng = np.random.default_rng(seed)
    at_s = 0.0
    for number in range(turns):
        who = number if sessions >= turns else int(rng.integers(sessions))
        at_s += float(rng.exponential(1.0))
        key = who.to_bytes(_KEY_BYTES, "little")
        roots = tuple(int(root) for root in rng.integers(1 << 63, size=4))
        inputs, outputs = (int(tokens) for tokens in rng.integers(10, 9000, size=2))
        turn = Turn(key, at_s, at_s + 0.5, inputs, outputs, inputs // 2, "stop", "user")
        yield turn, Opening(key, roots)


def cpu_us(forecaster: Predictor | TypeKm) -> dict[str, float]:
    """Median and least (5 %) CPU microseconds of a forecast, and of an arrival with its learning step."""
    ended, arrived = [], []
    for number, (turn, opening) in enumerate(turns_of(500, _TURNS, 0)):
        began = time.thread_time_ns()
        forecaster.arrived(turn.session, turn.started_s, opening)
        between = time.thread_time_ns()
        forecaster.ended(turn)
        if number >= _WARM:
            arrived.append(between - began)
            ended.append(time.thread_time_ns() - between)
    found = {}
    for name, took in (("forecast", ended), ("arrival", arrived)):
        for at, share in (("median", 50), ("p5", 5)):
            found[f"{name}_{at}_us"] = float(np.percentile(took, share)) / 1e3
    return found


def session_bytes(forecaster: Predictor | TypeKm, sessions: int) -> float:
    """Bytes that each further idle session takes; its key is the caller's."""
    stream = list(turns_of(2 * sessions, 2 * sessions, 1))
    half = len(stream) // 2

    def feed(part: Sequence[tuple[Turn, Opening]]) -> None:
        for turn, opening in part:
            forecaster.arrived(turn.session, turn.started_s, opening)
            forecaster.ended(turn)

    feed(stream[:half])
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    feed(stream[half:])
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / (len(stream) - half)


def main(argv: Sequence[str] | None = None) -> int:
    """0: every bar holds."""
    parser = argparse.ArgumentParser(prog="bench.forecast_cost", description=__doc__)
    parser.add_argument("--sessions", type=int, default=20_000)
    asked = parser.parse_args(argv)
    rows = []
    for name, make in {"type-km": TypeKm, "learned": Predictor}.items():
        settings = PredictorSettings()
        row = {"predictor": name, **cpu_us(make(settings))}
        rows.append({**row, "session_bytes": session_bytes(make(settings), asked.sessions)})
    report.show(f"cost ({NUMBERS} numbers a turn)", rows)
    learned = rows[-1]
    bars = {
        "forecast_median_us": FORECAST_US_MAX,
        "arrival_median_us": STEP_US_MAX,
        "session_bytes": SESSION_BYTES_MAX,
    }
    missed = [f"{bar}: {learned[bar]:.0f} > {most:.0f}" for bar, most in bars.items() if learned[bar] > most]
    for one in missed:
        print(f"missed: {one}")
    print(f"written: {report.write('forecast-cost', rows, module='forecast_cost', missed=missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
