"""The parts of one ingress that its routes share, and whether it is ready: loading, ok or draining.

A background task polls the replicas for that; no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from samovar.configs.settings import Settings
from samovar.configs.telemetry import Tracer
from samovar.replicas.messages import ReplicaInfo
from samovar.router.auth import LOCAL_TENANT, ConcurrencyLimit
from samovar.router.erasure import Erasures
from samovar.router.generation.recorder import IngressRecorder
from samovar.router.generation.stages import PromptStage
from samovar.router.generation.usage import UsageBook
from samovar.router.ingresses import Ingresses, IngressShares, KnownSessions, SessionTurn, SharedResponses
from samovar.router.metrics import Metrics
from samovar.router.openai import ModelNotFound
from samovar.router.prompt import PromptBuilder
from samovar.router.routing import ReplicaClient, SessionDirectory

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Sealing
    from samovar.router.identities import Identities

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IngressServices:
    """The parts a request needs, created once per ingress.

    `context_tokens_configured`: the limit of model and settings; a replica with few pages may allow less.
    `secret`: see `auth.server_secret`. `model`: fingerprint of the only model that may answer.
    `generation`: the defaults of a request's fields. `commit`: of the model on the hub, if it is from there.
    `adapters`: names that stand for one, which answers by that name. `stages`: what chats pass on their way
    to their prompts, in this order, as far as it is switched on. `clears`: what all deletions go through.
    `bodies`: what bodies of the smaller routes are read within, as answers' are within `concurrency`.
    `shares`, `known`, `responses`: what is shared with the other `ingresses`; None: there is no other.
    `is_further`: the model is not the first of several, so that sessions are kept apart from the first's.
    `models`: of the front before several models, what each is served by, the first one's first.
    `identities`: who may call beside the owners of keys in the settings; None: no others. `sealing`: what
    texts that are kept on a disk are sealed with; None: they are not.
    """

    settings: Settings
    client: ReplicaClient
    prompts: PromptBuilder
    model_name: str
    context_tokens_configured: int
    secret: bytes
    model: str
    readiness: Readiness
    metrics: Metrics
    concurrency: ConcurrencyLimit
    reads: ConcurrencyLimit
    bodies: ConcurrencyLimit
    directory: SessionDirectory
    shares: IngressShares
    known: KnownSessions
    responses: SharedResponses
    clears: Erasures
    ingresses: Ingresses | None = None
    recorder: IngressRecorder | None = None
    usage: UsageBook = field(default_factory=UsageBook)
    generation: Mapping[str, float] = field(default_factory=dict)
    commit: str | None = None
    tracer: Tracer | None = None
    stages: tuple[PromptStage, ...] = ()
    adapters: Collection[str] = ()
    is_further: bool = False
    models: tuple[IngressServices, ...] = ()
    identities: Identities | None = None
    sealing: Sealing | None = None

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that are known by name now."""
        listed = tuple(self.settings.auth.api_keys)
        if self.identities is not None:
            return tuple(dict.fromkeys((*listed, *self.identities.tenants)))
        return listed or (LOCAL_TENANT,)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that a request may send as `model`, the served one first."""
        if self.models:
            return tuple(name for one in self.models for name in one.model_names)
        return tuple(dict.fromkeys((self.model_name, *self.settings.model.aliases, *self.adapters)))

    @property
    def each_model(self) -> tuple[IngressServices, ...]:
        """What each model is served by: these services, if they are of one."""
        return self.models or (self,)

    def stage(self, name: str) -> PromptStage | None:
        """Return the stage of that name; None: it is switched off."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def demand(self) -> AbstractContextManager[object]:
        """Let no work for idle moments run meanwhile."""
        demands = ExitStack()
        for stage in self.stages:
            demands.enter_context(stage.demand())
        return demands

    def refuse_other_model(self, asked: str) -> None:
        """Raise `ModelNotFound` if `asked` is no name of the served model."""
        if asked not in self.model_names:
            served = (one.model_name for one in self.models)
            raise ModelNotFound(asked, ", ".join(served) if self.models else self.model_name)

    def is_deleted(self, turn: SessionTurn) -> bool:
        """Return whether a turn's session was deleted since the turn began. Thread-safe."""
        if self.directory.table.cleared_unix_s(turn.tenant, turn.owner.session) >= turn.began_unix_s:
            return True
        # The table learns late of what another ingress deletes, and goes by clocks, which may be set back.
        owner = turn.owner
        return self.prompts.forgotten.since(turn.forgets, owner.tenant, owner.session)

    @property
    def context_tokens_max(self) -> int:
        """Longest prompt + answer that every running replica can take."""
        of_replicas = [info.context_tokens_max for info in self.readiness.replicas]
        return min([self.context_tokens_configured, *of_replicas])


