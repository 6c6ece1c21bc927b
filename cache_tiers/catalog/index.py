"""The extents that the catalog holds, and the index from a chain of block keys to those with its blocks.

The index is of one namespace of one tenant. A key commits to its block and everything before it, so an extent
that has a key has the right blocks up to there, and a lookup is one dict access per block, whatever is held.
Extents may overlap (conversations with a common prefix, cut differently). A partial tail block is found by
its parent, never by its key: only the caller that has the tokens can tell whether it matches. Knows nothing
of bytes or clocks.

A header with its checksums takes kilobytes; for 100,000 extents only what `find` and the accounting need is
kept (`HeldExtent`). Mutable, changed only by the catalog.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TypeVar

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    ROOT,
    TIERS,
    Address,
    BlockShape,
    ExtentHeader,
    LoadSource,
    Placement,
    TierName,
    header_bytes,
    session_of,
)
from samovar.cache_tiers.catalog.types import ExtentInfo
from samovar.cache_tiers.events.feed import (
    BlockPlace,
    BlocksRemoved,
    BlocksStored,
    EventFeed,
    hash_of,
    place_of,
)
from samovar.cache_tiers.messages import BlockRange, PartialBlock, SessionHeld
from samovar.cache_tiers.policy import LazyHeap, Place, used_rate
from samovar.cache_tiers.pricing import TierPrice

ROW_SCAN_MAX = 64
"""Extents examined per block, newest first.

