"""What one token id looks like by itself: a string and its bytes, for log-probabilities.

Bytes come from the vocabulary, not from decoding: a token may hold a part of a character.
Understands byte-level BPE (GPT-2's printable stand-ins for bytes) and SentencePiece's `▁` and
`<0xNN>`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

from transformers.convert_slow_tokenizer import bytes_to_unicode

from replicas.messages import TokenLogprob
from replicas.sampler import Sampled

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}


class Vocabulary(Protocol):
    def id_to_token(self, token_id: int) -> str | None: ...
    def to_str(self) -> str: ...


class TokenText:
    """`vocabulary`: the `tokenizers.Tokenizer` in use; `special_ids` are shown as they are written."""

    def __init__(self, vocabulary: Vocabulary, special_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._special_ids = special_ids
        self._byte_level = '"ByteLevel"' in vocabulary.to_str()
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token_id: int) -> tuple[str, bytes]:
        """(text with U+FFFD for broken characters, exact bytes); an id nobody uses is ("", b"")."""
        raw = self._bytes(token_id)
        return raw.decode("utf-8", errors="replace"), raw

    def _bytes(self, token_id: int) -> bytes:
        piece = self._vocabulary.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids:
            return piece.encode()
        if self._byte_level and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        byte_token = _BYTE_TOKEN.fullmatch(piece)
        if byte_token:
            return bytes([int(byte_token.group(1), 16)])
        return piece.replace("▁", " ").encode()

    def logprobs(self, sampled: Sampled) -> tuple[TokenLogprob, ...]:
        """What the client is told of a sampled token and its rivals; nothing if it did not ask."""
        if sampled.logprob is None:
            return ()
        top = tuple(TokenLogprob(i, *self.of(i), logprob) for i, logprob in sampled.top)
        return (TokenLogprob(sampled.token_id, *self.of(sampled.token_id), sampled.logprob, top),)
