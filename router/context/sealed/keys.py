"""A tenant's keys of what it keeps for good, wrapped, in the store whose rows they open.

They go where the store goes, to another machine or into a backup, and are of use only with the operator's.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from samovar.cache_tiers.blocks import TierError
from samovar.cache_tiers.encryption import (
    BadSeal,
    SessionKey,
    TenantWrapper,
    key_id_of,
    open_row,
    random_key,
    row_name,
    seal_row,
)
from samovar.configs.json_text import parse_json
from samovar.router.context.knowledge import KnowledgeError, LoopRecord, RecordBounds, RecordKind, Records

KIND: RecordKind = "key"
BOUNDS = RecordBounds(64, 2**20, ())
"""Two ingresses that begin at once make two keys: both are kept."""
LEASE_S = 60.0
LEASES_MAX = 4096
Ring = dict[bytes, SessionKey]
"""A tenant's keys by their ids, the newest first."""


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
        self._is_looked_over = False

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
        self._put(tenant, key, LoopRecord(KIND, key.key_id.hex(), "", turn=turn, state=self._purpose))
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
        """Wrap by the operator's key in use what an older one has wrapped: once, and after each such find."""
        with self._lock:
            if self._is_looked_over:
                return
            self._is_looked_over = True
        try:
            for tenant, record in self._records.of_all(KIND):
                with suppress(KnowledgeError):  # of another operator's key: who needs it is told
                    if record.state == self._purpose:
                        self._open(tenant, record)
        except BaseException:
            with self._lock:
                self._is_looked_over = False
            raise

    def _open(self, tenant: str, record: LoopRecord) -> SessionKey:
        with self._lock:
            key, until_s = self._leases.get(record.body, (None, 0.0))
        if key is not None and self._clock() < until_s:
            return key
        key_id = bytes.fromhex(record.id)
        wrapped, proof = (b64decode(one) for one in parse_json(record.body))
        try:
            found = self._wrapper.unwrap(row_name(KIND, tenant, key_id), wrapped, proof)
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        if found is None:
            raise KnowledgeError("it is sealed with another key than tiers.encryption_key_file has")
        key = SessionKey(key_id, found.secret)
        if not found.is_current:
            self._put(tenant, key, record)
            with self._lock:
                self._is_looked_over = False  # there may be more
            return key
        with self._lock:
            self._leases[record.body] = (key, self._clock() + LEASE_S)
            self._leases.move_to_end(record.body)
            while len(self._leases) > LEASES_MAX:
                self._leases.popitem(last=False)
        return key

    def _put(self, tenant: str, key: SessionKey, record: LoopRecord) -> None:
        try:
            parts = self._wrapper.wrap(row_name(KIND, tenant, key.key_id), key.secret)
        except TierError as error:
            raise KnowledgeError(str(error)) from error
        body = [b64encode(one).decode("ascii") for one in parts]
        self._records.put(tenant, replace(record, body=json.dumps(body)), BOUNDS)


class TenantSealer:
    """See `RowSealer`: with keys of `TenantKeys`."""

    def __init__(self, keys: TenantKeys) -> None:
        self._keys = keys

    def seal(self, tenant: str, name: Sequence[str], said: bytes) -> bytes:
        return seal_row(self._keys.current(tenant), row_name(tenant, *name), said)

    def open(self, tenant: str, name: Sequence[str], sealed: bytes) -> bytes:
        key_id = key_id_of(sealed)
        if key_id is None:
            return sealed
        key = self._keys.ring(tenant).get(key_id)
        if key is None:
            return b""
        try:
            return open_row(key, row_name(tenant, *name), sealed)
        except BadSeal as error:
            raise KnowledgeError(str(error)) from error

    def destroy(self, tenant: str) -> None:
        self._keys.destroy(tenant)
