"""The link: pulls bytes from another node's memory into ours, over NIXL (UCX). One per process.

Each link has one agent. Both sides lease pieces of their registered arena. The owner copies the bytes into
a lease and exports it; the `Export` travels by a Ray call; the receiver leases as many bytes and pulls.
NIXL's own pitfalls are handled in `nixl_agent.py`. What this module adds:

* NIXL has no timeouts. A pull ends for its caller at the deadline, whatever NIXL does. Its destination is
  parked, not leased again, until the transfer has ended or failed: over TCP, the bytes of a peer that only
  slept still arrive later, whatever was released or removed meanwhile (measured; only the end of the agent
  stops them).
* A pull is many transfers of `CHUNK_BYTES`, one at a time per peer. So a sleeping peer parks one lease, a
  late pull ends with its chunk, and no peer has many of our requests in its sockets, which can kill it.
* One thread of the link makes all NIXL calls; it sleeps when nothing is in flight.
* Any error drops the peer with all its pulls; the next pull reconnects. An agent is named
  `node id:incarnation`; idle older incarnations of a node are dropped when a newer one is met.

NOT done here: the bytes are not verified. A peer's expired lease may hold anything and is read without an
error: the caller verifies the record's checksums (`blocks/record.py`) and that it is the record it wanted.
Nor is there any secret: anyone who can connect and knows an export can read an agent's whole arena; keep
the ports inside the cluster.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.transport.arena import Arena
from samovar.cache_tiers.transport.nixl_agent import NixlAgent, NixlFault, map_memory

logger = logging.getLogger(__name__)

START_S = 60.0
CLOSE_S = 5.0
"""Time NIXL gets to start and to stop; after that the link is down, or its thread is abandoned."""

CHUNK_BYTES = 448 * 1024
"""Size of one transfer. Must fit, with UCX's header, into one segment: `nixl_agent.SEGMENT`.

