"""The fused step without triton: its kernels played by torch. The kernels themselves: `tests/kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.forward import TransformersForward
from samovar.replicas.forward.fused import FusedForward, step
from samovar.replicas.forward.graphs import GraphLimits
from samovar.replicas.forward.lean import LeanForward, LeanModel
from samovar.replicas.forward.plain import plain_model
from samovar.replicas.forward.runner import Runner
from samovar.replicas.kv import KvPool
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk
from tests.kernels.fused import MEMBERS, NAMES, TOKENS, FusedCase, off, served
from tests.kernels.paged import CPU
from tests.support.engines.engines import prompt_of
from tests.support.engines.fused_reference import FusedReference
from tests.unit.replicas.forward.test_graphs import BLOCK, CONTEXT, ROWS, Recorder, TensorPaged


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_kernels", FusedReference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "more"), MEMBERS, ids=NAMES)
def test_it_computes_what_the_modules_and_the_lean_step_compute(
    family: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    """In bfloat16, too: it rounds where the modules round, and what is left is the order of sums."""
    model = served(family, dtype, **more)
    case, sdpa = FusedCase(model, dtype=dtype), GatherSdpa(False, dtype)
    truth, pool = case.run(lambda pool: TransformersForward(model, pool, sdpa, exact=False), sdpa)
    plain = plain_model(model)
    found, ours = case.run(lambda pool: FusedForward(plain, pool, sdpa), sdpa)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert off(found, truth) <= tolerance
    for name, tokens in TOKENS.items():
        stored, theirs = (one.gather(case.sequences[name].pages, tokens).float() for one in (ours, pool))
        assert off([stored], [theirs]) <= tolerance
    lean, _ = case.run(lambda pool: LeanForward(LeanModel(plain), pool, sdpa, exact=False), sdpa)
    assert off(found, lean) <= tolerance


def runners() -> Iterator[tuple[Runner, list[Any]]]:
    """Yield two runners of the same numbers, each with sequences whose prompts it has computed."""
    model = served("qwen3")
    plain, case = plain_model(model), FusedCase(model)
    for _ in range(2):
        pool, backend = KvPool(case.geometry, 1 + 3 * CONTEXT // BLOCK, CPU), TensorPaged()
        pool.page_bytes.fill_(0xFF)
        runner = Runner(
            model, pool, backend, exact=False, forward=lambda pool: FusedForward(plain, pool, TensorPaged())
        )
        blocks = CONTEXT // BLOCK
        sequences = [
            bare_sequence(
                prompt_of(5 + 9 * one, seed=one), list(range(1 + one * blocks, 1 + (one + 1) * blocks))
            )
            for one in range(3)
        ]
        yield runner, sequences


def test_recorded_steps_are_the_eager_ones() -> None:
    """Prompts, a chunk beside decodes, decodes; padded to their buckets, the padding's pages full of NaN."""
    (eager, here), (recorded, there) = runners()
    capture = Recorder()
    recorded.record_steps(capture, GraphLimits(ROWS, 64, ROWS, CONTEXT))
    mixes: list[list[tuple[int, int]]] = [[(one, 0)] for one in range(3)]  # sequence, first token: to its end
    mixes += [[(0, -1)], [(2, 9), (0, -1), (1, -1)], [(0, -1), (1, -1), (2, -1)], [(2, -1), (1, -1)]]
    for mix in mixes:
        found = []
        for runner, sequences in ((eager, here), (recorded, there)):
            chunks = [
                Chunk(sequences[one], first % len(sequences[one].tokens), -first)
                if first < 0
                else Chunk(sequences[one], first, len(sequences[one].tokens) - first)
                for one, first in mix
            ]
            logits = runner.run(chunks).clone()
            for (one, _), best in zip(mix, logits.argmax(dim=-1).tolist(), strict=True):
                sequences[one].tokens.append(best)
            found.append(logits)
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
        assert torch.isfinite(found[1]).all()
    assert capture.replays == len(mixes)
    assert [one.tokens for one in here] == [one.tokens for one in there]
