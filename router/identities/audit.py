"""Who did what, when and from where, as JSON lines: refusals, erasures, what administrators do, keys.

No line holds text of prompts or answers, a key, or an id that a client chose: of such an id there is a
digest, by which one who knows it finds the line. Writing is a thread's; no request waits for it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samovar.configs.atomic_file import create_private, lock_beside
from samovar.router.auth import Caller
from samovar.router.paths import KEY_ROUTE, KEYS, ROTATE_ROUTE

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 16 << 20
FILES_MAX = 8
"""Files that are kept, the one that is written included: `audit`, `audit.1` (the one before) and so on."""
LOCK_S = 5.0
QUEUE_MAX = 1024
"""Lines that wait to be written; more are counted and left out."""
STOP_S = 5.0
REFUSALS_PER_S = 5.0
REFUSALS_AT_ONCE = 50.0
"""Refusals that are written: who guesses keys must not fill the files, which would push out what matters."""
FORWARDED_CHARS = 200
DIGEST_CHARS = 16
SCRAPED = frozenset({"/metrics", "/health"})
"""Asked by machines every few seconds: only refusals are written."""
CLEARS = frozenset({"/cache/clear", "/reset_prefix_cache"})
OPERATORS = CLEARS | {"/cache/stats"}
SHOWS_ALL = frozenset({"/v1/live"})
"""Shows an administrator every tenant, also one who has a tenant; a tenant only itself."""
KEY_ROUTES = frozenset({KEYS, KEY_ROUTE, ROTATE_ROUTE})

Line = Mapping[str, Any]


class AuditLog:
    """The file at `path`, and those before it. Safe beside other threads and processes that write to it."""

    def __init__(self, path: Path, *, bytes_max: int = FILE_BYTES_MAX, files: int = FILES_MAX) -> None:
        self.path = path.expanduser()
        self._bytes_max = bytes_max
        self._files = files

    def write(self, line: Line) -> None:
        """Add a line, with the time; begin another file if this one would be too large. Raises `OSError`."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        data = (json.dumps({"time": now, **line}) + "\n").encode()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_beside(self.path, LOCK_S):
            if self._has_no_room_for(len(data)):
                self._turn()
            file = self._opened()
            try:
                size = os.fstat(file).st_size
                if os.write(file, data) < len(data):  # half a line would spoil the next one
                    os.ftruncate(file, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)

    def _has_no_room_for(self, nbytes: int) -> bool:
        try:
            size = os.lstat(self.path).st_size
        except FileNotFoundError:
            return False
        return size > 0 and size + nbytes > self._bytes_max

    def _opened(self) -> int:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return create_private(os, str(self.path), os.O_APPEND)

    def _turn(self) -> None:
        """Move each file one further; the oldest goes."""
        for number in range(self._files - 1, 0, -1):
            source = self.path if number == 1 else Path(f"{self.path}.{number - 1}")
            if source.exists():
                source.replace(f"{self.path}.{number}")


class RefusalPace:
    """Says which refusals are written, and how many were left out before each. Pure."""

    def __init__(self) -> None:
        self._credit, self._at_s, self._left_out = REFUSALS_AT_ONCE, 0.0, 0

    def take(self, now_s: float) -> int | None:
        """Return how many were left out since the last one that was written; None: leave this one out."""
        self._credit = min(REFUSALS_AT_ONCE, self._credit + (now_s - self._at_s) * REFUSALS_PER_S)
        self._at_s = now_s
        if self._credit < 1:
            self._left_out += 1
            return None
        self._credit -= 1
        left_out, self._left_out = self._left_out, 0
        return left_out


class AuditQueue:
    """Lines on their way into the file. `put` never blocks and never raises."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._lines: queue.Queue[Line | None] = queue.Queue(QUEUE_MAX)
        self._lost = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="samovar-audit", daemon=True)

    def start(self) -> None:
        """Write from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, for a few seconds at most, and end."""
        if self._thread.ident is not None:
            with suppress(queue.Full):  # a disk that takes nothing must not hold up the stop
                self._lines.put(None, timeout=STOP_S)
            self._thread.join(STOP_S)

    def put(self, line: Line) -> None:
        """Hand a line over. Event loop only."""
        try:
            self._lines.put_nowait({**line, "lost": self._lost} if self._lost else line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._log.write(line)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    logger.error("the audit log (auth.audit_file) cannot be written: %s", error)
                self._is_failing = True


class AuditTrail:
    """ASGI middleware, outside of what asks for keys. `label`: the route of a path, as in metrics."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        queue: AuditQueue,
        label: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._queue = queue
        self._label = label
        self._clock = clock
        self._pace = RefusalPace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, request_id = 499, ""

        async def seen(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = Headers(raw=list(message["headers"])).get("x-request-id", "")
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            self._note(scope, status, request_id)

    def _note(self, scope: Scope, status: int, request_id: str) -> None:
        state: Mapping[str, Any] = scope.get("state") or {}
        caller: Caller | None = state.get("caller")
        route = self._label(scope["path"])
        event = event_of(caller, scope["method"], route, status)
        if event is None:
            return
        line: dict[str, Any] = {
            "event": event,
            "who": told_of(caller),
            "what": f"{scope['method']} {route}",
            "status": status,
            "from": (scope.get("client") or ("",))[0],
            "request_id": request_id,
        }
        headers = Headers(scope=scope)
        if forwarded := headers.get("x-forwarded-for"):
            line["says_it_is_for"] = forwarded[:FORWARDED_CHARS]  # a proxy's word, or any client's
        line |= {name: state[name] for name in ("of_tenant", "key") if name in state}
        if event == "erased" and scope.get("path_params"):
            line["id_sha256"] = {name: digest(value) for name, value in scope["path_params"].items()}
        if event == "refused":
            left_out = self._pace.take(self._clock())
            if left_out is None:
                return
            line |= {"left_out": left_out} if left_out else {}
        self._queue.put(line)


def event_of(caller: Caller | None, method: str, route: str, status: int) -> str | None:
    """Return what kind of event an answered request is; None: none that is written."""
    if status in (401, 403):
        return "refused"
    if route in SCRAPED or caller is None:
        return None
    if route in KEY_ROUTES:
        return "admin" if method == "GET" else "keys"
    if method == "DELETE" or route in CLEARS:
        return "erased"
    is_administrators = caller.is_admin and (caller.tenant is None or route in SHOWS_ALL)
    return "admin" if is_administrators or route in OPERATORS else None


def told_of(caller: Caller | None) -> dict[str, Any]:
    """Return what a line says of a caller; empty: the caller is not known."""
    if caller is None:
        return {}
    who: dict[str, Any] = {"tenant": caller.tenant, "is_admin": caller.is_admin}
    return who | ({"by": caller.credential} if caller.credential else {})


def digest(value: object) -> str:
    """Return the beginning of the SHA-256 of an id, in hexadecimal digits."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:DIGEST_CHARS]
