"""Real replicas with tiny engines behind links, in this process: what ingresses read from, one or several.

Their engines take as many steps as they are allowed, so that a test can stop an answer in the middle.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from samovar.configs.optional_sections import AnswerSettings
from samovar.configs.settings import EngineSettings, Settings
from samovar.replicas.links import Inlet, Links
from samovar.replicas.messages import Delta, Event, GenerateRequest, LoggedAnswer, ReplyTo
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.served import pack_request
from samovar.replicas.serving.served_engine import OwnEngine
from samovar.router.routing import ReplicaLost
from samovar.router.routing.ray_clients import AnswerSearch, DirectCall
from samovar.router.routing.replica_client import choices_ended
from tests.support.clock import Clock
from tests.support.engines.engines import small_engine
from tests.support.inside import info_of, kept_by, streams_of
from tests.support.router.fake_replica import INFO, FakeReplicas, say
from tests.support.router.linked_replicas import LINKS, LOOPBACK
from tests.support.router.router_harness import House, until

FREE = 1 << 30


class Held(EngineSettings):
    """An engine that a test holds looks at no books meanwhile."""

    idle_check_s: ClassVar[float] = 60.0


class HeldEngine:
    """An engine that takes only as many steps as it is allowed."""

    def __init__(self, engine: Any) -> None:
        self.real = engine
        self.steps_left = FREE

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def has_work(self) -> bool:
        return self.steps_left > 0 and bool(self.real.has_work)

    def step(self) -> list[tuple[int, Event]]:
        self.steps_left -= 1
        events: list[tuple[int, Event]] = self.real.step()
        return events


class TinyReplica(Replica):
    """The deployment, without Ray."""

    def __init__(self, name: str, model_dir: Path, answers: AnswerSettings, clock: Clock) -> None:
        built = small_engine(model_dir)
        built.engine.requests.replica_id = name
        self.engine = HeldEngine(built.engine)
        settings, info = Settings(answers=answers), replace(built.info, replica_id=name, model="")
        engine = OwnEngine(self.engine, info, Held())  # type: ignore[arg-type]
        self._tiers = None
        self._begin(settings, engine, info, Inlet(LOOPBACK, LINKS, 0.0), clock)
        self._links = Links(LINKS, 60.0)
        self.is_lost = False

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing: `stop` does it."""

    async def stop(self) -> None:
        await self._engine.close()
        self._compiles.close()
        self._sweeps.stop()
        if self._inlet is not None:
            self._inlet.close()

    def allow(self, steps: int) -> None:
        """Let the engine take as many steps from now on."""
        self.engine.steps_left = steps
        self._engine.abort(-1)  # there is none: it wakes up

    @property
    def generated(self) -> int:
        """Tokens that it has computed."""
        return int(self.engine.stats().generated_tokens)


class TinyReplicaClient(FakeReplicas):
    """`ReplicaClient` of one ingress over the replicas that all of them share."""

    def __init__(self, replicas: list[TinyReplica]) -> None:
        super().__init__(lambda request: say([]))
        self.tiny = replicas
        self.heard = 0  # tokens that have come, of all replicas
        self.cuts = 0  # of connections that end with the next events, of replicas that live on
        self.search = AnswerSearch(60.0)
        self.has_links = True
        self.inlet = Inlet(LOOPBACK, LINKS, 0.0)
        self.links = Links(LINKS, 60.0)
        self.infos = [replace(INFO, replica_id=info_of(one).replica_id) for one in replicas]

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        self.calls.append(request)
        names = {info_of(one).replica_id: one for one in self.tiny if not one.is_lost}
        fitting = [name for name in names if name not in request.route.avoid] or list(names)
        name = request.route.only if request.route.only in names else fitting[0]
        asked = replace(request, model="", route=replace(request.route, ticket=uuid.uuid4().hex))
        call = await self.linked(names[name], asked) if self.has_links else names[name].generate(asked)
        choices_open = request.n
        self.open += 1
        try:
            async for events in call:
                choices_open -= choices_ended(events, choices_open)
                self.heard += sum(len(one.token_ids) for one in events if isinstance(one, Delta))
                yield events
                if self.cuts > 0:
                    self.cuts -= 1
                    raise ReplicaLost("cut by the test")
                if names[name].is_lost:
                    raise ReplicaLost("killed by the test")
                if choices_open <= 0:
                    break
        finally:
            self.open -= 1
            if isinstance(call, DirectCall):
                call.close(is_over=choices_open <= 0)
            else:
                await call.aclose()

    async def linked(self, replica: TinyReplica, request: GenerateRequest) -> DirectCall:
        """Return a call over a link, which has begun."""
        told = await replica.record_replica_metadata()
        link = await self.links.reach(ReplyTo.of(told["address"]))
        assert link is not None
        call = DirectCall(self.inlet, link, request.route.ticket, joins=request.keep is None)
        try:
            await call.begin(pack_request(replace(request, reply_to=await self.inlet.address())))
        except BaseException:
            call.close(is_over=False)
            raise
        return call

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[LoggedAnswer | None, bool]:
        asked = [one.kept(tenant, ref) for one in self.tiny if not one.is_lost]
        found, is_whole = await self.search.find(asked, ())
        return found, is_whole and self.all_asked

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> Any:
        for one in self.tiny:
            await one.clear(tenant, sessions)
        return await super().clear(tenant, sessions)


@asynccontextmanager
async def tiny_replicas(
    model_dir: Path, count: int = 1, answers: AnswerSettings | None = None, clock: Clock | None = None
) -> AsyncIterator[list[TinyReplica]]:
    """Replicas that run until the block ends; their books are checked then."""
    made = [
        TinyReplica(f"replica-{number}", model_dir, answers or AnswerSettings(), clock or Clock())
        for number in range(1, count + 1)
    ]
    try:
        yield made
        for one in made:
            kept_by(one).check_integrity()
            one.allow(FREE)
            if not one.is_lost:
                await until(lambda one=one: not one.engine.real.has_work)  # type: ignore[misc]
                assert not streams_of(one)
                assert not one._answer_logs
                assert not one._ingress_loads._calls
    finally:
        for one in made:
            await one.stop()


@asynccontextmanager
async def ingress(replicas: list[TinyReplica], **settings: Any) -> AsyncIterator[tuple[House, Any]]:
    """An ingress over them, with a client; several of them know nothing of each other."""
    house = House(**settings)
    client = TinyReplicaClient(replicas)
    house.replicas = client
    object.__setattr__(house.service, "client", client)
    object.__setattr__(house.service.readiness, "_client", client)
    try:
        async with house.server() as url:
            yield house, url
    finally:
        client.inlet.close()
