"""Block keys: a block's key commits to the whole prefix before it.

A key is `sha256(namespace, parent key, token ids as u32 LE)`, 32 bytes. Namespace and parent have a
fixed length, so the encoding is unambiguous. sha256 instead of a fast hash, because colliding prefixes
can be constructed for xxhash (vLLM PR #54727). The builder of a namespace decides what it separates.
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
