"""The native step is right, and has the same bits however it is computed; planted faults are seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from samovar.configs.compiled import AVX2, AVX512, INT8_FLAGS, PAIR_FLAGS
from samovar.replicas.engine.audit import Probe
from samovar.replicas.forward.plain import PlainModel
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.native.build import variant_here
from samovar.replicas.native.native_step import NativeStep, NotNative
from tests.support.engines.native_steps import CPU, StepBench, library, pair_library, same, variants_here
from tests.support.engines.plain_models import Shape, in_int8, random_plain, reference

DTYPES = [torch.bfloat16, torch.float32]
IDS = ["bf16", "fp32"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What numbers are, and how far off what is computed may be. `of_kv`, `of_logits`: of the largest."""

    dtype: torch.dtype
    has_pairs: bool
    of_logits: float
    of_kv: float

    @property
    def library(self) -> Path:
        return pair_library(self.dtype) if self.has_pairs else library(self.dtype)


# In bfloat16 a number of K or V may be rounded to the other side, and what follows with it.
KINDS = [
    Kind(torch.bfloat16, False, 1e-2, 2e-2),
    Kind(torch.float32, False, 1e-5, 1e-5),
    Kind(torch.bfloat16, True, 3e-2, 3e-2),
]
KIND_IDS = [*IDS, "bf16 pairs"]
SHAPES = {
    "plain": Shape(),
    "biases, groups of 8": Shape(q_heads=8, kv_heads=1, head_dim=80, hidden=100, has_biases=True),
    "head norms, no groups": Shape(q_heads=2, kv_heads=2, head_dim=128, has_head_norms=True, inner=75),
    "multipliers": Shape(q_heads=6, kv_heads=2, multiplier=1.5),
    "window": Shape(window=41, vocab=300),
}
CHUNKINGS = [[45, 1, 80, 24], [1] * 150, [7, 13, 12, 6, 112], [128, 22], [149, 1]]


