"""The operator's key, by which tenants' keys are wrapped: in a file, or of AWS KMS."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol

from samovar.cache_tiers.blocks import TierError
from samovar.cache_tiers.encryption.sealer import BadSeal, key_id_of, open_row, seal_row
from samovar.cache_tiers.encryption.tier import ID_BYTES, SessionKey

SECRET_BYTES = 32
OUTER_BYTES_MAX = 64 * 1024


class Outer(Protocol):
    """Outer keys: the one in use wraps, others still open what they wrapped. Raises `TierError`."""

    def refresh(self) -> bool:
        """Have the keys as they are now; return whether they are others than before."""

    @property
    def current(self) -> SessionKey:
        """The one that wraps. Requires a `refresh` before."""

    def get(self, key_id: bytes, proof: bytes = b"") -> bytes | None:
        """Return a key by its id; None: it is not there. `proof`: what `proof` has told of it."""

    def is_current(self, key_id: bytes) -> bool:
        """Return whether what a key has wrapped is to stay so: it is of what the operator names now."""

    def proof(self, key_id: bytes) -> bytes:
        """Return what another process needs besides: of KMS the key's ciphertext, of a file nothing."""


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A key of a tenant. `is_current`: what has wrapped it is what the operator names now."""

    secret: bytes = field(repr=False)
    is_current: bool


class TenantWrapper(Protocol):
    """Wraps keys that lie with what they open. Thread-safe; may block, and raises `TierError`."""

    def wrap(self, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
        """Return a key wrapped under its name, and what `unwrap` needs besides."""

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        """Return a key; None: the operator's keys that are there do not open it."""


class OuterWrapper:
    """See `TenantWrapper`: with outer keys that this process has."""

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self._lock = Lock()

    def wrap(self, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
        with self._lock:
            self._outer.refresh()
            outer = self._outer.current
            return seal_row(outer, name, secret), self._outer.proof(outer.key_id)

    def unwrap(self, name: bytes, wrapped: bytes, proof: bytes) -> Unwrapped | None:
        outer_id = key_id_of(wrapped) or b""
        with self._lock:
            self._outer.refresh()
            secret = self._outer.get(outer_id, proof)
            if secret is None:
                return None
            is_current = self._outer.is_current(outer_id)
        try:
            return Unwrapped(open_row(SessionKey(outer_id, secret), name, wrapped), is_current)
        except BadSeal as error:
            raise TierError("a key of a tenant was changed") from error


def open_outer(setting: Path, keys: Path) -> Outer:
    """Return the outer keys that `tiers.encryption_key_file` names: a file, or kms:ARN.

    `keys`: the file of sessions' keys. Those of KMS are beside it, as KMS has encrypted them.
    """
    found = re.fullmatch("kms:/{0,2}(arn:.+)", str(setting))
    if found:
        from samovar.cache_tiers.encryption.kms import KmsOuterKeys

        return KmsOuterKeys(found[1], keys.with_suffix(".kms"))
    return OuterKeys(setting.expanduser())


class OuterKeys:
    """See `Outer`. The operator's file: a line of 64 hexadecimal digits for each key, the one in use first.

    Others in it still open what they wrapped. Empty lines, and what begins with #, are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._by_id: dict[bytes, bytes] = {}

    def refresh(self) -> bool:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen == self._seen:
                    return False
                if found.st_mode & 0o022:
                    raise TierError(f"tiers.encryption_key_file: others may write to {self._path}")
                text = file.read(OUTER_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise TierError(f"tiers.encryption_key_file: {self._path} cannot be read: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys or not all(re.fullmatch(f"[0-9a-fA-F]{{{2 * SECRET_BYTES}}}", line) for line in keys):
            raise TierError(
                f"tiers.encryption_key_file: {self._path} must have a line of {2 * SECRET_BYTES} hexadecimal "
                "digits for each key, the one in use first (openssl rand -hex 32)"
            )
        self._by_id = {outer_id(bytes.fromhex(line)): bytes.fromhex(line) for line in keys}
        self._seen = seen
        return True

    @property
    def current(self) -> SessionKey:
        return SessionKey(*next(iter(self._by_id.items())))

    def get(self, key_id: bytes, proof: bytes = b"") -> bytes | None:
        return self._by_id.get(key_id)

    def is_current(self, key_id: bytes) -> bool:
        return next(iter(self._by_id)) == key_id

    def proof(self, key_id: bytes) -> bytes:
        return b""


def outer_id(outer: bytes) -> bytes:
    """Return the id of an outer key."""
    return hashlib.sha256(b"samovar outer key\0" + outer).digest()[:ID_BYTES]
