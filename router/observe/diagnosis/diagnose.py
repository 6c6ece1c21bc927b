"""Says what is wrong with a service, from what it counts: a judge for each condition, then all of them.
Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from samovar.cache_tiers.blocks import CPU, NVME, S3, TIERS
from samovar.cache_tiers.pricing import break_even_tokens, pairs_of
from samovar.configs.fields import SettingField, setting_fields
from samovar.router.observe.diagnosis.conditions import BY_NAME, CONDITIONS
from samovar.router.observe.diagnosis.memory import idle_sessions, kv_memory, no_offload
from samovar.router.observe.diagnosis.record import (
    Diagnosis,
    Finding,
    SettingChange,
    in_bytes,
    in_seconds,
    shown,
)
from samovar.router.observe.diagnosis.snapshot import Snapshot, Window, most, ratio

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
    closed = (tier.is_off or tier.state.startswith("open") for _, tier in window.tiers())
    is_out = any(closed) or window.now.silent_nodes
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
    changes: list[SettingChange] = []
    tiers = [(tier, tier.price) for _, tier in window.tiers() if tier.price is not None and not tier.is_off]
    useless = [tier for tier, _ in tiers if tier.bytes_max]
    models = window.now.of_each_model
    for one in map(Window, models):
        price, each = one.prefill, one.bytes_per_token
        if price is None or each is None:
            useless.clear()  # loads may win for it
            continue
        context = max(info.context_tokens_max for info in one.now.serving)
        slow: dict[str, None] = {}
        for tier, tier_price in tiers:
            first = break_even_tokens(tier_price, price, each)
            never = first is None or bool(context and first > context)
            wins = "never" if never else f"from {first:,} tokens on"
            slow[f"{tier.name} at {tier_price.bytes_per_s / 1e9:.3g} GB/s wins {wins}"] = None
            if not never and tier in useless:
                useless.remove(tier)
        of_model = f" of {one.now.serving[0].model_name}" if len(models) > 1 else ""
        evidence += f". Loading a token{of_model} ({in_bytes(each)}) from {'; '.join(slow)}" if slow else ""
        needed = ratio(each, price.a_s + price.c0_s / price.step_tokens)
        evidence += f"; {in_bytes(needed)}/s are as quick as computing a short context" if needed else ""
        numbers["bytes_per_s_needed"] = max(needed, numbers.get("bytes_per_s_needed", 0.0))
    if "bytes_per_s_needed" in numbers:
        needed = numbers["bytes_per_s_needed"]
        if window.setting("engine.kv_dtype") == "auto":
            brings = f"halves a token's bytes: {in_bytes(needed / 2)}/s are enough; answers differ slightly"
            changes.append(SettingChange("engine.kv_dtype", "auto", "int8", brings))
        for tier in useless:
            brings = f"frees {in_bytes(tier.bytes_held)} that are not worth loading"
            changes.append(SettingChange(f"tiers.{tier.name}.bytes_max", tier.bytes_max, 0, brings))
    return Finding("storage_slow", "holds", evidence, numbers, tuple(dict.fromkeys(changes)), cause=cause)


PREFILL_SHARE = 0.7
QUEUE_S = 0.5
SPILLED_SHARE = 0.2
COLD_TURNS = 200
LRU_LOOKUPS_MIN, LRU_LOSS = 200, 0.01
DISK_SPARE = 0.9
DISK_LEAST_BYTES, DISK_LEAST_SHARE = 1 << 30, 0.1


def prefill_bound(window: Window) -> Finding:
    """Judge whether the steps' time goes into prompts while requests wait for it."""
    price, turns = window.prefill, window.turns
    waiting = sum(one.waiting for one in window.now.replicas)
    if price is None or not turns:
        evidence = "no price of a prefill is known yet" if price is None else "no answers yet"
        return Finding("prefill_bound", "unknown" if price is None else "clear", evidence)
    computed, cached, answered = (
        window.count(name) for name in ("prefill_tokens", "cached_tokens", "generated_tokens")
    )
    # Of an average prompt: the price is not linear, but its prompts' tokens are all that is counted.
    prompts_s = turns * price.chunk_seconds(round(computed / turns), round(cached / turns))
    context = round((computed + cached + answered / 2) / turns)
    answers_s = price.a_s * answered + price.b_s * answered * pairs_of(1, context)
    steps_s = price.c0_s * window.count("steps")
    share = ratio(prompts_s, prompts_s + answers_s + steps_s)
    queue_s = ratio(window.front_count("queue_s"), window.front_count("queued"))
    evidence = (
        f"prompts take {share:.0%} of the steps' time ({computed:,} tokens computed, {cached:,} from the "
        "pool); "
        f"{waiting:,} requests wait, {in_seconds(queue_s)} on average"
    )
    numbers = {"prefill_share": share, "prefill_tokens": computed, "waiting": waiting, "queue_s": queue_s}
    if share < PREFILL_SHARE or not waiting or queue_s < QUEUE_S:
        return Finding("prefill_bound", "clear", evidence, numbers)
    key, asked = window.replicas_setting
    replicas = asked or len(window.now.replicas)
    each_s = prompts_s / turns
    ahead = waiting / max(1, len(window.now.replicas))
    now_s, then_s = ahead * each_s, ahead * each_s * replicas / (replicas + 1)
    brings = (
        f"computing a prompt takes {in_seconds(each_s)}: the last of those that wait begins in "
        f"{in_seconds(then_s)} "
        f"instead of {in_seconds(now_s)}"
    )
    change = SettingChange(key, replicas, replicas + 1, brings)
    return Finding("prefill_bound", "holds", evidence, numbers, (change,))


