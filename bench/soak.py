"""`make soak`: 32 concurrent streaming clients on 2 replicas for 2 minutes.

Each client chats in sessions of a few turns, with pauses and now and then a hang-up in the middle
of an answer, through a real `samovar serve`. At the end: no error, no page held by nobody, and
memory as flat as after the first quarter (by then the pools have filled). Exit code 1 when not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
from tqdm import tqdm

from bench import _report as report
from configs.settings import MIB
from tests.service import MODEL, serving, until

WORDS = ("tea", "samovar", "steam", "cup", "guest", "kettle", "water", "leaf", "garden", "evening")
GROWTH_MAX = 0.05
"""Growth of all processes' memory over the last three quarters that still counts as flat."""


@dataclass
class Outcome:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


async def _turn(
    client: openai.AsyncOpenAI, model: str, rng: random.Random, messages: list[dict[str, str]], out: Outcome
) -> str:
    """One streamed turn; hangs up early one time in ten. Returns the answer."""
    hang_up_at = rng.randint(1, 4) if rng.random() < 0.1 else None
    started_s, text, chunks, finished = time.perf_counter(), "", 0, False
    stream = await client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=rng.randint(8, 48),
        temperature=0.8,
        stream=True,
        stream_options={"include_usage": True},
    )
    async with stream:
        async for chunk in stream:
            if chunk.usage and chunk.usage.prompt_tokens_details:
                out.prompt_tokens += chunk.usage.prompt_tokens
                out.cached_tokens += chunk.usage.prompt_tokens_details.cached_tokens or 0
                out.answer_tokens += chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.delta.content:
                    if not text:
                        out.ttft_s.append(time.perf_counter() - started_s)
                    text += choice.delta.content
                finished = finished or choice.finish_reason is not None
            chunks += 1
            if hang_up_at is not None and chunks > hang_up_at:
                out.counts["hung up"] += 1
                return text
    if not finished:
        raise RuntimeError("the stream ended without a finish_reason")
    out.counts["turns"] += 1
    return text


async def _client(number: int, url: str, model: str, until_s: float, out: Outcome) -> None:
    rng = random.Random(number)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        while time.monotonic() < until_s:
            messages: list[dict[str, str]] = []
            for _ in range(rng.randint(1, 5)):
                question = " ".join(rng.choices(WORDS, k=rng.randint(5, 40)))
                messages.append({"role": "user", "content": f"{number}: {question}?"})
                try:
                    answer = await _turn(client, model, rng, messages, out)
                except (openai.OpenAIError, httpx.HTTPError, RuntimeError) as error:
                    out.errors[f"{type(error).__name__}: {str(error)[:120]}"] += 1
                    break
                messages.append({"role": "assistant", "content": answer})
                await asyncio.sleep(rng.expovariate(4.0))  # a person reads and types
                if time.monotonic() >= until_s:
                    break


async def _watch(root: psutil.Process, until_s: float, seconds: float, samples: list[Counter[str]]) -> None:
    with tqdm(total=round(seconds), unit="s") as bar:
        while (left_s := until_s - time.monotonic()) > 0:
            samples.append(_memory_bytes(root))
            bar.update(round(seconds - left_s) - bar.n)
            await asyncio.sleep(min(1.0, left_s))


def _memory_bytes(root: psutil.Process) -> Counter[str]:
    """Memory of its own of each process below `root`, by name; processes of one name together."""
    by_name: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it has just ended
            # Ray appends what a worker is doing to its title: `ray::ServeReplica:samovar:Replica.generate`.
            name = Path(process.cmdline()[0]).name.split(".")[0]
            by_name[name] += process.memory_full_info().uss
    return by_name


def _serve_and_load(args: argparse.Namespace, out: Outcome, samples: list[Counter[str]]) -> float:
    """Pages still held at the end."""
    flags = (
        *("--replicas", str(args.replicas), "--limits.concurrent-per-key", str(args.clients)),
        *("--engine.pool-bytes-max", str(args.pool_mib * MIB)),
    )
    with serving(report.OUT_DIR / "soak-serve.txt", *flags) as service:
        root = psutil.Process(service.process.pid)

        async def load() -> None:
            until_s = time.monotonic() + args.seconds
            clients = (_client(n, service.url, MODEL, until_s, out) for n in range(args.clients))
            await asyncio.gather(_watch(root, until_s, args.seconds, samples), *clients)

        asyncio.run(load())
        until("all sequences are over", lambda: service.total("samovar_replica_running") == 0, 60)
        if service.total("samovar_replica_integrity_failures_total"):
            out.errors["an engine's books were wrong"] += 1
        return service.total("samovar_pages", state="active")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="samovar bench soak", description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--pool-mib", type=int, default=64, help="small, so that it is full early")
    args = parser.parse_args(argv)
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    out = Outcome()
    samples: list[Counter[str]] = []
    held_pages = _serve_and_load(args, out, samples)
    quarter = max(1, len(samples) // 4)
    totals = [sample.total() for sample in samples]
    early, late = statistics.median(totals[quarter : 2 * quarter]), statistics.median(totals[-quarter:])
    growth = late / early - 1
    row = {
        "clients": args.clients,
        "replicas": args.replicas,
        "seconds": args.seconds,
        "turns": out.counts["turns"],
        "hung_up": out.counts["hung up"],
        "errors": sum(out.errors.values()),
        "held_pages": int(held_pages),
        "memory_early_mib": round(early / MIB),
        "memory_late_mib": round(late / MIB),
        "ttft_p50_s": round(statistics.median(out.ttft_s), 3),
        "answer_tok_s": round(out.answer_tokens / args.seconds, 1),
        "cached_share": round(out.cached_tokens / max(1, out.prompt_tokens), 3),
    }
    report.show("soak", [{"what": key, "value": value} for key, value in row.items()])
    for error, count in out.errors.most_common():
        print(f"{count} x {error}")
    series = [round(total / MIB) for total in totals[::10]]
    grown = [
        {"process": name, "early_mib": samples[quarter][name] / MIB, "late_mib": samples[-1][name] / MIB}
        for name in sorted(samples[-1], key=lambda name: samples[quarter][name] - samples[-1][name])[:6]
    ]
    report.show("memory by process, the fastest growing first", grown)
    print(f"written: {report.write('soak', [row], memory_mib_every_10_samples=series)}")
    is_flat = growth <= GROWTH_MAX
    print(
        f"memory grew {growth:+.1%} from the second quarter to the last ({'flat' if is_flat else 'NOT flat'})"
    )
    return 0 if not out.errors and not held_pages and is_flat else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