Any of them will do, and a prefix shared by thousands of extents must not make a lookup slow."""

TAILS_MAX = 64
"""Tails in one answer: the caller hashes each of them."""


@dataclass(frozen=True, slots=True)
class Match:
    """Result of a lookup. `seen`: extents with blocks of the chain -> whether every block is in it."""

    spans: tuple[BlockRange, ...]
    seen: dict[HeldExtent, bool]
    tails: tuple[PartialBlock, ...]
    tail_extents: tuple[HeldExtent, ...]


class _ExtentsByKey:
    """key -> extents. A key with one extent, as most have, stores it without a container."""

    def __init__(self) -> None:
        self._rows: dict[bytes, HeldExtent | dict[HeldExtent, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def which(self, keys: Sequence[bytes]) -> list[int]:
        rows = self._rows
        return [at for at, key in enumerate(keys) if key in rows]

    def add(self, key: bytes, extent: HeldExtent) -> None:
        row = self._rows.setdefault(key, extent)
        if isinstance(row, dict):
            row[extent] = None
        elif row is not extent:
            self._rows[key] = {row: None, extent: None}

    def remove(self, key: bytes, extent: HeldExtent) -> None:
        row = self._rows.get(key)
        if isinstance(row, dict):
            row.pop(extent, None)
            if len(row) == 1:
                self._rows[key] = next(iter(row))
        elif row is extent:
            del self._rows[key]

    def at(self, key: bytes) -> Sequence[HeldExtent]:
        """Return the newest `ROW_SCAN_MAX` extents of the row."""
        row = self._rows.get(key)
        if row is None:
            return ()
        return list(islice(reversed(row), ROW_SCAN_MAX)) if isinstance(row, dict) else (row,)

    def pairs(self) -> Iterator[tuple[bytes, HeldExtent]]:
        for key, row in self._rows.items():
            for extent in row if isinstance(row, dict) else (row,):
                yield key, extent

    def check_integrity(self) -> None:
        for row in self._rows.values():
            assert not isinstance(row, dict) or len(row) > 1, "a row of the index is longer than its extents"


class ChainIndex:
    """All extents of one namespace and tenant that some tier holds, by block key."""

    def __init__(self) -> None:
        self._blocks = _ExtentsByKey()
        self._tails = _ExtentsByKey()

    def __len__(self) -> int:
        """Return the number of keys indexed."""
        return len(self._blocks) + len(self._tails)

    def add(self, extent: HeldExtent) -> None:
        """Index an extent. O(blocks)."""
        for key in extent.block_keys():
            self._blocks.add(key, extent)
        if extent.tail is not None:
            self._tails.add(extent.tail_parent, extent)

    def remove(self, extent: HeldExtent) -> None:
        """Remove an extent from the index. O(blocks)."""
        for key in extent.block_keys():
            self._blocks.remove(key, extent)
        if extent.tail is not None:
            self._tails.remove(extent.tail_parent, extent)

    def which(self, keys: Sequence[bytes]) -> list[int]:
        """Return which of these full blocks some extent has, in a tier that is up or not."""
        return self._blocks.which(keys)

    def find(self, keys: Sequence[bytes], up: Collection[TierName]) -> Match:
        """Return what the tiers in `up` hold of the chain `keys`. O(keys), however much is held."""
        spans, tiers = self._spans(keys, up)
        tails, tail_extents = self._tails_of(keys, up)
        seen = {extent: _is_whole(extent, keys) for extent in tiers}
        return Match(tuple(spans), seen, tuple(tails), tuple(tail_extents))

    def _spans(
        self, keys: Sequence[bytes], up: Collection[TierName]
    ) -> tuple[list[BlockRange], dict[HeldExtent, TierName | None]]:
        """Return the spans of the chain, and every extent met with its tier.

        Scans from the last block to the first, because an extent shares its beginning with a chain. A
        block comes from the cheapest tier that has it; among equals from the extent in use already, else
        from the one that reaches back furthest.
        """
        spans: list[BlockRange] = []
        tiers: dict[HeldExtent, TierName | None] = {}
        current: HeldExtent | None = None
        end = 0  # of the current span
        for at in range(len(keys) - 1, -1, -1):
            key = keys[at]
            row = self._blocks.at(key)
            if current is not None and len(row) == 1 and row[0] is current:
                continue  # nothing to choose from
            best: HeldExtent | None = None
            best_rank = (len(TIERS), 0)
            for extent in row if current is None else (current, *row):
                if not extent.has_block(at - extent.first_block, key):
                    continue  # too short, or its header is wrong about its place in the chain
                if extent not in tiers:
                    tiers[extent] = extent.cheapest(up)
                tier = tiers[extent]
                if tier is None:
                    continue
                rank = TIERS.index(tier), -1 if extent is current else extent.first_block
                if rank < best_rank:
                    best, best_rank = extent, rank
            if best is not current:
                if current is not None:
                    spans.append(_span(current, at + 1, end, tiers[current]))
                current, end = best, at + 1
        if current is not None:
            spans.append(_span(current, 0, end, tiers[current]))
        spans.reverse()
        return spans, tiers

    def _tails_of(
        self, keys: Sequence[bytes], up: Collection[TierName]
    ) -> tuple[list[PartialBlock], list[HeldExtent]]:
        tails: list[PartialBlock] = []
        extents: list[HeldExtent] = []
        for at in range(len(keys), -1, -1):
            for extent in self._tails.at(keys[at - 1] if at else ROOT):
                tier = extent.cheapest(up)
                if tier is None or extent.tail is None or extent.first_block + extent.full_blocks != at:
                    continue
                key, tokens = extent.tail
                tails.append(PartialBlock(key, tokens, extent.span(at, extent.full_blocks, 1, tier)))
                extents.append(extent)
                if len(tails) == TAILS_MAX:
                    return tails, extents
        return tails, extents

    def check_integrity(self, extents: Collection[HeldExtent]) -> None:
        """Raise `AssertionError` unless exactly `extents` are indexed."""
        self._blocks.check_integrity()
        self._tails.check_integrity()
        blocks = {(key, extent) for extent in extents for key in extent.block_keys()}
        assert set(self._blocks.pairs()) == blocks, "blocks in the index are not those of the extents held"
        tails = {(extent.tail_parent, extent) for extent in extents if extent.tail is not None}
        assert set(self._tails.pairs()) == tails, "tails in the index are not those of the extents held"


def _span(extent: HeldExtent, first: int, end: int, tier: TierName | None) -> BlockRange:
    assert tier is not None
    return extent.span(first, first - extent.first_block, end - first, tier)


def _is_whole(extent: HeldExtent, keys: Sequence[bytes]) -> bool:
    last = extent.full_blocks - 1
    at = extent.first_block + last
    return extent.tail is None and at < len(keys) and extent.has_block(last, keys[at])


Key = TypeVar("Key")
Entry = TypeVar("Entry")

EXPIRY_MOVES_MAX = 4096
"""Extents examined per search for an expired one: bounds how long the node's lock is held."""


