"""Prefetches on a simulated node: `policy/prefetcher.py` decides, links move it in the time demand leaves.

From the lower tiers to the node's uppermost one; nothing is prefetched into a GPU.
"""

from __future__ import annotations

from typing import Protocol

from samovar.cache_tiers.blocks import TOP_TIER, LoadSource
from samovar.cache_tiers.forecast import Hint, SessionKey, hinted
from samovar.cache_tiers.policy import IdleSessions, Known, Prefetcher
from samovar.cluster.plan.simulator.tier import SimLink, SimTier


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
            stays_s=self._upper.horizon_s(now_s),
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
        return (self._upper.blocks_max - len(self._upper)) * self._node.block_bytes

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
