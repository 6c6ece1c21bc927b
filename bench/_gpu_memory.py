"""A step that runs out of device memory: the others finish, and it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench._gpu_device import Device
from bench._gpu_engine import Sizes, shape_of
from bench._gpu_model import Caller, tokens_of
from bench._gpu_run import Rows, must_be
from samovar.configs.sections import MIB

SPARE_BYTES = 96 * MIB
"""What a step of a few rows may still take; activations of a long prompt take ten times that."""
OTHERS = 4


def survive_memory(rows: Rows, caller: Caller, device: Device, sizes: Sizes) -> None:
    """Let a prompt's step run out of memory beside running answers, and look at what becomes of all.

    The pool is full before: of blocks that earlier prompts left, and of the running ones.
    """
    short = max(16, sizes.context // 8)
    pool = caller.engine.scheduler.pool
    for number in range(1 + pool.usable // pool.pages_for(sizes.context)):
        caller.drain(caller.ask(tokens_of(sizes.context, 400 + number, caller.shape), 1))
    if pool.free > pool.pages_for(sizes.context):
        raise RuntimeError(f"{pool.free} pages of {pool.usable} are still free")
    keys = [
        caller.ask(tokens_of(short, 500 + other, caller.shape), 4 * sizes.steps) for other in range(OTHERS)
    ]
    caller.decode_all(keys)
    before = caller.engine.stats()
    with little_memory(caller, device):
        long = caller.ask(tokens_of(sizes.context, 600, caller.shape), 2)
        caller.drain(*keys, long)
    after = caller.engine.stats()
    good = sum(
        len(caller.asked[key].tokens) == 4 * sizes.steps and not caller.asked[key].failed for key in keys
    )
    shape = f"{OTHERS} beside {shape_of(1, sizes.context)}"
    rows.add(
        "answers that a step without memory did not end", shape, good / OTHERS, "of all", must_be(">=", 1)
    )
    counted = sum(after.memory_shortages.values()) - sum(before.memory_shortages.values())
    rows.add("steps without memory that were counted", shape, counted, "steps", must_be(">=", 1))
    ended = caller.asked[long]
    rows.add(
        "the prompt that did not fit was computed in parts",
        ended.failed or shape,
        float(not ended.failed),
        "of 1",
    )
    again = caller.ask(tokens_of(short, 601, caller.shape), 2)
    caller.drain(again)
    rows.add(
        "answers after it",
        shape_of(1, short),
        float(not caller.asked[again].failed),
        "of 1",
        must_be(">=", 1),
    )


@contextmanager
def little_memory(caller: Caller, device: Device) -> Iterator[None]:
    """Leave so little memory that no long step fits: of the allocator on CUDA, in play on a CPU."""
    if device.is_cuda:
        device.settle()
        total = torch.cuda.get_device_properties(device.torch).total_memory
        limit = (torch.cuda.memory_reserved(device.torch) + SPARE_BYTES) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit), device.torch)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device.torch)
        return
    runner: Any = caller.engine.runner
    whole = runner.run

    def run(chunks: Any, *more: Any, **named: Any) -> Any:
        if sum(chunk.count for chunk in chunks) > 2 * caller.shape.block_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory: played by bench.gpu")
        return whole(chunks, *more, **named)

    runner.run = run
    try:
        yield
    finally:
        del runner.run
