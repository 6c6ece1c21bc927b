"""`make bench`: the engine beside transformers' own forward and generate, in one run.

Same weights, dtype and threads, in the same process, measured in turns (ours, ours exact,
reference, ours, ...) so that a machine that drifts slows all alike; medians. Prefill: tokens of a
new prompt a second, through the whole engine (scheduler, paged pool, sampling), with the service's
default step budget. Decode: tokens a second of all sequences together behind a context of
`CONTEXT` tokens; the reference is `generate` minus its own prefill. Streams: what a long prompt does to
the answers that are being written, with `engine.step_s_target` and `engine.step_stretch` and without.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from bench import _report as report
from bench._stream_stalls import Limits, stream_rows
from samovar.configs.sections import MIB
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import GenerateRequest, SamplingParams
from samovar.replicas.model.store import ensure_model
from samovar.replicas.start.build import Start

PREFILL_TOKENS = (128, 512, 2048)
BATCHES = (1, 4, 8)
CONTEXT = 128
DECODE_TOKENS = 24
STREAMS = (1, 4)


@dataclass(frozen=True)
class Subject:
    """One thing that is measured: how long a prefill or a run of decodes takes, in seconds."""

    prefill_s: Callable[[int], float]
    decode_s: Callable[[int], float]


def _prompt(tokens: int, salt: int) -> list[int]:
    return [(salt * 7919 + i * 104729) % 40000 + 100 for i in range(tokens)]


def _engine_subject(engine: Engine) -> Subject:
    keys = itertools.count(1)

    def submit(prompt_tokens: int, max_tokens: int) -> None:
        key = next(keys)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        refused = engine.requests.add(
            key, GenerateRequest(f"bench-{key}", _prompt(prompt_tokens, key), params)
        )
        if refused is not None:
            raise RuntimeError(refused.message)

    def drain() -> None:
        while engine.has_work:
            engine.step()

    def prefill_s(tokens: int) -> float:
        submit(tokens, 1)
        started_s = time.perf_counter()
        drain()
        return time.perf_counter() - started_s

    def decode_s(batch: int) -> float:
        totals = engine.requests.counts.totals
        before = totals["generated_tokens"]
        for _ in range(batch):
            submit(CONTEXT, DECODE_TOKENS + 1)
        # Some may have ended when the last begins: prompts are computed a few at a time beside answers.
        while engine.scheduler.waiting or any(not s.output_tokens for s in engine.scheduler.running):
            engine.step()
        left = batch * (DECODE_TOKENS + 1) - (totals["generated_tokens"] - before)
        started_s = time.perf_counter()
        drain()
        return (time.perf_counter() - started_s) * batch * DECODE_TOKENS / max(1, left)

    return Subject(prefill_s, decode_s)


def _reference_subject(model_dir: Path, dtype: torch.dtype) -> Subject:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as ours: see replicas/forward/runner.py
    salts = itertools.count(10_000)

    @torch.inference_mode()
    def prefill_s(tokens: int) -> float:
        ids = torch.tensor([_prompt(tokens, next(salts))])
        started_s = time.perf_counter()
        model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return time.perf_counter() - started_s

    @torch.inference_mode()
    def generate_s(batch: int, new_tokens: int) -> float:
        ids = torch.tensor([_prompt(CONTEXT, next(salts)) for _ in range(batch)])
        started_s = time.perf_counter()
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - started_s

    def decode_s(batch: int) -> float:
        return generate_s(batch, DECODE_TOKENS + 1) - generate_s(batch, 1)

    return Subject(prefill_s, decode_s)


def measure(subjects: dict[str, Subject], repeats: int) -> list[dict[str, Any]]:
    """Rows with the medians; `exact` true and false for ours, the reference beside both."""
    jobs = [("prefill", n) for n in PREFILL_TOKENS] + [("decode", n) for n in BATCHES]
    seconds: dict[tuple[str, int, str], list[float]] = {}
    rounds = [(r, job) for r in range(repeats + 1) for job in jobs]  # the first round warms up
    for number, (kind, size) in tqdm(rounds, unit="job"):
        for name, subject in subjects.items():
            took_s = subject.prefill_s(size) if kind == "prefill" else subject.decode_s(size)
            if number:
                seconds.setdefault((kind, size, name), []).append(took_s)
    rows = []
    for kind, size in jobs:
        tokens = size if kind == "prefill" else size * DECODE_TOKENS
        tok_s = {name: tokens / statistics.median(seconds[kind, size, name]) for name in subjects}
        for exact in (False, True):
            ours = tok_s["exact" if exact else "fast"]
            rows.append(
                {
                    "name": kind,
                    "tokens" if kind == "prefill" else "batch": size,
                    "exact": exact,
                    "ours_tok_s": round(ours, 1),
                    "reference_tok_s": round(tok_s["reference"], 1),
                    "ratio": round(ours / tok_s["reference"], 3),
                }
            )
    return rows


def measure_streams(args: argparse.Namespace, model_settings: ModelSettings, model_dir: Path) -> int:
    """Running streams beside a long prompt, with no limit of a step's time and with some."""
    engine_settings = EngineSettings(
        pool_bytes_max=512 * MIB, threads=args.threads, step=args.step, draft_tokens_max=0
    )
    built = Start(Settings(model=model_settings, engine=engine_settings), model_dir, "streams").run()
    default = EngineSettings()
    limits = [
        Limits(),
        *(Limits(target_s) for target_s in args.targets or [default.step_s_target]),
        *(Limits(default.step_s_target, stretch) for stretch in args.stretches or [default.step_stretch]),
    ]
    rows = stream_rows(
        built.engine,
        _prompt,
        limits,
        streams=STREAMS if args.only_streams is None else [args.only_streams],
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeats,
        clock=time.process_time if args.cpu_seconds else time.perf_counter,
    )
    seconds = "CPU seconds" if args.cpu_seconds else "seconds"
    more = {"dtype": built.info.dtype, "threads": built.info.threads, "exact": built.info.exact}
    report.show(f"streams beside a prompt ({model_dir.name}, {more}, {seconds})", rows)
    print(f"written: {report.write('streams', rows, module='engine', seconds=seconds, **more)}")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="samovar bench engine", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=None, help="a transformers directory; default SmolLM2-135M"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--step", default="auto", help="what computes the steps, as engine.step")
    parser.add_argument("--streams", action="store_true", help="only streams beside a long prompt")
    parser.add_argument(
        "--prompt-tokens", type=int, default=PREFILL_TOKENS[-1], help="streams: of the prompt"
    )
    parser.add_argument("--targets", type=float, nargs="*", help="of engine.step_s_target; default: its own")
    parser.add_argument("--stretches", type=float, nargs="*", help="of engine.step_stretch; default: its own")
    parser.add_argument("--only-streams", type=int, default=None, help="streams: so many, and no others")
    parser.add_argument("--cpu-seconds", action="store_true", help="streams: in CPU time; use one thread")
    args = parser.parse_args(argv)
    model_settings = ModelSettings(path=args.model)
    model_dir = ensure_model(model_settings)
    if args.streams:
        return measure_streams(args, model_settings, model_dir)
    subjects = {}
    for name, exact in (("fast", False), ("exact", True)):
        engine_settings = EngineSettings(
            exact=exact,
            pool_bytes_max=512 * MIB,
            threads=args.threads,
            step=args.step,
            draft_tokens_max=0,
        )
        built = Start(Settings(model=model_settings, engine=engine_settings), model_dir, name).run()
        if exact and not built.info.exact:
            print(f"exact mode does not hold here: {built.info.exactness}")
        subjects[name] = _engine_subject(built.engine)
        dtype, threads, step = getattr(torch, built.info.dtype), built.info.threads, built.info.step
    subjects["reference"] = _reference_subject(model_dir, dtype)
    rows = measure(subjects, args.repeats)
    for kind in ("prefill", "decode"):
        report.show(
            f"{kind} ({model_dir.name}, {dtype}, {threads} threads; {step})",
            [r for r in rows if r["name"] == kind],
        )
    decode = {row["batch"]: row["ours_tok_s"] for row in rows if row["name"] == "decode" and not row["exact"]}
    print(f"batch 8 decodes {decode[8] / decode[1]:.1f}x the tokens of batch 1")
    cost = [
        f"{fast['name']} {size}: {1 - exact['ours_tok_s'] / fast['ours_tok_s']:.0%}"
        for fast, exact in zip(rows[::2], rows[1::2], strict=True)
        for size in [fast.get("tokens", fast.get("batch"))]
    ]
    print(f"exact mode costs: {', '.join(cost)}")
    print(f"written: {report.write('engine', rows, dtype=str(dtype), threads=threads, step=step)}")
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
