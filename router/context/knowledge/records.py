"""Records of the loop, in the tables of either store: turns, candidates, the log, questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from samovar.router.context.knowledge.entries import (
    LoopRecord,
    QuotaExceeded,
    RecordBounds,
    RecordKind,
    Rows,
    Tables,
    Vector,
)

COLUMNS = "kind, record, body, turn, session, state, key, at_s, expires_s, embedder, vector"
REPLACED = ", ".join(f"{name} = excluded.{name}" for name in [*COLUMNS.split(", ")[2:], "nbytes"])
ALL = 2**62
LEAVING_AT_ONCE = 16
"""The oldest records that are looked at, at once, to make room: mostly one leaves for one that comes."""


class StoredRecords:
    """See `Records`. `embedder`: vectors of another one are left out. `clock`: Unix time."""

    def __init__(self, tables: Tables, embedder: str, clock: Callable[[], float]) -> None:
        self._tables = tables
        self._embedder = embedder
        self._clock = clock

    def put(self, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        """Write a record; what has expired of any tenant goes, and the oldest make room."""
        vector = None if record.vector is None else record.vector.astype("<f4").tobytes()
        origin = (record.turn, record.session, record.state, record.key)
        times = (record.at_s, record.expires_s)
        values = (tenant, record.kind, record.id, record.body, *origin, *times, self._embedder, vector)
        with self._tables.writing(tenant, "records") as db:
            with self._tables.everyone(db):
                # What another ingress deletes at this moment is left to it.
                db.execute(
                    "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE expires_s <= ?"
                    f"{self._tables.skip_locked})",
                    (self._clock(),),
                )
            db.execute(
                f"INSERT INTO records(tenant, {COLUMNS}, nbytes) VALUES({_marks((*values, 0))})"
                f" ON CONFLICT(tenant, kind, record) DO UPDATE SET {REPLACED}",
                (*values, record.nbytes),
            )
            self._make_room(db, tenant, record, bounds)

    def _make_room(self, db: Rows, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        of_kind = (tenant, record.kind)
        ((count, size),) = db.execute(
            "SELECT count(*), coalesce(sum(nbytes), 0) FROM records WHERE tenant = ? AND kind = ?", of_kind
        ).fetchall()
        nbytes = int(size)
        while count > bounds.count_max or nbytes > bounds.bytes_max:
            oldest = db.execute(
                f"SELECT id, nbytes FROM records{self._tables.by('records_by_age')} WHERE tenant = ?"
                f" AND kind = ? AND record <> ? AND state IN ({_marks(bounds.leaving)}) ORDER BY id LIMIT ?",
                (*of_kind, record.id, *bounds.leaving, LEAVING_AT_ONCE),
            ).fetchall()
            if not oldest:
                raise QuotaExceeded(
                    f"there would be {count} records of kind {record.kind} with {nbytes} bytes, and"
                    f" {bounds.count_max} with {bounds.bytes_max} are kept"
                )
            for number, own in oldest:
                if count <= bounds.count_max and nbytes <= bounds.bytes_max:
                    break
                db.execute("DELETE FROM records WHERE tenant = ? AND id = ?", (tenant, number))
                count, nbytes = count - 1, nbytes - own

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
        with self._tables.reading(tenant, "records") as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM records WHERE {where} ORDER BY id DESC LIMIT ?",
                (*values, ALL if limit is None else limit),
            ).fetchall()
        return [record_of(row, self._embedder) for row in rows]

    def of_all(self, kind: RecordKind) -> list[tuple[str, LoopRecord]]:
        """Return the records of a kind, of all tenants, each with its tenant."""
        with self._tables.reading("") as db, self._tables.everyone(db):
            rows = db.execute(
                f"SELECT tenant, {COLUMNS} FROM records WHERE kind = ? ORDER BY id", (kind,)
            ).fetchall()
        return [(row[0], record_of(row[1:], self._embedder)) for row in rows]

    def rewrite(self, tenant: str, record: LoopRecord, body: str) -> bool:
        """Give a record that was found another body; False if it has changed or gone since."""
        nbytes = replace(record, body=body).nbytes
        with self._tables.writing(tenant) as db:
            done = db.execute(
                "UPDATE records SET body = ?, nbytes = ? WHERE tenant = ? AND kind = ? AND record = ?"
                " AND body = ?",
                (body, nbytes, tenant, record.kind, record.id, record.body),
            )
            return bool(done.rowcount)

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
        with self._tables.reading(tenant) as db:
            counted = f"SELECT count(*) FROM records WHERE {where} AND at_s >= ?"
            ((count,),) = db.execute(counted, (*values, since_s)).fetchall()
        return int(count)

    def similar(
        self, tenant: str, kind: RecordKind, vector: Vector, cosine_min: float, limit: int
    ) -> list[tuple[str, float]]:
        """Return ids of the records nearest in meaning, with the cosine."""
        where, values = self._where(tenant, kind)
        with self._tables.reading(tenant) as db:
            rows = db.execute(
                f"SELECT record, vector FROM records WHERE {where} AND embedder = ? AND vector IS NOT NULL"
                " ORDER BY id",
                (*values, self._embedder),
            ).fetchall()
        fitting = [(name, np.frombuffer(raw, "<f4")) for name, raw in rows if len(raw) == 4 * len(vector)]
        return nearest(fitting, vector, cosine_min, limit)

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
        # What another one has found and writes again is there before, or not found any more.
        with self._tables.writing(tenant, "records") as db:
            for session in [None] if sessions is None else sessions:
                where, values = self._where(tenant, kind, session, ids=ids, is_live=False)
                count += db.execute(f"DELETE FROM records WHERE {where}", values).rowcount
        self._tables.erased()
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
            parts.append(f"record IN ({_marks(list(ids))})")
            values += ids
        if is_live:
            parts.append("expires_s > ?")
            values.append(self._clock())
        return " AND ".join(parts), values


def nearest(
    fitting: Sequence[tuple[str, Vector]], vector: Vector, cosine_min: float, limit: int
) -> list[tuple[str, float]]:
    """Return ids of the vectors nearest to `vector`, with the cosine; of equal ones in their order."""
    if not fitting:
        return []
    cosines = np.stack([row for _, row in fitting]) @ vector
    near = [row for row in np.argsort(-cosines, kind="stable") if cosines[row] >= cosine_min]
    return [(fitting[row][0], float(cosines[row])) for row in near[:limit]]


def _marks(values: Sequence[Any]) -> str:
    """Return a place for each value of a list that is not to be empty: nothing is equal to NULL."""
    return ", ".join("?" * len(values)) or "NULL"


def record_of(row: tuple[Any, ...], embedder: str) -> LoopRecord:
    """Return the record of a row of `COLUMNS`; without its vector, if that is another embedder's."""
    kind, name, body, turn, session, state, key, at_s, expires_s, made_by, raw = row
    vector = None if raw is None or made_by != embedder else np.frombuffer(raw, "<f4")
    return LoopRecord(kind, name, body, turn, session, state, key, at_s, expires_s, vector)
