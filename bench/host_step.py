"""`python -m bench.host_step`: what a step of decodes costs the host, without what the device computes.

A whole engine over a tiny model whose forward pass gives zeros: schedule, pack for the attention of an H200,
take the best tokens, make text of them. CPU milliseconds, medians of many steps. On a GPU only what is before
the launch is waited for: where the step behind is launched ahead (docs/adr/030), its plan and its packing;
all else runs beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence as Listing
from pathlib import Path

import torch

from samovar.replicas.engine import Engine
from samovar.replicas.forward import Runner, Score
from samovar.replicas.forward.attention_triton import TritonPaged, tile_shapes
from samovar.replicas.messages import GenerateRequest, SamplingParams
from samovar.replicas.scheduling import Chunk
from tests.support.engines.engines import small_engine
from tests.support.engines.tiny_models import make_tiny_model

ROWS, CONTEXTS = (1, 8, 64, 128), (512, 2000)
STEPS, VOCAB = 60, 512
PROCESSORS, CAPABILITY = 132, 90


class Idle(Runner):
    """Packs steps, and computes nothing. `packed_s`: what packing has taken."""

    packed_s = 0.0

    def _computed(self, chunks: Listing[Chunk], score: Score | None) -> torch.Tensor:
        begun_s = time.thread_time()
        inputs = self._pack(chunks)
        self.packed_s += time.thread_time() - begun_s
        return torch.zeros((inputs.sampled, VOCAB))


def idle_engine(model_dir: Path, rows: int, context: int) -> tuple[Engine, Idle]:
    """Return an engine in which so many answers are being written behind so many tokens each."""
    longest = context + STEPS + 8
    engine = small_engine(
        model_dir,
        exact=False,
        step="transformers",
        pool_tokens=rows * (longest + 16),
        sequences_max=max(4, rows),
        step_tokens_max=65536,
        step_s_target=None,
        step_stretch=None,
    ).engine
    backend = TritonPaged(tile_shapes(CAPABILITY, 128, 2, 4), processors=PROCESSORS, group=4, kv_heads=8)
    engine.runner = idle = Idle(engine.runner.model, engine.runner.pool, backend, exact=False)
    for key in range(rows):
        prompt = [(7919 * key + 31 * place) % (VOCAB - 3) + 3 for place in range(context)]
        params = SamplingParams(max_tokens=STEPS + 4, temperature=0.0, ignore_eos=True)
        engine.requests.add(key, GenerateRequest(f"r{key}", prompt, params))
    while any(not one.output_tokens for one in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    return engine, idle


def host_ms(model_dir: Path, rows: int, context: int, steps: int = STEPS) -> tuple[float, float]:
    """Return CPU milliseconds of a step, and those of packing it."""
    engine, idle = idle_engine(model_dir, rows, context)
    whole, packing = list[float](), list[float]()
    for _ in range(steps):
        if len(engine.scheduler.running) < rows:
            break
        begun_s, packed_s = time.thread_time(), idle.packed_s
        engine.step()
        whole.append(time.thread_time() - begun_s)
        packing.append(idle.packed_s - packed_s)
    return 1e3 * statistics.median(whole), 1e3 * statistics.median(packing)


def main() -> None:
    print("| CPU ms a step of decodes | " + " | ".join(map(str, ROWS)) + " |")
    print("| --- " * (1 + len(ROWS)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_tiny_model(Path(folder) / "model", context=4096)
        for context in CONTEXTS:
            found = [host_ms(model_dir, rows, context) for rows in ROWS]
            cells = [f"{whole:.2f} ({packing:.3f})" for whole, packing in found]
            print(f"| behind {context} tokens; packing | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