Served = TypeVar("Served")


class _NamedModel(BaseModel):
    """Of a body only the model: what else it has is looked at by who serves that."""

    model_config = ConfigDict(extra="ignore")

    model: Any = None


class ModelTable(Generic[Served]):
    """Finds what serves a request by the model that its body names. Pure.

    `front`: before all models. `each`: what there is of each, in the order of `front.models`.
    """

    def __init__(self, front: IngressServices, each: Sequence[Served]) -> None:
        self._front = front
        self._first = each[0]
        self._by_name = {
            name: one for service, one in zip(front.models, each, strict=True) for name in service.model_names
        }

    def of_body(self, body: bytes) -> Served:
        """Return what serves a body; of one that names no model the first, which says what is wrong.

        Raises `ModelNotFound`.
        """
        try:
            asked = _NamedModel.model_validate_json(body).model
        except ValidationError:
            return self._first
        if not isinstance(asked, str) or not asked:
            return self._first
        self._front.refuse_other_model(asked)
        return self._by_name[asked]


State = Literal["loading", "ok", "draining"]

POLL_LOADING_S = 0.5
POLL_READY_S = 2.0
LOOKS_A_POLL = 5  # while Serve names those that have answered: each ingress asks each replica
MISSES_MAX = 3  # polls without an answer until replicas that were up count as gone
TIERS_POLL_S = 10.0
TIER_MISSES_MAX = 2  # failed tier polls until a node's tiers count as gone


def is_due(looks: int, known: Collection[str], answered: Collection[str]) -> bool:
    """Return whether replicas are polled, `looks` after the last time.

    `known`: those that Serve names; empty: not known. `answered`: those that answered then. Seldom while they
    are the same: all ingresses poll all replicas.
    """
    return not known or set(known) != set(answered) or looks >= LOOKS_A_POLL


