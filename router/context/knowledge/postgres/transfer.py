"""Copies between PostgreSQL and SQLite files: a backup is a file of the embedded store, for both stores."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from samovar.router.context.knowledge.entries import KnowledgeError
from samovar.router.context.knowledge.postgres.connections import Connection
from samovar.router.context.knowledge.postgres.database import Database
from samovar.router.context.knowledge.postgres.index import as_text, index
from samovar.router.context.knowledge.postgres.schema import TABLES, VECTORS
from samovar.router.context.knowledge.postgres.words import Tokenizer
from samovar.router.context.knowledge.sqlite_file import SqliteFile
from samovar.router.context.knowledge.sqlite_schema import (
    COLUMNS,
    OF_KEYS,
    SCHEMAS,
    keep_keys,
    make_words,
    put_words,
    version_of,
)

BUSY_S = 5.0
LONG_S = 24 * 3600.0
AT_ONCE = 1000
STATE_MAX = 10**9

_COPIED = {
    "versions": "seq, tenant, entry, number, operation, kind, title, text, topics, who, why, turn, at_s,"
    " of_number, nbytes",
    "tags": "tenant, name, seq",
    "turns": "id, tenant, session, turn, front, beside",
    "records": "id, tenant, kind, record, turn, session, state, key, at_s, expires_s, nbytes, body, embedder,"
    " vector",
}
"""Tables that are alike in both; the others are made from these."""
_HEADS = "tenant, entry, seq, is_retired"


def backup(database: Database, target: Path) -> None:
    """Copy all tenants into a new file of the embedded store: one state, while others write."""
    if target.exists():
        raise KnowledgeError(f"the backup {target} could not be written: it exists")
    has_vectors = database.has(VECTORS)
    file = SqliteFile(target, SCHEMAS, BUSY_S)
    try:
        with _long(database, "snapshot") as db, file.transaction() as to:
            for table, columns in _COPIED.items():
                _insert(to, table, columns, _rows(db, f"SELECT {columns} FROM {table}"))
            _insert(to, "heads", _HEADS, _rows(db, f"SELECT {_HEADS} FROM heads"))
            _insert(to, "names", "tenant, name, seq", _rows(db, "SELECT tenant, name, seq FROM names"))
            if has_vectors:
                _insert(to, "vectors", "seq, tenant, embedder, vector", _vectors(db, "true", ()))
            tenants = _rows(db, "SELECT tenant FROM tenants UNION SELECT DISTINCT tenant FROM heads")
            for (tenant,) in list(tenants):
                _put_words(to, tenant)
        file.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.db.execute("PRAGMA journal_mode=DELETE")
    except BaseException:
        file.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{target}{suffix}").unlink(missing_ok=True)
        raise
    file.close()


def copy_newest(db: Connection, to: sqlite3.Connection, tenant: str, has_vectors: bool) -> None:
    """Fill an empty database with the newest versions of a tenant, and with what finds them."""
    own, heads = (tenant,), "SELECT seq FROM heads WHERE tenant = %s"
    versions = _COPIED["versions"]
    _insert(
        to, "versions", versions, _rows(db, f"SELECT {versions} FROM versions WHERE seq IN ({heads})", own)
    )
    _insert(to, "heads", _HEADS, _rows(db, f"SELECT {_HEADS} FROM heads WHERE tenant = %s", own))
    names = "SELECT tenant, name, seq FROM names WHERE tenant = %s"
    _insert(to, "names", "tenant, name, seq", _rows(db, names, own))
    if has_vectors:
        _insert(to, "vectors", "seq, tenant, embedder, vector", _vectors(db, "tenant = %s", own))
    _put_words(to, tenant)


def restore(database: Database, source: Path, tokenizer: Tokenizer) -> None:
    """Replace all but the keys by a backup, whole or not at all; others wait meanwhile."""
    has_vectors = database.has(VECTORS)
    with tempfile.TemporaryDirectory(prefix="samovar-") as folder:
        copy = SqliteFile(Path(folder) / "copy", SCHEMAS, BUSY_S)
        try:
            copy.restore(source)  # it is whole, and gets what an older format lacks
            with _long(database, "write") as db:
                tables = ", ".join((*TABLES, VECTORS) if has_vectors else TABLES)
                db.execute(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")  # no key is made from now on
                keep_keys(copy.db, db.execute(OF_KEYS).fetchall())
                db.execute(f"TRUNCATE {tables}")
                for table, columns in _COPIED.items():
                    _fill(db, table, columns, copy.db.execute(f"SELECT {columns} FROM {table}"))
                for table, column in (("versions", "seq"), ("turns", "id"), ("records", "id")):
                    db.execute(
                        f"SELECT setval(pg_get_serial_sequence(%s, %s), (SELECT max({column}) + 1"
                        f" FROM {table}), false)",
                        (f"{database.schema}.{table}", column),
                    )
                tenants = copy.db.execute("SELECT tenant FROM tenants").fetchall()
                rows = ((tenant, random.randrange(1, STATE_MAX)) for (tenant,) in tenants)
                _fill(db, "tenants", "tenant, changes", rows)
                for (tenant,) in tenants:
                    _index(db, copy.db, tenant, tokenizer)
                if has_vectors:
                    _fill_vectors(db, copy.db)
        finally:
            copy.close()


@contextmanager
def _long(database: Database, mode: Any) -> Iterator[Connection]:
    """Give a transaction that sees all tenants, and whose statements may take long."""
    with database.transaction("", mode) as db, database.everyone(db):
        db.execute("SET LOCAL statement_timeout = 0")
        db.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        db.answer_s = LONG_S
        yield db


def _rows(db: Connection, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
    with db.cursor(name="rows") as cursor:
        cursor.itersize = AT_ONCE
        cursor.execute(query.encode(), values)
        yield from cursor


def _vectors(db: Connection, condition: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    query = f"SELECT seq, tenant, embedder, vector::real[] FROM vectors WHERE {condition}"
    for seq, tenant, embedder, numbers in _rows(db, query, values):
        yield seq, tenant, embedder, np.array(numbers, "<f4").tobytes()


def _insert(to: sqlite3.Connection, table: str, columns: str, rows: Iterator[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * (columns.count(",") + 1))
    to.executemany(f"INSERT INTO {table}({columns}) VALUES({marks})", rows)


def _put_words(to: sqlite3.Connection, tenant: str) -> None:
    state = random.randrange(1, STATE_MAX)
    to.execute("INSERT INTO tenants(tenant, changes) VALUES(?, ?)", (tenant, state))
    (number,) = to.execute("SELECT number FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
    table = make_words(to, number)
    live = f"SELECT {COLUMNS} FROM versions v JOIN heads h USING(seq) WHERE h.tenant = ? AND NOT h.is_retired"
    for row in to.execute(live, (tenant,)).fetchall():
        put_words(to, table, version_of(row))


def _fill(db: Connection, table: str, columns: str, rows: Iterator[tuple[Any, ...]] | sqlite3.Cursor) -> None:
    marks = ", ".join(["%s"] * (columns.count(",") + 1))
    found = iter(rows)
    while some := list(islice(found, AT_ONCE)):
        db.cursor().executemany(f"INSERT INTO {table}({columns}) VALUES({marks})".encode(), some)


def _index(db: Connection, source: sqlite3.Connection, tenant: str, tokenizer: Tokenizer) -> None:
    heads = source.execute(
        f"SELECT {COLUMNS} FROM versions v JOIN heads h USING(seq) WHERE h.tenant = ? ORDER BY v.seq",
        (tenant,),
    )
    while some := [version_of(row) for row in heads.fetchmany(AT_ONCE)]:
        index(db, tenant, some, [None] * len(some), tokenizer, "")


def _fill_vectors(db: Connection, source: sqlite3.Connection) -> None:
    found = source.execute("SELECT seq, tenant, embedder, vector FROM vectors")
    while some := found.fetchmany(AT_ONCE):
        db.cursor().executemany(
            "INSERT INTO vectors(seq, tenant, embedder, vector) VALUES(%s, %s, %s, %s::vector)",
            [(*row[:3], as_text(np.frombuffer(row[3], "<f4"))) for row in some],
        )
