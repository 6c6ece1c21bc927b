"""vLLM's KV tensors as pages of bytes: on a CPU in place, on a GPU by a stream of its own. Needs torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.vllm.messages import PageLayout


def _by_page(name: str, tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """Return a view of a layer's tensor whose first dimension is the page. Raises `ValueError`."""
    for dim, size in enumerate(tensor.shape):
        if size == pages:
            return tensor.movedim(dim, 0)
    raise ValueError(f"layer {name}: no dimension of {tuple(tensor.shape)} is the pool's {pages} pages")


def layout_of(tensors: Mapping[str, torch.Tensor], pages: int) -> tuple[PageLayout, list[torch.Tensor]]:
    """Return what a page's bytes mean, and each layer by page. Raises `ValueError` if sizes differ."""
    layers = {name: _by_page(name, tensor, pages) for name, tensor in tensors.items()}
    sizes = {layer[0].numel() * layer.element_size() for layer in layers.values()}
    if len(sizes) != 1:
        raise ValueError(
            f"layers of {sorted(sizes)} bytes a page: only models whose layers are alike are stored"
        )
    words = tuple(
        f"{name} {layer.dtype} {tuple(layer.shape[1:])} {layer[0].stride()}" for name, layer in layers.items()
    )
    return PageLayout(words, sizes.pop()), list(layers.values())


def open_pages(tensors: Mapping[str, torch.Tensor], pages: int) -> CpuPages | DevicePages:
    """Return the pages of an engine. Raises `ValueError`, see `layout_of`."""
    layout, layers = layout_of(tensors, pages)
    if layers[0].device.type == "cpu":
        return CpuPages(layout, layers)
    return DevicePages(layout, layers)


class CpuPages:
    """Pages in this process' memory. Other threads may compute meanwhile: each page has one owner."""

    def __init__(self, layout: PageLayout, layers: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._layers = layers
        self._rows: list[Bytes] | None = None
        if all(layer.is_contiguous() for layer in layers):
            self._rows = [layer.view(torch.uint8).reshape(layer.shape[0], -1).numpy() for layer in layers]

    def gather(self, pages: Sequence[int], out: Bytes) -> None:
        """Copy pages to u8 `[blocks, layers, layer_bytes]`."""
        for number, layer in enumerate(self._layers):
            if self._rows is not None:
                out[:, number] = self._rows[number][list(pages)]
            else:
                found = layer.index_select(0, torch.tensor(pages)).contiguous()
                out[:, number] = found.view(torch.uint8).reshape(len(pages), -1).numpy()

    def scatter(self, pages: Sequence[int], blocks: Bytes) -> None:
        """Copy u8 `[blocks, layers, layer_bytes]` to pages."""
        for number, layer in enumerate(self._layers):
            if self._rows is not None:
                self._rows[number][list(pages)] = blocks[:, number]
            else:
                one = torch.from_numpy(np.ascontiguousarray(blocks[:, number])).view(layer.dtype)
                layer.index_copy_(0, torch.tensor(pages), one.reshape(len(pages), *layer.shape[1:]))

    def mark(self) -> Callable[[], None]:
        """Return what waits until the KV that was computed up to now is there: it is."""
        return lambda: None


class DevicePages:
    """Pages on a GPU: gathered and scattered there, in one run, copied on a stream of this object's own."""

    def __init__(self, layout: PageLayout, layers: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._layers = layers
        self._device = layers[0].device
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # one staging buffer

    def gather(self, pages: Sequence[int], out: Bytes) -> None:
        """Copy pages to u8 `[blocks, layers, layer_bytes]`."""
        with self._lock, torch.cuda.stream(self._stream):
            index = torch.tensor(pages, device=self._device)
            runs = [
                layer.index_select(0, index).contiguous().view(torch.uint8).reshape(len(pages), 1, -1)
                for layer in self._layers
            ]
            host = torch.cat(runs, dim=1).to("cpu", non_blocking=False)
            self._stream.synchronize()
        out[:] = host.numpy()

    def scatter(self, pages: Sequence[int], blocks: Bytes) -> None:
        """Copy u8 `[blocks, layers, layer_bytes]` to pages."""
        with self._lock, torch.cuda.stream(self._stream):
            index = torch.tensor(pages, device=self._device)
            rows = torch.from_numpy(np.array(blocks)).to(self._device, non_blocking=False)
            for number, layer in enumerate(self._layers):
                one = rows[:, number].contiguous().view(layer.dtype)
                layer.index_copy_(0, index, one.reshape(len(pages), *layer.shape[1:]))
            self._stream.synchronize()

    def mark(self) -> Callable[[], None]:
        """Return what waits until the KV that was computed up to now is there."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize  # type: ignore[no-any-return]
