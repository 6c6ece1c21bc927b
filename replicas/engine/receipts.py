"""Receipts: where the KV of a computed prompt came from, and why the rest was computed again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from samovar.cache_tiers.messages import LookupResult
from samovar.cache_tiers.pricing import PrefillPrice, in_digits
from samovar.replicas.messages import Receipt, sources
from samovar.replicas.scheduling import OWN, Fate, Restore, Sequence

NO_RECORD: Final = "no record"
DEARER: Final = "dearer to load"
WORDS: Mapping[str, str] = {
    NO_RECORD: "the tiers have no record of it",
    "meet": "computed while the rest was loaded",
    "gap": "blocks before it are missing",
    "silent peer": "another node does not answer",
    "evicted": "evicted from all tiers",
    "expired": "unused for too long, expired",
    "lost": "lost by its tier",
    "not written": "its tier could not write it",
    "down": "its tier is down",
    "tiers not used": "the tiers are off, or not used for this request",
    DEARER: "dearer to load than to compute",
    "not stored: price": "not stored: dearer to load than to compute",
}
"""What people are told, where that is more than the reason's name."""


def receipt_of(sequence: Sequence, prefill: PrefillPrice, block_tokens: int, left_tokens: int = 0) -> Receipt:
    """Return the receipt of a sequence whose prompt is computed.

    Counts its tokens by source, also by one that only the tier actor, which is older, knows of;
    `cached_tokens` are all but `compute`. `left_tokens`: see `missed_of`.
    """
    prompt, restore = sequence.prompt_tokens, sequence.restore
    resident = min(sequence.resident_tokens, prompt)
    tokens = dict.fromkeys(sources(), 0) | {"gpu": resident}
    if sequence.first_resident is not None and sequence.first_resident < resident:
        # Preempted before its first token. What it finds in the pool now, and did not find then, it has
        # loaded or computed itself in between.
        tokens["gpu"], own = sequence.first_resident, resident - sequence.first_resident
        for source, count in sequence.earlier_loads.items():
            if source != OWN:
                loaded_before = min(count, own)
                tokens[source] = tokens.get(source, 0) + loaded_before
                own -= loaded_before
    miss = "" if sequence.visit is None else sequence.visit.miss
    if restore is None:
        tokens["compute"] = prompt - sum(tokens.values())
        missed, why = missed_of(sequence, block_tokens, tokens["compute"], left_tokens)
        return Receipt(tokens=tokens, miss=miss or why, missed=missed)
    placed = restore.tokens_by_source(prompt)
    for source, count in placed.items():
        if source != OWN:
            tokens[source] = tokens.get(source, 0) + count
    tokens["compute"] = prompt - sum(tokens.values())
    loaded = sum(placed.values()) - placed.get(OWN, 0)
    missed, why = missed_of(sequence, block_tokens, tokens["compute"], left_tokens)
    return Receipt(
        tokens=tokens,
        decision=restore.decision,
        load_s=max(0.0, restore.placed_s - restore.started_s) if loaded else 0.0,
        load_bytes=sum(p.nbytes for p in restore.pieces if p.state == "placed" and p.source != OWN),
        load_price_s=restore.load_price_s,
        recompute_price_s=restore.recompute_price_s,
        saved_s=prefill.added_seconds(loaded, resident),
        miss=restore.miss or miss or why,
        missed=missed,
    )


def missed_of(
    sequence: Sequence, block_tokens: int, computed_tokens: int, left_tokens: int
) -> tuple[dict[str, int], str]:
    """Return tokens computed again by reason, and what most of them say; "" if there are none.

    Counts what is in full blocks, the unit of reuse. `computed_tokens`: of the prompt, which is computed.
    `left_tokens`: what the session's last turn left, as its ingress remembers: it counts where this
    replica remembers none of the prompt, as that turn was elsewhere.
    """
    missed: Counter[str] = Counter()
    words: dict[str, str] = {}
    for block, tokens, fate in _computed_again(sequence, block_tokens, left_tokens):
        again = min(tokens, computed_tokens - sum(missed.values()))
        if again > 0:
            reason, said = _why(sequence, block, fate, block_tokens)
            missed[reason] += again
            words.setdefault(reason, said)
    if not missed:
        return {}, ""
    most = max(missed, key=lambda reason: missed[reason])
    return dict(missed), words[most]


