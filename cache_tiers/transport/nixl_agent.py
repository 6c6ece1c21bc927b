"""Wrapper of NIXL's bindings with the workarounds they need. Only `link.py` imports this.

* UCX's InfiniBand module makes every process crash at exit: it is left out where there is no such device.
  TCP reads run in 8 KiB segments: larger ones are requested. Both through the environment, before the first
  import, and never against what the operator has set. (With InfiniBand, or with an operator's own
  UCX_MODULES, the crash at exit is back: such a process should end with `os._exit`.)
* `import nixl` takes the CUDA 13 build where there is no CUDA at all; this takes the CUDA 12 one there.
* The import sends log lines to stdout and disables the logging module's own error reports: both undone.
* The binding is used without NIXL's `_api`, which sets the progress thread's delay to 0 (a whole core), and
  whose handles release themselves whenever the garbage collector finds them.

What cannot be undone here, only kept rare by small transfers (`link.CHUNK_BYTES`): over TCP, UCX ABORTS a
process that answers a read of a dead peer. Measured, with the exporter stopped, the puller killed and the
exporter woken: 20 of 43 exporters died with more than one segment requested, 1 of 26 with one; of those
that were never stopped, none of 40.

Not thread-safe: all calls of one agent come from one thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks import Bytes
from samovar.configs.extras import missing

logger = logging.getLogger(__name__)

PROGRESS_US = 10_000
"""How long the progress thread sleeps when nothing wakes it. Socket activity does wake it."""

SEGMENT = "512k"
"""What UCX moves over TCP in one segment."""

BACKEND = "UCX"
ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_TCP_TX_SEG_SIZE": SEGMENT,
    "UCX_TCP_RX_SEG_SIZE": SEGMENT,
}
INFINIBAND = Path("/dev/infiniband")

_import_lock = threading.Lock()


class NixlFault(Exception):
    """NIXL refused or failed. `kind`: the name of its exception, without "nixl" and "Error"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"NIXL {kind}: {message}")
        self.kind = kind


def prepare_environment() -> None:
    """Set the variables that NIXL and UCX read when loaded. Variables that are set stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not INFINIBAND.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")


def load_bindings() -> Any:
    """Return the bindings module that fits this machine. Raises `NixlFault`."""
    with _import_lock:
        prepare_environment()
        raises = logging.raiseExceptions
        try:
            return importlib.import_module(f"{_package()}._bindings")
        except (ImportError, OSError) as error:  # OSError: a library it needs cannot be loaded
            raise NixlFault("Import", f"{error}; {missing('nixl', 'peer transport')}") from error
        finally:
            logging.raiseExceptions = raises
            theirs = logging.getLogger("nixl")
            theirs.handlers.clear()
            theirs.propagate = True


def _package() -> str:
    """Return NIXL's package for this machine's CUDA. Raises `ImportError`."""
    detect = importlib.import_module("nixl_meta_utils").detect_cuda_major
    major: int | None = detect()
    if major is not None:
        return f"nixl_cu{major}"
    for name in ("nixl_cu12", "nixl_cu13"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError("no build of nixl for this machine")


def map_memory(nbytes: int) -> Bytes:
    """Map zeroed memory, committed only as it is used. Raises `MemoryError`."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > present:
        raise MemoryError(f"an arena of {nbytes} bytes in a machine of {present}")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"an arena of {nbytes} bytes: {error}") from error
    return np.frombuffer(memory, np.uint8)


class NixlAgent:
    """One agent with one registered memory range. Every method raises `NixlFault` on NIXL's errors."""

    def __init__(self, name: str, address: int, nbytes: int) -> None:
        nixl = self._nixl = load_bindings()
        self._faults = tuple(
            kind for kind in vars(nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        config = nixl.nixlAgentConfig()
        config.useProgThread = True  # the source of a TCP read has to take part
        config.pthrDelay = PROGRESS_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW  # the progress thread is a second thread
        self._agent = self._call(nixl.nixlAgent, name, config)
        self._backends = [self._call(self._agent.createBackend, BACKEND, {})]
        self._memory = nixl.nixlRegDList(nixl.DRAM_SEG, [(address, nbytes, 0, "")])
        self._call(self._agent.registerMem, self._memory, self._backends)
        self.metadata: bytes = self._call(self._agent.getLocalMD)

    def add(self, metadata: bytes) -> str:
        """Register a peer and return its name. Connects with the first transfer, not here."""
        name: bytes = self._call(self._agent.loadRemoteMD, metadata)
        return name.decode()

    def remove(self, peer: str) -> None:
        """Disconnect from a peer. Over TCP, bytes in flight still arrive when the peer wakes up."""
        self._call(self._agent.invalidateRemoteMD, peer)

    def read(self, peer: str, remote_address: int, local_address: int, nbytes: int) -> int:
        """Create a transfer from a peer's memory to ours; return its handle, which must be released."""
        nixl = self._nixl
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(local_address, nbytes, 0)])
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(remote_address, nbytes, 0)])
        handle: int = self._call(
            self._agent.createXferReq, nixl.NIXL_READ, local, remote, peer, "", self._backends
        )
        return handle

    def begin(self, handle: int) -> bool:
        """Begin a transfer; may do all of it (one host). Returns whether it is over."""
        return self._is_over(self._call(self._agent.postXferReq, handle, ""))

    def is_over(self, handle: int) -> bool:
        """Advance a transfer. Returns whether all bytes have arrived."""
        return self._is_over(self._call(self._agent.getXferStatus, handle))

    def release(self, handle: int) -> None:
        """Release a handle. Over TCP this cancels nothing: only for what is over, or before `close`."""
        self._call(self._agent.releaseXferReq, handle)

    def part(self, peer: str, handle: int | None) -> None:
        """Release the transfer, if there is one, and remove the peer; raises nothing."""
        try:
            if handle is not None:
                self.release(handle)
        except NixlFault as error:
            logger.warning("releasing a transfer: %s", error)
        try:
            self.remove(peer)
        except NixlFault as error:
            logger.warning("dropping a peer: %s", error)

    def close(self) -> None:
        """Destroy the agent: nothing writes to its memory any more. No call may follow."""
        try:
            self._call(self._agent.deregisterMem, self._memory, self._backends)
        finally:
            del self._agent, self._memory

    def _is_over(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise NixlFault("Status", f"a transfer is in state {status}")

    def _call(self, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except self._faults as error:
            kind = type(error).__name__.removeprefix("nixl").removesuffix("Error")
            raise NixlFault(kind, str(error)) from error
