"""The tables of the knowledge base's SQLite file."""

from __future__ import annotations

FORMAT = 1
"""`user_version` of the file."""

SCHEMA = """
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
