"""What a process says of itself: traces of requests, and logs. Neither holds text of prompts or answers."""

from samovar.configs.telemetry.logs import noted_request, set_up_logs
from samovar.configs.telemetry.tracing import NO_SPAN, Span, Tracer, Value, open_tracer

__all__ = [
    "NO_SPAN",
    "Span",
    "Tracer",
    "Value",
    "noted_request",
    "open_tracer",
    "set_up_logs",
]
