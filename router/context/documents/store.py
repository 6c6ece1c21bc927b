"""The documents of all tenants: what was sent, their text, and how far they are."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from samovar.cache_tiers.blocks import SEALED_TEXT
from samovar.configs.json_text import parse_json
from samovar.router.context.documents.document import Document, Quota
from samovar.router.context.knowledge import EntryNotFound, KnowledgeError, QuotaExceeded, Rows, Tables

FILE_NAME = "documents.sqlite"
SCHEMA = """
CREATE TABLE documents(seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    title TEXT NOT NULL, format TEXT NOT NULL, state TEXT NOT NULL, prefill TEXT NOT NULL,
    source_bytes INTEGER NOT NULL, created_s REAL NOT NULL, reason TEXT NOT NULL, text_bytes INTEGER NOT NULL,
    pages INTEGER NOT NULL, entries TEXT NOT NULL, prefilled TEXT NOT NULL, prefill_reason TEXT NOT NULL,
    prefill_s REAL NOT NULL, tokens INTEGER NOT NULL, prefilled_tokens INTEGER NOT NULL, model TEXT NOT NULL,
    ready_s REAL NOT NULL, lease TEXT NOT NULL, lease_until_s REAL NOT NULL, UNIQUE(tenant, id));
CREATE INDEX open_documents ON documents(seq)
    WHERE state IN ('processing', 'deleting') OR prefilled IN ('waiting', 'running');
CREATE TABLE texts(tenant TEXT NOT NULL, id TEXT NOT NULL, source BLOB, text TEXT, PRIMARY KEY(tenant, id));
CREATE TABLE uses(tenant TEXT NOT NULL, id TEXT NOT NULL, session BLOB NOT NULL,
    PRIMARY KEY(tenant, id, session)) WITHOUT ROWID;
