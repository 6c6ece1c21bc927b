"""`make bench-autoscale`: replicas follow a replayed trace, and what scale events cost its users.

The chat trace (40 minutes, as much as there is), thinned so that the load rises and falls, is played
quickly to a real service on three raylets of this machine. Twice: with drain (a replica that goes hands over
what only it holds, and its node's tiers go to others), and without (both are just gone). Printed: load and
replicas by time, the hit rate near and after scale events, time to the first token. Exit code 1 for a text
that differs between the runs, or when the replicas never followed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from tqdm import tqdm

from bench import _report as report
from bench._autoscale_events import Change, Run, changes_of, replicas_by_time, summary
from bench._service_player import Player, Script, scripts
from samovar.cluster.plan.traces.readers import open_trace
from samovar.cluster.serve.app import interrupt_on_signals
from tests.support.services.service import MODEL, READY, START_S, free_port, until

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation_turns_first40min.csv.gz"
STOP_S = 90.0
LULL = 0.08
"""Load in a lull, as a share of that at a peak."""


def script_of(args: argparse.Namespace) -> list[Script]:
    """Sessions of several turns, `args.turns` turns or so, more where the load is to be high."""
    by_session: dict[int, list[Any]] = {}
    for turn in open_trace(args.trace).turns():
        by_session.setdefault(turn.session, []).append(turn)
    of_several = [turns for turns in by_session.values() if len(turns) > 1]
    length_s = max(turn.started_s for turns in of_several for turn in turns)

    def weight(at_s: float) -> float:
        return LULL + (1 - LULL) * math.sin(math.pi * args.peaks * at_s / length_s) ** 2

    total = sum(weight(turns[0].started_s) * len(turns) for turns in of_several)
    rng = random.Random(args.seed)
    kept = [
        turn
        for turns in of_several
        if rng.random() < weight(turns[0].started_s) * args.turns / total
        for turn in turns
    ]
    return scripts(
        sorted(kept, key=lambda turn: turn.started_s),
        scale=args.scale,
        tokens_max=args.tokens_max,
        seed=args.seed,
    )


@contextlib.contextmanager
def service(output: Path, counts: Path, *, drops: bool) -> Iterator[str]:
    """Its URL. `counts`: where it writes how many replicas there are."""
    port = free_port()
    cache = Path(os.environ.get("SAMOVAR_MODEL__CACHE_DIR", Path.home() / ".cache" / "samovar"))
    how = "drop" if drops else "drain"
    process = subprocess.Popen(
        [sys.executable, "-m", "bench._autoscale_service", str(port), str(cache), str(counts), how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=output.open("wb"),
        stderr=subprocess.STDOUT,
    )

    def ready() -> bool:
        text = output.read_text(errors="replace")
        assert process.poll() is None, f"the service ended: {text}"
        return READY.search(text) is not None

    try:
        until("three nodes are ready", ready, START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        try:
            process.communicate(timeout=STOP_S)  # closes its stdin
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def play(args: argparse.Namespace, sessions: Sequence[Script], name: str, *, drops: bool) -> Run:
    """One run. Raises what the client raises: no turn may fail."""
    turns = sum(len(script.prompts) for script in sessions)
    with tempfile.TemporaryDirectory(prefix="samovar-bench-") as folder:
        counts = Path(folder) / "counts.jsonl"
        output = report.OUT_DIR / f"autoscale-{name}.txt"
        with service(output, counts, drops=drops) as url, tqdm(total=turns, unit="turn", desc=name) as bar:
            player = Player(url, MODEL, args.rate)
            began_unix_s = time.time()
            asyncio.run(player.play(sessions, bar.update))
            took_s = time.time() - began_unix_s
        looks = [json.loads(line) for line in counts.read_text().splitlines()]
    return Run(name, player.played, replicas_by_time(looks, began_unix_s, took_s))


def plot(runs: Sequence[Run], path: Path) -> None:
    """Load and replicas by time, and the hit rate of those who come back."""
    figure, rows = plt.subplots(len(runs), 1, figsize=(9, 3.2 * len(runs)), sharex=True, squeeze=False)
    for (axis,), run in zip(rows, runs, strict=True):
        times = [at_s for at_s, _ in run.replicas]
        axis.step(times, [count for _, count in run.replicas], where="post", label="replicas")
        ends = np.arange(0, max(times), 5.0)
        began = np.array([one.at_s for one in run.played])
        rate = [((began >= end - 10) & (began < end)).sum() / 10 for end in ends]
        axis.plot(ends, rate, color="0.5", label="turns a second")
        for change in changes_of(run.replicas):
            axis.axvline(change.at_s, color="C2" if change.after > change.before else "C3", lw=0.6)
        axis.set_ylabel(run.name)
        hits = axis.twinx()
        hits.set_ylim(0, 1)
        hits.plot(*run.hits_by_time(15.0), color="C1", ls=":", label="hit rate of returning turns")
        axis.legend(loc="upper left", fontsize="small")
        hits.legend(loc="upper right", fontsize="small")
    rows[-1][0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="samovar bench autoscale", description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="of any schema")
    parser.add_argument("--turns", type=int, default=320)
    parser.add_argument("--peaks", type=int, default=2, help="how often the load rises and falls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=0.04, help="tokens of ours for one of the trace")
    parser.add_argument("--tokens-max", type=int, default=1200)
    parser.add_argument("--rate", type=float, default=12.0, help="seconds of the trace in one")
    parser.add_argument("--runs", nargs="+", choices=("drain", "drop"), default=["drain", "drop"])
    return parser.parse_args(argv)


def wrong_texts(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Turns whose text is not the same in all runs: exact mode promises that it is."""
    texts: dict[tuple[int, int], set[str]] = {}
    for run in runs:
        for one in run.played:
            texts.setdefault((one.session, one.number), set()).add(one.text)
    return sorted(turn for turn, said in texts.items() if len(said) > 1)


def events_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    def row(run: Run, change: Change) -> dict[str, Any]:
        return {
            "run": run.name,
            "at_s": round(change.at_s, 1),
            "replicas": f"{change.before} > {change.after}",
            "turns_s": round(run.turn_rate(change.at_s), 2),
            "hit_rate_30s_before": run.hit_rate(change.at_s - 30.0, change.at_s),
            "hit_rate_30s_after": run.hit_rate(change.at_s, change.at_s + 30.0),
        }

    return [row(run, change) for run in runs for change in changes_of(run.replicas)]


def main(argv: list[str]) -> int:
    args = arguments(argv)
    interrupt_on_signals()  # so that no service outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    sessions = script_of(args)
    runs = [play(args, sessions, name, drops=name == "drop") for name in args.runs]
    rows, events, wrong = [summary(run) for run in runs], events_of(runs), wrong_texts(runs)
    report.show("replicas follow the load", rows)
    if events:
        report.show("scale events", events)
    path = report.write(
        "autoscale",
        rows,
        events=events,
        wrong=wrong,
        replicas={run.name: run.replicas for run in runs},
        settings={name: str(value) for name, value in vars(args).items()},
    )
    plot(runs, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")
    print(f"wrong texts: {len(wrong)}")
    still = [run.name for run in runs if not {2, 1} <= {count for _, count in run.replicas}]
    for name in still:
        print(f"FAILED: in the run {name} the replicas did not follow the load")
    return 1 if wrong or still else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
