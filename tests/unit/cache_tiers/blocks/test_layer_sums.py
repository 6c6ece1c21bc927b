"""The checksums of layers: the same bits however they are computed, and other ones for other bytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import record as records
from samovar.cache_tiers.blocks.compiled_sums import THREAD_BYTES_MIN, CompiledSums
from samovar.cache_tiers.blocks.extent import BlockShape, Bytes, Checksums
from samovar.cache_tiers.blocks.record import (
    PIECE_BYTES,
    Sums,
    SumsSetup,
    Words,
    compile_sums,
    plain_sums,
)
from samovar.configs.compiled import SUMS, LibrarySource, NotCompiled, compiled_library
from samovar.configs.settings import Settings
from tests.support.nodes.damages import damages

M64 = 2**64 - 1


def by_definition(layer: bytes, seed: int, number: int) -> int:
    """The module's docstring, word by word."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
        return z ^ z >> 31

    step = 0x9E3779B97F4A7C15
    key = [mix((i + 1) * step & M64) for i in range(1024)]
    seed = mix(seed ^ mix(number << 32 | len(layer)))
    total = 0
    for p in range(-(-len(layer) // 4096)):
        piece = layer[p * 4096 : (p + 1) * 4096]
        sums = [0, 0]
        for i in range(-(-len(piece) // 8)):
            word = int.from_bytes(piece[i * 8 : i * 8 + 8], "little")
            for which in (0, 1):
                k = key[i + 512 * which]
                low, high = (word + k) & 0xFFFFFFFF, ((word >> 32) + (k >> 32)) & 0xFFFFFFFF
                sums[which] = sums[which] + low * high & M64
        tagged = sums[0] ^ (seed + (p + 1) * step & M64)
        total = total + mix(mix(tagged) + sums[1] & M64) & M64
    return total


def library(*flags: str) -> Path:
    source = replace(SUMS, flags=(*SUMS.flags, *flags))
    try:
        return compiled_library(source, Settings().native_dir, wait_s=600)
    except NotCompiled as why:
        pytest.skip(str(why))


@pytest.fixture(params=["numpy", "compiled", "compiled without vectors", "compiled, 3 threads"])
def compute(request: pytest.FixtureRequest) -> Sums:
    if request.param == "numpy":
        return plain_sums
    flags = ("-DSAMOVAR_PLAIN",) if "without" in request.param else ()
    return CompiledSums(library(*flags), 3 if "3" in request.param else 1)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_here", [plain_sums])


def of(compute: Sums, payload: Bytes, seeds: list[int], shape: BlockShape) -> list[list[int]]:
    sums = np.zeros((len(seeds), shape.layers), np.uint64)
    compute(payload, np.array(seeds, np.uint64), shape, sums)
    found: list[list[int]] = sums.tolist()
    return found


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("layer_bytes", [1, 7, 8, 40, 4095, 4096, 4097, 4104, 12000])
def test_they_are_as_the_docstring_says(compute: Sums, layer_bytes: int) -> None:
    shape, seeds = BlockShape(2, layer_bytes, 16), [0, M64, 0x0123456789ABCDEF]
    payload = random_bytes(len(seeds) * shape.block_bytes)
    layers = payload.reshape(len(seeds), 2, layer_bytes)
    assert of(compute, payload, seeds, shape) == [
        [by_definition(layers[block, layer].tobytes(), seed, layer) for layer in (0, 1)]
        for block, seed in enumerate(seeds)
    ]


def test_the_definition_does_not_change_by_accident(compute: Sums) -> None:
    shape = BlockShape(3, 3 * PIECE_BYTES + 21, 16)
    payload = (np.arange(2 * shape.block_bytes, dtype=np.int64) * 7 % 251).astype(np.uint8)
    found = np.array(of(compute, payload, [5, M64 - 5], shape), np.uint64)
    assert hashlib.sha256(found.astype("<u8").tobytes()).hexdigest() == GOLDEN


GOLDEN = "6552ac37a3104601c59150db97af1581cd7d646a506ee2b61c09d8cfb78da2f0"


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    blocks=st.integers(1, 5),
    layers=st.integers(1, 7),
    layer_bytes=st.one_of(st.integers(1, 200), st.integers(4000, 13000)),
    fill=st.one_of(st.integers(0, 2**32), st.sampled_from([b"\0", b"\xff", b"\0\0\0\x80"])),
    first=st.integers(0, 9),
    threads=st.integers(1, 9),
    data=st.data(),
)
def test_all_ways_have_the_same_bits(
    blocks: int,
    layers: int,
    layer_bytes: int,
    fill: int | bytes,
    first: int,
    threads: int,
    data: st.DataObject,
) -> None:
    shape = BlockShape(layers, layer_bytes, 16)
    size = blocks * shape.block_bytes
    if isinstance(fill, int):
        memory = random_bytes(first + size, fill)
    else:
        memory = np.resize(np.frombuffer(fill, np.uint8), first + size)
    payload = memory[first:]  # wherever it begins
    seeds = [data.draw(st.integers(0, M64)) for _ in range(blocks)]
    assert of(CompiledSums(library(), threads), payload, seeds, shape) == of(
        plain_sums, payload, seeds, shape
    )


def test_many_threads_compute_what_one_does() -> None:
    """More of them than rows, and rows that they do not share evenly."""
    shape, seeds = BlockShape(7, 8 * THREAD_BYTES_MIN // 7, 16), [3]
    payload = random_bytes(shape.block_bytes)
    alone = of(CompiledSums(library(), 1), payload, seeds, shape)
    assert all(of(CompiledSums(library(), n), payload, seeds, shape) == alone for n in (2, 3, 8, 64))


SHAPE = BlockShape(3, 3 * PIECE_BYTES + 8 * 101, 16)


@pytest.mark.parametrize(
    "payload", [random_bytes(2 * SHAPE.block_bytes), np.zeros(2 * SHAPE.block_bytes, np.uint8)]
)
def test_g5_each_damage_is_seen_blamed_on_its_layers_and_no_two_are_one(
    compute: Sums, payload: Bytes
) -> None:
    """Flips, swaps, zeros, inversions; those that a sum of words would not see among them."""
    seeds = [7, 8]
    sealed = np.array(of(compute, payload, seeds, SHAPE), np.uint64)
    seen = {sealed.tobytes()}
    for name, damaged in damages(payload, SHAPE):
        found = np.array(of(compute, damaged, seeds, SHAPE), np.uint64)
        changed = (damaged != payload).reshape(2, SHAPE.layers, -1).any(axis=2)
        assert np.array_equal(found != sealed, changed), name
        assert found.tobytes() not in seen, name
        seen.add(found.tobytes())
    assert len(seen) > 500


def test_g1_zeros_are_other_zeros_elsewhere(compute: Sums) -> None:
    """Pieces, layers, blocks and sizes: what is the same everywhere has a checksum of its place."""
    found = [
        one
        for size in (8, 16, PIECE_BYTES, 2 * PIECE_BYTES)
        for block in of(compute, np.zeros(4 * 3 * size, np.uint8), [0, 1, 2, 2**63], BlockShape(3, size, 16))
        for one in block
    ]
    assert len(set(found)) == len(found) == 4 * 12


def test_keys_differ_in_both_halves() -> None:
    """Or a word whose other half is what cancels a key would not be seen by either sum."""
    first, second = records.piece_keys()
    assert (first != second).all()
    assert len({*first.ravel().tolist(), *second.ravel().tolist()}) == first.size + second.size


def test_a_half_that_a_key_cancels_is_seen_by_the_other_sum(compute: Sums) -> None:
    """The weakness of one product: (low + key) * 0 is 0, whatever low is."""
    shape = BlockShape(1, 64, 1)
    for keys in records.piece_keys():
        cancelled = np.zeros((8, 2), np.uint32)
        cancelled[:, 1] = -keys[:8, 1]
        other = cancelled.copy()
        other[3, 0] ^= 1
        sums = {of(compute, one.view(np.uint8).ravel(), [1], shape)[0][0] for one in (cancelled, other)}
        assert len(sums) == 2


def test_only_blocks_in_one_run_have_checksums() -> None:
    shape, keys = BlockShape(1, 40, 16), [b"k" * 32, b"l" * 32]
    payload = random_bytes(160)
    assert records.layer_sums(payload[:80], keys, shape).shape == (2, 1)
    assert records.layer_sums(payload[:0], [], shape).shape == (0, 1)
    for wrong in (payload[:79], payload[:80].view(np.int8), payload[:80].reshape(2, 40), payload[::2]):
        with pytest.raises(ValueError, match=r"."):
            records.layer_sums(wrong, keys, shape)


@pytest.mark.usefixtures("nothing_compiled")
def test_the_library_serves_where_it_is_compiled(tmp_path: Path) -> None:
    library()
    before = records.layer_sums(random_bytes(80), [b"k" * 32, b"l" * 32], BlockShape(1, 40, 16))
    found = compile_sums(SumsSetup(tmp_path / "native", 600.0, 4))
    assert found is not None
    assert isinstance(records._here[0], CompiledSums)
    after = records.layer_sums(random_bytes(80), [b"k" * 32, b"l" * 32], BlockShape(1, 40, 16))
    assert np.array_equal(before, after)
    made = found.stat().st_mtime_ns
    assert compile_sums(SumsSetup(tmp_path / "native", 600.0, 4)) == found
    assert found.stat().st_mtime_ns == made


@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_numpy_serves_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compile_sums(SumsSetup(tmp_path / "native", 60.0, 4)) is None
    assert "computed by numpy" in caplog.text
    assert "no C++ compiler on the PATH" in caplog.text
    payload = random_bytes(80)
    found = records.layer_sums(payload, [b"k" * 32, b"l" * 32], BlockShape(1, 40, 16))
    assert found[0, 0] == by_definition(payload[:40].tobytes(), int.from_bytes(b"k" * 8, "little"), 0)


@pytest.mark.parametrize(
    ("find", "put"),
    [
        ("0xbf58476d1ce4e5b9", "0xbf58476d1ce4e5bb"),
        ("kKeys[words + kPieceWords]", "kKeys[words]"),
        ("start += kPiece", "start += 2 * kPiece"),
        ("seed += kStep;", ""),
        ("row % layers", "0l"),
        ("products(four, &kKeys[at + kPieceWords])", "products(four, &kKeys[at])"),
        ("_mm256_srli_epi64(keyed, 32)", "_mm256_srli_epi64(keyed, 31)"),
    ],
)
def test_a_library_with_other_bits_is_not_taken(tmp_path: Path, find: str, put: str) -> None:
    """A planted bug, or a compiler's: what it seals, no other machine would read."""
    library()
    text = SUMS.files[0].read_text()
    assert text.count(find) == 1
    planted = tmp_path / "planted.cpp"
    planted.write_text(text.replace(find, put))
    made = compiled_library(LibrarySource("planted", (planted,), SUMS.flags), tmp_path, wait_s=600)
    with pytest.raises(NotCompiled, match="other bits"):
        CompiledSums(made, 1)


PLANTED: dict[str, Sums] = {}
"""Weaker checksums, which the planted damages must tell from a right one."""


def planted(compute: Sums) -> Sums:
    PLANTED[compute.__name__] = compute  # type: ignore[attr-defined]
    return compute


@planted
def of_words_alone(payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
    words = payload[: len(payload) // 8 * 8].view(np.uint64).reshape((*sums.shape, -1))
    sums[:] = records.mixed(words.sum(axis=2, dtype=np.uint64) ^ seeds[:, None])


@planted
def of_the_first_piece(payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
    heads = np.ascontiguousarray(payload.reshape(-1, shape.layer_bytes)[:, :PIECE_BYTES]).ravel()
    plain_sums(heads, seeds, BlockShape(shape.layers, PIECE_BYTES, 16), sums)


@planted
def without_the_layer(payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
    rows = BlockShape(1, shape.layer_bytes, 16)
    plain_sums(payload, np.repeat(seeds, shape.layers), rows, sums.reshape(-1, 1))


@planted
def of_bytes_in_any_order(payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
    ordered = np.sort(payload.reshape(-1, shape.layer_bytes), axis=1).ravel()
    plain_sums(ordered, seeds, shape, sums)


@pytest.mark.parametrize("name", PLANTED)
def test_a_weaker_checksum_fails_these_laws(name: str) -> None:
    def laws() -> None:
        payload = random_bytes(2 * SHAPE.block_bytes)
        test_g5_each_damage_is_seen_blamed_on_its_layers_and_no_two_are_one(PLANTED[name], payload)
        test_g1_zeros_are_other_zeros_elsewhere(PLANTED[name])

    with pytest.raises(AssertionError):
        laws()
