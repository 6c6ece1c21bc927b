"""Decode steps as CUDA graphs: what a step launches is recorded once, and replayed with new numbers.

A GPU computes a decode of a few rows in less time than Python needs to launch it. A graph is recorded for
each of a few numbers of rows, the buckets; a step is padded to the next larger one. Everything that a graph
reads or writes stays at its address: the step's words, the pool, the weights, and what it leaves behind.
Prefill has too many shapes and is computed eagerly.

The best token of each row and the look for NaN are part of a graph. What is drawn at random is not: its
launches go out while the graph still runs, and a step without any does not pay for them.

Nothing of CUDA in this file has ever run: there was no GPU where it was written.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Protocol

import torch

from samovar.replicas.forward.inputs import StepInputs, StepPacker, StepShape
from samovar.replicas.kv import TRASH_PAGE
from samovar.replicas.messages import SamplingParams
from samovar.replicas.sampling import greedy_of
from samovar.replicas.scheduling import Chunk, Sequence

BUCKET_ROWS = 8
"""Distance of the larger buckets: the matrix tiles of a GPU have more rows, so padding costs little."""


def buckets_of(rows_max: int) -> tuple[int, ...]:
    """Return the numbers of rows that have a graph: 1, 2, 4, 8, every 8 up to `rows_max`, and that."""
    some = {1, 2, 4, *range(BUCKET_ROWS, rows_max, BUCKET_ROWS), rows_max}
    return tuple(sorted(bucket for bucket in some if bucket <= rows_max))


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


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a graph leaves behind until the next one: logits `[rows, vocab]`, and their `greedy_of`."""

    logits: torch.Tensor
    greedy: torch.Tensor


Compute = Callable[[StepInputs], torch.Tensor]
"""Computes float32 logits `[samples, vocab]`, padding included, from the tensors of a step alone."""


class DecodeGraphs:
    """Graphs of decode steps of up to `rows_max` sequences, recorded when this is made, the largest first.

    `packer`: of the runner; from here on its buffer stays where it is. `context_tokens_max`: of a sequence.
    Raises what the recording raises: then these steps have to be computed eagerly.
    """

    def __init__(
        self,
        packer: StepPacker,
        compute: Compute,
        capture: Capture,
        *,
        rows_max: int,
        vocab: int,
        context_tokens_max: int,
        block_tokens: int,
    ) -> None:
        self.buckets = buckets_of(rows_max)
        self._packer = packer
        self._compute = compute
        self._longest = _longest_decode(context_tokens_max, block_tokens)
        table_words = len(self._longest.sequence.pages)
        words = _shape(rows_max).places()[-1] + 1 + rows_max * table_words
        packer.reserve(max(words, packer.words_max))
        first = packer.pack([self._longest] * rows_max, _shape(rows_max))
        self._address = first.words.data_ptr()
        self._logits = torch.empty((rows_max, vocab), dtype=torch.float32, device=first.device)
        self._greedy = torch.empty(2 * rows_max, dtype=torch.int32, device=first.device)
        # The largest first: the others find room in the memory that it has taken.
        self._replays = {bucket: self._recorded(bucket, capture) for bucket in reversed(self.buckets)}

    def run(self, chunks: Listing[Chunk]) -> Decoded | None:
        """Compute a step; None: it is not one of those that are recorded, and nothing was done.

        Its sequences' next tokens are sampled from rows in the order of `chunks`.
        """
        rows = len(chunks)
        if not 0 < rows <= self.buckets[-1] or not all(map(_is_decode, chunks)):
            return None
        bucket = next(bucket for bucket in self.buckets if bucket >= rows)
        self._pack(chunks, bucket)
        self._replays[bucket]()
        left = self._left(bucket)
        return Decoded(left.logits[:rows], left.greedy[:, :rows])

    def _recorded(self, bucket: int, capture: Capture) -> Callable[[], None]:
        inputs, left = self._pack([self._longest] * bucket, bucket), self._left(bucket)

        def launch() -> None:
            left.logits.copy_(self._compute(inputs))
            left.greedy.copy_(greedy_of(left.logits))

        return capture(launch)

    def _left(self, bucket: int) -> Decoded:
        return Decoded(self._logits[:bucket], self._greedy[: 2 * bucket].view(2, bucket))

    def _pack(self, chunks: Listing[Chunk], bucket: int) -> StepInputs:
        inputs = self._packer.pack(chunks, _shape(bucket))
        if inputs.words.data_ptr() != self._address:
            raise AssertionError("a step's words have moved: the recorded graphs would read an older step")
        return inputs


def _shape(bucket: int) -> StepShape:
    """Return the shape of a decode of so many sequences: each has one row, one query tile, and is sampled."""
    return StepShape(rows=bucket, segments=bucket, tiles=bucket, samples=bucket)


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
        pages=[TRASH_PAGE] * -(-context_tokens_max // block_tokens),
    )
    return Chunk(sequence, context_tokens_max - 1, 1)


def _is_decode(chunk: Chunk) -> bool:
    return chunk.rows == 1 and chunk.samples and not chunk.scored
