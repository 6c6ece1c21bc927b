"""A knowledge base's store that leaves no readable text, over a file or a schema of PostgreSQL."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samovar.cache_tiers.blocks import tenant_tag
from samovar.cache_tiers.encryption import LeasedKeys, OuterKeys, OuterWrapper, Sealing
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge import SqliteStore
from samovar.router.context.sealed import SealedStore, open_sealed
from tests.support.nodes.encrypted import key_file, outer_file
from tests.support.router.knowledge_desks import Desk, PostgresDesk, SqliteDesk, postgres

if TYPE_CHECKING:
    from tests.support.services.postgres_server import PostgresServer

tag_of = partial(tenant_tag, b"secret")
"""A tenant's tag."""


class KeyRing:
    """What a service seals with: an operator's key in a folder, and the file of sessions' keys beside it."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self.folder = folder
        self.outer = outer_file(folder, *lines)
        self.file = key_file(folder)
        self.sealing = self.opened()

    def opened(self) -> Sealing:
        """As another ingress has it: with leases of its own."""
        return Sealing(LeasedKeys(self.file, time.monotonic), OuterWrapper(OuterKeys(self.outer)))


def sealed(inner: Any, ring: KeyRing, embedder: str = "axis") -> SealedStore:
    """A sealed store over another one."""
    return open_sealed(inner, KnowledgeSettings(), embedder, sealing=ring.opened(), tag_of=tag_of)


class SealedDesk(SqliteDesk):
    """A sealed store over one file. `ring`: its keys, in a folder beside the file's."""

    def __init__(self, path: Path) -> None:
        self.ring = KeyRing(path.parent.parent / "keys")
        super().__init__(path)
        self.code = f"sealed_at({str(path)!r}, {str(self.ring.outer)!r})"

    is_sealed = True
    IMPORTS = f"{Desk.IMPORTS}from tests.support.router.sealed_desks import sealed_at\n"

    def open(self, embedder: str = "axis") -> Any:
        return sealed(super().open(embedder), self.ring, embedder)


def sealed_at(path: str, outer: str) -> SealedStore:
    """A sealed store of another process, which has no keys of sessions."""
    return _of_another_process(SqliteStore(Path(path), busy_s=60), Path(outer))


def sealed_in(url: str, schema: str, outer: str) -> SealedStore:
    """The same in a schema of PostgreSQL."""
    return _of_another_process(postgres(url, schema), Path(outer))


def _of_another_process(inner: Any, outer: Path) -> SealedStore:
    keys = key_file(outer.parent / f"keys-{time.monotonic_ns()}")
    sealing = Sealing(LeasedKeys(keys, time.monotonic), OuterWrapper(OuterKeys(outer)))
    return open_sealed(inner, KnowledgeSettings(), "", sealing=sealing, tag_of=tag_of)


class SealedPostgresDesk(PostgresDesk):
    """A sealed store over a schema of PostgreSQL."""

    is_sealed = True

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.ring = KeyRing(folder)
        super().__init__(server)
        where = f"{server.url()!r}, {self.schema!r}, {str(self.ring.outer)!r}"
        self.code = f"sealed_in({where})"

    IMPORTS = f"{Desk.IMPORTS}from tests.support.router.sealed_desks import sealed_in\n"

    def open(self, embedder: str = "axis") -> Any:
        return sealed(super().open(embedder), self.ring, embedder)
