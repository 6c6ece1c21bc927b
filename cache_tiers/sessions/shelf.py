"""Keeps what ingresses must find again: the tokens of replies, and stored responses.

Items are opaque bytes with an owner: the tags of a tenant and of a session. Bounded in bytes; the tenant that
takes most gives way first, its least recently used item. Hints: an item may go at any time. The `Shelf` is
pure; `ItemStore` is thread-safe, has the shelf's file, and knows the clears that what comes late must not
undo. Where records are encrypted (`cache_tiers/encryption/`), so are the bodies of the file, and those that
come from it stay so in memory until they are asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from samovar.cache_tiers.blocks import TierError

if TYPE_CHECKING:  # the file's module imports SQLite, which ingresses do without
    from samovar.cache_tiers.encryption import SessionSealer
    from samovar.cache_tiers.sessions.item_file import ItemFile

logger = logging.getLogger(__name__)


Kind = Literal["reply", "response"]

# Python's cost of an item besides name and body: object, keys, tags, dict slots. Measured with tracemalloc.
ITEM_OVERHEAD_BYTES = 1100


@dataclass(frozen=True, slots=True)
class ItemBounds:
    """How much is kept of what ingresses share. `path`: of the file; None: in memory only.

    `sealed_by`: the settings' file of the key that bodies in the file are sealed with; None: they are not.
    """

    bytes_max: int = 64 << 20
    replies_max: int = 4
    path: Path | None = None
    sealed_by: Path | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One kept thing. `tenant`, `session`: tags, the latter of the whole session.

    `name`: unique among a tenant's of that kind. `unix_s`: when its request came; a later clear covers it.
    `expires_unix_s`: it is not found afterwards. `is_durable`: it may be written to disk. `is_sealed`: the
    body is as it lies there.
    """

    tenant: bytes
    session: bytes
    kind: Kind
    name: bytes
    body: bytes
    unix_s: float
    expires_unix_s: float
    is_durable: bool = False
    is_sealed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that are accounted for it."""
        return len(self.body) + len(self.name) + ITEM_OVERHEAD_BYTES


_Key = tuple[Kind, bytes]


class Shelf:
    """Items by tenant, kind and name; at most `bytes_max` bytes.

    `replies_max`: replies of one session, the latest put stay: each holds all tokens up to its end.
    """

    def __init__(self, bytes_max: int, replies_max: int) -> None:
        self._bytes_max = bytes_max
        self._replies_max = replies_max
        self._of: dict[bytes, OrderedDict[_Key, Item]] = {}  # by tenant, least recently used first
        self._replies: dict[tuple[bytes, bytes], dict[bytes, None]] = {}  # (tenant, session) -> names
        self._bytes_of: dict[bytes, int] = {}
        self._bytes_used = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @property
    def bytes_used(self) -> int:
        """Bytes accounted to the items held."""
        return self._bytes_used

    def put(self, item: Item) -> list[Item]:
        """Keep an item; return those that gave way, `item` itself if it is too large."""
        if item.nbytes > self._bytes_max:
            return [item]
        self._drop(item.tenant, (item.kind, item.name))
        self._of.setdefault(item.tenant, OrderedDict())[item.kind, item.name] = item
        self._bytes_of[item.tenant] = self._bytes_of.get(item.tenant, 0) + item.nbytes
        self._bytes_used += item.nbytes
        gone: list[Item] = []
        if item.kind == "reply":
            names = self._replies.setdefault((item.tenant, item.session), {})
            names[item.name] = None
            if len(names) > self._replies_max:
                gone += self._drop(item.tenant, ("reply", next(iter(names))))
        while self._bytes_used > self._bytes_max:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            gone += self._drop(largest, next(iter(self._of[largest])))
        return gone

    def replies(self, tenant: bytes, session: bytes, now_unix_s: float) -> list[Item]:
        """Return a session's replies, the latest put last."""
        names = list(self._replies.get((tenant, session), ()))
        found = (self.get(tenant, "reply", name, now_unix_s) for name in names)
        return [item for item in found if item is not None]

    def get(self, tenant: bytes, kind: Kind, name: bytes, now_unix_s: float) -> Item | None:
        """Return an item, which is then its tenant's most recently used."""
        held = self._of.get(tenant, OrderedDict())
        item = held.get((kind, name))
        if item is None or item.expires_unix_s <= now_unix_s:
            return None
        held.move_to_end((kind, name))
        return item

    def delete(self, tenant: bytes, kind: Kind, name: bytes) -> list[Item]:
        """Drop an item; return it, if it was there."""
        return self._drop(tenant, (kind, name))

    def clear(self, tenant: bytes, session: bytes | None, unix_s: float) -> list[Item]:
        """Drop what a tenant's requests up to `unix_s` left, of a session or (None) all; return it."""
        doomed = [
            item
            for item in self._of.get(tenant, OrderedDict()).values()
            if item.unix_s <= unix_s and (session is None or item.session == session)
        ]
        return [gone for item in doomed for gone in self._drop(tenant, (item.kind, item.name))]

    def expire(self, now_unix_s: float) -> list[Item]:
        """Drop what has expired; return it. O(n): to be called now and then."""
        doomed = [item for item in self._items() if item.expires_unix_s <= now_unix_s]
        return [gone for item in doomed for gone in self._drop(item.tenant, (item.kind, item.name))]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        items = list(self._items())
        assert self._bytes_used == sum(item.nbytes for item in items) <= self._bytes_max
        assert all(self._of.values()), "a tenant without items is remembered"
        assert set(self._bytes_of) == set(self._of)
        for tenant, held in self._of.items():
            assert self._bytes_of[tenant] == sum(item.nbytes for item in held.values())
            assert all((item.tenant, item.kind, item.name) == (tenant, *key) for key, item in held.items())
        replies = {(item.tenant, item.session, item.name) for item in items if item.kind == "reply"}
        listed = {(*owner, name) for owner, names in self._replies.items() for name in names}
        assert listed == replies, "the sessions' lists differ from the items"
        assert all(0 < len(names) <= self._replies_max for names in self._replies.values())

    def _items(self) -> Iterable[Item]:
        return (item for held in self._of.values() for item in held.values())

    def _drop(self, tenant: bytes, key: _Key) -> list[Item]:
        held = self._of.get(tenant)
        item = None if held is None else held.pop(key, None)
        if held is None or item is None:
            return []
        self._bytes_used -= item.nbytes
        self._bytes_of[tenant] -= item.nbytes
        if not held:
            del self._of[tenant], self._bytes_of[tenant]
        if item.kind == "reply":
            names = self._replies[tenant, item.session]
            del names[item.name]
            if not names:
                del self._replies[tenant, item.session]
        return [item]


