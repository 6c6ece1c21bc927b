"""The words of the directory: reservations, evictions, pins and what it tells about an extent.

Plain frozen data. An extent is named by its `Address` (tenant, namespace, id): whoever asks with
another tenant names another extent. Times are seconds of the directory's own clock, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache_tiers.blocks import Address, BlockShape, Placement, TierName

EvictReason = Literal["room", "quota", "cleared", "expired", "lost", "placement", "differs"]
RefuseReason = Literal[
    "tombstone",  # its session or tenant was cleared after the store was promised
    "gone",  # a copy of it was asked for, but no tier holds it any more
    "quota",  # its tenant's share is used up by what cannot go now
    "full",  # the tier is full of what cannot go now
    "too big",  # larger than the tier (or than the tenant's share of it), or the tier is off
    "busy",  # somebody is moving this very extent into, or deleting it from, this tier
    "placement",  # its placement forbids the tier
    "differs",  # an extent of the same name but other chain positions is held: one of them lies
]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A record to delete from `tier`, then to report to `Directory.dropped`: until then its bytes count."""

    tier: TierName
    address: Address
    nbytes: int
    generation: int
    reason: EvictReason


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one record in one tier. `generation` fences it: no other copy ever has the same.

    First delete all `victims` (each `dropped`), then write: in that order the tier never holds more
    than its budget.
    """

    tier: TierName
    address: Address
    nbytes: int
    generation: int
    victims: tuple[Eviction, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """The tier has this extent already."""


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """No room was reserved, nothing was evicted."""

    reason: RefuseReason


@dataclass(frozen=True, slots=True)
class Pin:
    """A copy that is being read: not evicted until `Directory.unpin`. `nbytes`: of the whole record."""

    tier: TierName
    address: Address
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A tier's books. `bytes_accounted` >= what really lies there: held + reserved + not yet deleted."""

    bytes_accounted: int
    extents: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """What the directory keeps of an extent's header, and where its copies are, cheapest tier first."""

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
