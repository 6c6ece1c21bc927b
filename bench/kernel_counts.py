"""`python -m bench.kernel_counts`: what a step launches on a GPU, counted on a CPU without one.

Tiny models of each family with the heads of an 8B (32 and 8), the attention of an H200, steps of 1, 8, 64 and
128 decodes behind 2,000 tokens each, of 20, 100 and 500 tokens behind 8,000, and of 100 beside 8 decodes.
Each operation of torch that is no view counts as one kernel, and each launch of Triton, which is not run. The
library's own second kernels (split products, sorts) are not seen. Waits: what brings a number to the host.
Uploads: host numbers that become tensors in between, besides the one of a step's words.

A layer is half of what a model of four layers has more than one of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from samovar.replicas.forward import (
    PLAIN_TYPES,
    Forward,
    FusedForward,
    StepPacker,
    TransformersForward,
    attention_triton,
    plain_model,
)
from samovar.replicas.forward.attention import ATTENTION_NAME, register
from samovar.replicas.forward.attention_triton import TritonPaged, tile_shapes
from samovar.replicas.forward.fused import step as fused_step
from samovar.replicas.forward.runner import EXPERTS_NAME, GROUPED_NAME, quicken, register_experts
from samovar.replicas.kv import KvGeometry, KvPool
from samovar.replicas.scheduling import Chunk, bare_sequence
from tests.support.engines.launches import Launches
from tests.support.engines.tiny_models import Family, tiny_config

CPU = torch.device("cpu")
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 16
PROCESSORS, CAPABILITY, SERVED_HEAD_DIM = 132, 90, 128
BLOCK_TOKENS, CONTEXT = 64, 9216
STEPS: dict[str, list[tuple[int, int]]] = {
    **{f"{count} decodes": [(2000, 1)] * count for count in (1, 8, 64, 128)},
    **{f"{count} tokens": [(8000, count)] for count in (20, 100, 500)},
    "100 tokens, 8 decodes": [(2000, 1)] * 8 + [(8000, 100)],
}
"""Steps of (context, new tokens)."""
FAMILIES: tuple[Family, ...] = get_args(Family)
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")


@dataclass
class Counts:
    """What a step launches and waits for; `kernels`: of torch and of Triton."""

    kernels: float = 0
    waits: float = 0
    uploads: float = 0

    def a_layer(self, more: Counts) -> Counts:
        """Return half of what a step of a model of two layers more has more: a mean, if layers differ."""
        return Counts(
            (more.kernels - self.kernels) / 2,
            (more.waits - self.waits) / 2,
            (more.uploads - self.uploads) / 2,
        )


class _Operations(Launches):
    """Counts operations of torch; in inference mode some come whole, which a GPU has one kernel for."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.kernels, self.waits.total()
        self._counts.uploads += func.overloadpacket.__name__ == "lift_fresh"
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._counts.kernels += self.kernels - before[0]
        self._counts.waits += self.waits.total() - before[1]
        return result


class _Reads(TorchFunctionMode):
    """Counts what copies to the host without an operation of its own."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "cpu", "numpy"):
            self._counts.waits += 1
        return func(*args, **(kwargs or {}))


class _Kernels:
    """Counts what a module of Triton's kernels is asked to launch. Attention gives zeros."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __getattr__(self, name: str) -> dict[Any, Callable[..., None]]:
        def launch(*args: Any, **_: Any) -> None:
            if name == "attend_tiles":  # what it gives decides which experts are asked
                args[0].zero_()  # counted in its place
            else:
                self._counts.kernels += 1

        return _ForAnyGrid(launch)


class _ForAnyGrid(dict[Any, Callable[..., None]]):
    def __init__(self, launch: Callable[..., None]) -> None:
        super().__init__()
        self._launch = launch

    def __missing__(self, grid: Any) -> Callable[..., None]:
        return self._launch


@contextmanager
def counting(counts: Counts) -> Iterator[None]:
    """Count what is launched within; Triton's kernels are not run, and triton need not be there."""
    with ExitStack() as stack:
        for module in (attention_triton, fused_step):
            stack.enter_context(patch.object(module, "_kernels", lambda: _Kernels(counts)))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_Reads(counts))
        stack.enter_context(_Operations(counts))
        yield


