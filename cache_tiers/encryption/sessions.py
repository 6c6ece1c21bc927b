"""Rows that sessions leave, sealed with the keys that erasing them destroys."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.encryption.keys import LeasedKeys
from samovar.cache_tiers.encryption.outer import TenantWrapper
from samovar.cache_tiers.encryption.sealer import key_id_of, open_row, row_name, seal_row


class SessionSealer:
    """Seals what sessions leave with their keys: erased, nothing of it opens, wherever there is a copy."""

    def __init__(self, keys: LeasedKeys) -> None:
        self._keys = keys

    def seal(
        self, tenant: bytes, session: bytes, made_unix_s: float, name: bytes, plain: bytes
    ) -> bytes | None:
        """Seal a row of a session; None: it is from before its last erasure. Raises `TierError`."""
        key = self._keys.key_for(tenant, session)
        if made_unix_s <= key.after_unix_s:
            return None
        return seal_row(key, _owned(tenant, session, name), plain)

    def open(self, tenant: bytes, session: bytes, name: bytes, sealed: bytes) -> bytes | None:
        """Return what a row says; None: its key is not there, or it is not sealed.

        Raises `BadSeal`, and `TierError` where the keys cannot be had.
        """
        key_id = key_id_of(sealed)
        key = None if key_id is None else self._keys.find(tenant, session, key_id)
        return None if key is None else open_row(key, _owned(tenant, session, name), sealed)

    def forget(self, tenant: bytes, session: bytes | None) -> None:
        """Forget the key of a session, or (None) all of a tenant, that was destroyed elsewhere."""
        self._keys.forget([Clear(tenant, session)])


@dataclass(frozen=True, slots=True)
class Sealing:
    """What a cluster's processes seal with: keys of sessions, and a wrapper of keys of tenants."""

    sessions: LeasedKeys
    tenants: TenantWrapper


def _owned(tenant: bytes, session: bytes, name: bytes) -> bytes:
    return row_name(tenant, session) + name
