"""An extent: the run of consecutive blocks that one turn added, and where a turn's blocks may go.

Plain data only. `record.py` builds and checks the bytes of an extent's record.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.blocks.keys import KEY_BYTES
from samovar.cache_tiers.blocks.tiers import CPU, NVME, PLACED, S3, TIERS, TierName

TAG_BYTES = 16
"""Length of a tenant's or session's tag: a truncated HMAC under the server's secret."""

SESSION_BYTES = 8
"""How much of a session's tag names the session; the rest names one of its lineages (`lineage.py`)."""


def session_of(tag: bytes) -> bytes:
    """Return the tag of the whole session that a lineage's tag belongs to."""
    return tag[:SESSION_BYTES] + bytes(TAG_BYTES - SESSION_BYTES)


def is_of(lineage: bytes, tag: bytes) -> bool:
    """Return whether a lineage is the one, or of the whole session, that `tag` stands for."""
    return tag in (lineage, session_of(lineage))


@dataclass(frozen=True, slots=True)
class Clear:
    """A request to forget a tenant, or one session of it and the sessions in `also`, in every tier.

    A lineage's tag stands for its whole session: nothing less than what a client can name is cleared.
    """

    tenant: bytes
    session: bytes | None = None
    also: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.session is not None:
            object.__setattr__(self, "session", session_of(self.session))
        object.__setattr__(self, "also", tuple(map(session_of, self.also)))

    def each(self) -> tuple[Clear, ...]:
        """Split into clears of one session each, or one of the whole tenant."""
        return tuple(Clear(self.tenant, session) for session in (self.session, *self.also))


Bytes = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of one block's payload: `layers` runs of `layer_bytes` (K, then V, of all its slots).

    Where KV heads lie in groups, each group has its own runs of all layers, one group behind the other.
    """

    layers: int
    layer_bytes: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a turn's blocks go when it ends, how low they may be demoted, and for how long.

    `first`: written at once; `write_behind`: copied when the mover has time; nothing is ever
    stored below `lowest`. These are of `PLACED`; a tier between them gets its blocks from above. An extent
    used within `min_ttl_s` is evicted after those that were not; one not used for `ttl_s` is forgotten in
    every tier. Raises `ValueError` for a tier that is none of them: requests come from other processes.
    """

    first: TierName = CPU.name
    write_behind: tuple[TierName, ...] = (NVME.name,)
    lowest: TierName = S3.name
    min_ttl_s: float = 1800.0
    ttl_s: float = 86400.0

    def __post_init__(self) -> None:
        for tier in (self.first, *self.write_behind, self.lowest):
            if tier not in PLACED:
                raise ValueError(f"{tier!r} is none of {', '.join(PLACED)}")

    def allows(self, tier: TierName) -> bool:
        return TIERS.index(tier) <= TIERS.index(self.lowest)

    @property
    def is_durable(self) -> bool:
        """Whether the blocks may be where a restart leaves them."""
        return TIERS.kind(self.lowest).survives_process


@dataclass(frozen=True, slots=True)
class Address:
    """An extent's name in a tier: digests only, so that a path built from it is always safe."""

    tenant: bytes  # TAG_BYTES
    namespace: bytes  # KEY_BYTES
    extent_id: bytes  # KEY_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class ExtentHeader:
    """Everything about an extent but its payload.

    `keys[i]` is the block key of block `first_block + i`, whose parent is `keys[i - 1]` (`parent` for
    the first; `keys.ROOT` when `first_block == 0`). All blocks are full except the last, which may hold
    fewer tokens: a turn's tail. `checksums`: u64 `[blocks, layers]`; which they are depends on `version`, the
    record format's (`record.py`). `tenant`, `session`: tags of the tenant and the lineage that stored it
    (`lineage.py`).
    """

    namespace: bytes
    tenant: bytes
    session: bytes
    shape: BlockShape
    parent: bytes
    first_block: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]
    checksums: Checksums
    placement: Placement
    created_unix_s: float
    version: int

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def payload_bytes(self) -> int:
        return self.blocks * self.shape.block_bytes

    @property
    def extent_id(self) -> bytes:
        return extent_id(self.namespace, self.keys)

    @property
    def address(self) -> Address:
        return Address(self.tenant, self.namespace, self.extent_id)


def extent_id(namespace: bytes, keys: tuple[bytes, ...]) -> bytes:
    """Return the extent's 32-byte id: equal for the same run of the same blocks, wherever it is stored."""
    digest = hashlib.sha256(b"samovar extent\0" + namespace)
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a block key has {KEY_BYTES} bytes, not {len(key)}")
        digest.update(key)
    return digest.digest()


# Tags name tenants in the tiers without revealing their names.


def tenant_tag(server_secret: bytes, tenant: str) -> bytes:
    """Return the `TAG_BYTES` that stand for a tenant in records, quotas and clears."""
    digest = hmac.digest(server_secret, b"samovar tenant tag\0" + tenant.encode(), "sha256")
    return digest[:TAG_BYTES]
