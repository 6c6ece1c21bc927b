"""Measures on this machine, at start and with the real model, what prefill, swaps and loads take."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from functools import partial
from statistics import median

import numpy as np
import torch

from samovar.cache_tiers.blocks import KEY_BYTES, TIERS, BlockShape, ExtentHeader, TierName, record_bytes
from samovar.cache_tiers.messages import Fetch, SampleRequest
from samovar.cache_tiers.pricing import Sample, TierPrice, moving_seconds
from samovar.configs.sections import MIB
from samovar.configs.settings import EngineSettings
from samovar.replicas.forward import Runner
from samovar.replicas.kv import TRASH_PAGE, KvPool, PageIo
from samovar.replicas.measurement_cache import NotMeasured
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import is_memory_short
from samovar.replicas.offload import (
    Expected,
    LoadedBlocks,
    StoreRun,
    TierAccess,
    check_swapped,
    load_extent,
    swap_record,
)
from samovar.replicas.scheduling import Chunk, bare_sequence

# (new tokens, tokens in context): enough to separate the three parts of the price where step time grows with
# the tokens in the step.
SAMPLES = ((16, 0), (128, 0), (256, 0), (128, 256))

SLOW_S, SLOW_NEW, SLOW_GROWN, SLOW_CONTEXT = 0.02, 64, 1.5, 4096
"""Where the shortest step takes so long, and one of `SLOW_NEW` tokens has grown, few tokens show all,
and few behind a long context show more of attention than many do: to measure a large model on a CPU must not
take minutes."""

GROWN = 2.0
"""If step time is mostly launch overhead, longer steps are tried until one takes this many times as long."""

REPEAT_S = 0.1
"""Shorter steps are measured twice: the first step of a shape may include one-time costs."""


def has_grown(samples: Listing[Sample], times: float = GROWN) -> bool:
    """Return whether a step without context takes `times` as long as the first one."""
    return max(seconds for _, context, seconds in samples if not context) >= times * samples[0][2]


def sample_tokens_max(pool: KvPool, step_tokens_max: int, context_tokens_max: int) -> int:
    """Return the longest prompt that `measure_prefill` computes."""
    usable = (pool.pages - 1 - TRASH_PAGE) * pool.geometry.block_tokens
    return min(usable, context_tokens_max, max(2 * step_tokens_max, SLOW_CONTEXT))


def measure_prefill(
    runner: Runner,
    vocab: int,
    step_tokens_max: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    tokens_max: int,
) -> list[Sample]:
    """Measure a few real steps, to fit the price of prefill to. `tokens_max`: see `sample_tokens_max`.

    Runs on the pool's own pages before they hold blocks; they stay unowned.
    """
    block_tokens = runner.pool.geometry.block_tokens
    tokens = [(7919 * i + 13) % vocab for i in range(tokens_max)]
    pages = list(range(TRASH_PAGE + 1, TRASH_PAGE + 1 + -(-len(tokens) // block_tokens)))
    sequence = bare_sequence(tokens, pages)

    def seconds(new: int, context: int) -> float:
        started_s = clock()
        runner.run([Chunk(sequence, context, new)])
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)  # else it is only launched
        return clock() - started_s

    def measure(new: int, context: int) -> None:
        if new > step_tokens_max or new + context > len(tokens):
            return
        took_s = seconds(new, context)
        if took_s < REPEAT_S or runner.device.type == "cuda":
            took_s = min(took_s, seconds(new, context))
        samples.append((new, context, took_s))

    samples: list[Sample] = []
    seconds(min(16, len(tokens)), 0)  # the first step of a process includes all one-time costs
    few, _ = SAMPLES[0]
    measure(few, 0)
    if samples and samples[0][2] >= SLOW_S:
        measure(SLOW_NEW, 0)
        if has_grown(samples, SLOW_GROWN):
            measure(few, min(SLOW_CONTEXT, len(tokens)) - few)
            return samples
    for new, context in SAMPLES[1:]:
        measure(new, context)
    largest, full = SAMPLES[-2][0], min(step_tokens_max, len(tokens))
    while samples and largest < full and not has_grown(samples):
        largest = min(2 * largest, full)
        measure(largest, 0)
        measure(largest // 2, largest)  # the cost of attention, too, may show only at this size
    return samples


def run_largest_steps(
    runner: Runner, vocab: int, *, step_tokens: int, sequences: int, context_tokens: int
) -> None:
    """Run a full step at the end of the longest context, and one of as many decodes as there may be.

    What torch keeps of the device's memory afterwards is what steps take, so the rest is free for the pool.
    `runner`: on a pool of two pages or more, without blocks; the page tables name the same page again and
    again, so that what is computed is nonsense of the right size. Raises `torch.OutOfMemoryError`.
    """
    blocks = -(-context_tokens // runner.pool.geometry.block_tokens)
    tokens = [(7919 * i + 13) % vocab for i in range(context_tokens)]
    sequence = bare_sequence(tokens, [TRASH_PAGE + 1] * blocks)
    new = min(step_tokens, context_tokens)
    runner.run([Chunk(sequence, context_tokens - new, new)])
    runner.run([Chunk(sequence, context_tokens - 1, 1)] * min(sequences, step_tokens))
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def hold_step_memory(engine: EngineSettings, runner: Runner, vocab: int, context_tokens: int) -> None:
    """Let torch hold the memory that the largest steps take: others take what is left.

    `runner`: as for `run_largest_steps`. Raises `ModelRefused` if there is too little of it.
    """
    tokens = engine.step_tokens_max
    run = partial(run_largest_steps, runner, vocab, step_tokens=tokens, sequences=engine.sequences_max)
    try:
        runner.try_out(lambda: run(context_tokens=context_tokens))
    except Exception as error:
        if not is_memory_short(error):
            raise
        raise ModelRefused(
            f"a step of {tokens} tokens at the end of a context of {context_tokens}, with the attention "
            f"{runner.backend.name}, does not fit into the device's memory beside the weights ({error})",
            "lower engine.step_tokens_max, engine.sequences_max or model.context_tokens_max",
        ) from error


SAMPLE_BYTES = 32 * MIB
REPEATS = 3


def measure_copy(
    io: PageIo,
    shape: BlockShape,
    *,
    pages: int,
    bytes_max: int,
    clock: Callable[[], float] = time.perf_counter,
) -> TierPrice | None:
    """Measure how long one direction of swapping takes, between the pool's `pages` and host memory.

    With checksums: what a sequence waits for, though no other does.

    Runs on pages that hold no blocks, and leaves their content unchanged. `bytes_max`: of the swap space.
    None: there is no room, or it failed.
    """
    block_bytes = shape.block_bytes
    room = min(bytes_max, SAMPLE_BYTES) - record_bytes(1, shape)
    blocks = min(pages - 1 - TRASH_PAGE, 1 + room // block_bytes)
    if blocks < 1 or record_bytes(blocks, shape) > bytes_max:
        return None
    sequence = bare_sequence([], [])

    def both_ways_s(blocks: int) -> float | None:
        keys = tuple((1 + number).to_bytes(KEY_BYTES, "big") for number in range(blocks))
        run = StoreRun(0, keys, (shape.block_tokens,) * blocks)
        some = range(TRASH_PAGE + 1, TRASH_PAGE + 1 + blocks)
        started_s = clock()
        try:
            record = swap_record(sequence, run, some, shape, io, io.mark())
        except MemoryError:  # memory can run out below our own limit
            return None
        loaded = check_swapped(sequence, run, record, 0, shape)
        if loaded.bad is not None:
            return None
        io.begin_in(loaded.payload, some, io.mark()).wait()
        return clock() - started_s

    small, whole = (
        [took_s for _ in range(REPEATS) if (took_s := both_ways_s(some)) is not None] for some in (1, blocks)
    )
    if not small or not whole:
        return None
    small_s, whole_s = median(small), median(whole)
    moving_s = moving_seconds(small_s, whole_s)
    return TierPrice(small_s / 2, 2 * max(1, blocks - 1) * block_bytes / moving_s)


ROAD_BYTES, ROAD_BYTES_MAX = 16 * MIB, 256 * MIB
"""Of the first and of the largest samples of a tier, all together."""
ROAD_LONG_S = 0.01
"""Samples are made larger until a load of them takes so long: what is shorter is mostly latency."""
ROAD_S_MAX = 0.5
"""No larger samples are made of a tier after this time."""
ROAD_REPEATS = 3


class Roads:
    """Measures what loads take from each tier of the node into the pool's pages, by the way that they go.

    `pages`: of the pool, which holds no blocks yet; what is loaded is overwritten with zeros, and no other
    page is touched. `extents`: are loaded side by side.

    `blocks_max`: of the largest sample.
    """

    def __init__(
        self,
        access: TierAccess,
        io: PageIo,
        shape: BlockShape,
        *,
        pages: int,
        extents: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._access = access
        self._io = io
        self._shape = shape
        self._extents = extents
        self._clock = clock
        self._first_page = TRASH_PAGE + 1
        most = min(ROAD_BYTES_MAX // shape.block_bytes, pages - self._first_page)
        self.blocks_max = most // extents
        self._loaded_blocks = 0

    def measure(self, tier: TierName) -> TierPrice:
        """Return the price of a local tier's road.

        Raises `NotMeasured` if it has no room for samples, or if a load of them failed: its first load tells.
        """
        self._loaded_blocks = 0
        price = self._price(tier)
        zeros = np.zeros(self._shape.block_bytes, dtype=np.uint8)
        for page in range(self._first_page, self._first_page + self._loaded_blocks):
            self._io.begin_in(zeros, [page], self._io.mark()).wait()
        if price is None:
            raise NotMeasured("it has no room for samples, or a load of them failed")
        return price

    def _price(self, tier: TierName) -> TierPrice | None:
        blocks = min(max(2, ROAD_BYTES // (self._extents * self._shape.block_bytes)), self.blocks_max)
        if blocks < 2:
            return None
        until_s = self._clock() + ROAD_S_MAX
        small_s, price = self._seconds(tier, 1), None
        while small_s is not None:
            whole_s = self._seconds(tier, blocks)
            if whole_s is None:
                break  # what fewer blocks have said holds
            moving_s = moving_seconds(small_s, whole_s)
            bytes_per_s = self._extents * (blocks - 1) * self._shape.block_bytes / moving_s
            price = TierPrice(max(whole_s - blocks * moving_s / (blocks - 1), whole_s / 100), bytes_per_s)
            if whole_s >= ROAD_LONG_S or 4 * blocks > self.blocks_max or self._clock() >= until_s:
                break
            blocks *= 4
        return price

    def _seconds(self, tier: TierName, blocks: int) -> float | None:
        """Return what loading as many extents of `blocks` as are loaded at a time takes, all together.

        The least of some: a stall makes a load dearer, and nothing but a quicker road makes one cheaper.
        """
        # What is read from a disk is in main memory afterwards, so that only the first time is of it.
        rounds, repeats = (ROAD_REPEATS - 1, 1) if TIERS.kind(tier).survives_process else (1, ROAD_REPEATS)
        took = [took_s for _ in range(rounds) if (took_s := self._least(tier, blocks, repeats)) is not None]
        return min(took) if len(took) == rounds else None

    def _least(self, tier: TierName, blocks: int, repeats: int) -> float | None:
        """Return the least that `repeats` loads of the same new samples took; None: one of them failed."""
        samples = self._access.link.sample(SampleRequest(tier, self._shape, blocks, self._extents))
        try:
            if len(samples) != self._extents:
                return None
            took = [took_s for _ in range(repeats) if (took_s := self._load(tier, samples)) is not None]
            return min(took) if len(took) == repeats else None
        finally:
            self._access.link.measured({}, samples)

    def _load(self, tier: TierName, samples: Listing[ExtentHeader]) -> float | None:
        started_s, read = self._clock(), self._io.mark()

        def bring(number: int, sample: ExtentHeader) -> bool:
            blocks = sample.blocks
            fetch = Fetch(
                sample.namespace, sample.tenant, sample.extent_id, 0, blocks, tier, deadline_s=2 * ROAD_S_MAX
            )
            expected = Expected(sample.namespace, self._shape, 0, sample.keys, sample.token_counts)
            first = self._first_page + number * blocks
            try:
                loaded = load_extent(self._access.link.fetch, fetch, expected, self._clock)
                if not isinstance(loaded, LoadedBlocks) or loaded.good < blocks:
                    return False
                self._io.begin_in(loaded.payload, range(first, first + blocks), read).wait()
            except MemoryError:  # staging memory can run out below our own limit
                return False
            return True

        coming = [
            self._access.lanes.fetch.submit(bring, number, sample) for number, sample in enumerate(samples)
        ]
        came = [future.result() for future in coming]
        if any(came):
            self._loaded_blocks = max(self._loaded_blocks, sum(sample.blocks for sample in samples))
        return self._clock() - started_s if all(came) else None