Never larger, however fast it was: over TCP a fast transfer looks like a copy within the host, until the
peer falls asleep."""

POLL_S_MIN, POLL_S_MAX = 20e-6, 1e-3
POLL_PARKED_S = 0.05
"""Poll interval, 1.5 times longer after each poll without progress. No caller waits for parked pulls."""


@dataclass(frozen=True, slots=True)
class Export:
    """Address of exported bytes, for a peer to pull. Plain data."""

    agent: str  # the exporting agent's name: f"{node_id}:{incarnation}"
    metadata: bytes  # what a peer's agent needs to connect
    address: int  # of the bytes in the exporter's memory; over TLS a number drawn for them
    nbytes: int
    generation: int  # of the lease; never used twice by an agent


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLease:
    """A piece of the arena. `view`: u8 `[nbytes]`, not to be accessed after release or expiry."""

    view: Bytes
    nbytes: int
    generation: int
    address: int


class LinkError(Exception):
    """The link did not deliver the bytes. Another way may."""


class LinkDown(LinkError):
    """NIXL is not installed, or this agent cannot work, or no longer."""


class LinkLate(LinkError):
    """The pull did not finish within the deadline."""


class PeerGone(LinkError):
    """The peer is disconnected, or another incarnation answers under its name."""


@dataclass(slots=True, eq=False)
class _Read:
    export: Export
    into: ArenaLease
    future: Future[None] = field(default_factory=Future)  # cancelled if given up
    at: int = 0  # bytes received


@dataclass(slots=True, eq=False)
class _RemoteAgent:
    metadata: bytes
    pulls: deque[_Read] = field(default_factory=deque)
    handle: int | None = None  # of the transfer in flight, for the first of `pulls`
    asked_bytes: int = 0  # size of that transfer
    leaves: str | None = None  # why the peer is dropped once that transfer has ended


class ArenaLink(ABC):
    """What a node does with a link whose two ends lease pieces of their memory."""

    @abstractmethod
    def lease(self, nbytes: int, *, expires: bool) -> ArenaLease | None: ...

    @abstractmethod
    def release(self, generation: int) -> None: ...

    @abstractmethod
    def export(self, lease: ArenaLease) -> Export: ...

    @abstractmethod
    def pull(self, export: Export, into: ArenaLease, deadline_s: float) -> None: ...

    def share(self, data: Bytes) -> Export | None:
        """Return what a peer needs to pull a copy of `data`; None: no room for it. Raises `LinkError`."""
        lease = self.lease(data.nbytes, expires=True)
        if lease is None:
            return None
        try:
            lease.view[: data.nbytes] = data
            return self.export(lease)
        except LinkError:
            self.release(lease.generation)
            raise

    def bring(self, export: Export, deadline_s: float) -> Bytes | None:
        """Pull the exported bytes, unverified; None: no room for them. Blocks. Raises `LinkError`."""
        lease = self.lease(export.nbytes, expires=False)
        if lease is None:
            return None
        try:
            self.pull(export, lease, deadline_s)
            # A private copy, so that it cannot be written to after verification.
            return lease.view[: export.nbytes].copy()
        finally:
            self.release(lease.generation)


class NixlLink(ArenaLink):
    """`arena_bytes` of registered memory, leased in pieces, and the pulls into it. Thread-safe."""

    def __init__(self, name: str, *, arena_bytes: int, lease_s: float, clock: Callable[[], float]) -> None:
        """`name`: "node id:incarnation", never used before. `clock`: monotonic. Raises `LinkDown`."""
        self.name = name
        self._lease_s = lease_s
        self._clock = clock
        self._arena = Arena(arena_bytes)
        try:
            self._memory = map_memory(self._arena.nbytes)
        except MemoryError as error:
            raise LinkDown(str(error)) from error
        self._base = self._memory.ctypes.data
        self._metadata = b""
        self._lock = threading.Lock()  # guards the arena, `_pulls`, `_down`, and how pulls end
        self._pulls: dict[int, _Read] = {}  # in flight or parked, by the generation of their destination
        self._down: str | None = None
        self._peers: dict[str, _RemoteAgent] = {}  # only used by the thread
        self._jobs: queue.SimpleQueue[Callable[[NixlAgent], None] | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samovar-link", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            self._mark_down(f"NIXL did not start within {START_S} s")
            self._jobs.put(None)
        with self._lock:
            self._check_up()
        atexit.register(self.close)  # a thread inside NIXL would abort the interpreter's exit

    def lease(self, nbytes: int, *, expires: bool) -> ArenaLease | None:
        """Lease `nbytes`, content undefined; None: no room. Raises `LinkDown`.

        Held until `release`; a lease that `expires` ends at most `lease_s` after its export.
        """
        with self._lock:
            self._check_up()
            self._arena.expire(self._clock())
            piece = self._arena.take(nbytes, expires=expires)
        if piece is None:
            return None
        view = self._memory[piece.offset : piece.offset + nbytes]
        return ArenaLease(view, nbytes, piece.generation, self._base + piece.offset)

    def release(self, generation: int) -> None:
        """End a lease. Idempotent; no-op if the generation is unknown. A pull into it may continue."""
        with self._lock:
            self._arena.release(generation)

    def export(self, lease: ArenaLease) -> Export:
        """Return what a peer needs to pull what was written to `lease.view`. Starts its `lease_s`.

        Raises `LinkDown`; `ValueError` if the lease is over or does not expire.
        """
        with self._lock:
            self._check_up()
            now_s = self._clock()
            self._arena.expire(now_s)
            self._arena.arm(lease.generation, now_s + self._lease_s)
        return Export(self.name, self._metadata, lease.address, lease.nbytes, lease.generation)

    def pull(self, export: Export, into: ArenaLease, deadline_s: float) -> None:
        """Pull the exported bytes, unverified, to the start of a lease that does not expire. Blocks.

        Raises `LinkError`; the content of `into` is then undefined, and it can only be released.
        Raises `ValueError` if `into` is too small, over, expires, or has a pull in flight.
        """
        if not 0 < export.nbytes <= into.nbytes:
            raise ValueError(f"{export.nbytes} bytes into a lease of {into.nbytes}")
        pull = _Read(export, into)
        with self._lock:
            self._check_up()
            self._arena.begin_write(into.generation)
            self._pulls[into.generation] = pull
            self._jobs.put(lambda agent: self._start(agent, pull))
        try:
            pull.future.result(max(deadline_s, 0.0))
        except TimeoutError:
            with self._lock:
                is_late = pull.future.cancel()
            if is_late:
                late = f"{export.nbytes} bytes of {export.agent} not within {deadline_s:.3f} s"
                raise LinkLate(late) from None
            pull.future.result()

    def forget(self, agent: str) -> None:
        """Drop a peer that will not come back: its pulls soon raise `PeerGone`. No-op if it is unknown."""
        with self._lock:
            if self._down is None:
                self._jobs.put(lambda nixl: self._forget(nixl, agent, "it was forgotten"))

    def close(self) -> None:
        """Close the link: pulls in flight raise `LinkDown`, leased views stay readable. Idempotent."""
        self._mark_down(f"{self.name} is closed")
        atexit.unregister(self.close)
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("NIXL hangs: its thread is abandoned")

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            self._arena.check_integrity()
            writes = self._arena.writes
            assert writes == len(self._pulls), f"{writes} destinations of {len(self._pulls)} pulls"
            for generation, pull in self._pulls.items():
                assert pull.into.generation == generation, "a pull under another's generation"
                assert 0 <= pull.at <= pull.export.nbytes <= pull.into.nbytes, "bytes beyond a lease"

    def _check_up(self) -> None:
        if self._down is not None:
            raise LinkDown(self._down)

    def _mark_down(self, why: str) -> None:
        """Refuse all further calls and wake all waiting pulls with `LinkDown`."""
        with self._lock:
            self._down = self._down or why
            for pull in self._pulls.values():
                if not pull.future.done():
                    pull.future.set_exception(LinkDown(self._down))

    # Everything below runs in the link's thread.

    def _run(self) -> None:
        try:
            agent = NixlAgent(self.name, self._base, self._arena.nbytes)
        except Exception as error:  # noqa: BLE001 - no NIXL here, for whatever reason: the caller reports it
            self._mark_down(f"no NIXL agent: {error}")
            self._started.set()
            return
        self._metadata = agent.metadata
        self._started.set()
        try:
            self._serve(agent)
        except Exception as error:
            logger.exception("the link's thread has failed")
            self._mark_down(f"the link's thread has failed: {error}")
        for name in list(self._peers):
            self._drop(agent, name, "the link is closed", is_over=False)
        try:
            agent.close()
        except NixlFault as error:
            logger.warning("closing the NIXL agent: %s", error)

    def _serve(self, agent: NixlAgent) -> None:
        poll_s = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=poll_s if self._pulls else None)
            except queue.Empty:
                has_moved = self._look(agent)
            else:
                if job is None:
                    return
                job(agent)
                has_moved = True
            slowest_s = POLL_S_MAX if self._is_awaited() else POLL_PARKED_S
            poll_s = 0.0 if has_moved else min(max(1.5 * poll_s, POLL_S_MIN), slowest_s)

    def _is_awaited(self) -> bool:
        with self._lock:
            return any(not pull.future.done() for pull in self._pulls.values())

    def _start(self, agent: NixlAgent, pull: _Read) -> None:
        try:
            peer = self._meet(agent, pull.export)
        except (NixlFault, PeerGone) as error:
            self._end(pull, f"{pull.export.agent}: {error}")
            return
        peer.pulls.append(pull)

    def _meet(self, agent: NixlAgent, export: Export) -> _RemoteAgent:
        """Return the peer, connecting NIXL to it if needed. Raises `NixlFault`, `PeerGone`."""
        if export.agent in self._peers and self._peers[export.agent].metadata != export.metadata:
            self._forget(agent, export.agent, "another incarnation answers under that name")
        peer = self._peers.get(export.agent)
        if peer is not None and peer.leaves is not None:
            raise PeerGone(peer.leaves)
        if peer is not None:
            return peer
        for name, other in list(self._peers.items()):
            if not other.pulls and _node(name) == _node(export.agent):
                self._drop(agent, name, "it has a newer incarnation")
        name = agent.add(export.metadata)
        if name != export.agent:
            if name not in self._peers:
                agent.remove(name)
            raise PeerGone(f"it is {name} that answers")
        peer = self._peers[name] = _RemoteAgent(export.metadata)
        return peer

    def _look(self, agent: NixlAgent) -> bool:
        """Advance all peers' transfers. True: one was started or has ended."""
        has_moved = False
        for name, peer in list(self._peers.items()):
            try:
                has_moved = self._advance(agent, peer) or has_moved
            except NixlFault as error:
                self._drop(agent, name, str(error))
                has_moved = True
            else:
                if peer.leaves is not None and not peer.pulls:
                    self._drop(agent, name, peer.leaves)
        return has_moved

    def _advance(self, agent: NixlAgent, peer: _RemoteAgent) -> bool:
        """Take the next step of a peer's first pull. True: there was one. Raises `NixlFault`."""
        if not peer.pulls:
            return False
        pull = peer.pulls[0]
        export, into = pull.export, pull.into
        if peer.handle is not None:
            is_over = agent.is_over(peer.handle)
        elif not pull.future.done():
            peer.asked_bytes = min(CHUNK_BYTES, export.nbytes - pull.at)
            peer.handle = agent.read(
                export.agent, export.address + pull.at, into.address + pull.at, peer.asked_bytes
            )
            is_over = agent.begin(peer.handle)
            if not is_over:
                return True
        else:
            peer.pulls.popleft()
            self._end(pull, None)
            return True
        if not is_over:
            self._clear_queue(peer)
            return False
        agent.release(peer.handle)
        peer.handle = None
        pull.at += peer.asked_bytes
        if pull.at == export.nbytes:
            peer.pulls.popleft()
            self._end(pull, None)
        return True

    def _clear_queue(self, peer: _RemoteAgent) -> None:
        """End pulls that were given up before they began, without waiting for the one in flight."""
        for pull in list(peer.pulls)[1:]:
            if pull.future.done():
                peer.pulls.remove(pull)
                self._end(pull, None)

    def _forget(self, agent: NixlAgent, name: str, why: str) -> None:
        """Drop a peer once the transfer in flight has ended; its callers get an error at once."""
        peer = self._peers.get(name)
        if peer is None:
            return
        if peer.handle is None:
            self._drop(agent, name, why)
            return
        peer.leaves = why
        while len(peer.pulls) > 1:
            self._end(peer.pulls.pop(), f"{name}: {why}")
        with self._lock:
            self._tell(peer.pulls[0], f"{name}: {why}")

    def _drop(self, agent: NixlAgent, name: str, why: str, *, is_over: bool = True) -> None:
        """Disconnect from a peer. `is_over`: nothing is in flight with it, or that has just failed."""
        peer = self._peers.pop(name)
        agent.part(name, peer.handle)
        while peer.pulls and is_over:
            self._end(peer.pulls.popleft(), f"{name}: {why}")

    def _end(self, pull: _Read, gone: str | None) -> None:
        """End a pull: nothing writes to its destination any more. `gone`: why it failed, if it did."""
        with self._lock:
            del self._pulls[pull.into.generation]
            self._arena.end_write(pull.into.generation)
            self._tell(pull, gone)

    def _tell(self, pull: _Read, gone: str | None) -> None:
        """Wake the caller of a pull, if it still waits. Call under the lock."""
        if pull.future.done():
            return
        if gone is None:
            pull.future.set_result(None)
        else:
            pull.future.set_exception(PeerGone(gone))


def _node(agent: str) -> str:
    return agent.rpartition(":")[0] or agent
