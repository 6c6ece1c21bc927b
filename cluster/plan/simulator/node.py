"""Simulates a node: the tiers that its replicas share, the links to them, and prefetching.

A turn's blocks are stored when it ends, if loading them is quicker than computing them (`worth_storing`);
a tier demotes evicted blocks to the next one on the same condition. Loads leave a copy in the uppermost tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from samovar.cache_tiers.blocks import CPU, NVME, PEER, S3, TIERS, LoadSource
from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.policy import IdleSessions, Prefetcher, ResidencyPolicy
from samovar.cache_tiers.pricing import Doubt, LoadPiece, TierMeter, worth_storing
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.prefetch import SimPrefetch
from samovar.cluster.plan.simulator.tier import Block, SimLink, SimTier
from samovar.configs.sections import TierSettings

PIECE_BLOCKS = 8
"""Up to this many consecutive blocks of one tier are loaded as one piece, like a turn's extent."""
SESSIONS_MAX = 1_000_000
RERANK_FACTORS: Mapping[LoadSource, float] = {CPU.name: 10.0, NVME.name: 60.0, S3.name: 60.0}
"""`rerank_factor` of each `SimTier`."""


class SimNode:
    """A node. `s3`: shared by all nodes. `moved_bytes`: between tiers, by `from->to`."""

    def __init__(
        self,
        number: int,
        fleet: Fleet,
        policy: ResidencyPolicy,
        block_tokens: int,
        s3: SimTier | None,
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.sessions = IdleSessions(sessions_max=SESSIONS_MAX)
        self.moved_bytes: Counter[str] = Counter()
        self._fleet = fleet
        self._block_tokens = block_tokens
        self.block_bytes = block_tokens * fleet.bytes_per_token
        self.tiers: dict[LoadSource, SimTier] = {}
        for name, size in fleet.tier_bytes.items():
            if name not in TIERS.shared and size // self.block_bytes:
                self.tiers[name] = SimTier(
                    size // self.block_bytes,
                    block_tokens,
                    policy,
                    fleet.policy,
                    self.sessions,
                    saved_s=saver(fleet, block_tokens),
                    on_evicted=self._demoter(name),
                    rerank_factor=RERANK_FACTORS[name],
                )
        if s3 is not None:
            self.tiers[S3.name] = s3
        sources: list[LoadSource] = [*self.tiers, PEER]
        self.links = {
            tier: SimLink(fleet.price_of(tier), TierMeter(fleet.first_price_of(tier), clock=clock))
            for tier in sources
        }
        self._doubt = new_doubt(self.block_bytes)
        self.top: LoadSource | None = next(iter(self.tiers), None)
        self.early = None
        if fleet.prefetch is not None and len(self.tiers) > 1:
            self.early = SimPrefetch(self, Prefetcher(fleet.prefetch, seed=number), fleet.lead_s)

    def changed(self, session: SessionKey) -> None:
        """Rerank the session's blocks in the node's own tiers after its `sessions` entry has changed."""
        for name, tier in self.tiers.items():
            if name not in TIERS.shared:
                tier.changed(session)

    def source(self, block: int) -> LoadSource | None:
        """Return the uppermost tier that holds the block; None if none does."""
        for name, tier in self.tiers.items():
            if block in tier:
                return name
        return None

    def pieces(self, blocks: Sequence[int], first: int, peer: SimNode | None) -> list[LoadPiece]:
        """Return the loadable pieces that follow a prompt's first `first` blocks without a gap."""
        found: list[LoadPiece] = []
        for at in range(first, len(blocks)):
            source = self.source(blocks[at])
            if source is None and peer is not None and peer.source(blocks[at]) is not None:
                source = "peer"
            if source is None:
                break
            size = self._block_tokens
            last = found[-1] if found else None
            if last is not None and last.tier == source and last.tokens < PIECE_BLOCKS * size:
                found[-1] = LoadPiece(
                    last.first_token, last.tokens + size, last.nbytes + self.block_bytes, source
                )
            else:
                found.append(LoadPiece(at * size, size, self.block_bytes, source))
        return found

    def began(self, session: int, blocks: tuple[int, ...], now_s: float) -> None:
        """Start a session's turn, before its load is planned: end its prefetches and touch its blocks."""
        if self.early is not None:
            self.early.returned(session, blocks, now_s)
        for tier in self.tiers.values():
            tier.touch(blocks, session, now_s)

    def waits(self, session: int, blocks: tuple[int, ...], now_s: float) -> None:
        """Prefetch for a request that waits for a slot."""
        if self.early is not None:
            self.early.returned(session, blocks, now_s)
            self.early.ask("queue", session, now_s)

    def loaded(self, session: int, blocks: tuple[int, ...], now_s: float) -> None:
        """Keep a copy of loaded blocks in the uppermost tier."""
        if self.top is not None:
            self.tiers[self.top].put(blocks, session, now_s)

    def ended(self, session: int, blocks: tuple[int, ...], now_s: float) -> None:
        """End a session's turn: store its blocks if worth it, then consider prefetching."""
        if self.top is not None:
            came = self.tiers[self.top].put(self._that_pay(self.top, blocks), session, now_s)
            self.moved_bytes[f"gpu->{self.top}"] += came * self.block_bytes
        self.changed(session)
        if self.early is not None:
            self.early.paused(session, now_s)

    def _that_pay(self, tier: LoadSource, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading blocks of a chain that are stored: all, or a few that prove the price."""
        new = [at for at, block in enumerate(blocks) if block not in self.tiers[tier]]
        self._doubt.decided(len(new) * self.block_bytes)
        if self._is_worth_storing(tier, len(blocks)):
            return blocks
        price = self.links[tier].meter.price()
        tried = self._doubt.leading((self.block_bytes, price) for _ in new)
        return blocks[: new[tried]] if tried < len(new) else blocks

    def _is_worth_storing(self, tier: LoadSource, blocks: int) -> bool:
        """Return whether loading a chain of so many blocks seems cheaper than computing it."""
        price = self.links[tier].meter.price()
        return worth_storing(
            blocks * self._block_tokens, blocks * self.block_bytes, self._fleet.prefill, price
        )

    def _demoter(self, name: LoadSource) -> Callable[[list[Block], float], None]:
        """Return the function that demotes what tier `name` evicts to the tier below."""

        def demote(blocks: list[Block], now_s: float) -> None:
            if self.early is not None and name == self.top:
                self.early.left([block.number for block in blocks], now_s)
            below = list(self.tiers)[list(self.tiers).index(name) + 1 :]
            if not below:
                return
            kept = [
                block
                for block in blocks
                if self._is_worth_storing(below[0], block.end_tokens // self._block_tokens)
            ]
            came = self._demoted(below[0], kept, now_s)
            self.moved_bytes[f"{name}->{below[0]}"] += came * self.block_bytes

        return demote

    def _demoted(self, tier: LoadSource, blocks: list[Block], now_s: float) -> int:
        """Demote blocks; those that are unlikely to be asked for only into free room. Return how many."""
        least = self._fleet.policy.copied_probability_min
        into = self.tiers[tier]
        is_unlikely = [self.sessions.are_unlikely(block.owners, now_s, least) for block in blocks]
        likely = [block for block, unlikely in zip(blocks, is_unlikely, strict=True) if not unlikely]
        others = [block for block, unlikely in zip(blocks, is_unlikely, strict=True) if unlikely]
        came = into.take_in(likely, now_s)
        return came + into.take_in(others[: into.blocks_max - len(into)], now_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError`, naming the violated invariant."""
        self.sessions.check_integrity()
        for tier in self.tiers.values():
            tier.check_integrity()
        for link in self.links.values():
            link.check_integrity()
        if self.early is not None:
            self.early.check_integrity()


def new_doubt(block_bytes: int) -> Doubt:
    """Return the doubt of a node's stores or of a replica's loads, as the service has it by default."""
    return Doubt(max(TierSettings().extent_bytes_max, PIECE_BLOCKS * block_bytes))


def saver(fleet: Fleet, block_tokens: int) -> Callable[[int], float]:
    """Return what a block saves relative to a chain's first: more if deeper; 1 without `cost_weighting`."""
    if not fleet.policy.cost_weighting:
        return lambda end_tokens: 1.0
    price = fleet.prefill
    first_s = price.added_seconds(block_tokens, 0)
    return lambda end_tokens: price.added_seconds(block_tokens, end_tokens - block_tokens) / first_s
