"""Traces of requests by OpenTelemetry: one a request, through the ingress, a replica and the tier actors.

A trace's context is handed on as the text of W3C's `traceparent`; empty: the request is not traced, and costs
nothing. Spans are exported by a thread of their own, from a bounded queue: a collector that is slow or gone
loses spans, never a request. No attribute holds text of prompts or answers. Imports OpenTelemetry only where
a tracer is opened: without `telemetry.otlp_endpoint` no process does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from samovar.configs.optional_sections import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

Value = str | int | float | bool
SERVICE = "samovar"
NS_PER_S = 1_000_000_000


class Span(AbstractContextManager["Span"]):
    """One part of a request, from its creation until `end`; as a context manager until it is left.

    Without a span of OpenTelemetry's it is empty: every method does nothing.
    """

    __slots__ = ("_span", "_tracer")

    def __init__(self, span: OtelSpan | None = None, tracer: Tracer | None = None) -> None:
        self._span = span
        self._tracer = tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("" if kind is None else kind.__name__)

    @property
    def header(self) -> str:
        """Its context as a `traceparent` for the client; empty if there is no trace."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    @property
    def trace(self) -> str:
        """Its context for what is done for it elsewhere; empty if that is not to be traced."""
        return self.header if self._span is not None and self._span.is_recording() else ""

    @property
    def trace_id(self) -> str:
        """The id by which logs name the trace; empty if it is not recorded."""
        return self.trace[3:35]

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes: numbers, and words of Samovar's own or of its operator."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def part(
        self, name: str, start_s: float, end_s: float, attributes: Mapping[str, Value] | None = None
    ) -> None:
        """Record a part of it that is over. Times are of the monotonic clock."""
        if self._tracer is not None and self.trace:
            self._tracer.record(name, self.trace, start_s, end_s, attributes)

    def fail(self, error: str) -> None:
        """Mark it as failed. `error`: a code or the name of a class, never a message."""
        if self._span is not None:
            _fail(self._span, error)

    def end(self, error: str = "") -> None:
        """End it; only the first call counts. `error`: as in `fail`, if it failed."""
        if self._span is None or not self._span.is_recording():
            return
        if error:
            _fail(self._span, error)
        self._span.end()


NO_SPAN = Span()


def _fail(span: OtelSpan, error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR)
    span.set_attribute("error.type", error)


class Tracer:
    """Makes the spans of one process. Thread-safe. `clock`: seconds of the times that `record` is given.

    `export`: receives the spans; `process`: what this one is: ingress, replica or tiers.
    """

    def __init__(
        self,
        export: SpanExporter,
        settings: TelemetrySettings,
        process: str,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not OpenTelemetry's global provider: that is Ray's to set, and nothing else here is traced.
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create({"service.name": SERVICE, "samovar.process": process}),
            shutdown_on_exit=False,  # it would wait for a collector that is gone
        )
        self._processor = BatchSpanProcessor(
            export,
            max_queue_size=settings.queue_max,
            schedule_delay_millis=settings.export_interval_s * 1000,
            max_export_batch_size=min(settings.batch_max, settings.queue_max),
        )
        self._provider.add_span_processor(self._processor)
        self._tracer: OtelTracer = self._provider.get_tracer(SERVICE)
        self._context = TraceContextTextMapPropagator()
        self._timeout_s = settings.export_timeout_s
        self._clock = clock
        self._wall_ns = wall_ns

    def request(self, name: str, headers: Mapping[str, str]) -> Span:
        """Begin the span of a request: in the client's trace, if its `traceparent` is valid, or in a new one.

        The client's sampling decision holds; without one, `telemetry.sample_ratio` decides.
        """
        from opentelemetry.trace import SpanKind

        carrier = {key: value for key in ("traceparent", "tracestate") if (value := headers.get(key))}
        context = self._context.extract(carrier)
        return Span(self._tracer.start_span(name, context, kind=SpanKind.SERVER), self)

    def begin(self, name: str, parent: str) -> Span:
        """Begin a span below `parent`, a span's `trace`; an empty span if that is empty."""
        if not parent:
            return NO_SPAN
        return Span(self._tracer.start_span(name, self._context.extract({"traceparent": parent})), self)

    def record(
        self,
        name: str,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Value] | None = None,
        error: str = "",
    ) -> None:
        """Record a span that is over, below `parent`; nothing if that is empty. Times are of `clock`."""
        if not parent:
            return
        now_s, now_ns = self._clock(), self._wall_ns()
        context = self._context.extract({"traceparent": parent})
        start_ns = now_ns - int((now_s - start_s) * NS_PER_S)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        if error:
            _fail(span, error)
        span.end(now_ns - int((now_s - max(start_s, end_s)) * NS_PER_S))

    def close(self) -> None:
        """Export what waits, and end; blocks for at most an export's timeout."""
        ending = threading.Thread(target=self._processor.shutdown, name="tracer-close", daemon=True)
        ending.start()
        ending.join(self._timeout_s)


def open_tracer(settings: TelemetrySettings, process: str) -> Tracer | None:
    """Return the tracer of this process; None without `telemetry.otlp_endpoint`.

    Raises `ImportError` without the extra `otel`, which `require_telemetry` looks for before.
    """
    if settings.otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    export = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=settings.export_timeout_s)
    return Tracer(export, settings, process)
