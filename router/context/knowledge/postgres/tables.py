"""`Tables` in PostgreSQL: the statements of the embedded store's tables, in its database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from samovar.router.context.knowledge.entries import Rows
from samovar.router.context.knowledge.postgres.connections import Connection
from samovar.router.context.knowledge.postgres.database import Database


class _Statements:
    """See `Rows`: statements whose values are `?`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self.connection.execute(statement.replace("?", "%s").encode(), values)


def take_turns(db: Connection, tenant: str, of: str) -> None:
    """Let other writers of a tenant's rows wait: what is counted, or erased, must be all."""
    db.execute("SELECT pg_advisory_xact_lock(hashtext(%s), hashtext(%s))", (f"samovar {of}", tenant))


class PostgresTables:
    """See `Tables`."""

    skip_locked = " FOR UPDATE SKIP LOCKED"

    def __init__(self, database: Database) -> None:
        self._database = database

    def by(self, index: str) -> str:
        return ""

    @contextmanager
    def writing(self, tenant: str, of: str = "") -> Iterator[Rows]:
        with self._database.transaction(tenant) as db:
            if of:
                take_turns(db, tenant, of)
            yield _Statements(db)

    @contextmanager
    def reading(self, tenant: str) -> Iterator[Rows]:
        with self._database.transaction(tenant, "read") as db:
            yield _Statements(db)

    def everyone(self, rows: Rows) -> AbstractContextManager[None]:
        assert isinstance(rows, _Statements)
        return self._database.everyone(rows.connection)

    def erased(self) -> None:
        self._database.vacuum()

    def close(self) -> None:
        """Leave the database open: it is the store's."""
