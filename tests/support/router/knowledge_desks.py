"""A knowledge base's store on a test's desk, the embedded one or a schema of a PostgreSQL; and a clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import SecretStr

from samovar.configs.optional_sections import KnowledgeSettings, PostgresSettings
from samovar.router.context.knowledge import Change, Content, EntryRef, Limits, Provenance, SqliteStore
from samovar.router.context.knowledge.postgres.store import PostgresStore
from tests.support.constants import tuned

if TYPE_CHECKING:
    from tests.support.services.postgres_server import PostgresServer

LIMITS = Limits(entries_max=10_000, bytes_max=2**24, tags_max=3)
ME = Provenance("me", "because", "turn-1")
TURNS_MAX = 10


def content(text: str, title: str = "", kind: str = "gotcha", topics: tuple[str, ...] = ()) -> Content:
    return Content(kind, title, text, topics)  # type: ignore[arg-type]


def axis(place: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    vector = np.zeros(4, np.float32)
    vector[place] = 1
    return vector


class Desk:
    """A store. `code`: an expression that opens it in another process, which imports `IMPORTS`."""

    IMPORTS = (
        "from pathlib import Path\nfrom samovar.router.context.knowledge import *\n"
        "from tests.support.router.knowledge_desks import postgres\n"
    )
    code: str
    is_sealed = False

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.store: Any = self.open()

    def open(self, embedder: str = "axis") -> Any:
        """Open it once more."""
        raise NotImplementedError

    def seen(self, words: list[bytes]) -> list[bytes]:
        """Which words, in lower case, somebody sees who may read everything that an erasure is to empty."""
        raise NotImplementedError

    def add(self, text: str, tenant: str = "tea", place: int | None = None, **fields: str) -> EntryRef:
        vector = None if place is None else axis(place)
        (made,) = self.store.write(tenant, [Change(content(text, **fields), ME, vector=vector)], LIMITS)
        return made.ref

    def change(self, entry: str, text: str, base: int | None = None, operation: str = "update") -> EntryRef:
        change = Change(content(text), ME, entry, operation, base, vector=axis(0))  # type: ignore[arg-type]
        (made,) = self.store.write("tea", [change], LIMITS)
        return made.ref

    def found(self, word: str, tenant: str = "tea") -> list[str]:
        return [ref.entry for ref, _ in self.store.by_words(tenant, [word], (), 10)]


class SqliteDesk(Desk):
    """A store of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code = f"SqliteStore(Path({str(path)!r}), busy_s=60)"
        super().__init__()

    def open(self, embedder: str = "axis") -> SqliteStore:
        return SqliteStore(self.path, embedder=embedder, turns_max=TURNS_MAX, clock=lambda: self.now_s)

    def seen(self, words: list[bytes]) -> list[bytes]:
        raw = b"".join(path.read_bytes().lower() for path in self.path.parent.iterdir())
        return [word for word in words if word in raw]


def postgres_settings(url: str, schema: str, busy_s: float = 60, **settings: Any) -> KnowledgeSettings:
    own = PostgresSettings(url=SecretStr(url), schema_name=schema, connections_max=8, **settings)
    return tuned(KnowledgeSettings(postgres=own, busy_s=busy_s), turns_max=TURNS_MAX)


def postgres(
    url: str, schema: str, embedder: str = "", clock: Callable[[], float] | None = None
) -> PostgresStore:
    more = {} if clock is None else {"clock": clock}
    return PostgresStore(postgres_settings(url, schema), embedder=embedder, **more)


class PostgresDesk(Desk):
    """A store of a schema of its own, as a role without privileges."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.schema = f"desk_{secrets.token_hex(6)}"
        self.code = f"postgres({server.url()!r}, {self.schema!r})"
        super().__init__()

    def open(self, embedder: str = "axis") -> PostgresStore:
        return postgres(self.server.url(), self.schema, embedder, lambda: self.now_s)

    def seen(self, words: list[bytes]) -> list[bytes]:
        """In rows of any table, and in the planner's samples of them."""
        told = []
        with self.server.superuser("samovar") as db:
            tables = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (self.schema,))
            for (table,) in tables.fetchall():
                told += db.execute(f"SELECT t::text FROM {self.schema}.{table} t").fetchall()
            told += db.execute("SELECT row(s.*)::text FROM pg_statistic s").fetchall()
            db.execute("ANALYZE")  # the samples of now are those that the next look finds
        raw = "\n".join(row[0] for row in told).encode().lower()
        # PostgreSQL shows bytes in hexadecimal digits.
        return [word for word in words if word in raw or word.hex().encode() in raw]

    def drop(self) -> None:
        with self.server.superuser("samovar") as db:
            db.execute(f"DROP SCHEMA {self.schema} CASCADE")
