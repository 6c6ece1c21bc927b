"""The numbers of one step in one buffer of int32 words, uploaded by one copy.

`StepPacker.pack` writes what a step computes into host memory (pinned, for CUDA) and copies it to the device
once; `StepInputs` is the step as the runner and the attention read it: views of that buffer. On
CPU host and device are the same memory and nothing is copied.

The buffer's sections follow each other in the order of `StepShape.places`; what has a fixed number of words
comes first, the page tables last. Their places depend on the `StepShape` alone, so steps that are packed into
the same shape have the same addresses, as a captured graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from samovar.replicas.kv import TRASH_PAGE
from samovar.replicas.scheduling import Chunk

Words = npt.NDArray[np.int32]

ALIGN_WORDS = 4
"""Sections begin at multiples of 16 bytes."""
SEGMENT_WORDS = 4
TILE_WORDS = 2
WORDS_MIN = 1 << 16
"""Words of the buffers to begin with: 256 KiB, a step of 32 sequences of 32 k tokens in blocks of 16."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many of everything a step has, padding included: it decides every section's place in the buffer.

    `rows`: tokens; `segments`: sequences; `tiles`: query tiles; `samples`: rows whose logits are computed.
    """

    rows: int
    segments: int
    tiles: int
    samples: int

    def places(self) -> tuple[int, ...]:
        """Return the first word of each section, in the order of `StepInputs`' fields, `tables` last."""
        return _places(self)


