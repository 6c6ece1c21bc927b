"""Judges why contexts that were there before are computed again. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from samovar.cache_tiers.messages import TierStats
from samovar.cache_tiers.pricing import break_even_tokens
from samovar.router.observe.diagnosis.conditions import BY_NAME
from samovar.router.observe.diagnosis.record import Finding, SettingChange, in_bytes, in_seconds
from samovar.router.observe.diagnosis.snapshot import Window, most, ratio

EVENTS_MIN = 3
TURN_SHARE = 0.1
STORE_SHARE = 0.2
LOST_SHARE = 0.2
LOST_TOKENS_MIN = 64
FULL_SHARE = 0.9
LATE_BLOCKS_MIN, LATE_SHARE = 64, 0.05
DEAR_SHARE = 0.5
MEDIUM_SHARE = 0.9
"""Of what a disk has left, at most so much is proposed for its tier."""
LATE = ("timeout", "late")
NOTHING_STORED = "nothing stored"
PARTS = ("system", "tools", "messages")


def prompt_changes(window: Window) -> Finding:
    """Judge whether clients change what they have sent before, and name the part."""
    left, turns = window.front("prefixes_left"), window.prompts
    count, part = sum(left.values()), most(left, PARTS)
    numbers = {"prompts": count, "turns": turns} | {f"in_{name}": left.get(name, 0.0) for name in PARTS}
    if count < max(EVENTS_MIN, TURN_SHARE * turns) or not part:
        evidence = f"{count:,.0f} of {turns:,} prompts left the prefix of the one before"
        return Finding("prompt_changes", "clear", evidence, numbers)
    token = ratio(window.front("prefix_shared").get(part, 0.0), left[part])
    lost = ratio(window.front("prefix_lost").get(part, 0.0), left[part])
    numbers |= {"token": token, "lost_tokens": lost}
    whose = _part_of(left[part], count)
    evidence = (
        f"{count:,.0f} of {turns:,} prompts left the prefix of the one before, {whose} in "
        f"{part}, at token {token:,.0f} on average; {lost:,.0f} tokens behind it were computed again"
    )
    saved_s = 0.0
    if window.prefill is not None:
        saved_s = window.prefill.added_seconds(round(lost), round(token))
        numbers["seconds_a_turn"] = saved_s
    brings = f"saves {lost:,.0f} tokens a turn" + (f", {in_seconds(saved_s)} of computing" if saved_s else "")
    cause = BY_NAME["prompt_changes"].causes[part]
    changes = [SettingChange("", None, None, brings, deed=cause)]
    if part == "tools" and window.setting("router.prefix.tools") == "as_sent":
        changes.insert(0, SettingChange("router.prefix.tools", "as_sent", "ordered", brings))
    return Finding("prompt_changes", "holds", evidence, numbers, tuple(changes), cause=part)


def _part_of(part: float, whole: float) -> str:
    return "all" if part == whole else f"{part:,.0f} of them"


def other_namespace(window: Window) -> Finding:
    """Judge whether conversations change their cache salt, and with it the namespace of their blocks."""
    count, turns = window.front_count("salts_changed"), window.prompts
    evidence = f"{count:,.0f} of {turns:,} prompts continued a conversation under another cache_salt"
    numbers = {"prompts": count, "turns": turns}
    if count < max(EVENTS_MIN, TURN_SHARE * turns):
        return Finding("other_namespace", "clear", evidence, numbers)
    deed = "Send the same cache_salt in all turns of a conversation"
    change = SettingChange("", None, None, _whole_prompt(window), deed=deed)
    return Finding("other_namespace", "holds", evidence, numbers, (change,))


def never_stored(window: Window) -> Finding:
    """Judge whether turns fail to reach the tiers, and name the reason."""
    stores = window.words("stores")
    # Where a tier is left out, that is what is wrong, and said by `breaker_open`.
    is_out = any(tier.state.startswith("open") for _, tier in window.tiers()) or window.now.silent_nodes
    excused = WITHOUT_TIER if is_out else ()
    lost = {word: n for word, n in stores.items() if _is_lost(word) and word not in excused}
    bad, all_of = sum(lost.values()), sum(n for word, n in stores.items() if word != "skipped:price")
    evidence = f"{bad:,} of {all_of:,} extents were not stored"
    numbers = {"not_stored": bad, "extents": all_of}
    if bad < max(EVENTS_MIN, STORE_SHARE * all_of):
        return Finding("never_stored", "clear", evidence, numbers)
    reason = most(lost)
    listed = ", ".join(f"{word} {n:,}" for word, n in sorted(lost.items(), key=lambda item: -item[1]))
    change = _for_reason(window, reason, _whole_prompt(window))
    return Finding("never_stored", "holds", f"{evidence} ({listed})", numbers, (change,), cause=reason)


def _is_lost(word: str) -> bool:
    """Whether a store's outcome means that a later turn will not find the blocks."""
    kind, _, reason = word.partition(":")
    return kind in ("dropped", "refused", "skipped") and reason not in ("price", "tombstone", "busy")


