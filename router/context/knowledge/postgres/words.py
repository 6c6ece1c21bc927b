"""Words in PostgreSQL, ranked as in the embedded store: FTS5's tokens, and its BM25 over a table of them.

PostgreSQL's own ranking does not know how rare a word is, so that a word of every entry weighs as much as one
of a single entry; and its parser takes hosts and paths for one word.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from samovar.router.context.knowledge.entries import Content, EntryRef, Kind
from samovar.router.context.knowledge.postgres.connections import Connection
from samovar.router.context.knowledge.sqlite_schema import TOKENIZER, WEIGHTS

TERM_CHARS_MAX = 64
"""Longer words are indexed by their digest: a key of an index has at most 2,700 bytes."""
COLUMN_BITS = 24
"""A place is a word's number in its column, and above these bits the column's number."""
COLUMNS = ("title", "text", "topics")

Token = tuple[int, str]
"""Its place, and what it is indexed by."""


class Tokenizer:
    """Cuts texts into words as FTS5 does, by FTS5. Thread-safe."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def _db(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._local, "db", None)
        if found is None:
            found = sqlite3.connect(":memory:", isolation_level=None)
            found.execute(
                f"CREATE VIRTUAL TABLE cut USING fts5({', '.join(COLUMNS)}, content='', {TOKENIZER})"
            )
            found.execute("CREATE VIRTUAL TABLE words USING fts5vocab(cut, 'instance')")
            self._local.db = found
        return found

    def tokens(self, texts: Sequence[tuple[str, str, str]]) -> list[list[Token]]:
        """Return the words of each text (title, text, topics), in the order of their places."""
        db = self._db
        found: list[list[Token]] = [[] for _ in texts]
        try:
            db.execute("BEGIN")
            rows = ((number, *text) for number, text in enumerate(texts))
            db.executemany("INSERT INTO cut(rowid, title, text, topics) VALUES(?, ?, ?, ?)", rows)
            for term, number, column, offset in db.execute("SELECT term, doc, col, offset FROM words"):
                place = (COLUMNS.index(column) << COLUMN_BITS) + offset
                found[number].append((place, _key(term)))
        finally:
            db.execute("ROLLBACK")
        for tokens in found:
            tokens.sort()
        return found


def _key(term: str) -> str:
    if len(term) <= TERM_CHARS_MAX:
        return term
    digest = hashlib.sha256(term.encode("utf-8", "replace")).hexdigest()
    return f"{term[: TERM_CHARS_MAX // 2]} {digest}"  # no word has a blank


@dataclass(frozen=True, slots=True)
class Posting:
    """A word of one entry. `weight`: how often it is there, by the columns' weights. `places`: where."""

    term: str
    weight: float
    places: list[int]


def postings_of(tokens: Sequence[Token]) -> list[Posting]:
    """Return the words of one text, each once."""
    places: dict[str, list[int]] = {}
    for place, term in tokens:
        places.setdefault(term, []).append(place)
    return [
        Posting(term, sum(WEIGHTS[place >> COLUMN_BITS] for place in of), of) for term, of in places.items()
    ]


def columns_of(content: Content) -> tuple[str, str, str]:
    """Return what is indexed of an entry."""
    return content.indexed


# A word of a question may be several tokens (`orders_raw`), which count where they follow each other.
_BEST = f"""
WITH asked AS (
    SELECT * FROM unnest(%(words)s::int[], %(terms)s::text[], %(steps)s::int[], %(sizes)s::int[])
        AS asked(word, term, step, size)
), begins AS (
    SELECT a.word, p.seq, place - a.step AS begin
    FROM asked a JOIN postings p ON p.tenant = %(tenant)s AND p.term = a.term, unnest(p.places) AS place
    WHERE a.size > 1
    GROUP BY a.word, p.seq, place - a.step HAVING count(DISTINCT a.step) = max(a.size)
), hits AS (
    SELECT a.word, p.seq, p.weight::float8
    FROM asked a JOIN postings p ON p.tenant = %(tenant)s AND p.term = a.term
    WHERE a.size = 1
    UNION ALL
    SELECT word, seq, sum((%(weights)s::float8[])[1 + (begin >> {COLUMN_BITS})]) FROM begins
    GROUP BY word, seq
), corpus AS (
    SELECT count(*)::float8 AS entries, greatest(avg(tokens)::float8, 1e-9) AS tokens
    FROM heads WHERE tenant = %(tenant)s AND NOT is_retired
), rarities AS (
    SELECT word, greatest(ln((c.entries - count(*) + 0.5::float8) / (count(*) + 0.5::float8)), 1e-6) AS rarity
    FROM hits, corpus c GROUP BY word, c.entries
), scores AS (
    SELECT seq, sum(rarity * weight * 2.2 / (weight + 1.2 * (0.25 + 0.75 * (h.tokens / c.tokens)))) AS score
    FROM hits JOIN rarities USING (word) JOIN heads h USING (seq), corpus c GROUP BY seq
)
SELECT v.entry, v.number, score FROM scores JOIN versions v USING (seq)
WHERE v.tenant = %(tenant)s AND (%(kinds)s::text[] IS NULL OR v.kind = ANY(%(kinds)s))
ORDER BY round(score::numeric, 9) DESC, v.entry LIMIT %(limit)s
"""


def best(
    db: Connection, tenant: str, asked: Sequence[Sequence[Token]], kinds: Collection[Kind], limit: int
) -> list[tuple[EntryRef, float]]:
    """Return a tenant's entries that hold any of the words, the best first. `asked`: tokens of each word."""
    words, terms, steps, sizes = [], [], [], []
    for number, tokens in enumerate(asked):
        for step, (_, term) in enumerate(tokens):
            words.append(number)
            terms.append(term)
            steps.append(step)
            sizes.append(len(tokens))
    if not terms:
        return []
    values = {
        "tenant": tenant,
        "words": words,
        "terms": terms,
        "steps": steps,
        "sizes": sizes,
        "weights": list(WEIGHTS),
        "kinds": list(kinds) or None,
        "limit": limit,
    }
    rows = db.execute(_BEST, values).fetchall()
    return [(EntryRef(entry, number), score) for entry, number, score in rows]
