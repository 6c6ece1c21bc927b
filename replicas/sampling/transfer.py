"""Moves many small arrays between host and device, in one transfer each way."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Bytes at whose multiples arrays begin in a packed buffer: no dtype needs more."""


def upload(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors on the device; they arrive before what is launched next reads them.

    On CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    buffer = torch.from_numpy(packed(arrays)).pin_memory()
    return unpacked(arrays, buffer.to(device, non_blocking=True))


def packed(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return one buffer of all arrays, those of bool as bits."""
    parts = []
    for array in arrays.values():
        flat = np.packbits(array, axis=-1, bitorder="little") if array.dtype == np.bool_ else array
        content = np.ascontiguousarray(flat).reshape(-1).view(np.uint8)
        parts += [content, np.zeros(-len(content) % ALIGNMENT, dtype=np.uint8)]
    return np.concatenate(parts)


def unpacked(arrays: Mapping[str, NDArray[Any]], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arrays as views of a buffer that `packed` made of them, on its device; bools are copies."""
    found, start = {}, 0
    for name, array in arrays.items():
        is_bits = array.dtype == np.bool_
        shape = (*array.shape[:-1], -(-array.shape[-1] // 8)) if is_bits else array.shape
        nbytes = int(np.prod(shape)) * (1 if is_bits else array.itemsize)
        content = buffer[start : start + nbytes]
        if is_bits:
            found[name] = _bools(content.view(shape), array.shape[-1])
        else:
            found[name] = content.view(torch.from_numpy(array[:0]).dtype).view(shape)
        start += nbytes + -nbytes % ALIGNMENT
    return found


def _bools(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return bool `[..., count]` of uint8 `[..., bytes]`, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[..., None] >> places) & 1).flatten(-2)[..., :count].bool()


def fetch(tensors: Listing[torch.Tensor]) -> list[NDArray[Any]]:
    """Return int32 and float32 tensors of one device as flat arrays, in one transfer that waits for them.

    On CPU they share the tensors' memory.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.reshape(-1).numpy() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors]).cpu().numpy()
    found, start = [], 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        found.append(part.view(np.float32) if tensor.dtype == torch.float32 else part)
        start += tensor.numel()
    return found
