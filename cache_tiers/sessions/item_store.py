"""The shelf with its file, and with the clears that what comes late must not undo. Thread-safe."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from samovar.cache_tiers.sessions.shelf import Item, ItemBounds, Kind, Shelf

if TYPE_CHECKING:  # the file's module imports SQLite, which ingresses do without
    from samovar.cache_tiers.sessions.item_file import ItemFile

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 60.0

ClearedAt = Callable[[bytes, bytes], float]
"""When (unix seconds) a tenant's session was last cleared, by itself or with its tenant."""


class NotErased(Exception):
    """The file of kept items cannot be written: what was to be forgotten is still in it."""


class ItemStore:
    """What ingresses keep, in memory and, where it may be, in a file. `wall_clock`: unix seconds."""

    def __init__(
        self, bounds: ItemBounds, cleared_at: ClearedAt, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._bounds = bounds
        self._cleared_at = cleared_at
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._shelf = Shelf(bounds.bytes_max, bounds.replies_max)
        self._file: ItemFile | None = None
        self._expired_s = wall_clock()
        if bounds.bytes_max > 0:
            self._open()

    def _open(self) -> None:
        if self._bounds.path is None:
            return
        import sqlite3

        from samovar.cache_tiers.sessions.item_file import ItemFile

        try:
            self._file = ItemFile(self._bounds.path)
            gone = [lost for item in self._file.load(self._wall_clock()) for lost in self._shelf.put(item)]
            self._file.erase(gone)
        except (OSError, sqlite3.Error) as error:
            logger.warning("ingresses keep nothing on disk: %s: %s", self._bounds.path, error)
            self._file = None

    def put(self, items: Iterable[Item]) -> int:
        """Keep items; return how many. What was cleared after its request came is not kept."""
        now_s = self._wall_clock()
        kept = 0
        with self._lock:
            for item in items:
                if item.unix_s <= self._cleared_at(item.tenant, item.session):
                    continue
                if item.expires_unix_s <= now_s:
                    continue
                gone = self._shelf.put(item)
                if item in gone:
                    continue
                kept += 1
                self._write(item, gone)
            if now_s - self._expired_s > EXPIRE_EVERY_S:
                self._expired_s = now_s
                self._write(None, self._shelf.expire(now_s))
        return kept

    def replies(self, tenant: bytes, session: bytes) -> list[Item]:
        """Return a session's replies, the latest last."""
        with self._lock:
            return self._shelf.replies(tenant, session, self._wall_clock())

    def get(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None:
        """Return an item; None if it is not kept."""
        with self._lock:
            return self._shelf.get(tenant, kind, name, self._wall_clock())

    def delete(self, tenant: bytes, kind: Kind, name: bytes) -> bool:
        """Erase an item; return whether it was there. Raises `NotErased`."""
        with self._lock:
            gone = self._shelf.delete(tenant, kind, name)
            self._erase(lambda file: file.forget(tenant, kind, name))
            return bool(gone)

    def clear(self, tenant: bytes, session: bytes | None, unix_s: float) -> int:
        """Erase what a tenant's requests up to `unix_s` left, of a session or (None) all. Raises `NotErased`.

        Returns how many items that were.
        """
        with self._lock:
            gone = self._shelf.clear(tenant, session, unix_s)
            self._erase(lambda file: file.clear(tenant, session, unix_s))
            return len(gone)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._lock:
            self._shelf.check_integrity()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _write(self, item: Item | None, gone: list[Item]) -> None:
        """Bring the file up to date. A fault costs the file, not the request."""
        if self._file is None:
            return
        import sqlite3

        try:
            if item is not None and item.is_durable:
                self._file.put(item)
            durable = [one for one in gone if one.is_durable]
            if durable:
                self._file.erase(durable)
        except sqlite3.Error as error:
            logger.warning("an item of an ingress is not on disk: %s", error)

    def _erase(self, erase: Callable[[ItemFile], None]) -> None:
        """Erase from the file what was forgotten on purpose, also what only the file has."""
        path = self._bounds.path
        if path is None or (self._file is None and not path.exists()):
            return
        import sqlite3

        from samovar.cache_tiers.sessions.item_file import ItemFile

        try:
            self._file = self._file or ItemFile(path)
            erase(self._file)
        except (OSError, sqlite3.Error) as error:
            raise NotErased(f"{path}: {error}") from error
