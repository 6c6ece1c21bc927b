"""A `KnowledgeStore` in one SQLite file: words by FTS5, meaning by exact cosine over the tenant's vectors.

Python is often built without `load_extension` (so is the one that this was written on), so no vector
extension is used: a tenant's vectors are one matrix in memory, read again when the tenant's counter of
changes has moved. 10,000 entries of 256 numbers are 10 MB, and comparing them takes 1 ms.

Each tenant has a table of words of its own: BM25 counts documents, and counts must not cross tenants.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np

from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge.entries import (
    Authorship,
    Change,
    EntryNotFound,
    EntryRef,
    EntryVersion,
    Kind,
    Limits,
    PlacedTurn,
    QuotaExceeded,
    StateChanged,
    Vector,
    VersionConflict,
    new_entry_id,
)
from samovar.router.context.knowledge.records import StoredRecords
from samovar.router.context.knowledge.sqlite_file import IN_MEMORY, SqliteFile, SqliteTables
from samovar.router.context.knowledge.sqlite_schema import (
    COLUMNS,
    OF_KEYS,
    OLD_ENTRIES,
    OLD_PARTS,
    SCHEMAS,
    WEIGHTS,
    check_integrity,
    copy_tenant,
    keep_keys,
    make_words,
    of_kinds,
    put_words,
    refs_of,
    refs_text,
    version_bytes,
    version_of,
)

FILE_NAME = "knowledge.sqlite"
PRUNE_EVERY = 256
PRUNE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A tenant's vectors as of a count of changes, one row an entry."""

    changes: int
    refs: list[EntryRef]
    kinds: list[Kind]
    rows: Vector

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes) + 200 * len(self.refs)


