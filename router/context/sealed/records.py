"""Records whose texts are sealed: with their session's key, or their tenant's where they have none."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from samovar.cache_tiers.blocks import TierError
from samovar.cache_tiers.encryption import (
    BadSeal,
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
    KnowledgeError,
    LoopRecord,
    RecordBounds,
    RecordKind,
    Records,
    Vector,
)
from samovar.router.context.sealed.keys import KIND, Ring, TenantKeys

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
        name = _name(tenant, record)
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

    def similar(
        self, tenant: str, kind: RecordKind, vector: Vector, cosine_min: float, limit: int
    ) -> list[tuple[str, float]]:
        """Return ids of the records nearest in meaning, with the cosine."""
        fitting = [
            (one.id, one.vector)
            for one in reversed(self.find(tenant, kind))
            if one.vector is not None and len(one.vector) == len(vector)
        ]
        if not fitting:
            return []
        cosines = np.stack([row for _, row in fitting]) @ vector
        near = [row for row in np.argsort(-cosines, kind="stable") if cosines[row] >= cosine_min]
        return [(fitting[row][0], float(cosines[row])) for row in near[:limit]]

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
        name, said = _name(tenant, record), None
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


def _name(tenant: str, record: LoopRecord) -> bytes:
    origin = (record.kind, record.id, record.turn, record.session, record.state)
    return row_name(tenant, *origin, float(record.at_s), float(record.expires_s))
