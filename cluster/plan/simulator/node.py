"""Simulates a node: the tiers that its replicas share, the links to them, and prefetching.

A turn's blocks are stored when it ends, if loading them is quicker than computing them (`worth_storing`);
a tier demotes evicted blocks to the next one on the same condition. Loads leave a copy in the uppermost tier.
`policy/prefetcher.py` decides on prefetches, links move them in the time demand leaves: from the lower tiers
to the node's uppermost one; nothing is prefetched into a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from samovar.cache_tiers.blocks import PEER, S3, TIERS, TOP_TIER, LoadSource
from samovar.cache_tiers.forecast import Hint, SessionKey, hinted
from samovar.cache_tiers.policy import SINK_SHARE, IdleSessions, Known, Prefetcher, ResidencyPolicy
from samovar.cache_tiers.pricing import Doubt, LoadPiece, TierMeter, worth_storing
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.tier import Block, Placed, SimLink, SimTier
from samovar.configs.sections import PolicySettings, TierSettings

PIECE_BLOCKS = 8
"""Up to this many consecutive blocks of one tier are loaded as one piece, like a turn's extent."""


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
        placed: Placed,
    ) -> None:
        self.number = number
        self.sessions = IdleSessions(fleet.sessions_max)
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
                    placed=placed,
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


class Node(Protocol):
    """The part of `SimNode` that prefetching uses."""

    block_bytes: int
    sessions: IdleSessions
    tiers: dict[LoadSource, SimTier]
    links: dict[LoadSource, SimLink]
    top: LoadSource | None

    def changed(self, session: int) -> None: ...
    def source(self, block: int) -> LoadSource | None: ...