def router_spills(window: Window) -> Finding:
    """Judge whether conversations leave their home replica too often."""
    outcomes = window.front("affinity")
    spilled = outcomes.get("spilled", 0.0)
    returned = sum(outcomes.get(name, 0.0) for name in ("home", "spilled", "moved"))
    evidence = f"{spilled:,.0f} of {returned:,.0f} returning turns left their home replica for a quicker one"
    numbers = {"spilled": spilled, "returned": returned}
    if spilled < max(EVENTS_MIN, SPILLED_SHARE * returned):
        return Finding("router_spills", "clear", evidence, numbers)
    waiting = sorted(one.waiting for one in window.now.replicas)
    tokens, price = window.mean_prompt_tokens, window.prefill
    cost_s = 0.0 if price is None else price.seconds(round(tokens), 0)
    brings = f"keeps {tokens:,.0f} tokens a turn from being moved or computed again"
    brings += f", up to {in_seconds(cost_s)}" if cost_s else ""
    penalty, (key, replicas) = window.setting("router.affinity_penalty_s"), window.replicas_setting
    if waiting and waiting[0] > 0 and replicas:  # all are busy: staying at home would only make it wait
        change = SettingChange(key, replicas, replicas + 1, brings)
    else:
        to = round(max(2 * (penalty or 0.0), cost_s), 3)
        change = SettingChange("router.affinity_penalty_s", penalty, to, brings)
    return Finding("router_spills", "holds", evidence, numbers, (change,))


def predictor_off(window: Window) -> Finding:
    """Judge whether the resumption predictor works."""
    worst, numbers = "", {"failures": 0.0, "turns": 0.0}
    words = []
    for node in window.now.nodes:
        returns = node.returns
        failures = window.predictor_failures(node)
        numbers["failures"] += failures
        numbers["turns"] += returns.turns
        kind = returns.predictor.partition(":")[0]
        words.append(f"{returns.predictor}; {returns.turns:,} turns learned, {failures:,} failures")
        is_cold = kind == "cold" and returns.turns + returns.dropped >= COLD_TURNS
        if kind == "off" or is_cold or failures >= EVENTS_MIN:
            worst = kind
    if not words:
        return Finding("predictor_off", "clear", "no tiers, so no predictor")
    evidence = "; ".join(dict.fromkeys(words))
    if not worst:
        return Finding("predictor_off", "clear", evidence, numbers)
    brings = "until then pages and extents are evicted by recency"
    change = SettingChange("", None, None, brings, deed="See the tier actor's log, and tiers.predictor.file")
    return Finding("predictor_off", "holds", evidence, numbers, (change,), cause=worst)


