"""What finds an entry's newest version in PostgreSQL: its words, its names, its vector."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.router.context.knowledge.entries import EntryVersion, Vector
from samovar.router.context.knowledge.postgres.connections import Connection
from samovar.router.context.knowledge.postgres.words import Tokenizer, columns_of, postings_of


def index(
    db: Connection,
    tenant: str,
    made: Sequence[EntryVersion],
    vectors: Sequence[Vector | None],
    tokenizer: Tokenizer,
    embedder: str,
) -> None:
    """Write new heads, and what finds them; retired ones are found by nothing.

    All in a few statements, whatever their number.
    """
    live = [one for one in made if one.operation != "retire"]
    cut = dict(
        zip(
            (one.seq for one in live),
            tokenizer.tokens([columns_of(one.content) for one in live]),
            strict=True,
        )
    )
    db.execute(
        "INSERT INTO heads(tenant, entry, seq, is_retired, tokens) SELECT %s, h.*"
        " FROM unnest(%s::text[], %s::bigint[], %s::bool[], %s::int[]) AS h",
        (
            tenant,
            [one.ref.entry for one in made],
            [one.seq for one in made],
            [one.operation == "retire" for one in made],
            [len(cut.get(one.seq, ())) for one in made],
        ),
    )
    postings = [(seq, posting) for seq, tokens in cut.items() for posting in postings_of(tokens)]
    db.execute(
        "INSERT INTO postings(tenant, term, seq, weight, places) SELECT %s, p.term, p.seq, p.weight,"
        " p.places::int[] FROM unnest(%s::text[], %s::bigint[], %s::float8[], %s::text[])"
        " AS p(term, seq, weight, places)",
        (
            tenant,
            [posting.term for _, posting in postings],
            [seq for seq, _ in postings],
            [posting.weight for _, posting in postings],
            ["{" + ",".join(map(str, posting.places)) + "}" for _, posting in postings],
        ),
    )
    names = [(one.seq, name) for one in live for name in one.content.names]
    db.execute(
        "INSERT INTO names(tenant, name, seq) SELECT %s, n.* FROM unnest(%s::text[], %s::bigint[]) AS n",
        (tenant, [name for _, name in names], [seq for seq, _ in names]),
    )
    by_seq = dict(zip((one.seq for one in made), vectors, strict=True))
    own = [(one.seq, by_seq[one.seq]) for one in live]
    some = [(seq, vector) for seq, vector in own if vector is not None]
    if some:
        db.execute(
            "INSERT INTO vectors(seq, tenant, embedder, vector) SELECT x.seq, %s, %s, x.vector::vector"
            " FROM unnest(%s::bigint[], %s::text[]) AS x(seq, vector)",
            (tenant, embedder, [seq for seq, _ in some], [as_text(vector) for _, vector in some]),
        )


def unindex(db: Connection, tenant: str, entries: Sequence[str]) -> None:
    """Delete heads, and what finds them; their vectors go with them."""
    heads = "SELECT seq FROM heads WHERE tenant = %s AND entry = ANY(%s)"
    for table in ("names", "postings"):
        db.execute(f"DELETE FROM {table} WHERE seq IN ({heads})", (tenant, list(entries)))
    db.execute("DELETE FROM heads WHERE tenant = %s AND entry = ANY(%s)", (tenant, list(entries)))


def as_text(vector: Vector) -> str:
    """Return a vector as pgvector reads it."""
    return "[" + ",".join(map(repr, vector.tolist())) + "]"
