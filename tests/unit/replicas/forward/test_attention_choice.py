"""Which attention serves, and what the kernel's backend launches: decided without triton and a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samovar.replicas.forward.attention import AttentionBackend, AttentionForm, GatherSdpa
from samovar.replicas.forward.attention_choice import attention_forms, choose_attention, prefer
from samovar.replicas.forward.attention_triton import TileShape, TritonPaged, Unserved, tile_shapes
from samovar.replicas.forward.inputs import (
    StepInputs,
    StepPacker,
    StepShape,
    TilePlaces,
    Tiling,
    splits_of,
)
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk

CPU = torch.device("cpu")
DECODE, PREFILL = TileShape(16, 64, 4, 3, 3), TileShape(128, 64, 8, 2, 1)


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 7), (128, 4), (256, 2), (128, 20), (64, 64)])
def test_a_tile_holds_all_heads_of_a_token(capability: int, itemsize: int, head_dim: int, group: int) -> None:
    for shape in tile_shapes(capability, head_dim, itemsize, group):
        assert shape.rows >= max(16, group)
        assert shape.rows & (shape.rows - 1) == 0, "Triton's blocks are powers of two"


@pytest.mark.parametrize(("capability", "head_dim", "group"), [(75, 128, 4), (90, 512, 4), (90, 128, 71)])
def test_what_has_no_tiles_is_not_served(capability: int, head_dim: int, group: int) -> None:
    with pytest.raises(Unserved, match=r"capability 8\.0|no tiles"):
        tile_shapes(capability, head_dim, 2, group)


@pytest.mark.parametrize(
    ("keys", "programs", "splits"),
    [
        ([65_536], 49, [49]),  # one sequence, eight KV heads, 132 multiprocessors
        ([8_192] * 32, 49, [1] * 32),
        ([8_192] * 16, 49, [3] * 16),
        ([1_024], 49, [4]),  # too few keys for more
        ([100], 49, [1]),
        ([1 << 20], 396, [64]),
        ([65_536, *[512] * 31], 49, [39, *[1] * 31]),  # a long one among short ones
    ],
)
def test_splits_fill_the_device_once(keys: list[int], programs: int, splits: list[int]) -> None:
    assert splits_of(np.array(keys, dtype=np.int64), programs).tolist() == splits


def inputs_of(*steps: tuple[int, int], shape: StepShape | None = None) -> StepInputs:
    chunks = [Chunk(bare_sequence([1] * (past + new), list(range(1, 99))), past, new) for past, new in steps]
    return StepPacker(CPU, 16, tiling=backend().tiling).pack(chunks, shape)


def backend() -> TritonPaged:
    return TritonPaged((DECODE, PREFILL), processors=132, group=4, kv_heads=8)


def test_decodes_and_other_rows_are_a_launch_each() -> None:
    assert backend().tiling == Tiling(32, 49, 16)
    plan = backend().prepare(inputs_of((100, 1), (0, 70), (300, 1), (16, 5)))
    decodes, others = plan.launches
    assert (decodes.shape, decodes.work.tiles[:, :2].tolist()) == (DECODE, [[0, 0], [2, 0]])
    assert (others.shape, others.work.tiles[:, :2].tolist()) == (PREFILL, [[1, 0], [1, 32], [1, 64], [3, 0]])
    assert plan.is_covered


def test_a_recorded_step_is_launched_alike_whatever_it_holds() -> None:
    """A graph is captured at some contexts, and replayed at all."""
    shape = StepShape(40, 12, 12, TilePlaces(8, 57), TilePlaces(5, 21), is_recorded=True)
    plans = [
        backend().prepare(inputs_of(*steps, shape=shape)) for steps in ([(3, 1)], [(900, 1), (1000, 39)])
    ]
    for plan in plans:
        assert [len(one.work.tiles) for one in plan.launches] == [8, 5]
        assert [len(one.work.items) for one in plan.launches] == [57, 21]
        assert [(one.work.is_split, one.runs) for one in plan.launches] == [(True, 49), (True, 16)]
        assert not plan.is_covered


def test_rows_of_no_tile_are_known() -> None:
    chunk = Chunk(bare_sequence([1] * 5, [3]), 0, 5)
    padded = StepPacker(CPU, 16, rows_multiple=4, tiling=Tiling(32)).pack([chunk])
    assert not backend().prepare(padded).is_covered


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unserved("its result differs by 0.3"), "its result differs by 0.3"),
        (ModuleNotFoundError("No module named 'triton'"), "triton cannot be imported"),
        (RuntimeError("ptxas: out of registers"), "RuntimeError: ptxas: out of registers"),
    ],
)
def test_the_fallback_serves_and_says_why(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def find() -> AttentionBackend:
        raise error

    fallback = GatherSdpa(False, torch.bfloat16)
    chosen = prefer(find, fallback)
    assert chosen.backend is fallback
    assert chosen.sentence.startswith("gather+sdpa, as the kernel does not serve: ")
    assert reason in chosen.sentence
    assert reason in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
    ],
    ids=str,
)
def test_nothing_serves_on_a_device_that_the_kernel_has_lost(error: Exception) -> None:
    def find() -> AttentionBackend:
        raise error

    with pytest.raises(type(error)):
        prefer(find, GatherSdpa(False, torch.bfloat16))


def test_the_kernel_serves_where_nothing_is_wrong_with_it() -> None:
    kernel = backend()
    assert prefer(lambda: kernel, GatherSdpa(False, torch.bfloat16)).backend is kernel


def model_with(sinks: torch.Tensor | None = None, **config: object) -> torch.nn.Module:
    model = torch.nn.Module()
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    if sinks is not None:
        layer = torch.nn.Module()
        layer.sinks = torch.nn.Parameter(sinks)
        model.layer = layer
    return model


def test_the_forms_are_those_of_the_models_layers() -> None:
    assert attention_forms(model_with(sliding_window=None), 64) == [AttentionForm(0.125)]
    gemma = attention_forms(model_with(sliding_window=4096, attn_logit_softcapping=50.0), 64)
    assert [(form.window, form.softcap) for form in gemma] == [(None, 50.0), (4096, 50.0)]
    (form,) = attention_forms(model_with(torch.ones(4)), 64)
    assert form.sinks is not None


@pytest.mark.parametrize(
    ("device", "exact", "sentence"),
    [
        ("cpu", False, "gather+sdpa"),
        ("cpu", True, "gather+sdpa, exact"),
        ("cuda", True, "gather+sdpa, exact"),
    ],
)
def test_sdpa_serves_on_cpu_and_where_exactness_was_probed_with_it(
    device: str, exact: bool, sentence: str
) -> None:
    geometry = KvGeometry(1, 16, 1, 16, torch.float32)
    chosen = choose_attention(model_with(), geometry, torch.device(device), exact=exact)
    assert (chosen.sentence, isinstance(chosen.backend, GatherSdpa)) == (sentence, True)
