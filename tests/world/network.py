"""Calls from one process to another: they take time, get lost, come twice, and end with who was called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.messages import ExtentRequest, FetchFailed, Lookup, LookupResult, PushRequest
from samovar.cache_tiers.node import TierNode
from samovar.cache_tiers.transport import Export, PeerError, PeerLate, PeerLost
from tests.world.faults import Faults
from tests.world.scheduler import Process, Scheduler
from tests.world.threads import Promise

T = TypeVar("T")
CLIENT = -1
FAST_S = 0.002
SLOW_S = 0.5


class Home:
    """Where a node lives: `node` and `process` of its present life; None while there is none."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.node: TierNode | None = None
        self.process: Process | None = None


class Network:
    """Between all homes, and of the clients, who are never cut off."""

    def __init__(self, here: Scheduler, faults: Faults) -> None:
        self._here = here
        self._faults = faults
        self.homes: dict[str, Home] = {}
        self.left: set[str] = set()
        """Nodes that are none any more: no list of nodes has them, as nobody is to wait for them."""

    def call(self, caller: int, name: str, what: str, run: Callable[[TierNode], T], timeout_s: float) -> T:
        """Run something at a node. Raises `PeerLost` if it is not there, `PeerLate`, or what `run` raises."""
        here, home = self._here, self.homes[name]
        ends_s = here.now_s + timeout_s
        if self._is_lost(caller, home.number):
            here.sleep(timeout_s)
            raise PeerLate(f"{what}: lost on the way")
        here.sleep(self._delay_s(caller, timeout_s))
        node, process = home.node, home.process
        if node is None or process is None or process.is_dead:
            raise PeerLost(f"{name} is not there")
        promise = Promise()

        def serve() -> None:
            try:
                value = run(node)
            except Exception as error:  # noqa: BLE001 - the caller's to judge
                _end(promise, error=error)
            else:
                _end(promise, value)

        def dies() -> None:
            _end(promise, error=PeerLost(f"{name} died"))

        process.at_death.append(dies)
        try:
            here.spawn(process, what, serve)
            if caller != CLIENT and self._faults.strikes("net twice", home.number):
                here.spawn(process, what, serve)
            value: T = promise.result(max(0.0, ends_s - here.now_s))
        except TimeoutError:
            raise PeerLate(f"{what}: no answer in {timeout_s:.3f} s") from None
        finally:
            process.at_death.remove(dies)
        if self._is_lost(caller, home.number):
            here.sleep(max(0.0, ends_s - here.now_s))
            raise PeerLate(f"{what}: the answer was lost")
        here.sleep(self._delay_s(caller, max(0.0, ends_s - here.now_s)))
        return value

    def behind(self, call: Callable[[], None]) -> None:
        """Let a call go on behind the one that makes it."""
        self._here.spawn(self._here.current.process, "tell", call)

    def _is_lost(self, caller: int, number: int) -> bool:
        if caller == CLIENT:
            return False
        ends = {caller, number}
        lost = any(self._faults.strikes("net loss", one) for one in sorted(ends))
        return lost or any(self._faults.strikes("partition", one) for one in sorted(ends))

    def _delay_s(self, caller: int, most_s: float) -> float:
        slow = caller != CLIENT and self._faults.strikes("net slow", caller)
        return min(most_s, self._faults.uniform(0.0, SLOW_S if slow else FAST_S))


class Calls:
    """`PeerCalls` of node `number`."""

    def __init__(self, network: Network, number: int) -> None:
        self._network = network
        self._number = number

    def lookup(self, node: str, lookup: Lookup, timeout_s: float) -> LookupResult:
        def run(at: TierNode) -> LookupResult:
            return replace(at.lookup_here(lookup), history=at.resumption.history(lookup))

        return self._ask(node, "peer_lookup", run, timeout_s)

    def export(self, node: str, ask: ExtentRequest, timeout_s: float) -> Export | FetchFailed:
        return FetchFailed("down", "no NIXL in this world")

    def release(self, node: str, export: Export) -> None:
        """Nothing is exported."""

    def read(self, node: str, ask: ExtentRequest, timeout_s: float) -> Bytes | FetchFailed:
        reply = self._ask(node, "peer_read", lambda at: at.peers.exports.read(ask), timeout_s)
        if isinstance(reply, FetchFailed):
            return reply
        assert reply.data is not None
        return reply.data.copy()

    def check(self, node: str, ask: ExtentRequest) -> None:
        def tell() -> None:
            with suppress(PeerError):
                self._ask(node, "peer_check", lambda at: at.peers.exports.check(ask), 5.0)

        self._network.behind(tell)  # nobody waits for it

    def learned(self, node: str, timeout_s: float) -> bytes:
        return self._ask(node, "peer_learned", lambda at: at.resumption.learned(), timeout_s)

    def take(self, node: str, take: PushRequest, timeout_s: float) -> str:
        return self._ask(node, "peer_take", lambda at: at.peers.take(take), timeout_s)

    def _ask(self, node: str, what: str, run: Callable[[TierNode], T], timeout_s: float) -> T:
        try:
            return self._network.call(self._number, node, what, run, timeout_s)
        except PeerError:
            raise
        except Exception as error:  # as over Ray: the other's error, not this node's
            raise PeerError(f"{type(error).__name__}: {error}") from error


def _end(promise: Promise, value: Any = None, error: BaseException | None = None) -> None:
    """The first answer counts."""
    if not promise.done():
        if error is None:
            promise.set_result(value)
        else:
            promise.set_exception(error)


Homes = Mapping[str, Home]
