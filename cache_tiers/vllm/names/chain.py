"""Names of a request's blocks: keys over its tokens and whatever else its KV depends on. Pure.

Not vLLM's own block hashes: how they are made is a setting of each server's, and some begin with a number
that each process draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from samovar.cache_tiers.blocks import ROOT, block_key


def extra_digest(extra: Sequence[object]) -> bytes:
    """Return 32 bytes for a block's extra keys: images by content and place, the adapter, the salt.

    Only words, numbers, bytes and tuples of them: they have one text. Raises `ValueError` at anything else.
    """
    return hashlib.sha256(b"samovar extra\0" + _text(extra).encode("utf-8", "surrogatepass")).digest()


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"({','.join(map(_text, value))})"
    if value is None or isinstance(value, bool | int | str | bytes):
        return f"{type(value).__name__} {value!r}"
    raise ValueError(f"a block's extra key is a {type(value).__name__}, which has no one text")


def chain_keys(
    namespace: bytes,
    token_ids: Sequence[int],
    extra: Sequence[bytes],
    block_tokens: int,
    parent: bytes = ROOT,
) -> list[bytes]:
    """Return the keys of the full blocks of `token_ids`, behind `parent`.

    `extra`: of each block, a digest or b"" (nothing); shorter: nothing from there on. A key commits to all
    that stands before it, extras too.
    """
    keys = []
    for number in range(len(token_ids) // block_tokens):
        more = extra[number] if number < len(extra) else b""
        if more:
            parent = hashlib.sha256(parent + more).digest()
        parent = block_key(namespace, parent, token_ids[number * block_tokens : (number + 1) * block_tokens])
        keys.append(parent)
    return keys


def rank_name(digest: bytes, rank: int) -> bytes:
    """Return what a namespace or a key is among the records of a rank; of rank 0 it is as it is."""
    if not rank or digest == ROOT:
        return digest
    return hashlib.sha256(b"samovar rank\0" + rank.to_bytes(4) + digest).digest()
