"""Object keys of extents: `<prefix>/v1/<tenant>/<namespace>/<extent id>`, all in hex.

One folder per tenant, so that lifecycle rules and a manual `aws s3 rm` can select it. Clears are marked by
`<prefix>/clears/<tenant>/<all, or sessions>/<token>`, objects whose names carry all information. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from samovar.cache_tiers.blocks import KEY_BYTES, TAG_BYTES, Address, Clear

_TAG = f"([0-9a-f]{{{2 * TAG_BYTES}}})"
_DIGEST = f"([0-9a-f]{{{2 * KEY_BYTES}}})"
_NAME = re.compile(f"{_TAG}/{_DIGEST}/{_DIGEST}")
SESSIONS_MAX = 7
"""Maximum sessions per mark: servers that keep keys as files allow a part of a key 255 bytes."""

_READ_MAX = 16
"""Sessions of a mark that is read: so many were put into one before."""

_ALL = "all"
_SESSION = f"[0-9a-f]{{{2 * TAG_BYTES}}}"
_MARK = re.compile(f"{_TAG}/({_ALL}|{_SESSION}(?:-{_SESSION}){{0,{_READ_MAX - 1}}})/[0-9a-f]{{1,64}}")


class S3Keys:
    """Keys under one prefix. Raises `ValueError` for a prefix with `.` or `..`."""

    def __init__(self, prefix: str) -> None:
        parts = [part for part in prefix.split("/") if part]
        if {".", ".."} & set(parts):
            raise ValueError(f"an object key must not climb: {prefix!r}")
        root = "".join(f"{part}/" for part in parts)
        self.records = f"{root}v1/"
        self.quarantine = f"{root}bad/"
        self.probes = f"{root}probe/"
        self.clears = f"{root}clears/"

    def record(self, address: Address) -> str:
        return self.records + _name(address)

    def bad(self, address: Address) -> str:
        """Return the key under which its bad record is kept for inspection."""
        return self.quarantine + _name(address)

    def records_of(self, tenant: bytes) -> str:
        """Return the prefix of a tenant's records; the next two: of its bad records and marks."""
        return f"{self.records}{tenant.hex()}/"

    def quarantine_of(self, tenant: bytes) -> str:
        return f"{self.quarantine}{tenant.hex()}/"

    def clears_of(self, tenant: bytes) -> str:
        return f"{self.clears}{tenant.hex()}/"

    def mark(self, tenant: bytes, sessions: Sequence[bytes | None], token: str) -> str:
        """Return a mark's key for at most `SESSIONS_MAX` sessions; None: the whole tenant."""
        names = [_ALL if session is None else session.hex() for session in sessions]
        return f"{self.clears_of(tenant)}{_ALL if None in sessions else '-'.join(names)}/{token}"

    def parse_mark(self, key: str) -> tuple[Clear, ...]:
        """Return what a mark clears; empty if the key is not a mark of ours."""
        found = _MARK.fullmatch(key, len(self.clears)) if key.startswith(self.clears) else None
        if found is None:
            return ()
        tenant, names = bytes.fromhex(found[1]), found[2]
        if names == _ALL:
            return (Clear(tenant),)
        return tuple(Clear(tenant, bytes.fromhex(name)) for name in names.split("-"))

    def parse(self, key: str) -> Address | None:
        """Return the address whose `record` this key is; None if it is not a key of ours."""
        return _parse(key, self.records)

    def parse_bad(self, key: str) -> Address | None:
        """Return the address whose `bad` this key is; None if it is not a key of ours."""
        return _parse(key, self.quarantine)


def _name(address: Address) -> str:
    return f"{address.tenant.hex()}/{address.namespace.hex()}/{address.extent_id.hex()}"


def _parse(key: str, root: str) -> Address | None:
    found = _NAME.fullmatch(key, len(root)) if key.startswith(root) else None
    return Address(*map(bytes.fromhex, found.groups())) if found else None
