"""An ingress over a real engine and real tiers in one process, in which every part traces its requests.

The replica's `generate` and the tier actor's methods are the product's own; only Ray is left out.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from samovar.cache_tiers.actors.tier import TierActor
from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.settings import Settings
from samovar.configs.telemetry import Tracer
from samovar.replicas.messages import Event, GenerateRequest
from samovar.replicas.offload import TierLink
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.tracing import TracedLink
from tests.support.engines.tier_engines import Tiered, tiered
from tests.support.router.router_harness import House

TELEMETRY = TelemetrySettings(export_interval_s=600.0)  # exported when a test asks for it


class _Staying:
    def used(self, now_s: float) -> bool:
        return False


class _Actor(TierActor):
    """The tier actor's methods over a node in this process."""

    def __init__(self, node: Any, tracer: Tracer | None) -> None:
        self._node = node
        self._tracer = tracer
        self._leave = _Staying()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


class _Replica(Replica):
    """A replica whose engine runs each request to its end when it comes."""

    def __init__(self, engine: Tiered, tracer: Tracer | None) -> None:
        self._tracer = tracer
        self._tiered = engine
        self._begin(Settings(), self, replace(engine.built.info, model=""), None)  # type: ignore[arg-type]

    def start(self, deliver: object) -> None:
        """Nothing: `answer` runs the engine."""

    def answer(self, key: int, request: GenerateRequest) -> None:
        engine = self._tiered.built.engine
        refused = engine.requests.add(key, request)
        events: list[tuple[int, Event]] = [] if refused is None else [(key, refused)]
        while engine.has_work:
            events += engine.step()
        self._tiered.work()
        self._distribute(events)

    def abort(self, key: int) -> None:
        self._tiered.built.engine.requests.abort(key)

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was started."""


class TracedHouse(House):
    """`House` with a real replica. `spans()` are those of all processes, after an export."""

    def __init__(self, model_dir: Path, folder: Path, *, is_on: bool = True, **options: Any) -> None:
        self.exported = InMemorySpanExporter()
        names = ("ingress", "replica", "tiers")
        self.tracers = [Tracer(self.exported, TELEMETRY, name) if is_on else None for name in names]
        ingress, replica, tiers = self.tracers

        def link(node: TierLink) -> TierLink:
            actor: TierLink = _Actor(node, tiers)  # type: ignore[assignment]
            return actor if replica is None else TracedLink(actor, replica)

        self.engine = tiered(model_dir, folder, link=link)
        self.replica = _Replica(self.engine, replica)
        super().__init__(tracer=ingress, **options)
        self.replicas.generate = self._generate  # type: ignore[method-assign]

    async def _generate(
        self, request: GenerateRequest, session_key: str
    ) -> AsyncGenerator[list[Event], None]:
        async for events in self.replica.generate(request):
            yield events

    def spans(self) -> Sequence[ReadableSpan]:
        for tracer in self.tracers:
            if tracer is not None:
                tracer._processor.force_flush()
        return self.exported.get_finished_spans()

    def close(self) -> None:
        for tracer in self.tracers:
            if tracer is not None:
                tracer.close()


class BlockedExporter(InMemorySpanExporter):
    """An exporter whose collector does not answer until it is let go, and then refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        self.let_go.wait(30)
        raise ConnectionError("no collector")


def words_of(spans: Sequence[ReadableSpan]) -> Iterator[str]:
    """Everything that leaves the process: each span, with its resource, as JSON."""
    for span in spans:
        yield span.to_json()
