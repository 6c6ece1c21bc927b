"""The knowledge base of several machines, in PostgreSQL. Its client is loaded where `knowledge.postgres.url` is set."""

from router.knowledge.postgres.opening import open_store

__all__ = ["open_store"]