def predictor_loses(window: Window) -> Finding:
    """Judge whether least recently used would find more than the policy does."""
    lookups, asked = window.of_lru("lookups"), window.of_lru("asked_tokens")
    gained, regretted = window.of_lru("gained_tokens"), window.of_lru("regretted_tokens")
    gain = ratio(gained - regretted, asked)
    numbers = {"gained_tokens": gained, "regretted_tokens": regretted, "lookups": lookups, "gain": gain}
    evidence = (
        f"of {asked:,} tokens asked for in {lookups:,} turns, {gained:,} were found that least recently used "
        f"would have evicted, and {regretted:,} had been evicted that it would still have: {gain:+.1%}"
    )
    name = window.setting("tiers.policy.name")
    if lookups < LRU_LOOKUPS_MIN or gain > -LRU_LOSS or name == "lru":
        return Finding("predictor_loses", "clear", evidence, numbers)
    brings = f"{-gain:.1%} more of the tokens asked for would have been found"
    change = SettingChange("tiers.policy.name", name, "lru", brings)
    return Finding("predictor_loses", "holds", evidence, numbers, (change,))


def breaker_open(window: Window) -> Finding:
    """Judge whether a tier, or a node's tier actor, is left out."""
    # "open" is also said of a tier whose files are still being listed: its breaker has never opened.
    opened = [
        (node, tier)
        for node, tier in window.tiers()
        if tier.is_off
        or (tier.state.startswith("open") and (tier.breaker_opened or tier.read_errors or tier.write_errors))
    ]
    count = sum(window.of_tier(node, tier, "breaker_opened") for node, tier in window.tiers())
    silent = window.now.silent_nodes
    numbers = {"open": len(opened), "times_opened": count, "silent_nodes": len(silent)}
    if not opened and not silent:
        return Finding("breaker_open", "clear", f"no breaker is open; opened {count:,} times", numbers)
    words = [
        f"the {tier.name} tier of node {node.node_id[:8]} is {tier.state}"
        + ("" if tier.is_off else f": opened {tier.breaker_opened:,} times, {tier.read_errors:,} reads and ")
        + ("" if tier.is_off else f"{tier.write_errors:,} writes failed")
        for node, tier in opened
    ]
    words += [f"the tier actor of node {node[:8]} does not answer" for node in silent]
    held = {}  # nodes tell of the same bucket
    for node, tier in opened:
        held["" if tier.name in TIERS.shared else node.node_id, tier.name] = tier.tokens
    tokens, price = sum(held.values()), window.prefill
    brings = f"{tokens:,} tokens that lie there can be loaded again" if tokens else ""
    if tokens and price is not None:
        mean = window.mean_prompt_tokens
        brings += f"; until then a return of {mean:,.0f} takes {in_seconds(price.seconds(round(mean), 0))}"
    deed = "See to " + ", ".join(_media(tier.name) for _, tier in opened) if opened else "See the actor's log"
    change = SettingChange("", None, None, brings, deed=deed)
    cause = str(opened[0][1].name) if opened else "actor"
    return Finding("breaker_open", "holds", "; ".join(words), numbers, (change,), cause=cause)


def _media(tier: str) -> str:
    return {
        CPU.name: "Ray's object store",
        NVME.name: "the disk of tiers.nvme.dir",
        S3.name: "the bucket and the way to it",
    }.get(tier, "the medium of tiers.more")


