"""A knowledge base whose store holds no readable text: entries are sealed, and searched in memory only.

An index of words, names or vectors says what a text says. So the store's own are empty for what is sealed,
and each ingress has a tenant's newest versions in memory, opened and indexed, from its first search on. What
outlives sessions is sealed with keys of its tenant, which lie wrapped in the same store: they go where it
goes, to another machine or into a backup, and are of use only with the operator's.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import secrets
import sqlite3
import threading
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np

from samovar.cache_tiers.blocks import TierError
from samovar.cache_tiers.encryption import (
    BadSeal,
    Sealing,
    SessionKey,
    SessionSealer,
    TenantWrapper,
    as_text,
    key_id_of,
    of_text,
    open_row,
    random_key,
    row_name,
    seal_row,
)
from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge import (
    IN_MEMORY,
    SCHEMAS,
    Change,
    Content,
    EntryNotFound,
    EntryRef,
    EntryVersion,
    Kind,
    KnowledgeError,
    KnowledgeStore,
    Limits,
    LoopRecord,
    Provenance,
    RecordBounds,
    RecordKind,
    Records,
    RowSealer,
    SqliteFile,
    SqliteStore,
    StateChanged,
    Tables,
    Vector,
    nearest,
)

logger = logging.getLogger(__name__)

KIND: RecordKind = "key"
BOUNDS = RecordBounds(64, 2**20, ())
"""Two ingresses that begin at once make two keys: both are kept."""
LEASE_S = 60.0
LEASES_MAX = 4096
Ring = dict[bytes, SessionKey]
"""A tenant's keys by their ids, the newest first."""


class _OthersKey(TierError):
    """The operator's keys that are there have not wrapped a key of a tenant."""


class TenantKeys:
    """Makes, finds and destroys keys in `records`; which there are, the store says at each call. Thread-safe.

    `purpose`: what they seal; keys of another one are others. `wrapper`: has the operator's key; what it has
    opened is kept for `LEASE_S`. `clock`: monotonic. Raises `KnowledgeError`, also for a key that the
    operator's does not open: what it has sealed must not be taken for erased.
    """

    def __init__(
        self, records: Records, purpose: str, wrapper: TenantWrapper, clock: Callable[[], float]
    ) -> None:
        self._records = records
        self._purpose = purpose
        self._wrapper = wrapper
        self._clock = clock
        self._lock = threading.Lock()  # of what follows
        self._leases: OrderedDict[str, tuple[SessionKey, float]] = OrderedDict()  # by the body of its record
        self._look_s = -math.inf  # when all keys are looked at the next time

    def ring(self, tenant: str) -> Ring:
        """Return all keys of a tenant."""
        self._look_over()
        found = [self._open(tenant, one) for one in self._find(tenant)]
        return {key.key_id: key for key in found}

    def current(self, tenant: str) -> SessionKey:
        """Return the key that a tenant's rows are sealed with; it is made if there is none."""
        for key in self.ring(tenant).values():
            return key
        key = random_key()
        # No turn that a client can name: with an entry go the records of the turn it was learned from.
        turn = f"key_{secrets.token_hex(16)}"
        try:
            body = self._wrapped(tenant, key)
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        made = LoopRecord(KIND, key.key_id.hex(), body, turn=turn, state=self._purpose)
        self._records.put(tenant, made, BOUNDS)
        return key

    def digest(self, tenant: str, key: bytes) -> bytes:
        """Return what stands for a digest of a text: as it is, it would confirm who guesses the text."""
        self.current(tenant)
        (*_, first) = self.ring(tenant).values()
        return hmac.digest(first.secret, b"samovar digest\0" + key, "sha256")

    def destroy(self, tenant: str) -> None:
        """Destroy a tenant's keys: from now on its rows are as good as erased, in this store."""
        self._records.erase(tenant, kind=KIND, ids=[one.id for one in self._find(tenant)])

    def _find(self, tenant: str) -> list[LoopRecord]:
        return self._records.find(tenant, KIND, state=self._purpose)

    def _look_over(self) -> None:
        """Wrap by the operator's key in use what an older one has wrapped, whatever that is for.

        Once, and whenever such a key is found, whatever is leased; what fails is tried again `LEASE_S` later,
        and fails no other's request.
        """
        with self._lock:
            now_s = self._clock()
            if now_s < self._look_s:
                return
            self._look_s = math.inf
        failed: Exception | None = None
        try:
            for tenant, record in self._records.of_all(KIND):
                try:
                    self._unwrapped(tenant, record)
                except _OthersKey:
                    continue  # who needs it is told
                except TierError as error:  # one that was changed keeps no other from it
                    failed = error
        except KnowledgeError as error:
            failed = error
        if failed is not None:
            with self._lock:
                self._look_s = now_s + LEASE_S
            logger.warning("not all keys of tenants are wrapped by the operator's key in use: %s", failed)

    def _open(self, tenant: str, record: LoopRecord) -> SessionKey:
        with self._lock:
            key, until_s = self._leases.get(record.body, (None, 0.0))
        if key is not None and self._clock() < until_s:
            return key
        try:
            key, is_current = self._unwrapped(tenant, record)
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        if not is_current:
            with self._lock:
                self._look_s = -math.inf  # there may be more
            self._look_over()
            return key
        with self._lock:
            self._leases[record.body] = (key, self._clock() + LEASE_S)
            self._leases.move_to_end(record.body)
            while len(self._leases) > LEASES_MAX:
                self._leases.popitem(last=False)
        return key

    def _unwrapped(self, tenant: str, record: LoopRecord) -> tuple[SessionKey, bool]:
        """Return a key, and whether the operator's in use had wrapped it; if not, it does now.

        Raises `TierError`, and `KnowledgeError` of the store.
        """
        key_id = bytes.fromhex(record.id)
        wrapped, proof = (b64decode(one) for one in parse_json(record.body))
        found = self._wrapper.unwrap(row_name(KIND, tenant, key_id), wrapped, proof)
        if found is None:
            raise _OthersKey("it is sealed with another key than tiers.encryption_key_file has")
        key = SessionKey(key_id, found.secret)
        if not found.is_current:  # one that was destroyed since it was found must not come back
            self._records.rewrite(tenant, record, self._wrapped(tenant, key))
        return key, found.is_current

    def _wrapped(self, tenant: str, key: SessionKey) -> str:
        parts = self._wrapper.wrap(row_name(KIND, tenant, key.key_id), key.secret)
        return json.dumps([b64encode(one).decode("ascii") for one in parts])


