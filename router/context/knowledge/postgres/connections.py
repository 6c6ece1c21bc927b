"""Connections to PostgreSQL: a bounded number, and a bound of every wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo
from psycopg.abc import Params, PQGen

from samovar.configs.optional_sections import PostgresSettings
from samovar.router.context.knowledge.entries import KnowledgeError, StoreBusy

Result = TypeVar("Result")

GRACE_S = 5.0
"""How much longer than the server's own limit of a statement an answer is waited for."""
KEEPALIVE_S = 10
SAID_CHARS_MAX = 300


class Connection(psycopg.Connection[Any]):
    """A connection whose answers do not take for ever, also of a server that hangs. `answer_s`: seconds.

    What PostgreSQL cannot keep (NUL) is not found there; only to insert it is an error.
    """

    answer_s: float = 60.0

    def execute(self, query: Any, params: Params | None = None, **how: Any) -> psycopg.Cursor[Any]:
        if isinstance(params, list | tuple) and not _inserts(query):
            params = [_sought(one) for one in params]
        return super().execute(query, params, **how)

    def wait(self, gen: PQGen[Result], interval: float = 0.1, timeout: float | None = None) -> Result:
        try:
            return super().wait(gen, interval, self.answer_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:
            self.pgconn.finish()  # an answer that comes later would be taken for that of the next statement
            raise psycopg.OperationalError(f"no answer within {self.answer_s:g} s") from None


def _inserts(query: object) -> bool:
    return isinstance(query, str | bytes) and query[:6] in ("INSERT", b"INSERT")


def _sought(value: Any) -> Any:
    """Return a value as it is looked up: a text that no row can have becomes another one of these."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    return [_sought(one) for one in value] if isinstance(value, list) else value


class Connections:
    """At most `connections_max` connections, made when they are needed and kept. Thread-safe.

    `wait_s`: how long a call waits for one. After a connection failed, calls of the next `retry_s` seconds
    are refused at once. No error quotes the URL. Raises `KnowledgeError` if the URL is none.
    """

    def __init__(
        self, settings: PostgresSettings, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._wait_s = wait_s
        self._clock = clock
        self._slots = threading.BoundedSemaphore(settings.connections_max)
        self._lock = threading.Lock()  # of what follows
        self._idle: list[Connection] = []
        self._refusal = ""
        self._refused_until_s = -math.inf
        self._is_closed = False
        assert settings.url is not None
        try:
            asked = conninfo.conninfo_to_dict(settings.url.get_secret_value())
        except psycopg.ProgrammingError:  # its text may quote the password
            raise KnowledgeError("knowledge.postgres.url is no URL that libpq understands") from None
        self._password = str(asked.get("password") or "")
        own: dict[str, Any] = {
            "application_name": "samovar",
            "target_session_attrs": "read-write",
            "keepalives_idle": KEEPALIVE_S,
            "keepalives_interval": KEEPALIVE_S,
            "keepalives_count": 3,
            "tcp_user_timeout": int(1000 * settings.statement_s),
            **asked,
            "connect_timeout": math.ceil(settings.connect_s),
        }
        self._to = conninfo.make_conninfo("", **own)

    @contextmanager
    def lease(self, first: Callable[[Connection], None]) -> Iterator[Connection]:
        """Lend a connection after `first`, which is quick; if a kept one died, `first` is run on a new one.

        It is kept afterwards unless it broke. Raises `KnowledgeError`.
        """
        if not self._slots.acquire(timeout=self._wait_s):
            most = self._settings.connections_max
            raise StoreBusy(f"all {most} connections to the database are in use (connections_max)")
        try:
            lent = self._begun(first)
            try:
                yield lent
            finally:
                self._take_back(lent)
        finally:
            self._slots.release()

    def _begun(self, first: Callable[[Connection], None]) -> Connection:
        kept = self._kept()
        if kept is not None:
            try:
                return self._first(first, kept)
            except psycopg.Error as error:
                if not kept.closed:
                    self._take_back(kept)
                    raise self.told(error) from None
            self._drop_idle()  # they are as old as this one
        made = self._connect()
        try:
            return self._first(first, made)
        except psycopg.Error as error:
            made.close()
            raise self.told(error) from None

    def _first(self, first: Callable[[Connection], None], connection: Connection) -> Connection:
        connection.answer_s = self._settings.connect_s
        first(connection)
        connection.answer_s = self._settings.statement_s + GRACE_S
        return connection

    def _kept(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self) -> Connection:
        with self._lock:
            if self._clock() < self._refused_until_s:
                raise KnowledgeError(self._refusal)
        try:
            made = Connection.connect(self._to, autocommit=True, prepare_threshold=None)
        except psycopg.Error as error:
            refusal = f"the knowledge base's database cannot be reached: {self._said(error)}"
            with self._lock:
                self._refusal = refusal
                self._refused_until_s = self._clock() + self._settings.retry_s
            raise KnowledgeError(refusal) from None
        return made

    def _take_back(self, lent: Connection) -> None:
        with self._lock:
            if not self._is_closed and not lent.closed and lent.info.transaction_status == 0:
                self._idle.append(lent)
                return
        lent.close()

    def _said(self, error: psycopg.Error) -> str:
        said = " ".join(str(error).split()) or type(error).__name__
        if self._password:
            said = said.replace(self._password, "***")
        return said[:SAID_CHARS_MAX].rstrip(".")

    def told(self, error: psycopg.Error) -> KnowledgeError:
        """Return an error of the database as one of the store."""
        if isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
            return StoreBusy("the knowledge base is busy: another writer did not finish in time")
        if isinstance(error, psycopg.errors.QueryCanceled):
            limit_s = self._settings.statement_s
            return StoreBusy(f"the database took longer than {limit_s:g} s (knowledge.postgres.statement_s)")
        # Only the first line, and no detail: those of data errors quote the row.
        primary = error.diag.message_primary or self._said(error)
        said = primary if error.diag.sqlstate is None else f"{primary} ({error.diag.sqlstate})"
        return KnowledgeError(f"the knowledge base's database fails: {said[:SAID_CHARS_MAX]}")

    def close(self) -> None:
        """Close what is kept; what is lent is closed when it comes back."""
        with self._lock:
            self._is_closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()
