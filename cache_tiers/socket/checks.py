"""What a message from another process may say: digests of their sizes, numbers within bounds, short words.

The types are checked before (`wire.decoded`). A node keeps what it is told: a number that is none would stay
in a price or a forecast, a clear of a strange size in the file of clears. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from samovar.cache_tiers.blocks import (
    BLOCK_TOKENS_MAX,
    KEY_BYTES,
    KINDS,
    MARK_BYTES,
    TAG_BYTES,
    ChainMarks,
)
from samovar.cache_tiers.messages import BadReport, BlockRange, Lookup, LookupResult, TurnEnded
from samovar.cache_tiers.pricing import TierPrice
from samovar.cache_tiers.socket.wire import FRAME_BYTES_MAX, BadMessage

BLOCKS_MAX = FRAME_BYTES_MAX // KEY_BYTES
"""Of a chain: its keys come in one frame."""
ROWS_MAX = 4096
WORD_CHARS_MAX = 512
COUNT_MAX = 2**48
SECONDS_MAX = 1e8

DIGESTS = {
    "namespace": KEY_BYTES,
    "extent_id": KEY_BYTES,
    "tenant": TAG_BYTES,
    "session": TAG_BYTES,
    "also": TAG_BYTES,
}
COUNTS = {
    "blocks": BLOCKS_MAX,
    "offset": BLOCKS_MAX,
    "block_tokens": BLOCK_TOKENS_MAX,
    "input_tokens": BLOCKS_MAX * BLOCK_TOKENS_MAX,
    "output_tokens": BLOCKS_MAX * BLOCK_TOKENS_MAX,
}
"""Field -> the largest number; of the others `COUNT_MAX`."""


def check(message: Any) -> None:
    """Raise `BadMessage` if a client cannot mean that."""
    _check(message, "message")


def _check(value: Any, name: str) -> None:
    if isinstance(value, tuple | list):
        _must(len(value) <= ROWS_MAX, f"{len(value)} values of {name}")
        for one in value:
            _check(one, name)
    elif is_dataclass(value):
        for field in fields(value):
            _check(getattr(value, field.name), field.name)
        rule = RULES.get(type(value))
        _must(rule is None or rule(value), f"a {type(value).__name__} that makes no sense")
    elif isinstance(value, bytes):
        _must(len(value) == DIGESTS.get(name, len(value)), f"{len(value)} bytes of {name}")
    elif isinstance(value, str):
        _must(len(value) <= WORD_CHARS_MAX, f"{len(value)} characters of {name}")
    elif isinstance(value, int | float):
        most = SECONDS_MAX if isinstance(value, float) else COUNTS.get(name, COUNT_MAX)
        _must(0 <= value <= most, f"{value} of {name}")


def _must(holds: bool, problem: str) -> None:
    if not holds:
        raise BadMessage(problem)


def _are_marks(marks: ChainMarks) -> bool:
    blocks = marks.blocks
    is_rising = all(one < other for one, other in zip((0, *blocks), blocks, strict=False))
    return is_rising and len(marks.digests) == MARK_BYTES * len(blocks)


RULES: dict[type, Callable[[Any], bool]] = {
    Lookup: lambda lookup: len(lookup.keys) % KEY_BYTES == 0,
    TurnEnded: lambda over: over.block_tokens >= 1,
    ChainMarks: _are_marks,
    BadReport: lambda bad: bad.kind in KINDS,
}


def is_answer(lookup: Lookup, found: LookupResult) -> bool:
    """Return whether a node can mean that, of this lookup: a client counts blocks and divides by prices."""
    blocks = len(lookup.keys) // KEY_BYTES
    tails = [tail.span for tail in found.tails]
    return (
        found.clear_seq >= 0
        and _are_spans(found.spans, lookup.tenant, blocks)
        and all(_is_span(span, lookup.tenant) and span.blocks == 1 and span.first <= blocks for span in tails)
        and all(len(tail.key) == KEY_BYTES and tail.tokens >= 1 for tail in found.tails)
        and all(map(_is_price, found.prices.values()))
        and all(0 <= run.first < run.first + run.blocks <= blocks for run in found.absent)
    )


def _are_spans(spans: Iterable[BlockRange], tenant: bytes, blocks: int) -> bool:
    end = 0
    for span in spans:
        if not (_is_span(span, tenant) and end <= span.first < span.first + span.blocks <= blocks):
            return False
        end = span.first + span.blocks
    return True


def _is_span(span: BlockRange, tenant: bytes) -> bool:
    """Return whether a span names this tenant's blocks; whether they are there, a fetch tells."""
    return (
        (len(span.extent_id), span.tenant) == (KEY_BYTES, tenant)
        and min(span.first, span.offset, span.nbytes) >= 0
        and span.blocks >= 1
    )


def _is_price(price: TierPrice) -> bool:
    return 0 <= price.latency_s < math.inf and price.bytes_per_s > 0 and price.proved_bytes >= 0
