"""Cache tiers of one process for `bench.gpu`, without Ray: the product's node over mapped main memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks import Address, Bytes, Record, TierFull
from samovar.cache_tiers.media import Deadline
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.node import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.configs.sections import GIB, TierSettings
from samovar.replicas.kv.registered import OBJECT_STORE
from samovar.replicas.offload import TierAccess, WorkerPools

SHARED = Path("/dev/shm")
ALIGN = 64
"""As Ray's object store aligns what it holds."""


class MappedRam(HeapTier):
    """Records in one mapping of shared memory, as those in Ray's object store are. Thread-safe.

    Space is handed out once and never again: a bench stores less than `bytes_max` in its life.
    """

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.mapping = mapped(bytes_max)
        self._end = 0

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        if not self._reserve(address, record.nbytes):
            return
        held = None
        try:
            held = self._copy_of(record)
        finally:
            self._hold(address, held, record.nbytes)

    def _copy_of(self, record: Record) -> Bytes:
        with self._lock:
            start = -(-self._end // ALIGN) * ALIGN
            if start + record.nbytes > self.mapping.nbytes:
                raise TierFull(f"{self._end} of {self.mapping.nbytes} bytes are taken")
            self._end = start + record.nbytes
        held = self.mapping[start : start + record.nbytes]
        np.copyto(held, record.data)
        held.flags.writeable = False
        return held


def mapped(nbytes: int) -> Bytes:
    """Return populated memory, u8 `[nbytes]`: of /dev/shm where there is room, else this process's own."""
    room = os.statvfs(SHARED) if SHARED.is_dir() else None
    if room is not None and room.f_bavail * room.f_frsize > nbytes + GIB:
        # As the file of Ray's object store is called: so it is registered ahead, too.
        with tempfile.NamedTemporaryFile(dir=SHARED, prefix=Path(OBJECT_STORE).name) as file:
            file.truncate(nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
    else:
        memory = mmap.mmap(-1, nbytes)
    populate = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux 5.14; Python does not name it
    try:
        memory.madvise(populate)
    except OSError:
        memory[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))
    made: Bytes = np.frombuffer(memory, dtype=np.uint8)
    return made


def open_mapped_tiers(
    tier: MappedRam, settings: TierSettings, clock: Callable[[], float] = time.monotonic
) -> tuple[TierAccess, TierNode]:
    """Start a node over `tier` in this process; return a replica's access to it, and the node.

    It knows no price: what loads take the engine's start measures, as in the service.
    """
    outbox = StagingBuffer(settings.staged_bytes_max, keep_s=600.0, clock=clock)

    def call_for(_source: object, ticket: int) -> Record:
        return Record(outbox.take(ticket))

    node = TierNode(
        settings,
        NodeMedia({"cpu": tier}, {"cpu": tier.mapping.nbytes}),
        NodeIdentity("bench", f"bench-{time.time_ns()}"),
        NodePorts(clock=clock, wall_clock=time.time, call_for=call_for),
    )
    node.start()
    lanes = WorkerPools.of_threads(settings.lookup_threads, settings.io_threads)
    return TierAccess(node, outbox, lanes, clock), node
