"""Conversations, headers and a clock for tests of the catalog. Real block keys, no payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from samovar.cache_tiers.blocks.extent import (
    ROOT,
    TAG_BYTES,
    BlockShape,
    ExtentHeader,
    Placement,
    block_key,
    namespace_digest,
)
from samovar.cache_tiers.blocks.record import header_bytes
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog.catalog import Catalog
from samovar.cache_tiers.catalog.gone import Clears
from samovar.cache_tiers.catalog.transfers import Transfer
from samovar.cache_tiers.catalog.types import Eviction, Held, ReservationRefused
from samovar.cache_tiers.media.tier import Scanned
from samovar.cache_tiers.messages import Lookup
from samovar.cache_tiers.policy import IdleSessions
from samovar.cache_tiers.policy.policies import LeastRecentlyUsed, ResidencyPolicy
from tests.support.clock import Clock

SHAPE = BlockShape(layers=2, layer_bytes=512, block_tokens=4)
NAMESPACE = namespace_digest(b"model")
ALL: tuple[TierName, ...] = ("cpu", "nvme", "s3")
FOREVER = Placement(min_ttl_s=0.0, ttl_s=1e9)
BIG = 1 << 40


def tag(name: str) -> bytes:
    return name.encode().ljust(TAG_BYTES, b"_")


ALICE, BOB = tag("alice"), tag("bob")


def chain(ids: Sequence[int], namespace: bytes = NAMESPACE) -> list[bytes]:
    """Keys of full blocks; one id stands for a block's tokens."""
    keys, parent = [], ROOT
    for token in ids:
        parent = block_key(namespace, parent, [token] * SHAPE.block_tokens)
        keys.append(parent)
    return keys


def header(
    ids: Sequence[int],
    first: int = 0,
    *,
    tenant: bytes = ALICE,
    session: bytes = tag("s1"),
    tail_tokens: int = 0,
    namespace: bytes = NAMESPACE,
    placement: Placement = FOREVER,
) -> ExtentHeader:
    """Blocks `[first, len(ids))` of the conversation `ids`, then a partial one of `tail_tokens`."""
    keys = chain(ids, namespace)
    parent = keys[first - 1] if first else ROOT
    own = keys[first:]
    counts = [SHAPE.block_tokens] * len(own)
    if tail_tokens:
        own.append(block_key(namespace, keys[-1] if keys else ROOT, [7] * tail_tokens))
        counts.append(tail_tokens)
    return ExtentHeader(
        namespace=namespace,
        tenant=tenant,
        session=session,
        shape=SHAPE,
        parent=parent,
        first_block=first,
        keys=tuple(own),
        token_counts=tuple(counts),
        checksums=np.zeros((len(own), SHAPE.layers), np.uint64),
        version=2,
        placement=placement,
        created_unix_s=0.0,
    )


def record_bytes(of: ExtentHeader) -> int:
    return header_bytes(of.blocks, SHAPE.layers) + of.payload_bytes


def lookup(
    ids: Sequence[int],
    *,
    tenant: bytes = ALICE,
    session: bytes = tag("s1"),
    namespace: bytes = NAMESPACE,
) -> Lookup:
    return Lookup(namespace, b"".join(chain(ids, namespace)), tenant, session)


def landed(catalog: Catalog, transfer: Transfer) -> bool:
    """Take a transfer through all its states; False: it was fenced, or is over."""
    if transfer.state == "reserved":
        catalog.transfers.advance(transfer, "copying")
        catalog.transfers.advance(transfer, "verified")
    is_held = catalog.commit(transfer)
    if is_held:
        catalog.transfers.end(transfer)
    return is_held


@dataclass
class World:
    """A catalog with a clock, and the steps that most tests take. Checks its books after each."""

    budgets: dict[TierName, int] = field(default_factory=lambda: dict.fromkeys(ALL, BIG))
    shares: dict[bytes, float] = field(default_factory=dict)
    policy: ResidencyPolicy = field(default_factory=LeastRecentlyUsed)
    tombstones_max: int = 100
    transfers_max: int = 100
    sessions: IdleSessions | None = None

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.catalog = Catalog(
            self.budgets,
            self.policy,
            clock=self.clock,
            tenant_share=lambda tenant: self.shares.get(tenant, 1.0),
            clears=Clears(self.tombstones_max, 0.0, self.clock),
            transfers_max=self.transfers_max,
            sessions=self.sessions,
        )

    def reserve(
        self, tier: TierName, of: ExtentHeader, nbytes: int | None = None, clear_seq: int | None = None
    ) -> Transfer | Held | ReservationRefused:
        seq = self.catalog.clears.seq if clear_seq is None else clear_seq
        answer = self.catalog.reserve(tier, of, record_bytes(of) if nbytes is None else nbytes, clear_seq=seq)
        self.catalog.check_integrity()
        return answer

    def reserved(self, tier: TierName, of: ExtentHeader, nbytes: int | None = None) -> Transfer:
        answer = self.reserve(tier, of, nbytes)
        assert isinstance(answer, Transfer), answer
        return answer

    def finish(self, transfer: Transfer) -> bool:
        """Delete the victims, "write", commit."""
        for victim in transfer.victims:
            self.catalog.dropped(victim)
            self.catalog.check_integrity()
        is_held = landed(self.catalog, transfer)
        self.catalog.check_integrity()
        return is_held

    def store(self, tier: TierName, of: ExtentHeader, nbytes: int | None = None) -> Transfer:
        transfer = self.reserved(tier, of, nbytes)
        assert self.finish(transfer)
        return transfer

    def copy(self, tier: TierName, of: ExtentHeader) -> Transfer:
        answer = self.catalog.reserve_copy(tier, of.address)
        assert isinstance(answer, Transfer), answer
        assert self.finish(answer)
        return answer

    def adopt(
        self, tier: TierName, of: ExtentHeader, idle_s: float = 0.0, nbytes: int | None = None
    ) -> tuple[Eviction, ...]:
        scanned = Scanned(of, record_bytes(of) if nbytes is None else nbytes, 5000.0 - idle_s)
        evictions = self.catalog.adopt(tier, scanned, 5000.0)
        self.catalog.check_integrity()
        return evictions

    def spans(
        self, ids: Sequence[int], up: Sequence[TierName] = ALL, **who: bytes
    ) -> list[tuple[int, int, str]]:
        """(first, blocks, tier) of what is found."""
        found, _ = self.catalog.find(lookup(ids, **who), up)
        self.catalog.check_integrity()
        return [(span.first, span.blocks, span.tier) for span in found]
