"""Opens the store that the settings name: a file of this machine, or a PostgreSQL that several share."""

from __future__ import annotations

from pathlib import Path

from samovar.configs.extras import require
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge.entries import KnowledgeStore
from samovar.router.context.knowledge.sqlite_store import SqliteStore, store_file


def open_store(
    settings: KnowledgeSettings, cache_dir: Path, embedder: str = "", must_open: bool = True
) -> KnowledgeStore:
    """Open the store that the settings name. `cache_dir`: `model.cache_dir`.

    See `SqliteStore` and `PostgresStore`. Raises `KnowledgeError`, and `ExtraMissing` if PostgreSQL's client
    is not installed.
    """
    if settings.postgres.url is not None:
        require("psycopg", "knowledge.postgres.url")
        from samovar.router.context.knowledge.postgres.store import (
            PostgresStore,  # who has a file does not load the client
        )

        return PostgresStore(settings, embedder=embedder, must_open=must_open)
    return SqliteStore(
        store_file(settings, cache_dir),
        embedder=embedder,
        turns_max=settings.turns_max,
        vectors_bytes_max=settings.vectors_bytes_max,
        busy_s=settings.busy_s,
        must_open=must_open,
    )
