"""The parts of one ingress that its routes share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from samovar.configs.settings import Settings
from samovar.configs.telemetry import Tracer
from samovar.router.auth import ConcurrencyLimit
from samovar.router.erasure import Erasures
from samovar.router.generation.readiness import Readiness
from samovar.router.generation.recorder import IngressRecorder
from samovar.router.generation.stages import PromptStage
from samovar.router.generation.usage import UsageBook
from samovar.router.ingresses import Ingresses, IngressShares, KnownSessions, SessionTurn, SharedResponses
from samovar.router.metrics import Metrics
from samovar.router.openai import ModelNotFound
from samovar.router.prompt import PromptBuilder
from samovar.router.routing import ReplicaClient, SessionDirectory


@dataclass(frozen=True)
class IngressServices:
    """The parts a request needs, created once per ingress.

    `context_tokens_configured`: the limit of model and settings; a replica with few pages may allow less.
    `secret`: see `auth.server_secret`. `model`: fingerprint of the only model that may answer.
    `generation`: the defaults of a request's fields. `commit`: of the model on the hub, if it is from there.
    `stages`: what chats pass on their way to their prompts, in this order, as far as it is switched on.
    `clears`: what all deletions go through. `shares`, `known`, `responses`: what is shared with the other
    `ingresses`; None: there is no other.
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

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that a request may send as `model`, the served one first."""
        return tuple(dict.fromkeys((self.model_name, *self.settings.model.aliases)))

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
            raise ModelNotFound(asked, self.model_name)

    def is_deleted(self, turn: SessionTurn) -> bool:
        """Return whether a turn's session was deleted since the turn began. Thread-safe."""
        if self.directory.table.cleared_unix_s(turn.tenant, turn.owner.session) >= turn.began_unix_s:
            return True
        # The table learns late of what another ingress deletes; the counter counts all that a tenant does.
        return self.ingresses is not None and self.prompts.forgets(turn.owner.tenant) != turn.forgets

    @property
    def context_tokens_max(self) -> int:
        """Longest prompt + answer that every running replica can take."""
        of_replicas = [info.context_tokens_max for info in self.readiness.replicas]
        return min([self.context_tokens_configured, *of_replicas])
