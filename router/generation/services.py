"""The parts of one ingress that its routes share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from configs.settings import Settings
from configs.telemetry import Tracer
from router.auth import ConcurrencyLimit
from router.erasure import Erasures
from router.generation.context import ContextSource, DocumentSource, WindowKeeper
from router.generation.readiness import Readiness
from router.generation.recorder import IngressRecorder
from router.generation.usage import UsageBook
from router.ingresses import DoorPeers, DoorShares, KeptResponses, KnownSessions, SessionTurn
from router.metrics import Metrics
from router.openai import ModelNotFound
from router.prompt import PromptBuilder
from router.routing import ReplicaClient, SessionDirectory


@dataclass(frozen=True)
class IngressServices:
    """The parts a request needs, created once per ingress.

    `context_tokens_configured`: the limit of model and settings; a replica with few pages may allow less.
    `secret`: see `auth.server_secret`. `model`: fingerprint of the only model that may answer.
    `generation`: the defaults of a request's fields. `commit`: of the model on the hub, if it is from there.
    `knowledge`, `documents`: where chats get context from, `compaction`: what makes them fit, if that is
    switched on. `clears`: what all deletions go through. `shares`, `known`, `responses`: what is shared with
    the other ingresses, `peers`; None: there are none.
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
    shares: DoorShares
    known: KnownSessions
    responses: KeptResponses
    clears: Erasures
    peers: DoorPeers | None = None
    recorder: IngressRecorder | None = None
    usage: UsageBook = field(default_factory=UsageBook)
    generation: Mapping[str, float] = field(default_factory=dict)
    commit: str | None = None
    tracer: Tracer | None = None
    knowledge: ContextSource | None = None
    documents: DocumentSource | None = None
    compaction: WindowKeeper | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that a request may send as `model`, the served one first."""
        return tuple(dict.fromkeys((self.model_name, *self.settings.model.aliases)))

    def demand(self) -> AbstractContextManager[None]:
        """Let no work for idle moments run meanwhile."""
        return nullcontext() if self.compaction is None else self.compaction.demand()

    def refuse_other_model(self, asked: str) -> None:
        """Raise `ModelNotFound` if `asked` is no name of the served model."""
        if asked not in self.model_names:
            raise ModelNotFound(asked, self.model_name)

    def is_deleted(self, turn: SessionTurn) -> bool:
        """Return whether a turn's session was deleted since the turn began. Thread-safe."""
        if self.directory.table.cleared_unix_s(turn.tenant, turn.owner.session) >= turn.began_unix_s:
            return True
        # The table learns late of what another ingress deletes; the counter counts all that a tenant does.
        return self.peers is not None and self.prompts.forgets(turn.owner.tenant) != turn.forgets

    @property
    def context_tokens_max(self) -> int:
        """Longest prompt + answer that every running replica can take."""
        of_replicas = [info.context_tokens_max for info in self.readiness.replicas]
        return min([self.context_tokens_configured, *of_replicas])