def model_of(family: Family, layers: int, experts: str = EXPERTS_NAME) -> torch.nn.Module:
    """Make a model as it is served, with random weights. `experts`: how a mixture computes them."""
    register()
    register_experts()
    config = tiny_config(
        family, layers=layers, hidden=Q_HEADS * HEAD_DIM, q_heads=Q_HEADS, kv_heads=KV_HEADS, context=CONTEXT
    )
    more = {"experts_implementation": experts} if family in EXPERTS else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME, **more
        )
    made.eval().requires_grad_(False)
    return quicken(made) if experts == GROUPED_NAME else made


def forwards_of(family: Family, layers: int) -> tuple[dict[str, Forward], TritonPaged]:
    """Return the ways to compute a model's steps, by name, and their attention."""
    model = model_of(family, layers)
    geometry = KvGeometry(layers, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    pool = KvPool(geometry, 2, CPU)
    backend = TritonPaged(
        tile_shapes(CAPABILITY, SERVED_HEAD_DIM, 2, Q_HEADS // KV_HEADS),
        processors=PROCESSORS,
        group=Q_HEADS // KV_HEADS,
        kv_heads=KV_HEADS,
    )
    forwards: dict[str, Forward] = {"modules": TransformersForward(model, pool, backend, exact=False)}
    if family in EXPERTS:
        grouped = model_of(family, layers, GROUPED_NAME)
        forwards["modules, grouped"] = TransformersForward(grouped, pool, backend, exact=False)
    if family in PLAIN_TYPES:
        forwards["fused"] = FusedForward(plain_model(model), pool, backend)
    return forwards, backend


def count_step(forward: Forward, backend: TritonPaged, step: list[tuple[int, int]]) -> Counts:
    """Count a step up to its logits. Packing and drawing are left out."""
    chunks = [
        Chunk(
            bare_sequence(
                [(37 * place + 11 * number) % 500 for place in range(context + new)],
                [1] * -(-(context + new) // BLOCK_TOKENS),
            ),
            context,
            new,
        )
        for number, (context, new) in enumerate(step)
    ]
    inputs, counts = StepPacker(CPU, BLOCK_TOKENS, tiling=backend.tiling).pack(chunks), Counts()
    with counting(counts):
        forward.logits(forward.hidden(inputs), inputs.sample_rows, inputs.sampled)
    return counts


@dataclass(frozen=True)
class Found:
    """Of one family, way and step: of the whole step with two layers, and of a layer."""

    step: Counts
    layer: Counts

    def of_model(self, layers: int) -> int:
        """Return the kernels of a step of a model of so many layers."""
        return round(self.step.kernels + (layers - 2) * self.layer.kernels)


def count_family(family: Family, steps: dict[str, list[tuple[int, int]]]) -> dict[tuple[str, str], Found]:
    """Return what is found by (way, step)."""
    two, four = (forwards_of(family, layers) for layers in (2, 4))
    found = {}
    for way in two[0]:
        for name, step in steps.items():
            few, more = (count_step(forwards[way], backend, step) for forwards, backend in (two, four))
            found[way, name] = Found(few, few.a_layer(more))
    return found


def main() -> None:
    print(f"| kernels a layer (a step of 32) | by | {' | '.join(STEPS)} | waits a layer | uploads |")
    print("| --- " * (4 + len(STEPS)) + "|")
    for family in FAMILIES:
        found = count_family(family, STEPS)
        for way in dict.fromkeys(way for way, _ in found):
            here = [found[way, name] for name in STEPS]
            cells = [f"{one.layer.kernels:g} ({one.of_model(32):,})" for one in here]
            waits, uploads = (
                "-".join(f"{one:g}" for one in sorted({min(many), max(many)}))
                for many in ([one.layer.waits for one in here], [one.layer.uploads for one in here])
            )
            print(f"| {family} | {way} | {' | '.join(cells)} | {waits} | {uploads} |", flush=True)


if __name__ == "__main__":
    main()
