"""The directory: which extents exist, in which tiers, and how many bytes they take.

Pure bookkeeping: it reads and writes no record, knows no threads (the node holds one lock round it)
and no wall clock. It decides nothing about worth (`policy/policies.py`) and does not verify records
(`blocks/record.py`).

In each tier an extent is in one state: absent, reserved, held, or evicted and not yet deleted. Only
from absent it can be reserved, so no late delete can hit a new record. Every reservation and copy has
a generation of its own; what comes late carries one that has ended and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cache_tiers.blocks import KEY_BYTES, TIERS, Address, Clear, ExtentHeader, TierName
from cache_tiers.directory.accounting import TierAccounting
from cache_tiers.directory.extents import BlockValues, HeldCopy, HeldExtent
from cache_tiers.directory.index import ExtentRegistry
from cache_tiers.directory.tombstones import Tombstones
from cache_tiers.directory.transfers import Reservations
from cache_tiers.directory.types import (
    Eviction,
    EvictReason,
    ExtentInfo,
    Held,
    Pin,
    Reservation,
    ReservationRefused,
    TierUsage,
)
from cache_tiers.forecast import SessionKey
from cache_tiers.media import Scanned
from cache_tiers.messages import BlockRange, Lookup, PartialBlock
from cache_tiers.policy import IdleSessions, ResidencyPolicy
from cache_tiers.session_table import SessionHeld
from configs.sections import PolicySettings

# What a directory tells about itself: who is coldest, what is held of whom. Changes nothing.
#
# `directory.py` keeps the books that this looks at.


class DirectoryViews:
    """The questions to a `Directory`."""

    _books: dict[TierName, TierAccounting]
    _registry: ExtentRegistry
    _claims: Reservations

    def _now_s(self) -> float:
        raise NotImplementedError

    def sinking(
        self, tier: TierName, to: TierName, used_share: float, extents_max: int = 256
    ) -> list[Address]:
        """What to copy from `tier` to `to` before it must be dropped, coldest first.

        The extents that would have to go to bring `tier` down to `used_share` of its budget, less those
        that `to` has, is about to get, or may not have. Looks at `extents_max` a call. Raises
        `ValueError` when `to` is not below `tier`.
        """
        if TIERS.index(to) <= TIERS.index(tier):
            raise ValueError(f"{to} is not below {tier}")
        ledger = self._books[tier].ledger
        over = ledger.held + ledger.reserved - int(used_share * ledger.budget)
        return [
            copy.extent.address
            for copy in self._books[tier].coldest(over, extents_max, self._now_s())
            if to not in copy.extent.copies
            and not self._claims.is_busy(to, copy.extent.address)
            and copy.extent.placement.allows(to)
        ]

    def hottest(self, tier: TierName) -> list[Address]:
        """All that `tier` holds, what the policy would give up last first. Looks at everything."""
        return [copy.extent.address for copy in self._books[tier].all_in_order(self._now_s())][::-1]

    def sessions(self, limit: int) -> list[SessionHeld]:
        """The sessions used last. Looks at everything."""
        return [self.session(*key) for key in self._registry.latest_sessions(limit)]

    def session(self, tenant: bytes, session: bytes) -> SessionHeld:
        """What is held of one session."""
        return self._registry.session(tenant, session, self._now_s())

    def extents_of(self, tenant: bytes, session: bytes) -> list[ExtentInfo]:
        """Extents with the session's tag that some tier holds, in the order of their chain."""
        held = [extent.info() for extent in self._registry.of(tenant, session) if extent.copies]
        return sorted(held, key=lambda info: info.first_block)

    def copies(self, address: Address) -> tuple[TierName, ...]:
        """Tiers that hold it, cheapest first; empty when none does."""
        info = self.info(address)
        return () if info is None else info.tiers

    def info(self, address: Address) -> ExtentInfo | None:
        """What is known of an extent that some tier holds."""
        extent = self._registry.get(address)
        return extent.info() if extent is not None and extent.copies else None

    def usage(self, tier: TierName) -> TierUsage:
        """A tier's books now."""
        return self._books[tier].usage()

    def tenant_bytes(self, tier: TierName, tenant: bytes) -> int:
        """Bytes a tenant holds or has reserved in `tier`."""
        return self._books[tier].ledger.tenants[tenant]


ADOPTED_IDLE_SHARE = 0.9
"""An adopted extent has been idle for at most this share of its `expire_s`: a wall clock that is years
ahead must not empty the tiers at a start."""


