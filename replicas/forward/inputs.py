"""The numbers of one step in one buffer of int32 words, uploaded by one copy.

`StepPacker.pack` writes what a step computes into host memory (pinned, for CUDA) and copies it to the device
once; `StepInputs` is the step as the runner and the attention read it: views of that buffer. On
CPU host and device are the same memory and nothing is copied.

The buffer's sections follow each other in the order of `StepShape.places`; what has a fixed number of words
comes first, the page tables last. Their places depend on the `StepShape` alone, so steps that are packed into
the same shape have the same addresses, as a captured graph needs.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from samovar.replicas.kv import TRASH_PAGE
from samovar.replicas.scheduling import Chunk

Words = npt.NDArray[np.int32]

ALIGN_WORDS = 4
"""Sections begin at multiples of 16 bytes."""
SEGMENT_WORDS, TILE_WORDS, ITEM_WORDS = 4, 4, 2
WORDS_MIN = 1 << 16
"""Words of the buffers to begin with: 256 KiB, a step of 32 sequences of 32 k tokens in blocks of 16."""

SPLITS_MAX = 64
SPLIT_KEYS_MIN = 256
"""Fewer keys than this are not worth a split: merging takes longer."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a backend cuts a step into tiles, and the keys of a tile into runs that are read side by side.

    `rows`: of a query tile. `decodes`, `others`: programs for each KV head that the device runs at a time, of
    tiles of segments of one row and of other tiles.
    """

    rows: int
    decodes: int = 1
    others: int = 1


class TilePlaces(NamedTuple):
    """How many tiles, and items of work, a shape has room for."""

    tiles: int = 0
    items: int = 0


NO_TILES = TilePlaces()


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many of everything a step has, padding included: it decides every section's place in the buffer.

    `rows`: tokens; `segments`: sequences; `samples`: rows whose logits are computed; `decodes`, `others`:
    tiles of segments of one row, and of more. `is_recorded`: other steps than the one that is packed will be
    computed in it, so that nothing is taken from this one's numbers.
    """

    rows: int
    segments: int
    samples: int
    decodes: TilePlaces = NO_TILES
    others: TilePlaces = NO_TILES
    is_recorded: bool = False

    def places(self) -> tuple[int, ...]:
        """Return the first word of each section, in the order of `StepInputs`' fields, `tables` last."""
        return _places(self)