class Readiness:
    """The ingress's readiness, kept up to date between `start` and `stop`.

    `known`: returns the replicas that Serve names now; by default that is not known.
    """

    def __init__(
        self,
        client: ReplicaClient,
        wanted: int = 1,
        *,
        start_s: float = 0.0,
        must_see: bool = True,
        known: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.wanted = wanted
        """Minimum number of replicas; 0: replicas start on demand."""
        self._client = client
        self._start_s = start_s
        self._must_see = must_see
        self._known = known
        self._seen = asyncio.Event()
        self._replicas: list[ReplicaInfo] = []
        self._was_ready = False
        self._misses = 0
        self._is_draining = False
        self._tier_misses: dict[str, int] = {}  # node id -> consecutive polls without a sign of its tiers
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> State:
        """The state that /health reports."""
        if self._is_draining:
            return "draining"
        return "ok" if self._replicas or self._may_sleep else "loading"

    @property
    def _may_sleep(self) -> bool:
        """Whether there may be no replica at all: a request starts one."""
        return self.wanted == 0

    @property
    def takes_work(self) -> bool:
        """Whether requests are admitted.

        Not before the first replica was ready (if there must be one), and not while draining. A replica
        that is too busy to answer the poll does not stop requests: the queue's own limit does.
        """
        return (self._was_ready or self._may_sleep) and not self._is_draining

    @property
    def replicas(self) -> list[ReplicaInfo]:
        """The replicas that are up."""
        return list(self._replicas)

    @property
    def nodes_without_tiers(self) -> list[str]:
        """Nodes with replicas whose tier actor does not answer: requests there are served by recomputing."""
        return sorted(node for node, misses in self._tier_misses.items() if misses >= TIER_MISSES_MAX)

    def drain(self) -> None:
        """Take no new work from now on, permanently."""
        self._is_draining = True

    async def start(self) -> None:
        """Start polling on the running event loop; with `start_s`, return at the first replica.

        If there is none within `start_s`, raises `TimeoutError`, or returns where one need not be seen.
        """
        if not self._tasks:
            self._tasks = [asyncio.create_task(work()) for work in (self._poll_forever, self._poll_tiers)]
        if self._start_s <= 0 or (self._may_sleep and not self._must_see):
            return
        try:
            async with asyncio.timeout(self._start_s):
                await self._seen.wait()
        except TimeoutError:
            if self._must_see:
                raise
            logger.info("no replica was seen within %g s: requests are refused until one is", self._start_s)

    async def stop(self) -> None:
        """Stop polling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def poll(self) -> None:
        """Poll the replicas once. Raises whatever the client raises."""
        replicas = await self._client.describe()
        if replicas:
            self._replicas, self._misses, self._was_ready = replicas, 0, True
            self._seen.set()
        else:
            self._missed()

    async def poll_tiers(self) -> None:
        """Poll every node's tiers once for a sign of life. Raises whatever the client raises."""
        signs = await self._client.tiers_up()
        self._tier_misses = {
            node: 0 if is_up else self._tier_misses.get(node, 0) + 1 for node, is_up in signs.items()
        }

    def _missed(self) -> None:
        self._misses += 1
        if self._misses >= MISSES_MAX:
            self._replicas = []

    async def _poll_forever(self) -> None:
        looks = 0
        while True:
            looks += 1
            if self._misses or is_due(looks, self._known(), [one.replica_id for one in self._replicas]):
                looks = 0
                try:
                    await self.poll()
                except Exception:  # any control-plane error: the next poll may succeed
                    logger.exception("requesting the replicas' identities failed")
                    self._missed()
            await asyncio.sleep(POLL_READY_S if self._replicas else POLL_LOADING_S)

    async def _poll_tiers(self) -> None:
        while True:
            await asyncio.sleep(TIERS_POLL_S)
            try:
                await self.poll_tiers()
            except Exception:  # as above
                logger.exception("requesting the state of the nodes' tiers failed")


class ReadinessOfAll(Readiness):
    """The readiness of several models: it is that of all, and work is taken if one of them takes it."""

    def __init__(self, each: Sequence[Readiness]) -> None:
        self._each = tuple(each)

    @property
    def wanted(self) -> int:  # type: ignore[override]
        """Minimum number of replicas of all models."""
        return sum(one.wanted for one in self._each)

    @property
    def state(self) -> State:
        """See `Readiness`: ready when every model is."""
        states = [one.state for one in self._each]
        return next((state for state in ("draining", "loading") if state in states), "ok")

    @property
    def takes_work(self) -> bool:
        """See `Readiness`."""
        return any(one.takes_work for one in self._each)

    @property
    def replicas(self) -> list[ReplicaInfo]:
        """See `Readiness`."""
        return [info for one in self._each for info in one.replicas]

    @property
    def nodes_without_tiers(self) -> list[str]:
        """See `Readiness`."""
        return sorted({node for one in self._each for node in one.nodes_without_tiers})

    def drain(self) -> None:
        """See `Readiness`."""
        for one in self._each:
            one.drain()

    async def start(self) -> None:
        """See `Readiness`: of all at once."""
        await asyncio.gather(*(one.start() for one in self._each))

    async def stop(self) -> None:
        """See `Readiness`."""
        await asyncio.gather(*(one.stop() for one in self._each))

    async def poll(self) -> None:
        """See `Readiness`."""
        await asyncio.gather(*(one.poll() for one in self._each))

    async def poll_tiers(self) -> None:
        """See `Readiness`."""
        await asyncio.gather(*(one.poll_tiers() for one in self._each))