WITHOUT_TIER = ("skipped:no tier", "skipped:not looked up", "refused:down", "refused:no answer")
RAISED = {
    "dropped:staged": "tiers.staged_bytes_max",
    "dropped:evicted": "tiers.staged_bytes_max",
    "refused:queue": "tiers.store_queue_max",
    "refused:full": "tiers.nvme.bytes_max",
    "refused:quota": "tiers.tenant_share",
    "skipped:not looked up": "tiers.lookup_s_max",
}


def _for_reason(window: Window, reason: str, brings: str) -> SettingChange:
    cause = BY_NAME["never_stored"].causes.get(reason, f"See the log for {reason}")
    key = RAISED.get(reason, "")
    now = window.setting(key) if key else None
    if not now:
        return SettingChange("", None, None, brings, deed=cause)
    return SettingChange(key, now, min(1.0, 2 * now) if key.endswith("share") else 2 * now, brings)


def _whole_prompt(window: Window) -> str:
    """Return what it costs that a whole prompt is computed again."""
    tokens, price = window.mean_prompt_tokens, window.prefill
    if price is None or not tokens:
        return ""
    saved_s = price.seconds(round(tokens), 0)
    return f"saves {in_seconds(saved_s)} of computing at each return of {tokens:,.0f} tokens"


def evicted(window: Window) -> Finding:
    """Judge whether the tiers are too small for the conversations that return."""
    returning = window.front("returning")
    lost, reused = returning.get("recomputed", 0.0), returning.get("reused", 0.0)
    share = ratio(lost, lost + reused)
    evidence = (
        f"{share:.0%} of the {lost + reused:,.0f} tokens of returning conversations were computed again"
    )
    numbers = {"recomputed_tokens": lost, "reused_tokens": reused, "evicted_extents": 0}
    full = None
    for node in window.now.nodes:
        mine = [tier for of, tier in window.tiers() if of is node and tier.bytes_max and tier.state == "up"]
        if not mine:
            continue
        lowest = mine[-1]
        gone = window.of_tier(node, lowest, "evicted_extents")
        numbers["evicted_extents"] += gone
        if gone >= EVENTS_MIN and lowest.bytes_held >= FULL_SHARE * lowest.bytes_max:
            full = lowest
    if full is None or share < LOST_SHARE or lost < LOST_TOKENS_MIN:
        return Finding("evicted", "clear", evidence, numbers)
    evidence += (
        f"; the {full.name} tier, the lowest, holds {in_bytes(full.bytes_held)} of "
        f"{in_bytes(full.bytes_max)} and "
        f"has evicted {numbers['evicted_extents']:,.0f} extents"
    )
    more_tokens = ratio(full.bytes_max * full.tokens, full.bytes_held)
    brings = f"{in_bytes(full.bytes_max)} more would hold {more_tokens:,.0f} tokens"
    if window.prefill is not None:
        # No more than all that was lost; how much of it twice the room keeps, only a replay tells.
        turns = max(1, window.prompts)
        saved_s = turns * window.prefill.added_seconds(round(lost / turns), round(reused / turns))
        brings += f"; at most {in_seconds(saved_s)} of computing would have been saved"
    key, to = f"tiers.{full.name}.bytes_max", 2 * full.bytes_max
    if full.medium_free_bytes is not None:
        to = min(to, full.bytes_held + round(MEDIUM_SHARE * full.medium_free_bytes))
    if to > (2 - MEDIUM_SHARE) * full.bytes_max:
        change = SettingChange(key, full.bytes_max, to, brings)
    else:
        deed = f"Add a lower tier, or a larger medium: that of the {full.name} tier has only "
        deed += f"{in_bytes(full.medium_free_bytes or 0)} free"
        change = SettingChange("", None, None, brings, deed=deed)
    return Finding("evicted", "holds", evidence, numbers, (change,), cause=str(full.name))


