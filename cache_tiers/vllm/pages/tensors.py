"""vLLM's KV tensors as pages of bytes: on a CPU in place, on a GPU by streams of their own. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.vllm.messages import PageLayout
from samovar.cache_tiers.vllm.pages.staged import PageEvent, PageStream, StagedPages

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of KV that stands for itself."""


def _by_page(name: str, tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """Return a view of a layer's tensor whose first dimension is the page. Raises `ValueError`."""
    if not isinstance(tensor, torch.Tensor):  # states of Mamba come as lists
        raise ValueError(f"layer {name} is a {type(tensor).__name__}: only KV of attention is stored")
    for dim, size in enumerate(tensor.shape):
        if size == pages:
            return tensor.movedim(dim, 0)
    raise ValueError(f"layer {name}: no dimension of {tuple(tensor.shape)} is the pool's {pages} pages")


def layout_of(tensors: Mapping[str, torch.Tensor], pages: int) -> tuple[PageLayout, list[torch.Tensor]]:
    """Return what a page's bytes mean, and each layer by page. Raises `ValueError` if sizes differ."""
    layers = {name: _by_page(name, tensor, pages) for name, tensor in tensors.items()}
    strange = {str(layer.dtype) for layer in layers.values()} - {str(one) for one in DTYPES}
    if strange:
        raise ValueError(
            f"KV of {', '.join(sorted(strange))}: its scales lie outside of the pages; set kv_cache_dtype to "
            "'bfloat16', or leave the connector out"
        )
    sizes = {layer[0].numel() * layer.element_size() for layer in layers.values()}
    if len(sizes) != 1:
        raise ValueError(
            f"layers of {sorted(sizes)} bytes a page: only models whose layers are alike are stored"
        )
    words = tuple(
        f"{name} {layer.dtype} {tuple(layer.shape[1:])} {layer[0].stride()}" for name, layer in layers.items()
    )
    return PageLayout(words, sizes.pop()), list(layers.values())


def open_pages(tensors: Mapping[str, torch.Tensor], pages: int) -> CpuPages | StagedPages:
    """Return the pages of an engine. Raises `ValueError`, see `layout_of`; `MemoryError`."""
    layout, layers = layout_of(tensors, pages)
    if layers[0].device.type == "cpu":
        return CpuPages(layout, layers)
    return StagedPages(layout, TorchDevice(layers))


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


class PageRows:
    """Layers of pages on a device: a block's bytes to and from rows u8 `[blocks, layers, layer_bytes]`.

    Where all layers of a page lie one behind the other (vLLM's `BLHNC`) a run of pages is one copy. Otherwise
    they are collected on the device first. Nothing here waits; runs on the current stream.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = layers
        self._blocks = as_blocks(layers)

    def read(self, pages: Sequence[int], host: torch.Tensor) -> None:
        """Fill `host` from pages."""
        if self._blocks is not None:
            for at, page, count in runs_of(pages):
                rows = self._blocks[page : page + count]
                host[at : at + count].reshape(count, -1).copy_(rows, non_blocking=True)
            return
        index = self._index(pages)
        rows = torch.empty(host.shape, dtype=torch.uint8, device=index.device)
        for number, layer in enumerate(self._layers):
            found = layer.index_select(0, index).contiguous()
            rows[:, number] = found.view(torch.uint8).reshape(len(pages), -1)
        host.copy_(rows, non_blocking=True)

    def write(self, host: torch.Tensor, pages: Sequence[int]) -> None:
        """Fill pages from `host`."""
        if self._blocks is not None:
            for at, page, count in runs_of(pages):
                rows = host[at : at + count].reshape(count, -1)
                self._blocks[page : page + count].copy_(rows, non_blocking=True)
            return
        index = self._index(pages)
        rows = host.to(index.device, non_blocking=True)
        for number, layer in enumerate(self._layers):
            one = rows[:, number].contiguous().view(layer.dtype)
            layer.index_copy_(0, index, one.reshape(len(pages), *layer.shape[1:]))

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self._layers[0].device)


def as_blocks(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return u8 `[pages, layers * layer_bytes]` over the layers, if a page's lie one behind the other."""
    first = layers[0]
    nbytes = first[0].numel() * first.element_size()
    start, pages = first.data_ptr(), first.shape[0]
    for number, layer in enumerate(layers):
        is_next = layer.data_ptr() == start + number * nbytes and layer[0].is_contiguous()
        is_page = layer.stride(0) * layer.element_size() == len(layers) * nbytes
        is_one = layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_next and is_page and is_one):
            return None
    storage = torch.empty(0, dtype=torch.uint8, device=first.device)
    storage.set_(first.untyped_storage())
    offset = start - first.untyped_storage().data_ptr()
    return storage.as_strided((pages, len(layers) * nbytes), (len(layers) * nbytes, 1), offset)


def runs_of(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs of pages that follow each other: where each begins, its first page, its length."""
    runs: list[tuple[int, int, int]] = []
    for at, page in enumerate(pages):
        if runs and runs[-1][1] + runs[-1][2] == page:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((at, page, 1))
    return runs


class TorchDevice:
    """A GPU: streams of this object's own beside that of the steps. See `PageDevice`."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._rows = PageRows(layers)
        self._device = layers[0].device

    def mark(self) -> PageEvent:
        """Return the event behind all computing submitted so far."""
        return _TorchEvent(torch.cuda.current_stream(self._device))

    def stream(self) -> PageStream:
        """Return a stream for one direction."""
        return _TorchStream(self._rows, torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def staging(self, nbytes: int) -> Bytes:
        """Return pinned memory. Raises `MemoryError`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(f"{nbytes} bytes of pinned memory: {error}") from error


class _TorchEvent:
    def __init__(self, stream: Any) -> None:
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class _TorchStream:
    def __init__(self, rows: PageRows, stream: Any) -> None:
        self._rows = rows
        self._stream = stream

    def read(self, pages: Sequence[int], host: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            self._rows.read(pages, torch.from_numpy(host))

    def write(self, host: Bytes, pages: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            self._rows.write(torch.from_numpy(host), pages)

    def mark(self) -> PageEvent:
        return _TorchEvent(self._stream)