def tokens_of(count: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


@pytest.fixture(params=DTYPES, ids=IDS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=KINDS, ids=KIND_IDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_chunks_batch_blocks_or_threads(shape: Shape, kind: Kind) -> None:
    plain, of = random_plain(shape, kind.dtype), kind.library
    tokens = tokens_of(150, shape.vocab)
    truth = StepBench(plain, of=of).one(tokens)
    others = [tokens_of(length, shape.vocab, length) for length in (1, 33, 70)]
    for threads in (1, 2, 4):
        for block_tokens, groups in ((16, shape.kv_heads), (32, 1), (64, 1)):
            bench = StepBench(plain, threads=threads, block_tokens=block_tokens, groups=groups, of=of)
            for chunks in CHUNKINGS[threads - 1 :: 2]:
                assert same(bench.one(tokens, chunks), truth), (threads, block_tokens, chunks)
            beside = bench.compute(
                [others[0], tokens, *others[1:]], [[1, 90, 33, 0], [0, 1, 0, 40], [0, 59, 0, 30]]
            )
            assert same(beside[1], truth), (threads, block_tokens)
            assert same(beside[3], bench.one(others[2])), (threads, block_tokens)


def test_bits_are_the_same_with_other_instructions(kind: Kind) -> None:
    shape = SHAPES["biases, groups of 8"]
    plain, tokens = random_plain(shape, kind.dtype), tokens_of(150, shape.vocab)
    truth = StepBench(plain, of=kind.library).one(tokens)
    for variant in variants_here()[1:]:
        bench = StepBench(plain, of=library(kind.dtype, variant, PAIR_FLAGS if kind.has_pairs else ()))
        assert all(same(bench.one(tokens, chunks), truth) for chunks in ([150], [140] + [1] * 10)), variant


def _drawn_shape(generator: torch.Generator) -> tuple[Shape, int, int]:
    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    kv_heads = pick(1, 2, 3)
    shape = Shape(
        q_heads=kv_heads * pick(1, 2, 3, 4, 5, 8),
        kv_heads=kv_heads,
        head_dim=pick(64, 80, 128),
        hidden=pick(64, 96, 131),
        inner=pick(64, 90, 200),
        vocab=pick(33, 64, 150),
        has_biases=bool(pick(0, 1)),
        has_head_norms=bool(pick(0, 1)),
    )
    if pick(0, 0, 1):
        shape = dataclasses.replace(shape, window=pick(1, 31, 32, 50, 300))
    return shape, pick(1, 2, 11, 12, 13, 31, 32, 33, 64, 100, 333, 600), pick(16, 32, 64)


@pytest.mark.parametrize("seed", range(16))
def test_numbers_are_those_of_float64(seed: int, kind: Kind) -> None:
    """Of shapes drawn at random: rows 1 to 600, widths of heads, groups, blocks, windows; in chunks, too."""
    shape, count, block_tokens = _drawn_shape(torch.Generator().manual_seed(seed))
    plain, tokens = random_plain(shape, kind.dtype, seed), tokens_of(count, shape.vocab, seed)
    logits, kv = reference(plain, tokens)
    bench = StepBench(plain, block_tokens=block_tokens, threads=2, of=kind.library)
    ours = bench.one(tokens)
    off = (ours[0] - logits).abs().max().item() / logits.abs().max().item()
    assert off < kind.of_logits, (shape, count)
    differs = (ours[1].double() - kv.double()).abs().max().item() / kv.double().abs().max().item()
    assert differs < kind.of_kv, (shape, count)
    if count > 2:
        assert same(bench.one(tokens, [count // 3, 1, count - count // 3 - 1]), ours), (shape, count)


@pytest.mark.parametrize("seed", range(4))
def test_weights_in_int8_are_rounded_once(seed: int, dtype: torch.dtype) -> None:
    shape, count, block_tokens = _drawn_shape(torch.Generator().manual_seed(100 + seed))
    plain, tokens = random_plain(shape, dtype, seed), tokens_of(count, shape.vocab, seed)
    logits, _ = reference(in_int8(plain), tokens)
    bench = StepBench(plain, block_tokens=block_tokens, of=library(dtype, more_flags=INT8_FLAGS))
    ours = bench.one(tokens)
    off = (ours[0] - logits).abs().max().item() / logits.abs().max().item()
    assert off < (1e-5 if dtype == torch.float32 else 1e-2), (shape, count)
    narrow = StepBench(plain, threads=2, of=library(dtype, AVX2, INT8_FLAGS))
    for chunks in ([count], [1] * min(count, 20) + [count - 20] * (count > 20)):
        assert same(bench.one(tokens, chunks), ours), (shape, chunks)
        if variant_here() == AVX512:
            assert same(narrow.one(tokens, chunks), ours), (shape, chunks)


COMPANY = [(tokens_of(150, 71), 0), (tokens_of(40, 71, 1), 39), (tokens_of(90, 71, 2), 50), ([5], 0)]
"""Sequences, and how many of their tokens earlier steps have computed."""
ROWS = sum(len(tokens) - done for tokens, done in COMPANY)
WANTED = {
    "none": [],
    "one": [149],
    "the last of each": [149, 150, 190, 191],
    "the first": [0],
    "runs": [*range(3, 60), 62, *range(100, 191)],
    "all": list(range(ROWS)),
}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_wanted_rows_have_the_bits_that_they_have_among_all(
    shape: Shape, wanted: list[int], kind: Kind
) -> None:
    """Behind the last layer's K and V only they are computed; K and V are those of all rows."""
    plain = random_plain(shape, kind.dtype)
    sequences = [([token % shape.vocab for token in tokens], done) for tokens, done in COMPANY]
    whole, kv = StepBench(plain, of=kind.library).hidden(sequences, None)
    for threads in (1, 2, 4):
        ours, kv_too = StepBench(plain, threads=threads, of=kind.library).hidden(sequences, wanted)
        assert torch.equal(ours[wanted], whole[wanted])
        assert torch.equal(kv_too, kv)
        rest = [row for row in range(ROWS) if row not in wanted]
        assert ours[rest].isnan().all(), "a row that was not computed must not look like one"


def test_another_row_than_the_wanted_one_is_seen() -> None:
    """Planted: what has been computed up to the last layer is taken from the row before."""
    plain = random_plain(Shape(), torch.bfloat16)
    whole, _ = StepBench(plain).hidden(COMPANY, None)
    faulty = library(torch.bfloat16, more_flags=("-O1", "-DSAMOVAR_FAULT=4"))
    ours, _ = StepBench(plain, of=faulty).hidden(COMPANY, WANTED["one"])
    assert not torch.equal(ours[149], whole[149])


@pytest.mark.parametrize("wanted", [[1, 0], [3, 3], [-1], [ROWS], [0, ROWS]], ids=str)
def test_wanted_rows_that_are_none_are_refused(wanted: list[int]) -> None:
    with pytest.raises(RuntimeError, match="a wanted row"):
        StepBench(random_plain(Shape(), torch.bfloat16)).hidden(COMPANY, wanted)


FAULTS = {
    "an FMA order": (library, "-DSAMOVAR_FAULT=1"),
    "an order of pairs": (pair_library, "-DSAMOVAR_FAULT=1"),
    "a block of keys": (library, "-DSAMOVAR_FAULT=2"),
}


@pytest.mark.parametrize(("compiled", "flag"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_seen(compiled: Callable[..., Path], flag: str) -> None:
    """One tile's last two products change places; two blocks of keys do, for all but decodes."""
    plain, tokens = random_plain(Shape(), torch.bfloat16), tokens_of(150, 71)
    bench = StepBench(plain, of=compiled(torch.bfloat16, more_flags=("-O1", flag)))
    truth = bench.one(tokens)
    assert not all(same(bench.one(tokens, chunks), truth) for chunks in CHUNKINGS)


def test_a_cpu_whose_dot_products_are_others_is_refused() -> None:
    """Its bits would be no other CPU's, under one namespace: planted, it adds the first product first."""
    plain = random_plain(Shape(), torch.bfloat16)
    with pytest.raises(NotNative, match="dot products in bf16 have other bits"):
        NativeStep(plain, pair_library(more_flags=("-O1", "-DSAMOVAR_FAULT=3")), 1)


@pytest.mark.skipif(variant_here() != AVX512, reason="compares AVX-512 and AVX2")
def test_fused_additions_in_one_variant_are_seen() -> None:
    plain, tokens = random_plain(Shape(multiplier=1.5), torch.bfloat16), tokens_of(150, 71)
    fused = library(torch.bfloat16, AVX2, ("-ffp-contract=fast",))
    assert not same(StepBench(plain, of=fused).one(tokens), StepBench(plain).one(tokens))


@pytest.mark.parametrize(
    ("has_pairs", "expected"),
    [(False, [-394311636374, -538492]), (True, [-392062411966, -606407])],
    ids=["float", "pairs"],
)
def test_bits_are_those_of_this_version(has_pairs: bool, expected: list[int]) -> None:
    """If these change, stored blocks are others: a new `BITS_VERSION`."""
    plain, tokens = random_plain(SHAPES["plain"], torch.bfloat16), tokens_of(70, 71)
    logits, kv = StepBench(plain, of=pair_library() if has_pairs else None).one(tokens)
    sums = [int(part.view(kind).long().sum()) for part, kind in ((logits, torch.int32), (kv, torch.int16))]
    assert sums == expected


def test_a_head_that_is_the_embedding_is_held_once(kind: Kind) -> None:
    """Steps read it from the packed head: the same bits, and nobody needs the other copy."""
    plain = random_plain(Shape(vocab=70), kind.dtype)
    tied = dataclasses.replace(plain, head=plain.embedding)
    twice = dataclasses.replace(plain, head=plain.embedding.clone())
    benches = [StepBench(one, of=kind.library) for one in (twice, tied)]
    tied.embedding.zero_()
    tokens = tokens_of(90, 70)
    twice_whole, once = (bench.one(tokens, [60, 30]) for bench in benches)
    assert not same(once, twice_whole), "this one reads what was zeroed"
    plain = random_plain(Shape(vocab=70), kind.dtype)
    truth = StepBench(dataclasses.replace(plain, head=plain.embedding.clone()), of=kind.library).one(tokens)
    assert same(once, truth)


def test_numbers_of_rows_may_be_of_any_kind() -> None:
    step = StepBench(random_plain(Shape(), torch.float32)).step
    hidden = torch.randn((1, 5, step.hidden), generator=torch.Generator().manual_seed(0))
    truth = step.logits(hidden, torch.tensor([4, 0, 2], dtype=torch.int32))
    assert not torch.equal(truth[0], truth[1])
    strided = torch.tensor([4, 9, 0, 9, 2, 9], dtype=torch.int32)[::2]
    for rows in (torch.tensor([4, 0, 2]), strided):
        assert torch.equal(step.logits(hidden, rows), truth)
    assert torch.equal(step.logits(hidden[0], strided, 2), truth[:2])
    assert step.logits(hidden, strided, 0).shape == (0, step.vocab)


def test_a_probe_of_two_layers_sees_an_order_that_depends_on_the_batch() -> None:
    plain = random_plain(Shape(layers=6), torch.float32)
    geometry = KvGeometry(2, 16, plain.kv_heads, plain.head_dim, torch.float32)

    def is_exact(of: Path) -> bool:
        step = NativeStep(plain, of, 1)
        return Probe(None, geometry, plain.vocab, CPU, partial(step.on, layers=2), False).run(64).exact

    assert is_exact(library(torch.float32))
    assert not is_exact(library(torch.float32, more_flags=("-O1", "-DSAMOVAR_FAULT=1")))


def test_what_is_out_of_bounds_is_refused() -> None:
    plain = random_plain(Shape(), torch.float32)
    bench = StepBench(plain)
    with pytest.raises(RuntimeError, match="a token is none of the vocabulary's"):
        bench.one([71])
    with pytest.raises(RuntimeError, match="a row of the logits"):
        bench.step.logits(torch.zeros((2, 96)), torch.tensor([2]))
    geometry = KvGeometry(2, 16, 1, 64, torch.float32)
    with pytest.raises(ValueError, match="a pool of"):
        bench.step.on(KvPool(dataclasses.replace(geometry, layers=3), 2, CPU))
    with pytest.raises(NotNative, match="as float32, not as int8"):
        bench.step.on(KvPool(dataclasses.replace(geometry, is_int8=True), 2, CPU))


def test_the_first_layers_alone_compute_what_they_compute_in_the_model() -> None:
    """A probe asks no others; a pool of another number of layers is refused in Python and below it."""
    plain = random_plain(Shape(layers=4), torch.float32)
    few = dataclasses.replace(plain, layers=plain.layers[:2])
    truth, kv = StepBench(few).hidden(COMPANY, None)
    bench = StepBench(plain, layers=2)
    found, kv_too = bench.hidden(COMPANY, None)
    assert torch.equal(found, truth)
    assert torch.equal(kv_too, kv)
    with pytest.raises(ValueError, match="for 4 layers of 4"):
        bench.step.on(bench.pool)
    with pytest.raises(RuntimeError, match="it has not so many layers"):
        StepBench(plain, layers=5).hidden(COMPANY, None)


@pytest.mark.parametrize("dtype", [torch.float16])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    plain: PlainModel = random_plain(Shape(), dtype)
    with pytest.raises(NotNative, match="the weights are float16"):
        NativeStep(plain, library(torch.float32), 1)


@pytest.mark.parametrize("at", [2, 3])
def test_nan_stays_nan(kind: Kind, at: int) -> None:
    """The sampler ends an answer whose logits are no numbers: nothing may hide them, nor spread them."""
    plain, tokens = random_plain(Shape(), kind.dtype), [1, 2, 4, 3, 6]
    plain.embedding[5, 7] = torch.nan
    tokens[at] = 5
    logits, _ = StepBench(plain, of=kind.library).one(tokens)
    assert logits[at:].isnan().any(dim=-1).all()
    assert not logits[:at].isnan().any()
