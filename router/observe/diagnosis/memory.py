"""Judges the KV memory of the replicas: is it too small, for whom, and what would more of it bring. Pure."""

from __future__ import annotations

import math

from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.messages import EngineStats
from samovar.router.observe.diagnosis.record import Finding, SettingChange, in_bytes, in_seconds
from samovar.router.observe.diagnosis.snapshot import Window, ratio

ACTIVE_SHARE = 0.85
PREEMPTED_SHARE = 0.1
EVENTS_MIN = 3
CACHED_SHARE = 0.5
FREE_SHARE = 0.05
POOL_FRACTION_MAX = 0.9
SWAP_BYTES = 256 << 20
CPU_BYTES = 2 << 30


def kv_memory(window: Window) -> Finding:
    """Judge whether more sequences would run if there were more pages."""
    pools = [one for one in window.now.replicas if one.pages_total]
    if not pools:
        return Finding("kv_memory", "unknown", "no replica tells of its pages")
    full = max(pools, key=lambda one: (one.waiting > 0, one.pages_active / one.pages_total))
    share = full.pages_active / full.pages_total
    preempted, turns = window.count("preemptions"), window.turns
    is_short = share >= ACTIVE_SHARE and full.waiting > 0
    is_preempting = preempted >= max(EVENTS_MIN, PREEMPTED_SHARE * turns)
    evidence = (
        f"{full.pages_active:,} of {full.pages_total:,} pages are in use ({share:.0%}) by {full.running:,} "
        f"running sequences, {full.waiting:,} wait; {preempted:,} preemptions in {turns:,} answers"
    )
    numbers = {"active_share": share, "running": full.running, "waiting": full.waiting}
    numbers |= {"preemptions": preempted, "turns": turns}
    if not (is_short or is_preempting):
        return Finding("kv_memory", "clear", evidence, numbers)
    own = next((one for one in window.now.of_each_model if full in one.replicas), window.now)
    return Finding("kv_memory", "holds", evidence, numbers, tuple(_more_memory(Window(own), full)))


def _more_memory(window: Window, full: EngineStats) -> list[SettingChange]:
    fraction, changes = window.setting("engine.pool_memory_fraction"), []
    tokens = full.pages_total * window.block_tokens
    if window.setting("engine.pool_bytes_max"):
        now = window.setting("engine.pool_bytes_max")
        changes.append(
            SettingChange("engine.pool_bytes_max", now, 2 * now, _twice(window, full, 2.0, tokens))
        )
    elif fraction is not None and fraction < POOL_FRACTION_MAX:
        to = min(POOL_FRACTION_MAX, 2 * fraction)
        brings = _twice(window, full, to / fraction, tokens)
        changes.append(SettingChange("engine.pool_memory_fraction", fraction, round(to, 2), brings))
    if window.setting("engine.kv_dtype") == "auto" and full.kv_dtype not in ("int8", "float32"):
        brings = _twice(window, full, 1.9, tokens) + "; answers differ slightly"
        changes.append(SettingChange("engine.kv_dtype", "auto", "int8", brings))
    key, replicas = window.replicas_setting
    if replicas:
        changes.append(SettingChange(key, replicas, replicas + 1, _one_more(window, full)))
    return changes


def _one_more(window: Window, full: EngineStats) -> str:
    """Return what another replica brings to those that wait for a full one."""
    taken = min(full.waiting, full.running)
    if window.prefill is None or not taken:
        return "another pool of the same size"
    context = full.pages_active * window.block_tokens / full.running
    more = decode_tokens_per_s(window.prefill, taken, context)
    return f"{taken:,} of those that wait run there at once, {more:,.0f} tokens/s more"


def _twice(window: Window, full: EngineStats, factor: float, tokens: int) -> str:
    """Return what `factor` times the pages bring: tokens, sequences, and the price of their steps."""
    text = f"the pool holds {factor * tokens:,.0f} tokens instead of {tokens:,}"
    if window.prefill is None or not full.running:
        return text
    context = full.pages_active * window.block_tokens / full.running
    more = min(round(factor * full.running), full.running + full.waiting)
    if more <= full.running:
        return text
    now, then = (decode_tokens_per_s(window.prefill, n, context) for n in (full.running, more))
    return f"{text}: {more:,} sequences run at a time, {then:,.0f} tokens/s instead of {now:,.0f}"


def decode_tokens_per_s(prefill: PrefillPrice, sequences: int, context_tokens: float) -> float:
    """Return the tokens per second of steps that decode `sequences`, by the measured price of a step."""
    return sequences / prefill.step_seconds(sequences, sequences * (2 * context_tokens + 1))


