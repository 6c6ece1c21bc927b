"""What drafts save: CPU-ms a token of one answer with and without them, for texts of several kinds.

Each kind is answered in turns with `engine.draft_tokens_max` 0 and its default, greedy and drawn with one
seed; the least of `--rounds` is told. Fails if an answer is not the same with drafts. `random`: token ids at
random, after which a small model repeats itself: what `bench.peers` decodes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from bench import _report as report
from samovar.configs.sections import MIB
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import Delta, GenerateRequest, Refused, SamplingParams
from samovar.replicas.model.store import ensure_model
from samovar.replicas.start.build import Start

CODE = Path(__file__).parent.parent / "replicas" / "start" / "checkpoint.py"
CODE_LINES = slice(183, 213)
ASKED = {
    "story": "Tell me a short story about a fox and a river.",
    "list": "List twenty countries of Europe with their capitals.",
    "edit": "Add a docstring to each function of this file and write the whole file again.\n\n{code}",
    "quote": "Repeat this text word by word:\n\n{code}",
}
TEMPERATURES = (0.0, 0.7)
SEED = 5


class Answered(NamedTuple):
    ids: tuple[int, ...]
    cpu_ms_per_token: float
    steps: int
    drafted: int
    accepted: int


def prompts(model_dir: Path) -> dict[str, list[int]]:
    """Return the prompt of each kind of text."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    code = "\n".join(CODE.read_text().splitlines()[CODE_LINES])
    asked = {
        kind: f"<|im_start|>user\n{text.format(code=code)}<|im_end|>\n<|im_start|>assistant\n"
        for kind, text in ASKED.items()
    }
    found = {kind: tokenizer.encode(text).ids for kind, text in asked.items()}
    return found | {"random": random.Random(SEED).choices(range(1000, tokenizer.get_vocab_size()), k=128)}


def engine(threads: int, drafted: int | None) -> Engine:
    """Return an engine of the default model; `drafted`: None for the default."""
    drafts = {} if drafted is None else {"draft_tokens_max": drafted}
    settings = Settings(engine=EngineSettings(threads=threads, pool_bytes_max=256 * MIB, **drafts))
    return Start(settings, ensure_model(ModelSettings()), "bench").run().engine


def answer(engine: Engine, key: int, prompt: list[int], tokens: int, temperature: float) -> Answered:
    """Answer once; the CPU time is that of all steps behind the first token. Raises `RuntimeError`."""
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=SEED)
    refused = engine.requests.add(key, GenerateRequest(f"r{key}", prompt, sampling))
    if isinstance(refused, Refused):
        raise RuntimeError(refused.message)
    ids: list[int] = []
    before, began_s = engine.stats(), 0.0
    while engine.has_work:
        for _, event in engine.step():
            if isinstance(event, Delta):
                ids += event.token_ids
        if len(ids) == 1:
            before, began_s = engine.stats(), time.process_time()
    cpu_s, after = time.process_time() - began_s, engine.stats()
    return Answered(
        tuple(ids),
        1000 * cpu_s / max(1, len(ids) - 1),
        after.steps - before.steps,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drafts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    engines = {"plain": engine(args.threads, 0), "drafts": engine(args.threads, None)}
    torch.set_num_threads(1)
    keys, differ = itertools.count(1), list[str]()
    rows: list[dict[str, Any]] = []
    asked = prompts(ensure_model(ModelSettings()))
    for temperature, (kind, prompt) in tqdm(list(itertools.product(TEMPERATURES, asked.items()))):
        best: dict[str, Answered] = {}
        for _, (name, one) in itertools.product(range(args.rounds), engines.items()):
            found = answer(one, next(keys), prompt, args.tokens, temperature)
            best[name] = min(best.get(name, found), found, key=lambda answered: answered.cpu_ms_per_token)
        plain, drafts = best["plain"], best["drafts"]
        if plain.ids != drafts.ids:
            differ.append(f"{kind} at temperature {temperature:g}")
        rows.append(
            {
                "text": kind,
                "temperature": temperature,
                "tokens": len(plain.ids),
                "plain_ms": plain.cpu_ms_per_token,
                "drafts_ms": drafts.cpu_ms_per_token,
                "ratio": drafts.cpu_ms_per_token / plain.cpu_ms_per_token,
                "steps": drafts.steps,
                "drafted": drafts.drafted,
                "accepted": drafts.accepted,
            }
        )
    path = report.write("drafts", rows)
    report.show("CPU-ms a token, one answer alone", rows)
    print(f"written: {path}")
    for what in differ:
        print(f"FAILED: another answer with drafts: {what}")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
