"""Faults planted in the kernels: the comparison of `test_paged_attention.py` must see each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.replicas.forward import attention_triton, paged_kernels
from samovar.replicas.forward.attention import AttentionForm
from tests.kernels.paged import LONG_AND_SHORT, PagedCase, Shape, planted

pytestmark = pytest.mark.usefixtures("poisoned")

PLAIN, WINDOW = AttentionForm(0.125), AttentionForm(0.125, 33, None, torch.ones(8))
FAULTS = {
    "mask: a row does not see its own token": (
        "numbers[None, :] <= positions",
        "numbers[None, :] < positions",
        PLAIN,
    ),
    "mask: a row sees the next token": (
        "numbers[None, :] <= positions",
        "numbers[None, :] <= 1 + positions",
        PLAIN,
    ),
    "mask: one key too many is seen by all": (
        "seen_by_all = before + first_row + 1",
        "seen_by_all = before + first_row + 2",
        PLAIN,
    ),
    "mask: a slot behind the end is read": (
        "is_there = numbers < keys_end",
        "is_there = numbers <= keys_end",
        PLAIN,
    ),
    "mask: the window is one too wide": (
        "> positions[:, None] - window",
        ">= positions[:, None] - window",
        WINDOW,
    ),
    "mask: the window's first keys are left out": (
        "- window, 0) // BLOCK_N * BLOCK_N",
        "- window, 0) // BLOCK_N * BLOCK_N + BLOCK_N",
        WINDOW,
    ),
    "page: the next token's": (
        "table + numbers // BLOCK_TOKENS",
        "table + (numbers + 1) // BLOCK_TOKENS",
        PLAIN,
    ),
    "page: another slot of it": (
        "numbers % BLOCK_TOKENS) * token_stride",
        "(numbers + 1) % BLOCK_TOKENS) * token_stride",
        PLAIN,
    ),
    "page: the table begins a word later": ("4 * segment + 3)", "4 * segment + 3) + 1", PLAIN),
    "split: runs overlap": (
        "end = tl.minimum(keys_end, first + run)",
        "end = tl.minimum(keys_end, first + run + BLOCK_N)",
        PLAIN,
    ),
    "split: runs end early": (
        "end = tl.minimum(keys_end, first + run)",
        "end = tl.minimum(keys_end, first + run - BLOCK_N)",
        PLAIN,
    ),
    "split: the last one is not merged": ("mask=numbers < splits", "mask=numbers < splits - 1", PLAIN),
    "split: the first one is not merged": (
        "(first + numbers) * kv_heads",
        "(first + numbers + 1) * kv_heads",
        PLAIN,
    ),
    "split: each has the sink": ("if split == 0:", "if split >= 0:", WINDOW),
    "head: a group has its neighbour's K": (
        "kv_head % HEADS_PER_GROUP",
        "(kv_head + 1) % HEADS_PER_GROUP",
        PLAIN,
    ),
    "row: a tile's last one": (
        "tl.minimum(in_segment + ROWS, rows)",
        "tl.minimum(in_segment + ROWS, rows - 1)",
        PLAIN,
    ),
    "int8: V has the scale of K": ("_load_scales(value_scales,", "_load_scales(key_scales,", PLAIN),
}


STEPS = ((127, 1), (30, 9), (0, 17))


def shape_of(fault: str) -> Shape:
    # Of 128 keys in runs of 32 four splits have one each, and of eight the last four are empty.
    splits = 4 if "last one is not merged" in fault else 8 if fault.startswith("split") else 1
    return Shape(splits=splits, is_int8=fault.startswith("int8"))


@pytest.mark.parametrize("form", [PLAIN, WINDOW], ids=["plain", "window"])
@pytest.mark.parametrize("shape", list(dict.fromkeys(map(shape_of, FAULTS))), ids=str)
def test_without_a_fault_there_is_none(shape: Shape, form: AttentionForm) -> None:
    assert PagedCase(shape, STEPS).error(form) <= 1e-6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, put, form = FAULTS[fault]
    plant(find, put, tmp_path, monkeypatch)
    assert not PagedCase(shape_of(fault), STEPS).error(form) <= 1e-2


@pytest.mark.parametrize(
    ("find", "put"),
    [
        ("if splits < 2:  # padding", "if splits < 1:  # padding"),  # merged of what nobody wrote
        ("tl.load(tiles + 4 * tile + 2) + split) * kv_heads", "split) * kv_heads"),
        ("tile, split = tl.load(items + 2 * item),", "tile, split = tl.load(items),"),
    ],
)
def test_a_planted_fault_of_a_recorded_step_is_seen(
    find: str, put: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(find, put, tmp_path, monkeypatch)
    case = PagedCase(Shape(), LONG_AND_SHORT)
    found, _ = case.attend_padded()
    off = (found[: len(case.query)].double() - case.reference()).abs().max().item()
    assert not off <= 1e-2  # NaN is not, either


def plant(find: str, put: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted(paged_kernels, find, put, tmp_path)
    monkeypatch.setattr(attention_triton, "_kernels", lambda: module)
