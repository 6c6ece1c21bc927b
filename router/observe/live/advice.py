"""Advice for who sees the cluster: its diagnosis, and what it can hold, as JSON without null. Pure.

The judgements are those of `samovar diagnose` and `samovar plan --live`, over the same numbers.
"""

from __future__ import annotations

import math

from samovar.router.observe.diagnosis import (
    BY_NAME,
    Diagnosis,
    Finding,
    LiveContext,
    LiveSizing,
    SettingChange,
    Snapshot,
    diagnose,
    size_live,
)
from samovar.router.observe.live.merge_patch import Json

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""The lengths at which memory is sized: as far as the model's context goes, which is sized as well."""
DIGITS = 3
"""Significant ones: a price that is learned on changes a little with each turn."""
CUT = "…"


def advice_of(now: Snapshot, chars_max: int) -> Json:
    """Return the parts `diagnosis` and `memory` of a state; neither while no replica reports anything.

    `chars_max`: of one text.
    """
    if not now.replicas or not now.serving:
        return {}
    told: Json = {"diagnosis": _diagnosis(diagnose(now), chars_max)}
    longest = min(one.context_tokens_max for one in now.serving)
    sizing = size_live(now, [*(tokens for tokens in CONTEXTS if tokens < longest), longest])
    if sizing is not None:
        told["memory"] = _memory(sizing)
    return told


def _diagnosis(found: Diagnosis, chars_max: int) -> Json:
    conditions = {one.condition: _finding(one, chars_max) for one in found.findings}
    return {"turns": found.turns, "conditions": conditions}


def _finding(finding: Finding, chars_max: int) -> Json:
    condition = BY_NAME[finding.condition]
    told: Json = {
        "state": finding.state,
        "title": condition.title,
        "evidence": _cut(finding.evidence, chars_max),
    }
    if finding.state == "holds":
        told["symptom"] = condition.symptom
        told["changes"] = [_change(change, chars_max) for change in finding.changes]
        if finding.cause in condition.causes:
            told["cause"] = condition.causes[finding.cause]
    return told


def _change(change: SettingChange, chars_max: int) -> Json:
    told = {"brings": _cut(change.brings, chars_max)}
    if change.deed:
        return {"deed": _cut(change.deed, chars_max), **told}
    return {"setting": change.setting, "to": change.to_in_words, "now": change.now_in_words, **told}


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - len(CUT)] + CUT


def _memory(sizing: LiveSizing) -> Json:
    longest = sizing.context_tokens_max
    tiers = {}
    for tier in sizing.tiers:
        tiers[tier.name] = _known(latency_s=tier.latency_s, bytes_per_s=tier.bytes_per_s)
        if tier.wins_from is not None and tier.wins_from <= longest:
            tiers[tier.name]["wins_from"] = tier.wins_from
    contexts = [
        _context(one, {tier.name: tier.load_s[at] for tier in sizing.tiers})
        for at, one in enumerate(sizing.contexts)
    ]
    return {
        "bytes_per_token": sizing.bytes_per_token,
        "kv_dtype": sizing.kv_dtype,
        "pool_bytes": sizing.pool_bytes,
        "replicas": sizing.replicas,
        "context_tokens": longest,
        "contexts": contexts,
        "tiers": tiers,
    }


def _context(context: LiveContext, load_s: dict[str, float]) -> Json:
    told: Json = {"tokens": context.tokens, "kv_bytes": context.kv_bytes}
    if context.sequences is None:  # longer than the model's
        return told
    return {
        **told,
        "sequences": context.sequences,
        "running": context.running,
        **_known(
            compute_s=context.compute_s,
            alone_tokens_per_s=context.alone_tokens_per_s,
            batch_tokens_per_s=context.batch_tokens_per_s,
        ),
        "load_s": _known(**load_s),
    }


def _known(**numbers: float | None) -> Json:
    """Return the numbers that are known and that JSON can hold, to a few digits."""
    known = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
    return {name: float(f"{value:.{DIGITS}g}") for name, value in known.items()}
