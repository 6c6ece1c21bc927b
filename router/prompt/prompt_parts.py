"""Parts of a rendered prompt: the system prompt, and each message behind it, with their places in tokens.

Parts name a place in a prompt for people (`messages[3]`), and their digests tell whether the same message is
in another prompt. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from samovar.router.openai import ChatMessage

TokenIds = npt.NDArray[np.uint32]

SYSTEM = "system"
TOOLS = "tools"
DIGEST_BYTES = 8
SPACE = "\u2581"
"""How a sentencepiece vocabulary writes a space."""
BYTE_LEVEL_SPACE = "\u0120"
"""How a byte-level vocabulary writes a space; there every character stands for one byte."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt: the tokens `[start, end)` hold its text, `digest` is keyed.

    `name`: `system` (the leading system messages, or what the template puts there), or `messages[n]` as in
    the request.
    """

    name: str
    digest: bytes
    start: int
    end: int


class TokenSizes:
    """How many bytes of text each token of a vocabulary stands for.

    Exact for byte-level vocabularies. Others may add a space in front of a text, so that places are found a
    few tokens late; but they are the same in all prompts with the same beginning.
    """

    def __init__(self, vocab: Mapping[str, int], vocab_tokens: int) -> None:
        is_byte_level = BYTE_LEVEL_SPACE in vocab
        self._sizes = np.zeros(max([vocab_tokens, *(token_id + 1 for token_id in vocab.values())]), np.int64)
        for token, token_id in vocab.items():
            self._sizes[token_id] = len(token) if is_byte_level else _bytes_of_piece(token)

    def places(self, token_ids: TokenIds, offsets: Sequence[int]) -> list[int]:
        """Return, for each offset in bytes of the text, how many tokens lie wholly before it."""
        ends = np.cumsum(np.take(self._sizes, token_ids, mode="clip"))
        found: list[int] = np.searchsorted(ends, np.asarray(offsets, np.int64), side="right").tolist()
        return found


def _bytes_of_piece(token: str) -> int:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(SPACE, " ").encode())


def parts_of(
    messages: Sequence[ChatMessage], rendered: str, token_ids: TokenIds, sizes: TokenSizes, key: bytes
) -> list[PromptPart]:
    """Return the parts of a conversation that was rendered as `rendered`, the system part first.

    A message that the template changed, and those behind it, have the place where the one before it ended.
    """
    leading = sum(1 for _ in takewhile(lambda message: message.role == "system", messages))
    spans = list(_spans(rendered, [message.content for message in messages]))
    # Without a system message: what the template says by itself.
    head = (spans[0][0], spans[leading - 1][1]) if leading else (0, spans[0][0])
    spans = [head, *spans[leading:]]
    names = [SYSTEM, *(f"messages[{index}]" for index in range(leading, len(messages)))]
    digests = [_digest(key, messages[:leading]), *(_digest(key, [one]) for one in messages[leading:])]
    offsets = list(_byte_offsets(rendered, [place for span in spans for place in span]))
    places = sizes.places(token_ids, offsets)
    return [
        PromptPart(name, digest, places[2 * number], places[2 * number + 1])
        for number, (name, digest) in enumerate(zip(names, digests, strict=True))
    ]


def _spans(rendered: str, contents: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield where each content lies in `rendered`: first character and the one behind."""
    at, is_lost = 0, False
    for content in contents:
        start = -1 if is_lost else rendered.find(content, at)
        if start < 0 and not is_lost:
            content = content.strip()  # as many templates do
            start = rendered.find(content, at)
        if start < 0:  # the template rewrote it; searching on for each message would read the text each time
            is_lost = True
            yield at, at
            continue
        at = start + len(content)
        yield start, at


def _byte_offsets(text: str, places: Iterable[int]) -> Iterator[int]:
    """Yield the byte offset in UTF-8 of each place in characters; places ascend."""
    if text.isascii():
        yield from places
        return
    at, offset = 0, 0
    for place in places:
        offset += len(text[at:place].encode())
        at = place
        yield offset


def _digest(key: bytes, messages: Iterable[ChatMessage]) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    for message in messages:
        text = message.content.encode()
        digest.update(f"{message.role}\0{len(text)}\0".encode())
        digest.update(text)
        for call in message.calls:
            digest.update(f"\0{call.name}\0{call.arguments}".encode())
    return digest.digest()


def digest_of_texts(texts: Iterable[str], key: bytes) -> bytes:
    """Return the keyed digest of texts in their order."""
    digest = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    for text in texts:
        digest.update(f"{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
    return digest.digest()
