"""`make bench-loadpath`: where the time of a return goes on this machine, without a GPU.

An 8B model's KV (131 kB a token, 2 MiB a block) behind thin layers, so that little of it is computing; the
tiers are the product's, in this process, over shared memory. The stages are those of the round in the middle.
A step computes what is new; what else the machine does falls on all of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from bench import _report as report
from bench._gpu_device import Device
from bench._gpu_engine import Sizes
from bench._gpu_model import Shape, tokens_of
from bench._gpu_returns import SESSION, store_conversation
from bench._gpu_stage import Stage
from bench._load_trace import Passed, asked_and_traced

THIN = Shape("thin 8B", torch.bfloat16, 1024, 32, 8, 8, 64, 512, 65536)
TOKENS, TURN = 2048, 32
ROUNDS = 7
WARM_UP = 2
"""Rounds that are not counted: the first touch of memory."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loadpath", description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the conversation that comes back")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(argv)
    sizes = Sizes(1, (1,), args.tokens, args.tokens, (args.tokens,), TURN, (), 8, 3, 2, 3)
    rounds: list[tuple[float, tuple[Passed, ...]]] = []
    with tempfile.TemporaryDirectory(prefix="samovar-loadpath-") as folder:
        stage = Stage(Device("cpu"), THIN, sizes, Path(folder))
        caller, node = stage.caller("auto"), stage.node("auto")
        history = tokens_of(args.tokens, 900, THIN)
        store_conversation(caller, node, history, sizes)
        turn = [*history, *tokens_of(TURN, 951, THIN)]
        for number in range(WARM_UP + args.rounds):
            asked, passed = asked_and_traced(caller, turn, SESSION)
            if not passed:
                print(f"nothing was loaded: {asked.receipt} {asked.failed}")
                return 1
            if number >= WARM_UP:
                rounds.append((asked.ttft_s, passed))
        stage.close()
    rounds.sort(key=lambda one: one[0])
    ttft_s, passed = rounds[len(rounds) // 2]
    rows = [
        {
            "stage": one.stage,
            "pieces": one.pieces,
            "begins_ms": 1e3 * one.first_s,
            "is_over_ms": 1e3 * one.last_s,
            "all_pieces_ms": 1e3 * one.sum_s,
        }
        for one in passed
    ]
    ttfts_ms = [round(1e3 * took_s, 1) for took_s, _ in rounds]
    nbytes = args.tokens * THIN.token_bytes
    report.show(f"{nbytes / 1e9:.2f} GB, first token after {1e3 * ttft_s:.0f} ms", rows)
    to_pages_s = [one.last_s for _, stages in rounds for one in stages if one.stage == "moved"]
    report.write(
        "loadpath",
        rows,
        nbytes=nbytes,
        ttfts_ms=ttfts_ms,
        in_pages_ms=1e3 * statistics.median(to_pages_s),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
