"""`make bench-service`: policies in the running service, and what the simulator says of them.

For each policy a real `samovar serve` (one replica, SmolLM2, its clock sped up) gets the same turns of a
trace; the predictor begins from nothing. The first service records what it was asked (`--record`), and the
simulator replays that recording with the same policies, sizes and measured prices. Compared: tokens that
were not computed again, and the time to the first token. Exit code 1 for a wrong text, a failed
turn, or a simulation that is more than a tenth off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench import _report as report
from bench._service_player import Played, Player, Script, scripts
from bench._single_tier import Hits, hits_with
from bench._trace_generator import GeneratorOptions, generate
from bench._trace_patterns import mixed, parse_patterns
from bench.soak import working_directory
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cluster.plan.traces.readers import open_trace
from samovar.cluster.plan.traces.replay import forecasts
from samovar.cluster.serve.app import interrupt_on_signals
from samovar.configs.sections import MIB, PolicySettings, PredictorSettings
from tests.support.services.service import MODEL, serving

POLICIES = ("lru", "learned")
OFF_MAX = 0.1


def script_of(args: argparse.Namespace) -> list[Script]:
    """The same for all policies."""
    if args.trace:
        trace = open_trace(args.trace)
    else:
        options = GeneratorOptions(
            turns=args.turns, seed=args.seed, sessions_per_s=args.sessions_per_s, block_tokens=256
        )
        trace = generate(options)
    if args.patterns is not None:
        trace = mixed(trace, args.patterns, seed=args.seed)
    turns = list(itertools.islice(trace.turns(), args.turns))
    return scripts(turns, scale=args.scale, tokens_max=args.tokens_max, seed=args.seed)


def service_flags(args: argparse.Namespace, policy: str, work: Path, recording: Path | None) -> Iterator[str]:
    """`work`: a directory of this service's own."""
    settings: dict[str, Any] = {
        "model.cache-dir": work,
        "engine.device": "cpu",
        "engine.threads": 1,
        "engine.pool-bytes-max": args.pool_mib * MIB,
        "tiers.nvme.dir": work / f"kv-{policy}",
        "tiers.cpu.bytes-max": args.cpu_mib * MIB,
        "tiers.nvme.bytes-max": 0,
        "tiers.audit-share": 0,
        "limits.concurrent-per-key": 512,
        "tiers.policy.name": policy,
        "tiers.predictor.clock-rate": args.rate,
        **({"server.record": recording} if recording else {}),
    }
    for name, value in settings.items():
        yield from (f"--{name}", str(value))


def measure(
    args: argparse.Namespace, sessions: Sequence[Script], recording: Path
) -> dict[str, tuple[list[Played], dict[str, Any]]]:
    """By policy: what each turn saw, and `/cache/stats` at the end."""
    found = {}
    turns = sum(len(script.prompts) for script in sessions)
    with tqdm(total=turns * len(args.policies), unit="turn") as bar:
        for number, policy in enumerate(args.policies):
            bar.set_postfix_str(policy)
            output = report.OUT_DIR / f"service-{policy}.txt"
            with working_directory() as work:
                flags = service_flags(args, policy, work, None if number else recording)
                with serving(output, *flags) as service, service.http() as client:
                    player = Player(service.url, MODEL, args.rate)
                    asyncio.run(player.play(sessions, bar.update))
                    found[policy] = player.played, client.get("/cache/stats").raise_for_status().json()
    return found


def row_of(policy: str, played: Sequence[Played]) -> dict[str, Any]:
    """One line of the table."""
    tokens: Counter[str] = Counter()
    for one in played:
        tokens.update(one.tokens)
    prompt = sum(one.prompt_tokens for one in played)
    hits = sum(count for source, count in tokens.items() if source != "compute")
    ttfts = [one.ttft_s for one in played]
    back = [one.ttft_s for one in played if one.number]
    return {
        "policy": policy,
        "turns": len(played),
        "sessions": len({one.session for one in played}),
        "prompt_tokens": prompt,
        "hit_tokens": hits,
        "hit_rate": round(hits / max(1, prompt), 4),
        "main_hit_tokens": sum(
            count
            for one in played
            if one.is_main
            for source, count in one.tokens.items()
            if source != "compute"
        ),
        **{f"from_{source}": tokens[source] for source in ("gpu", "cpu")},
        "ttft_p50_s": round(statistics.median(ttfts), 3),
        "ttft_p95_s": round(float(np.quantile(ttfts, 0.95)), 3),
        "ttft_p95_back_s": round(float(np.quantile(back, 0.95)), 3) if back else None,
    }