def timeouts(window: Window) -> Finding:
    """Judge whether lookups and loads come too late."""
    slow, turns = window.words("slow_lookups"), window.turns
    misses = window.words("misses")
    late = sum(misses[word] for word in LATE)
    hits = sum(window.of_tier(node, tier, "hits_blocks") for node, tier in window.tiers())
    lookups = sum(slow.values())
    evidence = (
        f"{lookups:,} of {turns:,} prompts were computed before their lookup was answered"
        + (f" ({_listed(slow)})" if slow else "")
        + f"; {late:,} blocks were not loaded in time, {hits:,} were found"
    )
    numbers: dict[str, float] = {
        "slow_lookups": lookups,
        "turns": turns,
        "late_blocks": late,
        "found_blocks": hits,
    }
    changes = []
    if lookups >= max(EVENTS_MIN, TURN_SHARE * turns):
        share = window.setting("tiers.lookup_share")
        if share:
            changes.append(SettingChange("tiers.lookup_share", share, 2 * share, _whole_prompt(window)))
    if late >= max(LATE_BLOCKS_MIN, LATE_SHARE * hits):
        limit = window.setting("tiers.load_s_max")
        if limit:
            changes.append(SettingChange("tiers.load_s_max", limit, 2 * limit, _whole_prompt(window)))
    holds = lookups >= max(EVENTS_MIN, TURN_SHARE * turns) or late >= max(LATE_BLOCKS_MIN, LATE_SHARE * hits)
    cause = most(slow) if lookups else ""
    return Finding(
        "timeouts", "holds" if holds else "clear", evidence, numbers, tuple(changes), cause if holds else ""
    )


def _listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{word} {n:,.0f}" for word, n in counts.items() if n)


def storage_slow(window: Window) -> Finding:
    """Judge whether loading from the tiers costs more than computing, by the measured prices."""
    decisions, stores = window.words("decisions"), window.words("stores")
    declined, decided = decisions["recompute"], sum(decisions.values())
    unworthy, offered = stores["skipped:price"], sum(stores.values())
    missed = window.words("missed_tokens")["not stored: price"]
    evidence = (
        f"{declined:,} of {decided:,} decisions were to compute what a tier had; {unworthy:,} of {offered:,} "
        "extents were not worth storing"
    )
    numbers: dict[str, float] = {"declined": declined, "decisions": decided}
    numbers |= {"not_worth": unworthy, "extents": offered, "missed_tokens": missed}
    is_declining = declined >= max(EVENTS_MIN, DEAR_SHARE * decided)
    if not (is_declining or unworthy >= max(EVENTS_MIN, DEAR_SHARE * offered)):
        return Finding("storage_slow", "clear", evidence, numbers)
    cause = "" if stores["taken"] or stores["held"] else NOTHING_STORED
    if cause:
        evidence += ": the tiers have taken nothing"
    if missed:
        evidence += f"; {missed:,} known tokens were computed again for that"
    price, each = window.prefill, window.bytes_per_token
    changes: list[SettingChange] = []
    if price is not None and each is not None:
        context = max((one.context_tokens_max for one in window.now.serving), default=0)
        slow: dict[str, None] = {}
        useless: list[TierStats] = []
        for _, tier in window.tiers():
            if tier.price is None:
                continue
            first = break_even_tokens(tier.price, price, each)
            never = first is None or bool(context and first > context)
            wins = "never" if never else f"from {first:,} tokens on"
            slow[f"{tier.name} at {tier.price.bytes_per_s / 1e9:.3g} GB/s wins {wins}"] = None
            if never and tier.bytes_max:
                useless.append(tier)
        evidence += f". Loading a token ({in_bytes(each)}) from {'; '.join(slow)}" if slow else ""
        needed = ratio(each, price.a_s + price.c0_s / price.step_tokens)
        evidence += f"; {in_bytes(needed)}/s are as quick as computing a short context" if needed else ""
        numbers["bytes_per_s_needed"] = needed
        if window.setting("engine.kv_dtype") == "auto":
            brings = f"halves a token's bytes: {in_bytes(needed / 2)}/s are enough; answers differ slightly"
            changes.append(SettingChange("engine.kv_dtype", "auto", "int8", brings))
        for tier in useless:
            brings = f"frees {in_bytes(tier.bytes_held)} that are not worth loading"
            changes.append(SettingChange(f"tiers.{tier.name}.bytes_max", tier.bytes_max, 0, brings))
    return Finding("storage_slow", "holds", evidence, numbers, tuple(dict.fromkeys(changes)), cause=cause)
