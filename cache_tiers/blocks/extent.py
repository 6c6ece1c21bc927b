"""Blocks and extents, and their names: block keys, extents, the tags of tenants, sessions and lineages.

A block's key commits to the whole prefix before it: `sha256(namespace, parent key, token ids as u32 LE)`, 32
bytes. Namespace and parent have a fixed length, so the encoding is unambiguous. sha256 instead of a fast
hash, because colliding prefixes can be constructed for xxhash (vLLM PR #54727). The builder of a namespace
decides what it separates.

An extent is the run of consecutive blocks that one turn added. `record.py` builds and checks its bytes.

A session, named by its client's id, is a bundle of *lineages*: chains of prompts of which each extends the
one before. Beside the conversation come its titles, follow-up questions and sub-agents under the same id, and
only some of them resume. A lineage is known by its first prompt: every later prompt of it begins with the
same tokens, and so does an edited or regenerated one that forks off after the first. Both have tags of
`TAG_BYTES`: the session's own bytes, then the lineage's: the length of its first prompt and a keyed digest of
it. So a tag alone says whether a prompt is of its lineage, also one read from a record after a restart. A tag
whose lineage part is zero stands for the whole session. Pure: plain data only.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.blocks.tiers import CPU, NVME, PLACED, S3, TIERS, TierName

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
"""The parent of a conversation's first block."""


def namespace_digest(*parts: bytes) -> bytes:
    """Return 32 bytes that differ when any part, or any boundary between parts, differs."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_key(namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the block that holds `token_ids` after the prefix named `parent`.

    Raises `ValueError` if namespace or parent is not 32 bytes, `OverflowError` if a token id is not
    a u32.
    """
    if len(namespace) != KEY_BYTES or len(parent) != KEY_BYTES:
        raise ValueError(
            f"namespace and parent must be {KEY_BYTES} bytes, not {len(namespace)}, {len(parent)}"
        )
    ids = np.array(token_ids, dtype="<u4")
    return hashlib.sha256(namespace + parent + ids.tobytes()).digest()


def chain_keys(namespace: bytes, parent: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the `block_key` of each full block of `token_ids`, a chain that follows `parent`.

    A prompt of 32k tokens has 2,000 of them: its ids become bytes once. Raises as `block_key`.
    """
    if len(namespace) != KEY_BYTES or len(parent) != KEY_BYTES:
        raise ValueError(
            f"namespace and parent must be {KEY_BYTES} bytes, not {len(namespace)}, {len(parent)}"
        )
    keys, nbytes, begun = list[bytes](), 4 * block_tokens, hashlib.sha256(namespace)
    ids = memoryview(np.array(token_ids, dtype="<u4").tobytes())
    for start in range(0, len(ids) // nbytes * nbytes, nbytes):
        digest = begun.copy()
        digest.update(parent)
        digest.update(ids[start : start + nbytes])
        parent = digest.digest()
        keys.append(parent)
    return keys


MARKS_MAX = 16
MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChainMarks:
    """A sample of a chain's block keys, to measure how much of it the next prompt still begins with.

    `blocks[i]`: number of full blocks up to and including mark `i`, increasing; `digests`: `MARK_BYTES`
    each. A block key commits to everything before it, so a match far into the chain covers the rest.
    Whole chains of a thousand sessions would not fit; `MARKS_MAX` marks each do. The last mark is the
    chain's last full block, which matches in nearly every turn.
    """

    blocks: tuple[int, ...] = ()
    digests: bytes = b""


def marks_of(keys: Sequence[bytes]) -> ChainMarks:
    """Return evenly spaced marks, including the last key, from the `keys` of a chain's full blocks."""
    count = min(MARKS_MAX, len(keys))
    blocks = tuple(len(keys) * (number + 1) // count for number in range(count))
    return ChainMarks(blocks, b"".join(keys[block - 1][:MARK_BYTES] for block in blocks))


def kept_blocks(marks: ChainMarks, keys: bytes) -> int:
    """Return how many full blocks of the marked chain a prompt with these `keys` (joined) begins with.

    Too low by at most a sixteenth of the chain.
    """
    kept = 0
    for number, block in enumerate(marks.blocks):
        at = (block - 1) * KEY_BYTES
        mark = marks.digests[number * MARK_BYTES : (number + 1) * MARK_BYTES]
        if block * KEY_BYTES > len(keys) or keys[at : at + MARK_BYTES] != mark:
            break
        kept = block
    return kept


TAG_BYTES = 16
"""Length of a tenant's or session's tag: a truncated HMAC under the server's secret."""

SESSION_BYTES = 8
"""How much of a session's tag names the session; the rest names one of its lineages."""


def session_of(tag: bytes) -> bytes:
    """Return the tag of the whole session that a lineage's tag belongs to."""
    return tag[:SESSION_BYTES] + bytes(TAG_BYTES - SESSION_BYTES)


def session_owner(owner: bytes) -> bytes:
    """Return the tags of the tenant and the whole session that an owner (tags of both) is of."""
    return owner[:TAG_BYTES] + session_of(owner[TAG_BYTES:])


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
    record format's (`record.py`). `tenant`, `session`: tags of the tenant and the lineage that stored it.
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


_LENGTH_BYTES = 3
_DIGEST_BYTES = TAG_BYTES - SESSION_BYTES - _LENGTH_BYTES
ROOT_TOKENS_MAX = 256**_LENGTH_BYTES - 1


def root_tokens(tag: bytes) -> int:
    """Return the tokens of a lineage's first prompt; 0 for the tag of a whole session."""
    return int.from_bytes(tag[SESSION_BYTES : SESSION_BYTES + _LENGTH_BYTES], "big")


def lineage_tag(
    session: bytes, prompt: Sequence[int], known: Iterable[bytes] = (), *, key: bytes, begin_tokens: int = 0
) -> bytes:
    """Return the tag of the lineage that `prompt` belongs to.

    That is the longest of `known` that it extends, or a new one. Hashes the prompt once, whatever the number
    of known lineages.

    Args:
        session: the session's tag, or any lineage's of it.
        known: tags of the session's lineages, in any order.
        key: secret, at most 64 bytes, so that a tag does not tell what the first prompt was.
        begin_tokens: how much of the prompt all later ones repeat, without what the template puts before the
            answer only; 0: all of it.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("a prompt has at least one token")
    begin = min(begin_tokens or len(prompt), len(prompt), ROOT_TOKENS_MAX)
    own = session[:SESSION_BYTES]
    candidates: dict[int, list[bytes]] = {}
    for tag in known:
        if tag[:SESSION_BYTES] == own and 0 < root_tokens(tag) <= len(prompt):
            candidates.setdefault(root_tokens(tag), []).append(tag)
    tokens = array("I", prompt[: max([begin, *candidates])])
    digest = blake2b(own, digest_size=_DIGEST_BYTES, key=key, person=b"samovar lineage")
    found, new, at = b"", b"", 0
    for length in sorted({begin, *candidates}):
        digest.update(tokens[at:length].tobytes())
        at = length
        tag = own + length.to_bytes(_LENGTH_BYTES, "big") + digest.digest()
        if tag in candidates.get(length, ()):
            found = tag
        if length == begin:
            new = tag
    return found or new