@lru_cache(maxsize=1024)
def _places(shape: StepShape) -> tuple[int, ...]:
    words = (
        *(shape.rows, shape.rows, shape.rows),
        shape.segments * SEGMENT_WORDS,
        shape.tiles * TILE_WORDS,
        shape.samples,
    )
    places = [0]
    for count in words:
        places.append(places[-1] + -(-count // ALIGN_WORDS) * ALIGN_WORDS)
    return tuple(places)


class Segment(NamedTuple):
    """Rows `[row, row + count)` of the step are tokens `[start, start + count)` of one sequence.

    Its page table is words `[table, table + blocks)` of `StepInputs.tables`.
    """

    row: int
    count: int  # type: ignore[assignment]  # hides the tuple's own
    start: int
    table: int
    blocks: int

    @property
    def context(self) -> int:
        """The tokens that its last row sees."""
        return self.start + self.count


class StepInputs:
    """One step, on the device: a forward pass over rows of many sequences, prefill chunks and decodes mixed.

    All tensors are int32 views of `words` (contiguous, on the runner's device), which the next step
    overwrites: who needs one longer copies it. Sizes are the `shape`'s, so padding is included.

    - `token_ids` `[rows]`, `positions` `[rows]`: padding rows have token 0 at position 0.
    - `slots` `[rows]`: where each row's K and V are written: page * `block_tokens` + offset in the page.
      Padding rows write into the trash page.
    - `spans` `[segments, 4]`, for kernels: first row; rows; tokens that its last row sees; first word of its
      page table in `tables`. So row `i` of a span of `n` rows that sees `t` tokens is token `t - n + i`, and
      sees keys `[0, t - n + i]`. A padding segment is one padding row that sees slot 0 of the trash page.
    - `tiles` `[tiles, 2]`: what one program of a kernel computes: segment; the first of its rows, counted
      from the segment's first. A tile has the backend's `tile_rows` rows, fewer at a segment's end. Tiles of
      segments of one row come first: the first `decode_tiles` of them. Empty if `tile_rows` is 0. A padded
      shape has as many tiles as segments, one row each.
    - `sample_rows` `[samples]`: the rows whose logits are computed, in the order of their chunks. Padding
      repeats the last one.
    - `tables`: the page tables, one behind the other, to the end of `words`; word 0 is the trash page. Each
      covers the tokens that its segment sees, no more.

    Known on the host: `segments` (without padding; `spans` says the same), `sampled` (rows of `sample_rows`
    that are no padding), `decode_tiles`, `block_tokens`.
    """

    __slots__ = (
        "block_tokens",
        "decode_tiles",
        "positions",
        "sample_rows",
        "sampled",
        "segments",
        "shape",
        "slots",
        "spans",
        "tables",
        "tiles",
        "token_ids",
        "words",
    )

    def __init__(
        self,
        words: torch.Tensor,
        shape: StepShape,
        segments: tuple[Segment, ...],
        *,
        sampled: int,
        decode_tiles: int,
        block_tokens: int,
    ) -> None:
        self.words = words
        self.shape = shape
        self.segments = segments
        self.sampled = sampled
        self.decode_tiles = decode_tiles
        self.block_tokens = block_tokens
        ids, positions, slots, spans, tiles, rows, tables = shape.places()
        self.token_ids = words[ids : ids + shape.rows]
        self.positions = words[positions : positions + shape.rows]
        self.slots = words[slots : slots + shape.rows]
        self.spans = _matrix(words, spans, shape.segments, SEGMENT_WORDS)
        self.tiles = _matrix(words, tiles, shape.tiles, TILE_WORDS)
        self.sample_rows = words[rows : rows + shape.samples]
        self.tables = words[tables:]

    @property
    def device(self) -> torch.device:
        return self.words.device

    def table(self, segment: Segment) -> torch.Tensor:
        """Return a segment's page table, int32 `[blocks]`."""
        return self.tables[segment.table : segment.table + segment.blocks]

    def slot_index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `slots` as an index of pages and one of offsets in them, int64 `[rows]` each."""
        slots = self.slots.long()
        return slots // self.block_tokens, slots % self.block_tokens


def _matrix(words: torch.Tensor, start: int, rows: int, columns: int) -> torch.Tensor:
    return words[start : start + rows * columns].view(rows, columns)


MESSAGE_HEAD = 7
"""Words of `StepPacker.message` before the step's own."""
PADDING_ROWS_MAX = 64
"""Of a step's rows and samples: `rows_multiple`, or what a graph's shape has more."""


def step_words_max(*, tokens: int, sequences: int, blocks: int) -> int:
    """Return the length of the longest message of a step of so many rows and sequences of so many blocks."""
    rows, segments = tokens + PADDING_ROWS_MAX, sequences + PADDING_ROWS_MAX
    whole = StepShape(rows, segments, rows, segments)
    return MESSAGE_HEAD + whole.places()[-1] + 1 + sequences * blocks


class StepPacker:
    """Packs steps for one device.

    `rows_multiple`: rows and samples are padded to a multiple of it; `tile_rows`: see `StepInputs.tiles`.

    The device's buffer is always the same one, unless a step does not fit into it (`StepInputs.words` longer
    than `words_max`): such a step gets memory of its own. `reserve` makes it larger; never call it once a
    graph holds its address.
    """

    def __init__(
        self, device: torch.device, block_tokens: int, *, rows_multiple: int = 1, tile_rows: int = 0
    ) -> None:
        self._device = device
        self._block_tokens = block_tokens
        self._rows_multiple = rows_multiple
        self._tile_rows = tile_rows
        self.reserve(WORDS_MIN)

    @property
    def words_max(self) -> int:
        """The words of a step that fits into the buffer."""
        return self._buffers.words

    def reserve(self, words: int) -> None:
        """Allocate the buffers, for steps of up to so many words."""
        self._buffers: _Buffers = (
            _PinnedBuffers(self._device, words) if self._device.type == "cuda" else _HostBuffers(words)
        )

    def pack(self, chunks: Listing[Chunk], shape: StepShape | None = None) -> StepInputs:
        """Pack a step and begin its upload; later work on the current stream sees it.

        `shape`: what to pad to, for chunks of one token each, with as many rows as segments, and as many
        tiles or none; None: the step's own.
        """
        block_tokens = self._block_tokens
        segments, tables, row = list[Segment](), [TRASH_PAGE], 0
        for chunk in chunks:
            blocks = -(-(chunk.start + chunk.rows) // block_tokens)
            segments.append(Segment(row, chunk.rows, chunk.start, len(tables), blocks))
            tables += chunk.sequence.pages[:blocks]
            row += chunk.rows
        sampling = [
            segment.row + sampled
            for segment, chunk in zip(segments, chunks, strict=True)
            for sampled in chunk.sampled_rows
        ]
        tiles, decode_tiles = self._tiles(segments)
        if shape is None:
            shape = StepShape(self._padded(row), len(segments), len(tiles), self._padded(len(sampling)))
        places = shape.places()
        words = places[-1] + len(tables)
        host = self._buffers.host(words)
        host[places[-1] : words] = tables
        _write_rows(host, places, shape.rows, _rows(chunks, segments, host[places[-1] :], block_tokens))
        _write_spans(host, places, shape, segments)
        _write_tiles(host, places, shape, tiles)
        _write_samples(host, places, shape, sampling)
        if shape.rows > row:
            slots = host[places[2] : places[2] + shape.rows]
            # One trash slot a row, and never behind the page's end: a write there would end a CUDA context.
            slots[row:] = TRASH_PAGE * block_tokens + np.arange(shape.rows - row) % block_tokens
        return StepInputs(
            self._buffers.upload(words),
            shape,
            tuple(segments),
            sampled=len(sampling),
            decode_tiles=decode_tiles,
            block_tokens=block_tokens,
        )

    def message(self, inputs: StepInputs) -> list[Words]:
        """Return the step that was packed last as words for another rank, which takes them with `adopt`."""
        shape = inputs.shape
        head = (shape.rows, shape.segments, shape.tiles, shape.samples)
        rest = (inputs.sampled, inputs.decode_tiles, len(inputs.segments))
        return [np.array([*head, *rest], dtype=np.int32), self._buffers.written(len(inputs.words))]

    def adopt(self, message: Words) -> StepInputs:
        """Begin the upload of a step that another rank has packed; later work on the stream sees it."""
        rows, segments, tiles, samples, sampled, decode_tiles, count = message[:MESSAGE_HEAD].tolist()
        shape, packed = StepShape(rows, segments, tiles, samples), message[MESSAGE_HEAD:]
        self._buffers.host(len(packed))[: len(packed)] = packed
        first = shape.places()[3]
        spans = packed[first : first + count * SEGMENT_WORDS].reshape(count, SEGMENT_WORDS).tolist()
        return StepInputs(
            self._buffers.upload(len(packed)),
            shape,
            tuple(
                Segment(row, tokens, context - tokens, table, -(-context // self._block_tokens))
                for row, tokens, context, table in spans
            ),
            sampled=sampled,
            decode_tiles=decode_tiles,
            block_tokens=self._block_tokens,
        )

    def _padded(self, count: int) -> int:
        return count + -count % self._rows_multiple

    def _tiles(self, segments: Listing[Segment]) -> tuple[list[tuple[int, int]], int]:
        """Return (segment, first row) of each tile, and how many of the first ones are decodes."""
        if not self._tile_rows:
            return [], 0
        decodes = [(number, 0) for number, segment in enumerate(segments) if segment.count == 1]
        others = [
            (number, first)
            for number, segment in enumerate(segments)
            if segment.count > 1
            for first in range(0, segment.count, self._tile_rows)
        ]
        return decodes + others, len(decodes)


def _rows(
    chunks: Listing[Chunk], segments: Listing[Segment], tables: Words, block_tokens: int
) -> tuple[Listing[int] | Words, ...]:
    """Return the token ids, positions and slots of the rows without padding."""
    if all(chunk.rows == 1 for chunk in chunks):  # plain lists are quicker for a few numbers
        places = [chunk.start for chunk in chunks]
        return (
            [chunk.sequence.tokens[chunk.start] for chunk in chunks],
            places,
            [
                chunk.sequence.pages[place // block_tokens] * block_tokens + place % block_tokens
                for chunk, place in zip(chunks, places, strict=True)
            ],
        )
    runs = [np.arange(one.start, one.context, dtype=np.int32) for one in segments]
    slots = [
        tables[one.table + run // block_tokens] * block_tokens + run % block_tokens
        for one, run in zip(segments, runs, strict=True)
    ]
    ids = [
        [*chunk.sequence.tokens[chunk.start : chunk.start + chunk.count], *chunk.draft] for chunk in chunks
    ]
    return np.concatenate(ids), np.concatenate(runs), np.concatenate(slots)


def _write_rows(
    host: Words, places: tuple[int, ...], rows: int, columns: tuple[Listing[int] | Words, ...]
) -> None:
    for start, column in zip(places, columns, strict=False):
        host[start : start + len(column)] = column
        if len(column) < rows:
            host[start + len(column) : start + rows] = 0


def _write_spans(host: Words, places: tuple[int, ...], shape: StepShape, segments: Listing[Segment]) -> None:
    flat: list[int] = []
    for one in segments:
        flat += (one.row, one.count, one.start + one.count, one.table)
    for number in range(len(segments), shape.segments):
        flat += (number, 1, 1, 0)
    host[places[3] : places[3] + len(flat)] = flat


def _write_tiles(
    host: Words, places: tuple[int, ...], shape: StepShape, tiles: Listing[tuple[int, int]]
) -> None:
    if not shape.tiles:
        return
    flat = [word for tile in tiles for word in tile]
    for number in range(len(tiles), shape.tiles):
        flat += (number, 0)
    host[places[4] : places[4] + len(flat)] = flat


def _write_samples(host: Words, places: tuple[int, ...], shape: StepShape, sampling: list[int]) -> None:
    padding = sampling[-1:] or [0]
    rows = sampling + padding * (shape.samples - len(sampling))
    host[places[5] : places[5] + shape.samples] = rows


class _HostBuffers:
    """Packs in the memory that the CPU computes from; the step before is over by then."""

    def __init__(self, words: int) -> None:
        self.words = words
        self._own = torch.zeros(words, dtype=torch.int32)
        self._step = self._own

    def host(self, words: int) -> Words:
        """Return memory to write a step of so many words to."""
        self._step = self._own if words <= self.words else torch.zeros(words, dtype=torch.int32)
        return self._step.numpy()

    def written(self, words: int) -> Words:
        """Return what was written last."""
        return self._step.numpy()[:words]

    def upload(self, words: int) -> torch.Tensor:
        """Return the words on the device."""
        return self._step[:words]


class _PinnedBuffers:
    """Packs in pinned memory and copies it to the device's buffer, on the current stream.

    Two host buffers in turns: a copy that is only queued still reads the other one.
    """

    def __init__(self, device: torch.device, words: int) -> None:
        self.words = words
        self._device = device
        self._own = torch.zeros(words, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._step = self._hosts[0]

    def host(self, words: int) -> Words:
        """Return memory to write a step of so many words to."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # of two steps ago: over long since
        if words <= self.words:
            self._step = self._hosts[self._turn]
        else:
            self._step = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        return self._step.numpy()

    def written(self, words: int) -> Words:
        """Return what was written last; the device's copy of it may still run."""
        return self._step.numpy()[:words]

    def upload(self, words: int) -> torch.Tensor:
        """Begin the copy and return the words on the device."""
        target = self._own
        if words > self.words:
            target = torch.empty(words, dtype=torch.int32, device=self._device)
        target[:words].copy_(self._step[:words], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._copied[self._turn] = event
        return target[:words]


_Buffers = _HostBuffers | _PinnedBuffers
