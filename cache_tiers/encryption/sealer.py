"""Rows of tables that only a key opens: what they say is sealed under the row's own name.

`SEALED_MAGIC` | id of the key | random bytes | ciphertext and tag. A row's key is made of its owner's key,
the random bytes and the row's name, which is the associated data, too: in another row's place, or under
another time, it opens nothing, and no key seals two texts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from samovar.cache_tiers.blocks import SEALED_MAGIC, SEALED_TEXT
from samovar.cache_tiers.encryption.tier import GCM_TAG_BYTES, ID_BYTES, NONCE_BYTES, SessionKey

SALT_BYTES = 32
_FRONT = struct.Struct(f"<{len(SEALED_MAGIC)}s{ID_BYTES}s{SALT_BYTES}s")
SEALED_BYTES = _FRONT.size + GCM_TAG_BYTES
"""What a sealed row takes besides what it says."""
NONCE = bytes(NONCE_BYTES)


class BadSeal(Exception):
    """A row is not what its key has sealed: it was changed, or lies in another's place."""


def row_name(*parts: str | bytes | float | None) -> bytes:
    """Return what tells a row from all others: each part with its type and length."""
    told = bytearray()
    for part in parts:
        raw = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        told += struct.pack("<BI", isinstance(part, bytes), len(raw)) + raw
    return bytes(told)


def seal_row(key: SessionKey, name: bytes, plain: bytes) -> bytes:
    """Return `plain` sealed for the row that `name` names."""
    salt = secrets.token_bytes(SALT_BYTES)
    front = _FRONT.pack(SEALED_MAGIC, key.key_id, salt)
    return front + _cipher(key, salt, name).encrypt(NONCE, plain, front + name)


def key_id_of(sealed: bytes) -> bytes | None:
    """Return the id of the key that a row is sealed with; None: it is not sealed."""
    if len(sealed) < SEALED_BYTES or not sealed.startswith(SEALED_MAGIC):
        return None
    return sealed[len(SEALED_MAGIC) : len(SEALED_MAGIC) + ID_BYTES]


def open_row(key: SessionKey, name: bytes, sealed: bytes) -> bytes:
    """Return what was sealed for that row. Raises `BadSeal`."""
    front = sealed[: _FRONT.size]
    salt = front[-SALT_BYTES:]
    try:
        return _cipher(key, salt, name).decrypt(NONCE, sealed[_FRONT.size :], front + name)
    except InvalidTag:
        raise BadSeal("a row is not what its key has sealed") from None


def _cipher(key: SessionKey, salt: bytes, name: bytes) -> AESGCM:
    told = b"samovar row\0" + salt + hashlib.sha256(name).digest()
    return AESGCM(hmac.digest(key.secret, told, "sha256"))


def as_text(sealed: bytes) -> str:
    """Return a sealed row as a column of text holds it."""
    return SEALED_TEXT + base64.b64encode(sealed).decode("ascii")


def of_text(text: str) -> bytes | None:
    """Return the sealed row of a column of text; None: it is not sealed. Raises `BadSeal`."""
    if not text.startswith(SEALED_TEXT):
        return None
    try:
        return base64.b64decode(text[len(SEALED_TEXT) :], validate=True)
    except ValueError:
        raise BadSeal("a row is no sealed text") from None
