"""The knowledge base of several machines, in PostgreSQL. Imported only where `knowledge.postgres.url` is set."""

from router.knowledge.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
