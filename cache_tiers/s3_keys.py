"""Object keys of extents: `<prefix>/v1/<tenant>/<namespace>/<extent id>`, all in hex.

One folder a tenant, so that lifecycle rules and a human's `aws s3 rm` can say which. Pure.
"""

from __future__ import annotations

import re

from cache_tiers.extent import TAG_BYTES, Address
from cache_tiers.keys import KEY_BYTES

_TAG = f"([0-9a-f]{{{2 * TAG_BYTES}}})"
_DIGEST = f"([0-9a-f]{{{2 * KEY_BYTES}}})"
_NAME = re.compile(f"{_TAG}/{_DIGEST}/{_DIGEST}")


class S3Keys:
    """Keys under one prefix. Raises `ValueError` for a prefix that climbs (`.`, `..`)."""

    def __init__(self, prefix: str) -> None:
        parts = [part for part in prefix.split("/") if part]
        if {".", ".."} & set(parts):
            raise ValueError(f"an object key must not climb: {prefix!r}")
        root = "".join(f"{part}/" for part in parts)
        self.records = f"{root}v1/"
        self.quarantine = f"{root}bad/"
        self.probes = f"{root}probe/"

    def record(self, address: Address) -> str:
        return self.records + _name(address)

    def bad(self, address: Address) -> str:
        """Where its bad record is kept for a look."""
        return self.quarantine + _name(address)

    def parse(self, key: str) -> Address | None:
        """The address whose `record` this key is; None when it is no key of ours."""
        return _parse(key, self.records)

    def parse_bad(self, key: str) -> Address | None:
        """The same for `bad`."""
        return _parse(key, self.quarantine)


def _name(address: Address) -> str:
    return f"{address.tenant.hex()}/{address.namespace.hex()}/{address.extent_id.hex()}"


def _parse(key: str, root: str) -> Address | None:
    found = _NAME.fullmatch(key, len(root)) if key.startswith(root) else None
    return Address(*map(bytes.fromhex, found.groups())) if found else None
