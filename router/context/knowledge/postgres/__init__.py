"""The knowledge base of several machines, in PostgreSQL. Its client is loaded where it is used."""

from samovar.router.context.knowledge.postgres.opening import open_store

__all__ = ["open_store"]