class Directory(DirectoryViews):
    """See the module. Everything is named by `Address`, so never found by another tenant."""

    def __init__(
        self,
        budgets: Mapping[TierName, int],
        policy: ResidencyPolicy,
        *,
        clock: Callable[[], float],
        tenant_share: Callable[[bytes], float],
        tombstones_max: int,
        sessions: IdleSessions | None = None,
        settings: PolicySettings | None = None,
    ) -> None:
        """`budgets`: bytes a tier may hold; a tier that is missing or 0 is off. `clock`: monotonic
        seconds. `tenant_share(tenant tag)`: share of each tier it may take, in (0, 1]. `sessions`: what the
        policy is to know of them, by tenant's and session's tags joined; the caller keeps it up to date, and
        says so by `session_changed`."""
        settings = settings or PolicySettings()
        sessions = IdleSessions(1) if sessions is None else sessions  # an empty table is false
        self.clear_seq = 0  # grows with every clear
        self._clock = clock
        self._clock_offset_s = 0.0
        self._clock_last_s = clock()
        self._tenant_share = tenant_share
        self._books = {
            tier: TierAccounting(tier, budgets.get(tier, 0), policy, sessions, settings) for tier in TIERS
        }
        self.prices = BlockValues(settings.cost_weighting)
        self._registry = ExtentRegistry()
        self._tombstones = Tombstones(tombstones_max)
        self._claims = Reservations({tier: books.ledger for tier, books in self._books.items()})

    def find(
        self, lookup: Lookup, up: Collection[TierName]
    ) -> tuple[tuple[BlockRange, ...], tuple[PartialBlock, ...]]:
        """What the tiers in `up` hold of the chain; touches every extent of it that is held.

        Spans: chain order, no overlap, gaps allowed, each block from the cheapest tier, few spans. Tails:
        deepest first, at most `chain_index.TAILS_MAX`. An extent gets the session's tag when all of it is
        in the chain. O(keys). Raises `ValueError` when `lookup.keys` is no row of keys.
        """
        joined = lookup.keys
        self._tombstones.asked(lookup.tenant, lookup.session)
        if len(joined) % KEY_BYTES:
            raise ValueError(f"{len(joined)} bytes are no row of {KEY_BYTES}-byte keys")
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        match = self._registry.find(lookup.namespace, lookup.tenant, keys, up)
        if match is None:
            return (), ()
        now_s = self._now_s()
        for extent, is_whole in match.seen.items():
            extent.use(now_s)
            if is_whole:
                self._tag(extent, lookup.session)
        for extent in match.tail_extents:
            # Whether a tail of another session is in the prompt, only the asker can tell (`touch`).
            if lookup.session in extent.sessions:
                extent.use(now_s)
        return match.spans, match.tails

    def reserve(
        self, tier: TierName, header: ExtentHeader, nbytes: int, *, clear_seq: int, recompute_s: float = 0.0
    ) -> Reservation | Held | ReservationRefused:
        """Room in `tier` for a record of `nbytes` that a replica stores (`clear_seq`: the `StoreRequest`'s).

        `recompute_s`: what computing its blocks takes; 0: unknown.

        The bytes are accounted from here on, and this (extent, tier) is nobody else's until `commit`, or
        until `abandon`. The victims are out of the index already. When this is refused, nothing was evicted.
        """
        if self._tombstones.forbids(header.tenant, header.session, clear_seq):
            return ReservationRefused("tombstone")
        now_s = self._now_s()
        known = self._registry.get(header.address)
        if known is not None and not known.is_same(header):
            return ReservationRefused("differs")
        extent = HeldExtent(header, now_s) if known is None else known
        self.prices.offered(recompute_s, nbytes)
        extent.recompute_s = recompute_s or extent.recompute_s
        answer = self._reserve(tier, extent, nbytes, now_s)
        if known is not None and not isinstance(answer, ReservationRefused):
            known.use(now_s)
            self._tag(known, header.session)
        return answer

    def reserve_copy(self, tier: TierName, address: Address) -> Reservation | Held | ReservationRefused:
        """As `reserve`, for moving an extent that another tier holds (sinking, write-behind, promotion).

        Pin the source first. Refused("gone") when no tier holds it any more: it was cleared meanwhile.
        Never evicts from any other tier than `tier`. No sign of use.
        """
        extent = self._registry.get(address)
        source = extent.cheapest() if extent is not None else None
        if extent is None or source is None:
            return ReservationRefused("gone")
        return self._reserve(tier, extent, extent.copies[source].nbytes, self._now_s())

    def commit(self, reservation: Reservation) -> bool:
        """The record is whole and verified: `find` sees it from now on.

        False: fenced (cleared, expired, or already ended). Nothing was committed; when the reservation had
        not ended yet its bytes are still accounted: delete what was written, then call `abandon`.
        """
        booking = self._claims.end(reservation, is_held=True)
        if booking is None:
            return False
        mine = booking.reservation
        self._add(HeldCopy(booking.extent, mine.tier, mine.nbytes, mine.generation, self.prices))
        return True

    def abandon(self, reservation: Reservation) -> None:
        """Give the room back, once nothing of the record is left in the tier. Nothing when it has ended."""
        booking = self._claims.end(reservation, is_held=False)
        if booking is not None and not booking.is_fenced:
            self._remove_if_nowhere(booking.extent)

    def dropped(self, eviction: Eviction) -> None:
        """The tier has deleted it: the bytes are free. Nothing when that was reported before.

        Until then that extent is not let into that tier again (Refused("busy")): the delete could hit it.
        """
        self._claims.dropped(eviction)

    def pin(self, address: Address, tier: TierName) -> Pin | None:
        """Keep this copy from eviction while it is read or copied; None when the tier does not hold it.

        May be pinned several times. No sign of use. A clear, an expiry or `lose` forgets it all the same.
        """
        copy = self._copy(address, tier)
        return None if copy is None else self._claims.pin(copy)

    def unpin(self, pin: Pin) -> None:
        """End of a `pin`, once each. Raises `ValueError` on one too many."""
        self._claims.unpin(pin)

    def touch(self, address: Address) -> None:
        """A sign of use besides `find` (a tail was fetched). Nothing when the extent is not known."""
        extent = self._registry.get(address)
        if extent is not None:
            extent.use(self._now_s())

    def session_changed(self, session: SessionKey, tenant: bytes) -> None:
        """There is news of a session in `sessions`: what it uses is ranked anew."""
        for books in self._books.values():
            books.changed(session, tenant)

    def lose(self, address: Address, tier: TierName) -> Eviction | None:
        """A copy was found gone or bad: forget it. None when it is not there. Pins do not hold it."""
        copy = self._copy(address, tier)
        return None if copy is None else self._evict(copy, "lost")

    def clear(self, clear: Clear) -> list[Eviction]:
        """Forget a tenant, or what only this session of it uses, in all tiers; nothing comes back.

        Reservations in flight for what was forgotten are fenced. Stores promised before are refused: where
        nothing is held, and nobody asked, there are none, and no tombstone is left.
        """
        self.clear_seq += 1
        extents = self._registry.of(clear.tenant, clear.session)
        if extents or self._tombstones.may_store(clear.tenant, clear.session):
            self._tombstones.add(clear.tenant, clear.session, self.clear_seq)
        evictions = []
        for extent in extents:
            if clear.session is not None and len(extent.sessions) > 1:
                self._registry.untag(extent, clear.session)
                self._refile(extent)
            else:
                evictions += self._forget(extent, "cleared")
        return evictions

    def expired(self, extents_max: int = 1024) -> list[Eviction]:
        """Forget extents not used for their `expire_s`, the longest overdue first, `extents_max` a call."""
        now_s = self._now_s()
        evictions: list[Eviction] = []
        for _ in range(extents_max):
            extent = self._registry.next_expired(now_s)
            if extent is None:
                break
            evictions += self._forget(extent, "expired")
        return evictions

    def adopt(
        self, tier: TierName, scanned: Scanned, now_unix_s: float, *, is_cleared: bool = False
    ) -> tuple[Eviction, ...]:
        """A record that a scan found. Returns what has to go for it, or itself when it may not stay.

        `is_cleared`: the session that made it was cleared since. What is known already, or just being
        written or deleted, is left alone.
        """
        header, address = scanned.header, scanned.header.address
        known = self._registry.get(address)
        if self._copy(address, tier) is not None or self._claims.is_busy(tier, address):
            return ()
        now_s = self._now_s()
        if not header.placement.allows(tier):
            return (self._claims.drop_stranger(tier, address, scanned.nbytes, "placement"),)
        if is_cleared and known is None:
            return (self._claims.drop_stranger(tier, address, scanned.nbytes, "cleared"),)
        if known is not None and not known.is_same(header):
            return (self._claims.drop_stranger(tier, address, scanned.nbytes, "differs"),)
        idle_s = now_unix_s - scanned.last_used_unix_s
        idle_s = min(max(0.0, idle_s), ADOPTED_IDLE_SHARE * header.placement.expire_s)
        extent = HeldExtent(header, now_s - idle_s) if known is None else known
        extent.last_used_s = max(extent.last_used_s, now_s - idle_s)
        return self._adopt(tier, extent, scanned.nbytes, now_s, None if is_cleared else header.session)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong. Walks everything."""
        self._registry.check_integrity()
        self._tombstones.check_integrity()
        copies = {
            (tier, extent.address): copy for extent in self._registry for tier, copy in extent.copies.items()
        }
        for tier, books in self._books.items():
            books.check_integrity([copy for (place, _), copy in copies.items() if place == tier])
        self._claims.check_integrity(copies)
        for extent in self._registry:
            assert extent.copies or extent.bookings, "an extent that is nowhere is remembered"
        for booking in self._claims:
            known = self._registry.get(booking.reservation.address)
            assert booking.is_fenced or known is booking.extent, "a reservation's extent is forgotten"

    def _reserve(
        self, tier: TierName, extent: HeldExtent, nbytes: int, now_s: float
    ) -> Reservation | Held | ReservationRefused:
        if nbytes <= 0:
            raise ValueError(f"a record has some bytes, not {nbytes}")
        address, books = extent.address, self._books[tier]
        if not extent.placement.allows(tier):
            return ReservationRefused("placement")
        if tier in extent.copies:
            return Held()
        if self._claims.is_busy(tier, address):
            return ReservationRefused("busy")
        share = self._share_bytes(tier, address.tenant)
        if nbytes > share:
            return ReservationRefused("too big")
        room = books.make_room(address.tenant, nbytes, share, now_s, self._may_go)
        if isinstance(room, str):
            return ReservationRefused(room)
        generation = self._claims.next_generation()
        victims = self._make(room, generation)
        if self._registry.get(address) is None:
            self._registry.add(extent)
        reservation = Reservation(tier, address, nbytes, generation, victims)
        self._claims.book(reservation, extent)
        return reservation

    def _adopt(
        self, tier: TierName, extent: HeldExtent, nbytes: int, now_s: float, session: bytes | None
    ) -> tuple[Eviction, ...]:
        """Adopt the copy where it does not rank before what would have to go for it."""
        address, books = extent.address, self._books[tier]
        share = self._share_bytes(tier, address.tenant)
        room = books.make_room(address.tenant, nbytes, share, now_s, self._may_go, is_there=True)
        copy = HeldCopy(extent, tier, nbytes, self._claims.next_generation(), self.prices)
        if isinstance(room, str):
            return (self._claims.drop_stranger(tier, address, nbytes, "room"),)
        if books.order([copy, *room[0], *room[1]], now_s)[-1] is not copy:
            return (self._claims.drop_stranger(tier, address, nbytes, "room"),)
        evictions = self._make(room, 0)
        if self._registry.get(address) is None:
            self._registry.add(extent)
        if session is not None:
            self._tag(extent, session)
        books.ledger.adopt(address.tenant, nbytes)
        self._add(copy)
        return evictions

    def _make(self, room: tuple[list[HeldCopy], list[HeldCopy]], for_generation: int) -> tuple[Eviction, ...]:
        own, others = room
        return (
            *(self._evict(copy, "quota", for_generation) for copy in own),
            *(self._evict(copy, "room", for_generation) for copy in others),
        )

    def _evict(self, copy: HeldCopy, reason: EvictReason, for_generation: int = 0) -> Eviction:
        self._registry.remove_copy(copy)
        self._books[copy.tier].evict(copy, self._now_s())
        self._refile(copy.extent)
        self._remove_if_nowhere(copy.extent)
        eviction = Eviction(copy.tier, copy.extent.address, copy.nbytes, copy.generation, reason)
        return self._claims.drop(eviction, for_generation)

    def _add(self, copy: HeldCopy) -> None:
        self._registry.add_copy(copy)
        self._books[copy.tier].add(copy)
        self._refile(copy.extent)

    def _tag(self, extent: HeldExtent, session: bytes) -> None:
        if self._registry.tag(extent, session):
            self._refile(extent)

    def _refile(self, extent: HeldExtent) -> None:
        """Its sessions, or the tiers that have it, are others now."""
        for tier, copy in extent.copies.items():
            self._books[tier].refile(copy)

    def _forget(self, extent: HeldExtent, reason: EvictReason) -> list[Eviction]:
        self._claims.fence(extent)
        evictions = [self._evict(copy, reason) for copy in list(extent.copies.values())]
        if not evictions:
            self._registry.remove(extent)
        return evictions

    def _remove_if_nowhere(self, extent: HeldExtent) -> None:
        if not extent.copies and not extent.bookings:
            self._registry.remove(extent)

    def _copy(self, address: Address, tier: TierName) -> HeldCopy | None:
        extent = self._registry.get(address)
        return None if extent is None else extent.copies.get(tier)

    def _may_go(self, copy: HeldCopy) -> bool:
        return not self._claims.is_pinned(copy)

    def _share_bytes(self, tier: TierName, tenant: bytes) -> int:
        return int(self._books[tier].ledger.budget * min(1.0, self._tenant_share(tenant)))

    def _now_s(self) -> float:
        """The clock, but where it jumps back time goes on from where it was."""
        clock_s = self._clock()
        self._clock_offset_s += max(0.0, self._clock_last_s - clock_s)
        self._clock_last_s = clock_s
        return clock_s + self._clock_offset_s