class ExtentRegistry:
    """Extents with a copy or an in-flight reservation: by address, chain, session, tenant and expiry.

    `find` sees only those with a copy. All changes of an extent's copies or tags are made here, so that
    these indexes agree.
    """

    def __init__(self) -> None:
        self._extents: dict[Address, HeldExtent] = {}
        self._chains: dict[tuple[bytes, bytes], ChainIndex] = {}  # (namespace, tenant)
        self._sessions: dict[tuple[bytes, bytes], dict[HeldExtent, None]] = {}  # (tenant, lineage's tag)
        self._lineages: dict[tuple[bytes, bytes], dict[bytes, None]] = {}  # (tenant, session's) -> lineages'
        self._tenants: dict[bytes, dict[HeldExtent, None]] = {}
        self._expiry: LazyHeap[HeldExtent] = LazyHeap(_expires)
        self.sinkable: Counter[tuple[TierName, TierName]] = Counter()
        """How many copies of a tier have none in a lower one, and may have one, by both."""

    def __iter__(self) -> Iterator[HeldExtent]:
        return iter(self._extents.values())

    def get(self, address: Address) -> HeldExtent | None:
        return self._extents.get(address)

    def add(self, extent: HeldExtent) -> None:
        """Add a new extent, without copies yet."""
        tenant = extent.address.tenant
        self._extents[extent.address] = extent
        self._tenants.setdefault(tenant, {})[extent] = None
        for session in extent.sessions:
            self._file(extent, session)
        self._expiry.add(extent)

    def remove(self, extent: HeldExtent) -> None:
        """Forget an extent that has no copies, or none any more."""
        tenant = extent.address.tenant
        del self._extents[extent.address]
        self._expiry.discard(extent)
        _leave(self._tenants, tenant, extent)
        for session in extent.sessions:
            self._unfile(extent, session)

    def add_copy(self, copy: HeldCopy) -> None:
        extent = copy.extent
        if not extent.copies:
            self._chains.setdefault(_chain(extent), ChainIndex()).add(extent)
        extent.copies[copy.tier] = copy
        at, last = TIERS.index(copy.tier), TIERS.index(extent.placement.lowest)
        to = [to for to in TIERS[at + 1 : last + 1] if to not in extent.copies]
        self.sinkable.update([(copy.tier, lower) for lower in to])
        self.sinkable.subtract([(upper, copy.tier) for upper in TIERS[:at] if upper in extent.copies])

    def remove_copy(self, copy: HeldCopy) -> None:
        extent = copy.extent
        del extent.copies[copy.tier]
        at, last = TIERS.index(copy.tier), TIERS.index(extent.placement.lowest)
        to = [to for to in TIERS[at + 1 : last + 1] if to not in extent.copies]
        self.sinkable.subtract([(copy.tier, lower) for lower in to])
        self.sinkable.update([(upper, copy.tier) for upper in TIERS[:at] if upper in extent.copies])
        if not extent.copies:
            chain = self._chains[_chain(extent)]
            chain.remove(extent)
            if not len(chain):
                del self._chains[_chain(extent)]

    def tag(self, extent: HeldExtent, session: bytes) -> bool:
        """Tag an extent that this session has all of. False: already tagged, or `SESSIONS_MAX` reached."""
        if session in extent.sessions or len(extent.sessions) >= SESSIONS_MAX:
            return False
        extent.sessions.add(session)
        self._file(extent, session)
        return True

    def untag(self, extent: HeldExtent, session: bytes) -> None:
        """Take all tags of a session's lineages from an extent that others use, too."""
        for tag in [tag for tag in extent.sessions if session_of(tag) == session_of(session)]:
            extent.sessions.discard(tag)
            self._unfile(extent, tag)

    def of(self, tenant: bytes, session: bytes | None) -> list[HeldExtent]:
        """Return a tenant's extents, or those with a lineage's tag, or with any of a whole session's."""
        if session is None:
            return list(self._tenants.get(tenant, ()))
        tags = self._lineages.get((tenant, session), (session,))
        return list(dict.fromkeys(one for tag in tags for one in self._sessions.get((tenant, tag), ())))

    def latest_sessions(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Return (tenant, tag) of the lineages of which something is held, last used first. O(extents)."""
        used_s = {
            key: max(extent.last_used_s for extent in extents)
            for key, extents in self._sessions.items()
            if any(extent.copies for extent in extents)
        }
        return heapq.nlargest(limit, used_s, key=used_s.__getitem__)

    def session(self, tenant: bytes, session: bytes, now_s: float) -> SessionHeld:
        """Return what is held of a session; `idle_s` is infinite if that is nothing.

        An extent shared by several sessions counts for each of them, and one with copies in two tiers in
        both.
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
        """Look up a chain; None if nothing is held under this namespace for this tenant."""
        chain = self.chain(namespace, tenant)
        return None if chain is None else chain.find(keys, up)

    def chain(self, namespace: bytes, tenant: bytes) -> ChainIndex | None:
        """Return the index of what is held under this namespace for this tenant; None: nothing is."""
        return self._chains.get((namespace, tenant))

    def next_expired(self, now_s: float) -> HeldExtent | None:
        """Return the longest overdue extent as far as is known now, else None; does not remove it."""
        extent = self._expiry.first(EXPIRY_MOVES_MAX)
        return extent if extent is not None and _expires(extent)[0] <= now_s else None

    def _file(self, extent: HeldExtent, tag: bytes) -> None:
        tenant = extent.address.tenant
        self._sessions.setdefault((tenant, tag), {})[extent] = None
        self._lineages.setdefault((tenant, session_of(tag)), {})[tag] = None

    def _unfile(self, extent: HeldExtent, tag: bytes) -> None:
        tenant = extent.address.tenant
        _leave(self._sessions, (tenant, tag), extent)
        if (tenant, tag) not in self._sessions:
            _leave(self._lineages, (tenant, session_of(tag)), tag)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
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
        sinks = Counter(
            [
                (tier, to)
                for extent in self._extents.values()
                for tier in extent.copies
                for to in TIERS[TIERS.index(tier) + 1 : TIERS.index(extent.placement.lowest) + 1]
                if to not in extent.copies
            ]
        )
        assert {pair: count for pair, count in self.sinkable.items() if count} == sinks, (
            "what could sink is miscounted"
        )
        assert self._tenants == tenants, "the extents of a tenant are wrong"
        assert self._sessions == sessions, "the extents of a session are wrong"
        lineages = {(tenant, tag) for (tenant, _), tags in self._lineages.items() for tag in tags}
        assert lineages == sessions.keys(), "the lineages of a session are wrong"
        assert self._chains.keys() == chains.keys(), "a chain index is missing, or left over"
        for name, chain in self._chains.items():
            chain.check_integrity(chains[name])


class AnnouncedRegistry(ExtentRegistry):
    """A registry that tells `feed` which full blocks are in the tiers, and which are no longer.

    Extents overlap, and tiers may be one place for who hears it: a block is told as it comes to a place and
    as its last copy leaves that.
    """

    def __init__(self, feed: EventFeed) -> None:
        super().__init__()
        self._feed = feed
        self._copies: dict[BlockPlace, Counter[int]] = {}

    def add_copy(self, copy: HeldCopy) -> None:
        super().add_copy(copy)
        extent, place = copy.extent, place_of(copy.tier)
        copies = self._copies.setdefault(place, Counter())
        hashes = [hash_of(key) for key in extent.block_keys()]
        parents = [None if extent.parent == ROOT else hash_of(extent.parent), *hashes]
        for is_news, run in groupby(range(len(hashes)), lambda at: hashes[at] not in copies):
            at = list(run)
            if is_news:
                news = hashes[at[0] : at[-1] + 1]
                self._feed.tell(BlocksStored(news, parents[at[0]], (), extent.shape.block_tokens, place))
        copies.update(hashes)

    def remove_copy(self, copy: HeldCopy) -> None:
        super().remove_copy(copy)
        place = place_of(copy.tier)
        copies = self._copies[place]
        hashes = [hash_of(key) for key in copy.extent.block_keys()]
        copies.subtract(hashes)
        gone = [one for one in hashes if not copies[one]]
        for one in gone:
            del copies[one]
        if gone:
            self._feed.tell(BlocksRemoved(gone, place))


def _chain(extent: HeldExtent) -> tuple[bytes, bytes]:
    return extent.address.namespace, extent.address.tenant


def _expires(extent: HeldExtent) -> Place:
    return extent.last_used_s + extent.placement.ttl_s, 0


def _leave(rows: dict[Key, dict[Entry, None]], key: Key, entry: Entry) -> None:
    rows[key].pop(entry)
    if not rows[key]:
        del rows[key]


SESSIONS_MAX = 16
"""Tags per extent.

Sessions beyond that are not recorded: clearing the recorded ones forgets too much, never too little."""


@dataclass(slots=True, eq=False)
class HeldCopy:
    """The extent's committed record in one tier, an `eviction_queue.Thing`. `prices`: see `BlockValues`."""

    extent: HeldExtent
    tier: TierName
    nbytes: int
    generation: int
    prices: BlockValues

    @property
    def owners(self) -> list[bytes]:
        """Return one name per session: the tenant's and session's tags, joined."""
        tenant = self.extent.address.tenant
        return [tenant + session for session in self.extent.sessions]

    @property
    def used_s(self) -> float:
        return self.extent.last_used_s

    @property
    def end_tokens(self) -> int:
        return self.extent.first_block * self.extent.shape.block_tokens + self.extent.tokens

    @property
    def saved_s(self) -> float:
        return self.prices.saved_s(self)

    @property
    def min_ttl_s(self) -> float:
        return self.extent.placement.min_ttl_s

    @property
    def is_clean(self) -> bool:
        return self.extent.is_clean(self.tier)

    @property
    def rate_per_s(self) -> float:
        return self.extent.rate_per_s


class HeldExtent:
    """An extent's catalog entry. `keys`: of the full blocks, joined; `tail`: a partial last block's."""

    __slots__ = (
        *("address", "shape", "parent", "first_block", "blocks", "tokens", "placement"),
        *("keys", "full_blocks", "tail", "tail_parent", "last_used_s", "sessions", "copies"),
        *("rate_per_s", "recompute_s"),
    )

    def __init__(self, header: ExtentHeader, last_used_s: float) -> None:
        self.address: Address = header.address
        self.shape: BlockShape = header.shape
        self.parent: bytes = header.parent
        self.first_block: int = header.first_block
        self.blocks: int = header.blocks
        self.tokens: int = header.tokens
        self.placement: Placement = header.placement
        is_partial = header.token_counts[-1] < header.shape.block_tokens
        self.full_blocks: int = header.blocks - is_partial
        self.keys: bytes = b"".join(header.keys[: self.full_blocks])
        self.tail: tuple[bytes, int] | None = (
            (header.keys[-1], header.token_counts[-1]) if is_partial else None
        )
        self.tail_parent: bytes = header.keys[-2] if header.blocks > 1 else header.parent
        self.last_used_s: float = last_used_s
        self.rate_per_s: float = 0.0
        self.recompute_s: float = 0.0  # for all of it; 0: unknown
        self.sessions: set[bytes] = {header.session}
        self.copies: dict[TierName, HeldCopy] = {}

    def use(self, now_s: float) -> None:
        """Record a use; a late report does not move the time back."""
        self.rate_per_s = used_rate(self.rate_per_s, now_s - self.last_used_s)
        self.last_used_s = max(self.last_used_s, now_s)

    def is_same(self, header: ExtentHeader) -> bool:
        """Return whether a header of the same address agrees about the extent's position and shape."""
        counts = header.token_counts
        tail_tokens = counts[-1] if counts[-1] < header.shape.block_tokens else None
        return (
            self.shape == header.shape
            and self.parent == header.parent
            and self.first_block == header.first_block
            and self.tokens == header.tokens
            and (self.tail[1] if self.tail else None) == tail_tokens
        )

    def has_block(self, offset: int, key: bytes) -> bool:
        """Return whether the full block at `offset` has exactly this key."""
        at = offset * KEY_BYTES
        return 0 <= offset < self.full_blocks and self.keys[at : at + KEY_BYTES] == key

    def block_keys(self) -> list[bytes]:
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]

    def cheapest(self, up: Collection[TierName] = TIERS) -> TierName | None:
        """Return the cheapest tier in `up` that has a copy."""
        for tier in TIERS:
            if tier in self.copies and tier in up:
                return tier
        return None

    def is_clean(self, tier: TierName) -> bool:
        """Return whether a tier below `tier` has a copy."""
        return any(below in self.copies for below in TIERS[TIERS.index(tier) + 1 :])

    def span(self, first: int, offset: int, blocks: int, tier: TierName) -> BlockRange:
        """Return `blocks` of the extent from `offset` on as a range at chain index `first`."""
        nbytes = header_bytes(self.blocks, self.shape.layers) + blocks * self.shape.block_bytes
        return BlockRange(
            extent_id=self.address.extent_id,
            tenant=self.address.tenant,
            first=first,
            offset=offset,
            blocks=blocks,
            tier=tier,
            nbytes=nbytes,
        )

    def info(self) -> ExtentInfo:
        """Return what callers may know of the extent. Only for an extent that has a copy."""
        tiers = tuple(tier for tier in TIERS if tier in self.copies)
        return ExtentInfo(
            address=self.address,
            shape=self.shape,
            parent=self.parent,
            first_block=self.first_block,
            blocks=self.blocks,
            tokens=self.tokens,
            placement=self.placement,
            sessions=frozenset(self.sessions),
            last_used_s=self.last_used_s,
            nbytes=self.copies[tiers[0]].nbytes,
            tiers=tiers,
        )


