"""The shelf's durable items in an SQLite file beside the nvme tier, so that they survive a restart.

Erased content is overwritten (`secure_delete`), and the journal emptied after each erasure. A file that
cannot be read or written costs speed only: the service goes on without. Bodies carry a digest under their
tenant's salt, which the ingress checks: bytes changed on disk are never used. Where records are encrypted,
each body is sealed with its session's key.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samovar.cache_tiers.blocks import SEALED_MAGIC
from samovar.cache_tiers.sessions.shelf import Item, Kind

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import SessionSealer

logger = logging.getLogger(__name__)

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS kept (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant BLOB NOT NULL, session BLOB NOT NULL, kind TEXT NOT NULL, name BLOB NOT NULL,
    body BLOB NOT NULL, unix_s REAL NOT NULL, expires_unix_s REAL NOT NULL,
    UNIQUE (tenant, kind, name)
)
"""
KINDS: dict[str, Kind] = {"reply": "reply", "response": "response"}


class ItemFile:
    """Durable items on disk, written as they come. Not thread-safe; usable from any thread, one at a time.

    All that is in it is in the shelf too: what is not found there need not be looked for here.
    """

    def __init__(self, path: Path, *, is_sealed: bool = False) -> None:
        """Open the file, or create it, for its owner only. Raises `OSError`, `sqlite3.Error`.

        `is_sealed`: whether bodies are sealed. What is not as they are is erased: a cache is not taken over.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._base = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        version = self._base.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            self._base.close()
            raise sqlite3.DatabaseError(f"{path} is of another version ({version})")
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            self._base.execute(f"PRAGMA {pragma}")
        self._base.execute(SCHEMA)
        self._base.execute(f"PRAGMA user_version = {VERSION}")
        self._is_sealed = is_sealed
        other = self._base.execute(
            "DELETE FROM kept WHERE (substr(body, 1, ?) = ?) <> ?",
            (len(SEALED_MAGIC), SEALED_MAGIC, is_sealed),
        )
        if other.rowcount or is_sealed:  # also of a start that died behind the deletion
            self._empty_journal()

    def load(self, now_unix_s: float) -> list[Item]:
        """Return what has not expired, the latest put last; the rest is erased. Raises `sqlite3.Error`."""
        with self._base:
            self._base.execute("DELETE FROM kept WHERE expires_unix_s <= ?", (now_unix_s,))
        rows = self._base.execute(
            "SELECT tenant, session, kind, name, body, unix_s, expires_unix_s FROM kept ORDER BY number"
        )
        return [
            Item(tenant, session, KINDS[kind], name, body, unix_s, expires_unix_s, True, self._is_sealed)
            for tenant, session, kind, name, body, unix_s, expires_unix_s in rows
            if kind in KINDS and all(isinstance(one, bytes) for one in (tenant, session, name, body))
        ]

    def put(self, item: Item) -> None:
        """Write an item. Raises `sqlite3.Error`."""
        self._base.execute(
            "INSERT OR REPLACE INTO kept (tenant, session, kind, name, body, unix_s, expires_unix_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                item.tenant,
                item.session,
                item.kind,
                item.name,
                item.body,
                item.unix_s,
                item.expires_unix_s,
            ),
        )

    def erase(self, items: Iterable[Item]) -> None:
        """Erase items that gave way. Raises `sqlite3.Error`."""
        keys = [(item.tenant, item.kind, item.name) for item in items]
        self._base.execute("BEGIN IMMEDIATE")
        try:
            self._base.executemany("DELETE FROM kept WHERE tenant = ? AND kind = ? AND name = ?", keys)
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    def forget(self, tenant: bytes, kind: Kind, name: bytes) -> None:
        """Erase an item on purpose, also from the journal. Raises `sqlite3.Error`."""
        self._base.execute(
            "DELETE FROM kept WHERE tenant = ? AND kind = ? AND name = ?", (tenant, kind, name)
        )
        self._empty_journal()

    def clear(self, tenant: bytes, session: bytes | None, unix_s: float) -> None:
        """Erase what a tenant's requests up to `unix_s` left, of a session or (None) all.

        Raises `sqlite3.Error`.
        """
        self._base.execute(
            "DELETE FROM kept WHERE tenant = ? AND unix_s <= ? AND (? IS NULL OR session = ?)",
            (tenant, unix_s, session, session),
        )
        self._empty_journal()

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def _empty_journal(self) -> None:
        busy, *_ = self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("another process reads the file: its journal is not emptied")


def sealed(item: Item, sealer: SessionSealer) -> Item | None:
    """Return an item as the file holds it; None: its session was erased since. Raises `TierError`."""
    body = sealer.seal(item.tenant, item.session, item.unix_s, _row(item), item.body)
    return None if body is None else replace(item, body=body, is_sealed=True)


def opened(item: Item, sealer: SessionSealer) -> Item | None:
    """Return an item of the file as it was; None: its key is gone, or it was changed. Raises `TierError`."""
    from samovar.cache_tiers.encryption import BadSeal

    try:
        body = sealer.open(item.tenant, item.session, _row(item), item.body)
    except BadSeal as error:
        logger.error("what an ingress had on disk is not used: %s", error)
        return None
    return None if body is None else replace(item, body=body, is_sealed=False)


def _row(item: Item) -> bytes:
    from samovar.cache_tiers.encryption import row_name

    return row_name(item.kind, item.name, float(item.unix_s), float(item.expires_unix_s))