def wrong_texts(found: dict[str, tuple[list[Played], dict[str, Any]]]) -> list[tuple[int, int, int]]:
    """Turns whose text is not the same under all policies: exact mode promises that it is."""
    texts: dict[tuple[int, int, int], set[str]] = {}
    for played, _ in found.values():
        for one in played:
            texts.setdefault((one.session, one.lineage, one.number), set()).add(one.text)
    return sorted(turn for turn, said in texts.items() if len(said) > 1)


def simulated(args: argparse.Namespace, recording: Path, pages: int) -> dict[str, Hits]:
    """What the simulator finds for the same turns, begun and ended when the recorded service did."""
    turns = [
        replace(
            turn,
            started_s=turn.started_s * args.rate,
            service_s=None if turn.service_s is None else turn.service_s * args.rate,
        )
        for turn in open_trace(recording).turns()
    ]
    found = {}
    for policy in args.policies:
        settings = PolicySettings(name=policy)
        curves = forecasts(turns, Predictor(PredictorSettings())) if policy == "learned" else None
        found[policy] = hits_with(turns, pages, make_policy(settings), settings, curves=curves)
    return found


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="samovar bench service", description=__doc__)
    parser.add_argument("--trace", type=Path, help="of any schema; else a generated one")
    parser.add_argument("--patterns", help="NAME[=SHARE][+NAME...], sent beside the conversations")
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions-per-s", type=float, default=0.12, help="of the generated trace")
    parser.add_argument("--scale", type=float, default=0.012, help="tokens of ours for one of the trace")
    parser.add_argument("--tokens-max", type=int, default=600)
    parser.add_argument("--rate", type=float, default=14.0, help="seconds of the trace in one")
    parser.add_argument("--pool-mib", type=int, default=24)
    parser.add_argument("--cpu-mib", type=int, default=0, help="main memory behind the pool; 0 = none")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    args = parser.parse_args(argv)
    try:
        args.patterns = parse_patterns(args.patterns) if args.patterns else None
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str]) -> int:
    args = arguments(argv)
    interrupt_on_signals()  # so that no service outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    sessions = script_of(args)
    with tempfile.TemporaryDirectory(prefix="samovar-bench-") as folder:
        recording = Path(folder) / "turns.jsonl"
        found = measure(args, sessions, recording)
        (replica,) = next(iter(found.values()))[1]["replicas"]
        simulation = simulated(args, recording, int(replica["pages_total"]))
    rows = []
    for policy, (played, stats) in found.items():
        row = row_of(policy, played)
        hits = simulation[policy].hit_tokens
        off = hits / max(1, row["hit_tokens"]) - 1
        returns = stats["nodes"][0].get("returns", {})
        rows.append(
            {
                **row,
                "simulated_hit_tokens": hits,
                "off": round(off, 4),
                "predictor": returns.get("predictor"),
                "shadow": returns.get("lru"),  # of the tiers, with `--cpu-mib`
            }
        )
    report.show("policies in the running service, beside the simulator", rows)
    wrong = wrong_texts(found)
    path = report.write("service", rows, wrong=wrong, settings={k: str(v) for k, v in vars(args).items()})
    print(f"written: {path}")
    # The simulation has the pool only.
    far = [] if args.cpu_mib else [row for row in rows if abs(row["off"]) > OFF_MAX]
    for session, lineage, number in wrong:
        print(f"WRONG TEXT: session {session}, lineage {lineage}, turn {number} differs between policies")
    for row in far:
        print(f"FAILED: the simulation of {row['policy']} is {row['off']:+.1%} off")
    return 1 if wrong or far else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
