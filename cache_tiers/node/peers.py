"""A node's exchange with other nodes: peer lookups, pulls and exports.

Combines `PeerExports` and `PeerPulls` (`peer_transfers.py`) with what both share. Without `calls` there are
no other nodes, and every method answers so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from samovar.cache_tiers.blocks import KEY_BYTES, SHARED_TIER, TAG_BYTES, TIERS, Address, LoadSource
from samovar.cache_tiers.directory import TAILS_MAX
from samovar.cache_tiers.messages import (
    BlockRange,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    PartialBlock,
    PeerStats,
    PushRequest,
)
from samovar.cache_tiers.node.peer_transfers import PeerExports, PeerPulls
from samovar.cache_tiers.node.state import NodeState
from samovar.cache_tiers.node.transfer import TransferRunner
from samovar.cache_tiers.pricing import TierMeter
from samovar.cache_tiers.transport import (
    PEERS_ASKED_MAX,
    LazyLink,
    LinkDown,
    PeerCalls,
    PeerError,
    PeerLost,
    PeerTable,
)
from samovar.configs.sections import TierSettings

logger = logging.getLogger(__name__)


def covers(spans: Iterable[BlockRange], blocks: int) -> bool:
    """Return whether each of the chain's first `blocks` blocks is in one of `spans`."""
    end = 0
    for span in sorted(spans, key=lambda span: span.first):
        if span.first > end:
            return False
        end = max(end, span.first + span.blocks)
    return end >= blocks


def merged(own: LookupResult, theirs: LookupResult, *, node: str, tenant: bytes, blocks: int) -> LookupResult:
    """Merge what node `node` has of the same chain into `own`, as spans and tails of tier `peer`.

    Own spans win; the other's fill the gaps. `theirs` is only trusted to be worth asking for: what names
    another tenant, another tier, or blocks beyond the chain is left out. Pure.
    """
    spans = list(own.spans)
    for span in theirs.spans:
        if _is_sane(span, tenant) and span.first + span.blocks <= blocks:
            spans += list(_gaps(span, node, spans))
    spans.sort(key=lambda span: span.first)
    known = {(tail.key, tail.span.first) for tail in own.tails}
    tails = list(own.tails)
    for tail in theirs.tails:
        at = tail.span
        if _is_sane(at, tenant) and at.first <= blocks and (tail.key, at.first) not in known:
            tails.append(PartialBlock(tail.key, tail.tokens, replace(at, tier="peer", node=node)))
    # Deepest first; at equal depth, local tails come first.
    tails.sort(key=lambda tail: -tail.span.first)
    return replace(own, spans=tuple(spans), tails=tuple(tails[:TAILS_MAX]))


def _is_sane(span: BlockRange, tenant: bytes) -> bool:
    return span.tenant == tenant and span.tier in TIERS and min(span.first, span.offset) >= 0 < span.blocks


def _gaps(span: BlockRange, node: str, taken: Iterable[BlockRange]) -> Iterator[BlockRange]:
    """Yield the parts of `span` not covered by `taken`. Each part moves the whole extent."""
    start, end = span.first, span.first + span.blocks
    for other in sorted(taken, key=lambda other: other.first):
        if other.first + other.blocks <= start or other.first >= end:
            continue
        if other.first > start:
            yield _part(span, node, start, other.first)
        start = max(start, other.first + other.blocks)
    if start < end:
        yield _part(span, node, start, end)


def _part(span: BlockRange, node: str, first: int, end: int) -> BlockRange:
    offset = span.offset + first - span.first
    return replace(span, first=first, offset=offset, blocks=end - first, tier="peer", node=node)


MEET_S_MAX = 5.0


