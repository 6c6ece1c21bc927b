"""Which replica a session belongs to when nobody remembers: rendezvous hashing. Pure.

Every caller computes the same order from the session key and the replicas' names, with no shared
state; a replica that comes or goes moves only its own share of the sessions (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", 1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def rendezvous_order(key: str, members: Iterable[str]) -> list[str]:
    """All members, the key's home first, then who would be home if that one were gone, and so on."""
    return sorted(members, key=lambda member: (_weight(key, member), member), reverse=True)


def _weight(key: str, member: str) -> bytes:
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    return hashlib.blake2b(f"{len(key)}:{key}{member}".encode(), digest_size=8).digest()
