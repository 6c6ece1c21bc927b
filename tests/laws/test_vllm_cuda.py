"""Pages of vLLM on a real GPU, while steps run: `make test-vllm-gpu`. Skipped, visibly, without one."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from samovar.cache_tiers.vllm.pages.staged import StagedPages
from samovar.cache_tiers.vllm.pages.tensors import open_pages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: vLLM's pages not run")

PAGES, LAYERS, SHAPE = 400, 12, (2, 16, 8, 128)


def layers_of(is_block_outermost: bool) -> dict[str, torch.Tensor]:
    together = torch.randn(PAGES, LAYERS, *SHAPE, device="cuda", dtype=torch.bfloat16)
    layers = [together[:, number] for number in range(LAYERS)]
    return {f"layer {at}": one if is_block_outermost else one.clone() for at, one in enumerate(layers)}


@pytest.mark.parametrize("is_block_outermost", [False, True], ids=["layers", "blocks"])
def test_pages_go_out_and_come_in_beside_steps(is_block_outermost: bool) -> None:
    """What a step writes is stored behind its mark; what is loaded is there when `scatter` returns."""
    layers, rng = layers_of(is_block_outermost), random.Random(1)
    pages = open_pages(layers, PAGES)
    assert isinstance(pages, StagedPages)
    busy = torch.randn(4096, 4096, device="cuda")
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            chosen = rng.sample(range(PAGES), 100)
            stored, loaded = chosen[:50], chosen[50:]
            for _ in range(8):
                busy = (busy @ busy).clamp(-1, 1)  # the step that is under way
            for layer in layers.values():
                layer[stored] = float(number) + busy[0, 0].to(torch.bfloat16) * 0
            until = pages.mark()
            shape = (50, LAYERS, pages.layout.layer_bytes)
            out, given = np.zeros(shape, dtype=np.uint8), np.full(shape, number, dtype=np.uint8)

            def store(until=until, stored=stored, out=out) -> None:  # type: ignore[no-untyped-def]
                until()
                pages.gather(stored, out)

            for one in (pool.submit(store), pool.submit(pages.scatter, loaded, given)):
                one.result(60)
            want = torch.full((1,), float(number), dtype=torch.bfloat16).view(torch.uint8).numpy()
            assert (out.reshape(-1, 2) == want).all()
            for layer in layers.values():
                rows = layer[loaded].contiguous().view(torch.uint8)
                assert (rows == number).all()
