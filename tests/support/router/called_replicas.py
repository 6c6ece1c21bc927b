"""Ray's client over tiny replicas, which take calls over links; Serve's handle is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from samovar.replicas.links import Inlet, Links
from samovar.replicas.messages import Event, GenerateRequest, ReplyTo
from samovar.router.routing import load_tracker, roster
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.ray_clients import RayReplicaClient
from samovar.router.routing.roster import ListedReplica, RankOptions, Roster
from tests.support.inside import info_of, settings_of
from tests.support.router.linked_replicas import LINKS, LOOPBACK
from tests.support.router.tiny_replicas import TinyReplica


class ServeHandle:
    """Serve's handle: the first replica that lives gets the call. `calls`: those that came this way."""

    def __init__(self, replicas: Sequence[TinyReplica]) -> None:
        self._replicas = replicas
        self.calls: list[GenerateRequest] = []
        self.generate = self

    def options(self, **_: object) -> ServeHandle:
        return self

    def remote(self, request: GenerateRequest) -> ServeResponse:
        self.calls.append(request)
        first = next(one for one in self._replicas if not one.is_lost)
        return ServeResponse(first.generate(request))


class ServeResponse:
    """A response of Serve's: what the replica yields, until it is cancelled."""

    def __init__(self, events: AsyncIterator[list[Event]]) -> None:
        self._events = events
        self._task: asyncio.Future[list[Event]] | None = None

    def __aiter__(self) -> ServeResponse:
        return self

    async def __anext__(self) -> list[Event]:
        self._task = asyncio.ensure_future(anext(self._events))
        return await self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class CalledReplicas:
    """An ingress's client, and the replicas that it calls."""

    def __init__(self, replicas: list[TinyReplica], links: Links | None) -> None:
        self.replicas = replicas
        self.handle = ServeHandle(replicas)
        self.inlet = Inlet(LOOPBACK, LINKS, 0.0)
        self.client = RayReplicaClient(self.handle, retry_after_s=1.0, inlet=self.inlet, links=links)

    async def list_all(self, *left_out: str) -> None:
        """Tell the router of the replicas, as Serve does, but for those that are left out."""
        listed = [await self._listed(one) for one in self.replicas]
        listed = [one for one in listed if one.name not in left_out]
        load_tracker.BOOK.update_replicas({one.name: "node" for one in listed}, {})
        roster.ROSTER.update(listed, RankOptions())

    async def _listed(self, replica: TinyReplica) -> ListedReplica:
        told = await replica.record_replica_metadata()
        engine = settings_of(replica).engine
        most = engine.sequences_max + engine.queue_max
        return ListedReplica(
            info_of(replica).replica_id, str(told["model"]), most, ReplyTo.of(told.get("address"))
        )


@contextmanager
def own_books() -> Iterator[None]:
    """A load book and a roster of this test's own."""
    book, known = load_tracker.BOOK, roster.ROSTER
    load_tracker.BOOK, roster.ROSTER = ReplicaLoadTracker(), Roster()
    try:
        yield
        load_tracker.BOOK.check_integrity()
        assert not load_tracker.BOOK._sent
        assert not roster.ROSTER.queued
    finally:
        load_tracker.BOOK, roster.ROSTER = book, known


@asynccontextmanager
async def called(replicas: list[TinyReplica], *, has_links: bool = True) -> AsyncIterator[CalledReplicas]:
    """An ingress over these replicas, which it calls over links or through Serve's stand-in."""
    with own_books():
        made = CalledReplicas(replicas, Links(LINKS, 60.0) if has_links else None)
        await made.list_all()
        try:
            yield made
        finally:
            made.inlet.close()