@lru_cache(maxsize=1024)
def _places(shape: StepShape) -> tuple[int, ...]:
    words = (
        *(shape.rows, shape.rows, shape.rows),
        shape.segments * SEGMENT_WORDS,
        *(shape.decodes.tiles * TILE_WORDS, shape.decodes.items * ITEM_WORDS),
        *(shape.others.tiles * TILE_WORDS, shape.others.items * ITEM_WORDS),
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


class TileWork(NamedTuple):
    """What one launch of an attention kernel computes.

    - `tiles` int32 `[tiles, 4]`: segment; the first of its rows, counted from the segment's first; the first
      of the places where its runs of keys leave what they found; into how many runs its keys are split.
    - `items` int32 `[items, 2]`: what one program of each KV head computes: tile; which run of its keys.

    A tile has the backend's rows, fewer at a segment's end; one that is not split has no places. Padding
    tiles have no row and no run, and padding items are of no run of their tile. `is_split`: whether any of
    the tiles is, or may be.
    """

    tiles: torch.Tensor
    items: torch.Tensor
    is_split: bool


class StepInputs:
    """One step, on the device: a forward pass over rows of many sequences, prefill chunks and decodes mixed.

    All tensors are int32 views of `words` (contiguous, on the runner's device), which the next step
    overwrites: who needs one longer copies it. Sizes are the `shape`'s, so padding is included.

    - `token_ids` `[rows]`, `positions` `[rows]`: padding rows have token 0 at position 0.
    - `slots` `[rows]`: where each row's K and V are written: page * `block_tokens` + offset in the page.
      Padding rows write into the trash page.
    - `spans` `[segments, 4]`, for kernels: first row; rows; tokens that its last row sees; first word of its
      page table in `tables`. So row `i` of a span of `n` rows that sees `t` tokens is token `t - n + i`, and
      sees keys `[0, t - n + i]`. A padding segment has no row.
    - `decodes`, `others`: the tiles of segments of one row, and of more. None if the backend has no tiles.
    - `sample_rows` `[samples]`: the rows whose logits are computed, in the order of their chunks. Padding
      repeats the last one.
    - `tables`: the page tables, one behind the other, to the end of `words`; word 0 is the trash page. Each
      covers the tokens that its segment sees, no more.

    Known on the host: `segments` (without padding; `spans` says the same), `sampled` (rows of `sample_rows`
    that are no padding), `block_tokens`.
    """

    __slots__ = (
        "block_tokens",
        "decodes",
        "others",
        "positions",
        "sample_rows",
        "sampled",
        "segments",
        "shape",
        "slots",
        "spans",
        "tables",
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
        is_split: tuple[bool, bool],
        block_tokens: int,
    ) -> None:
        self.words = words
        self.shape = shape
        self.segments = segments
        self.sampled = sampled
        self.block_tokens = block_tokens
        ids, positions, slots, spans, decodes, _, others, _, rows, tables = shape.places()
        self.token_ids = words[ids : ids + shape.rows]
        self.positions = words[positions : positions + shape.rows]
        self.slots = words[slots : slots + shape.rows]
        self.spans = _matrix(words, spans, shape.segments, SEGMENT_WORDS)
        self.decodes: TileWork | None = None
        self.others: TileWork | None = None
        if shape.decodes.tiles:
            self.decodes = _work(words, shape, decodes, shape.decodes, is_split[0])
        if shape.others.tiles:
            self.others = _work(words, shape, others, shape.others, is_split[1])
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


def _work(words: torch.Tensor, shape: StepShape, start: int, places: TilePlaces, is_split: bool) -> TileWork:
    behind = start + -(-places.tiles * TILE_WORDS // ALIGN_WORDS) * ALIGN_WORDS
    return TileWork(
        _matrix(words, start, places.tiles, TILE_WORDS),
        _matrix(words, behind, places.items, ITEM_WORDS),
        is_split or shape.is_recorded,
    )


MESSAGE_HEAD = 12
"""Words of `StepPacker.message` before the step's own."""
PADDING_ROWS_MAX = 64
"""Of a step's rows and samples: `rows_multiple`."""
SPLIT_ITEMS_MAX = 4096
"""Items of a step besides one for each tile: more programs than a device runs at a time."""


def step_words_max(*, tokens: int, sequences: int, blocks: int) -> int:
    """Return the length of the longest message of a step of so many rows and sequences of so many blocks."""
    rows, segments = tokens + PADDING_ROWS_MAX, sequences + PADDING_ROWS_MAX
    tiles = TilePlaces(rows, rows + SPLIT_ITEMS_MAX)
    whole = StepShape(rows, segments, rows, tiles, tiles)
    return MESSAGE_HEAD + whole.places()[-1] + 1 + sequences * blocks


class StepPacker:
    """Packs steps for one device.

    `rows_multiple`: rows and samples are padded to a multiple of it; `tiling`: None: the backend needs none.
    `queue`: where uploads go; None: the device's own, or no upload on a CPU.

    The device's buffer is always the same one, unless a step does not fit into it (`StepInputs.words` longer
    than `words_max`): such a step gets memory of its own. `reserve` makes it larger; never call it once a
    graph holds its address.
    """

    def __init__(
        self,
        device: torch.device,
        block_tokens: int,
        *,
        rows_multiple: int = 1,
        tiling: Tiling | None = None,
        queue: UploadQueue | None = None,
    ) -> None:
        self._queue = CudaQueue(device) if queue is None and device.type == "cuda" else queue
        self._block_tokens = block_tokens
        self._rows_multiple = rows_multiple
        self._tiling = tiling
        self.reserve(WORDS_MIN)

    @property
    def words_max(self) -> int:
        """The words of a step that fits into the buffer."""
        return self._buffers.words

    def reserve(self, words: int) -> None:
        """Allocate the buffers, for steps of up to so many words."""
        self._buffers: _Buffers = (
            _HostBuffers(words) if self._queue is None else _QueuedBuffers(self._queue, words)
        )

    def pack(self, chunks: Listing[Chunk], shape: StepShape | None = None) -> StepInputs:
        """Pack a step and begin its upload; later work on the current stream sees it.

        `shape`: what to pad to, with room for all that the step has; None: the step's own.
        """
        block_tokens = self._block_tokens
        segments, sampling = list[Segment](), list[int]()
        row, table = 0, 1
        for chunk in chunks:
            rows, start = chunk.rows, chunk.start
            blocks = -(-(start + rows) // block_tokens)
            segments.append(Segment(row, rows, start, table, blocks))
            if chunk.samples:
                sampling += range(row + chunk.count - 1, row + rows)
            row += rows
            table += blocks
        decodes = others = _NO_TILES
        if self._tiling is not None:
            decodes, others = _tiles(segments, self._tiling)
        if shape is None:
            multiple, samples = self._rows_multiple, len(sampling)
            shape = StepShape(
                row + -row % multiple,
                len(segments),
                samples + -samples % multiple,
                TilePlaces(len(decodes.tiles), len(decodes.items)),
                TilePlaces(len(others.tiles), len(others.items)),
            )
        places = shape.places()
        words = places[-1] + table
        host = self._buffers.host(words)
        tables = host[places[-1] : words]
        tables[0] = TRASH_PAGE
        for one, chunk in zip(segments, chunks, strict=True):
            tables[one.table : one.table + one.blocks] = chunk.sequence.pages[: one.blocks]
        _write_rows(host, places, shape.rows, chunks, segments, block_tokens)
        _write_spans(host, places, shape, segments)
        if self._tiling is not None:
            decodes.write(host, places[4], places[5], shape.decodes, shape.rows)
            others.write(host, places[6], places[7], shape.others, shape.rows)
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
            is_split=(decodes.is_split, others.is_split),
            block_tokens=block_tokens,
        )

    def message(self, inputs: StepInputs) -> list[Words]:
        """Return the step that was packed last as words for another rank, which takes them with `adopt`."""
        shape, work = inputs.shape, (inputs.decodes, inputs.others)
        is_split = [one is not None and one.is_split for one in work]
        sizes = (shape.rows, shape.segments, shape.samples, *shape.decodes, *shape.others)
        head = (*sizes, shape.is_recorded, inputs.sampled, *is_split, len(inputs.segments))
        return [np.array(head, dtype=np.int32), self._buffers.written(len(inputs.words))]

    def adopt(self, message: Words) -> StepInputs:
        """Begin the upload of a step that another rank has packed; later work on the stream sees it."""
        head, packed = message[:MESSAGE_HEAD].tolist(), message[MESSAGE_HEAD:]
        rows, segments, samples, *tiles, is_recorded, sampled, split, split_too, count = head
        tile_places = TilePlaces(*tiles[:2]), TilePlaces(*tiles[2:])
        shape = StepShape(rows, segments, samples, *tile_places, bool(is_recorded))
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
            is_split=(bool(split), bool(split_too)),
            block_tokens=self._block_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles and items of one launch, as they are written: `[tiles, 4]`, `[items, 2]`."""

    tiles: Words
    items: Words
    is_split: bool

    def write(self, host: Words, tiles: int, items: int, places: TilePlaces, rows: int) -> None:
        """Write them, and padding: tiles behind the last of `rows`, and items of no run."""
        for start, own, count, padding in (
            (tiles, self.tiles, places.tiles, (0, rows, 0, 0)),
            (items, self.items, places.items, (0, SPLITS_MAX)),
        ):
            matrix = host[start : start + count * len(padding)].reshape(count, len(padding))
            matrix[: len(own)] = own
            if count > len(own):
                matrix[len(own) :] = padding


_NO_TILES = _Tiles(np.empty((0, TILE_WORDS), np.int32), np.empty((0, ITEM_WORDS), np.int32), False)


def _tiles(segments: Listing[Segment], tiling: Tiling) -> tuple[_Tiles, _Tiles]:
    """Cut a step into tiles of segments of one row, and of more; each in the order of the segments."""
    decodes, others = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for number, one in enumerate(segments):
        if one.count == 1:
            decodes.append((number, 0, one.start + 1))
        else:
            for first in range(0, one.count, tiling.rows):
                others.append((number, first, one.start + min(first + tiling.rows, one.count)))
    return _split(decodes, tiling.decodes), _split(others, tiling.others)


def splits_of(keys: npt.NDArray[np.int64], programs: int) -> npt.NDArray[np.int64]:
    """Return into how many runs each tile's keys are split, for so many programs at a time.

    All are read in about the same time, whatever lies beside a long context: no run has more than twice the
    mean of the programs' keys (as far as `SPLITS_MAX` allows). Runs of split tiles are no more than programs.
    """
    shares = keys * programs // max(1, int(keys.sum()))
    return np.clip(np.minimum(shares, keys // SPLIT_KEYS_MIN), 1, SPLITS_MAX)


def _split(tiles: Listing[tuple[int, int, int]], programs: int) -> _Tiles:
    """Return tiles, each given by segment, first row and keys, with the items that they make."""
    if not tiles:
        return _NO_TILES
    if len(tiles) == 1:  # of a lone stream: numpy's calls would be most of packing its step
        ((segment, first, keys),) = tiles
        runs = max(1, min(programs, keys // SPLIT_KEYS_MIN, SPLITS_MAX))
        items = np.zeros((runs, ITEM_WORDS), dtype=np.int32)
        items[:, 1] = range(runs)
        return _Tiles(np.array([(segment, first, 0, runs)], dtype=np.int32), items, runs > 1)
    words, count = np.array(tiles, dtype=np.int64), len(tiles)
    splits = splits_of(words[:, 2], programs)
    is_split = bool(splits.max() > 1)
    made = np.zeros((count, TILE_WORDS), dtype=np.int32)
    made[:, :2], made[:, 3] = words[:, :2], splits
    if is_split:
        places = np.where(splits > 1, splits, 0)
        made[:, 2] = np.cumsum(places) - places
    items = np.zeros((int(splits.sum()), ITEM_WORDS), dtype=np.int32)
    items[:, 0] = np.repeat(np.arange(count), splits)
    if is_split:
        items[:, 1] = np.arange(len(items)) - np.repeat(np.cumsum(splits) - splits, splits)
    return _Tiles(made, items, is_split)


def _write_rows(
    host: Words,
    places: tuple[int, ...],
    rows: int,
    chunks: Listing[Chunk],
    segments: Listing[Segment],
    block_tokens: int,
) -> None:
    """Write token ids, positions and slots, and zeros behind them."""
    ids, positions, slots = (host[start : start + rows] for start in places[:3])
    tables, count = host[places[-1] :], sum(one.count for one in segments)
    if count == len(segments):
        _write_single_rows(ids[:count], positions[:count], slots[:count], chunks, block_tokens)
    else:
        single = [number for number, one in enumerate(segments) if one.count == 1]
        if single:  # together: a few numpy calls for each would take longer than the step's other words
            at = [segments[number].row for number in single]
            own_ids, own_positions, own_slots = np.empty((3, len(single)), dtype=np.int32)
            one_each = [chunks[number] for number in single]
            _write_single_rows(own_ids, own_positions, own_slots, one_each, block_tokens)
            ids[at], positions[at], slots[at] = own_ids, own_positions, own_slots
        for one, chunk in zip(segments, chunks, strict=True):
            if one.count > 1:
                known, end = one.row + chunk.count, one.row + one.count
                run = np.arange(one.start, one.context, dtype=np.int32)
                ids[one.row : known] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
                ids[known:end] = chunk.draft
                positions[one.row : end] = run
                slots[one.row : end] = (
                    tables[one.table + run // block_tokens] * block_tokens + run % block_tokens
                )
    if count < rows:
        ids[count:] = positions[count:] = slots[count:] = 0


def _write_single_rows(
    ids: Words, positions: Words, slots: Words, chunks: Listing[Chunk], block_tokens: int
) -> None:
    places = [chunk.start for chunk in chunks]  # plain lists are quicker for a few numbers
    # Where the step before samples the token, only the device knows it (`Runner.run_behind`).
    known = [(chunk.sequence.tokens, chunk.start) for chunk in chunks]
    ids[:] = [tokens[start] if start < len(tokens) else 0 for tokens, start in known]
    positions[:] = places
    slots[:] = [
        chunk.sequence.pages[place // block_tokens] * block_tokens + place % block_tokens
        for chunk, place in zip(chunks, places, strict=True)
    ]


def _write_spans(host: Words, places: tuple[int, ...], shape: StepShape, segments: Listing[Segment]) -> None:
    flat: list[int] = []
    for one in segments:
        flat += (one.row, one.count, one.start + one.count, one.table)
    end = places[3] + len(flat)
    host[places[3] : end] = flat
    if shape.segments > len(segments):
        host[end : places[3] + shape.segments * SEGMENT_WORDS] = 0


def _write_samples(host: Words, places: tuple[int, ...], shape: StepShape, sampling: list[int]) -> None:
    padding = sampling[-1:] or [0]
    rows = sampling + padding * (shape.samples - len(sampling))
    host[places[8] : places[8] + shape.samples] = rows


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


class UploadQueue(Protocol):
    """What a device does in order: uploads are queued behind the steps before them."""

    def host(self, words: int) -> torch.Tensor:
        """Return memory of the host that a queued copy reads whenever it is its turn."""
        ...

    def device(self, words: int) -> torch.Tensor:
        """Return memory of the device."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Queue a copy to the device; return what waits until it is over."""
        ...


class CudaQueue:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def device(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, device=self._device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


class _QueuedBuffers:
    """Packs in memory of the host and queues the copy to the device's buffer.

    Two host buffers in turns: a copy that is only queued still reads the other one.
    """

    def __init__(self, queue: UploadQueue, words: int) -> None:
        self.words = words
        self._queue = queue
        self._own = queue.device(words)
        self._hosts = [queue.host(words) for _ in range(2)]
        self._wait: list[Callable[[], object] | None] = [None, None]
        self._turn = 0
        self._step = self._hosts[0]

    def host(self, words: int) -> Words:
        """Return memory to write a step of so many words to."""
        self._turn = 1 - self._turn
        wait = self._wait[self._turn]
        if wait is not None:
            wait()  # of two steps ago: over long since
        self._step = self._hosts[self._turn] if words <= self.words else self._queue.host(words)
        return self._step.numpy()

    def written(self, words: int) -> Words:
        """Return what was written last; the device's copy of it may still run."""
        return self._step.numpy()[:words]

    def upload(self, words: int) -> torch.Tensor:
        """Begin the copy and return the words on the device."""
        target = self._own if words <= self.words else self._queue.device(words)
        self._wait[self._turn] = self._queue.copy(self._step[:words], target[:words])
        return target[:words]


_Buffers = _HostBuffers | _QueuedBuffers
