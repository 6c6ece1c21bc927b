"""Steps as CUDA graphs: what a step launches is recorded once, and replayed with new numbers.

A GPU computes a few rows in less time than Python needs to launch it: decodes, and as much the chunk of a
short turn. A graph is recorded for each of a few shapes: of decodes alone, and of chunks of prompts beside
decodes. A step is padded to the next larger one; padding rows write into the trash page, and attention has no
work for them. Everything that a graph reads or writes stays at its address: the step's words, the pool, the
weights, and what it leaves behind. Longer steps are computed eagerly: their kernels take longer than their
launches.

The best token of each sampled row and the look for NaN are part of a graph. What is drawn at random is not:
its launches go out while the graph still runs, and a step without any does not pay for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Protocol

import torch

from samovar.replicas.forward.inputs import NO_TILES, StepInputs, StepPacker, StepShape, TilePlaces, Tiling
from samovar.replicas.kv import TRASH_PAGE
from samovar.replicas.messages import SamplingParams
from samovar.replicas.sampling import greedy_of
from samovar.replicas.scheduling import Chunk, Sequence, page_table

ROWS_APART = ((8, 64), (16, 256), (32, 4096))
"""Distance of the buckets of decodes, up to so many rows: a step is padded by a few percent."""

CHUNK_ROWS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
"""Rows of the steps with chunks that are recorded: up to 128 a step takes the time of reading the weights,
whatever its rows; beyond, no more than half of them are padding, and an eighth at the end."""
CHUNKS_MIN, CHUNKS_MAX = 4, 8
"""Segments of several rows that a recorded step has room for; few chunks come in one step."""


def buckets_of(rows_max: int) -> tuple[int, ...]:
    """Return the numbers of decodes that have a graph: 1, 2, 4, 8, then `ROWS_APART`, and `rows_max`."""
    some, last = {1, 2, 4, rows_max}, 0
    for apart, end in ROWS_APART:
        some.update(range(last + apart, end + 1, apart))
        last = end
    return tuple(sorted(bucket for bucket in some if 0 < bucket <= rows_max))


def chunk_buckets_of(tokens_max: int) -> tuple[int, ...]:
    """Return the rows of recorded steps with chunks, the last of them for `tokens_max` rows or more."""
    return tuple(rows for rows, last in zip(CHUNK_ROWS, (0, *CHUNK_ROWS), strict=False) if last < tokens_max)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Which steps are recorded.

    `decodes`: steps of up to so many decodes alone; 0: none. `tokens`: others, of up to about so many tokens;
    0: none. `sequences`: how many run at a time. `context_tokens`: of the longest one.
    """

    decodes: int
    tokens: int
    sequences: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step needs room for: rows, segments of one row and of more, rows that sample."""

    rows: int
    single: int
    several: int
    samples: int

    @staticmethod
    def of(chunks: Listing[Chunk]) -> StepParts | None:
        """Return the parts of a step; None: it also computes log-probabilities of a prompt."""
        total, single, samples = 0, 0, 0
        for chunk in chunks:
            if chunk.scored:
                return None
            rows = chunk.rows
            total += rows
            single += rows == 1
            samples += len(chunk.sampled_rows)
        return StepParts(total, single, len(chunks) - single, samples)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape that is recorded. `most`: what it has room for."""

    shape: StepShape
    most: StepParts

    @staticmethod
    def of_decodes(rows: int, tiling: Tiling) -> Bucket:
        """Return the bucket of so many decodes: each has one row, one tile, and is sampled."""
        tiles = TilePlaces(rows, rows + tiling.decodes)
        return Bucket(StepShape(rows, rows, rows, tiles, NO_TILES, True), StepParts(rows, rows, 0, rows))

    @staticmethod
    def of_chunks(rows: int, sequences: int, tiling: Tiling) -> Bucket:
        """Return the bucket of so many rows of chunks, and of decodes: half of the rows, or more of many."""
        single = min(sequences, max(rows // 2, rows - 64))
        several = min(CHUNKS_MAX, max(CHUNKS_MIN, rows // 16))
        tiles = several + (rows - several) // tiling.rows  # as many as so many chunks can have
        shape = StepShape(
            rows,
            single + several,
            single + several,
            TilePlaces(single, single + tiling.decodes),
            TilePlaces(tiles, tiles + tiling.others),
            True,
        )
        return Bucket(shape, StepParts(rows, single, several, single + several))

    def holds(self, parts: StepParts) -> bool:
        """Whether a step of these parts can be padded to this shape."""
        most = self.most
        return (
            parts.rows <= most.rows
            and parts.single <= most.single
            and parts.several <= most.several
            and parts.samples <= most.samples
        )


class Capture(Protocol):
    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record what `launch` launches; return what launches the same again, at the same addresses."""
        ...


class CudaCapture:
    """Records CUDA graphs that share the memory of what they compute on the way: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        # A first run compiles and loads kernels and gives them workspaces, none of which can be recorded.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            launch()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: only what this one does must be fit for recording.
        # The outer context: if the recording is spoiled, torch's own leaves this thread on the stream.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            launch()
        return graph.replay


def open_capture(device: torch.device) -> Capture | None:
    """Return what records steps on a device; None: nothing can be recorded there."""
    return CudaCapture(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Computed:
    """What a graph leaves behind until the next one: logits `[rows, vocab]`, and their `greedy_of`."""

    logits: torch.Tensor
    greedy: torch.Tensor


Compute = Callable[[StepInputs], torch.Tensor | None]
"""Computes a step from its tensors alone: float32 logits `[samples, vocab]`, padding included.

None: there are none, as another rank makes them.
"""


class StepGraphs:
    """Graphs of steps, recorded when this is made, the largest first.

    `packer`: of the runner; from here on its buffer stays where it is. Raises what the recording raises: then
    these steps have to be computed eagerly.
    """

    def __init__(
        self,
        packer: StepPacker,
        compute: Compute,
        capture: Capture,
        tiling: Tiling,
        limits: GraphLimits,
        *,
        block_tokens: int,
    ) -> None:
        self.decodes = [Bucket.of_decodes(rows, tiling) for rows in buckets_of(limits.decodes)]
        self.chunks = [
            Bucket.of_chunks(rows, limits.sequences, tiling) for rows in chunk_buckets_of(limits.tokens)
        ]
        self._packer = packer
        self._compute = compute
        self._longest = _longest_decode(limits.context_tokens, block_tokens)
        # The largest first: the others find room in the memory that it has taken.
        buckets = sorted((*self.decodes, *self.chunks), key=lambda bucket: -bucket.shape.rows)
        shapes = [bucket.shape for bucket in buckets]
        words = max(shape.places()[-1] + 1 + shape.segments * self._table_words for shape in shapes)
        packer.reserve(max(words, packer.words_max))
        self._samples = max(shape.samples for shape in shapes)
        self._left: Computed | None = None
        self._address = self._filled(buckets[0]).words.data_ptr()
        self._replays = {bucket.shape: self._recorded(bucket, capture) for bucket in buckets}

    def shape_of(self, chunks: Listing[Chunk]) -> StepShape | None:
        """Return the shape to pack a step to; None: it is not one of those that are recorded."""
        parts = StepParts.of(chunks)
        if parts is None:
            return None
        is_decodes = parts.rows == parts.single == parts.samples
        buckets = (*(self.decodes if is_decodes else ()), *self.chunks)
        return next((bucket.shape for bucket in buckets if bucket.holds(parts)), None)

    def replay(self, inputs: StepInputs) -> Computed | None:
        """Compute the step that was packed last, to a shape that is recorded; None: it makes no logits."""
        if inputs.words.data_ptr() != self._address:
            raise AssertionError("a step's words have moved: the recorded graphs would read an older step")
        self._replays[inputs.shape]()
        left, sampled = self._left, inputs.sampled
        if left is None:
            return None
        greedy = left.greedy[: 2 * inputs.shape.samples].view(2, -1)
        return Computed(left.logits[:sampled], greedy[:, :sampled])

    def forget(self) -> None:
        """Destroy the graphs: NCCL waits for that before it lets go of what their sums go through."""
        self._replays.clear()

    @property
    def most_decodes(self) -> int:
        """Return how many decodes a recorded step holds at most."""
        return max(bucket.most.single for bucket in (*self.decodes, *self.chunks))

    @property
    def sentence(self) -> str:
        """Return what is recorded."""
        kinds = (
            (self.decodes, "of decodes to", "rows"),
            (self.chunks, "of chunks to", "tokens"),
        )
        return ", ".join(
            f"{len(buckets)} {of} {buckets[-1].shape.rows} {what}" for buckets, of, what in kinds if buckets
        )

    @property
    def _table_words(self) -> int:
        return len(self._longest.sequence.pages)

    def _recorded(self, bucket: Bucket, capture: Capture) -> Callable[[], None]:
        inputs, samples = self._filled(bucket), bucket.shape.samples

        def launch() -> None:
            found = self._compute(inputs)
            if found is not None:
                left = self._place(found)
                left.logits[:samples].copy_(found)
                left.greedy[: 2 * samples].copy_(greedy_of(left.logits[:samples]).flatten())

        return capture(launch)

    def _place(self, found: torch.Tensor) -> Computed:
        """Return where graphs leave what they compute; made when the first of them is run, to be recorded."""
        if self._left is None:
            vocab, device = found.shape[1], found.device
            logits = torch.empty((self._samples, vocab), dtype=torch.float32, device=device)
            self._left = Computed(logits, torch.empty(2 * self._samples, dtype=torch.int32, device=device))
        return self._left

    def _filled(self, bucket: Bucket) -> StepInputs:
        """Pack a step of the bucket's shape, with long contexts: as many decodes and a chunk as it holds."""
        most, longest = bucket.most, self._longest
        rows = min(most.rows - most.single, longest.start + 1)
        end = longest.start + 1
        chunks = [longest] * most.single
        if rows > 1:
            chunks.append(Chunk(longest.sequence, end - rows, rows))
        return self._packer.pack(chunks, bucket.shape)


def _longest_decode(context_tokens_max: int, block_tokens: int) -> Chunk:
    """Return a decode with the longest page table, all of it the trash page: any other is shorter."""
    sequence = Sequence(
        request_id="graph",
        arrival=0,
        namespace=bytes(32),
        tokens=array("I", [0]) * context_tokens_max,
        prompt_tokens=context_tokens_max,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        pages=page_table([TRASH_PAGE]) * -(-context_tokens_max // block_tokens),
    )
    return Chunk(sequence, context_tokens_max - 1, 1)
