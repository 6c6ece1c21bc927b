"""A node with small tiers, records of tiny blocks, and the truth about them: for tests of the node."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import ROOT, BlockShape, Bytes, ExtentHeader, Placement, block_key
from samovar.cache_tiers.blocks.record import Record
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog.transfers import no_fault
from samovar.cache_tiers.encryption.tier import Keys
from samovar.cache_tiers.media.files import Syscalls
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.messages import (
    BlockRange,
    Fetch,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    StoreRequest,
)
from samovar.cache_tiers.node.manager import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.cache_tiers.node.store import CallFor
from samovar.configs.sections import TierSettings
from tests.support.clock import Clock
from tests.support.inside import state_of

SHAPE = BlockShape(layers=2, layer_bytes=512, block_tokens=4)
NAMESPACE = hashlib.sha256(b"namespace").digest()
TENANT = b"tenant-a" * 2
OTHER_TENANT = b"tenant-b" * 2
SESSION = b"session1" * 2
MIB = 1024 * 1024


@dataclass(frozen=True)
class Sample:
    """A sealed record, and how to ask for it."""

    header: ExtentHeader
    record: Bytes

    @property
    def chain(self) -> bytes:
        return b"".join(self.header.keys)

    @property
    def payload(self) -> Bytes:
        return self.record[-self.header.payload_bytes :]


def sample(
    number: int,
    blocks: int = 3,
    *,
    tenant: bytes = TENANT,
    session: bytes = SESSION,
    shape: BlockShape = SHAPE,
    placement: Placement = Placement(write_behind=()),  # noqa: B008 - frozen
) -> Sample:
    """A chain of its own, of `blocks` full blocks; the same number is always the same chain."""
    namespace = hashlib.sha256(NAMESPACE + tenant).digest()
    keys: list[bytes] = []
    for index in range(blocks):
        parent = keys[-1] if keys else ROOT
        keys.append(block_key(namespace, parent, (number, index, 0, 0)))
    record = np.zeros(codec.header_bytes(blocks, shape.layers) + blocks * shape.block_bytes, dtype=np.uint8)
    payload = np.random.default_rng(number).integers(0, 256, blocks * shape.block_bytes, dtype=np.uint8)
    record[-payload.nbytes :] = payload
    header = codec.seal(
        record,
        namespace=namespace,
        tenant=tenant,
        session=session,
        shape=shape,
        parent=ROOT,
        first_block=0,
        keys=keys,
        token_counts=[shape.block_tokens] * blocks,
        placement=placement,
        created_unix_s=1.0,
    )
    return Sample(header, record)


def records_of(outbox: StagingBuffer, called: list[int] | None = None) -> CallFor:
    """How a node gets the records that it was offered from `outbox`; their tickets go into `called`."""

    def call_for(source: object, ticket: int) -> Record:
        if called is not None:
            called.append(ticket)
        return Record(outbox.take(ticket))

    return call_for


@dataclass
class Bench:
    """A node without workers (`work` by hand) on a heap and a directory of files."""

    node: TierNode
    outbox: StagingBuffer
    clock: Clock
    tiers: Mapping[TierName, Tier]
    called: list[int] = field(default_factory=list)

    def offer(self, wanted: Sample, found: LookupResult | None = None) -> str:
        """The outcome; a ticket that is not taken is dropped, as a replica does it."""
        found = found or self.look(wanted)
        ticket = self.outbox.put(wanted.record)
        assert ticket is not None
        offer = StoreRequest(ticket, wanted.header, wanted.record.nbytes, found.incarnation, found.clear_seq)
        outcome = self.node.offer([offer], self.outbox).outcomes[0]
        if outcome != "taken":
            self.outbox.drop(ticket)
        return outcome

    def store(self, wanted: Sample) -> str:
        outcome = self.offer(wanted)
        self.work()
        return outcome

    def work(self) -> None:
        while self.node.work():
            self.node.check_integrity()
        self.node.check_integrity()

    def look(self, wanted: Sample, *, session: bytes | None = None) -> LookupResult:
        header = wanted.header
        lookup = Lookup(header.namespace, wanted.chain, header.tenant, session or header.session)
        return self.node.lookup(lookup)

    def tiers_of(self, wanted: Sample) -> list[str]:
        """Tiers that spans of it are found in."""
        return [span.tier for span in self.look(wanted).spans]

    def copies(self, wanted: Sample) -> tuple[TierName, ...]:
        """All tiers that the books say have it."""
        return state_of(self.node).catalog.copies(wanted.header.address)

    def fetch(self, wanted: Sample, span: BlockRange, deadline_s: float = 5.0) -> Fetched | FetchFailed:
        header = wanted.header
        fetch = Fetch(
            header.namespace,
            header.tenant,
            span.extent_id,
            span.offset,
            span.blocks,
            span.tier,
            deadline_s,
        )
        return self.node.fetch(fetch)

    def load(self, wanted: Sample) -> Bytes | None:
        """Its payload as a replica gets it, verified; None for a miss. Bad bytes raise `BadRecord`."""
        spans = self.look(wanted).spans
        if not spans:
            return None
        assert len(spans) == 1
        fetched = self.fetch(wanted, spans[0])
        if isinstance(fetched, FetchFailed):
            return None
        assert fetched.data is not None
        header = codec.decode_header(fetched.data)
        codec.check_belongs(header, wanted.header.namespace, SHAPE, 0, 0, wanted.header.keys)
        head = codec.header_bytes(header.blocks, SHAPE.layers)
        payload = fetched.data[head:]
        if codec.good_blocks(header, payload, 0) != wanted.header.blocks:
            raise codec.BadRecord("checksum", "as a replica sees it")
        return payload


def nvme(
    path: Path, bytes_max: int = 4 * MIB, *, waits: bool = False, calls: Syscalls | None = None
) -> NvmeTier:
    return NvmeTier(
        path,
        bytes_max=bytes_max,
        durability="crash",
        direct_io=False,
        quarantine_bytes_max=MIB,
        wall_clock=lambda: 2000.0,
        calls=calls,
        waits=waits,
    )


def bench(
    tiers: list[Tier],
    *,
    settings: TierSettings | None = None,
    reach: Callable[[str], None] = no_fault,
    pending_path: Path | None = None,
    late_pending_path: Path | None = None,
    bytes_max: int = 4 * MIB,
    incarnation: str = "first",
    clock: Clock | None = None,
    workers: int = 0,
    budgets: Mapping[TierName, int] | None = None,
    predictor_path: Path | None = None,
    scan_s_max: float = math.inf,
    keys: Keys | None = None,
    wall_clock: Callable[[], float] = lambda: 2000.0,
    **more: Any,
) -> Bench:
    clock = clock or Clock()
    outbox = StagingBuffer(64 * MIB, keep_s=1e9)
    called: list[int] = []
    by_name: dict[TierName, Tier] = {tier.name: tier for tier in tiers}
    settings = settings or TierSettings()
    if predictor_path is not None:
        predictor = settings.predictor.model_copy(update={"file": predictor_path})
        settings = settings.model_copy(update={"predictor": predictor})
    node = TierNode(
        settings,
        NodeMedia(
            by_name,
            dict(budgets or dict.fromkeys(by_name, bytes_max)),
            pending_path=pending_path,
            late_pending_path=late_pending_path,
            keys=keys,
        ),
        NodeIdentity("node", incarnation),
        NodePorts(clock, wall_clock, records_of(outbox, called), reach),
        workers=workers,
        **more,
    )
    node.start(scan_s_max)
    return Bench(node, outbox, clock, by_name, called)


def heap_bench(bytes_max: int = 4 * MIB, **options: object) -> Bench:
    return bench([HeapTier(bytes_max)], bytes_max=bytes_max, **options)  # type: ignore[arg-type]
