"""What rank 0 tells the other ranks: the kinds of orders, and a step as words."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listing
from enum import IntEnum

import numpy as np

from replicas.messages import SamplingParams
from replicas.ranks.ring import Words
from replicas.scheduling import Chunk, Sequence


class Order(IntEnum):
    """The kinds of messages: on the channel of steps up to `SAME`, the others on that of moves.

    `READY`: nothing; done when the rank has loaded. `LEAST_MEMORY`: agree on the free memory. `POOL`: make a
    pool of so many pages. `STEP`: compute. `SAME`: compare slots of two page tables, and agree. `OUT`, `IN`:
    copy pages to or from the staging memory.
    """

    READY = 1
    LEAST_MEMORY = 2
    POOL = 3
    STEP = 4
    SAME = 5
    OUT = 6
    IN = 7


def words_of(numbers: Listing[int]) -> Words:
    return np.asarray(numbers, dtype=np.int32)


def step_words_max(*, tokens: int, sequences: int, pages: int) -> int:
    """Return the length of the longest order on the channel of steps.

    `pages`: of one sequence, each of which may also copy a page.
    """
    return max(2 + 2 * sequences + sequences * (3 + pages) + tokens, 2 + 2 * pages)


def encode_step(chunks: Listing[Chunk], copies: Listing[tuple[int, int]]) -> list[Words]:
    """Return a step's words, in parts."""
    parts = [words_of([len(copies), len(chunks), *(page for copy in copies for page in copy)])]
    for chunk in chunks:
        sequence = chunk.sequence
        parts.append(words_of([chunk.start, chunk.count, len(sequence.pages)]))
        parts.append(np.asarray(sequence.tokens[chunk.start : chunk.start + chunk.count], dtype=np.int32))
        parts.append(words_of(sequence.pages))
    return parts


def decode_step(words: Words) -> tuple[list[Chunk], list[tuple[int, int]]]:
    """Return the chunks, of sequences that know no more than this step needs, and the copies of pages."""
    numbers = words.tolist()
    copies, count = numbers[0], numbers[1]
    at = 2 + 2 * copies
    pairs = list(zip(numbers[2:at:2], numbers[3:at:2], strict=True))
    chunks = []
    for _ in range(count):
        start, tokens, pages = numbers[at : at + 3]
        at += 3
        ids = array("I", bytes(4 * start)) + array("I", numbers[at : at + tokens])
        table = numbers[at + tokens : at + tokens + pages]
        at += tokens + pages
        chunks.append(Chunk(_sequence(ids, table), start, tokens))
    return chunks, pairs


def _sequence(ids: array[int], pages: list[int]) -> Sequence:
    return Sequence(
        request_id="of rank 0",
        arrival=0,
        namespace=bytes(32),
        tokens=ids,
        prompt_tokens=len(ids),
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        pages=pages,
    )
