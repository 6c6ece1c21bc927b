"""The extents that are known: by address, by chain, by who made them, by when they expire.

Whoever changes an extent's copies or tags does it here, so that the ways to it agree. Knows no bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from cache_tiers.chain_index import ChainIndex, Match
from cache_tiers.extent import TIERS, Address, TierName
from cache_tiers.held_extent import SESSIONS_MAX, HeldCopy, HeldExtent
from cache_tiers.lazy_heap import LazyHeap, Place
from cache_tiers.sessions import SessionHeld

Key = TypeVar("Key")

EXPIRY_MOVES_MAX = 4096
"""Extents looked at in one search for an expired one: a bound on how long the node's lock is held."""


class ExtentRegistry:
    """Extents with a copy, or a reservation in flight, in some tier; `find` sees those with a copy."""

    def __init__(self) -> None:
        self._extents: dict[Address, HeldExtent] = {}
        self._chains: dict[tuple[bytes, bytes], ChainIndex] = {}  # (namespace, tenant)
        self._sessions: dict[tuple[bytes, bytes], dict[HeldExtent, None]] = {}  # (tenant, tag)
        self._tenants: dict[bytes, dict[HeldExtent, None]] = {}
        self._expiry: LazyHeap[HeldExtent] = LazyHeap(_expires)

    def __iter__(self) -> Iterator[HeldExtent]:
        return iter(self._extents.values())

    def get(self, address: Address) -> HeldExtent | None:
        return self._extents.get(address)

    def add(self, extent: HeldExtent) -> None:
        """A new extent, without copies yet."""
        tenant = extent.address.tenant
        self._extents[extent.address] = extent
        self._tenants.setdefault(tenant, {})[extent] = None
        for session in extent.sessions:
            self._sessions.setdefault((tenant, session), {})[extent] = None
        self._expiry.add(extent)

    def remove(self, extent: HeldExtent) -> None:
        """Forget an extent that has no copies (any more)."""
        tenant = extent.address.tenant
        del self._extents[extent.address]
        self._expiry.discard(extent)
        _leave(self._tenants, tenant, extent)
        for session in extent.sessions:
            _leave(self._sessions, (tenant, session), extent)

    def add_copy(self, copy: HeldCopy) -> None:
        extent = copy.extent
        if not extent.copies:
            self._chains.setdefault(_chain(extent), ChainIndex()).add(extent)
        extent.copies[copy.tier] = copy

    def remove_copy(self, copy: HeldCopy) -> None:
        extent = copy.extent
        del extent.copies[copy.tier]
        if not extent.copies:
            chain = self._chains[_chain(extent)]
            chain.remove(extent)
            if not len(chain):
                del self._chains[_chain(extent)]

    def tag(self, extent: HeldExtent, session: bytes) -> bool:
        """This session has all of it as well. False: that was known, or it carries `SESSIONS_MAX` tags."""
        if session in extent.sessions or len(extent.sessions) >= SESSIONS_MAX:
            return False
        extent.sessions.add(session)
        self._sessions.setdefault((extent.address.tenant, session), {})[extent] = None
        return True

    def untag(self, extent: HeldExtent, session: bytes) -> None:
        extent.sessions.discard(session)
        _leave(self._sessions, (extent.address.tenant, session), extent)

    def of(self, tenant: bytes, session: bytes | None) -> list[HeldExtent]:
        """Extents of a tenant, or those with the session's tag."""
        return list(
            self._tenants.get(tenant, ()) if session is None else self._sessions.get((tenant, session), ())
        )

    def latest_sessions(self, limit: int) -> list[tuple[bytes, bytes]]:
        """(tenant, tag) of those of which something is held, the last used first. O(extents)."""
        used_s = {
            key: max(extent.last_used_s for extent in extents)
            for key, extents in self._sessions.items()
            if any(extent.copies for extent in extents)
        }
        return heapq.nlargest(limit, used_s, key=used_s.__getitem__)

    def session(self, tenant: bytes, session: bytes, now_s: float) -> SessionHeld:
        """What of a session is held; `idle_s` is infinite when it is nothing.

        An extent that several sessions share counts for each of them, its copy in two tiers in both.
        """
        nbytes: dict[str, int] = {}
        held = [extent for extent in self.of(tenant, session) if extent.copies]
        for extent in held:
            for tier, copy in extent.copies.items():
                nbytes[tier] = nbytes.get(tier, 0) + copy.nbytes
        used_s = max((extent.last_used_s for extent in held), default=-math.inf)
        return SessionHeld(
            tenant,
            session,
            nbytes,
            tokens=sum(extent.tokens for extent in held),
            blocks=sum(extent.blocks for extent in held),
            idle_s=max(0.0, now_s - used_s),
        )

    def find(
        self, namespace: bytes, tenant: bytes, keys: Sequence[bytes], up: Collection[TierName]
    ) -> Match | None:
        """None when nothing at all is held under this namespace for this tenant."""
        chain = self._chains.get((namespace, tenant))
        return None if chain is None else chain.find(keys, up)

    def next_expired(self, now_s: float) -> HeldExtent | None:
        """The longest overdue extent, as far as is known now; it stays until it is removed."""
        extent = self._expiry.first(EXPIRY_MOVES_MAX)
        return extent if extent is not None and _expires(extent)[0] <= now_s else None

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        self._expiry.check_integrity()
        assert len(self._expiry) == len(self._extents), "extents that expire are not those known"
        chains: dict[tuple[bytes, bytes], list[HeldExtent]] = {}
        tenants: dict[bytes, dict[HeldExtent, None]] = {}
        sessions: dict[tuple[bytes, bytes], dict[HeldExtent, None]] = {}
        for address, extent in self._extents.items():
            assert extent.address == address, "an extent is filed under another address"
            assert extent in self._expiry, "an extent never expires"
            assert 0 < len(extent.sessions) <= SESSIONS_MAX, f"an extent has {len(extent.sessions)} tags"
            for tier, copy in extent.copies.items():
                assert copy.extent is extent, "a copy belongs to another extent"
                assert copy.tier == tier in TIERS, "a copy is filed under another tier"
            tenants.setdefault(address.tenant, {})[extent] = None
            for session in extent.sessions:
                sessions.setdefault((address.tenant, session), {})[extent] = None
            if extent.copies:
                chains.setdefault(_chain(extent), []).append(extent)
        assert self._tenants == tenants, "the extents of a tenant are wrong"
        assert self._sessions == sessions, "the extents of a session are wrong"
        assert self._chains.keys() == chains.keys(), "a chain index is missing, or left over"
        for name, chain in self._chains.items():
            chain.check_integrity(chains[name])


def _chain(extent: HeldExtent) -> tuple[bytes, bytes]:
    return extent.address.namespace, extent.address.tenant


def _expires(extent: HeldExtent) -> Place:
    return extent.last_used_s + extent.placement.expire_s, 0


def _leave(rows: dict[Key, dict[HeldExtent, None]], key: Key, extent: HeldExtent) -> None:
    rows[key].pop(extent)
    if not rows[key]:
        del rows[key]
