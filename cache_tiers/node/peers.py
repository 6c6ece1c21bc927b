"""A node's exchange with other nodes: peer lookups, pulls and exports.

`NodePeers` combines `PeerExports`, whole extents for a peer, and `PeerPulls`, verified into a tier here, with
what both share. Without `calls` there are no other nodes, and every method answers so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from samovar.cache_tiers.blocks import (
    HEADER_ALIGN,
    KEY_BYTES,
    PEER,
    SHARED_TIER,
    TAG_BYTES,
    TIERS,
    TOP_TIER,
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    LoadSource,
    Record,
    TierError,
    TierMiss,
    TierName,
    decode_header,
    read_header_bytes,
    record_bytes,
)
from samovar.cache_tiers.catalog import TAILS_MAX, Source, Transfer
from samovar.cache_tiers.media import Breaker, Deadline, TierDown, TierLate
from samovar.cache_tiers.messages import (
    BlockRange,
    ExtentRequest,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    PartialBlock,
    PeerStats,
    PushRequest,
)
from samovar.cache_tiers.node.state import NodeState
from samovar.cache_tiers.node.transfer import TransferRunner, verified
from samovar.cache_tiers.pricing import TierMeter
from samovar.cache_tiers.transport import (
    PEERS_ASKED_MAX,
    Export,
    LazyLink,
    LinkDown,
    LinkError,
    PeerCalls,
    PeerError,
    PeerLate,
    PeerLost,
    PeerTable,
    Way,
)
from samovar.configs.sections import PeerSettings, TierSettings

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
        self.moved: Callable[[Lookup, bytes], None] = lambda lookup, history: None
        """Hears what a peer knows of a session's turns."""
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
            waited_for = asked - sum(silent.values())  # the lost took no time, and others have what they left
            if waited_for == PEERS_ASKED_MAX or left_s <= 0 or covers(found.spans, blocks):
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
            if theirs.history:
                self.moved(lookup, theirs.history)
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

        Returns those that answer. Blocks, `MEET_S_MAX` for all of them; raises nothing for failures of a
        node or the link.
        """
        if self._calls is None or not nodes:
            return set()
        if self._link.is_usable:
            try:
                self._link.get()
            except LinkDown as error:
                logger.info("there are other nodes, but no link to them: %s", error)
        met, ends_s = set(), self._state.clock() + MEET_S_MAX
        nothing = Lookup(bytes(KEY_BYTES), b"", bytes(TAG_BYTES), bytes(TAG_BYTES))
        for node in nodes:
            if (left_s := ends_s - self._state.clock()) <= 0:
                break
            try:
                self._calls.lookup(node, nothing, left_s)
            except PeerError as error:
                logger.info("node %s does not answer yet: %s", node[:8], error)
                continue
            met.add(node)
        return met

    def learned(self, nodes: Sequence[str]) -> bytes:
        """Return what the first of `nodes` to tell has learned of who comes back; empty: none has.

        Blocks; raises nothing.
        """
        calls = self._calls
        if calls is None:
            return b""
        late = 0
        for node in nodes:
            try:
                model = calls.learned(node, MEET_S_MAX)
            except PeerError as error:
                logger.info("node %s does not tell what it has learned: %s", node[:8], error)
                late += not isinstance(error, PeerLost)
                model = b""
            if model or late == PEERS_ASKED_MAX:
                return model
        return b""

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
            return self._state.catalog.clears.forbids_pull(lookup.tenant, lookup.session)


IN_S3 = "in s3"
NO_ROOM = "no room"


class PeerExports:
    """Serves whole extents of this node's tiers to other nodes.

    Never asks a third node, so two nodes that request from each other do not deadlock. The copy stays here,
    but from then on the taker's own copy is used, so this one is evicted as the coldest. Nothing is verified
    here; the requester does that, and reports a bad record (`check`). `agent`: the name of this node's link,
    so that no other node's lease is released.
    """

    def __init__(self, state: NodeState, link: LazyLink, agent: str) -> None:
        self._state = state
        self._link = link
        self._agent = agent

    def export(self, ask: ExtentRequest) -> Export | FetchFailed:
        """Put the record where the requester can pull it.

        Fails as `_whole` does, and with: down (no link here), no room (in the arena), in s3 (look there).
        """
        ends_s = self._state.clock() + ask.deadline_s
        if self._is_only_in_s3(ask):
            return FetchFailed(IN_S3)
        try:
            link = self._link.get()
            data = self._whole(ask.address, ends_s)
            if isinstance(data, FetchFailed):
                return data
            return link.share(data) or FetchFailed(NO_ROOM, f"for {data.nbytes} bytes in the arena")
        except LinkDown as error:
            self._link.down(error)
            return FetchFailed("down", str(error))

    def release(self, export: Export) -> None:
        """Release an export that the requester has pulled, or will not pull."""
        if export.agent != self._agent:
            return
        try:
            self._link.get().release(export.generation)
        except LinkDown as error:
            logger.info("nothing to release: %s", error)

    def read(self, ask: ExtentRequest) -> Fetched | FetchFailed:
        """Return the whole record, for Ray to transfer."""
        if self._is_only_in_s3(ask):
            return FetchFailed(IN_S3)
        address, state = ask.address, self._state
        guard = state.guards.get(TOP_TIER)
        if guard is not None and guard.is_up:
            try:
                ref = guard.tier.ref(address)
            except TierMiss:
                ref = None
            if ref is not None:
                return Fetched(0, ref=[ref])
        data = self._whole(address, state.clock() + ask.deadline_s)
        return data if isinstance(data, FetchFailed) else Fetched(0, data)

    def check(self, ask: ExtentRequest) -> None:
        """Verify our copies after a requester received something other than this extent."""
        state, address = self._state, ask.address
        with state.lock:
            tiers = state.catalog.copies(address)
        for tier in tiers:
            try:
                data = self._read(address, tier, state.clock() + ask.deadline_s)
                verified(data, address, data.nbytes)
            except BadRecord as error:
                state.bad(address, tier, error.kind)
            except TierMiss:
                state.lost(address, tier)
            except TierError as error:
                logger.info("a copy that is under suspicion could not be read: %s", error)

    def _is_only_in_s3(self, ask: ExtentRequest) -> bool:
        with self._state.lock:
            return ask.reads_s3 and self._state.catalog.copies(ask.address) == (SHARED_TIER,)

    def _whole(self, address: Address, ends_s: float) -> Bytes | FetchFailed:
        """Return the record from the cheapest tier with it, or a failure: gone | error | timeout | down."""
        state = self._state
        with state.lock:
            tiers = state.catalog.copies(address)
            state.catalog.touch(address)
        failure = FetchFailed("gone")
        for tier in tiers:
            try:
                return self._read(address, tier, ends_s)
            except TierMiss:
                state.lost(address, tier, ends_s - state.clock())
            except BadRecord as error:
                state.bad(address, tier, error.kind, ends_s - state.clock())
                failure = FetchFailed("error", str(error))
            except TierDown as error:
                failure = FetchFailed("down", str(error))
            except TierLate as error:
                failure = FetchFailed("timeout", str(error))
            except TierError as error:
                failure = FetchFailed("error", str(error))
        return failure

    def _read(self, address: Address, tier: TierName, ends_s: float) -> Bytes:
        """Read the whole record from one tier. Raises `TierError`, `BadRecord`."""
        state = self._state
        guard = state.guards[tier]
        with state.lock:
            pin = state.catalog.pin(address, tier)
        if pin is None:
            raise TierMiss("gone meanwhile")
        try:
            left_s = ends_s - state.clock()
            if left_s <= 0:
                raise TierLate(f"no time left for {tier}")
            return guard.read(address, 0, pin.nbytes, left_s)
        finally:
            with state.lock:
                state.catalog.unpin(pin)


class _NotThisWay(Exception):
    """Raised when one transfer way failed and another may work.

    `reason`: of `FetchFailed`; `skip`: ways that are useless as well.
    """

    def __init__(self, reason: str, message: str, skip: tuple[Way, ...] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.skip = skip


class PeerPulls:
    """Pulls whole, verified extents from other nodes into a tier of this one.

    Tries, within one deadline, the link to the peer's memory (NIXL or TLS), Ray's object transfer, then S3 if
    both nodes reach it. Only the very record that was requested is handed out or kept, and nothing that was
    cleared here. Concurrent requests for the same extent share one pull. Nodes are called through
    `PeerCalls`. `lost`: set when a node turns out to be gone.
    """

    def __init__(
        self,
        state: NodeState,
        runner: TransferRunner,
        peers: PeerTable,
        calls: PeerCalls,
        link: LazyLink,
        settings: PeerSettings,
        lost: threading.Event,
    ) -> None:
        self._state = state
        self._runner = runner
        self._peers = peers
        self._calls = calls
        self._link = link
        self._settings = settings
        self._lost = lost
        self._pulls: dict[Address, Future[Fetched | FetchFailed]] = {}

    def fetch(self, address: Address, node: str, ends_s: float) -> Fetched | FetchFailed | None:
        """Return the whole record of `address` from `node`; None: a tier of this node has it by now.

        `ends_s`: on `NodeState.clock`. Raises nothing for failures of a peer, the link or a tier.
        """
        state = self._state
        with state.lock:
            pull = self._pulls.get(address)
            is_first = pull is None
            if pull is None:
                if state.catalog.copies(address):
                    return None
                pull = self._pulls[address] = Future()
        if not is_first:
            try:
                return pull.result(max(0.0, ends_s - state.clock()))
            except TimeoutError:
                return FetchFailed("timeout", "another pull of this extent is still running")
        result: Fetched | FetchFailed = FetchFailed("error", "the pull failed")
        trials: list[Breaker] = []  # that this pull was granted: not those that others make
        try:
            result = self._pull(address, node, ends_s, trials)
        finally:
            with state.lock:
                del self._pulls[address]
                for one in trials:  # a way that was not gone to its end has shown nothing
                    one.untried()
            pull.set_result(result)
        return result

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self._state.lock:
            for pull in self._pulls.values():
                assert not pull.done(), "a pull that is over is remembered"

    def _pull(
        self, address: Address, node: str, ends_s: float, trials: list[Breaker]
    ) -> Fetched | FetchFailed:
        state = self._state
        with state.lock:
            clear_seq = state.catalog.clears.seq
        failure, skipped = FetchFailed("gone", f"no way to {node}"), set[Way]()
        for way in self._ways(node, trials):
            if way in skipped:
                continue
            began_s = state.clock()
            if began_s >= ends_s:
                failure = FetchFailed("timeout", failure.message)
                break
            try:
                record, header = self._come(way, address, node, ends_s)
            except _NotThisWay as error:
                failure = FetchFailed(error.reason, f"{way}: {error}")
                skipped.update(error.skip)
                logger.info("fetching an extent from %s by %s failed: %s", node[:8], way, error)
                continue
            with state.lock:
                self._peers.pulled(node, way, record.nbytes, state.clock() - began_s)
            return self._keep(record, header, SHARED_TIER if way == SHARED_TIER else PEER, clear_seq, ends_s)
        return failure

    def _ways(self, node: str, trials: list[Breaker]) -> Iterator[Way]:
        """Yield the transfer ways in the order in which they are tried."""
        state = self._state
        with state.lock:
            is_up = self._peers.allows(node, trials)
            by_link = is_up and self._link.is_usable and self._peers.allows_link(node, trials)
        if by_link:
            yield self._link.way
        if is_up:
            yield "ray"
        guard = state.guards.get(SHARED_TIER)
        if guard is not None and guard.is_up:
            yield SHARED_TIER

    def _come(self, way: Way, address: Address, node: str, ends_s: float) -> tuple[Bytes, ExtentHeader]:
        """Transfer and verify the record by one way. Raises `_NotThisWay`."""
        if way == SHARED_TIER:
            return self._by_s3(address, ends_s)
        left_s = min(ends_s - self._state.clock(), self._settings.pull_s_max)
        ask = ExtentRequest(address, left_s, reads_s3=SHARED_TIER in self._state.guards)
        try:
            data = self._by_ray(node, ask) if way == "ray" else self._by_link(node, ask)
            header = verified(data, address, data.nbytes)
        except PeerError as error:
            self._answer(partial(self._peers.failed, node, f"{way}:{type(error).__name__}"))
            if isinstance(error, PeerLost):
                self._lost.set()
            reason = "timeout" if isinstance(error, PeerLate) else "error"
            raise _NotThisWay(reason, str(error), ("ray",)) from None
        except BadRecord as error:
            self._answer(partial(self._peers.bad, node, error.kind))
            logger.warning("node %s sent a bad record by %s: %s", node[:8], way, error)
            self._calls.check(node, ask)
            raise _NotThisWay("error", str(error)) from None
        self._answer(partial(self._peers.succeeded, node))
        return data, header

    def _by_link(self, node: str, ask: ExtentRequest) -> Bytes:
        """Pull the record over the link. Raises `PeerError`, `BadRecord`, `_NotThisWay`."""
        ends_s, way = self._state.clock() + ask.deadline_s, self._link.way
        reply: Export | FetchFailed | None = None
        try:
            link = self._link.get()
            reply = self._calls.export(node, ask, ask.deadline_s)
            if isinstance(reply, FetchFailed):
                raise self._refused(node, way, reply)
            if reply.nbytes <= 0:
                raise BadRecord("truncated", f"an export of {reply.nbytes} bytes")
            data = link.bring(reply, ends_s - self._state.clock())
            if data is None:
                self._answer(partial(self._peers.could_not, node, f"{way}:arena full"))
                raise _NotThisWay("error", f"no room in the arena for {reply.nbytes} bytes")
        except LinkError as error:
            if isinstance(error, LinkDown):
                self._link.down(error)
            self._answer(partial(self._peers.link_failed, node, f"{way}:{type(error).__name__}"))
            raise _NotThisWay("error", f"{type(error).__name__}: {error}") from None
        finally:
            if isinstance(reply, Export):
                self._calls.release(node, reply)
        self._answer(partial(self._peers.link_succeeded, node))
        return data

    def _by_ray(self, node: str, ask: ExtentRequest) -> Bytes:
        """Transfer the record through Ray. Raises `PeerError`, `_NotThisWay`."""
        reply = self._calls.read(node, ask, ask.deadline_s)
        if isinstance(reply, FetchFailed):
            raise self._refused(node, "ray", reply)
        return reply

    def _refused(self, node: str, way: Way, reply: FetchFailed) -> _NotThisWay:
        """Record a peer's refusal: it does not have the extent, or cannot give it that way."""
        with self._state.lock:
            self._peers.could_not(node, f"{way}:{reply.reason}")
            self._peers.succeeded(node)
            if way != "ray" and reply.reason == "down":
                self._peers.link_failed(node, f"{way}:down there")
        skip: tuple[Way, ...] = ("ray",) if reply.reason in ("gone", IN_S3) else ()
        return _NotThisWay("gone" if reply.reason == IN_S3 else reply.reason, reply.message, skip)

    def _by_s3(self, address: Address, ends_s: float) -> tuple[Bytes, ExtentHeader]:
        """Read the record from S3 by address, though this node does not know it. Raises `_NotThisWay`.

        What is marked there as cleared counts as gone: no listing of this node has judged the record.
        """
        guard, clock = self._state.guards[SHARED_TIER], self._state.clock
        try:
            head = guard.read(address, 0, HEADER_ALIGN, ends_s - clock())
            length = read_header_bytes(head)
            if length > HEADER_ALIGN:
                head = guard.read(address, 0, length, ends_s - clock())
            header = decode_header(head)
            nbytes = record_bytes(header.blocks, header.shape)
            data = guard.read(address, 0, nbytes, ends_s - clock())
            header, until = verified(data, address, nbytes), Deadline(ends_s - clock())
            if guard.call(partial(guard.tier.is_marked, address, header.session, until), until):
                raise TierMiss("its session was erased")
            return data, header
        except BadRecord as error:
            guard.count(f"bad:{error.kind}")
            raise _NotThisWay("error", str(error)) from None
        except TierError as error:
            reason = "timeout" if isinstance(error, TierLate) else "error"
            raise _NotThisWay("gone" if isinstance(error, TierMiss) else reason, str(error)) from None

    def _keep(
        self, data: Bytes, header: ExtentHeader, source: Source, clear_seq: int, ends_s: float
    ) -> Fetched | FetchFailed:
        """Store it in the first tier with room, if there is time, and hand it out.

        A failure if it was cleared.
        """
        kept: TierName | None = None
        for tier in TIERS.local:  # a fetch does not wait for a write that leaves the node
            if self._is_cleared(header):
                break
            transfer = self._runner.reserve(header, data.nbytes, source, tier, clear_seq=clear_seq)
            if transfer == "held":
                kept = tier
                break
            if not isinstance(transfer, Transfer):
                if transfer == "tombstone":
                    return FetchFailed("gone", "cleared meanwhile")
                continue
            try:
                within_s = ends_s - self._state.clock()
                if self._runner.run(transfer, lambda: (Record(data), header), within_s=within_s) is None:
                    return FetchFailed("gone", "cleared meanwhile")
            except (TierError, BadRecord) as error:
                logger.info("blocks from another node could not be stored in %s: %s", tier, error)
                continue
            kept = tier
            break
        if self._is_cleared(header):
            return FetchFailed("gone", "cleared meanwhile")
        if kept is None:
            return Fetched(0, data, tier="peer")
        try:
            ref = self._state.guards[kept].tier.ref(header.address)
        except TierMiss:
            logger.info("blocks from another node were evicted at once")
            return Fetched(0, data, tier="peer")
        if ref is None:
            return Fetched(0, data, tier="peer", is_kept=True)
        return Fetched(0, ref=[ref], tier="peer", is_kept=True)

    def _is_cleared(self, header: ExtentHeader) -> bool:
        with self._state.lock:
            return self._state.catalog.clears.forbids_pull(header.tenant, header.session)

    def _answer(self, note: partial[None]) -> None:
        """Record the outcome of a call, under the lock."""
        with self._state.lock:
            note()
