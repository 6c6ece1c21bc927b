"""K and V in int8: the bytes by a rule that another implementation repeats, where they lie, what is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from samovar.cache_tiers.blocks.extent import BlockShape
from samovar.replicas.forward.attention import AttentionForm, GatherSdpa
from samovar.replicas.forward.inputs import StepPacker
from samovar.replicas.kv.block_io import page_io
from samovar.replicas.kv.kv_pool import CODE_MAX, KvGeometry, KvPool, dequantise, quantise
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk

CPU = torch.device("cpu")
ONE = KvGeometry(layers=3, block_tokens=4, kv_heads=4, head_dim=8, dtype=torch.float32, is_int8=True)
Floats = npt.NDArray[np.float32]
Rule = Callable[[Floats], tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]]


def _bfloat16(values: Floats) -> tuple[npt.NDArray[np.uint16], Floats]:
    """Bits, and what they stand for: to the nearest, halves to even."""
    bits = values.view(np.uint32)
    kept = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return kept, (kept.astype(np.uint32) << 16).view(np.float32)


def rule(
    vectors: Floats,
    *,
    divide_by_rounded: bool = True,
    reciprocal: bool = False,
    halves: Callable[[Floats], Floats] = np.rint,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]:
    """The rule again, in numpy: codes, and the bits of the scales. The options are planted bugs."""
    exact = np.maximum(np.abs(vectors).max(axis=-1) / np.float32(127), np.float32(2.0**-126))
    bits, rounded = _bfloat16(exact.astype(np.float32))
    scale = (rounded if divide_by_rounded else exact)[..., None]
    scaled = vectors * (np.float32(1) / scale) if reciprocal else vectors / scale
    return np.clip(halves(scaled), -127, 127).astype(np.int8), bits


def samples() -> Floats:
    """Vectors as models have them, with outliers; zeros; the smallest and largest; halves between codes."""
    rng = np.random.default_rng(0)
    usual = rng.standard_normal((4000, 64)) * np.exp(rng.normal(0, 2, (4000, 1)))
    usual[::3, 5] *= 30
    odd = np.zeros((4, 64))
    odd[1, 3], odd[2, :], odd[3, 0] = 1e-44, 1e-37, 3e38
    halves = np.arange(1, 256, 2)[:, None] * (np.arange(64) + 0.5)  # by scales that are whole in bfloat16
    halves[:, 0] = np.arange(1, 256, 2) * 127
    return np.concatenate([usual, odd, halves]).astype(np.float32)


def agrees(other: Rule) -> bool:
    vectors = samples()
    codes, scales = quantise(torch.from_numpy(vectors))
    their_codes, their_bits = other(vectors)
    ours = scales.view(torch.int16).numpy().view(np.uint16)
    return np.array_equal(codes.numpy(), their_codes) and np.array_equal(ours, their_bits)


def test_another_implementation_of_the_rule_gives_the_same_bytes() -> None:
    assert agrees(rule)


@pytest.mark.parametrize(
    "bug",
    [
        {"divide_by_rounded": False},  # the scale is not rounded before it divides
        {"halves": lambda values: np.copysign(np.floor(np.abs(values) + np.float32(0.5)), values)},
        {"reciprocal": True},  # as CUDA divides by a Python number
    ],
    ids=["scale not rounded", "halves away from zero", "reciprocal"],
)
def test_what_breaks_the_rule_is_seen(bug: dict[str, object]) -> None:
    assert not agrees(lambda vectors: rule(vectors, **bug))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_half_a_code_from_what_was_written(dtype: torch.dtype) -> None:
    vectors = torch.from_numpy(samples()[:4000]).clamp(-6e4, 6e4).to(dtype)
    codes, scales = quantise(vectors)
    read = dequantise(codes, scales, dtype)
    assert read.dtype == dtype
    exact = codes.double() * scales.double().unsqueeze(-1)
    assert torch.equal(read, exact.to(dtype)), "it is rounded once"
    apart = (exact - vectors.double()).abs() / scales.double().unsqueeze(-1)
    assert apart.max() <= 0.5 + 1e-5
    assert codes.abs().max() == CODE_MAX


def test_zeros_are_read_as_zeros_and_what_is_no_number_as_none() -> None:
    vectors = torch.randn(4, 16)
    vectors[0], vectors[1, 3], vectors[2, 3] = 0.0, torch.nan, torch.inf
    read = dequantise(*quantise(vectors), torch.float32)
    assert (read[0] == 0).all()
    assert read[1].isnan().all()
    assert read[2].isnan().any()
    assert read[3].isfinite().all()


# -- in a block ----------------------------------------------------------------------------------


def written(geometry: KvGeometry, pages: int = 5) -> tuple[KvPool, torch.Tensor]:
    """A pool with 7 tokens in pages 3 and 1, and what was written: `[layers, 2, 7, kv_heads, head_dim]`."""
    pool = KvPool(geometry, pages, CPU)
    slots = (torch.tensor([3] * 4 + [1] * 3), torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    shape = (geometry.layers, 2, 7, geometry.kv_heads, geometry.head_dim)
    kv = torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).float().view(shape) * 3
    for layer in range(geometry.layers):
        # As transformers hands them over: the heads are not contiguous.
        keys, values = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in kv[layer])
        pool.layer(layer).write(slots, keys.to(geometry.dtype), values.to(geometry.dtype))
    return pool, kv


@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_is_all_its_codes_and_then_all_its_scales(groups: int) -> None:
    geometry = replace(ONE, groups=groups)
    pool, kv = written(geometry)
    codes, scales = quantise(kv)
    heads = 4 // groups
    for group in range(groups):
        block = pool.page_bytes[3].view(groups, -1)[group]
        mine = slice(group * heads, (group + 1) * heads)
        split = 3 * 2 * 4 * heads * 8
        assert split % 16 == 0
        assert torch.equal(block[:split].view(torch.int8), codes[:, :, :4, mine].flatten())
        assert torch.equal(block[split:].view(torch.bfloat16), scales[:, :, :4, mine].flatten())
    expected = dequantise(codes, scales, torch.float32)
    assert torch.equal(pool.gather([3, 1], 7), expected)
    assert torch.equal(pool.layer(2).as_stored(kv[2, 1]), expected[2, 1])
    assert not pool.page_bytes[[0, 2, 4]].any()
    assert geometry.record_shape == BlockShape(3 * groups, 4 * 2 * 4 * 10 // groups, 4)


def test_the_bytes_of_a_block_are_the_same_for_ever() -> None:
    """The digest was taken when the format was new: what is stored since then must still be found."""
    pool, _ = written(ONE)
    assert hashlib.sha256(pool.page_bytes.numpy().tobytes()).hexdigest() == (
        "b197c29ddf16957f0fa2c33f68f5397de61110d310c3cc9508da14f68c2dba02"
    )
    assert ONE.layout == "block-major-1 int8"
    assert replace(ONE, groups=2).layout == "block-major-1 groups 2 int8"


@pytest.mark.parametrize(("head_dim", "share"), [(64, 0.516), (128, 0.508)])
def test_blocks_are_about_half_of_sixteen_bits(head_dim: int, share: float) -> None:
    wide = KvGeometry(30, 16, 4, head_dim, torch.bfloat16)
    narrow = replace(wide, is_int8=True, groups=2)
    assert narrow.block_bytes / wide.block_bytes == pytest.approx(share, abs=5e-4)
    assert narrow.block_bytes == narrow.bytes_per_token * 16 == 30 * 2 * 4 * (head_dim + 2) * 16
    assert KvPool(narrow, 3, CPU).page_bytes.shape == (3, narrow.block_bytes)


def test_parts_that_would_not_be_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiples of 16"):
        KvGeometry(1, 4, 1, 7, torch.float32, is_int8=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_pages_move_and_are_copied_with_their_scales(groups: int) -> None:
    pool, _ = written(replace(ONE, groups=groups))
    before = pool.gather([3, 1], 7)
    io = page_io(pool)
    out = np.empty(2 * pool.geometry.block_bytes, dtype=np.uint8)
    io.begin_out([3, 1], out, io.mark()).wait()
    io.begin_in(out, [2, 4], io.mark()).wait()
    assert torch.equal(pool.gather([2, 4], 7), before)
    pool.copy_page(3, 0)
    assert torch.equal(pool.gather([0, 1], 7), before)


@pytest.mark.parametrize("groups", [1, 2])
def test_slots_behind_the_last_token_are_blanked_scales_and_all(groups: int) -> None:
    pool, _ = written(replace(ONE, groups=groups))
    pool.geometry.blank_behind(pool.page_bytes[3].numpy(), 2)
    assert pool.scales is not None
    for part in (pool.data[3], pool.scales[3]):  # [groups, layers, 2, block_tokens, ...]
        assert part[:, :, :, :2].any()
        assert not part[:, :, :, 2:].any()


# -- the law: everybody attends to what is stored ---------------------------------------------------


def attended(cut: list[int], exact: bool, query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The outputs of 7 tokens that are computed in chunks of these sizes."""
    layer, backend = KvPool(ONE, 5, CPU).layer(0), GatherSdpa(exact, torch.float32)
    packer = StepPacker(CPU, ONE.block_tokens, rows_multiple=1)
    sequence, out, start = bare_sequence([0] * 8, [3, 1]), [], 0
    for count in cut:
        inputs, rows = packer.pack([Chunk(sequence, start, count)]), slice(start, start + count)
        keys, values = kv[:, rows]
        layer.write(inputs.slot_index(), keys, values)
        meta = backend.prepare(inputs)
        out.append(backend.attend(query[rows], keys, values, layer, meta, AttentionForm(0.4)))
        start += count
    return torch.cat(out)


@pytest.mark.parametrize("exact", [True, False])
def test_a_whole_prompt_attends_to_what_its_chunks_read(exact: bool) -> None:
    """Raw K and V of a prompt's own tokens are a hundredth away from that: see the next test."""
    query, kv = torch.randn(7, 8, 8), torch.randn(2, 7, 4, 8)
    whole, *others = (attended(cut, exact, query, kv) for cut in ([7], [4, 3], [1] * 7))
    for other in others:
        torch.testing.assert_close(other, whole, atol=1e-5, rtol=0)


def test_raw_keys_and_values_of_the_steps_own_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.replicas.kv.kv_pool.LayerKv.as_stored", lambda _, vectors: vectors)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_a_whole_prompt_attends_to_what_its_chunks_read(False)