class NodePeers:
    """Looks up, pulls from and serves other nodes. `node_id`: this node's. `link`: see `LazyLink`.

    `look_again(lookup, silent)`: called with the nodes that do not answer (-> whether lost), which may have
    left something in a shared tier; returns what this node holds now, after a rescan if that is worth it.
    """

    def __init__(
        self,
        state: NodeState,
        runner: TransferRunner,
        settings: TierSettings,
        calls: PeerCalls | None,
        link: LazyLink,
        *,
        node_id: str,
        incarnation: str,
        look_again: Callable[[Lookup, Mapping[str, bool]], LookupResult] | None = None,
    ) -> None:
        self._state = state
        self._look_again = look_again
        self._node_id = node_id
        self._settings = settings.peer
        self._calls = calls if settings.peer.enabled else None
        self._link = link
        self._meter = TierMeter(clock=state.clock)
        self._peers = PeerTable(settings.peer, state.clock)
        self.lost = threading.Event()
        """Set when a node is gone, so that its data in S3 is worth a rescan; reset by the scanner."""
        self.exports = PeerExports(state, link, f"{node_id}:{incarnation}")
        self._pulls: PeerPulls | None = None
        if self._calls is not None:
            self._pulls = PeerPulls(state, runner, self._peers, self._calls, link, settings.peer, self.lost)

    @property
    def transport(self) -> str:
        """Return the transport as in `NodeStats`."""
        return "off" if self._calls is None else self._link.state

    def lookup(self, lookup: Lookup, own: LookupResult) -> LookupResult:
        """Add to `own` what the peers named in `lookup` have; asks them only if something is missing."""
        state, found = self._state, own
        blocks, began_s = len(lookup.keys) // KEY_BYTES, state.clock()
        ends_s = began_s + self._settings.lookup_s_max
        asked, silent, answers = 0, dict[str, bool](), list[tuple[str, LookupResult]]()
        if self._calls is None or self._is_cleared(lookup):
            return own
        for node in dict.fromkeys(lookup.peers):
            left_s = ends_s - state.clock()
            if asked == PEERS_ASKED_MAX or left_s <= 0 or covers(found.spans, blocks):
                break
            if node == self._node_id:
                continue
            if not self._allows(node):
                silent[node] = False
                continue
            asked += 1
            try:
                theirs = self._calls.lookup(node, replace(lookup, peers=()), left_s)
            except PeerError as error:
                with state.lock:
                    self._peers.failed(node, f"lookup:{type(error).__name__}")
                silent[node] = isinstance(error, PeerLost)
                if silent[node]:
                    self.lost.set()
                continue
            with state.lock:
                self._peers.succeeded(node)
            answers.append((node, theirs))
            found = merged(found, theirs, node=node, tenant=lookup.tenant, blocks=blocks)
        seconds: dict[LoadSource, float] = {"peer": state.clock() - began_s} if asked else {}
        if silent and self._look_again is not None and not covers(found.spans, blocks):
            again_s = state.clock()
            found = self._look_again(lookup, silent)
            seconds[SHARED_TIER] = state.clock() - again_s
            for node, theirs in answers:
                found = merged(found, theirs, node=node, tenant=lookup.tenant, blocks=blocks)
        is_there = any(span.tier == "peer" for span in found.spans) or any(
            tail.span.tier == "peer" for tail in found.tails
        )
        if is_there:
            with state.lock:
                found = replace(found, prices={**found.prices, "peer": self._meter.price(True)})
        if silent and not covers(found.spans, blocks):
            found = replace(found, has_silent_peer=True)
        return replace(found, seconds=seconds) if seconds else found

    def meet(self, nodes: Sequence[str]) -> set[str]:
        """Connect to new nodes in advance, so that the first session from there need not wait.

        Returns those that answer. Blocks; raises nothing for failures of a node or the link.
        """
        if self._calls is None or not nodes:
            return set()
        if self._link.state == "nixl":
            try:
                self._link.get()
            except LinkDown as error:
                logger.info("there are other nodes, but no link to them: %s", error)
        met = set()
        nothing = Lookup(bytes(KEY_BYTES), b"", bytes(TAG_BYTES), bytes(TAG_BYTES))
        for node in nodes:
            try:
                self._calls.lookup(node, nothing, MEET_S_MAX)
            except PeerError as error:
                logger.info("node %s does not answer yet: %s", node[:8], error)
                continue
            met.add(node)
        return met

    def fetch(self, address: Address, node: str, ends_s: float) -> Fetched | FetchFailed | None:
        """See `PeerPulls.fetch`."""
        if self._pulls is None:
            return FetchFailed("gone", "no way to other nodes")
        began_s = self._state.clock()
        result = self._pulls.fetch(address, node, ends_s)
        if isinstance(result, FetchFailed):
            with self._state.lock:
                self._meter.observe_failure(self._state.clock() - began_s)
        return result

    def take(self, take: PushRequest) -> str:
        """Pull an extent that another node pushes. See `PushRequest`: taken | held | failed:REASON."""
        came = self.fetch(take.address, take.node, self._state.clock() + take.deadline_s)
        if isinstance(came, FetchFailed):
            return f"failed:{came.reason}"
        if came is None:
            return "held"
        return "taken" if came.is_kept else "failed:no room"

    def took(self, nbytes: int, seconds: float) -> None:
        """Record the end-to-end seconds of a load from a peer."""
        with self._state.lock:
            self._meter.observe(nbytes, seconds)

    def stats(self) -> dict[str, PeerStats]:
        with self._state.lock:
            return self._peers.stats()

    def close(self) -> None:
        self._link.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the accounting is inconsistent."""
        with self._state.lock:
            self._peers.check_integrity()
            self._meter.check_integrity()
        self._link.check_integrity()
        if self._pulls is not None:
            self._pulls.check_integrity()

    def _allows(self, node: str) -> bool:
        with self._state.lock:
            return self._peers.allows(node)

    def _is_cleared(self, lookup: Lookup) -> bool:
        with self._state.lock:
            return self._state.directory.clears.forbids_pull(lookup.tenant, lookup.session)
