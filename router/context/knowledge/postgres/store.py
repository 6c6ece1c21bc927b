"""A `KnowledgeStore` in PostgreSQL, for the ingresses of several machines.

Nothing is kept in memory, so no ingress has to hear of another's writes. Two walls stand between tenants:
each statement names its tenant, and each table shows a transaction the rows of its tenant only.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg

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
    Rows,
    RowSealer,
    StateChanged,
    Vector,
    VersionConflict,
    new_entry_id,
)
from samovar.router.context.knowledge.postgres.connections import Connection
from samovar.router.context.knowledge.postgres.database import Database
from samovar.router.context.knowledge.postgres.index import as_text, index, unindex
from samovar.router.context.knowledge.postgres.schema import VECTORS
from samovar.router.context.knowledge.postgres.transfer import backup, copy_newest, restore
from samovar.router.context.knowledge.postgres.words import Tokenizer, best
from samovar.router.context.knowledge.records import StoredRecords
from samovar.router.context.knowledge.sqlite_file import IN_MEMORY
from samovar.router.context.knowledge.sqlite_schema import (
    COLUMNS,
    OLD_ENTRIES,
    OLD_PARTS,
    refs_of,
    refs_text,
    version_bytes,
    version_of,
)
from samovar.router.context.knowledge.sqlite_store import PRUNE_EVERY, PRUNE_SHARE, SqliteStore

STATE_MAX = 10**9
"""States of a tenant that is new begin below it, at random: no number of before its erasure comes again."""
NUMBER_MAX = 2**31 - 1
OF_KINDS = "(%s OR v.kind = ANY(%s))"
"""A condition on the kind of `v`; see `_kinds`."""
NO_LIMITS = Limits(entries_max=2**62, bytes_max=2**62, tags_max=2**62)

Cursor = psycopg.Cursor[Any]


class PostgresStore:
    """The store of one schema, which several threads, processes and machines may use at once.

    `settings`: `knowledge.postgres.url` is set. `embedder`: name of what makes the vectors; those of another
    are not compared; without one there are none. `clock`: Unix time. Raises `KnowledgeError` if it cannot be
    used; without `must_open` each call does, until it can.
    """

    def __init__(
        self,
        settings: KnowledgeSettings,
        *,
        embedder: str = "",
        must_open: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._embedder = embedder
        self._turns_max = settings.turns_max
        self._clock = clock
        self._tokenizer = Tokenizer()
        self._database = Database(
            settings.postgres,
            busy_s=settings.busy_s,
            has_vectors=bool(embedder),
            must_open=must_open,
        )
        self.records = StoredRecords(PostgresTables(self._database), embedder, clock)
        self._lock = threading.Lock()  # of what follows
        self._notes = 0

    def transaction(self) -> AbstractContextManager[object]:
        return self._database.transaction("")

    def write(
        self, tenant: str, changes: Sequence[Change], limits: Limits, since: int | None = None
    ) -> list[EntryVersion]:
        with self._database.transaction(tenant) as db:
            if self._changed(db, tenant) != since and since is not None:
                raise StateChanged("others have changed the knowledge base in between")
            made = self._append(db, tenant, changes)
            (entries,) = _one(
                db.execute("SELECT count(*) FROM heads WHERE tenant = %s AND NOT is_retired", (tenant,))
            )
            (nbytes,) = _one(
                db.execute("SELECT coalesce(sum(nbytes), 0) FROM versions WHERE tenant = %s", (tenant,))
            )
            if entries > limits.entries_max:
                raise QuotaExceeded(
                    f"it would have {entries} entries, more than {limits.entries_max} (knowledge.entries_max)"
                )
            if nbytes > limits.bytes_max:
                raise QuotaExceeded(
                    f"all versions would take {nbytes} bytes of {limits.bytes_max} (knowledge.bytes_max)"
                )
        return made

    def _changed(self, db: Connection, tenant: str) -> int:
        """Count a change of the tenant's state, let its other writers wait, and return the count before."""
        take_turns(db, tenant, "records")  # first, as who looks for a key and then writes: else both wait
        counted = (
            "INSERT INTO tenants(tenant, changes) VALUES(%s, %s) ON CONFLICT(tenant)"
            " DO UPDATE SET changes = tenants.changes + 1 RETURNING changes - 1, xmax = 0"
        )
        before, is_new = _one(db.execute(counted, (tenant, random.randrange(1, STATE_MAX))))
        return 0 if is_new else int(before)

    def _append(self, db: Connection, tenant: str, changes: Sequence[Change]) -> list[EntryVersion]:
        """Write versions, and index the newest one of each entry."""
        named = list({change.entry for change in changes if change.entry is not None})
        heads = {
            row[0]: row[1]
            for row in db.execute(
                "SELECT h.entry, v.number FROM heads h JOIN versions v USING(seq)"
                " WHERE h.tenant = %s AND h.entry = ANY(%s)",
                (tenant, named),
            )
        }
        at_s, numbered = self._clock(), []
        for change in changes:
            entry = change.entry
            if entry is None:
                entry = new_entry_id()
            elif entry not in heads:
                raise EntryNotFound(f"there is no entry {entry}")
            elif change.base is not None and change.base != heads[entry]:
                raise VersionConflict(
                    f"version {heads[entry]} of {entry} is the newest, and the change is based on "
                    f"{change.base}"
                )
            heads[entry] = heads.get(entry, 0) + 1
            ref = EntryRef(entry, heads[entry])
            numbered.append((ref, change.at(ref), version_bytes(change)))
        cursor = db.cursor()
        cursor.executemany(
            "INSERT INTO versions(tenant, entry, number, operation, kind, title, text, topics, who, why,"
            " turn, at_s, of_number, nbytes) VALUES(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
            " RETURNING seq",
            [_row(tenant, ref, change, at_s, nbytes) for ref, change, nbytes in numbered],
            returning=True,
        )
        made = []
        for (ref, change, _), result in zip(numbered, cursor.results(), strict=True):
            (seq,) = _one(result)
            made.append(
                EntryVersion(
                    ref, change.operation, change.content, change.provenance, at_s, seq, change.of_number
                )
            )
        newest = {one.ref.entry: number for number, one in enumerate(made)}
        unindex(db, tenant, named)
        index(
            db,
            tenant,
            [made[number] for number in newest.values()],
            [changes[number].vector for number in newest.values()],
            self._tokenizer,
            self._embedder,
        )
        return made

    def state(self, tenant: str) -> int:
        with self._database.transaction(tenant, "read") as db:
            row = db.execute("SELECT changes FROM tenants WHERE tenant = %s", (tenant,)).fetchone()
        return 0 if row is None else int(row[0])

    def authorship(self, tenant: str, who: str, since_s: float) -> Authorship:
        with self._database.transaction(tenant, "read") as db:
            entries, own = _one(
                db.execute(
                    "SELECT count(*), count(*) FILTER (WHERE v.who = %s) FROM heads h"
                    " JOIN versions v USING(seq) WHERE h.tenant = %s AND NOT h.is_retired",
                    (who, tenant),
                )
            )
            (lately,) = _one(
                db.execute(
                    "SELECT count(*) FROM versions WHERE tenant = %s AND who = %s AND at_s >= %s",
                    (tenant, who, since_s),
                )
            )
        return Authorship(entries, own, lately)

    def head(self, tenant: str, entry: str) -> EntryVersion:
        found = self._versions(
            tenant, "heads h JOIN versions v USING(seq)", "h.tenant = %s AND h.entry = %s", (tenant, entry)
        )
        if not found:
            raise EntryNotFound(f"there is no entry {entry}")
        return found[0]

    def _versions(
        self, tenant: str, tables: str, condition: str, values: Sequence[Any]
    ) -> list[EntryVersion]:
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute(f"SELECT {COLUMNS} FROM {tables} WHERE {condition}", values).fetchall()
        return [version_of(row) for row in rows]

    def version(self, tenant: str, ref: EntryRef) -> EntryVersion:
        found = self.versions(tenant, [ref]).get(ref)
        if found is None:
            raise EntryNotFound(f"there is no version {ref.number} of {ref.entry}", "version")
        return found

    def versions(self, tenant: str, refs: Collection[EntryRef]) -> dict[EntryRef, EntryVersion]:
        fitting = [ref for ref in refs if 0 < ref.number <= NUMBER_MAX]
        if not fitting:
            return {}
        tables = "unnest(%s::text[], %s::int[]) AS asked(entry, number) JOIN versions v USING(entry, number)"
        values = ([ref.entry for ref in fitting], [ref.number for ref in fitting], tenant)
        return {one.ref: one for one in self._versions(tenant, tables, "v.tenant = %s", values)}

    def history(
        self, tenant: str, entry: str, *, limit: int | None = None, before: int | None = None
    ) -> list[EntryVersion]:
        found = self._versions(
            tenant,
            "versions v",
            "tenant = %s AND entry = %s AND number < %s ORDER BY number DESC LIMIT %s",
            (tenant, entry, 2**62 if before is None else before, limit),
        )
        if not found:
            self.head(tenant, entry)  # raises if there is none
        return found[::-1]

    def heads(
        self, tenant: str, *, kinds: Collection[Kind] = (), limit: int | None = None, after: str = ""
    ) -> list[EntryVersion]:
        return self._versions(
            tenant,
            "heads h JOIN versions v USING(seq)",
            f"h.tenant = %s AND h.entry > %s AND NOT h.is_retired AND {OF_KINDS} ORDER BY h.entry LIMIT %s",
            (tenant, after, *_kinds(kinds), limit),
        )

    def by_words(
        self, tenant: str, words: Sequence[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        asked = self._tokenizer.tokens([("", word, "") for word in words])
        with self._database.transaction(tenant, "read") as db:
            return best(db, tenant, asked, kinds, limit)

    def by_meaning(
        self, tenant: str, vector: Vector, kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        if not self._embedder:
            return []
        with self._database.transaction(tenant, "read") as db:
            # Vectors have length 1: the inner product is the cosine, and 0 for a text without words.
            rows = db.execute(
                "SELECT v.entry, v.number, -(x.vector <#> %s::vector) FROM vectors x"
                " JOIN versions v USING(seq) WHERE x.tenant = %s AND x.embedder = %s"
                f" AND vector_dims(x.vector) = %s AND {OF_KINDS} ORDER BY 3 DESC, v.entry LIMIT %s",
                (as_text(vector), tenant, self._embedder, len(vector), *_kinds(kinds), limit),
            ).fetchall()
        return [(EntryRef(entry, number), cosine) for entry, number, cosine in rows]

    def by_names(
        self, tenant: str, names: Collection[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute(
                "SELECT entry, number, sum(share) FROM (SELECT v.entry, v.number,"
                " 1::float8 / count(*) OVER (PARTITION BY n.name) AS share"
                " FROM names n JOIN versions v USING(seq)"
                f" WHERE n.tenant = %s AND n.name = ANY(%s) AND {OF_KINDS}) AS found GROUP BY entry, number"
                " ORDER BY round(sum(share)::numeric, 9) DESC, entry LIMIT %s",
                (tenant, list(set(names)), *_kinds(kinds), limit),
            ).fetchall()
        return [(EntryRef(entry, number), score) for entry, number, score in rows]

    def without_vector(self, tenant: str, limit: int) -> list[EntryVersion]:
        if not self._embedder:
            return []
        return self._versions(
            tenant,
            "heads h JOIN versions v USING(seq)",
            "h.tenant = %s AND NOT h.is_retired AND NOT EXISTS"
            " (SELECT FROM vectors x WHERE x.seq = h.seq AND x.embedder = %s) LIMIT %s",
            (tenant, self._embedder, limit),
        )

    def put_vectors(self, tenant: str, vectors: Sequence[tuple[EntryRef, Vector]]) -> None:
        values = (
            [ref.entry for ref, _ in vectors],
            [ref.number for ref, _ in vectors],
            [as_text(vector) for _, vector in vectors],
        )
        with self._database.transaction(tenant) as db:
            self._changed(db, tenant)
            db.execute(
                "INSERT INTO vectors(seq, tenant, embedder, vector)"
                " SELECT h.seq, h.tenant, %s, x.vector::vector"
                " FROM unnest(%s::text[], %s::int[], %s::text[]) AS x(entry, number, vector)"
                " JOIN versions v USING(entry, number) JOIN heads h USING(seq)"
                " WHERE h.tenant = %s AND NOT h.is_retired ON CONFLICT(seq)"
                " DO UPDATE SET embedder = excluded.embedder, vector = excluded.vector",
                (self._embedder, *values, tenant),
            )

    def erase(self, tenant: str, entry: str | None) -> int:
        return self.erase_before(tenant) if entry is None else self.erase_all(tenant, [entry])

    def erase_all(self, tenant: str, entries: Collection[str]) -> int:
        with self._database.transaction(tenant) as db:
            self._changed(db, tenant)
            count = self._erase(db, tenant, list(entries))
        self._database.vacuum()
        return count

    def erase_before(self, tenant: str, at_s: float = math.inf) -> int:
        with self._database.transaction(tenant) as db:
            self._changed(db, tenant)  # no write is under way: what is looked for stays so
            for table, old in OLD_PARTS:
                db.execute(f"DELETE FROM {table} WHERE tenant = %s AND {old}", (tenant, at_s))
            asked = db.execute(OLD_ENTRIES, (tenant, at_s)).fetchall()
            count = self._erase(db, tenant, [row[0] for row in asked])
            if at_s == math.inf:
                db.execute("DELETE FROM tenants WHERE tenant = %s", (tenant,))
        self._database.vacuum()
        return count

    def _erase(self, db: Connection, tenant: str, entries: list[str]) -> int:
        asked, values = "tenant = %s AND entry = ANY(%s)", (tenant, entries)
        found = [row[0] for row in db.execute(f"SELECT entry FROM heads WHERE {asked}", values)]
        unindex(db, tenant, found)
        db.execute(
            "DELETE FROM records WHERE tenant = %s AND turn <> ''"
            f" AND turn IN (SELECT turn FROM versions WHERE {asked})",
            (tenant, *values),
        )
        db.execute(f"DELETE FROM versions WHERE {asked}", values)
        return len(found)

    def tag(self, tenant: str, name: str, limits: Limits) -> int:
        with self._database.transaction(tenant) as db:
            self._changed(db, tenant)  # no write is under way: all versions up to the newest are there
            (seq,) = _one(
                db.execute("SELECT coalesce(max(seq), 0) FROM versions WHERE tenant = %s", (tenant,))
            )
            (count,) = _one(
                db.execute("SELECT count(*) FROM tags WHERE tenant = %s AND name <> %s", (tenant, name))
            )
            if count >= limits.tags_max:
                raise QuotaExceeded(f"there are {count} tags, and no more are kept", "name")
            db.execute(
                "INSERT INTO tags(tenant, name, seq) VALUES(%s, %s, %s)"
                " ON CONFLICT(tenant, name) DO UPDATE SET seq = excluded.seq",
                (tenant, name, seq),
            )
        return int(seq)

    def tags(self, tenant: str) -> dict[str, int]:
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute("SELECT name, seq FROM tags WHERE tenant = %s ORDER BY name", (tenant,))
            return dict(rows.fetchall())

    def state_at(self, tenant: str, seq: int) -> dict[str, EntryVersion]:
        condition = (
            "v.seq IN (SELECT max(seq) FROM versions WHERE tenant = %s AND seq <= %s GROUP BY entry)"
            " AND v.tenant = %s"
        )
        found = self._versions(tenant, "versions v", condition, (tenant, seq, tenant))
        return {one.ref.entry: one for one in found}

    def turns(self, tenant: str, session: bytes, keys: Sequence[bytes]) -> dict[bytes, PlacedTurn]:
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute(
                "SELECT turn, front, beside FROM turns WHERE tenant = %s AND session = %s AND turn = ANY(%s)",
                (tenant, session, list(keys)),
            ).fetchall()
        return {key: PlacedTurn(refs_of(front), refs_of(beside)) for key, front, beside in rows}

    def note_turn(self, tenant: str, session: bytes, key: bytes, placed: PlacedTurn) -> None:
        with self._database.transaction(tenant) as db:
            db.execute(
                "INSERT INTO turns(tenant, session, turn, front, beside) VALUES(%s, %s, %s, %s, %s)"
                " ON CONFLICT(tenant, session, turn)"
                " DO UPDATE SET id = DEFAULT, front = excluded.front, beside = excluded.beside",
                (tenant, session, key, refs_text(placed.front), refs_text(placed.beside)),
            )
            with self._lock:
                self._notes += 1
                is_time = self._notes % PRUNE_EVERY == 0
            if is_time:
                with self._database.everyone(db):
                    self._prune_turns(db)

    def _prune_turns(self, db: Connection) -> None:
        """Forget the oldest turns of the tenant that has most, until there is room."""
        (count,) = _one(db.execute("SELECT count(*) FROM turns"))
        over = count - self._turns_max
        if over <= 0:
            return
        drop = over + int(PRUNE_SHARE * self._turns_max)
        # What another ingress drops at this moment is left to it.
        db.execute(
            "DELETE FROM turns WHERE id IN (SELECT id FROM turns WHERE tenant = (SELECT tenant FROM turns"
            " GROUP BY tenant ORDER BY count(*) DESC LIMIT 1) ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)",
            (drop,),
        )

    def recent_fronts(self, tenant: str, limit: int) -> list[tuple[EntryRef, ...]]:
        with self._database.transaction(tenant, "read") as db:
            rows = db.execute(
                "SELECT front FROM turns WHERE tenant = %s AND front <> '[]' ORDER BY id DESC LIMIT %s",
                (tenant, limit),
            ).fetchall()
        return [refs_of(text) for text in dict.fromkeys(row[0] for row in rows)]

    def forget_sessions(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        with self._database.transaction(tenant) as db:
            take_turns(db, tenant, "records")  # a turn that is being kept is kept, and then erased
            if sessions is None:
                db.execute("DELETE FROM turns WHERE tenant = %s", (tenant,))
                db.execute("DELETE FROM records WHERE tenant = %s AND session <> ''::bytea", (tenant,))
            else:
                for table in ("turns", "records"):
                    db.execute(
                        f"DELETE FROM {table} WHERE tenant = %s AND session = ANY(%s)",
                        (tenant, list(sessions)),
                    )

    @contextmanager
    def trial(self, tenant: str, changes: Sequence[Change]) -> Iterator[SqliteStore]:
        # A copy in memory: both stores rank alike, and the database has no lock to hold meanwhile.
        copy = SqliteStore(IN_MEMORY, embedder=self._embedder, clock=self._clock)
        has_vectors = self._database.has(VECTORS)
        try:
            with self._database.transaction(tenant, "snapshot") as db, copy.transaction() as to:
                copy_newest(db, to, tenant, has_vectors)
            copy.write(tenant, changes, NO_LIMITS)
            yield copy
        finally:
            copy.close()

    def beside(self, name: str, schemas: Sequence[str]) -> PostgresTables:
        return PostgresTables(self._database)  # `MIGRATIONS` have made them

    def backup(self, target: Path) -> None:
        """Copy the store into a new file, one of the embedded store, while it is in use."""
        backup(self._database, target)

    def restore(self, source: Path) -> None:
        """Replace all that is in the store by a backup, of either store, whole or not at all."""
        restore(self._database, source, self._tokenizer)

    def compact(self) -> None:
        """Rewrite all tables, so that their files hold nothing of what was erased; others wait."""
        self._database.rewrite()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if what is derived from the versions is not so."""
        live = "SELECT seq FROM heads WHERE NOT is_retired"
        counted = {
            "a version is missing": "SELECT count(*) FROM (SELECT 1 FROM versions GROUP BY tenant, entry"
            " HAVING count(*) <> max(number)) AS gaps",
            "heads are the newest versions": "SELECT count(*) FROM (SELECT DISTINCT ON (tenant, entry)"
            " tenant, entry, seq FROM versions ORDER BY tenant, entry, number DESC) AS newest"
            " FULL JOIN heads USING(tenant, entry, seq) WHERE newest.tenant IS NULL OR heads.tenant IS NULL",
            "names of what is not retrieved": f"SELECT count(*) FROM names WHERE seq NOT IN ({live})",
            "words of what is not retrieved": f"SELECT count(*) FROM postings WHERE seq NOT IN ({live})",
            "words that are counted wrongly": "SELECT count(*) FROM heads h WHERE tokens <> (SELECT"
            " coalesce(sum(cardinality(places)), 0) FROM postings p WHERE p.seq = h.seq"
            " AND p.tenant = h.tenant)",
        }
        if self._database.has(VECTORS):
            stray = f"SELECT count(*) FROM vectors WHERE seq NOT IN ({live})"
            counted["vectors of what is not retrieved"] = stray
        with self._database.transaction("", "snapshot") as db, self._database.everyone(db):
            for fault, query in counted.items():
                assert _one(db.execute(query)) == (0,), fault

    def close(self) -> None:
        self._database.close()


def _one(cursor: Cursor) -> tuple[Any, ...]:
    """Return the row of a query that has one."""
    row: tuple[Any, ...] | None = cursor.fetchone()
    assert row is not None
    return row


def _kinds(kinds: Collection[Kind]) -> tuple[bool, list[Kind]]:
    """Return the values of `OF_KINDS`."""
    return not kinds, list(kinds)


def _row(tenant: str, ref: EntryRef, change: Change, at_s: float, nbytes: int) -> tuple[Any, ...]:
    content, origin = change.content, change.provenance
    topics = json.dumps(content.topics, ensure_ascii=False)
    said = (change.operation, content.kind, content.title, content.text, topics)
    made = (origin.who, origin.why, origin.turn, at_s, change.of_number, nbytes)
    return (tenant, ref.entry, ref.number, *said, *made)


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
    sealer: RowSealer | None = None

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
    def reading(self, tenant: str, of: str = "") -> Iterator[Rows]:
        is_written_again = of and self._database.is_writing
        with self._database.transaction(tenant, "read") as db:
            if is_written_again:  # first: else another one may erase it in between
                take_turns(db, tenant, of)
            yield _Statements(db)

    def everyone(self, rows: Rows) -> AbstractContextManager[None]:
        assert isinstance(rows, _Statements)
        return self._database.everyone(rows.connection)

    def erased(self) -> None:
        self._database.vacuum()

    def close(self) -> None:
        """Leave the database open: it is the store's."""
