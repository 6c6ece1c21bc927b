"""Block keys: the name of a block commits to the whole prefix before it.

A key is `sha256(namespace, parent key, token ids as u32 LE)`, 32 bytes. Namespace and parent are
fixed in length, so the encoding is unambiguous; sha256 rather than a fast hash because with
xxhash colliding prefixes can be made on purpose (vLLM PR #54727). This module knows nothing
of pages, models or tenants: whoever builds a namespace decides what it separates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
"""The parent of a conversation's first block."""


def namespace_digest(*parts: bytes) -> bytes:
    """32 bytes that differ when any part differs, or when the same bytes are cut elsewhere."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_key(namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block that holds `token_ids` after the prefix named `parent`.

    Raises `ValueError` when namespace or parent is not 32 bytes, `OverflowError` when a token id
    is not a u32.
    """
    if len(namespace) != KEY_BYTES or len(parent) != KEY_BYTES:
        raise ValueError(
            f"namespace and parent must be {KEY_BYTES} bytes, not {len(namespace)}, {len(parent)}"
        )
    ids = np.array(token_ids, dtype="<u4")
    return hashlib.sha256(namespace + parent + ids.tobytes()).digest()
