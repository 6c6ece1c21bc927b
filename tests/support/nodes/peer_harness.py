"""Nodes in one process that know each other: calls are calls, and NIXL is a copy that can be spoilt."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.messages import (
    BlockRange,
    ExtentRequest,
    Fetch,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    PushRequest,
    StoreRequest,
)
from samovar.cache_tiers.node.manager import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.cache_tiers.transport.arena import Arena
from samovar.cache_tiers.transport.link import ArenaLease, ArenaLink, Export, LinkError, PeerGone
from samovar.cache_tiers.transport.peers import LazyLink, PeerError
from samovar.configs.sections import TierSettings
from tests.support.clock import Clock
from tests.support.inside import state_of
from tests.support.nodes.node_harness import MIB, Sample, records_of


class FakeLink(ArenaLink):
    """As `link.Link`. `fault`: raised by the next pulls; `spoil`: gets the bytes that arrived."""

    def __init__(self, name: str, world: World, arena_bytes: int) -> None:
        self.name = name
        self._world = world
        self.arena = Arena(arena_bytes)
        self.memory = np.zeros(arena_bytes, dtype=np.uint8)
        self._lock = threading.Lock()
        self.fault: LinkError | None = None
        self.spoil: Callable[[Bytes], None] = lambda data: None
        self.pulls = 0
        self.is_closed = False
        world.links[name] = self

    def lease(self, nbytes: int, *, expires: bool) -> ArenaLease | None:
        with self._lock:
            piece = self.arena.take(nbytes, expires=expires)
        if piece is None:
            return None
        view = self.memory[piece.offset : piece.offset + nbytes]
        return ArenaLease(view, nbytes, piece.generation, piece.offset)

    def release(self, generation: int) -> None:
        with self._lock:
            self.arena.release(generation)

    def export(self, lease: ArenaLease) -> Export:
        return Export(self.name, b"", lease.address, lease.nbytes, lease.generation)

    def pull(self, export: Export, into: ArenaLease, deadline_s: float) -> None:
        self.pulls += 1
        self._world.during_pull()
        if self.fault is not None:
            raise self.fault
        peer = self._world.links.get(export.agent)
        if peer is None or peer.is_closed:
            raise PeerGone(export.agent)
        into.view[: export.nbytes] = peer.memory[export.address : export.address + export.nbytes]
        self.spoil(into.view[: export.nbytes])

    def close(self) -> None:
        self.is_closed = True

    def check_integrity(self) -> None:
        self.arena.check_integrity()


class World:
    """`PeerCalls` between the nodes that are in it. `faults`: (node, method) -> what the call raises."""

    def __init__(self) -> None:
        self.nodes: dict[str, TierNode] = {}
        self.links: dict[str, FakeLink] = {}
        self.faults: dict[tuple[str, str], PeerError] = {}
        self.calls: Counter[str] = Counter()
        self.during_pull: Callable[[], None] = lambda: None
        self.spoil_read: Callable[[Bytes], Bytes] = lambda data: data
        self.swapped: Callable[[ExtentRequest], ExtentRequest] = lambda ask: ask

    def lookup(self, node: str, lookup: Lookup, timeout_s: float) -> LookupResult:
        assert timeout_s > 0
        at = self._at(node, "lookup")
        return replace(at.lookup_here(lookup), history=at.resumption.history(lookup))

    def export(self, node: str, ask: ExtentRequest, timeout_s: float) -> Export | FetchFailed:
        assert 0 < ask.deadline_s <= timeout_s
        return self._at(node, "export").peers.exports.export(self.swapped(ask))

    def release(self, node: str, export: Export) -> None:
        self.calls["release"] += 1
        if node in self.nodes:
            self.nodes[node].peers.exports.release(export)

    def read(self, node: str, ask: ExtentRequest, timeout_s: float) -> Bytes | FetchFailed:
        reply = self._at(node, "read").peers.exports.read(self.swapped(ask))
        if isinstance(reply, FetchFailed):
            return reply
        assert reply.data is not None
        return self.spoil_read(reply.data)

    def check(self, node: str, ask: ExtentRequest) -> None:
        self.calls["check"] += 1
        self.nodes[node].peers.exports.check(ask)

    def learned(self, node: str, timeout_s: float) -> bytes:
        return self._at(node, "learned").resumption.learned()

    def take(self, node: str, take: PushRequest, timeout_s: float) -> str:
        return self._at(node, "take").peers.take(take)

    def _at(self, node: str, method: str) -> TierNode:
        self.calls[method] += 1
        if (node, method) in self.faults:
            raise self.faults[node, method]
        return self.nodes[node]


@dataclass
class Home:
    """One node of a world, without workers."""

    name: str
    world: World
    node: TierNode
    outbox: StagingBuffer
    clock: Clock
    tiers: dict[str, Tier]

    @property
    def link(self) -> FakeLink:
        return self.world.links[f"{self.name}:{self.node.incarnation}"]

    def store(self, wanted: Sample) -> None:
        found = self.look(wanted)
        ticket = self.outbox.put(wanted.record)
        assert ticket is not None
        offer = StoreRequest(ticket, wanted.header, wanted.record.nbytes, found.incarnation, found.clear_seq)
        assert self.node.offer([offer], self.outbox).outcomes == ("taken",)
        self.work()

    def work(self) -> None:
        while self.node.work():
            self.node.check_integrity()
        self.node.check_integrity()

    def look(self, wanted: Sample, *peers: str, session: bytes | None = None) -> LookupResult:
        header = wanted.header
        found = self.node.lookup(
            Lookup(header.namespace, wanted.chain, header.tenant, session or header.session, peers)
        )
        self.node.check_integrity()
        return found

    def fetch(self, wanted: Sample, span: BlockRange, deadline_s: float = 5.0) -> Fetched | FetchFailed:
        header = wanted.header
        reply = self.node.fetch(
            Fetch(
                *(header.namespace, header.tenant, span.extent_id, span.offset, span.blocks, span.tier),
                deadline_s=deadline_s,
                node=span.node,
            )
        )
        self.node.check_integrity()
        return reply

    def bring(self, wanted: Sample, *peers: str) -> Fetched | FetchFailed:
        """Look it up with these peers, and fetch it from the one that has it."""
        (span,) = self.look(wanted, *peers).spans
        assert span.tier == "peer"
        return self.fetch(wanted, span)

    def holds(self, wanted: Sample) -> tuple[str, ...]:
        return state_of(self.node).catalog.copies(wanted.header.address)


def home(
    world: World,
    name: str,
    *,
    tiers: list[Tier] | None = None,
    settings: TierSettings | None = None,
    clock: Clock | None = None,
    arena_bytes: int = MIB,
    bytes_max: int = 4 * MIB,
    link: LazyLink | None = None,
    incarnation: str = "first",
) -> Home:
    clock = clock or Clock()
    outbox = StagingBuffer(64 * MIB, keep_s=1e9)
    by_name = {tier.name: tier for tier in tiers or [HeapTier(bytes_max)]}
    node = TierNode(
        settings or TierSettings(),
        NodeMedia(dict(by_name), dict.fromkeys(by_name, bytes_max)),
        NodeIdentity(name, incarnation),
        NodePorts(
            clock=clock,
            wall_clock=lambda: 2000.0,
            call_for=records_of(outbox),
            peer_calls=world,
            link=link or LazyLink(lambda: FakeLink(f"{name}:{incarnation}", world, arena_bytes)),
        ),
        workers=0,
    )
    node.start()
    world.nodes[name] = node
    return Home(name, world, node, outbox, clock, dict(by_name))


def same(fetched: Fetched | FetchFailed, wanted: Sample) -> bool:
    return (
        isinstance(fetched, Fetched)
        and fetched.data is not None
        and np.array_equal(fetched.data, wanted.record)
    )