RATE = 0.05
"""How fast the usual recompute price follows what is offered."""


class BlockValues:
    """Values a copy: seconds per byte saved over loading it from the next tier or recomputing it. Pure.

    The node sets the prices. Extents of unknown recompute time (found at startup) are valued at the
    usual price. `cost_weighting`: value an extent by its own blocks' recompute time, which grows with
    their depth; without it every byte has the same recompute price.
    """

    def __init__(self, cost_weighting: bool) -> None:
        self._cost_weighting = cost_weighting
        self._recompute_s = 0.0  # per byte, the usual; 0: nothing was offered yet
        self._loads: Mapping[LoadSource, TierPrice] = {}

    def loads(self, prices: Mapping[LoadSource, TierPrice]) -> None:
        """Set the current load price of each tier."""
        self._loads = prices

    def offered(self, recompute_s: float, nbytes: int) -> None:
        """Record that an offered record of `nbytes` takes `recompute_s` to compute; 0: unknown, ignored."""
        if recompute_s > 0 and nbytes > 0:
            now_s = recompute_s / nbytes
            self._recompute_s += (now_s - self._recompute_s) * (RATE if self._recompute_s else 1.0)

    def saved_s(self, copy: HeldCopy) -> float:
        """Return the seconds saved per byte; 1 for every copy as long as nothing is known."""
        if not self._recompute_s:
            return 1.0
        extent, recompute_s = copy.extent, self._recompute_s
        if self._cost_weighting and extent.recompute_s:
            recompute_s = extent.recompute_s / copy.nbytes
        for below in TIERS[TIERS.index(copy.tier) + 1 :]:
            price = self._loads.get(below)
            if below in extent.copies and price is not None and price.is_up and price.is_known:
                return min(recompute_s, price.seconds(copy.nbytes) / copy.nbytes)
        return recompute_s
