"""What another node has joined to what is here: own spans win, the other's fill the gaps. Pure.

Knows nothing of calls, prices or bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cache_tiers.chain_index import TAILS_MAX
from cache_tiers.extent import TIERS
from cache_tiers.messages import Found, Span, Tail


def covers(spans: Iterable[Span], blocks: int) -> bool:
    """Is each of the chain's first `blocks` blocks in one of `spans`?"""
    end = 0
    for span in sorted(spans, key=lambda span: span.first):
        if span.first > end:
            return False
        end = max(end, span.first + span.blocks)
    return end >= blocks


def merged(own: Found, theirs: Found, *, node: str, tenant: bytes, blocks: int) -> Found:
    """`own` with what node `node` has of the same chain besides, as spans and tails of tier `peer`.

    Nothing in `theirs` is believed but that it is worth asking for: what names another tenant, another tier,
    or blocks that the chain has not got, is left out.
    """
    spans = list(own.spans)
    for span in theirs.spans:
        if _is_sane(span, tenant) and span.first + span.blocks <= blocks:
            spans += list(_gaps(span, node, spans))
    spans.sort(key=lambda span: span.first)
    known = {(tail.key, tail.span.first) for tail in own.tails}
    tails = list(own.tails)
    for tail in theirs.tails:
        at = tail.span
        if _is_sane(at, tenant) and at.first <= blocks and (tail.key, at.first) not in known:
            tails.append(Tail(tail.key, tail.tokens, replace(at, tier="peer", node=node)))
    # Deepest first; of equal depth, what is here comes first.
    tails.sort(key=lambda tail: -tail.span.first)
    return replace(own, spans=tuple(spans), tails=tuple(tails[:TAILS_MAX]))


def _is_sane(span: Span, tenant: bytes) -> bool:
    return span.tenant == tenant and span.tier in TIERS and min(span.first, span.offset) >= 0 < span.blocks


def _gaps(span: Span, node: str, taken: Iterable[Span]) -> Iterator[Span]:
    """The parts of `span` that no span in `taken` covers. All of the extent is moved for each of them."""
    start, end = span.first, span.first + span.blocks
    for other in sorted(taken, key=lambda other: other.first):
        if other.first + other.blocks <= start or other.first >= end:
            continue
        if other.first > start:
            yield _part(span, node, start, other.first)
        start = max(start, other.first + other.blocks)
    if start < end:
        yield _part(span, node, start, end)


def _part(span: Span, node: str, first: int, end: int) -> Span:
    offset = span.offset + first - span.first
    return replace(span, first=first, offset=offset, blocks=end - first, tier="peer", node=node)
