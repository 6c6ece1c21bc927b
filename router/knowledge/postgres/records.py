"""Records of the loop in PostgreSQL: turns, candidates, the log, questions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from router.knowledge.entries import LoopRecord, QuotaExceeded, RecordBounds, RecordKind, Vector
from router.knowledge.postgres.connections import Connection
from router.knowledge.postgres.database import Database
from router.knowledge.sqlite_records import COLUMNS, record_of


class PostgresRecords:
    """See `Records`. `embedder`: vectors of another one are left out. `clock`: Unix time."""

    def __init__(self, database: Database, embedder: str, clock: Callable[[], float]) -> None:
        self._database = database
        self._embedder = embedder
        self._clock = clock

    def put(self, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        """Write a record; what has expired of any tenant goes, and the oldest make room."""
        vector = None if record.vector is None else record.vector.astype("<f4").tobytes()
        origin = (record.turn, record.session, record.state, record.key)
        values = (record.kind, record.id, record.body, *origin, record.at_s, record.expires_s)
        with self._database.transaction(tenant) as db:
            self.take_turns(db, tenant)
            with self._database.everyone(db):
                # What another ingress deletes at this moment is left to it.
                db.execute(
                    "DELETE FROM records WHERE id IN"
                    " (SELECT id FROM records WHERE expires_s <= %s FOR UPDATE SKIP LOCKED)",
                    (self._clock(),),
                )
            db.execute(
                f"INSERT INTO records(tenant, {COLUMNS}, nbytes)"
                " VALUES(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
                " ON CONFLICT(tenant, kind, record) DO UPDATE SET body = excluded.body, turn = excluded.turn,"
                " session = excluded.session, state = excluded.state, key = excluded.key,"
                " at_s = excluded.at_s, expires_s = excluded.expires_s, embedder = excluded.embedder,"
                " vector = excluded.vector, nbytes = excluded.nbytes",
                (tenant, *values, self._embedder, vector, record.nbytes),
            )
            self._make_room(db, tenant, record, bounds)

    def take_turns(self, db: Connection, tenant: str) -> None:
        """Let other writers of the tenant's records wait: what is counted, or erased, must be all."""
        db.execute("SELECT pg_advisory_xact_lock(hashtext('samovar records'), hashtext(%s))", (tenant,))

    def _make_room(self, db: Connection, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        of_kind = (tenant, record.kind)
        row = db.execute(
            "SELECT count(*), coalesce(sum(nbytes), 0) FROM records WHERE tenant = %s AND kind = %s", of_kind
        ).fetchone()
        assert row is not None
        count, nbytes = row
        if count <= bounds.count_max and nbytes <= bounds.bytes_max:
            return
        oldest = db.execute(
            "SELECT id, nbytes FROM records WHERE tenant = %s AND kind = %s AND record <> %s"
            " AND state = ANY(%s) ORDER BY id",
            (*of_kind, record.id, list(bounds.leaving)),
        ).fetchall()
        leaving = []
        for number, size in oldest:
            if count <= bounds.count_max and nbytes <= bounds.bytes_max:
                break
            leaving.append(number)
            count, nbytes = count - 1, nbytes - size
        db.execute("DELETE FROM records WHERE tenant = %s AND id = ANY(%s)", (tenant, leaving))
        if count > bounds.count_max or nbytes > bounds.bytes_max:
            raise QuotaExceeded(
                f"there would be {count} records of kind {record.kind} with {nbytes} bytes, and"
                f" {bounds.count_max} with {bounds.bytes_max} are kept"
            )

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
            where += " AND id < (SELECT id FROM records WHERE tenant = %s AND kind = %s AND record = %s)"
            values += [tenant, kind, after]
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM records WHERE {where} ORDER BY id DESC LIMIT %s", (*values, limit)
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
        with self._database.transaction(tenant, "read") as db:
            counted = f"SELECT count(*) FROM records WHERE {where} AND at_s >= %s"
            row = db.execute(counted, (*values, since_s)).fetchone()
        assert row is not None
        return int(row[0])

    def similar(
        self, tenant: str, kind: RecordKind, vector: Vector, cosine_min: float, limit: int
    ) -> list[tuple[str, float]]:
        """Return ids of the records nearest in meaning, with the cosine."""
        where, values = self._where(tenant, kind)
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute(
                f"SELECT record, vector FROM records WHERE {where} AND embedder = %s AND vector IS NOT NULL"
                " ORDER BY id",
                (*values, self._embedder),
            ).fetchall()
        fitting = [(name, np.frombuffer(raw, "<f4")) for name, raw in rows if len(raw) == 4 * len(vector)]
        if not fitting:
            return []
        cosines = np.stack([row for _, row in fitting]) @ vector
        near = [row for row in np.argsort(-cosines, kind="stable") if cosines[row] >= cosine_min]
        return [(fitting[row][0], float(cosines[row])) for row in near[:limit]]

    def erase(
        self,
        tenant: str,
        *,
        kind: RecordKind | None = None,
        ids: Collection[str] | None = None,
        sessions: Collection[bytes] | None = None,
    ) -> int:
        """Erase records that fit."""
        count = 0
        with self._database.transaction(tenant) as db:
            for session in [None] if sessions is None else sessions:
                where, values = self._where(tenant, kind, session, ids=ids, is_live=False)
                count += db.execute(f"DELETE FROM records WHERE {where}", values).rowcount
        self._database.vacuum()
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
        parts, values = [f"{name} = %s" for name in named], list[Any](named.values())
        if ids is not None:
            parts.append("record = ANY(%s)")
            values.append(list(ids))
        if is_live:
            parts.append("expires_s > %s")
            values.append(self._clock())
        return " AND ".join(parts), values
