"""The tables of the knowledge base's SQLite file, and what their rows say."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from samovar.configs.json_text import parse_json
from samovar.router.context.knowledge.entries import (
    Change,
    Content,
    EntryRef,
    EntryVersion,
    Kind,
    Operation,
    Provenance,
)

VERSION_BYTES = 128
"""What a version takes of the quota beside its texts."""
TOKENIZER = "tokenize='porter unicode61 remove_diacritics 2'"
WEIGHTS = (3.0, 1.0, 2.0)
"""How much a word counts in a title, a text, a topic."""
COLUMNS = (
    "v.seq, v.entry, v.number, v.operation, v.kind, v.title, v.text, v.topics, v.who, v.why, v.turn, v.at_s,"
    " v.of_number"
)

_ENTRIES = """
CREATE TABLE tenants(number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL UNIQUE,
    changes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE versions(seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, entry TEXT NOT NULL,
    number INTEGER NOT NULL, operation TEXT NOT NULL, kind TEXT NOT NULL, title TEXT NOT NULL,
    text TEXT NOT NULL, topics TEXT NOT NULL, who TEXT NOT NULL, why TEXT NOT NULL, turn TEXT,
    at_s REAL NOT NULL, of_number INTEGER, nbytes INTEGER NOT NULL, UNIQUE(tenant, entry, number));
CREATE INDEX version_bytes ON versions(tenant, nbytes);
CREATE TABLE heads(tenant TEXT NOT NULL, entry TEXT NOT NULL, seq INTEGER NOT NULL UNIQUE,
    is_retired INTEGER NOT NULL, PRIMARY KEY(tenant, entry)) WITHOUT ROWID;
CREATE TABLE vectors(seq INTEGER PRIMARY KEY, tenant TEXT NOT NULL, embedder TEXT NOT NULL,
    vector BLOB NOT NULL);
CREATE INDEX vectors_of ON vectors(tenant, embedder);
CREATE TABLE names(tenant TEXT NOT NULL, name TEXT NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY(tenant, name, seq)) WITHOUT ROWID;
CREATE INDEX names_of ON names(seq);
CREATE TABLE tags(tenant TEXT NOT NULL, name TEXT NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY(tenant, name)) WITHOUT ROWID;
CREATE TABLE turns(id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, session BLOB NOT NULL,
    turn BLOB NOT NULL, front TEXT NOT NULL, beside TEXT NOT NULL, UNIQUE(tenant, session, turn));
CREATE INDEX turns_with_front ON turns(tenant, id) WHERE front <> '[]';
"""

_RECORDS = """
CREATE TABLE records(id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, kind TEXT NOT NULL,
    record TEXT NOT NULL, turn TEXT NOT NULL, session BLOB NOT NULL, state TEXT NOT NULL, key BLOB NOT NULL,
    at_s REAL NOT NULL, expires_s REAL NOT NULL, nbytes INTEGER NOT NULL, body TEXT NOT NULL,
    embedder TEXT NOT NULL, vector BLOB, UNIQUE(tenant, kind, record));
CREATE INDEX records_by_age ON records(tenant, kind);
CREATE INDEX records_by_size ON records(tenant, kind, nbytes);
CREATE INDEX records_by_key ON records(tenant, kind, key);
CREATE INDEX records_by_session ON records(tenant, session);
CREATE INDEX records_by_turn ON records(tenant, turn);
CREATE INDEX records_by_end ON records(expires_s);
"""

SCHEMAS = (_ENTRIES, _RECORDS)
"""What each format of the file adds to the one before; the first one is format 1."""

OLD_ENTRIES = (
    "SELECT h.entry FROM heads h WHERE h.tenant = %s AND NOT EXISTS (SELECT 1 FROM versions v WHERE"
    " v.tenant = h.tenant AND v.entry = h.entry AND v.at_s > %s AND v.operation <> 'retire')"
)
"""What leaves with all of before a time: retired entries, too, and what was only retired since then."""
OLD_PARTS = (
    (
        "tags",
        "NOT EXISTS (SELECT 1 FROM versions v WHERE v.tenant = tags.tenant AND v.seq <= tags.seq"
        " AND v.at_s > %s)",
    ),
    ("turns", "%s IS NOT NULL"),  # all: nothing says when they were, and they have no text of their own
    ("records", "at_s <= %s AND kind <> 'key'"),  # keys go by themselves: they open what stays, too
)
"""What else leaves, before the entries do, and of which table. Tags of states since then stay."""


KEY_COLUMNS = (
    "tenant, kind, record, turn, session, state, key, at_s, expires_s, nbytes, body, embedder, vector"
)
OF_KEYS = f"SELECT {KEY_COLUMNS} FROM records WHERE kind = 'key' ORDER BY id"


def keep_keys(backup: sqlite3.Connection, rows: Iterable[Sequence[Any]]) -> None:
    """Put the keys that a store has, rows of `OF_KEYS`, into a backup that is to replace all of it.

    What some have sealed lies elsewhere and is in no backup, and the operator's key that wrapped a backup's
    own may be gone.
    """
    marks = ", ".join("?" * (KEY_COLUMNS.count(",") + 1))
    backup.executemany(
        f"INSERT INTO records({KEY_COLUMNS}) VALUES({marks}) ON CONFLICT(tenant, kind, record)"
        " DO UPDATE SET body = excluded.body, nbytes = excluded.nbytes",
        rows,
    )


def copy_tenant(db: sqlite3.Connection, source: Path, tenant: str) -> None:
    """Fill an empty database with the newest versions of a tenant, and with what finds them."""
    db.execute("ATTACH ? AS source", (f"{source.absolute().as_uri()}?mode=ro",))
    db.execute("BEGIN")  # one state of the source
    own = "SELECT seq FROM source.heads WHERE tenant = ?"
    for table in ("tenants", "heads"):
        db.execute(f"INSERT INTO main.{table} SELECT * FROM source.{table} WHERE tenant = ?", (tenant,))
    for table in ("versions", "vectors", "names"):
        db.execute(f"INSERT INTO main.{table} SELECT * FROM source.{table} WHERE seq IN ({own})", (tenant,))
    live = f"SELECT {COLUMNS} FROM main.versions v JOIN main.heads USING(seq) WHERE NOT is_retired"
    rows = db.execute(live).fetchall()
    for (number,) in db.execute("SELECT number FROM main.tenants").fetchall():
        table = make_words(db, number)
        for row in rows:
            put_words(db, table, version_of(row))
    db.execute("COMMIT")
    db.execute("DETACH source")


def make_words(db: sqlite3.Connection, number: int) -> str:
    """Create a tenant's table of words and return its name; without a copy of the text: `versions` has it."""
    db.execute(
        f"CREATE VIRTUAL TABLE main.words_{number} USING fts5(title, text, topics, content='', {TOKENIZER})"
    )
    return f"words_{number}"


def put_words(db: sqlite3.Connection, table: str, made: EntryVersion) -> None:
    """Write a version into a table of words."""
    db.execute(
        f"INSERT INTO main.{table}(rowid, title, text, topics) VALUES(?, ?, ?, ?)",
        (made.seq, *made.content.indexed),
    )


def version_bytes(change: Change) -> int:
    """Return what a version takes of the quota: short texts in many versions fill a disk, too."""
    origin = change.provenance
    said = len(origin.why.encode()) + len((origin.turn or "").encode())
    return change.content.nbytes + said + VERSION_BYTES


def of_kinds(kinds: Collection[Kind]) -> str:
    """Return a condition on the kind of `v`, with a mark for each of `kinds`; empty for all."""
    return f"AND v.kind IN ({', '.join('?' * len(kinds))})" if kinds else ""


def version_of(row: tuple[Any, ...]) -> EntryVersion:
    """Return a version, from a row of `COLUMNS`."""
    seq, entry, number, operation, kind, title, text, topics, who, why, turn, at_s, of_number = row
    content = Content(cast(Kind, kind), title, text, tuple(parse_json(topics)))
    return EntryVersion(
        EntryRef(entry, number),
        cast(Operation, operation),
        content,
        Provenance(who, why, turn),
        at_s,
        seq,
        of_number,
    )


def refs_of(text: str) -> tuple[EntryRef, ...]:
    """Return the versions that `refs_text` wrote."""
    return tuple(EntryRef(entry, number) for entry, number in parse_json(text))


def refs_text(refs: Sequence[EntryRef]) -> str:
    """Return versions as JSON."""
    return json.dumps([[ref.entry, ref.number] for ref in refs], separators=(",", ":"))


def check_integrity(db: sqlite3.Connection) -> None:
    """Raise `AssertionError` if the file is damaged, or what is derived from the versions is not so."""
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    newest = db.execute(
        "SELECT count(*) FROM (SELECT max(number) AS number, tenant, entry FROM versions GROUP BY tenant,"
        " entry) n JOIN versions v USING(tenant, entry, number) JOIN heads h USING(tenant, entry, seq)"
    ).fetchone()
    assert newest == db.execute("SELECT count(*) FROM heads").fetchone(), "heads are the newest versions"
    gaps = "SELECT count(*), max(number) FROM versions GROUP BY tenant, entry HAVING count(*) <> max(number)"
    assert db.execute(gaps).fetchall() == [], "a version is missing"
    live = "SELECT seq FROM heads WHERE NOT is_retired"
    for table in ("vectors", "names"):
        stray = db.execute(f"SELECT count(*) FROM {table} WHERE seq NOT IN ({live})").fetchone()
        assert stray == (0,), f"{table} of what is not retrieved"
    for number, tenant in db.execute("SELECT number, tenant FROM tenants").fetchall():
        db.execute(f"INSERT INTO words_{number}(words_{number}) VALUES('integrity-check')")
        indexed = db.execute(f"SELECT count(*) FROM words_{number}").fetchone()
        own = "SELECT count(*) FROM heads WHERE tenant = ? AND NOT is_retired"
        assert indexed == db.execute(own, (tenant,)).fetchone(), "words of what is not retrieved"
