"""vLLM's tensors as pages of bytes, in each of its layouts; on CPU tensors, whose arithmetic is the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from samovar.cache_tiers.vllm.pages.tensors import (
    CpuPages,
    PageRows,
    as_blocks,
    layout_of,
    open_pages,
    runs_of,
)

PAGES, LAYERS, TOKENS = 11, 3, 4
SHAPE = (2, TOKENS, 8)  # of a page of a layer


def values(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def layer_outermost() -> list[torch.Tensor]:
    return [values(PAGES, *SHAPE) + 1e4 * number for number in range(LAYERS)]


def block_outermost() -> list[torch.Tensor]:
    together = values(PAGES, LAYERS, *SHAPE)
    return [together[:, number] for number in range(LAYERS)]


def keys_and_values_apart() -> list[torch.Tensor]:
    """`(2, pages, ...)`: a page of a layer is two runs."""
    return [values(2, PAGES, TOKENS, 8) + 1e4 * number for number in range(LAYERS)]


LAYOUTS = {"layers": layer_outermost, "blocks": block_outermost, "apart": keys_and_values_apart}


def expected(layers: list[torch.Tensor], page: int) -> bytes:
    by_page = [one if one.shape[0] == PAGES else one.movedim(1, 0) for one in layers]
    return b"".join(one[page].contiguous().numpy().tobytes() for one in by_page)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_device", [False, True], ids=["in place", "as a device"])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_read_and_written(name: str, is_device: bool, seed: int) -> None:
    layers, rng = LAYOUTS[name](), random.Random(seed)
    layout, views = layout_of({f"layer {at}": one for at, one in enumerate(layers)}, PAGES)
    chosen = rng.sample(range(PAGES), rng.randint(1, 7))
    shape = (len(chosen), LAYERS, layout.layer_bytes)
    out, given = np.zeros(shape, dtype=np.uint8), np.full(shape, 3, dtype=np.uint8)
    want = [expected(layers, page) for page in chosen]
    others = [expected(layers, page) for page in range(PAGES) if page not in chosen]
    if is_device:
        rows = PageRows(views)
        rows.read(chosen, torch.from_numpy(out))
        rows.write(torch.from_numpy(given), chosen)
    else:
        pages = CpuPages(layout, views)
        pages.gather(chosen, out)
        pages.scatter(chosen, given)
    assert [one.tobytes() for one in out] == want
    assert [expected(layers, page) for page in chosen] == len(chosen) * [given[0].tobytes()]
    assert [expected(layers, page) for page in range(PAGES) if page not in chosen] == others


def test_a_page_that_lies_in_one_run_is_one_copy() -> None:
    assert as_blocks(layer_outermost()) is None
    assert as_blocks(keys_and_values_apart()) is None
    layers = block_outermost()
    found = as_blocks(layers)
    assert found is not None
    assert found.shape == (PAGES, sum(one[0].numel() * 4 for one in layers))
    assert as_blocks(layers[1:]) is None  # a part of a page
    assert as_blocks([layers[1], layers[0], layers[2]]) is None
    assert as_blocks([one.clone() for one in layers]) is None


def test_runs_are_pages_that_follow_each_other() -> None:
    assert runs_of([4, 5, 6, 2, 1, 9, 10]) == [(0, 4, 3), (3, 2, 1), (4, 1, 1), (5, 9, 2)]
    assert runs_of([]) == []


def test_layers_that_are_not_alike_are_refused() -> None:
    """Models of several kinds of layers, such as Mamba, and indexers beside the KV."""
    with pytest.raises(ValueError, match="only models whose layers are alike"):
        open_pages({"a": torch.zeros(PAGES, 4), "b": torch.zeros(PAGES, 5)}, PAGES)
    with pytest.raises(ValueError, match="no dimension of"):
        open_pages({"a": torch.zeros(PAGES + 1, 4)}, PAGES)
    with pytest.raises(ValueError, match="only KV of attention"):
        open_pages({"a": [torch.zeros(PAGES, 4)]}, PAGES)  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_kv_is_refused_whoever_chose_it(dtype: torch.dtype) -> None:
    """`auto` may be what the checkpoint says."""
    with pytest.raises(ValueError, match="its scales lie outside of the pages"):
        open_pages({"a": torch.zeros(PAGES, 4, dtype=dtype)}, PAGES)


def test_the_layout_says_how_bytes_lie() -> None:
    def words(tensor: torch.Tensor) -> tuple[str, ...]:
        return layout_of({"a": tensor}, PAGES)[0].layers

    one = torch.zeros(PAGES, 2, 4, 8)
    others = [one.half(), one.transpose(1, 2), torch.zeros(PAGES, 4, 2, 8)]
    texts = {words(tensor) for tensor in (one, *others)}
    assert len(texts) == 4