class TenantSealer:
    """See `RowSealer`: with keys of `TenantKeys`."""

    def __init__(self, keys: TenantKeys) -> None:
        self._keys = keys

    def seal(self, tenant: str, name: Sequence[str], said: bytes) -> bytes:
        return seal_row(self._keys.current(tenant), row_name(tenant, *name), said)

    def open(self, tenant: str, name: Sequence[str], sealed: bytes) -> bytes | None:
        key_id = key_id_of(sealed)
        if key_id is None:
            return sealed
        key = self._keys.ring(tenant).get(key_id)
        if key is None:
            return None
        try:
            return open_row(key, row_name(tenant, *name), sealed)
        except BadSeal as error:
            raise KnowledgeError(str(error)) from error

    def destroy(self, tenant: str) -> None:
        self._keys.destroy(tenant)


KINDS = tuple(one for one in get_args(RecordKind) if one != KIND)


class SealedRecords:
    """See `Records`: those of `inner`, with sealed bodies and vectors.

    What is from before is read as it is; what a destroyed key has sealed is not there. `sessions`: seals with
    keys of sessions; `tag_of`: a tenant's tag, by which these know it. `embedder`: see `StoredRecords`.
    """

    def __init__(
        self,
        inner: Records,
        keys: TenantKeys,
        sessions: SessionSealer,
        tag_of: Callable[[str], bytes],
        embedder: str,
    ) -> None:
        self._inner = inner
        self._keys = keys
        self._sessions = sessions
        self._tag_of = tag_of
        self._embedder = embedder

    def put(self, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        """Write a record; nothing if it was on its way when its session was erased."""
        vector = None if record.vector is None else b64encode(record.vector.astype("<f4").tobytes()).decode()
        said = json.dumps([record.body, record.key.hex(), self._embedder, vector]).encode()
        name = _record_name(tenant, record)
        try:
            if record.session:
                owner = (self._tag_of(tenant), record.session)
                sealed = self._sessions.seal(*owner, record.at_s, name, said)
                if sealed is None:
                    return
            else:
                sealed = seal_row(self._keys.current(tenant), name, said)
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        key = self._keys.digest(tenant, record.key) if record.key else b""
        self._inner.put(tenant, replace(record, body=as_text(sealed), key=key, vector=None), bounds)

    def find(
        self, tenant: str, kind: RecordKind, *, key: bytes | None = None, **given: Any
    ) -> list[LoopRecord]:
        """Return records that fit: see `Records`."""
        ring = self._keys.ring(tenant)
        if key is None:
            return self._read(tenant, self._inner.find(tenant, kind, **given), ring)
        alike = self._keys.digest(tenant, key) if ring else key
        found = self._inner.find(tenant, kind, key=alike, **given)
        return self._read(tenant, found, self._keys.ring(tenant))

    def count(self, tenant: str, kind: RecordKind, **given: Any) -> int:
        """Return how many records fit: see `Records`."""
        return self._inner.count(tenant, kind, **given)

    def of_all(self, kind: RecordKind) -> list[tuple[str, LoopRecord]]:
        """Return the records of a kind as they are stored: see `Records`."""
        return self._inner.of_all(kind)

    def rewrite(self, tenant: str, record: LoopRecord, body: str) -> bool:
        """Give a record another body, as it is stored: see `Records`."""
        return self._inner.rewrite(tenant, record, body)

    def similar(
        self, tenant: str, kind: RecordKind, vector: Vector, cosine_min: float, limit: int
    ) -> list[tuple[str, float]]:
        """Return ids of the records nearest in meaning, with the cosine."""
        fitting = [
            (one.id, one.vector)
            for one in reversed(self.find(tenant, kind))
            if one.vector is not None and len(one.vector) == len(vector)
        ]
        return nearest(fitting, vector, cosine_min, limit)

    def erase(
        self,
        tenant: str,
        *,
        kind: RecordKind | None = None,
        ids: Collection[str] | None = None,
        sessions: Collection[bytes] | None = None,
    ) -> int:
        """Erase records: see `Records`. Keys go only if they are named: what they have sealed may stay."""
        kinds = KINDS if kind is None else (kind,)
        return sum(self._inner.erase(tenant, kind=one, ids=ids, sessions=sessions) for one in kinds)

    def _read(self, tenant: str, found: list[LoopRecord], ring: Ring) -> list[LoopRecord]:
        try:
            opened = [self._opened(tenant, one, ring) for one in found]
        except (BadSeal, TierError) as error:
            raise KnowledgeError(str(error)) from error
        return [one for one in opened if one is not None]

    def _opened(self, tenant: str, record: LoopRecord, ring: Ring) -> LoopRecord | None:
        sealed = of_text(record.body)
        if sealed is None:
            return record
        name, said = _record_name(tenant, record), None
        if record.session:
            said = self._sessions.open(self._tag_of(tenant), record.session, name, sealed)
        elif (key := ring.get(key_id_of(sealed) or b"")) is not None:
            said = open_row(key, name, sealed)
        if said is None:
            return None
        body, key_hex, embedder, raw = parse_json(said)
        is_own = raw is not None and embedder == self._embedder
        vector = np.frombuffer(b64decode(raw), "<f4") if is_own else None
        return replace(record, body=body, key=bytes.fromhex(key_hex), vector=vector)


def _record_name(tenant: str, record: LoopRecord) -> bytes:
    origin = (record.kind, record.id, record.turn, record.session, record.state)
    return row_name(tenant, *origin, float(record.at_s), float(record.expires_s))


BUSY_S = 5.0


class _OneConnection(SqliteFile):
    """A database in memory that all threads share: SQLite's own is of its connection."""

    def _own(self) -> tuple[sqlite3.Connection, threading.RLock]:
        with self._lock:
            made = self._connections[:1]
        return made[0] if made else super()._own()


class MirrorStore(SqliteStore):
    """Versions of another store, with their ids and numbers. Thread-safe; nothing is on a disk."""

    def __init__(self, embedder: str) -> None:
        super().__init__(IN_MEMORY, embedder=embedder)
        self._file.close()
        self._file = _OneConnection(IN_MEMORY, SCHEMAS, BUSY_S)

    def take(
        self, tenant: str, gone: Collection[str], made: Sequence[tuple[EntryVersion, Vector | None]]
    ) -> None:
        """Forget the entries `gone`, and have these versions, with their vectors, as the newest of theirs."""
        with self._file.transaction() as db:
            table = self._words_table(db, tenant, create=True)
            for entry in gone:
                head = self._head(db, tenant, entry)
                if head is not None:
                    self._unindex(db, table, head)
                for rows in ("heads", "versions"):
                    db.execute(f"DELETE FROM {rows} WHERE tenant = ? AND entry = ?", (tenant, entry))
            for one, vector in made:
                content, origin = one.content, one.provenance
                topics = json.dumps(content.topics, ensure_ascii=False)
                said = (
                    content.kind,
                    content.title,
                    content.text,
                    topics,
                    origin.who,
                    origin.why,
                    origin.turn,
                )
                ref = (tenant, one.ref.entry, one.ref.number)
                db.execute(
                    "INSERT INTO versions(seq, tenant, entry, number, operation, kind, title, text, topics,"
                    " who, why, turn, at_s, of_number, nbytes)"
                    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                    (one.seq, *ref, one.operation, *said, one.at_s, one.of_number),
                )
                db.execute(
                    "INSERT INTO heads(tenant, entry, seq, is_retired) VALUES(?, ?, ?, 0)",
                    (*ref[:2], one.seq),
                )
                self._index(db, tenant, table, one, vector)
            self._changed(db, tenant)

    def try_out(self, tenant: str, changes: Sequence[Change]) -> None:
        """Apply changes that no other store has."""
        with self._file.transaction() as db:
            self._apply(db, tenant, changes)


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
        with self._copy(tenant) as copy:
            copy.try_out(tenant, changes)
            yield copy

    @contextmanager
    def _copy(self, tenant: str) -> Iterator[MirrorStore]:
        """Give a tenant's newest versions in a store of their own."""
        copy = MirrorStore(self._embedder)
        try:
            copy.take(tenant, (), self._with_vectors(tenant, self._inner.heads(tenant)))
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
            own = self._mirrors.get(tenant)
            if own is None:
                own = self._mirrors[tenant] = _Mirror(MirrorStore(self._embedder))
            self._mirrors.move_to_end(tenant)
        with own.lock:  # a tenant's searches wait for each other, and for nothing of others
            state = self._inner.state(tenant)
            if own.state != state:
                if self._depth:  # what is not committed must not be kept
                    with self._copy(tenant) as copy:
                        return search(copy)
                self._sync(tenant, own, state)
            made = search(own.store)
        self._make_room(tenant)
        return made

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


def open_sealed(
    inner: KnowledgeStore,
    settings: KnowledgeSettings,
    embedder: str,
    *,
    sealing: Sealing,
    tag_of: Callable[[str], bytes],
) -> SealedStore:
    """Return a store that leaves no readable text in `inner`. `tag_of`: a tenant's tag."""
    keys = partial(TenantKeys, inner.records, wrapper=sealing.tenants, clock=time.monotonic)
    return SealedStore(
        inner,
        keys("knowledge"),
        SessionSealer(sealing.sessions),
        tag_of,
        beside=lambda name: TenantSealer(keys(name)),
        embedder=embedder,
        memory_bytes_max=settings.vectors_bytes_max,
    )


class SealedSummaries:
    """Seals summaries with their sessions' keys. Raises `KnowledgeError` if these cannot be had.

    `tag_of`: a tenant's tag.
    """

    def __init__(self, sealing: Sealing, tag_of: Callable[[str], bytes]) -> None:
        self._sealer = SessionSealer(sealing.sessions)
        self._tag_of = tag_of

    def sealed(self, owner: tuple[str, bytes], link: bytes, messages: int, text: str, at_s: float) -> str:
        """Return the text of a summary as the file holds it."""
        tenant, session = owner
        try:
            sealed = self._sealer.seal(
                self._tag_of(tenant), session, at_s, _summary_name(link, messages), text.encode()
            )
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        if sealed is None:
            raise KnowledgeError("its session was erased in between")
        return as_text(sealed)

    def opened(self, owner: tuple[str, bytes], link: bytes, messages: int, text: str) -> str | None:
        """Return a summary's text; None: its key is gone, or it was changed."""
        tenant, session = owner
        try:
            sealed = of_text(text) or b""
            said = self._sealer.open(self._tag_of(tenant), session, _summary_name(link, messages), sealed)
        except BadSeal as error:
            logger.error("a summary is not used: %s", error)
            return None
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        return None if said is None else said.decode()


def _summary_name(link: bytes, messages: int) -> bytes:
    return row_name("summary", link, messages)
