"""What a directory tells about itself: who is coldest, what is held of whom. Changes nothing.

`directory.py` keeps the books that this looks at.
"""

from __future__ import annotations

from cache_tiers.claims import Claims
from cache_tiers.extent import TIERS, Address, TierName
from cache_tiers.extent_registry import ExtentRegistry
from cache_tiers.residency import ExtentInfo, Usage
from cache_tiers.sessions import SessionHeld
from cache_tiers.tier_books import TierBooks


class DirectoryViews:
    """The questions to a `Directory`."""

    _books: dict[TierName, TierBooks]
    _registry: ExtentRegistry
    _claims: Claims

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

    def usage(self, tier: TierName) -> Usage:
        """A tier's books now."""
        return self._books[tier].usage()

    def tenant_bytes(self, tier: TierName, tenant: bytes) -> int:
        """Bytes a tenant holds or has reserved in `tier`."""
        return self._books[tier].ledger.tenants[tenant]
