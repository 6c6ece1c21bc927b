"""Summaries of conversations, in a SQLite file: what a cut without them would not know after a restart.

Where records are encrypted, a summary is sealed with its session's key. Nothing is searched in the file.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from samovar.cache_tiers.blocks import SEALED_TEXT
from samovar.configs.json_text import parse_json
from samovar.router.context.compaction.compose import Summary
from samovar.router.context.compaction.memory import Owner
from samovar.router.context.knowledge import SqliteFile

FILE_NAME = "compaction.sqlite"
SCHEMA = """
CREATE TABLE summaries(id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, session BLOB NOT NULL,
    link BLOB NOT NULL, messages INTEGER NOT NULL, text TEXT NOT NULL, at_s REAL NOT NULL,
    UNIQUE(tenant, session, link));
CREATE INDEX summaries_of ON summaries(tenant, session, messages);
"""
# Of what they were made that were written before it is not known.
WITH_ENTRIES = """
ALTER TABLE summaries ADD COLUMN entries TEXT;
"""
SCHEMAS = (SCHEMA, WITH_ENTRIES)


class SummarySeal(Protocol):
    """Seals summaries with keys of their sessions. Raises `KnowledgeError` if these cannot be had."""

    def sealed(self, owner: Owner, link: bytes, messages: int, text: str, at_s: float) -> str:
        """Return the text of a summary as the file holds it."""
        ...

    def opened(self, owner: Owner, link: bytes, messages: int, text: str) -> str | None:
        """Return a summary's text; None: its key is gone, or it was changed."""
        ...


class _MayNotStay(Exception):
    """Rolls the transaction back."""


class SummaryStore:
    """Keeps the last summaries of each session. Methods block. They raise `KnowledgeError`. Thread-safe.

    `of_session_max`, `rows_max`: the oldest go. `seal`: None: they are plain text. Those that are not as they
    are to be, sealed or plain, are not read. `wall_clock`: Unix seconds. `cleared_unix_s`: when a session was
    last deleted as far as is known; this ingress may not have been there to be asked.
    """

    def __init__(
        self,
        path: Path,
        *,
        of_session_max: int,
        rows_max: int,
        busy_s: float,
        seal: SummarySeal | None = None,
        wall_clock: Callable[[], float] = time.time,
        cleared_unix_s: Callable[[Owner], float] = lambda owner: -math.inf,
    ) -> None:
        self._file = SqliteFile(path, SCHEMAS, busy_s, must_open=False)
        self._of_session_max = of_session_max
        self._rows_max = rows_max
        self._seal = seal
        self._wall_clock = wall_clock
        self._cleared_unix_s = cleared_unix_s

    def latest(self, owner: Owner, links: Sequence[bytes]) -> Summary | None:
        """Return the summary of the longest beginning of this conversation; `links`: see `chain`."""
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT messages, link, text, entries, at_s FROM summaries WHERE tenant = ? AND session = ?"
                " AND messages < ? AND (substr(text, 1, ?) = ?) = ? ORDER BY messages DESC",
                (*owner, len(links), len(SEALED_TEXT), SEALED_TEXT, self._seal is not None),
            ).fetchall()
        cleared_s = self._cleared_unix_s(owner)
        if any(at_s <= cleared_s for *_, at_s in rows):
            self._forget_before(owner, cleared_s)
        for count, link, text, entries, at_s in rows:
            if links[count] == link and at_s > cleared_s:
                said = text if self._seal is None else self._seal.opened(owner, link, count, text)
                if said is not None:
                    return Summary(count, said, tuple(parse_json(entries or "[]")))
        return None

    def put(
        self, owner: Owner, link: bytes, summary: Summary, may_stay: Callable[[], bool] = lambda: True
    ) -> bool:
        """Store a summary of the messages that `link` stands for; return whether it is kept.

        `may_stay` is asked behind the write, before it is committed: without it nothing of it is kept,
        whatever happens next.
        """
        at_s, text = self._wall_clock(), summary.text
        if self._seal is not None:
            text = self._seal.sealed(owner, link, summary.messages, text, at_s)
        try:
            with self._file.transaction() as db:
                self._put(db, owner, link, replace(summary, text=text), at_s)
                if not may_stay():
                    raise _MayNotStay
        except _MayNotStay:
            return False
        return True

    def _put(self, db: sqlite3.Connection, owner: Owner, link: bytes, summary: Summary, at_s: float) -> None:
        tenant, session = owner
        # Of before a key was set, or was taken away: it is not read, and is not to stay.
        db.execute(
            "DELETE FROM summaries WHERE tenant = ? AND session = ? AND (substr(text, 1, ?) = ?) <> ?",
            (tenant, session, len(SEALED_TEXT), SEALED_TEXT, self._seal is not None),
        )
        db.execute(
            "INSERT OR REPLACE INTO summaries(tenant, session, link, messages, text, at_s, entries)"
            " VALUES(?, ?, ?, ?, ?, ?, ?)",
            (tenant, session, link, summary.messages, summary.text, at_s, json.dumps(summary.entries)),
        )
        db.execute(
            "DELETE FROM summaries WHERE tenant = ? AND session = ? AND id NOT IN (SELECT id FROM"
            " summaries WHERE tenant = ? AND session = ? ORDER BY id DESC LIMIT ?)",
            (tenant, session, tenant, session, self._of_session_max),
        )
        db.execute(
            "DELETE FROM summaries WHERE id NOT IN (SELECT id FROM summaries ORDER BY id DESC LIMIT ?)",
            (self._rows_max,),
        )

    def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Erase these sessions of a tenant, or all (None): also from the file's log."""
        with self._file.transaction() as db:
            if sessions is None:
                db.execute("DELETE FROM summaries WHERE tenant = ?", (tenant,))
            for one in sessions or ():
                db.execute("DELETE FROM summaries WHERE tenant = ? AND session = ?", (tenant, one))
        self._file.empty_log()  # also for who repeats a deletion that could not do that

    def _forget_before(self, owner: Owner, at_s: float) -> None:
        with self._file.transaction() as db:
            db.execute("DELETE FROM summaries WHERE tenant = ? AND session = ? AND at_s <= ?", (*owner, at_s))
        self._file.empty_log()

    def forget_entries(self, tenant: str, entries: Collection[str] | None) -> None:
        """Erase what was made of prompts with these entries, or with any (None): also from the file's log."""
        held = "entries <> '[]'"
        if entries is not None:
            held = "EXISTS (SELECT 1 FROM json_each(entries) JOIN json_each(?) USING(value))"
        values = () if entries is None else (json.dumps(list(entries)),)
        with self._file.transaction() as db:
            db.execute(
                f"DELETE FROM summaries WHERE tenant = ? AND (entries IS NULL OR {held})", (tenant, *values)
            )
        self._file.empty_log()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
