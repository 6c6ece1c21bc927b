"""Which attention serves, and what the kernel's backend launches: decided without triton and a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from samovar.replicas.forward import attention, attention_choice
from samovar.replicas.forward.attention import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionForm,
    GatherSdpa,
    PagedStep,
    pieces_of,
    register,
)
from samovar.replicas.forward.attention_choice import (
    SCORES_BYTES,
    ChosenAttention,
    attention_forms,
    choose_attention,
    prefer,
)
from samovar.replicas.forward.attention_triton import TileShape, TritonPaged, Unserved, tile_shapes
from samovar.replicas.forward.inputs import (
    Segment,
    StepInputs,
    StepPacker,
    StepShape,
    TilePlaces,
    Tiling,
    splits_of,
)
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.model.spec import SERVED_TYPES
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk
from tests.support.engines.tiny_models import WINDOWED, Family, tiny_config

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


@pytest.mark.parametrize("is_windowed", [False, True], ids=["", "window"])
@pytest.mark.parametrize("family", SERVED_TYPES)
def test_what_is_compared_is_what_layers_ask_for(family: Family, is_windowed: bool) -> None:
    """Some scales are not the root of the head's size, and some windows are told by the layer alone."""
    if is_windowed and family not in WINDOWED:
        pytest.skip("it has no members with a window and without")
    asked = set[tuple[float, int | None]]()

    class Told:
        name, tiling = "told", None

        def write(self, *_: object) -> None:
            pass

        def attend(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
            asked.add((rest[-1].scale, rest[-1].window))
            return query

        def layer(self, number: int) -> None:
            return None

    register()
    config: Any = tiny_config(family, window=is_windowed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    ids, told = torch.arange(3)[None], Told()
    with torch.inference_mode():
        model.base_model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            step=PagedStep(told, None, told),  # type: ignore[arg-type]
        )
    forms = {(form.scale, form.window) for form in attention_forms(model, 16)}
    assert asked <= forms
    # Besides, each scale without a window; what no layer asks for might compute nothing.
    assert {scale for scale, _ in forms} == {scale for scale, _ in asked}
    assert {window for _, window in forms} <= {None, *(window for _, window in asked)}
    assert ({scale for scale, _ in asked} == {0.2}) == (family == "granite")
    windows = getattr(config, "layer_types", None) or ()
    assert not is_windowed or "sliding_attention" not in windows or any(window for _, window in asked)


SHAPES = [(0, 90), (37, 50), (80, 1), (300, 64), (5, 2)]
"""(context before, new tokens): whole prompts, chunks, a decode."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "form",
    [AttentionForm(0.25), AttentionForm(0.25, 24), AttentionForm(0.3, 24, 5.0, torch.ones(4))],
    ids=["plain", "window", "window, cap and sinks"],
)
def test_a_chunk_of_some_rows_at_a_time_is_the_whole_chunk(form: AttentionForm, dtype: torch.dtype) -> None:
    geometry = KvGeometry(1, 16, 2, 16, dtype)
    pool = KvPool(geometry, 150, CPU)
    pool.layer(0).keys.copy_(torch.randn(pool.layer(0).keys.shape))
    pool.layer(0).values.copy_(torch.randn(pool.layer(0).values.shape))
    chunks = [
        Chunk(bare_sequence([1] * (past + new), list(range(number, 150, len(SHAPES)))[1:]), past, new)
        for number, (past, new) in enumerate(SHAPES)
    ]
    inputs = StepPacker(CPU, 16).pack(chunks)
    rows = inputs.shape.rows
    query, key, value = (torch.randn(rows, heads, 16).to(dtype) for heads in (4, 2, 2))
    found = []
    for scores_max in (None, 1000):
        backend = GatherSdpa(False, dtype, scores_max=scores_max)
        meta = backend.prepare(inputs)
        backend.write(pool.layer(0), key, value, meta)
        found.append(backend.attend(query, key, value, pool.layer(0), meta, form).float())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=tolerance)


def test_a_chunk_behind_128k_tokens_is_cut_to_the_scores_that_fit() -> None:
    segment = Segment(row=10, count=8192, start=131_072 - 8192, table=1, blocks=8192)
    pieces = pieces_of(segment, 16, SCORES_BYTES // (4 * 32))
    assert all(one.count * one.context * 4 * 32 <= SCORES_BYTES for one in pieces)
    assert [one.row for one in pieces] == list(range(10, 10 + 8192, pieces[0].count))
    assert [one.start for one in pieces[1:]] == [one.context for one in pieces[:-1]]
    assert (pieces[-1].context, pieces[-1].blocks) == (131_072, 8192)
    assert pieces_of(segment, 16, None) == [segment]
    assert len(pieces) <= 128


def test_the_fallback_of_a_gpu_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "prefer", lambda find, fallback: ChosenAttention(fallback, ""))
    model, geometry = model_with(num_attention_heads=32), KvGeometry(1, 16, 8, 16, torch.bfloat16)
    for device, is_bounded in (("cuda", True), ("cpu", False)):
        chosen = choose_attention(model, geometry, torch.device(device), exact=False)
        with monkeypatch.context() as watched:
            asked = Mock(side_effect=pieces_of)
            watched.setattr(attention, "pieces_of", asked)
            chosen.backend.prepare(inputs_of((30, 20))).of(None)
        assert (asked.call_args.args[-1] is not None) == is_bounded


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