EXPIRE_EVERY_S = 60.0

ClearedAt = Callable[[bytes, bytes], float]
"""When (unix seconds) a tenant's session was last cleared, by itself or with its tenant."""


class NotErased(Exception):
    """The file of kept items cannot be written: what was to be forgotten is still in it."""


class ItemStore:
    """What ingresses keep, in memory and, where it may be, in a file. `wall_clock`: unix seconds.

    `sealer`: of what is in the file; None: it is not sealed.
    """

    def __init__(
        self,
        bounds: ItemBounds,
        cleared_at: ClearedAt,
        wall_clock: Callable[[], float] = time.time,
        sealer: SessionSealer | None = None,
    ) -> None:
        self._bounds = bounds
        self._cleared_at = cleared_at
        self._wall_clock = wall_clock
        self._sealer = sealer
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
            self._file = ItemFile(self._bounds.path, is_sealed=self._sealer is not None)
            gone = [lost for item in self._file.load(self._wall_clock()) for lost in self._shelf.put(item)]
            self._file.erase(gone)
        except (OSError, sqlite3.Error) as error:
            logger.warning("ingresses keep nothing on disk: %s: %s", self._bounds.path, error)
            self._file = None

    def put(self, items: Iterable[Item]) -> int:
        """Keep items; return how many. What was cleared after its request came is not kept."""
        now_s = self._wall_clock()
        kept = 0
        written = [(item, self._for_file(item)) for item in items]
        with self._lock:
            for item, on_disk in written:
                if item.unix_s <= self._cleared_at(item.tenant, item.session):
                    continue
                if item.expires_unix_s <= now_s:
                    continue
                gone = self._shelf.put(item)
                if item in gone:
                    continue
                kept += 1
                self._write(on_disk, gone)
            if now_s - self._expired_s > EXPIRE_EVERY_S:
                self._expired_s = now_s
                self._write(None, self._shelf.expire(now_s))
        return kept

    def replies(self, tenant: bytes, session: bytes) -> list[Item]:
        """Return a session's replies, the latest last."""
        with self._lock:
            found = self._shelf.replies(tenant, session, self._wall_clock())
        return [item for item in map(self._opened, found) if item is not None]

    def get(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None:
        """Return an item; None if it is not kept."""
        with self._lock:
            found = self._shelf.get(tenant, kind, name, self._wall_clock())
        return None if found is None else self._opened(found)

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
        if self._sealer is not None:
            self._sealer.forget(tenant, session)
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

    def _for_file(self, item: Item) -> Item | None:
        """Return an item as the file is to hold it; None: not at all. May wait for the keys."""
        if self._file is None or not item.is_durable or self._sealer is None:
            return item
        from samovar.cache_tiers.sessions.item_file import sealed

        try:
            return sealed(item, self._sealer)
        except TierError as error:
            logger.warning("an item of an ingress is not on disk: %s", error)
            return None

    def _opened(self, item: Item) -> Item | None:
        """Return an item as an ingress reads it; None if its key is gone, or cannot be had."""
        if not item.is_sealed or self._sealer is None:
            return item
        from samovar.cache_tiers.sessions.item_file import opened

        try:
            return opened(item, self._sealer)
        except TierError as error:
            logger.warning("an item of an ingress cannot be read: %s", error)
            return None

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
            self._file = self._file or ItemFile(path, is_sealed=self._sealer is not None)
            erase(self._file)
        except (OSError, sqlite3.Error) as error:
            raise NotErased(f"{path}: {error}") from error
