"""Summaries of conversations, in a SQLite file: what a cut without them would not know after a restart.

Where records are encrypted, a summary is sealed with its session's key. Nothing is searched in the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
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


class SummaryStore:
    """Keeps the last summaries of each session. Methods block. They raise `KnowledgeError`. Thread-safe.

    `of_session_max`, `rows_max`: the oldest go. `seal`: None: they are plain text. Those that are not as they
    are to be, sealed or plain, are not read. `wall_clock`: Unix seconds.
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
    ) -> None:
        self._file = SqliteFile(path, SCHEMAS, busy_s, must_open=False)
        self._of_session_max = of_session_max
        self._rows_max = rows_max
        self._seal = seal
        self._wall_clock = wall_clock

    def latest(self, owner: Owner, links: Sequence[bytes]) -> Summary | None:
        """Return the summary of the longest beginning of this conversation; `links`: see `chain`."""
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT messages, link, text, entries FROM summaries WHERE tenant = ? AND session = ?"
                " AND messages < ? AND (substr(text, 1, ?) = ?) = ? ORDER BY messages DESC",
                (*owner, len(links), len(SEALED_TEXT), SEALED_TEXT, self._seal is not None),
            ).fetchall()
        for count, link, text, entries in rows:
            if links[count] == link:
                said = text if self._seal is None else self._seal.opened(owner, link, count, text)
                if said is not None:
                    return Summary(count, said, tuple(parse_json(entries or "[]")))
        return None

    def put(self, owner: Owner, link: bytes, summary: Summary) -> None:
        """Store a summary of the messages that `link` stands for."""
        tenant, session = owner
        at_s, text = self._wall_clock(), summary.text
        if self._seal is not None:
            text = self._seal.sealed(owner, link, summary.messages, text, at_s)
        with self._file.transaction() as db:
            # Of before a key was set, or was taken away: it is not read, and is not to stay.
            db.execute(
                "DELETE FROM summaries WHERE tenant = ? AND session = ? AND (substr(text, 1, ?) = ?) <> ?",
                (tenant, session, len(SEALED_TEXT), SEALED_TEXT, self._seal is not None),
            )
            db.execute(
                "INSERT OR REPLACE INTO summaries(tenant, session, link, messages, text, at_s, entries)"
                " VALUES(?, ?, ?, ?, ?, ?, ?)",
                (
                    tenant,
                    session,
                    link,
                    summary.messages,
                    text,
                    at_s,
                    json.dumps(summary.entries),
                ),
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
