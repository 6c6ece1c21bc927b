"""Summaries of conversations, in a SQLite file: what a cut without them would not know after a restart."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

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


class SummaryStore:
    """Keeps the last summaries of each session. Methods block. They raise `KnowledgeError`. Thread-safe.

    `of_session_max`, `rows_max`: the oldest go. `wall_clock`: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        of_session_max: int,
        rows_max: int,
        busy_s: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = SqliteFile(path, SCHEMAS, busy_s, must_open=False)
        self._of_session_max = of_session_max
        self._rows_max = rows_max
        self._wall_clock = wall_clock

    def latest(self, owner: Owner, links: Sequence[bytes]) -> Summary | None:
        """Return the summary of the longest beginning of this conversation; `links`: see `chain`."""
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT messages, link, text, entries FROM summaries WHERE tenant = ? AND session = ?"
                " AND messages < ? ORDER BY messages DESC",
                (*owner, len(links)),
            ).fetchall()
        return next(
            (
                Summary(count, text, tuple(parse_json(entries or "[]")))
                for count, link, text, entries in rows
                if links[count] == link
            ),
            None,
        )

    def put(self, owner: Owner, link: bytes, summary: Summary) -> None:
        """Store a summary of the messages that `link` stands for."""
        tenant, session = owner
        with self._file.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO summaries(tenant, session, link, messages, text, at_s, entries)"
                " VALUES(?, ?, ?, ?, ?, ?, ?)",
                (
                    tenant,
                    session,
                    link,
                    summary.messages,
                    summary.text,
                    self._wall_clock(),
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
