"""Transactions of one tenant in PostgreSQL, and the tables, which are made and migrated when first needed."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, LiteralString

import psycopg
from psycopg import sql

from samovar.configs.optional_sections import PostgresSettings
from samovar.router.context.knowledge.entries import KnowledgeError
from samovar.router.context.knowledge.postgres.connections import Connection, Connections
from samovar.router.context.knowledge.postgres.schema import (
    MIGRATIONS,
    OF_DOCUMENTS,
    SETTING_EVERYONE,
    SETTING_TENANT,
    TABLES,
    VECTORS,
    VECTORS_TABLE,
)

logger = logging.getLogger(__name__)

Mode = Literal["read", "snapshot", "write"]
MODES: dict[Mode, LiteralString] = {
    "read": "READ COMMITTED READ ONLY",
    "snapshot": "REPEATABLE READ READ ONLY",
    "write": "READ COMMITTED READ WRITE",
}
REWRITE_S = 24 * 3600.0
NO_VECTOR = (
    "the database has no extension `vector`: install pgvector and let a superuser run CREATE EXTENSION "
    "vector in it, or set knowledge.embedder=none"
)


class Database:
    """Transactions over a bounded number of connections. Thread-safe.

    `busy_s`: how long a write waits for that of another. `has_vectors`: whether there are vectors. Raises
    `KnowledgeError` if it cannot be opened; without `must_open` that is logged, and every use tries again.
    """

    def __init__(
        self,
        settings: PostgresSettings,
        *,
        busy_s: float,
        has_vectors: bool,
        must_open: bool = True,
    ) -> None:
        self.schema = settings.schema_name
        self._statement_s = settings.statement_s
        self._busy_s = busy_s
        self._has_vectors = has_vectors
        self._connections = Connections(settings, busy_s)
        self._local = threading.local()
        self._opening = threading.Lock()
        self._is_open = False
        self._path = self.schema
        try:
            self._open()
        except KnowledgeError as error:
            if must_open:
                raise
            logger.error("%s. What does not need it goes on; each call tries again.", error)

    @property
    def is_writing(self) -> bool:
        """Whether this thread is in a transaction."""
        return getattr(self._local, "current", None) is not None

    @contextmanager
    def transaction(self, tenant: str, mode: Mode = "write") -> Iterator[Connection]:
        """Give a connection whose statements see a tenant's rows only.

        What is written is kept as a whole or not at all; "snapshot": all statements see one state. In a
        thread that is within a transaction, it is a part of that one, which is undone alone if it fails and
        the outer one goes on. Raises `KnowledgeError` for what
        PostgreSQL raises.
        """
        current: Connection | None = getattr(self._local, "current", None)
        if current is not None:
            try:
                with self._part(current, tenant, mode):
                    yield current
            except psycopg.Error as error:
                raise self._connections.told(error) from None
            return
        if not self._is_open:
            self._open()
        with self._connections.lease(partial(self._begin, MODES[mode])) as connection:
            self._local.current, self._local.seen = connection, ""
            try:
                self._see(connection, tenant)
                yield connection
            except BaseException as error:
                self._roll_back(connection)
                if isinstance(error, psycopg.Error):
                    raise self._connections.told(error) from None
                raise
            else:
                self._commit(connection, mode == "write")
            finally:
                self._local.current = None

    @contextmanager
    def _part(self, connection: Connection, tenant: str, mode: Mode) -> Iterator[None]:
        outer = self._local.seen
        if mode != "write":
            self._see(connection, tenant)
            yield
            self._see(connection, outer)
            return
        connection.execute("SAVEPOINT part")  # the innermost of a name is meant
        try:
            self._see(connection, tenant)
            yield
        except BaseException:
            with suppress(psycopg.Error):  # where the connection is gone, all is undone
                connection.execute("ROLLBACK TO part; RELEASE part")
            self._local.seen = outer  # as it was at the savepoint
            raise
        connection.execute("RELEASE part")
        self._see(connection, outer)

    def _see(self, connection: Connection, tenant: str) -> None:
        if self._local.seen != tenant:
            connection.execute("SELECT set_config(%s, %s, true)", (SETTING_TENANT, tenant))
            self._local.seen = tenant

    @contextmanager
    def everyone(self, connection: Connection) -> Iterator[None]:
        """Show a transaction the rows of all tenants, for a while."""
        connection.execute("SELECT set_config(%s, 'on', true)", (SETTING_EVERYONE,))
        yield  # an error ends the transaction, and this with it
        connection.execute("SELECT set_config(%s, 'off', true)", (SETTING_EVERYONE,))

    def _begin(self, mode: LiteralString, connection: Connection) -> None:
        # In one message, and for this transaction only: nothing is left for who gets the connection next,
        # also from a pooler between here and the server.
        values = {
            SETTING_TENANT: "",
            SETTING_EVERYONE: "off",
            "search_path": self._path,
            "statement_timeout": f"{round(1000 * self._statement_s)}ms",
            "lock_timeout": f"{round(1000 * self._busy_s)}ms",
            # A machine that is cut off in a transaction does not hold up others for ever.
            "idle_in_transaction_session_timeout": f"{round(2000 * self._statement_s)}ms",
            "jit": "off",
        }
        calls = [
            sql.SQL("set_config({}, {}, true)").format(sql.Literal(name), sql.Literal(value))
            for name, value in values.items()
        ]
        begin = sql.SQL("BEGIN ISOLATION LEVEL {}; SELECT {}")
        connection.execute(begin.format(sql.SQL(mode), sql.SQL(", ").join(calls)))

    def _roll_back(self, connection: Connection) -> None:
        with suppress(psycopg.Error):
            connection.execute("ROLLBACK")

    def _commit(self, connection: Connection, writes: bool) -> None:
        try:
            # Of a transaction that has failed, COMMIT says ROLLBACK.
            ended = connection.execute("COMMIT").statusmessage
        except psycopg.Error as error:
            if writes and connection.closed:
                message = (
                    "the database went away while it kept a change: look whether it did, before you repeat it"
                )
                raise KnowledgeError(message) from None
            raise self._connections.told(error) from None
        if ended != "COMMIT":
            raise KnowledgeError("nothing was written: a part of the change had failed")

    def has(self, table: str) -> bool:
        """Whether there is such a table."""
        with self.transaction("", "read") as db:
            return self._is_there(db, table)

    def vacuum(self) -> None:
        """Give free what deleted rows take. If that takes long, PostgreSQL goes on with it later."""
        if self.is_writing:
            return  # it cannot be done within a transaction
        try:
            self._alone("VACUUM {}", ", ".join(self._tables()))
        except KnowledgeError as error:
            logger.warning("deleted rows are not given free now: %s", error)

    def rewrite(self) -> None:
        """Rewrite each table without what was deleted; its readers and writers wait meanwhile."""
        for table in self._tables():
            self._alone("VACUUM (FULL) {}", table, REWRITE_S)

    def _tables(self) -> list[str]:
        return [
            f"{self.schema}.{table}"
            for table in (*TABLES, *OF_DOCUMENTS, VECTORS)
            if table != VECTORS or self.has(VECTORS)
        ]

    def _alone(self, statement: LiteralString, what: str, answer_s: float | None = None) -> None:
        """Run what PostgreSQL runs in no transaction."""

        with self._connections.lease(_ping) as connection:
            if answer_s is not None:
                connection.answer_s = answer_s
            try:
                connection.execute(statement.format(what).encode())
            except psycopg.Error as error:
                raise self._connections.told(error) from None

    def _open(self) -> None:
        with self._opening:
            if self._is_open:
                return
            with self._connections.lease(partial(self._begin, MODES["write"])) as connection:
                try:
                    self._prepare(connection)
                    connection.execute("COMMIT")
                except BaseException as error:
                    self._roll_back(connection)
                    if isinstance(error, psycopg.Error):
                        raise self._connections.told(error) from None
                    raise
            self._is_open = True

    def _prepare(self, db: Connection) -> None:
        """Make or migrate the tables, if that is due: one of several ingresses does it, the others wait."""
        encoding = db.execute("SHOW server_encoding").fetchone()
        if encoding != ("UTF8",):
            raise KnowledgeError("the database's encoding is not UTF8: it cannot keep every text")
        if self._found(db) < len(MIGRATIONS) or (self._has_vectors and not self._is_there(db, VECTORS)):
            digest = hashlib.sha256(f"samovar knowledge {self.schema}".encode()).digest()
            db.execute("SELECT pg_advisory_xact_lock(%s)", (int.from_bytes(digest[:8], "big", signed=True),))
            self._migrate(db, self._found(db))
        row = db.execute(
            "SELECT nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
            " WHERE extname = 'vector'"
        ).fetchone()
        self._path = f'{self.schema}, "{row[0]}"' if row is not None else self.schema

    def _found(self, db: Connection) -> int:
        """Return how many migrations the tables have had. Raises `KnowledgeError` if they are newer."""
        if not self._is_there(db, "format"):
            return 0
        row = db.execute(f"SELECT version FROM {self.schema}.format").fetchone()
        found = 0 if row is None else int(row[0])
        if found > len(MIGRATIONS):
            raise KnowledgeError(
                f"the schema {self.schema} has format {found}, and this version reads {len(MIGRATIONS)}"
            )
        return found

    def _is_there(self, db: Connection, table: str) -> bool:
        # Not by to_regclass(): it may answer from before another ingress made the table.
        query = "SELECT FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = %s"
        return db.execute(query, (self.schema, table)).fetchone() is not None

    def _migrate(self, db: Connection, found: int) -> None:
        if found == 0:
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
            db.execute(f"CREATE TABLE {self.schema}.format(version integer NOT NULL)")
            db.execute(f"INSERT INTO {self.schema}.format VALUES (0)")
        for migration in MIGRATIONS[found:]:
            db.execute(migration)
        db.execute(f"UPDATE {self.schema}.format SET version = %s", (len(MIGRATIONS),))
        if self._has_vectors and not self._is_there(db, VECTORS):
            self._make_vectors(db)

    def _make_vectors(self, db: Connection) -> None:
        try:
            if db.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone() is None:
                db.execute("CREATE EXTENSION vector")
            row = db.execute(
                "SELECT nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
                " WHERE extname = 'vector'"
            ).fetchone()
            assert row is not None
            db.execute("SELECT set_config('search_path', %s, true)", (f'{self.schema}, "{row[0]}"',))
            db.execute(VECTORS_TABLE)
        except (psycopg.errors.FeatureNotSupported, psycopg.errors.InsufficientPrivilege) as error:
            logger.warning("no extension `vector`: %s", error.diag.message_primary)
            raise KnowledgeError(NO_VECTOR) from None

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()


def _ping(connection: Connection) -> None:
    connection.execute("SELECT 1")
