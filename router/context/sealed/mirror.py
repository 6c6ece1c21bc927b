"""A tenant's newest versions in memory, opened and indexed: what a sealed knowledge base is searched in."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Collection, Sequence

from samovar.router.context.knowledge import (
    IN_MEMORY,
    SCHEMAS,
    Change,
    EntryVersion,
    SqliteFile,
    SqliteStore,
    Vector,
)

BUSY_S = 5.0


class _OneConnection(SqliteFile):
    """A database in memory that all threads share: SQLite's own is of its connection."""

    def _own(self) -> tuple[sqlite3.Connection, threading.RLock]:
        with self._lock:
            made = self._connections[:1]
        return made[0] if made else super()._own()


class MirrorStore(SqliteStore):
    """Versions of another store, with their ids and numbers. Thread-safe; nothing is on a disk."""

    def __init__(self, embedder: str) -> None:
        super().__init__(IN_MEMORY, embedder=embedder)
        self._file.close()
        self._file = _OneConnection(IN_MEMORY, SCHEMAS, BUSY_S)

    def take(
        self, tenant: str, gone: Collection[str], made: Sequence[tuple[EntryVersion, Vector | None]]
    ) -> None:
        """Forget the entries `gone`, and have these versions, with their vectors, as the newest of theirs."""
        with self._file.transaction() as db:
            table = self._words_table(db, tenant, create=True)
            for entry in gone:
                head = self._head(db, tenant, entry)
                if head is not None:
                    self._unindex(db, table, head)
                for rows in ("heads", "versions"):
                    db.execute(f"DELETE FROM {rows} WHERE tenant = ? AND entry = ?", (tenant, entry))
            for one, vector in made:
                content, origin = one.content, one.provenance
                topics = json.dumps(content.topics, ensure_ascii=False)
                said = (
                    content.kind,
                    content.title,
                    content.text,
                    topics,
                    origin.who,
                    origin.why,
                    origin.turn,
                )
                ref = (tenant, one.ref.entry, one.ref.number)
                db.execute(
                    "INSERT INTO versions(seq, tenant, entry, number, operation, kind, title, text, topics,"
                    " who, why, turn, at_s, of_number, nbytes)"
                    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                    (one.seq, *ref, one.operation, *said, one.at_s, one.of_number),
                )
                db.execute(
                    "INSERT INTO heads(tenant, entry, seq, is_retired) VALUES(?, ?, ?, 0)",
                    (*ref[:2], one.seq),
                )
                self._index(db, tenant, table, one, vector)
            self._changed(db, tenant)

    def try_out(self, tenant: str, changes: Sequence[Change]) -> None:
        """Apply changes that no other store has."""
        with self._file.transaction() as db:
            self._apply(db, tenant, changes)
