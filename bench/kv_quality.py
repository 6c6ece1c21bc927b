"""`python -m bench.kv_quality`: what rounding K and V to int8 does to the model's predictions.

The product's own forward pass on the paged pool, with `engine.kv_dtype` auto and int8, over three texts:
prose, code and legal English. In float32, so that nothing else rounds. Per token: the Kullback-Leibler
divergence from auto's distribution, whether the likeliest token is the same, and by how much the text's own
next token became less likely.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import _report as report
from samovar.configs.settings import EngineSettings, ModelSettings
from samovar.replicas.forward import GatherSdpa, Runner, load_model
from samovar.replicas.kv import TRASH_PAGE, KvGeometry, KvPool
from samovar.replicas.model import ensure_model, inspect_model, load_tokenizer
from samovar.replicas.scheduling import Chunk, bare_sequence
from samovar.replicas.start.build import kv_geometry

ROOT = Path(__file__).parent.parent
TEXTS = {"prose": "docs/how-it-works.md", "code": "replicas/kv/page_pool.py", "legal": "LICENSE"}
TOKENS = 640
BARS = {"kl_mean": 0.005, "argmax_same": 0.97, "d_nll": 0.01}
"""At most, at least, at most."""


def logits_of(model: torch.nn.Module, geometry: KvGeometry, tokens: list[int]) -> torch.Tensor:
    """Return the logits `[tokens, vocab]` behind each token of a prompt that is computed at once."""
    blocks = -(-len(tokens) // geometry.block_tokens)
    pool = KvPool(geometry, TRASH_PAGE + 1 + blocks, torch.device("cpu"))
    runner = Runner(model, pool, GatherSdpa(False, geometry.dtype), exact=False)
    # One token more than is computed: what follows the last one is not known, and so not scored.
    sequence = bare_sequence([*tokens, 0], list(range(TRASH_PAGE + 1, TRASH_PAGE + 1 + blocks)))
    sequence.score_from = 0
    rows: list[torch.Tensor] = []
    runner.run([Chunk(sequence, 0, len(tokens))], score=lambda _chunk, _start, logits: rows.append(logits))
    return torch.cat(rows)


def compare(expected: torch.Tensor, got: torch.Tensor, tokens: list[int]) -> dict[str, float]:
    """Return by how much predictions `got` differ from `expected`, both logits `[tokens, vocab]`."""
    truth, ours = expected.log_softmax(-1), got.log_softmax(-1)
    kl = (truth.exp() * (truth - ours)).sum(-1)
    best, chosen = expected.argmax(-1), got.argmax(-1)
    # How much likelier, in logits, the best token was than the one that is now: of a near-tie, little.
    flipped = expected.gather(-1, best[:, None]) - expected.gather(-1, chosen[:, None])
    following = torch.tensor(tokens[1:])[:, None]
    nll = [-rows[:-1].gather(-1, following).mean() for rows in (truth, ours)]
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "argmax_same": float((best == chosen).double().mean()),
        "worst_flip": float(flipped.max()),
        "nll": float(nll[0]),
        "d_nll": float(nll[1] - nll[0]),
    }


def measure(model_dir: Path, texts: Mapping[str, str], tokens_max: int = TOKENS) -> list[dict[str, Any]]:
    """Return a row for each text, and one of their means (of `kl_max` and `worst_flip`, the largest)."""
    spec = inspect_model(model_dir)
    model = load_model(spec, torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(model_dir)
    auto = kv_geometry(EngineSettings(), spec, torch.float32)
    rows: list[dict[str, Any]] = []
    for name, text in texts.items():
        tokens = tokenizer(text, add_special_tokens=False).input_ids[:tokens_max]
        expected, got = (logits_of(model, of, tokens) for of in (auto, replace(auto, is_int8=True)))
        rows.append({"text": name, "tokens": len(tokens), **compare(expected, got, tokens)})
    together = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if name != "text"}
    largest = {name: max(row[name] for row in rows) for name in ("kl_max", "worst_flip")}
    return [*rows, {"text": "all", **together, **largest, "tokens": sum(row["tokens"] for row in rows)}]


def meets(row: Mapping[str, Any]) -> bool:
    """Return whether a row is within `BARS`."""
    return bool(
        row["kl_mean"] <= BARS["kl_mean"]
        and row["argmax_same"] >= BARS["argmax_same"]
        and row["d_nll"] <= BARS["d_nll"]
    )


def own_texts() -> dict[str, str]:
    """Return the texts of `TEXTS`, which lie in this repository."""
    return {name: (ROOT / path).read_text() for name, path in TEXTS.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="samovar bench kv_quality", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a transformers directory")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text")
    args = parser.parse_args(argv)
    model_dir = ensure_model(ModelSettings(path=args.model))
    rows = measure(model_dir, own_texts(), args.tokens)
    report.show(f"int8 KV beside float32 ({model_dir.name})", rows)
    is_met = meets(rows[-1])
    print(f"{BARS}: {'met' if is_met else 'NOT met'}")
    print(f"written: {report.write('kv_quality', rows, model=model_dir.name, bars=BARS, ok=is_met)}")
    return 0 if is_met else 1


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