def disk_full(window: Window) -> Finding:
    """Judge whether the disk has the room that the nvme tier counts on."""
    worst: tuple[float, str, SettingChange] | None = None
    words, numbers = [], {}
    for node, tier in window.tiers():
        free = tier.medium_free_bytes
        if tier.name != NVME.name or tier.is_off or (free is None and tier.state != "read-only"):
            continue
        wanted = max(0, tier.bytes_max - tier.bytes_held)
        words.append(
            f"node {node.node_id[:8]}: {'unknown' if free is None else in_bytes(free)} free, the tier may "
            "take "
            f"{in_bytes(wanted)} more" + (", and is read-only" if tier.state == "read-only" else "")
        )
        if free is not None:
            numbers = {"free_bytes": float(free), "wanted_bytes": float(wanted)}
        least = max(DISK_LEAST_BYTES, DISK_LEAST_SHARE * tier.bytes_max)
        if tier.state == "read-only" or (free is not None and free < min(wanted, least)):
            to = round(tier.bytes_held + DISK_SPARE * (free or 0))
            if to < tier.bytes_max and free is not None:
                brings = f"stops before the disk is full; {in_bytes(to)} hold what is there now"
                change = SettingChange("tiers.nvme.bytes_max", tier.bytes_max, to, brings)
            else:  # it has room as of the last write
                deed = "See whether tiers.nvme.dir can be written, and what a quota leaves of its disk"
                change = SettingChange("", None, None, "until then nothing is stored there", deed=deed)
            if worst is None or (free or 0) < worst[0]:
                worst = (float(free or 0), words[-1], change)
    if worst is None:
        return Finding("disk_full", "clear", "; ".join(words) or "no disk tier", numbers)
    return Finding("disk_full", "holds", worst[1], numbers, (worst[2],))


JUDGES: dict[str, Callable[[Window], Finding]] = {
    judge.__name__: judge
    for judge in [
        *[kv_memory, no_offload, idle_sessions, prompt_changes, other_namespace, never_stored, evicted],
        *[timeouts, storage_slow, prefill_bound, router_spills, predictor_off, predictor_loses],
        *[breaker_open, disk_full],
    ]
}


def diagnose(now: Snapshot, before: Snapshot | None = None) -> Diagnosis:
    """Return one finding for each of `CONDITIONS`, in their order.

    `before`: an earlier snapshot of the same service: counters count since then, else since each process's
    start.
    """
    window = Window(now, before)
    findings = [JUDGES[condition.name](window) for condition in CONDITIONS]
    return Diagnosis(tuple(_agreed(findings)), window.turns, window.period_s)


def _agreed(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with changes that can be made: within bounds, and none against another.

    Where one finding wants less of a setting, and another more, less is right: a tier that is larger than its
    disk, or not worth loading from, does not get better by more of it.
    """
    less = {
        change.setting: finding.condition
        for finding in findings
        for change in finding.changes
        if _direction(change) < 0
    }
    return [
        replace(one, changes=tuple(dict.fromkeys(_possible(change, less) for change in one.changes)))
        for one in findings
    ]


def _direction(change: SettingChange) -> int:
    """Return whether a change raises (1) or lowers (-1) a number; 0: neither."""
    if not all(isinstance(value, int | float) for value in (change.now, change.to)):
        return 0
    return int(change.to > change.now) - int(change.to < change.now)


def _possible(change: SettingChange, less: Mapping[str, str]) -> SettingChange:
    if change.setting in less and _direction(change) > 0:
        deed = f"{change.setting} would have to be higher, but first see {less[change.setting]}"
        return SettingChange("", None, None, change.brings, deed=deed)
    field = _fields().get(change.setting)
    if field is None or isinstance(change.to, bool) or not isinstance(change.to, int | float):
        return change
    to = change.to if field.high is None else min(change.to, field.high)
    to = to if field.low is None else max(to, field.low)
    if to == change.now:
        deed = f"{change.setting} ({shown(to)}) is at its limit"
        return SettingChange("", None, None, change.brings, deed=deed)
    return replace(change, to=to)


@functools.cache
def _fields() -> dict[str, SettingField]:
    return setting_fields()
