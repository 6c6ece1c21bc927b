"""A knowledge base whose store holds no readable text: entries are sealed, and searched in memory only.

An index of words, names or vectors says what a text says. So the store's own are empty for what is sealed,
and each ingress has a tenant's newest versions in memory, opened and indexed, from its first search on.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from samovar.cache_tiers.encryption import (
    BadSeal,
    SessionKey,
    SessionSealer,
    as_text,
    key_id_of,
    of_text,
    open_row,
    row_name,
    seal_row,
)
from samovar.configs.json_text import parse_json
from samovar.router.context.knowledge import (
    Change,
    Content,
    EntryNotFound,
    EntryRef,
    EntryVersion,
    Kind,
    KnowledgeError,
    KnowledgeStore,
    Limits,
    Provenance,
    RowSealer,
    StateChanged,
    Tables,
    Vector,
)
from samovar.router.context.sealed.keys import Ring, TenantKeys
from samovar.router.context.sealed.mirror import MirrorStore
from samovar.router.context.sealed.records import SealedRecords

logger = logging.getLogger(__name__)

T = TypeVar("T")
TENANTS_MAX = 256
COPY = 3
"""About how often a text is in memory where it is searched: as it is, and in indexes."""


@dataclass(frozen=True, slots=True)
class _SealedChange(Change):
    """A change that is sealed once its place is known: `seal` is told the text, and as which version."""

    seal: Callable[[EntryRef, Change], Change] = field(kw_only=True)

    def at(self, ref: EntryRef) -> Change:
        return self.seal(ref, self)


@dataclass(slots=True)
class _Mirror:
    """A tenant's newest versions, opened, as of a state of the store.

    `marks`: what tells each text; `keys`: ids of those that opened them.
    """

    store: MirrorStore
    lock: threading.Lock = field(default_factory=threading.Lock)
    state: int | None = None
    marks: dict[str, int] = field(default_factory=dict)
    keys: frozenset[bytes] = frozenset()
    nbytes: int = 0


class SealedStore:
    """A `KnowledgeStore` over another one, `inner`, in which it leaves no readable text. Thread-safe.

    What it does not have itself is the inner one's. Ids, kinds, authors, times and sizes stay readable; what
    was written before is read as it is. `keys`: of tenants, in `inner`; `beside`: seals tables of that name.
    `sessions`, `tag_of`: see `SealedRecords`. `embedder`: names what makes vectors. `memory_bytes_max`: of
    what is searched.
    """

    def __init__(
        self,
        inner: KnowledgeStore,
        keys: TenantKeys,
        sessions: SessionSealer,
        tag_of: Callable[[str], bytes],
        *,
        beside: Callable[[str], RowSealer],
        embedder: str,
        memory_bytes_max: int,
    ) -> None:
        self._inner = inner
        self._keys = keys
        self._beside = beside
        self._embedder = embedder
        self._memory_bytes_max = memory_bytes_max
        self.records = SealedRecords(inner.records, keys, sessions, tag_of, embedder)
        self._local = threading.local()
        self._lock = threading.Lock()  # of the mirrors
        self._mirrors: OrderedDict[str, _Mirror] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def transaction(self) -> Iterator[object]:
        self._local.depth = self._depth + 1
        try:
            with self._inner.transaction() as made:
                yield made
        finally:
            self._local.depth -= 1

    @property
    def _depth(self) -> int:
        return getattr(self._local, "depth", 0)

    def write(
        self, tenant: str, changes: Sequence[Change], limits: Limits, since: int | None = None
    ) -> list[EntryVersion]:
        with self.transaction():
            key = self._keys.current(tenant)
            sealed = [self._sealed(tenant, change, key) for change in changes]
            made = self._inner.write(tenant, sealed, limits, since)
            ring = self._keys.ring(tenant)
            if key.key_id not in ring:
                raise StateChanged("the knowledge base was erased in between")
            return self._all(tenant, made, ring)

    def _sealed(self, tenant: str, change: Change, key: SessionKey) -> Change:
        def seal(ref: EntryRef, own: Change) -> Change:
            content, origin, raw = own.content, own.provenance, None
            if own.vector is not None:
                raw = b64encode(own.vector.astype("<f4").tobytes()).decode("ascii")
            said = (content.title, content.text, content.topics, origin.why, self._embedder, raw)
            name = _name(tenant, ref, own.operation, content.kind, origin, own.of_number)
            text = as_text(seal_row(key, name, json.dumps(said).encode()))
            return Change(
                Content(content.kind, "", text),
                replace(origin, why=""),
                own.entry,
                own.operation,
                own.base,
                own.of_number,
            )

        given = {one.name: getattr(change, one.name) for one in fields(change)}
        return _SealedChange(**given, seal=seal)

    def _all(
        self, tenant: str, found: Sequence[EntryVersion], ring: Ring | None = None
    ) -> list[EntryVersion]:
        """Return versions opened, without those whose key is gone."""
        return [one for one, _ in self._with_vectors(tenant, found, ring)]

    def _with_vectors(
        self, tenant: str, found: Sequence[EntryVersion], ring: Ring | None = None
    ) -> list[tuple[EntryVersion, Vector | None]]:
        ring = self._keys.ring(tenant) if ring is None else ring
        opened = (_opened(tenant, one, ring, self._embedder) for one in found)
        return [one for one in opened if one is not None]

    @contextmanager
    def trial(self, tenant: str, changes: Sequence[Change]) -> Iterator[KnowledgeStore]:
        copy = MirrorStore(self._embedder)
        try:
            copy.take(tenant, (), self._with_vectors(tenant, self._inner.heads(tenant)))
            copy.try_out(tenant, changes)
            yield copy
        finally:
            copy.close()

    def head(self, tenant: str, entry: str) -> EntryVersion:
        for found in self._all(tenant, [self._inner.head(tenant, entry)]):
            return found
        raise EntryNotFound(f"there is no entry {entry}")

    def version(self, tenant: str, ref: EntryRef) -> EntryVersion:
        for found in self._all(tenant, [self._inner.version(tenant, ref)]):
            return found
        raise EntryNotFound(f"there is no version {ref.number} of {ref.entry}", "version")

    def versions(self, tenant: str, refs: Collection[EntryRef]) -> dict[EntryRef, EntryVersion]:
        found = self._all(tenant, list(self._inner.versions(tenant, refs).values()))
        return {one.ref: one for one in found}

    def history(
        self, tenant: str, entry: str, *, limit: int | None = None, before: int | None = None
    ) -> list[EntryVersion]:
        return self._all(tenant, self._inner.history(tenant, entry, limit=limit, before=before))

    def heads(
        self, tenant: str, *, kinds: Collection[Kind] = (), limit: int | None = None, after: str = ""
    ) -> list[EntryVersion]:
        return self._all(tenant, self._inner.heads(tenant, kinds=kinds, limit=limit, after=after))

    def state_at(self, tenant: str, seq: int) -> dict[str, EntryVersion]:
        found = self._all(tenant, list(self._inner.state_at(tenant, seq).values()))
        return {one.ref.entry: one for one in found}

    def by_words(
        self, tenant: str, words: Sequence[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        return self._searched(tenant, lambda own: own.by_words(tenant, words, kinds, limit))

    def by_meaning(
        self, tenant: str, vector: Vector, kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        return self._searched(tenant, lambda own: own.by_meaning(tenant, vector, kinds, limit))

    def by_names(
        self, tenant: str, names: Collection[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        return self._searched(tenant, lambda own: own.by_names(tenant, names, kinds, limit))

    def without_vector(self, tenant: str, limit: int) -> list[EntryVersion]:
        return self._searched(tenant, lambda own: own.without_vector(tenant, limit))

    def put_vectors(self, tenant: str, vectors: Sequence[tuple[EntryRef, Vector]]) -> None:
        self._searched(tenant, lambda own: own.put_vectors(tenant, vectors))

    def _searched(self, tenant: str, search: Callable[[MirrorStore], T]) -> T:
        with self._lock:
            own = self._mirrors.setdefault(tenant, _Mirror(MirrorStore(self._embedder)))
            self._mirrors.move_to_end(tenant)
        with own.lock:  # a tenant's searches wait for each other, and for nothing of others
            state = self._inner.state(tenant)
            if own.state != state:
                if self._depth:  # what is not committed must not be kept
                    return self._once(tenant, search)
                self._sync(tenant, own, state)
            made = search(own.store)
        self._make_room(tenant)
        return made

    def _once(self, tenant: str, search: Callable[[MirrorStore], T]) -> T:
        copy = MirrorStore(self._embedder)
        try:
            copy.take(tenant, (), self._with_vectors(tenant, self._inner.heads(tenant)))
            return search(copy)
        finally:
            copy.close()

    def _sync(self, tenant: str, own: _Mirror, state: int) -> None:
        """Bring what is in memory up to the store; what does not open is not there."""
        found, ring = self._inner.heads(tenant), self._keys.ring(tenant)
        if not own.keys <= ring.keys():  # another ingress has destroyed one
            own.store, own.marks = MirrorStore(self._embedder), {}
        own.keys = frozenset(ring)
        marks = {one.ref.entry: hash((one.ref, one.content)) for one in found}
        gone = [entry for entry, mark in own.marks.items() if marks.get(entry) != mark]
        fresh = [one for one in found if own.marks.get(one.ref.entry) != marks[one.ref.entry]]
        own.store.take(tenant, gone, self._with_vectors(tenant, fresh, ring))
        own.marks, own.state = marks, state
        own.nbytes = COPY * sum(one.content.nbytes for one in found)

    def _make_room(self, used: str) -> None:
        """Forget the tenants that were searched longest ago, not `used`, until there is room."""
        with self._lock:
            held = sum(one.nbytes for one in self._mirrors.values())
            for tenant, own in list(self._mirrors.items()):
                if held <= self._memory_bytes_max and len(self._mirrors) <= TENANTS_MAX:
                    break
                if tenant != used:
                    held -= own.nbytes
                    del self._mirrors[tenant]  # closed when its last search is over

    def _forget(self, tenant: str) -> None:
        with self._lock:
            self._mirrors.pop(tenant, None)

    def erase(self, tenant: str, entry: str | None) -> int:
        return self.erase_before(tenant) if entry is None else self.erase_all(tenant, [entry])

    def erase_all(self, tenant: str, entries: Collection[str]) -> int:
        try:
            return self._inner.erase_all(tenant, entries)
        finally:
            self._forget(tenant)

    def erase_before(self, tenant: str, at_s: float = math.inf) -> int:
        if at_s == math.inf:
            self._keys.destroy(tenant)  # first: from now on nothing of it opens
        try:
            return self._inner.erase_before(tenant, at_s)
        finally:
            self._forget(tenant)

    def beside(self, name: str, schemas: Sequence[str]) -> Tables:
        made = self._inner.beside(name, schemas)
        made.sealer = self._beside(name)
        return made

    def close(self) -> None:
        with self._lock:
            self._mirrors.clear()
        self._inner.close()


def _opened(
    tenant: str, version: EntryVersion, ring: Ring, embedder: str
) -> tuple[EntryVersion, Vector | None] | None:
    """Return a version as it was written; None if its key is gone. Raises `KnowledgeError`."""
    content, origin = version.content, version.provenance
    try:
        sealed = of_text(content.text)
        if sealed is None:
            return version, None
        key = ring.get(key_id_of(sealed) or b"")
        if key is None:
            return None
        name = _name(tenant, version.ref, version.operation, content.kind, origin, version.of_number)
        title, text, topics, why, made_by, raw = parse_json(open_row(key, name, sealed))
    except BadSeal as error:
        raise KnowledgeError(f"version {version.ref.number} of {version.ref.entry}: {error}") from error
    vector = None if raw is None or made_by != embedder else np.frombuffer(b64decode(raw), "<f4")
    content = Content(content.kind, title, text, tuple(topics))
    return replace(version, content=content, provenance=replace(origin, why=why)), vector


def _name(
    tenant: str, ref: EntryRef, operation: str, kind: str, origin: Provenance, of_number: int | None
) -> bytes:
    return row_name(
        "entry", tenant, ref.entry, ref.number, operation, kind, origin.who, origin.turn, of_number
    )
