"""Prefetching of a simulated node: `policy/prefetcher.py` decides, links move what demand leaves room for.

From the tiers below to the uppermost one of the node; nothing is pushed into a GPU.
"""

from __future__ import annotations

from typing import Protocol

from cache_tiers.blocks import LoadSource
from cache_tiers.forecast import Hint, SessionKey, hinted
from cache_tiers.policy import IdleSessions, Known, Prefetcher
from cluster.simulator.tier import SimLink, SimTier


class Node(Protocol):
    """What of `SimNode` is needed."""

    block_bytes: int
    sessions: IdleSessions
    tiers: dict[LoadSource, SimTier]
    links: dict[LoadSource, SimLink]
    top: LoadSource | None

    def changed(self, session: int) -> None: ...
    def source(self, block: int) -> LoadSource | None: ...


class SimPrefetch:
    """`early_bytes`: brought up so far."""

    def __init__(self, node: Node, prefetcher: Prefetcher, lead_s: float) -> None:
        self.prefetcher = prefetcher
        self.early_bytes = 0
        self._node = node
        self._lead_s = lead_s
        self._upper = node.tiers[node.top or "cpu"]
        self._chains: dict[int, tuple[int, ...]] = {}
        self._moving: dict[tuple[int, LoadSource], list[int]] = {}
        self._moving_of: dict[int, set[LoadSource]] = {}
        self._unused: dict[int, int] = {}  # block that is up early -> session
        self._unused_of: dict[int, set[int]] = {}

    def returned(self, session: int, blocks: tuple[int, ...], now_s: float) -> None:
        """Its next request is here: guesses for it are over, and judged. Once a turn counts."""
        if self._chains.get(session) is blocks:
            return  # it has waited
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
            self.prefetcher.failed(session, nbytes, now_s)  # nothing of it, if it was a guess
            self.prefetcher.unmoved(min(nbytes, self._node.links[source].cancel((session, source), now_s)))
        self._chains[session] = blocks

    def ask(self, why: Known, session: int, now_s: float) -> None:
        """A request of it waits, or it has announced itself: then it also stays where it is."""
        node = self._node
        if why == "hint" and session in node.sessions:
            slot = node.sessions.slot(session)
            idle_s = now_s - float(node.sessions.ended_s[slot])
            curve = hinted(node.sessions.curves[slot].copy(), idle_s, Hint(session, now_s, "typing"))
            node.sessions.told(session, curve, now_s)
            node.changed(session)
        nbytes = self.prefetcher.ask(why, session, self.below_bytes(session))
        if nbytes:
            self._move(session, nbytes, now_s)

    def paused(self, session: int, now_s: float) -> None:
        """A turn of it is over."""
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
        """Every second: who is likely to be back."""
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
        """Take in what has been brought up by now."""
        for link in self._node.links.values():
            for session, source in link.arrived(now_s):
                self._arrived(session, source, now_s)

    def next_s(self, now_s: float) -> float:
        """When something will be through if no demand comes."""
        return min(link.next_s(now_s) for link in self._node.links.values())

    def left(self, blocks: list[int], now_s: float) -> None:
        """The upper tier has pushed these out."""
        for number in blocks:
            session = self._unused.pop(number, None)
            if session is not None:
                self._unused_of[session].discard(number)
                self.prefetcher.left(session, self._node.block_bytes, now_s)

    def below_bytes(self, session: SessionKey) -> int:
        """Of its chain, in a lower tier and not in the upper one."""
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
        # Whole blocks move; what was granted beyond them is handed back.
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
        """Raises `AssertionError` naming what is wrong."""
        self.prefetcher.check_integrity()
        assert all(number in self._upper for number in self._unused), "what is up early is not there"
        assert sum(map(len, self._unused_of.values())) == len(self._unused), (
            "the books of early blocks differ"
        )
        assert {session for session, _ in self._moving} == self._moving_of.keys(), "a move is nobody's"
