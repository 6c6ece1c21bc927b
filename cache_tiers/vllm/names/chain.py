"""Names of a request's blocks: keys over its tokens and whatever else its KV depends on. Pure.

Not vLLM's own block hashes: how they are made is a setting of each server's, and some begin with a number
that each process draws.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from samovar.cache_tiers.blocks import ROOT, block_key

DIGEST = re.compile("(?:[0-9a-f]{64}){1,2}")
"""How vLLM writes a digest: BLAKE3 and SHA-256 have 64 digits, SHA-512 has 128."""

KeysOf = Callable[[Any, int, int, int], tuple[Sequence[object] | None, int]]
"""vLLM's `generate_block_hash_extra_keys`."""


def check_media(request: Any) -> None:
    """Raise `ValueError` if one of a request's images, or the like of them, is not named by its content.

    vLLM names one by a digest, behind an adapter's name if its KV depends on that. But what a client gives
    ("uuid") is taken as it is, and where vLLM itself needs no digests it counts, from 1 in each process.
    """
    lora = request.lora_request
    prefix = f"{lora.lora_name}:" if lora else ""
    for one in request.mm_features or ():
        if not DIGEST.fullmatch(one.identifier.removeprefix(prefix)):
            raise ValueError(f"{one.modality} {one.identifier[:80]!r} is not named by its content")


def extra_digests(
    request: Any, adapter: tuple[object, ...], keys_of: KeysOf, block_tokens: int, tokens: int
) -> list[bytes]:
    """Return the extra digest of each block up to a token, shortened by trailing empty ones.

    By vLLM's own rule of what besides tokens a block depends on: images, adapter, salt. `adapter`: what names
    its content. Raises `ValueError` for what has no name.
    """
    if not (request.mm_features or request.lora_request or request.cache_salt):
        return []
    check_media(request)
    found, image = [], 0
    for start in range(0, tokens // block_tokens * block_tokens, block_tokens):
        keys, image = keys_of(request, start, start + block_tokens, image)
        # Older minors do not say which key is the salt: it could be another image's name.
        salt = ("salt", request.cache_salt) if request.cache_salt and not start else ()
        all_keys = (*(keys or ()), *adapter, *salt)
        found.append(extra_digest(all_keys) if all_keys else b"")
    while found and not found[-1]:
        found.pop()
    return found


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
