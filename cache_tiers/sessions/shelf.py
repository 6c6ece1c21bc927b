"""Keeps what ingresses must find again: the tokens of replies, and stored responses. Pure.

Items are opaque bytes with an owner: the tags of a tenant and of a session. Bounded in bytes; the tenant that
takes most gives way first, its least recently used item. Hints: an item may go at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["reply", "response"]

# Python's cost of an item besides name and body: object, keys, tags, dict slots. Measured with tracemalloc.
ITEM_OVERHEAD_BYTES = 1100


@dataclass(frozen=True, slots=True)
class ItemBounds:
    """How much is kept of what ingresses share. `path`: of the file; None: in memory only."""

    bytes_max: int = 64 << 20
    replies_max: int = 4
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One kept thing. `tenant`, `session`: tags, the latter of the whole session.

    `name`: unique among a tenant's of that kind. `unix_s`: when its request came; a later clear covers it.
    `expires_unix_s`: it is not found afterwards. `is_durable`: it may be written to disk.
    """

    tenant: bytes
    session: bytes
    kind: Kind
    name: bytes
    body: bytes
    unix_s: float
    expires_unix_s: float
    is_durable: bool = False

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