"""
WITH_NODE = """
ALTER TABLE documents ADD COLUMN node TEXT NOT NULL DEFAULT '';
"""
SCHEMAS = (SCHEMA, WITH_NODE)
OPEN = "(state IN ('processing', 'deleting') OR prefilled IN ('waiting', 'running'))"
FREE = "(lease = '' OR lease_until_s < ?)"
COLUMNS = (
    "id", "tenant", "title", "format", "state", "prefill", "source_bytes", "created_s", "seq", "reason",
    "text_bytes", "pages", "entries", "prefilled", "prefill_reason", "prefill_s", "tokens",
    "prefilled_tokens", "model", "ready_s", "node",
)  # fmt: skip
LISTED = ", ".join(COLUMNS)
WRITES = "documents"
UNKNOWN = "there is no such document"
T = TypeVar("T")


class DocumentStore:
    """Documents in the tables of `SCHEMAS`, which several ingresses may use at once. Thread-safe.

    `tables`: see `KnowledgeStore.beside`; if they have a sealer, titles and texts are sealed. A tenant sees
    its own only. Every call blocks and raises `KnowledgeError`. `clock`: Unix time. Work on a document is
    leased: an ingress that began it and is gone loses it to another one after `lease_s`. What is written as
    `owner` is not if the lease is another's: that is told as if there were no document.
    """

    def __init__(
        self,
        tables: Tables,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tables = tables
        self.lease_s = lease_s
        self._clock = clock

    def add(self, document: Document, source: bytes, quota: Quota) -> Document:
        """Store a new document and what was sent. Raises `QuotaExceeded`."""
        with self._tables.writing(document.tenant, WRITES) as db:
            ((count, nbytes),) = db.execute(
                "SELECT count(*), coalesce(sum(source_bytes + text_bytes), 0) FROM documents"
                " WHERE tenant = ?",
                (document.tenant,),
            ).fetchall()
            if count >= quota.documents_max:
                raise QuotaExceeded(f"there are {count} documents (documents.documents_max)")
            _check_bytes(int(nbytes) + len(source), quota)
            row = _row(document) | {"lease": "", "lease_until_s": 0.0}
            row["title"] = self._sealed(document.tenant, document.id, "title", document.title)
            del row["seq"]
            names, marks = ", ".join(row), ", ".join("?" * len(row))
            ((seq,),) = db.execute(
                f"INSERT INTO documents({names}) VALUES({marks}) RETURNING seq", tuple(row.values())
            ).fetchall()
            db.execute(
                "INSERT INTO texts(tenant, id, source) VALUES(?, ?, ?)",
                (document.tenant, document.id, self._sealed_source(document, source)),
            )
            return replace(document, seq=seq)

    def get(self, tenant: str, document: str) -> Document:
        """Return a document. Raises `EntryNotFound`."""
        with self._tables.reading(tenant) as db:
            row = db.execute(
                f"SELECT {LISTED} FROM documents WHERE tenant = ? AND id = ?", (tenant, document)
            ).fetchone()
        if row is None:
            raise EntryNotFound(UNKNOWN)
        return self._document(row)

    def all(self, tenant: str, limit: int, after: str = "") -> list[Document]:
        """Return a tenant's documents by id."""
        with self._tables.reading(tenant) as db:
            rows = db.execute(
                f"SELECT {LISTED} FROM documents WHERE tenant = ? AND id > ? ORDER BY id LIMIT ?",
                (tenant, after, limit),
            ).fetchall()
        return [self._document(row) for row in rows]

    def text(self, tenant: str, document: str) -> str | None:
        """Return a document's text; None before it is read. Raises `EntryNotFound`."""
        found: str | None = self._part("text", tenant, document)
        if found is None:
            return None
        opened = self._opened(tenant, document, "text", found)
        return self._without_key(tenant, document, "") if opened is None else opened

    def source(self, tenant: str, document: str) -> bytes | None:
        """Return what was sent; None once the text is read. Raises `EntryNotFound`."""
        found: bytes | None = self._part("source", tenant, document)
        sealer = self._tables.sealer
        if found is None or sealer is None:
            return found
        opened = sealer.open(tenant, (document, "source"), found)
        return self._without_key(tenant, document, b"") if opened is None else opened

    def _without_key(self, tenant: str, document: str, nothing: T) -> T:
        """Return nothing of a document that is being deleted, whose key goes first; refuse any other."""
        if self.get(tenant, document).state != "deleting":
            raise KnowledgeError("the key that has sealed this document is gone: send it again")
        return nothing

    def _part(self, name: str, tenant: str, document: str) -> Any:
        with self._tables.reading(tenant) as db:
            row = db.execute(
                f"SELECT {name} FROM texts WHERE tenant = ? AND id = ?", (tenant, document)
            ).fetchone()
        if row is None:
            raise EntryNotFound(UNKNOWN)
        return row[0]

    def put_text(
        self, tenant: str, document: str, text: str, quota: Quota, *, owner: str | None = None
    ) -> None:
        """Store the text in place of what was sent. Raises `QuotaExceeded`, `EntryNotFound`."""
        size = len(text.encode())
        with self._tables.writing(tenant, WRITES) as db:
            self._change(db, tenant, document, {"text_bytes": size}, owner)
            ((nbytes,),) = db.execute(
                "SELECT sum(source_bytes + text_bytes) FROM documents WHERE tenant = ?", (tenant,)
            ).fetchall()
            _check_bytes(int(nbytes), quota)
            db.execute(
                "UPDATE texts SET source = NULL, text = ? WHERE tenant = ? AND id = ?",
                (self._sealed(tenant, document, "text", text), tenant, document),
            )

    def writing(self, tenant: str) -> AbstractContextManager[object]:
        """Begin what this thread writes as a whole; other writers of the tenant wait, and its deletions."""
        return self._tables.writing(tenant, WRITES)

    def change(self, tenant: str, document: str, *, owner: str | None = None, **fields: Any) -> Document:
        """Set fields of `Document`, or `lease`, unless it is being deleted. Raises `EntryNotFound`."""
        with self._tables.writing(tenant, WRITES) as db:
            self._change(db, tenant, document, fields, owner)
        return self.get(tenant, document)

    def _change(
        self, db: Rows, tenant: str, document: str, fields: dict[str, Any], owner: str | None
    ) -> None:
        fields = {name: json.dumps(value) if name == "entries" else value for name, value in fields.items()}
        assigned = ", ".join(f"{name} = ?" for name in fields)
        is_own, owners = ("", ()) if owner is None else (" AND lease = ?", (owner,))
        done = db.execute(
            f"UPDATE documents SET {assigned}, lease_until_s = ? WHERE tenant = ? AND id = ?"
            f" AND state <> 'deleting'{is_own}",
            (*fields.values(), self._clock() + self.lease_s, tenant, document, *owners),
        )
        if done.rowcount == 0:
            raise EntryNotFound(UNKNOWN)

    def waiting(self) -> list[str]:
        """Return the tenants with open work that no ingress works on, the longest waiting first."""
        with self._tables.reading("") as db, self._tables.everyone(db):
            rows = db.execute(
                f"SELECT tenant FROM documents WHERE {OPEN} AND {FREE} GROUP BY tenant ORDER BY min(seq)",
                (self._clock(),),
            ).fetchall()
        return [row[0] for row in rows]

    def processing(self, tenant: str) -> int:
        """Return how many of a tenant's documents are not read yet."""
        with self._tables.reading(tenant) as db:
            ((count,),) = db.execute(
                "SELECT count(*) FROM documents WHERE tenant = ? AND state = 'processing'", (tenant,)
            ).fetchall()
        return int(count)

    def claim(self, owner: str, tenant: str) -> Document | None:
        """Lease a tenant's next document with open work that no ingress works on, the oldest first."""
        now_s = self._clock()
        with self._tables.writing(tenant) as db:
            row = db.execute(
                f"SELECT {LISTED} FROM documents WHERE {OPEN} AND {FREE} AND tenant = ? ORDER BY seq LIMIT 1"
                f"{self._tables.skip_locked}",
                (now_s, tenant),
            ).fetchone()
            if row is None:
                return None
            found = self._document(row)
            db.execute(
                "UPDATE documents SET lease = ?, lease_until_s = ? WHERE seq = ?",
                (owner, now_s + self.lease_s, found.seq),
            )
            return found

    def renew(self, tenant: str, document: str, owner: str) -> bool:
        """Keep a lease; False if it is lost or the document is gone or to be deleted."""
        with self._tables.writing(tenant, WRITES) as db:
            done = db.execute(
                "UPDATE documents SET lease_until_s = ? WHERE tenant = ? AND id = ? AND lease = ?"
                " AND state <> 'deleting'",
                (self._clock() + self.lease_s, tenant, document, owner),
            )
            return bool(done.rowcount)

    def release(self, owner: str) -> None:
        """Give back all leases of an owner that stops."""
        with self._tables.writing("") as db, self._tables.everyone(db):
            db.execute("UPDATE documents SET lease = '', lease_until_s = 0 WHERE lease = ?", (owner,))

    def put_back(self, document: Document, owner: str, *, later: bool) -> None:
        """Give back a lease, if it is still the owner's.

        `later`: what is left to do is not begun again before `lease_s` have passed.
        """
        lease, until_s = ("later", self._clock() + self.lease_s) if later else ("", 0.0)
        with self._tables.writing(document.tenant) as db:
            db.execute(
                "UPDATE documents SET lease = ?, lease_until_s = ? WHERE seq = ? AND lease = ?",
                (lease, until_s, document.seq, owner),
            )

    def note_uses(self, tenant: str, documents: list[str], session: bytes, most: int) -> None:
        """Record that a session's blocks hold these documents. Raises `EntryNotFound` if one is gone.

        Beyond `most` sessions none is recorded, which `sessions_of` tells.
        """
        with self._tables.writing(tenant, WRITES) as db:
            for one in documents:
                known = db.execute(
                    "SELECT state FROM documents WHERE tenant = ? AND id = ?", (tenant, one)
                ).fetchone()
                if known is None or known[0] == "deleting":
                    raise EntryNotFound(UNKNOWN)
                ((count,),) = db.execute(
                    "SELECT count(*) FROM (SELECT 1 FROM uses WHERE tenant = ? AND id = ? LIMIT ?) AS known",
                    (tenant, one, most + 1),
                ).fetchall()
                if count <= most:  # one more than the most: so many that they are not all known
                    db.execute(
                        "INSERT INTO uses(tenant, id, session) VALUES(?, ?, ?) ON CONFLICT DO NOTHING",
                        (tenant, one, session),
                    )

    def sessions_of(self, tenant: str, document: str) -> list[bytes]:
        """Return the sessions whose blocks hold a document; more than `most` if not all are known."""
        with self._tables.reading(tenant) as db:
            rows = db.execute(
                "SELECT session FROM uses WHERE tenant = ? AND id = ?", (tenant, document)
            ).fetchall()
        return [row[0] for row in rows]

    def mark_deleting(self, tenant: str, document: str) -> Document:
        """Serve nothing of a document any more. Raises `EntryNotFound`."""
        with self._tables.writing(tenant, WRITES) as db:
            done = db.execute(
                "UPDATE documents SET state = 'deleting' WHERE tenant = ? AND id = ?", (tenant, document)
            )
            if done.rowcount == 0:
                raise EntryNotFound(UNKNOWN)
        return self.get(tenant, document)

    def erase(self, tenant: str, document: str) -> None:
        """Erase a document, so that neither the file nor its log holds a byte of it."""
        sealer = self._tables.sealer
        with self._tables.writing(tenant, WRITES) as db:
            others = db.execute(
                "SELECT 1 FROM documents WHERE tenant = ? AND id <> ? LIMIT 1", (tenant, document)
            ).fetchone()
            if sealer is not None and others is None:
                sealer.destroy(tenant)  # of its last document: before the rows
            for table in ("documents", "texts", "uses"):
                db.execute(f"DELETE FROM {table} WHERE tenant = ? AND id = ?", (tenant, document))
        self._tables.erased()

    def erased(self) -> None:
        """Empty what holds what was erased: a file's write-ahead log."""
        self._tables.erased()

    def close(self) -> None:
        """Close the tables."""
        self._tables.close()

    def _sealed(self, tenant: str, document: str, part: str, text: str) -> str:
        sealer = self._tables.sealer
        if sealer is None:
            return text
        sealed = sealer.seal(tenant, (document, part), text.encode())
        return SEALED_TEXT + b64encode(sealed).decode("ascii")

    def _sealed_source(self, document: Document, source: bytes) -> bytes:
        sealer = self._tables.sealer
        return source if sealer is None else sealer.seal(document.tenant, (document.id, "source"), source)

    def _opened(self, tenant: str, document: str, part: str, text: str) -> str | None:
        """Return a text as it was; None if its key is gone."""
        sealer = self._tables.sealer
        if sealer is None or not text.startswith(SEALED_TEXT):
            return text
        opened = sealer.open(tenant, (document, part), b64decode(text[len(SEALED_TEXT) :]))
        return None if opened is None else opened.decode()

    def _document(self, row: tuple[Any, ...]) -> Document:
        values = dict(zip(COLUMNS, row, strict=True))
        found = Document(**values | {"entries": tuple(parse_json(values["entries"]))})
        # Without its key it is still there to be deleted.
        return replace(found, title=self._opened(found.tenant, found.id, "title", found.title) or "")


def _check_bytes(nbytes: int, quota: Quota) -> None:
    if nbytes > quota.bytes_max:
        raise QuotaExceeded(
            f"documents have {nbytes} bytes with it, and may have {quota.bytes_max} (documents.bytes_max)"
        )


def _row(document: Document) -> dict[str, Any]:
    values = {name: getattr(document, name) for name in COLUMNS}
    return values | {"entries": json.dumps(document.entries)}
