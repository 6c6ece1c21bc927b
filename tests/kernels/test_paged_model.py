"""Whole models on the kernels, in Triton's interpreter: what transformers hands over is taken as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.replicas.forward.attention import AttentionBackend, GatherSdpa
from samovar.replicas.forward.attention_choice import attention_forms
from samovar.replicas.forward.attention_triton import TritonPaged
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.runner import Runner
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk
from tests.kernels.paged import CPU, SMALL
from tests.support.engines.engines import prompt_of
from tests.support.engines.tiny_models import make_tiny_model


@pytest.mark.parametrize("is_int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_logits_and_stored_bytes_are_those_of_sdpa(family: str, is_int8: bool, tmp_path: Path) -> None:
    """A prompt in chunks, decodes beside it; windows, soft caps and sinks as the families have them."""
    spec = inspect_model(make_tiny_model(tmp_path / family, family))  # type: ignore[arg-type]
    model = load_model(spec, torch.float32, CPU)
    geometry = KvGeometry(
        spec.layers, 16, spec.kv_heads, spec.head_dim, torch.float32, kv_groups_of(spec.kv_heads), is_int8
    )
    kernel = TritonPaged(
        SMALL,
        processors=4,
        group=model.config.num_attention_heads // spec.kv_heads,  # type: ignore[union-attr, operator]
        kv_heads=spec.kv_heads,
    )
    backends: list[AttentionBackend] = [GatherSdpa(False, torch.float32), kernel]
    results = []
    for backend in backends:
        pool = KvPool(geometry, 9, CPU)
        runner = Runner(model, pool, backend, exact=False)
        tokens = prompt_of(50, seed=3)
        whole, beside = bare_sequence(tokens, [4, 1, 6, 3]), bare_sequence(prompt_of(20), [8, 7])
        logits, start = [], 0
        for step, count in enumerate((30, 1, 19)):
            other = Chunk(beside, 0, 20) if step == 0 else Chunk(beside, 19, 1)
            logits.append(runner.run([other, Chunk(whole, start, count)]))
            start += count
        results.append((torch.cat(logits), pool.gather([4, 1, 6, 3], 50)))
    (expected, stored), (found, stored_too) = results
    torch.testing.assert_close(found, expected, atol=1e-2 if is_int8 else 1e-4, rtol=0)
    # The first layer's K and V do not depend on attention.
    assert torch.equal(stored_too[0], stored[0])
    assert len(attention_forms(model, spec.head_dim)) == (1 if family == "llama" else 2)


def kv_groups_of(kv_heads: int) -> int:
    return 2 if kv_heads % 2 == 0 else 1
