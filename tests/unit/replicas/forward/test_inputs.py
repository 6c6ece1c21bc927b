"""A step packed into one buffer: every number where kernels and graphs look for it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.replicas.forward.inputs import (
    SPLITS_MAX,
    WORDS_MIN,
    StepInputs,
    StepPacker,
    StepShape,
    TilePlaces,
    TileWork,
    Tiling,
    splits_of,
    step_words_max,
)
from samovar.replicas.kv.page_pool import TRASH_PAGE
from samovar.replicas.messages import SamplingParams
from samovar.replicas.sampling.draws import greedy_of
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk

CPU = torch.device("cpu")
BLOCK = 4
TILINGS = [None, Tiling(3), Tiling(16, 7, 5)]


def sequence_of(length: int, first_page: int, params: SamplingParams | None = None) -> Sequence:
    """A sequence of tokens 1000, 1001, ... whose pages come in descending order."""
    blocks = -(-length // BLOCK) + 1  # one more than it needs now
    return Sequence(
        request_id="r",
        arrival=0,
        namespace=bytes(32),
        tokens=array("I", range(1000, 1000 + length)),
        prompt_tokens=length,
        sampling=params or SamplingParams(max_tokens=4, temperature=0.0),
        seed=7,
        pages=list(range(first_page + blocks, first_page, -1)),
    )


@dataclass
class Step:
    """Chunks drawn at random: (tokens known, start, count) of each sequence."""

    chunks: list[Chunk]

    @staticmethod
    def of(parts: list[tuple[int, int, int]]) -> Step:
        return Step(
            [
                Chunk(sequence_of(length, 100 * number), start, count)
                for number, (length, start, count) in enumerate(parts)
            ]
        )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 40))
        start = draw(st.integers(0, length - 1))
        parts.append((length, start, draw(st.integers(1, length - start))))
    return Step.of(parts)


@settings(max_examples=60)
@given(steps(), st.sampled_from([1, 4]), st.sampled_from(TILINGS))
def test_another_rank_takes_the_same_step_from_its_message(
    step: Step, rows_multiple: int, tiling: Tiling | None
) -> None:
    ours, theirs = (StepPacker(CPU, BLOCK, rows_multiple=rows_multiple, tiling=tiling) for _ in range(2))
    packed = ours.pack(step.chunks)
    message = np.concatenate(ours.message(packed))
    taken = theirs.adopt(message)
    message[:] = -1  # the ring's memory is written again
    assert torch.equal(taken.words, packed.words)
    fields = ("shape", "segments", "sampled", "block_tokens")
    assert all(getattr(taken, name) == getattr(packed, name) for name in fields)
    for one, other in zip(works_of(taken), works_of(packed), strict=True):
        assert one.is_split == other.is_split
    rows, blocks = sum(chunk.count for chunk in step.chunks), max(one.blocks for one in packed.segments)
    assert len(message) <= step_words_max(tokens=rows, sequences=len(step.chunks), blocks=blocks)


@settings(max_examples=60)
@given(steps(), st.sampled_from([1, 4]), st.sampled_from(TILINGS))
def test_every_row_is_the_token_position_and_slot_of_its_chunk(
    step: Step, rows_multiple: int, tiling: Tiling | None
) -> None:
    packer = StepPacker(CPU, BLOCK, rows_multiple=rows_multiple, tiling=tiling)
    inputs = packer.pack(step.chunks)
    expected = [
        (sequence.tokens[place], place, sequence.pages[place // BLOCK], place % BLOCK)
        for chunk in step.chunks
        for sequence in [chunk.sequence]
        for place in range(chunk.start, chunk.start + chunk.count)
    ]
    rows, count = inputs.shape.rows, len(expected)
    assert rows == count + -count % rows_multiple
    pages, offsets = inputs.slot_index()
    columns = (inputs.token_ids, inputs.positions, pages, offsets)
    got = list(zip(*(column.tolist() for column in columns), strict=True))
    assert got[:count] == expected
    assert got[count:] == [(0, 0, TRASH_PAGE, place % BLOCK) for place in range(rows - count)]
    for segment, chunk, span in zip(inputs.segments, step.chunks, inputs.spans.tolist(), strict=True):
        row, seen, context, table = span
        assert (row, seen, context) == (segment.row, chunk.count, chunk.start + chunk.count)
        blocks = -(-context // BLOCK)
        assert inputs.tables[table : table + blocks].tolist() == chunk.sequence.pages[:blocks]
        assert inputs.table(segment).tolist() == chunk.sequence.pages[:blocks]
    _assert_tiles(inputs, tiling)
    sampling = [
        segment.row + segment.count - 1
        for segment, chunk in zip(inputs.segments, step.chunks, strict=True)
        if chunk.samples
    ]
    assert inputs.sampled == len(sampling)
    padding = sampling[-1:] * (inputs.shape.samples - len(sampling))
    assert inputs.sample_rows.tolist() == sampling + padding
    assert inputs.shape.samples == len(sampling) + -len(sampling) % rows_multiple


def works_of(inputs: StepInputs) -> list[TileWork]:
    return [work for work in (inputs.decodes, inputs.others) if work is not None]


def _assert_tiles(inputs: StepInputs, tiling: Tiling | None) -> None:
    """Tiles cover each row of each segment once, single rows apart, and items each run of each tile once."""
    if tiling is None:
        assert works_of(inputs) == []
        return
    covered = []
    for work, is_single in ((inputs.decodes, True), (inputs.others, False)):
        if work is None:
            continue
        tiles, places = work.tiles.tolist(), list[int]()
        for number, first, place, splits in tiles:
            count = inputs.segments[number].count
            assert (count == 1) == is_single
            covered += [(number, row) for row in range(first, min(first + tiling.rows, count))]
            places += range(place, place + splits) if splits > 1 else []
        assert places == list(range(len(places)))
        assert work.is_split == (len(places) > 0)
        runs = [(tile, run) for tile, (*_, splits) in enumerate(tiles) for run in range(splits)]
        assert [tuple(item) for item in work.items.tolist()] == runs
    assert sorted(covered) == [
        (number, row) for number, one in enumerate(inputs.segments) for row in range(one.count)
    ]


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=200), st.integers(1, 400))
def test_no_program_reads_more_than_twice_the_mean(keys: list[int], programs: int) -> None:
    splits = splits_of(np.array(keys, dtype=np.int64), programs)
    assert splits[splits > 1].sum() <= programs
    mean = sum(keys) / programs
    for count, runs in zip(keys, splits.tolist(), strict=True):
        assert runs == SPLITS_MAX or count / runs <= max(2 * mean, 512)
        assert runs == 1 or count / runs >= 256


def test_a_padded_step_is_where_a_graph_looks_and_its_padding_is_no_work_and_writes_the_trash_page() -> None:
    packer = StepPacker(CPU, BLOCK, tiling=Tiling(16, 4, 2))
    shape = StepShape(64, 12, 12, TilePlaces(8, 12), TilePlaces(7, 9), is_recorded=True)
    full = packer.pack(Step.of([(20, 19, 1)] * 8 + [(40, 0, 14)] * 4).chunks, shape)
    places = [part.data_ptr() for part in _sections(full)]
    inputs = packer.pack(Step.of([(7, 6, 1), (40, 19, 21), (1, 0, 1)]).chunks, shape)
    assert [part.data_ptr() for part in _sections(inputs)] == places
    assert inputs.spans[:3].tolist() == [[0, 1, 7, 1], [1, 21, 40, 3], [22, 1, 1, 13]]
    assert (inputs.spans[3:] == 0).all()
    assert inputs.tables[0] == TRASH_PAGE
    decodes, others = works_of(inputs)
    assert decodes.tiles.tolist() == [[0, 0, 0, 1], [2, 0, 0, 1], *[[0, 64, 0, 0]] * 6]
    assert decodes.items.tolist() == [[0, 0], [1, 0], *[[0, SPLITS_MAX]] * 10]
    assert others.tiles.tolist() == [[1, 0, 0, 1], [1, 16, 0, 1], *[[0, 64, 0, 0]] * 5]
    assert others.items.tolist() == [[0, 0], [1, 0], *[[0, SPLITS_MAX]] * 7]
    assert decodes.is_split, "of another step it may be"
    pages, offsets = inputs.slot_index()
    assert (pages[23:] == TRASH_PAGE).all()
    assert ((offsets >= 0) & (offsets < BLOCK)).all()
    assert inputs.sampled == 3
    assert inputs.sample_rows.tolist() == [0, 21, *[22] * 10]


def _sections(inputs: StepInputs) -> tuple[torch.Tensor, ...]:
    return (
        inputs.token_ids, inputs.positions, inputs.slots, inputs.spans, inputs.sample_rows, inputs.tables,
        *(tensor for tiles, items, _ in works_of(inputs) for tensor in (tiles, items)),
    )  # fmt: skip


def test_a_step_that_does_not_fit_gets_memory_of_its_own_and_the_buffer_stays_where_it_is() -> None:
    packer = StepPacker(CPU, BLOCK)
    small = [Chunk(sequence_of(9, 0), 8, 1)]
    place = packer.pack(small).words.data_ptr()
    long = sequence_of(BLOCK * WORDS_MIN, 5)
    inputs = packer.pack([Chunk(long, len(long.tokens) - 1, 1)])
    assert len(inputs.words) > packer.words_max
    assert inputs.table(inputs.segments[0]).tolist() == long.pages[:WORDS_MIN]
    assert packer.pack(small).words.data_ptr() == place
    packer.reserve(2 * WORDS_MIN)
    assert len(packer.pack([Chunk(long, len(long.tokens) - 1, 1)]).words) <= packer.words_max


@pytest.mark.parametrize("rows", [1, 5])
def test_best_tokens_are_the_first_maxima_and_a_nan_anywhere_in_a_row_is_told(rows: int) -> None:
    logits = torch.randn((rows, 300), generator=torch.Generator().manual_seed(rows)).round(decimals=1)
    logits[-1, 299] = torch.nan
    logits[0, 17] = logits[0, 250] = 9.0
    ids, has_nan = greedy_of(logits).tolist()
    assert has_nan == [False] * (rows - 1) + [True]
    clean = logits[: rows - 1]
    assert ids[: rows - 1] == clean.argmax(dim=-1).tolist()
    assert rows == 1 or ids[0] == 17
