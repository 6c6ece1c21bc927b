"""The catalog: which extents exist, in which tiers, and how many bytes they take.

Pure bookkeeping: no record I/O, no threads (the node holds one lock around it), no wall clock. It does
not rank extents (`policy/policies.py`) and does not verify records (`blocks/record.py`).

In each tier an extent is in one state: absent, in transfer, held, or evicted and not yet deleted. A transfer
can begin only when it is absent, so no late delete can hit a new record. Every transfer and eviction has a
generation of its own; a late report of one that has ended changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from samovar.cache_tiers.blocks import KEY_BYTES, TIERS, Address, Clear, ExtentHeader, TierName, session_of
from samovar.cache_tiers.catalog.gone import AbsentBlocks, Clears, SteadyClock
from samovar.cache_tiers.catalog.index import (
    AnnouncedRegistry,
    BlockValues,
    ExtentRegistry,
    HeldCopy,
    HeldExtent,
)
from samovar.cache_tiers.catalog.transfers import Source, TierAccounting, Transfer, TransferTable
from samovar.cache_tiers.catalog.types import (
    Eviction,
    EvictReason,
    ExtentInfo,
    Held,
    Pin,
    ReservationRefused,
    TierUsage,
)
from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.media import Scanned
from samovar.cache_tiers.messages import AbsentRun, BlockRange, Lookup, PartialBlock, SessionHeld
from samovar.cache_tiers.policy import IdleSessions, ResidencyPolicy
from samovar.configs.sections import PolicySettings

if TYPE_CHECKING:
    from samovar.cache_tiers.events.feed import EventFeed

ADOPTED_IDLE_SHARE = 0.9
"""An adopted extent's idle time above this share of its `ttl_s` counts for at most a hundredth more.