def _computed_again(
    sequence: Sequence, block_tokens: int, left_tokens: int
) -> Iterator[tuple[int, int, Fate | None]]:
    """Yield the known blocks of a prompt that were not in the pool, with the tokens that no tier brought."""
    resident = sequence.resident_tokens
    if sequence.first_resident is not None:  # what it found later it has computed or loaded itself
        resident = min(resident, sequence.first_resident)
    loaded: Counter[int] = Counter()
    for piece in sequence.restore.pieces if sequence.restore is not None else ():
        if piece.state == "placed" and piece.source != OWN:
            for start in range(piece.start, piece.placed_end, block_tokens):
                loaded[start // block_tokens] += min(block_tokens, piece.placed_end - start)
    known = [] if sequence.visit is None else sequence.visit.known
    # The last block of an answer is often tokenized otherwise in the next prompt.
    left = min(left_tokens // block_tokens - 1, sequence.reusable // block_tokens)
    is_remembered = any(known)
    for block in range(resident // block_tokens, len(known) if is_remembered else left):
        fate = known[block] if is_remembered else None
        if fate is not None or not is_remembered:
            yield block, block_tokens - loaded[block], fate


def _why(sequence: Sequence, block: int, fate: Fate | None, block_tokens: int) -> tuple[str, str]:
    """Return why a known block was not loaded: the reason's name, and what people are told."""
    visit, restore = sequence.visit, sequence.restore
    if sequence.is_cleared or (fate is not None and fate.outcome == "cleared"):
        return _named("cleared")
    if visit is None:
        return _named("tiers not used")
    found = visit.found
    if found is None:
        return _named(visit.miss or "slow lookup")
    if _has(found, block):
        if restore is None or restore.decision == "none":
            return _named(visit.miss or "gap")
        if block * block_tokens < visit.planned_from:
            return _named(visit.miss or "slow lookup")
        planned = max((piece.end for piece in restore.pieces), default=visit.planned_from)
        if _is_behind_gap(found, -(-planned // block_tokens), block):
            return _named("gap")
        return _not_loaded(restore, visit.miss)
    absent = next((run for run in found.absent if run.first <= block < run.first + run.blocks), None)
    if absent is not None:
        return _named(absent.reason)
    if fate is not None and fate.outcome in ("storing", "refused:busy"):
        return _named("being stored")
    if fate is not None and not fate.is_stored:
        reason = f"not stored: {fate.outcome.partition(':')[2]}"
        return reason, f"not stored: {fate.detail}" if fate.detail else _named(reason)[1]
    if found.has_silent_peer:
        return _named("silent peer")
    return _named(visit.miss or ("slow lookup" if found.unlisted else NO_RECORD))


def _not_loaded(restore: Restore, lookup_miss: str) -> tuple[str, str]:
    """Return why a plan did not bring what the tiers had."""
    if restore.decision == "recompute":
        computing, loading = in_digits(1e3 * restore.recompute_price_s), in_digits(1e3 * restore.load_price_s)
        return DEARER, f"dearer to load: computing {computing} ms, loading {loading}"
    return _named(restore.miss or lookup_miss or ("meet" if restore.decision == "meet" else DEARER))


def _has(found: LookupResult, block: int) -> bool:
    return any(span.first <= block < span.first + span.blocks for span in found.spans)


def _is_behind_gap(found: LookupResult, first: int, block: int) -> bool:
    """Return whether a block between `first` and `block` is in no span; spans are in order."""
    end = first
    for span in found.spans:
        if span.first > end:
            break
        end = max(end, span.first + span.blocks)
    return block >= end


def _named(reason: str) -> tuple[str, str]:
    return reason, WORDS.get(reason, reason)
