"""Judges steps, routing, the predictor and the media of the tiers. Pure."""

from __future__ import annotations

from samovar.cache_tiers.blocks import NVME, S3
from samovar.cache_tiers.pricing import pairs_of
from samovar.router.observe.diagnosis.record import Finding, SettingChange, in_bytes, in_seconds
from samovar.router.observe.diagnosis.snapshot import Window, ratio

EVENTS_MIN = 3
PREFILL_SHARE = 0.7
QUEUE_S = 0.5
SPILLED_SHARE = 0.2
COLD_TURNS = 200
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


def breaker_open(window: Window) -> Finding:
    """Judge whether a tier, or a node's tier actor, is left out."""
    # "open" is also said of a tier whose files are still being listed: its breaker has never opened.
    opened = [
        (node, tier)
        for node, tier in window.tiers()
        if tier.state.startswith("open") and (tier.breaker_opened or tier.read_errors or tier.write_errors)
    ]
    count = sum(window.of_tier(node, tier, "breaker_opened") for node, tier in window.tiers())
    silent = window.now.silent_nodes
    numbers = {"open": len(opened), "times_opened": count, "silent_nodes": len(silent)}
    if not opened and not silent:
        return Finding("breaker_open", "clear", f"no breaker is open; opened {count:,} times", numbers)
    words = [
        f"the {tier.name} tier of node {node.node_id[:8]} is {tier.state}: opened {tier.breaker_opened:,} "
        f"times, {tier.read_errors:,} reads and {tier.write_errors:,} writes failed"
        for node, tier in opened
    ]
    words += [f"the tier actor of node {node[:8]} does not answer" for node in silent]
    tokens, price = sum(tier.tokens for _, tier in opened), window.prefill
    brings = f"{tokens:,} tokens that lie there can be loaded again" if tokens else ""
    if tokens and price is not None:
        mean = window.mean_prompt_tokens
        brings += f"; until then a return of {mean:,.0f} takes {in_seconds(price.seconds(round(mean), 0))}"
    deed = "See to " + ", ".join(_media(tier.name) for _, tier in opened) if opened else "See the actor's log"
    change = SettingChange("", None, None, brings, deed=deed)
    cause = str(opened[0][1].name) if opened else "actor"
    return Finding("breaker_open", "holds", "; ".join(words), numbers, (change,), cause=cause)


def _media(tier: str) -> str:
    return {NVME.name: "the disk of tiers.nvme.dir", S3.name: "the bucket and the way to it"}.get(
        tier, "Ray's object store"
    )


def disk_full(window: Window) -> Finding:
    """Judge whether the disk has the room that the nvme tier counts on."""
    worst: tuple[float, str, SettingChange] | None = None
    words, numbers = [], {}
    for node, tier in window.tiers():
        free = tier.medium_free_bytes
        if tier.name != NVME.name or (free is None and tier.state != "read-only"):
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
