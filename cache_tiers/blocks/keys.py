"""Block keys: the name of a block commits to the whole prefix before it.

A key is `sha256(namespace, parent key, token ids as u32 LE)`, 32 bytes. Namespace and parent are
fixed in length, so the encoding is unambiguous; sha256 rather than a fast hash because with
xxhash colliding prefixes can be made on purpose (vLLM PR #54727). This module knows nothing
of pages, models or tenants: whoever builds a namespace decides what it separates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

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


# How much of a session's chain stands at the front of its next prompt, told from a few of its block keys.
#
# A block key stands for all that comes before it, so one that agrees far into the chain settles all before.
# A thousand sessions' whole chains would not fit; sixteen marks each do, and the last of them, which nearly
# every turn agrees in, is the chain's last full block. Pure.

MARKS_MAX = 16
MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChainMarks:
    """`blocks[i]`: after how many full blocks mark `i` stands, growing; `digests`: `MARK_BYTES` each."""

    blocks: tuple[int, ...] = ()
    digests: bytes = b""


def marks_of(keys: Sequence[bytes]) -> ChainMarks:
    """Of the keys of a chain's full blocks: evenly spaced, the last one among them."""
    count = min(MARKS_MAX, len(keys))
    blocks = tuple(len(keys) * (number + 1) // count for number in range(count))
    return ChainMarks(blocks, b"".join(keys[block - 1][:MARK_BYTES] for block in blocks))


def kept_blocks(marks: ChainMarks, keys: bytes) -> int:
    """Of the marked chain, the full blocks that a prompt with these `keys` (joined) begins with.

    At most a sixteenth of the chain too few.
    """
    kept = 0
    for number, block in enumerate(marks.blocks):
        at = (block - 1) * KEY_BYTES
        mark = marks.digests[number * MARK_BYTES : (number + 1) * MARK_BYTES]
        if block * KEY_BYTES > len(keys) or keys[at : at + MARK_BYTES] != mark:
            break
        kept = block
    return kept
