"""`make bench-priority`: two classes of one tenant at twice what a replica can do, and all of one class.

The engine of the service with the default model, one thread; its clock is the process' CPU time, so that what
else runs on the machine counts little. High requests come at random at half of what the engine can do: first
alone, then while low ones always wait. Exit code 1 when the high class' time to first token (p95) is above
`--factor` times that of alone, or no low one has ended. `equal`: tokens a CPU-second of a backlog of one
class, which a change of the scheduler must not change.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from typing import Any

from bench import _report as report
from samovar.configs.sections import MIB
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import Delta, GenerateRequest, SamplingParams
from samovar.replicas.model.store import ensure_model
from samovar.replicas.start.build import Start

HIGH, LOW = -10, 10
PROMPT_TOKENS, ANSWER_TOKENS = 200, 40
LOW_WAITING = 8


class Player:
    """Sends requests to an engine and notes when their first tokens come, in CPU-seconds."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._keys = 0
        self._skipped_s = 0.0
        self._came: dict[int, tuple[int, float]] = {}
        self.ttft_s: dict[int, list[float]] = defaultdict(list)
        self.ended: dict[int, int] = defaultdict(int)
        self.tokens = 0

    def now_s(self) -> float:
        return time.process_time() + self._skipped_s

    def send(self, priority: int, prompt_tokens: int, answer_tokens: int) -> None:
        self._keys += 1
        ids = [self._rng.randrange(100, 40_000) for _ in range(prompt_tokens)]
        params = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
        asked: dict[str, Any] = {"priority": priority} if priority else {}
        refused = self._engine.requests.add(
            self._keys, GenerateRequest(f"bench-{self._keys}", ids, params, **asked)
        )
        if refused is not None:
            raise RuntimeError(refused.message)
        self._came[self._keys] = priority, self.now_s()

    def waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    def step(self) -> None:
        for key, event in self._engine.step():
            if not isinstance(event, Delta):
                continue
            priority, came_s = self._came[key]
            self.tokens += len(event.token_ids)
            if came_s >= 0 and event.token_ids:
                self.ttft_s[priority].append(self.now_s() - came_s)
                self._came[key] = priority, -1.0
            if event.finish_reason is not None:
                self.ended[priority] += 1

    def drain(self) -> None:
        while self._engine.has_work:
            self.step()

    def skip_to(self, at_s: float) -> None:
        """Let the time pass in which nothing is asked."""
        self._skipped_s += max(0.0, at_s - self.now_s())


def _request_s(engine: Engine, seed: int) -> float:
    """Return what a high request takes while the engine is full of them."""
    player, count = Player(engine, seed), 24
    for _ in range(count):
        player.send(HIGH, PROMPT_TOKENS, ANSWER_TOKENS)
    begun_s = player.now_s()
    player.drain()
    return (player.now_s() - begun_s) / count


def _classes(engine: Engine, seed: int, requests: int, mean_s: float, *, has_low: bool) -> Player:
    player, rng = Player(engine, seed), random.Random(seed)
    following_s, sent = player.now_s(), 0
    while sent < requests or engine.has_work:
        while sent < requests and following_s <= player.now_s():
            player.send(HIGH, PROMPT_TOKENS, ANSWER_TOKENS)
            following_s += rng.expovariate(1 / mean_s)
            sent += 1
        while has_low and sent < requests and player.waiting() < LOW_WAITING:
            player.send(LOW, rng.randrange(100, 400), rng.randrange(20, 60))
        if engine.has_work:
            player.step()
        elif sent < requests:
            player.skip_to(following_s)
    return player


def _equal(engine: Engine, seed: int, requests: int) -> float:
    player, rng = Player(engine, seed), random.Random(seed)
    for _ in range(requests):
        player.send(0, rng.randrange(20, 400), rng.randrange(5, 80))
    begun_s = player.now_s()
    player.drain()
    return player.tokens / (player.now_s() - begun_s)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="high ones, of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=1.3)
    parser.add_argument("--pool-mib", type=int, default=48, help="so small that answers are preempted")
    parser.add_argument("--equal", action="store_true", help="only the backlog of one class")
    given = parser.parse_args()
    model = ModelSettings()
    limits = {"threads": 1, "device": "cpu", "sequences_max": 8, "pool_bytes_max": given.pool_mib * MIB}
    settings = Settings(model=model, engine=EngineSettings(**limits))
    engine = Start(settings, ensure_model(model), "priority").run().engine
    mean_s = 2 * _request_s(engine, 0)
    rows: list[dict[str, Any]] = []
    for number in range(given.rounds):
        row: dict[str, Any] = {"round": number, "equal_tokens_per_cpu_s": _equal(engine, number, 60)}
        if not given.equal:
            alone = _classes(engine, number, given.requests, mean_s, has_low=False)
            beside = _classes(engine, number, given.requests, mean_s, has_low=True)
            for share in (0.5, 0.95):
                pair = _quantile(alone.ttft_s[HIGH], share), _quantile(beside.ttft_s[HIGH], share)
                row[f"ttft_p{100 * share:.0f}_alone_s"], row[f"ttft_p{100 * share:.0f}_s"] = pair
            row |= {"ratio_p95": row["ttft_p95_s"] / row["ttft_p95_alone_s"], "low_ended": beside.ended[LOW]}
            row["low_ttft_p50_s"] = _quantile(beside.ttft_s[LOW], 0.5)
        rows.append(row)
        report.show("two classes at twice the load, CPU-seconds", rows)
    report.write("priority", rows)
    if given.equal:
        return 0
    ratio = _quantile([row["ratio_p95"] for row in rows], 0.5)
    return int(ratio > given.factor or not all(row["low_ended"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
