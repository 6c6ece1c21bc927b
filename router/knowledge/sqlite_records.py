"""Records of the loop in the SQLite file of the entries: turns, candidates, the log, questions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from router.knowledge.entries import LoopRecord, QuotaExceeded, RecordBounds, RecordKind, Vector
from router.knowledge.sqlite_file import SqliteFile

COLUMNS = "kind, record, body, turn, session, state, key, at_s, expires_s, embedder, vector"
REPLACED = ", ".join(f"{name} = excluded.{name}" for name in [*COLUMNS.split(", ")[2:], "nbytes"])


class SqliteRecords:
    """See `Records`. `embedder`: vectors of another one are left out. `clock`: Unix time."""

    def __init__(self, file: SqliteFile, embedder: str, clock: Callable[[], float]) -> None:
        self._file = file
        self._embedder = embedder
        self._clock = clock

    def put(self, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        """Write a record; what has expired of any tenant goes, and the oldest make room."""
        with self._file.transaction() as db:
            db.execute("DELETE FROM records WHERE expires_s <= ?", (self._clock(),))
            vector = None if record.vector is None else record.vector.astype("<f4").tobytes()
            origin = (record.turn, record.session, record.state, record.key)
            times = (record.at_s, record.expires_s)
            values = (tenant, record.kind, record.id, record.body, *origin, *times, self._embedder, vector)
            marks = ", ".join("?" * (len(values) + 1))
            db.execute(
                f"INSERT INTO records(tenant, {COLUMNS}, nbytes) VALUES({marks})"
                f" ON CONFLICT(tenant, kind, record) DO UPDATE SET {REPLACED}",
                (*values, record.nbytes),
            )
            self._make_room(db, tenant, record, bounds)

    def _make_room(
        self, db: sqlite3.Connection, tenant: str, record: LoopRecord, bounds: RecordBounds
    ) -> None:
        of_kind = (tenant, record.kind)
        count, nbytes = db.execute(
            "SELECT count(*), coalesce(sum(nbytes), 0) FROM records WHERE tenant = ? AND kind = ?", of_kind
        ).fetchone()
        states = ", ".join("?" * len(bounds.leaving))
        while count > bounds.count_max or nbytes > bounds.bytes_max:
            oldest = db.execute(
                "SELECT id, nbytes FROM records INDEXED BY records_by_age WHERE tenant = ? AND kind = ?"
                f" AND record <> ? AND state IN ({states}) ORDER BY id LIMIT 1",
                (*of_kind, record.id, *bounds.leaving),
            ).fetchone()
            if oldest is None:
                raise QuotaExceeded(
                    f"there would be {count} records of kind {record.kind} with {nbytes} bytes, and"
                    f" {bounds.count_max} with {bounds.bytes_max} are kept"
                )
            db.execute("DELETE FROM records WHERE id = ?", (oldest[0],))
            count, nbytes = count - 1, nbytes - oldest[1]

    def find(
        self,
        tenant: str,
        kind: RecordKind,
        *,
        ids: Collection[str] | None = None,
        session: bytes | None = None,
        state: str | None = None,
        key: bytes | None = None,
        limit: int | None = None,
        after: str = "",
    ) -> list[LoopRecord]:
        """Return records that fit, the newest first."""
        where, values = self._where(tenant, kind, session, state, key, ids)
        if after:
            where += " AND id < (SELECT id FROM records WHERE tenant = ? AND kind = ? AND record = ?)"
            values += [tenant, kind, after]
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM records WHERE {where} ORDER BY id DESC LIMIT ?",
                (*values, -1 if limit is None else limit),
            ).fetchall()
        return [record_of(row, self._embedder) for row in rows]

    def count(
        self,
        tenant: str,
        kind: RecordKind,
        *,
        session: bytes | None = None,
        state: str | None = None,
        since_s: float = 0.0,
    ) -> int:
        """Return how many records fit."""
        where, values = self._where(tenant, kind, session, state)
        with self._file.reading() as db:
            sql = f"SELECT count(*) FROM records WHERE {where} AND at_s >= ?"
            return int(db.execute(sql, (*values, since_s)).fetchone()[0])

    def similar(
        self, tenant: str, kind: RecordKind, vector: Vector, cosine_min: float, limit: int
    ) -> list[tuple[str, float]]:
        """Return ids of the records nearest in meaning, with the cosine."""
        where, values = self._where(tenant, kind)
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT record, vector FROM records WHERE {where} AND embedder = ? AND vector IS NOT NULL"
                " ORDER BY id",
                (*values, self._embedder),
            ).fetchall()
        if not rows:
            return []
        cosines = np.stack([np.frombuffer(raw, "<f4") for _, raw in rows]) @ vector
        near = [row for row in np.argsort(-cosines, kind="stable") if cosines[row] >= cosine_min]
        return [(rows[row][0], float(cosines[row])) for row in near[:limit]]

    def erase(
        self,
        tenant: str,
        *,
        kind: RecordKind | None = None,
        ids: Collection[str] | None = None,
        sessions: Collection[bytes] | None = None,
    ) -> int:
        """Erase records that fit, so that no file holds a byte of them."""
        count = 0
        with self._file.transaction() as db:
            for session in [None] if sessions is None else sessions:
                where, values = self._where(tenant, kind, session, ids=ids, is_live=False)
                count += db.execute(f"DELETE FROM records WHERE {where}", values).rowcount
        if not self._file.is_writing:
            self._file.empty_log()
        return count

    def _where(
        self,
        tenant: str,
        kind: RecordKind | None,
        session: bytes | None = None,
        state: str | None = None,
        key: bytes | None = None,
        ids: Collection[str] | None = None,
        is_live: bool = True,
    ) -> tuple[str, list[Any]]:
        """Return a condition and its values. `is_live`: not for what has expired."""
        given = {"tenant": tenant, "kind": kind, "session": session, "state": state, "key": key}
        named = {name: value for name, value in given.items() if value is not None}
        parts, values = [f"{name} = ?" for name in named], list[Any](named.values())
        if ids is not None:
            parts.append(f"record IN ({', '.join('?' * len(ids))})")
            values += ids
        if is_live:
            parts.append("expires_s > ?")
            values.append(self._clock())
        return " AND ".join(parts), values


def record_of(row: tuple[Any, ...], embedder: str) -> LoopRecord:
    """Return the record of a row of `COLUMNS`; without its vector, if that is another embedder's."""
    kind, name, body, turn, session, state, key, at_s, expires_s, made_by, raw = row
    vector = None if raw is None or made_by != embedder else np.frombuffer(raw, "<f4")
    return LoopRecord(kind, name, body, turn, session, state, key, at_s, expires_s, vector)
