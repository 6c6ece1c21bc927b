"""`make bench-tenants`: a greedy tenant at its limits beside a small one, in a real `samovar serve`.

The small tenant asks one question after the other, each new to the cache: first alone, then while the greedy
one has all that its key may have under way. It does so with long answers (8 prompts x n=8, 1,500 tokens each)
and with long prompts (8 at a time, short answers). Exit code 1 when the small tenant's time to first token
(p95) is more than `--factor` times that of alone, when one of its requests fails, or when the greedy tenant
was never refused: then it was not at its limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from bench import _report as report
from bench.soak import working_directory
from samovar.cluster.serve.app import interrupt_on_signals
from tests.support.services.service import MODEL, Service

KEYS = {"greedy": "key-of-the-greedy-one", "small": "key-of-the-small-one"}
LOADS = {"answers": 3, "prompts": 17}
"""Requests that the greedy one tries at once: one more than its key may have, of 64 and of 8 answers."""
QUIET_S = 60.0
WORDS = ("tea", "river", "stone", "window", "garden", "letter", "music", "silver", "morning", "market")


def words(rng: random.Random, count: int) -> str:
    """Text that no cache has."""
    return " ".join(f"{rng.choice(WORDS)} {rng.randrange(1000)}" for _ in range(count // 2))


def greedy_body(load: str, rng: random.Random) -> dict[str, Any]:
    if load == "answers":
        prompts = [words(rng, 20) for _ in range(8)]
        return {"prompt": prompts, "n": 8, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    return {"prompt": [words(rng, 1200) for _ in range(8)], "max_tokens": 4, "stream": True}


class Greedy:
    """A client that always has as much under way as it is let. `seen`: its answers' status codes."""

    def __init__(self, client: httpx.AsyncClient, load: str, seed: int) -> None:
        self.seen: Counter[int] = Counter()
        self._client = client
        self._load = load
        self._seed = seed

    @asynccontextmanager
    async def at_work(self) -> Any:
        tasks = [asyncio.create_task(self._work(number)) for number in range(LOADS[self._load])]
        try:
            async with asyncio.timeout(QUIET_S):
                while not self.seen[429]:
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.05)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {self._load} {number}")
        while True:
            body = {"model": MODEL, "temperature": 0, **greedy_body(self._load, rng)}
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                self.seen[answer.status_code] += 1
                async for _ in answer.aiter_lines():
                    pass
            if answer.status_code == 429:
                await asyncio.sleep(float(answer.headers["retry-after"]))


async def first_tokens(
    client: httpx.AsyncClient, load: str, args: argparse.Namespace, bar: Any
) -> list[float]:
    """Seconds to the first token of each of the small tenant's requests, one after the other."""
    rng = random.Random(f"{args.seed} small {load}")
    seen = []
    for _ in range(args.requests):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": words(rng, args.prompt_words)}],
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
        }
        began_s = time.perf_counter()
        first_s = None
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"the small tenant got {answer.status_code}: {await answer.aread()!r}")
            async for line in answer.aiter_lines():
                if first_s is None and '"content"' in line and '"content":""' not in line:
                    first_s = time.perf_counter() - began_s
        if first_s is None:
            raise RuntimeError("the small tenant got an answer without a token")
        seen.append(first_s)
        bar.update()
    return seen


def row(load: str, seconds: Sequence[float], seen: Counter[int], alone_s: float | None) -> dict[str, Any]:
    p95_s = float(np.percentile(seconds, 95))
    return {
        "beside": load,
        "requests": len(seconds),
        "ttft_p50_s": statistics.median(seconds),
        "ttft_p95_s": p95_s,
        "factor": p95_s / (alone_s or p95_s),
        "greedy_taken": seen[200],
        "greedy_refused": seen[429],
    }


async def measure(service: Service, args: argparse.Namespace) -> list[dict[str, Any]]:
    def client(name: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        return httpx.AsyncClient(base_url=service.url, headers=headers, timeout=600)

    async with client("small") as small, client("greedy") as greedy:
        with tqdm(total=args.requests * (1 + len(args.loads)) + 2, unit="request") as bar:
            warm_up = argparse.Namespace(**{**vars(args), "requests": 2, "seed": -1})
            await first_tokens(small, "warm-up", warm_up, bar)
            rows = [row("nobody", await first_tokens(small, "nobody", args, bar), Counter(), None)]
            for load in args.loads:
                other = Greedy(greedy, load, args.seed)
                async with other.at_work():
                    seconds = await first_tokens(small, load, args, bar)
                rows.append(row(load, seconds, other.seen, rows[0]["ttft_p95_s"]))
    return rows


@contextmanager
def serving(work: Path, flags: Sequence[str]) -> Iterator[Service]:
    settings = ("--model.cache-dir", str(work), "--tiers.nvme.dir", str(work / "kv"), "--replicas", "1")
    output = report.OUT_DIR / "tenants-serve.txt"
    env = {"SAMOVAR_AUTH__API_KEYS": json.dumps(KEYS)}
    service = Service(output, *settings, *flags, env=env)
    try:
        yield service.wait_ready()
    finally:
        service.stop()


def misses(rows: Sequence[dict[str, Any]], factor: float) -> list[str]:
    """What is not as it should be."""
    found = []
    for one in rows[1:]:
        if one["factor"] > factor:
            found.append(f"beside {one['beside']}: {one['factor']:.2f} times of alone, more than {factor:g}")
        if not one["greedy_refused"]:
            found.append(f"beside {one['beside']}: the greedy tenant was not at its limits")
    return found


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="samovar bench tenants",
        description=__doc__,
        epilog="other flags go to samovar serve",
        allow_abbrev=False,
    )
    parser.add_argument("--requests", type=int, default=15, help="of the small tenant, in each part")
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--factor", type=float, default=2.0, help="that is still good")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    args, flags = arguments(argv)
    interrupt_on_signals()  # so that no service outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    with working_directory() as work, serving(work, flags) as service:
        rows = asyncio.run(measure(service, args))
    report.show("a small tenant's time to first token beside a greedy one", rows)
    found = misses(rows, args.factor)
    print(f"written: {report.write('tenants', rows, factor=args.factor, misses=found)}")
    for miss in found:
        print(f"MISSED: {miss}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
