"""JSON under a schema, from the default model at temperature 1: is it valid, and what does a token cost?

Validity: `--samples` answers with different seeds, in batches of `BATCH`, each checked against its schema
in plain Python. Cost: seconds a step of answers under a schema beside those of free ones at the same
temperature, alone and in a batch, on one engine in turns (free, constrained, free, ...), so that a machine
that drifts slows both alike; the ratio is that of the medians. A step that ends an answer is not measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from bench import _report as report
from samovar.cache_tiers.pricing.meters import UNKNOWN_PREFILL
from samovar.configs.sections import MIB
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import Delta, GenerateRequest, Grammar, Refused, SamplingParams
from samovar.replicas.model.store import ensure_model
from samovar.replicas.start.build import Start

BATCH = 8
COST_BATCHES = (1, 8)
COST_TOKENS = 48
TOKENS_MAX = 400
MOODS = ["calm", "busy", "sleepy"]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mood": {"enum": MOODS},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "floor": {"type": ["integer", "null"], "minimum": -3, "maximum": 99},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "mood", "friends", "home"],
    "additionalProperties": False,
}  # fmt: skip
LONG = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": COST_TOKENS}
"""Strings, the most frequent thing in JSON, whose masks allow the most tokens."""


class Player:
    """Runs answers to one prompt."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._keys = itertools.count(1)
        self._prompt = engine.requests.output.tokenizer.encode("A person, described in JSON:\n").ids

    def submit(self, seed: int, schema: dict[str, Any] | None, tokens_max: int, **params: Any) -> int:
        grammar = None if schema is None else Grammar("json_schema", json.dumps(schema), "bench")
        sampling = SamplingParams(
            max_tokens=tokens_max, temperature=1.0, seed=seed, grammar=grammar, **params
        )
        key = next(self._keys)
        refused = self.engine.requests.add(key, GenerateRequest(f"bench-{key}", self._prompt, sampling))
        if refused is not None:
            raise RuntimeError(refused.message)
        return key

    def answers(self, keys: list[int]) -> Iterator[tuple[str, str]]:
        """Text and finish reason of each answer."""
        texts, reasons = dict.fromkeys(keys, ""), dict.fromkeys(keys, "none")
        while self.engine.has_work:
            for key, event in self.engine.step():
                if isinstance(event, Delta):
                    texts[key] += event.text
                    reasons[key] = event.finish_reason or reasons[key]
                elif isinstance(event, Refused):
                    reasons[key] = event.message
        yield from ((texts[key], reasons[key]) for key in keys)

    def steps_s(self, batch: int, schema: dict[str, Any] | None, seed: int) -> list[float]:
        """Seconds of the steps in which all answers decode."""
        keys = [self.submit(seed + i, schema, COST_TOKENS, ignore_eos=True) for i in range(batch)]
        while any(sequence.output_tokens == 0 for sequence in self.engine.scheduler.queues):
            self.engine.step()
        times = []
        while len(self.engine.requests.open_keys()) == batch:
            started_s = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - started_s)
        for key in keys:
            self.engine.requests.abort(key)
        return times[:-1]


def why_invalid(text: str) -> str:
    """Why `text` is no person; empty if it is one. Shares nothing with the compiler."""
    try:
        person = json.loads(text)
    except ValueError as error:
        return str(error)
    home = person.get("home", {})
    checks = {
        "properties": list(person) == list(PERSON["properties"]) and set(home) <= {"zip", "floor"},
        "name": isinstance(person["name"], str) and 1 <= len(person["name"]) <= 20,
        "age": type(person["age"]) is int and 0 <= person["age"] <= 130,
        "mood": person["mood"] in MOODS,
        "friends": len(person["friends"]) <= 3 and all(len(friend) <= 12 for friend in person["friends"]),
        "zip": len(home["zip"]) == 5 and home["zip"].isascii() and home["zip"].isdigit(),
        "floor": home.get("floor") is None or type(home["floor"]) is int,
    }
    return ", ".join(name for name, holds in checks.items() if not holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5, help="of the cost, each way")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--inexact", action="store_true", help="without exact mode, and its probe at start")
    args = parser.parse_args()
    settings = Settings(
        model=ModelSettings(),
        engine=EngineSettings(
            pool_bytes_max=256 * MIB,
            device=args.device,
            threads=args.threads,
            exact=False if args.inexact else None,
            draft_tokens_max=0,  # what a step costs is measured, and it gives one token
        ),
    )
    built = Start(settings, ensure_model(settings.model), "bench", prefill=UNKNOWN_PREFILL).run()
    player = Player(built.engine)
    rows = [*validity(player, args.samples), *cost(player, args.repeats)]
    report.show("structured output", rows)
    print("wrote", report.write("structured", rows))


def validity(player: Player, samples: int) -> list[dict[str, Any]]:
    faults: list[str] = []
    with tqdm(total=samples, desc="valid", disable=None) as bar:
        for first in range(0, samples, BATCH):
            seeds = range(first, min(samples, first + BATCH))
            for text, reason in player.answers([player.submit(seed, PERSON, TOKENS_MAX) for seed in seeds]):
                why = why_invalid(text) if reason == "stop" else reason
                if why:
                    faults.append(f"{why}: {text}")
                bar.update()
    for fault in faults[:5]:
        print(fault)
    return [{"what": "valid answers", "of": samples, "value": samples - len(faults), "free": "", "ratio": ""}]


def cost(player: Player, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for batch in COST_BATCHES:
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in tqdm(range(repeats + 1), desc=f"cost, {batch}", disable=None):
            for is_bound in (False, True):
                found = player.steps_s(batch, LONG if is_bound else None, seed=1000 * repeat)
                if repeat:  # the first round compiles and warms up
                    times[is_bound] += found
        free_s, bound_s = statistics.median(times[False]), statistics.median(times[True])
        rows.append(
            {
                "what": "ms a step of decodes",
                "of": batch,
                "value": round(bound_s * 1e3, 3),
                "free": round(free_s * 1e3, 3),
                "ratio": round(bound_s / free_s, 4),
            }
        )
    return rows


if __name__ == "__main__":
    main()