def no_offload(window: Window) -> Finding:
    """Judge whether sequences that lose their pages, or do not fit, lose what was computed."""
    preempted, swapped, refused = (window.count(name) for name in ("preemptions", "swaps", "refused"))
    how, room = window.setting("engine.preemption"), window.setting("tiers.swap_bytes_max")
    is_off = how == "drop" or room == 0 or window.setting("tiers.enabled") is False
    dropped = max(0, preempted - swapped)
    is_dropping = is_off and dropped >= max(EVENTS_MIN, preempted / 2)
    small = [
        one
        for one in window.now.serving
        if (one.pages - 1) * one.block_tokens < one.context_tokens_max and refused > 0
    ]
    evidence = (
        f"{preempted:,} preemptions, of which {swapped:,} kept their blocks; {refused:,} refused requests"
    )
    if small:
        evidence += (
            f"; the pool holds {(small[0].pages - 1) * small[0].block_tokens:,} tokens, the model's context "
            f"is {small[0].context_tokens_max:,}"
        )
    numbers: dict[str, float] = {"preemptions": preempted, "swaps": swapped, "refused": refused}
    if not (is_dropping or small):
        return Finding("no_offload", "clear", evidence, numbers)
    changes = []
    if is_dropping:
        context, price = window.mean_prompt_tokens, window.prefill
        each = "the prompt" if price is None else in_seconds(price.seconds(round(context), 0))
        brings = f"saves computing {context:,.0f} tokens again ({each}) for each of {dropped:,} preemptions"
        if window.setting("tiers.enabled") is False:
            changes.append(SettingChange("tiers.enabled", False, True, brings))
        if how == "drop":
            changes.append(SettingChange("engine.preemption", how, "price", brings))
        if room == 0:
            changes.append(SettingChange("tiers.swap_bytes_max", room, SWAP_BYTES, brings))
    if small:
        wanted = small[0].context_tokens_max * small[0].bytes_per_token
        fraction, most = (window.setting(f"engine.pool_{name}") for name in ("memory_fraction", "bytes_max"))
        brings = f"a context of {small[0].context_tokens_max:,} tokens takes {in_bytes(wanted)}"
        if most and most < wanted:
            spare = small[0].block_tokens * small[0].bytes_per_token  # the page that no sequence gets
            changes.append(SettingChange("engine.pool_bytes_max", most, wanted + spare, brings))
        elif fraction:
            to = math.ceil(100 * fraction * wanted / max(small[0].pool_bytes, 1)) / 100
            changes.append(SettingChange("engine.pool_memory_fraction", fraction, to, brings))
    return Finding("no_offload", "holds", evidence, numbers, tuple(changes))


def idle_sessions(window: Window) -> Finding:
    """Judge whether idle conversations fill the pool because nothing else can take them."""
    total, cached, free = (
        sum(getattr(one, f"pages_{name}") for one in window.now.replicas)
        for name in ("total", "cached", "free")
    )
    evicted = window.count("evictions")
    idle = window.now.front.sessions.get("idle", 0.0)
    up = [tier for _, tier in window.tiers() if tier.state == "up" and tier.bytes_max]
    evidence = (
        f"{cached:,} of {total:,} pages ({ratio(cached, total):.0%}) are kept for {idle:,.0f} idle "
        f"conversations, {free:,} are free; {evicted:,} evictions; "
        + (f"tiers up: {', '.join(dict.fromkeys(str(one.name) for one in up))}" if up else "no tier is up")
    )
    numbers = {"cached_share": ratio(cached, total), "free_share": ratio(free, total), "evictions": evicted}
    numbers |= {"idle_sessions": idle, "tiers_up": len(up)}
    is_full = total and cached >= CACHED_SHARE * total and free <= FREE_SHARE * total and evicted > 0
    is_out = window.now.silent_nodes or any(tier.state != "up" for _, tier in window.tiers())
    if not is_full or up or is_out:  # a tier that is left out is said by `breaker_open`
        return Finding("idle_sessions", "clear", evidence, numbers)
    tokens = window.mean_prompt_tokens
    price, each = window.prefill, window.bytes_per_token
    brings = f"a conversation of {tokens:,.0f} tokens"
    if each is not None:
        brings += f" ({in_bytes(tokens * each)})"
    if price is not None:
        brings += f" comes back without {in_seconds(price.seconds(round(tokens), 0))} of computing"
    if each:
        brings += f"; {in_bytes(CPU_BYTES)} of RAM hold {CPU_BYTES / each:,.0f} tokens"
    changes = []
    if window.setting("tiers.enabled") is False:
        changes.append(SettingChange("tiers.enabled", False, True, brings))
    elif window.setting("tiers.cpu.bytes_max") == 0:
        changes.append(
            SettingChange("tiers.cpu.bytes_max", window.setting("tiers.cpu.bytes_max"), CPU_BYTES, brings)
        )
    else:
        deed = "See in `samovar status --all`, or in the tier actor's log, why no tier is up"
        changes.append(SettingChange("", None, None, brings, deed=deed))
    return Finding("idle_sessions", "holds", evidence, numbers, tuple(changes))
