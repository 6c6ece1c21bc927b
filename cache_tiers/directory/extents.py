"""An extent as the directory stores it: its place in a chain and its copies, without its checksums.

A header with its checksums takes kilobytes; for 100,000 extents only what `find` and the accounting need
is kept. Mutable, changed only by the directory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    TIERS,
    Address,
    BlockShape,
    ExtentHeader,
    LoadSource,
    Placement,
    TierName,
    header_bytes,
)
from samovar.cache_tiers.directory.types import ExtentInfo
from samovar.cache_tiers.messages import BlockRange
from samovar.cache_tiers.policy import used_rate
from samovar.cache_tiers.pricing import TierPrice

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
    """An extent's directory entry. `keys`: of the full blocks, joined; `tail`: a partial last block's."""

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
