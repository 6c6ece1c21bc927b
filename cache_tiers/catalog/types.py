"""Data types of the catalog: evictions, pins, usage and extent info.

Plain frozen data. An extent is named by its `Address` (tenant, namespace, id), so that another tenant's
lookup names another extent. Times are seconds of the catalog's own clock, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samovar.cache_tiers.blocks import Address, BlockShape, Placement, TierName

EvictReason = Literal["room", "quota", "cleared", "expired", "lost", "placement", "differs"]
RefuseReason = Literal[
    "tombstone",  # its session or tenant was cleared after the store was promised
    "gone",  # a copy was requested, but no tier holds the extent any more
    "quota",  # its tenant's share is used up by copies that cannot be evicted now
    "full",  # the tier is full of copies that cannot be evicted now
    "too big",  # larger than the tier (or than the tenant's share of it), or the tier is off
    "busy",  # it is being moved into, or deleted from, this tier; or too many transfers are under way
    "placement",  # its placement forbids the tier
    "differs",  # an extent of the same name but other chain positions is held: one of them is wrong
]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A record to delete from `tier`, then report to `Catalog.dropped`: its bytes count until then.

    `unused_s`: of one that has expired here, after how long; another node may use it in a shared tier.
    """

    tier: TierName
    address: Address
    nbytes: int
    generation: int
    reason: EvictReason
    unused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """The answer that the tier has this extent already."""


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """The answer that no room was reserved and nothing was evicted."""

    reason: RefuseReason


@dataclass(frozen=True, slots=True)
class Pin:
    """A copy being read: not evicted until `Catalog.unpin`. `nbytes`: of the whole record."""

    tier: TierName
    address: Address
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A tier's usage. `bytes_accounted`, held + reserved + not yet deleted, >= what is in the tier."""

    bytes_accounted: int
    extents: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """What the catalog keeps of an extent's header, and the tiers of its copies, cheapest first."""

    address: Address
    shape: BlockShape
    parent: bytes
    first_block: int
    blocks: int
    tokens: int
    placement: Placement
    sessions: frozenset[bytes]
    last_used_s: float
    nbytes: int  # of the record
    tiers: tuple[TierName, ...]