A wall clock that is years ahead must not empty the tiers at startup, and the order of use stays."""


class Catalog:
    """The extents of one node and their copies, see the module.

    Everything is named by `Address`, so another tenant can never find it.
    """

    def __init__(
        self,
        budgets: Mapping[TierName, int],
        policy: ResidencyPolicy,
        *,
        clock: Callable[[], float],
        tenant_share: Callable[[bytes], float],
        clears: Clears,
        transfers_max: int,
        sessions: IdleSessions | None = None,
        settings: PolicySettings | None = None,
    ) -> None:
        """Create an empty catalog.

        `budgets`: bytes a tier may hold; a tier that is missing or 0 is off. `clock`: monotonic
        seconds. `tenant_share(tenant tag)`: share of each tier it may take, in (0, 1]. `sessions`: the
        policy's knowledge of sessions, by tenant's and session's tags joined; the caller keeps it up to
        date and reports changes by `session_changed`.
        """
        settings = settings or PolicySettings()
        sessions = IdleSessions(1) if sessions is None else sessions  # an empty table is false
        self._now_s = SteadyClock(clock)
        self._tenant_share = tenant_share
        self._books = {
            tier: TierAccounting(tier, budgets.get(tier, 0), policy, sessions, settings) for tier in TIERS
        }
        self.prices = BlockValues(settings.cost_weighting)
        self._registry = ExtentRegistry()
        self.clears = clears
        ledgers = {tier: books.ledger for tier, books in self._books.items()}
        self.transfers = TransferTable(ledgers, transfers_max)
        self.history = AbsentBlocks(settings.remembered_blocks_max)

    def find(
        self, lookup: Lookup, up: Collection[TierName]
    ) -> tuple[tuple[BlockRange, ...], tuple[PartialBlock, ...]]:
        """Find what the tiers in `up` hold of the chain; touch every extent of it that is held.

        Spans: chain order, no overlap, gaps allowed, each block from the cheapest tier, few spans. Tails:
        deepest first, at most `index.TAILS_MAX`. An extent gets the session's tag when all of it is in
        the chain. O(keys). Raises `ValueError` if `lookup.keys` is not a sequence of whole keys.
        """
        joined = lookup.keys
        self.clears.asked(lookup.tenant, lookup.session)
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
            # Only the caller can tell whether another session's tail is in the prompt (`touch`).
            if lookup.session in extent.sessions:
                extent.use(now_s)
        return match.spans, match.tails

    def absent(self, lookup: Lookup, spans: Iterable[BlockRange]) -> tuple[AbsentRun, ...]:
        """Return what is known of the chain's blocks that are in none of `spans`. O(keys) at most."""
        held = self._registry.chain(lookup.namespace, lookup.tenant)
        return self.history.of(lookup.keys, spans, held)

    def reserve(
        self,
        tier: TierName,
        header: ExtentHeader,
        nbytes: int,
        *,
        clear_seq: int,
        recompute_s: float = 0.0,
        source: Source = "replica",
    ) -> Transfer | Held | ReservationRefused:
        """Reserve room in `tier` for a record of `nbytes` that is new to this node's tiers.

        `clear_seq`: the `StoreRequest`'s. `recompute_s`: time to compute its blocks; 0: unknown. The bytes
        are accounted and the (extent, tier) is exclusive from here until `commit` or `abandon`. The victims
        are out of the index already. If refused, nothing was evicted.
        """
        is_cleared = self.clears.forbids_store(header.tenant, header.session, clear_seq)
        if source != "replica":  # not looked up here, so there may be no tombstone
            is_cleared |= self.clears.forbids_pull(header.tenant, header.session)
        if is_cleared:
            return ReservationRefused("tombstone")
        now_s = self._now_s()
        known = self._registry.get(header.address)
        if known is not None and not known.is_same(header):
            return ReservationRefused("differs")
        extent = HeldExtent(header, now_s) if known is None else known
        self.prices.offered(recompute_s, nbytes)
        extent.recompute_s = recompute_s or extent.recompute_s
        answer = self._reserve(tier, extent, nbytes, source, now_s)
        if known is not None and not isinstance(answer, ReservationRefused):
            known.use(now_s)
            self._tag(known, header.session)
        return answer

    def reserve_copy(
        self, tier: TierName, address: Address, source: Source | None = None
    ) -> Transfer | Held | ReservationRefused:
        """Reserve room as `reserve`, to move an extent another tier holds (demote, write-behind, promote).

        Pin the `source` first; by default it is the cheapest tier with the extent. ReservationRefused("gone")
        if no tier holds it any more: it was cleared. Evicts from `tier` only. Does not count as a use.
        """
        extent = self._registry.get(address)
        cheapest = extent.cheapest() if extent is not None else None
        if extent is None or cheapest is None:
            return ReservationRefused("gone")
        nbytes = extent.copies[cheapest].nbytes
        return self._reserve(tier, extent, nbytes, source or cheapest, self._now_s())

    def commit(self, transfer: Transfer) -> bool:
        """Publish a record that is whole and verified: `find` sees it from now on.

        False: fenced (cleared or expired), or already ended. Nothing was committed; unless it had ended, its
        bytes are accounted: delete what was written, then `abandon`. Raises `ValueError` if not verified.
        """
        if not self.transfers.commit(transfer):
            return False
        self._add(HeldCopy(transfer.extent, transfer.tier, transfer.nbytes, transfer.generation, self.prices))
        if transfer.source not in TIERS:
            self.history.log.append((transfer.extent, transfer.nbytes))
        return True

    def abandon(self, transfer: Transfer) -> None:
        """Give the room back, once nothing of the record is left in the tier. No-op if it has ended."""
        if self.transfers.abandon(transfer) and not transfer.is_fenced:
            self._remove_if_nowhere(transfer.extent, None)

    def squeeze(self, tier: TierName, tenant: bytes, nbytes: int) -> tuple[Eviction, ...]:
        """Evict `nbytes` though the budget has room, the coldest of any tenant; empty if that cannot be.

        For a medium with less room than its budget, and a record of `tenant` whose room is reserved: the
        share was counted then, and what the medium lacks is no part of it.
        """
        ledger = self._books[tier].ledger
        nbytes += max(ledger.budget - ledger.accounted, 0)
        room = self._books[tier].make_room(tenant, nbytes, ledger.budget, self._now_s(), self._may_go)
        return () if isinstance(room, str) else self._make(room)

    def dropped(self, eviction: Eviction) -> None:
        """Free the bytes of an eviction that the tier has deleted. No-op if it was reported before.

        Until then the extent is refused in that tier ("busy"): the delete could hit it.
        """
        self.transfers.dropped(eviction)

    def pin(self, address: Address, tier: TierName) -> Pin | None:
        """Keep this copy from eviction while it is read or copied; None if the tier does not hold it.

        May be pinned several times. Does not count as a use. A clear, an expiry or `lose` still forgets it.
        """
        copy = self._copy(address, tier)
        return None if copy is None else self.transfers.pin(copy)

    def unpin(self, pin: Pin) -> None:
        """End a `pin`, once each. Raises `ValueError` on one too many."""
        self.transfers.unpin(pin)

    def touch(self, address: Address) -> None:
        """Record a use other than by `find` (a tail was fetched). No-op if the extent is unknown."""
        extent = self._registry.get(address)
        if extent is not None:
            extent.use(self._now_s())

    def session_changed(self, session: SessionKey, tenant: bytes) -> None:
        """Re-rank what a session uses after its entry in `sessions` changed."""
        for books in self._books.values():
            books.changed(session, tenant)

    def lose(self, address: Address, tier: TierName) -> Eviction | None:
        """Forget a copy found gone or bad, pinned or not. None if there is no such copy."""
        copy = self._copy(address, tier)
        return None if copy is None else self._evict(copy, "lost")

    def clear(self, clear: Clear) -> list[Eviction]:
        """Forget a tenant, or what only this session of it uses, in all tiers; nothing of it comes back.

        Transfers of what was forgotten are fenced. Stores promised before are refused. If
        nothing is held and nothing was looked up, there are none, and no tombstone is left.
        """
        extents = self._registry.of(clear.tenant, clear.session)
        self.clears.add(clear, is_held=bool(extents))
        evictions = []
        for extent in extents:
            if clear.session is not None and {*map(session_of, extent.sessions)} != {clear.session}:
                self._registry.untag(extent, clear.session)
                self._refile(extent)
            else:
                evictions += self._forget(extent, "cleared")
        return evictions

    def expired(self, extents_max: int = 1024) -> list[Eviction]:
        """Forget extents unused for their `ttl_s`, longest overdue first, `extents_max` per call."""
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
        """Adopt a record that a scan found; return what to evict for it, or itself if it may not stay.

        `is_cleared`: its session was cleared since. What is known, being written or deleted is left alone.
        """
        header, address = scanned.header, scanned.header.address
        known = self._registry.get(address)
        if self._copy(address, tier) is not None or self.transfers.is_busy(tier, address):
            return ()
        now_s = self._now_s()
        if not header.placement.allows(tier):
            return (self.transfers.drop_stranger(tier, address, scanned.nbytes, "placement"),)
        if is_cleared and known is None:
            return (self.transfers.drop_stranger(tier, address, scanned.nbytes, "cleared"),)
        if known is not None and not known.is_same(header):
            return (self.transfers.drop_stranger(tier, address, scanned.nbytes, "differs"),)
        idle_s, most_s = now_unix_s - scanned.last_used_unix_s, ADOPTED_IDLE_SHARE * header.placement.ttl_s
        idle_s = max(0.0, idle_s) if idle_s <= most_s else most_s * (1.01 - 0.01 * most_s / idle_s)
        extent = HeldExtent(header, now_s - idle_s) if known is None else known
        extent.last_used_s = max(extent.last_used_s, now_s - idle_s)
        return self._adopt(tier, extent, scanned.nbytes, now_s, None if is_cleared else header.session)

    def sinking(
        self, tier: TierName, to: TierName, used_share: float, extents_max: int = 256
    ) -> list[Address]:
        """Return what to demote from `tier` to `to` before it must be dropped, coldest first.

        These are the extents whose eviction would bring `tier` down to `used_share` of its budget, except
        those that `to` has, is about to get, or may not have. Looks at most at `extents_max` extents.
        Raises `ValueError` if `to` is not below `tier`.
        """
        if TIERS.index(to) <= TIERS.index(tier):
            raise ValueError(f"{to} is not below {tier}")
        looks = extents_max if self._registry.sinkable[tier, to] else 0  # none where all is written behind
        return [
            copy.extent.address
            for copy in self._books[tier].coldest(used_share, looks, self._now_s())
            if to not in copy.extent.copies
            and not self.transfers.is_busy(to, copy.extent.address)
            and copy.extent.placement.allows(to)
        ]

    def hottest(self, tier: TierName) -> list[Address]:
        """Return all that `tier` holds, the last to be evicted first. Scans everything."""
        return [copy.extent.address for copy in self._books[tier].all_in_order(self._now_s())][::-1]

    def sessions(self, limit: int) -> list[SessionHeld]:
        """Return the sessions used last. Scans everything."""
        return [self.session(*key) for key in self._registry.latest_sessions(limit)]

    def session(self, tenant: bytes, session: bytes) -> SessionHeld:
        """Return what is held of one session."""
        return self._registry.session(tenant, session, self._now_s())

    def extents_of(self, tenant: bytes, session: bytes) -> list[ExtentInfo]:
        """Return the extents with the session's tag that some tier holds, in chain order."""
        held = [extent.info() for extent in self._registry.of(tenant, session) if extent.copies]
        return sorted(held, key=lambda info: info.first_block)

    def copies(self, address: Address) -> tuple[TierName, ...]:
        """Return the tiers that hold an extent, cheapest first; empty if none does."""
        info = self.info(address)
        return () if info is None else info.tiers

    def info(self, address: Address) -> ExtentInfo | None:
        """Return what is known of an extent that some tier holds, else None."""
        extent = self._registry.get(address)
        return extent.info() if extent is not None and extent.copies else None

    def usage(self, tier: TierName) -> TierUsage:
        """Return the current usage of a tier."""
        return self._books[tier].usage()

    def tenant_bytes(self, tier: TierName, tenant: bytes) -> int:
        """Return the bytes a tenant holds or has reserved in `tier`."""
        return self._books[tier].ledger.tenants[tenant]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong. Scans everything."""
        self._registry.check_integrity()
        self.clears.check_integrity()
        self.history.check_integrity()
        copies = {
            (tier, extent.address): copy for extent in self._registry for tier, copy in extent.copies.items()
        }
        for tier, books in self._books.items():
            books.check_integrity([copy for (place, _), copy in copies.items() if place == tier])
        self.transfers.check_integrity(copies, self._registry.get)
        for extent in self._registry:
            is_coming = bool(self.transfers.into_tiers(extent))
            assert extent.copies or is_coming, "an extent that is nowhere is remembered"

    def _reserve(
        self, tier: TierName, extent: HeldExtent, nbytes: int, source: Source, now_s: float
    ) -> Transfer | Held | ReservationRefused:
        if nbytes <= 0:
            raise ValueError(f"a record has some bytes, not {nbytes}")
        address, books = extent.address, self._books[tier]
        if not extent.placement.allows(tier):
            return ReservationRefused("placement")
        if tier in extent.copies:
            return Held()
        if self.transfers.is_busy(tier, address) or self.transfers.is_full:
            return ReservationRefused("busy")
        share = self._share_bytes(tier, address.tenant)
        if nbytes > share:
            return ReservationRefused("too big")
        room = books.make_room(address.tenant, nbytes, share, now_s, self._may_go)
        if isinstance(room, str):
            return ReservationRefused(room)
        transfer = Transfer(self.transfers.next_generation(), source, tier, extent, nbytes)
        victims = self._make(room, transfer)
        if self._registry.get(address) is None:
            self._registry.add(extent)
            self.history.reserved(extent)
        self.transfers.reserve(transfer, victims)
        return transfer

    def _adopt(
        self, tier: TierName, extent: HeldExtent, nbytes: int, now_s: float, session: bytes | None
    ) -> tuple[Eviction, ...]:
        """Adopt the copy unless it ranks below what would be evicted for it."""
        address, books = extent.address, self._books[tier]
        share = self._share_bytes(tier, address.tenant)
        room = books.make_room(address.tenant, nbytes, share, now_s, self._may_go, is_there=True)
        copy = HeldCopy(extent, tier, nbytes, self.transfers.next_generation(), self.prices)
        if isinstance(room, str):
            return (self.transfers.drop_stranger(tier, address, nbytes, "room"),)
        if room != ([], []) and books.order([copy, *room[0], *room[1]], now_s)[-1] is not copy:
            return (self.transfers.drop_stranger(tier, address, nbytes, "room"),)
        evictions = self._make(room)
        if self._registry.get(address) is None:
            self._registry.add(extent)
        if session is not None:
            self._tag(extent, session)
        books.ledger.adopt(address.tenant, nbytes)
        self._add(copy)
        self.history.adopted.append(extent)
        return evictions

    def _make(
        self, room: tuple[list[HeldCopy], list[HeldCopy]], transfer: Transfer | None = None
    ) -> tuple[Eviction, ...]:
        own, others = room
        return (
            *(self._evict(copy, "quota", transfer) for copy in own),
            *(self._evict(copy, "room", transfer) for copy in others),
        )

    def _evict(self, copy: HeldCopy, reason: EvictReason, transfer: Transfer | None = None) -> Eviction:
        self._registry.remove_copy(copy)
        self._books[copy.tier].evict(copy, self._now_s())
        self._refile(copy.extent)
        self._remove_if_nowhere(copy.extent, reason)
        unused_s = copy.extent.placement.ttl_s if reason == "expired" else 0.0
        eviction = Eviction(copy.tier, copy.extent.address, copy.nbytes, copy.generation, reason, unused_s)
        return self.transfers.drop(eviction, transfer)

    def _add(self, copy: HeldCopy) -> None:
        self._registry.add_copy(copy)
        self._books[copy.tier].add(copy)
        self._refile(copy.extent)

    def _tag(self, extent: HeldExtent, session: bytes) -> None:
        if self._registry.tag(extent, session):
            self._refile(extent)

    def _refile(self, extent: HeldExtent) -> None:
        """Re-queue the extent's copies after its sessions or tiers changed."""
        for tier, copy in extent.copies.items():
            self._books[tier].requeue(copy)

    def _forget(self, extent: HeldExtent, reason: EvictReason) -> list[Eviction]:
        self.transfers.fence(extent)
        evictions = [self._evict(copy, reason) for copy in list(extent.copies.values())]
        if not evictions:
            self._remove(extent, reason)
        return evictions

    def _remove_if_nowhere(self, extent: HeldExtent, why: EvictReason | None) -> None:
        if not extent.copies and not self.transfers.into_tiers(extent):
            self._remove(extent, why)

    def _remove(self, extent: HeldExtent, why: EvictReason | None) -> None:
        """Forget an extent, but not why its blocks are missing; `why`: None: it was never written."""
        self._registry.remove(extent)
        self.history.left(extent, why)

    def _copy(self, address: Address, tier: TierName) -> HeldCopy | None:
        extent = self._registry.get(address)
        return None if extent is None else extent.copies.get(tier)

    def _may_go(self, copy: HeldCopy) -> bool:
        return not self.transfers.is_pinned(copy)

    def _share_bytes(self, tier: TierName, tenant: bytes) -> int:
        return int(self._books[tier].ledger.budget * min(1.0, self._tenant_share(tenant)))


def announced_catalog(feed: EventFeed, *args: Any, **kwargs: Any) -> Catalog:
    """Return a new catalog, made of the further arguments, that tells `feed` of its blocks."""
    catalog = Catalog(*args, **kwargs)
    catalog._registry = AnnouncedRegistry(feed)
    return catalog