class SimPrefetch:
    """Moves prefetched blocks up and reports their use. `early_bytes`: prefetched so far."""

    def __init__(self, node: Node, prefetcher: Prefetcher, lead_s: float) -> None:
        self.prefetcher = prefetcher
        self.early_bytes = 0
        self._node = node
        self._lead_s = lead_s
        self._upper = node.tiers[node.top or TOP_TIER]
        self._chains: dict[int, tuple[int, ...]] = {}
        self._moving: dict[tuple[int, LoadSource], list[int]] = {}
        self._moving_of: dict[int, set[LoadSource]] = {}
        self._unused: dict[int, int] = {}  # prefetched block not used yet -> session
        self._unused_of: dict[int, set[int]] = {}

    def returned(self, session: int, blocks: tuple[int, ...], now_s: float) -> None:
        """End and judge the session's prefetches because its next request is here. Counts once per turn."""
        if self._chains.get(session) is blocks:
            return  # already reported when it began to wait
        here = sum(number in self._upper for number in blocks)
        asked = sum(self._node.source(number) is not None for number in blocks)
        unused = self._unused_of.pop(session, set())
        for number in unused:
            del self._unused[number]
        used = sum(number in unused for number in blocks)
        size = self._node.block_bytes
        self.prefetcher.returned(
            session, now_s, up_bytes=here * size, asked_bytes=asked * size, used_bytes=used * size
        )
        for source in self._moving_of.pop(session, set()):
            nbytes = len(self._moving.pop((session, source))) * size
            self.prefetcher.failed(session, nbytes, now_s)  # no effect if it was a guess
            self.prefetcher.unmoved(min(nbytes, self._node.links[source].cancel((session, source), now_s)))
        self._chains[session] = blocks

    def ask(self, why: Known, session: int, now_s: float) -> None:
        """Prefetch for a waiting request or a client's hint.

        A hint also updates the session's curve, so that its resident blocks stay.
        """
        node = self._node
        if why == "hint" and session in node.sessions:
            slot = node.sessions.slot(session)
            idle_s = now_s - float(node.sessions.ended_s[slot])
            curve = hinted(node.sessions.curves[slot].copy(), idle_s, Hint(session, now_s, "typing"))
            node.sessions.set_curve(session, curve, now_s)
            node.changed(session)
        nbytes = self.prefetcher.ask(why, session, self.below_bytes(session))
        if nbytes:
            self._move(session, nbytes, now_s)

    def paused(self, session: int, now_s: float) -> None:
        """Prefetch at the end of a turn, if the prefetcher decides so."""
        guess = self.prefetcher.at_pause(
            session,
            self.below_bytes(session),
            now_s,
            room_bytes=self._room_bytes(),
            stays_s=PolicySettings.horizon_s_max,
            is_demand_busy=self._is_demand_busy(now_s),
        )
        if guess is not None:
            self._move(session, guess.nbytes, now_s)

    def tick(self, now_s: float) -> None:
        """Prefetch for sessions that are likely to return soon; called every `tick_s`."""
        guesses = self.prefetcher.by_hazard(
            self._node.sessions,
            self.below_bytes,
            now_s,
            lead_s=self._lead_s,
            room_bytes=self._room_bytes(),
            is_demand_busy=self._is_demand_busy(now_s),
        )
        for guess in guesses:
            self._move(guess.session, guess.nbytes, now_s)

    def arrivals(self, now_s: float) -> None:
        """Admit the prefetched blocks whose transfer has completed by now."""
        for link in self._node.links.values():
            for session, source in link.arrived(now_s):
                self._arrived(session, source, now_s)

    def next_s(self, now_s: float) -> float:
        """Return when the next transfer completes if no demand load starts."""
        return min(link.next_s(now_s) for link in self._node.links.values())

    def left(self, blocks: list[int], now_s: float) -> None:
        """Report these blocks as evicted from the upper tier."""
        for number in blocks:
            session = self._unused.pop(number, None)
            if session is not None:
                self._unused_of[session].discard(number)
                self.prefetcher.left(session, self._node.block_bytes, now_s)

    def below_bytes(self, session: SessionKey) -> int:
        """Return the bytes of its chain that are in a lower tier and not in the upper one."""
        return len(self._below(session)) * self._node.block_bytes

    def _below(self, session: SessionKey) -> list[tuple[int, LoadSource]]:
        found: list[tuple[int, LoadSource]] = []
        for number in self._chains.get(session, ()) if isinstance(session, int) else ():
            source = self._node.source(number)
            if source is None:
                break
            if source != self._node.top:
                found.append((number, source))
        return found

    def _move(self, session: SessionKey, nbytes: int, now_s: float) -> None:
        assert isinstance(session, int)
        size = self._node.block_bytes
        chosen = self._below(session)[: nbytes // size]
        # Whole blocks move; bytes granted beyond them are returned.
        if rest := nbytes - len(chosen) * size:
            self.prefetcher.failed(session, rest, now_s)
        for number, source in chosen:
            self._moving.setdefault((session, source), []).append(number)
            self._moving_of.setdefault(session, set()).add(source)
            self._node.links[source].guess((session, source), size, now_s)

    def _arrived(self, session: int, source: LoadSource, now_s: float) -> None:
        blocks = self._moving.pop((session, source))
        sources = self._moving_of[session]
        sources.discard(source)
        if not sources:
            del self._moving_of[session]
        nbytes = len(blocks) * self._node.block_bytes
        self.early_bytes += nbytes
        self.prefetcher.arrived(session, nbytes, now_s)
        for number in blocks:
            if number not in self._upper and number not in self._unused:
                self._unused[number] = session
                self._unused_of.setdefault(session, set()).add(number)
        self._upper.put(self._chains[session], session, now_s, only=set(blocks))
        lost = [number for number in blocks if number not in self._upper]
        self.left(lost, now_s)

    def _room_bytes(self) -> int:
        """Return what is free, or what a node's sinking keeps free: here the coldest go as others come."""
        most = self._upper.blocks_max
        return (most - min(len(self._upper), math.ceil(SINK_SHARE * most))) * self._node.block_bytes

    def _is_demand_busy(self, now_s: float) -> bool:
        return any(link.demand_until_s > now_s for link in self._node.links.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError`, naming the violated invariant."""
        self.prefetcher.check_integrity()
        assert all(number in self._upper for number in self._unused), "what is up early is not there"
        assert sum(map(len, self._unused_of.values())) == len(self._unused), (
            "the accounts of early blocks differ"
        )
        assert {session for session, _ in self._moving} == self._moving_of.keys(), "a move has no owner"
