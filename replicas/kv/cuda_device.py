"""Copies of a GPU: streams, events and registered memory of CUDA.

A thin shell: what is copied when is decided in `block_io.py`, which registered memory there is in
`registered.py`.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.transport import map_memory
from samovar.replicas.kv.copy_device import CopyEvent, CopyStream, Told
from samovar.replicas.kv.registered import (
    HostCalls,
    RecordArena,
    RegisteredMemory,
    do_later,
    is_mapped,
    populate_pages,
    read_maps,
)

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
PORTABLE = 1
"""`cudaHostRegisterPortable`."""


def register_object_store(device: torch.device) -> RegisteredMemory:
    """Begin to register the object store with a GPU, as far as it is mapped, in the background.

    Tens of GB that nothing has used take as long as the weights of a model: so it begins before them.
    """
    calls = HostCalls(partial(_register, device), _unregister, populate_pages, read_maps, is_mapped, do_later)
    registered = RegisteredMemory(calls)
    registered.begin()
    return registered


class CudaDevice:
    """Pages on a GPU, u8 `[pages, block_bytes]`.

    `arena_bytes`: of the memory for records, registered at once and as a whole; 0: none. `registered`: what
    is by now; closed with this.
    """

    def __init__(
        self, pages: torch.Tensor, arena_bytes: int, registered: RegisteredMemory | None = None
    ) -> None:
        self._pages = pages
        self._watchers: list[_Watcher] = []
        self._steps_watcher = self._watcher()
        self._registered = registered or register_object_store(pages.device)
        self._arena = self._open_arena(arena_bytes)

    def mark(self) -> CopyEvent:
        return _event(torch.cuda.current_stream(self._pages.device), self._steps_watcher)

    def stream(self) -> CopyStream:
        return _CudaStream(self._watcher(), self._pages, self._registered)

    def reaches(self, host: Bytes) -> bool:
        return self._registered.reaches(host.ctypes.data, host.nbytes)

    def adopt(self, host: Bytes) -> bool:
        return self._registered.add(host.ctypes.data, host.nbytes, is_populated=False)

    def empty(self, nbytes: int) -> Bytes:
        record = self._arena.empty(nbytes) if self._arena is not None else None
        return np.empty(nbytes, dtype=np.uint8) if record is None else record

    def staging(self, nbytes: int) -> Bytes:
        # torch rounds up to a power of two, which is no matter here.
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(f"{nbytes} bytes of pinned memory: {error}") from error

    def close(self) -> None:
        self._registered.close()
        for watcher in self._watchers:
            watcher.stop()

    def _watcher(self) -> _Watcher:
        """Return a watcher of one stream: events of others may be over sooner."""
        self._watchers.append(_Watcher())
        return self._watchers[-1]

    def _open_arena(self, nbytes: int) -> RecordArena | None:
        if nbytes <= 0:
            return None
        try:
            memory = map_memory(nbytes)
        except MemoryError as error:
            logger.warning("no arena for records: %s", error)
            return None
        memory[::PAGE_BYTES] = 0  # registering needs pages that are there
        if not self._registered.add(memory.ctypes.data, memory.nbytes):
            logger.warning(
                "an arena of %d bytes cannot be registered: moves go through staging memory", nbytes
            )
            return None
        return RecordArena(memory)


def _event(stream: torch.cuda.Stream, watcher: _Watcher) -> CopyEvent:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return _CudaEvent(event, watcher)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _register(device: torch.device, start: int, nbytes: int) -> bool:
    result = int(_runtime().cudaHostRegister(start, nbytes, PORTABLE))
    if result == 0:
        return True
    logger.warning("cudaHostRegister refuses %d bytes: error %d", nbytes, result)
    try:  # the next kernel launched by this thread reports that error
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("the error of cudaHostRegister is cleared")
    return False


def _unregister(start: int) -> None:
    result = int(_runtime().cudaHostUnregister(start))
    if result:
        logger.warning("cudaHostUnregister: error %d", result)


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: torch.cuda.Event
    watcher: _Watcher

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def then(self, told: Told) -> None:
        self.watcher.watch(self, told)


class _CudaStream:
    def __init__(self, watcher: _Watcher, pages: torch.Tensor, registered: RegisteredMemory) -> None:
        self._watcher = watcher
        self._bytes = pages.view(-1)
        self._block_bytes = pages.shape[1]
        self._registered = registered
        self._stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]

    def wait_for(self, event: CopyEvent) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def copy_in(self, host: Bytes, page: int) -> None:
        at = page * self._block_bytes
        with torch.cuda.stream(self._stream):
            for start, end in self._registered.cuts(host.ctypes.data, host.nbytes):
                self._bytes[at + start : at + end].copy_(_tensor(host[start:end]), non_blocking=True)

    def copy_out(self, page: int, host: Bytes) -> None:
        at = page * self._block_bytes
        with torch.cuda.stream(self._stream):
            for start, end in self._registered.cuts(host.ctypes.data, host.nbytes):
                _tensor(host[start:end]).copy_(self._bytes[at + start : at + end], non_blocking=True)

    def mark(self) -> CopyEvent:
        return _event(self._stream, self._watcher)


def _tensor(host: Bytes) -> torch.Tensor:
    """Return the same memory as a tensor; torch warns of arrays that are read-only, which plasma's are."""
    if host.flags.writeable:
        return torch.from_numpy(host)
    return torch.from_numpy(
        np.ctypeslib.as_array((ctypes.c_uint8 * host.nbytes).from_address(host.ctypes.data))
    )


class _Watcher:
    """Tells when events are over, in turn, on a thread of its own, which starts with the first."""

    def __init__(self) -> None:
        self._watched: queue.SimpleQueue[tuple[_CudaEvent, Told] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, event: _CudaEvent, told: Told) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="samovar-copies", daemon=True)
                thread.start()  # may raise
                self._thread = thread
        self._watched.put((event, told))

    def stop(self) -> None:
        self._watched.put(None)

    def _run(self) -> None:
        while (watched := self._watched.get()) is not None:
            event, told = watched
            failure: BaseException | None = None
            try:
                event.wait()
            except Exception as error:  # noqa: BLE001 - it is the caller's to handle
                failure = error
            told(failure)
