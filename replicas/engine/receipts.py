"""Receipts: where the KV of a computed prompt came from."""

from __future__ import annotations

from cache_tiers.pricing import PrefillPrice
from replicas.engine.missed import missed_of
from replicas.messages import Receipt, sources
from replicas.scheduling import OWN, Sequence


def receipt_of(sequence: Sequence, prefill: PrefillPrice, block_tokens: int, left_tokens: int = 0) -> Receipt:
    """Return the receipt of a sequence whose prompt is computed. Pure.

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
