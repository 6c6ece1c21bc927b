"""`python -m bench.forecast_change`: the first turns after a change of traffic, a restart, and at a new node.

* shift: the recorded agents' turns, then the chat's (under another profile, and under the same);
* restart: half of a trace, then the rest by what the file says;
* join: half of a trace elsewhere, then the rest at a node that begins with a peer's model, or with none.

Brier score at 300 s of each `--turns` turns, beside that of a constant (online Kaplan-Meier of one kind) that
begins with them. Writes `bench/out/forecast-change.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from bench import _forecast_scores as scores
from bench import _report as report
from bench import _turn_tables as turn_tables
from bench._turn_tables import TurnTable
from bench.predictor import FILES, TRACES, Forecaster, Recency
from samovar.cache_tiers.forecast.learner import decode, encode
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import Curves, resume_probability
from samovar.configs.sections import PredictorSettings

HORIZON_S: Final = 300.0
WORSE_MAX: Final = 1.01
SETTINGS: Final = PredictorSettings()


def feed(forecaster: Forecaster, table: TurnTable, by_s: float, first: int, last: int) -> dict[int, Curves]:
    """Curves of turns `[first, last)`, the clock moved by `by_s`."""
    found = {}
    for _, is_end, index in table.events():
        if not first <= index < last:
            continue
        turn = table.turns[index]
        if is_end:
            moved = replace(turn, started_s=turn.started_s + by_s, ended_s=turn.ended_s + by_s)
            found[index] = forecaster.ended(moved)
        else:
            forecaster.arrived(turn.session, turn.started_s + by_s)
    return found


def score(table: TurnTable, curves: dict[int, Curves], first: int, count: int) -> dict[str, Any]:
    """How good the forecasts of turns `[first, first + count)` were, of those that were seen long enough."""
    ended_s = np.array([turn.ended_s for turn in table.turns])
    rows = [at for at in range(first, first + count) if at in curves]
    seen = np.array([at for at in rows if ended_s[at] + HORIZON_S <= table.end_s])
    said = resume_probability(np.stack([curves[at] for at in seen]), np.zeros(len(seen)), HORIZON_S)
    true = np.array(table.idle_s())[seen] <= HORIZON_S
    return {
        "auc": scores.auc(said, true),
        "ece": scores.ece(said, true),
        "brier": scores.brier(said, true),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0: after a shift of profile no worse than a constant, within one percent."""
    parser = argparse.ArgumentParser(prog="bench.forecast_change", description=__doc__)
    parser.add_argument("--before", type=int, default=8000, help="turns of agents before the shift")
    parser.add_argument("--turns", type=int, default=2000)
    asked = parser.parse_args(argv)
    chat, agents = (turn_tables.read(TRACES / name) for name in FILES)
    rows: list[dict[str, Any]] = []

    def add(what: str, model: str, table: TurnTable, curves: dict[int, Curves], first: int = 0) -> None:
        for at in range(first, first + asked.turns, 500):
            part = score(table, curves, at, 500)
            rows.append({"what": what, "model": model, "turns": f"{at - first}-{at - first + 500}", **part})
        whole = score(table, curves, first, asked.turns)
        rows.append({"what": what, "model": model, "turns": "all", **whole})

    by_s = agents.end_s - chat.turns[0].started_s + 1.0
    constant = Recency(SETTINGS, is_constant=True)
    add("shift", "constant", chat, feed(constant, chat, 0.0, 0, asked.turns))
    add("shift", "from zero", chat, feed(Predictor(SETTINGS), chat, 0.0, 0, asked.turns))
    for model, profile in (("learned, another profile", "code"), ("learned, same profile", "chat")):
        before = replace(agents, turns=[replace(turn, profile=profile) for turn in agents.turns])
        predictor = Predictor(SETTINGS)
        feed(predictor, before, 0.0, 0, asked.before)
        add("shift", model, chat, feed(predictor, chat, by_s, 0, asked.turns))
    middle = len(chat.turns) // 2
    first = Predictor(SETTINGS)
    feed(first, chat, 0.0, 0, middle)
    restarted = Predictor(SETTINGS)
    restarted.restore(decode(encode(first)))
    for model, predictor in (
        ("never restarted", first),
        ("restarted, or joined by a peer's model", restarted),
        ("joined without", Predictor(SETTINGS)),
    ):
        add("restart, join", model, chat, feed(predictor, chat, 0.0, middle, middle + asked.turns), middle)
    report.show(f"Brier at {HORIZON_S:.0f} s", rows)
    briers = {row["model"]: row["brier"] for row in rows if (row["what"], row["turns"]) == ("shift", "all")}
    times = briers["learned, another profile"] / briers["constant"]
    missed = [] if times <= WORSE_MAX else [f"after a shift of profile {times:.3f} of a constant's"]
    print(f"written: {report.write('forecast-change', rows, module='forecast_change', missed=missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
