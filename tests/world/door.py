"""A door: the product's erasures on an event loop of the world's, over nodes and small stores that fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.transport import PeerError
from samovar.router.erasure import Cleared, Erasure, Erasures, Left, NotNoted, UnfinishedFile
from samovar.router.openai import ApiError
from tests.world.faults import Faults
from tests.world.network import CLIENT, Network
from tests.world.scheduler import Scheduler, Task
from tests.world.threads import Promise

CLEAR_S_MAX = 8.0
"""As in the product, less than a node forbids pulls of what was cleared: all are asked at once."""
STORES = ("replies", "documents")


class Loop(asyncio.BaseEventLoop):
    """An event loop whose time is the world's, and whose executor are the world's threads."""

    def __init__(self, here: Scheduler) -> None:
        super().__init__()
        self._here = here
        self._asleep: list[Task] = []
        self._is_called = False
        self._selector = self

    def time(self) -> float:
        return self._here.now_s

    def select(self, timeout: float | None) -> list[Any]:
        if not self._is_called and timeout != 0:
            self._here.wait(self._asleep, timeout)
        self._is_called = False
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: nothing here has a socket."""

    def _write_to_self(self) -> None:
        self._is_called = True
        for task in list(self._asleep):
            self._here.wake(task)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        future = self.create_future()

        def settle(call: Callable[..., None], value: Any) -> None:
            if not future.done():
                call(value)

        def run() -> None:
            try:
                value = func(*args)
            except Exception as error:  # noqa: BLE001 - the awaiter's
                self.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                self.call_soon_threadsafe(settle, future.set_result, value)

        self._here.spawn(self._here.current.process, "to_thread", run)
        return future


class Door:
    """One door's lives. `outcomes`: how often a place answered what."""

    def __init__(
        self, here: Scheduler, faults: Faults, network: Network, folder: Path, outcomes: Counter[str]
    ) -> None:
        self._here = here
        self._faults = faults
        self._network = network
        self._folder = folder
        self._outcomes = outcomes
        self.kept: dict[str, set[bytes]] = {name: set() for name in STORES}
        """What the small stores have: tags of conversations."""
        self.start()

    def start(self) -> None:
        self.process = self._here.process("door")
        self._calls: list[tuple[Erasure, Promise]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.erasures: Erasures | None = None
        self._loop: Loop | None = None
        self._here.spawn(self.process, "door", self._live)

    def keep(self, name: bytes) -> None:
        """The small stores get something of a conversation."""
        for kept in self.kept.values():
            kept.add(name)

    def crash(self) -> None:
        if self._loop is None:
            return  # not yet there
        self._here.kill(self.process)
        self._file.close()
        self._loop = None
        for _, promise in self._calls:
            if not promise.done():
                promise.set_exception(PeerError("the door died"))
        self.start()

    def erase(self, what: Erasure, timeout_s: float) -> Cleared:
        """Wish an erasure as a client does. Raises `ApiError`, `PeerError` (it died), `TimeoutError`."""
        while self._loop is None:
            self._here.sleep(0.1)
        promise = Promise()
        call = (what, promise)
        self._calls.append(call)
        self._loop.call_soon_threadsafe(self._begin, call)
        try:
            done: Cleared = promise.result(timeout_s)
            return done
        finally:
            if call in self._calls:
                self._calls.remove(call)

    def _begin(self, call: tuple[Erasure, Promise]) -> None:
        what, promise = call

        async def run() -> None:
            assert self.erasures is not None
            try:
                (done,) = await self.erasures.erase(what)
            except ApiError as error:
                promise.set_exception(error)
            else:
                promise.set_result(done)

        assert self._loop is not None
        self._tasks = [*self._tasks, self._loop.create_task(run())]

    def _live(self) -> None:
        loop = Loop(self._here)
        self._file = UnfinishedFile(self._folder)
        erasures = Erasures(self._file, 1.0)
        places = erasures.places["sessions"]
        places |= {name: self._store(name) for name in STORES[:1]}
        places |= {"front doors": self._itself}
        places |= {"tiers": self._tiers}
        places |= {name: self._store(name) for name in STORES[1:]}

        async def live() -> None:
            await erasures.start()
            self.erasures, self._loop = erasures, loop
            await asyncio.Event().wait()

        loop.run_until_complete(live())

    def _store(self, name: str) -> Callable[[Erasure], Any]:
        """A small store, which may have no room, or be busy."""

        async def erase(what: Erasure) -> Cleared:
            await asyncio.sleep(self._faults.uniform(0.0, 0.05))
            if self._faults.strikes("small store fails"):
                self._outcomes[f"erasure: {name} fails"] += 1
                raise ApiError(503, "the disk is full", code="no_room")
            gone = {one for one in self.kept[name] if _is_of(one, what)}
            self.kept[name] -= gone
            return Cleared({name: len(gone)})

        return erase

    async def _itself(self, what: Erasure) -> Cleared:
        """As an ingress that asks all: it is one of them."""
        assert self.erasures is not None
        await asyncio.sleep(self._faults.uniform(0.0, 0.01))
        wish = Erasure(what.kind, what.tenant, what.names, self._here.now_s)
        try:
            return await self.erasures.erase_here(wish, STORES[:1])
        except NotNoted:
            raise Left("an ingress did not answer") from None
        except ApiError:
            raise Left("an ingress has not forgotten all yet", is_known_there=True) from None

    async def _tiers(self, what: Erasure) -> Cleared:
        """Clear all nodes at once; what a node has left, it goes on with itself."""
        tenant, tags = bytes.fromhex(what.tenant), what.tags
        clear = Clear(tenant) if tags is None else Clear(tenant, tags[0], tags[1:])

        def ask(name: str) -> tuple[str, bool]:
            try:
                done = self._network.call(CLIENT, name, "clear", lambda node: node.clear(clear), CLEAR_S_MAX)
            except PeerError as error:
                self._outcomes[f"erasure: {type(error).__name__}"] += 1
                return f"{name} did not answer", False
            self._outcomes["erasure: unreachable tier" if done.unreachable else "erasure: clear"] += 1
            self._outcomes["erasure: not noted"] += not done.is_noted
            tiers = ", ".join(done.unreachable)
            what = f"{name}: the tiers {tiers} delete their data as soon as they can" if tiers else ""
            return what, done.is_noted

        there = [name for name in self._network.homes if name not in self._network.left]
        said = await asyncio.gather(*(asyncio.to_thread(ask, name) for name in there))
        left = [what for what, _ in said if what]
        if left:
            raise Left("; ".join(left), is_known_there=all(is_noted for _, is_noted in said))
        return Cleared()


def _is_of(kept: bytes, what: Erasure) -> bool:
    """`kept`: tag of a tenant, then of a session, then which of its conversations."""
    tenant, session = kept[:16], kept[16:32]
    return tenant.hex() == what.tenant and (what.tags is None or session in what.tags)
