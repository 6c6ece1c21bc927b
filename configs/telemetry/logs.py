"""What a process logs, and how: plain text, or JSON with the ids of request and trace. Never a prompt's text.

Messages hold no prompts by the rules of the house; an exception's own message may quote what it was given,
so JSON has only its type and where it was raised.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from samovar.configs.optional_sections import TelemetrySettings

OF_REQUEST = "request %s"
"""Messages of one request begin like this: so its id is known on every thread, and in every process."""

_REQUEST: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))


def noted_request(request_id: str, trace_id: str) -> None:
    """Note which request this task serves from now on, for its log lines; `trace_id`: empty: not traced."""
    _REQUEST.set((request_id, trace_id))


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; `extra={"fields": {...}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        request_id, trace_id = _REQUEST.get()
        args = record.args
        if not request_id and isinstance(args, tuple) and args and str(record.msg).startswith(OF_REQUEST):
            request_id = str(args[0])
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: found for name, found in (("request_id", request_id), ("trace_id", trace_id)) if found}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])
            line["exception"] = record.exc_info[0].__name__
            line["raised_at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        # Of a value that JSON has not, the type: a line must not be lost, nor hold what was not meant for it.
        return json.dumps(line, ensure_ascii=False, default=lambda value: type(value).__name__)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `set_up_logs` has added."""


def set_up_logs(settings: TelemetrySettings, stream: TextIO | None = None) -> None:
    """Set this process's loggers up, to `stream` (stderr). As Python has it with the default settings."""
    if settings.log_format == "text" and settings.log_level == "warning":
        return
    handler = _Handler(stream or sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("samovar").setLevel(settings.log_level.upper())