class SqliteStore:
    """The store of one file, which several threads and processes may use at once.

    `path`: or `IN_MEMORY`. `embedder`: name of what makes the vectors; those of another are not compared.
    `turns_max`: turns that are remembered, all tenants together. `busy_s`: how long a write waits for that of
    another process.
    `clock`: Unix time. The file is made with mode 0600. Raises `KnowledgeError` if it cannot be used;
    without `must_open` each call does.
    """

    def __init__(
        self,
        path: Path,
        *,
        embedder: str = "",
        turns_max: int = 100_000,
        vectors_bytes_max: int = 256 * 2**20,
        busy_s: float = 5.0,
        must_open: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._embedder = embedder
        self._turns_max = turns_max
        self._vectors_bytes_max = vectors_bytes_max
        self._clock = clock
        self._busy_s = busy_s
        self._file = SqliteFile(path, SCHEMAS, busy_s, must_open)
        self.records = StoredRecords(SqliteTables(self._file), embedder, clock)
        self._lock = threading.Lock()  # of what follows
        self._matrices: OrderedDict[str, _Matrix] = OrderedDict()
        self._notes = 0

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._file.transaction()

    def write(
        self, tenant: str, changes: Sequence[Change], limits: Limits, since: int | None = None
    ) -> list[EntryVersion]:
        with self._file.transaction() as db:
            if since is not None and self.state(tenant) != since:
                raise StateChanged("others have changed the knowledge base while the change was tried")
            made = self._apply(db, tenant, changes)
            (entries,) = db.execute(
                "SELECT count(*) FROM heads WHERE tenant = ? AND NOT is_retired", (tenant,)
            ).fetchone()
            (nbytes,) = db.execute(
                "SELECT coalesce(sum(nbytes), 0) FROM versions WHERE tenant = ?", (tenant,)
            ).fetchone()
            if entries > limits.entries_max:
                raise QuotaExceeded(
                    f"it would have {entries} entries, more than {limits.entries_max} (knowledge.entries_max)"
                )
            if nbytes > limits.bytes_max:
                raise QuotaExceeded(
                    f"all versions would take {nbytes} bytes of {limits.bytes_max} (knowledge.bytes_max)"
                )
        return made

    def _apply(self, db: sqlite3.Connection, tenant: str, changes: Sequence[Change]) -> list[EntryVersion]:
        table = self._words_table(db, tenant, create=True)
        made = [self._append(db, tenant, table, change) for change in changes]
        self._changed(db, tenant)
        return made

    def state(self, tenant: str) -> int:
        with self._file.reading() as db:
            found = db.execute("SELECT changes FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
        return 0 if found is None else int(found[0])

    @contextmanager
    def trial(self, tenant: str, changes: Sequence[Change]) -> Iterator[SqliteStore]:
        assert self.path != IN_MEMORY, "a trial of a trial"
        copy = SqliteStore(IN_MEMORY, embedder=self._embedder, clock=self._clock)
        try:
            with copy._file.reading() as db:
                copy_tenant(db, self.path, tenant)
            with copy._file.transaction() as db:
                copy._apply(db, tenant, changes)
            yield copy
        finally:
            copy.close()

    def authorship(self, tenant: str, who: str, since_s: float) -> Authorship:
        with self._file.reading() as db:
            (entries, own) = db.execute(
                "SELECT count(*), coalesce(sum(v.who = ?), 0) FROM heads h JOIN versions v USING(seq)"
                " WHERE h.tenant = ? AND NOT h.is_retired",
                (who, tenant),
            ).fetchone()
            (lately,) = db.execute(
                "SELECT count(*) FROM versions WHERE tenant = ? AND who = ? AND at_s >= ?",
                (tenant, who, since_s),
            ).fetchone()
        return Authorship(entries, own, lately)

    def _append(self, db: sqlite3.Connection, tenant: str, table: str, change: Change) -> EntryVersion:
        entry, number, before = change.entry, 1, None
        if entry is None:
            entry = new_entry_id()
        else:
            before = self._head(db, tenant, entry)
            if before is None:
                raise EntryNotFound(f"there is no entry {entry}")
            number = before.ref.number + 1
            if change.base is not None and change.base != before.ref.number:
                raise VersionConflict(
                    f"version {before.ref.number} of {entry} is the newest, and the change is based on "
                    f"{change.base}"
                )
        nbytes, change = version_bytes(change), change.at(EntryRef(entry, number))
        content, origin, at_s = change.content, change.provenance, self._clock()
        topics = json.dumps(content.topics, ensure_ascii=False)
        row = (tenant, entry, number, change.operation, content.kind, content.title, content.text, topics)
        cursor = db.execute(
            "INSERT INTO versions(tenant, entry, number, operation, kind, title, text, topics, who, why,"
            " turn, at_s, of_number, nbytes) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, origin.who, origin.why, origin.turn, at_s, change.of_number, nbytes),
        )
        seq = cast(int, cursor.lastrowid)
        made = EntryVersion(
            EntryRef(entry, number), change.operation, content, origin, at_s, seq, change.of_number
        )
        if before is not None:
            self._unindex(db, table, before)
        is_retired = change.operation == "retire"
        db.execute(
            "INSERT INTO heads(tenant, entry, seq, is_retired) VALUES(?, ?, ?, ?) ON CONFLICT(tenant, entry)"
            " DO UPDATE SET seq = excluded.seq, is_retired = excluded.is_retired",
            (tenant, entry, seq, is_retired),
        )
        if not is_retired:
            self._index(db, tenant, table, made, change.vector)
        return made

    def _index(
        self, db: sqlite3.Connection, tenant: str, table: str, made: EntryVersion, vector: Vector | None
    ) -> None:
        put_words(db, table, made)
        db.executemany(
            "INSERT INTO names(tenant, name, seq) VALUES(?, ?, ?)",
            [(tenant, name, made.seq) for name in made.content.names],
        )
        if vector is not None:
            self._put_vector(db, tenant, made.seq, vector)

    def _put_vector(self, db: sqlite3.Connection, tenant: str, seq: int, vector: Vector) -> None:
        db.execute(
            "INSERT OR REPLACE INTO vectors(seq, tenant, embedder, vector) VALUES(?, ?, ?, ?)",
            (seq, tenant, self._embedder, vector.astype("<f4").tobytes()),
        )

    def _unindex(self, db: sqlite3.Connection, table: str, made: EntryVersion) -> None:
        if made.operation == "retire":
            return
        db.execute(
            f"INSERT INTO {table}({table}, rowid, title, text, topics) VALUES('delete', ?, ?, ?, ?)",
            (made.seq, *made.content.indexed),
        )
        db.execute("DELETE FROM names WHERE seq = ?", (made.seq,))
        db.execute("DELETE FROM vectors WHERE seq = ?", (made.seq,))

    def _words_table(self, db: sqlite3.Connection, tenant: str, *, create: bool = False) -> str:
        """Return the name of a tenant's table of words; empty if it has none."""
        found = db.execute("SELECT number FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
        if found is not None:
            return f"words_{found[0]}"
        if not create:
            return ""
        # From a random number on: what another process keeps of a tenant that was erased must not fit.
        number = db.execute(
            "INSERT INTO tenants(tenant, changes) VALUES(?, abs(random() % 1000000000))", (tenant,)
        ).lastrowid
        return make_words(db, cast(int, number))

    def _changed(self, db: sqlite3.Connection, tenant: str) -> None:
        db.execute("UPDATE tenants SET changes = changes + 1 WHERE tenant = ?", (tenant,))

    def _head(self, db: sqlite3.Connection, tenant: str, entry: str) -> EntryVersion | None:
        row = db.execute(
            f"SELECT {COLUMNS} FROM heads h JOIN versions v USING(seq) WHERE h.tenant = ? AND h.entry = ?",
            (tenant, entry),
        ).fetchone()
        return None if row is None else version_of(row)

    def head(self, tenant: str, entry: str) -> EntryVersion:
        with self._file.reading() as db:
            found = self._head(db, tenant, entry)
        if found is None:
            raise EntryNotFound(f"there is no entry {entry}")
        return found

    def version(self, tenant: str, ref: EntryRef) -> EntryVersion:
        found = self.versions(tenant, [ref]).get(ref)
        if found is None:
            raise EntryNotFound(f"there is no version {ref.number} of {ref.entry}", "version")
        return found

    def versions(self, tenant: str, refs: Collection[EntryRef]) -> dict[EntryRef, EntryVersion]:
        found = {}
        with self._file.reading() as db:
            for ref in refs:
                row = db.execute(
                    f"SELECT {COLUMNS} FROM versions v WHERE tenant = ? AND entry = ? AND number = ?",
                    (tenant, ref.entry, ref.number),
                ).fetchone()
                if row is not None:
                    found[ref] = version_of(row)
        return found

    def history(
        self, tenant: str, entry: str, *, limit: int | None = None, before: int | None = None
    ) -> list[EntryVersion]:
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM versions v WHERE tenant = ? AND entry = ? AND number < ?"
                " ORDER BY number DESC LIMIT ?",
                (tenant, entry, 2**62 if before is None else before, -1 if limit is None else limit),
            ).fetchall()
        if not rows:
            self.head(tenant, entry)  # raises if there is none
        return [version_of(row) for row in reversed(rows)]

    def heads(
        self, tenant: str, *, kinds: Collection[Kind] = (), limit: int | None = None, after: str = ""
    ) -> list[EntryVersion]:
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM heads h JOIN versions v USING(seq) WHERE h.tenant = ? AND h.entry > ?"
                f" AND NOT h.is_retired {of_kinds(kinds)} ORDER BY h.entry LIMIT ?",
                (tenant, after, *kinds, -1 if limit is None else limit),
            ).fetchall()
        return [version_of(row) for row in rows]

    def by_words(
        self, tenant: str, words: Sequence[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        weights = ", ".join(map(str, WEIGHTS))
        # FTS5 reads no further than a NUL.
        asked = " OR ".join('"' + word.replace('"', '""').replace("\0", "\ufffd") + '"' for word in words)
        with self._file.reading() as db:
            table = self._words_table(db, tenant)
            if not table or not asked:
                return []
            # The id decides between equals: it does not change when a version is reverted.
            rows = db.execute(
                f"SELECT v.entry, v.number, bm25({table}, {weights}) AS score FROM {table}"
                f" JOIN versions v ON v.seq = {table}.rowid WHERE {table} MATCH ? {of_kinds(kinds)}"
                " ORDER BY score, v.entry LIMIT ?",
                (asked, *kinds, limit),
            ).fetchall()
        return [(EntryRef(entry, number), -score) for entry, number, score in rows]

    def by_meaning(
        self, tenant: str, vector: Vector, kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        matrix = self._matrix(tenant)
        if not matrix.refs or matrix.rows.shape[1] != len(vector):
            return []
        cosines = matrix.rows @ vector
        order = np.argsort(-cosines, kind="stable")  # rows are in the order of their ids
        fitting = (row for row in order if not kinds or matrix.kinds[row] in kinds)
        return [
            (matrix.refs[row], float(cosines[row])) for row, _ in zip(fitting, range(limit), strict=False)
        ]

    def _matrix(self, tenant: str) -> _Matrix:
        with self._file.reading() as db:
            changes = self.state(tenant)
            is_writing = self._file.is_writing  # what is not committed must not be kept
            with self._lock:
                kept = self._matrices.get(tenant)
                if kept is not None and kept.changes == changes and not is_writing:
                    self._matrices.move_to_end(tenant)
                    return kept
            rows = db.execute(
                "SELECT v.entry, v.number, v.kind, x.vector FROM vectors x JOIN versions v USING(seq)"
                " WHERE x.tenant = ? AND x.embedder = ? ORDER BY v.entry",
                (tenant, self._embedder),
            ).fetchall()
        vectors = [np.frombuffer(row[3], "<f4") for row in rows]
        matrix = _Matrix(
            changes,
            [EntryRef(row[0], row[1]) for row in rows],
            [row[2] for row in rows],
            np.stack(vectors) if vectors else np.zeros((0, 0), np.float32),
        )
        if not is_writing:
            with self._lock:
                self._matrices[tenant] = matrix
                self._matrices.move_to_end(tenant)
                while len(self._matrices) > 1 and self._matrices_bytes > self._vectors_bytes_max:
                    self._matrices.popitem(last=False)
        return matrix

    @property
    def _matrices_bytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._matrices.values())

    def by_names(
        self, tenant: str, names: Collection[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        scores: dict[EntryRef, float] = {}
        with self._file.reading() as db:
            for name in dict.fromkeys(names):
                rows = db.execute(
                    "SELECT v.entry, v.number FROM names n JOIN versions v USING(seq) WHERE n.tenant = ? AND"
                    f" n.name = ? {of_kinds(kinds)}",
                    (tenant, name, *kinds),
                ).fetchall()
                for entry, number in rows:
                    ref = EntryRef(entry, number)
                    scores[ref] = scores.get(ref, 0.0) + 1.0 / len(rows)
        ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0].entry))
        return ranked[:limit]

    def without_vector(self, tenant: str, limit: int) -> list[EntryVersion]:
        with self._file.reading() as db:
            # Counts need no vector to be read; to look for those that are missing takes 0.1 s at 10,000.
            (made,) = db.execute(
                "SELECT count(*) FROM vectors WHERE tenant = ? AND embedder = ?", (tenant, self._embedder)
            ).fetchone()
            (wanted,) = db.execute(
                "SELECT count(*) FROM heads WHERE tenant = ? AND NOT is_retired", (tenant,)
            ).fetchone()
            if made == wanted:
                return []
            rows = db.execute(
                f"SELECT {COLUMNS} FROM heads h JOIN versions v USING(seq) LEFT JOIN vectors x USING(seq)"
                " WHERE h.tenant = ? AND NOT h.is_retired AND x.embedder IS NOT ? LIMIT ?",
                (tenant, self._embedder, limit),
            ).fetchall()
        return [version_of(row) for row in rows]

    def put_vectors(self, tenant: str, vectors: Sequence[tuple[EntryRef, Vector]]) -> None:
        with self._file.transaction() as db:
            for ref, vector in vectors:
                head = self._head(db, tenant, ref.entry)
                if head is not None and head.ref == ref and head.operation != "retire":
                    self._put_vector(db, tenant, head.seq, vector)
            self._changed(db, tenant)

    def erase(self, tenant: str, entry: str | None) -> int:
        return self.erase_before(tenant) if entry is None else self.erase_all(tenant, [entry])

    def erase_all(self, tenant: str, entries: Collection[str]) -> int:
        with self._file.transaction() as db:
            count = self._erase(db, tenant, entries)
        return self._erased(tenant, count)

    def erase_before(self, tenant: str, at_s: float = math.inf) -> int:
        with self._file.transaction() as db:
            for table, old in OLD_PARTS:
                db.execute(
                    f"DELETE FROM {table} WHERE tenant = ? AND {old.replace('%s', '?')}", (tenant, at_s)
                )
            asked = db.execute(OLD_ENTRIES.replace("%s", "?"), (tenant, at_s)).fetchall()
            count = self._erase(db, tenant, [row[0] for row in asked])
            table = self._words_table(db, tenant)
            if at_s == math.inf and table:
                db.execute(f"DROP TABLE {table}")
                db.execute("DELETE FROM tenants WHERE tenant = ?", (tenant,))
        return self._erased(tenant, count)

    def _erase(self, db: sqlite3.Connection, tenant: str, entries: Collection[str]) -> int:
        table = self._words_table(db, tenant)
        found = [(one, head) for one in entries if (head := self._head(db, tenant, one)) is not None]
        for one, head in found:
            self._unindex(db, table, head)
            db.execute(
                "DELETE FROM records WHERE tenant = ? AND turn <> '' AND turn IN (SELECT turn FROM versions"
                " WHERE tenant = ? AND entry = ?)",
                (tenant, tenant, one),
            )
            db.execute("DELETE FROM heads WHERE tenant = ? AND entry = ?", (tenant, one))
            db.execute("DELETE FROM versions WHERE tenant = ? AND entry = ?", (tenant, one))
        if found:
            # The index keeps the words of what was deleted until its parts are merged into one.
            db.execute(f"INSERT INTO {table}({table}) VALUES('optimize')")
            self._changed(db, tenant)
        return len(found)

    def _erased(self, tenant: str, count: int) -> int:
        with self._lock:
            self._matrices.pop(tenant, None)
        # Even if nothing was there: who repeats a deletion that could not empty the log wants just that.
        self._file.empty_log()
        return count

    def tag(self, tenant: str, name: str, limits: Limits) -> int:
        with self._file.transaction() as db:
            (seq,) = db.execute(
                "SELECT coalesce(max(seq), 0) FROM versions WHERE tenant = ?", (tenant,)
            ).fetchone()
            (count,) = db.execute(
                "SELECT count(*) FROM tags WHERE tenant = ? AND name <> ?", (tenant, name)
            ).fetchone()
            if count >= limits.tags_max:
                raise QuotaExceeded(f"there are {count} tags, and no more are kept", "name")
            db.execute("INSERT OR REPLACE INTO tags(tenant, name, seq) VALUES(?, ?, ?)", (tenant, name, seq))
        return int(seq)

    def tags(self, tenant: str) -> dict[str, int]:
        with self._file.reading() as db:
            rows = db.execute("SELECT name, seq FROM tags WHERE tenant = ? ORDER BY name", (tenant,))
            return dict(rows.fetchall())

    def state_at(self, tenant: str, seq: int) -> dict[str, EntryVersion]:
        with self._file.reading() as db:
            rows = db.execute(
                f"SELECT {COLUMNS} FROM versions v WHERE v.seq IN"
                " (SELECT max(seq) FROM versions WHERE tenant = ? AND seq <= ? GROUP BY entry)",
                (tenant, seq),
            ).fetchall()
        return {version.ref.entry: version for version in map(version_of, rows)}

    def turns(self, tenant: str, session: bytes, keys: Sequence[bytes]) -> dict[bytes, PlacedTurn]:
        found = {}
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT turn, front, beside FROM turns WHERE tenant = ? AND session = ?", (tenant, session)
            ).fetchall()
        wanted = set(keys)
        for key, front, beside in rows:
            if key in wanted:
                found[key] = PlacedTurn(refs_of(front), refs_of(beside))
        return found

    def note_turn(self, tenant: str, session: bytes, key: bytes, placed: PlacedTurn) -> None:
        with self._file.transaction() as db:
            self._words_table(db, tenant, create=True)
            db.execute(
                "INSERT OR REPLACE INTO turns(tenant, session, turn, front, beside) VALUES(?, ?, ?, ?, ?)",
                (tenant, session, key, refs_text(placed.front), refs_text(placed.beside)),
            )
            with self._lock:
                self._notes += 1
                is_time = self._notes % PRUNE_EVERY == 0
            if is_time:
                self._prune_turns(db)

    def _prune_turns(self, db: sqlite3.Connection) -> None:
        """Forget the oldest turns of the tenant that has most, until there is room."""
        (count,) = db.execute("SELECT count(*) FROM turns").fetchone()
        over = count - self._turns_max
        if over <= 0:
            return
        drop = over + int(PRUNE_SHARE * self._turns_max)
        db.execute(
            "DELETE FROM turns WHERE id IN (SELECT id FROM turns WHERE tenant = (SELECT tenant FROM turns"
            " GROUP BY tenant ORDER BY count(*) DESC LIMIT 1) ORDER BY id LIMIT ?)",
            (drop,),
        )

    def recent_fronts(self, tenant: str, limit: int) -> list[tuple[EntryRef, ...]]:
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT front FROM turns WHERE tenant = ? AND front <> '[]' ORDER BY id DESC LIMIT ?",
                (tenant, limit),
            ).fetchall()
        return [refs_of(text) for text in dict.fromkeys(row[0] for row in rows)]

    def forget_sessions(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        with self._file.transaction() as db:
            if sessions is None:
                db.execute("DELETE FROM turns WHERE tenant = ?", (tenant,))
                db.execute("DELETE FROM records WHERE tenant = ? AND session <> x''", (tenant,))
            for session in sessions or ():
                for table in ("turns", "records"):
                    db.execute(f"DELETE FROM {table} WHERE tenant = ? AND session = ?", (tenant, session))
        self._file.empty_log()  # records have texts

    def beside(self, name: str, schemas: Sequence[str]) -> SqliteTables:
        file = SqliteFile(self.path.with_name(name), schemas, self._busy_s, must_open=False)
        return SqliteTables(file, is_own=True)

    def backup(self, target: Path) -> None:
        """Copy the store into a new file while it is in use. Raises `KnowledgeError` if `target` exists."""
        self._file.backup(target)

    def restore(self, source: Path) -> None:
        """Replace all that is in the store but its keys by a backup, whole or not at all, while in use."""
        _restore(self._file, source, self._busy_s)
        with self._lock:
            self._matrices.clear()

    def compact(self) -> None:
        """Empty the log: the file has nothing of what was erased."""
        self._file.empty_log()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the file is damaged, or what is derived from the versions is not so."""
        check_integrity(self._file.db)

    def close(self) -> None:
        self._file.close()
        with self._lock:
            self._matrices.clear()


def _restore(file: SqliteFile, source: Path, busy_s: float) -> None:
    with TemporaryDirectory(prefix="samovar-") as folder:
        copy = SqliteFile(Path(folder) / "copy", SCHEMAS, busy_s)

        def keep() -> None:
            # Not by this thread's own connection: that one is about to see the backup's pages.
            with closing(sqlite3.connect(file.path, timeout=busy_s)) as now, copy.transaction() as db:
                keep_keys(db, now.execute(OF_KEYS).fetchall())

        try:
            copy.restore(source)  # it is whole, and gets what an older format lacks
            with copy.transaction() as db:  # what others keep of the counts before must not fit
                db.execute("UPDATE tenants SET changes = changes + abs(random() % 1000000000)")
            file.replace(copy.db, keep)
        finally:
            copy.close()


def store_folder(settings: KnowledgeSettings, cache_dir: Path) -> Path:
    """Return the directory of the stores' files. `cache_dir`: `model.cache_dir`."""
    return (settings.dir or cache_dir / "knowledge").expanduser()


def store_file(settings: KnowledgeSettings, cache_dir: Path) -> Path:
    """Return the path of the file that the settings name. `cache_dir`: `model.cache_dir`."""
    return store_folder(settings, cache_dir) / FILE_NAME
