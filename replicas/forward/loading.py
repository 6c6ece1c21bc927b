"""Loads a transformers causal LM, its attention replaced by the paged one, and brings it to its device."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from samovar.cache_tiers.blocks import Bytes
from samovar.configs.sections import MIB
from samovar.replicas.forward.attention import ATTENTION_NAME
from samovar.replicas.forward.attention import register as register_attention
from samovar.replicas.forward.runner import (
    EXPERTS_NAME,
    GROUPED_NAME,
    quicken,
    register_experts,
    why_by_rows,
)
from samovar.replicas.kv import populate_pages
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import ModelSpec

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * MIB
LANES = 6
"""Threads that copy weights. One reads some 2 GB/s out of the page cache, the device takes 55 (PCIe 5)."""

Read = Callable[..., tuple[torch.nn.Module, Mapping[str, Any]]]
"""Makes a model with options of transformers' `from_pretrained`; returns what that says of loading, too."""


def load_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, read: Read | None = None
) -> torch.nn.Module:
    """Load the model for inference, its attention replaced by the paged one.

    `read`: makes it of other weights than all of `spec`'s.
    """
    from transformers import AutoModelForCausalLM  # seconds, which steps of our own need not wait for

    register_attention()
    register_experts()
    in_groups = spec.has_experts and why_by_rows(device, dtype) is None
    way = GROUPED_NAME if in_groups else EXPERTS_NAME
    experts = {"experts_implementation": way} if spec.has_experts else {}
    read = read or partial(AutoModelForCausalLM.from_pretrained, spec.path, local_files_only=True)
    model, loading = read(
        dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True, **experts
    )
    _refuse_incomplete(spec, loading)
    model.eval().requires_grad_(False)
    if device.type == "cpu":
        # Weights are memory-mapped from the file; decoding reads them about 10 % faster from anonymous
        # memory. Tied weights stay tied: one tensor, two names.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    elif device.type == "cuda":
        # Straight from the mapped files: what is served in their dtype takes no main memory besides the
        # files' pages.
        move_weights(model, device, lambda: PinnedLane(device))
    loaded: torch.nn.Module = model.to(device)  # buffers; and where no lane could be had, all of it
    return quicken(loaded) if in_groups else loaded


def _refuse_incomplete(spec: ModelSpec, loading: Mapping[str, Any]) -> None:
    """Refuse weights that are no whole model: transformers has filled what is missing with random numbers."""
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise ModelRefused(
            f"the weights in {spec.path} lack {len(missing)} tensors that the model has, or have them in "
            f"another shape; the first is {missing[0]}",
            "copy all weights, and the config.json that belongs to them",
        )


class Lane(Protocol):
    """Host memory of `PIECE_BYTES` that a device copies from by itself. For one thread at a time."""

    def send(self, piece: Bytes, target: torch.Tensor) -> None:
        """Copy the piece, and begin its copy to `target`, uint8 on the device, once the last one is over."""
        ...

    def wait(self) -> None:
        """Wait until the last copy is over. Raises what the device reports."""
        ...


class PinnedLane:
    """A lane to a CUDA device. Raises `RuntimeError` where no memory can be pinned."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What the device's memory was used for before may not be over yet.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, piece: Bytes, target: torch.Tensor) -> None:
        self.wait()
        np.copyto(self._memory.numpy()[: piece.nbytes], piece)
        with torch.cuda.stream(self._stream):
            target.copy_(self._memory[: piece.nbytes], non_blocking=True)

    def wait(self) -> None:
        self._stream.synchronize()


def move_weights(model: torch.nn.Module, device: torch.device, open_lane: Callable[[], Lane]) -> None:
    """Give the model's parameters memory on the device, filled by several lanes at a time.

    A tensor by itself (`Tensor.to`) is copied from pageable memory by one thread, page fault by page fault:
    1.1 to 1.4 GB/s on an H200's machine. Without a lane nothing is moved, and the log says so.
    """
    lanes = SimpleQueue[Lane]()
    try:
        for _ in range(LANES):
            lanes.put(open_lane())
    except RuntimeError as error:
        logger.warning("weights go to the device without pinned memory: %s", error)
        return

    def send(piece: Bytes, target: torch.Tensor) -> None:
        lane = lanes.get()
        try:
            _bring_in(piece)
            lane.send(piece, target)
            lane.wait()  # a piece is copied while five others are read
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(LANES, thread_name_prefix="weights") as threads:
        moving = [(one, *_pieces(one, device, threads, send)) for one in model.parameters()]
        while moving:  # the memory of a tensor goes as soon as it is there
            parameter, target, sent = moving.pop(0)
            for piece in sent:
                piece.result()
            parameter.data = target


def _pieces(
    parameter: torch.nn.Parameter,
    device: torch.device,
    threads: ThreadPoolExecutor,
    send: Callable[[Bytes, torch.Tensor], None],
) -> tuple[torch.Tensor, list[Future[None]]]:
    """Return memory for a parameter on the device, and what fills it."""
    source = parameter.detach().contiguous()
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    read, filled = source.reshape(-1).view(torch.uint8).numpy(), target.view(-1).view(torch.uint8)
    return target, [
        threads.submit(send, read[at : at + PIECE_BYTES], filled[at : at + PIECE_BYTES])
        for at in range(0, read.nbytes, PIECE_BYTES)
    ]


def _bring_in(piece: Bytes) -> None:
    """Map a piece of a file's pages in one call rather than fault by fault, where the system can."""
    first = piece.ctypes.data
    start = first - first % mmap.PAGESIZE
    try:
        populate_pages(start, first + piece.nbytes - start)
    except OSError as error:
        logger.debug("weights are read fault by fault: %s", error)
