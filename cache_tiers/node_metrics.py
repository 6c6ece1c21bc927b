"""Prometheus metrics of nodes: their tiers, predictors and prefetching, as last reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from samovar.cache_tiers.messages import NodeStats

PREDICTORS = ("learned", "km", "cold", "off")
OUTCOMES = ("used", "late", "wasted", "cancelled")
# (field of ResumptionStats, metric, help)
COUNTERS = (
    ("turns", "samovar_predictor_turns", "turns that were forecast and learned from"),
    ("dropped", "samovar_predictor_dropped", "turns not learned from: too many waited"),
    ("failures", "samovar_predictor_failures", "failures of the predictor, or of its file"),
)


def returns_metrics(nodes: Iterable[NodeStats]) -> Iterator[Metric]:
    """Yield the metrics of the resumption predictor and of prefetching, as last reported by the nodes.

    Counters start with the node's tier actor.
    """
    nodes = list(nodes)
    for field, name, text in COUNTERS:
        family = CounterMetricFamily(name, text, labels=["node"])
        for node in nodes:
            family.add_metric([node.node_id], getattr(node.returns, field))
        yield family
    kind = GaugeMetricFamily(
        "samovar_predictor", "1 = this kind of predictor is in use", labels=["kind", "node"]
    )
    loss = GaugeMetricFamily(
        "samovar_predictor_log_loss", "mean log loss over the latest turns", labels=["of", "node"]
    )
    for node in nodes:
        for name in PREDICTORS:
            kind.add_metric([name, node.node_id], float(node.returns.predictor.split(":")[0] == name))
        loss.add_metric(["model", node.node_id], node.returns.model_loss)
        loss.add_metric(["fallback", node.node_id], node.returns.fallback_loss)
    yield from (kind, loss)
    yield from _of_prefetch(nodes)
    yield from _beside_lru(nodes)


# (field of LruStats, metric, help)
LRU_COUNTERS = (
    ("lookups", "samovar_lru_lookups", "turns whose lookup was compared with least recently used"),
    ("asked_tokens", "samovar_lru_asked_tokens", "tokens of full blocks that they asked for"),
    (
        "gained_tokens",
        "samovar_lru_gained_tokens",
        "found, where least recently used would have evicted them",
    ),
    ("regretted_tokens", "samovar_lru_regretted_tokens", "evicted, where it would still have had them"),
)


def _beside_lru(nodes: list[NodeStats]) -> Iterator[Metric]:
    """Yield what least recently used would have had, and whether forecasts came true."""
    for field, name, text in LRU_COUNTERS:
        family = CounterMetricFamily(name, text, labels=["node"])
        for node in nodes:
            family.add_metric([node.node_id], getattr(node.returns.lru, field))
        yield family
    found = CounterMetricFamily(
        "samovar_lru_tier_tokens",
        "tokens found by the cheapest tier that had them: by these tiers, and as least recently used would",
        labels=["tier", "of", "node"],
    )
    error = GaugeMetricFamily(
        "samovar_predictor_calibration_error",
        "mean distance between the forecast P(resumes within 600 s) and what happened",
        labels=["node"],
    )
    for node in nodes:
        for of, tokens in (("policy", node.returns.lru.found_tokens), ("lru", node.returns.lru.lru_tokens)):
            for tier, count in tokens.items():
                found.add_metric([tier, of, node.node_id], count)
        if (known := node.returns.calibration_error) is not None:
            error.add_metric([node.node_id], known)
    hints = CounterMetricFamily(
        "samovar_hints",
        "clients' hints: received, and later judged true or false",
        labels=["kind", "outcome", "node"],
    )
    for node in nodes:
        for told, count in node.returns.hints.items():
            kind, _, outcome = told.partition(":")
            hints.add_metric([kind, outcome, node.node_id], count)
    yield from (found, error, hints)


def _of_prefetch(nodes: list[NodeStats]) -> Iterator[Metric]:
    started = CounterMetricFamily(
        "samovar_prefetch_started_bytes",
        "bytes promoted before they were requested",
        labels=["why", "node"],
    )
    outcomes = CounterMetricFamily(
        "samovar_prefetch_bytes", "prefetched bytes, by outcome", labels=["outcome", "node"]
    )
    moving = GaugeMetricFamily(
        "samovar_prefetch_inflight_bytes", "bytes being prefetched now", labels=["node"]
    )
    is_on = GaugeMetricFamily(
        "samovar_prefetch_on", "1 = prefetching for this reason is active", labels=["why", "node"]
    )
    regret = GaugeMetricFamily(
        "samovar_prefetch_regret",
        "share of requested bytes by which another strategy would have promoted more in time, on held-out "
        "sessions",
        labels=["against", "node"],
    )
    for node in nodes:
        stats, of = node.returns.prefetch, node.node_id
        for why, nbytes in stats.started.items():
            started.add_metric([why, of], nbytes)
        for outcome in OUTCOMES:
            outcomes.add_metric([outcome, of], getattr(stats, outcome))
        moving.add_metric([of], stats.moving)
        for why, on in stats.is_on.items():
            is_on.add_metric([why, of], on)
        for against, value in (("demand", stats.regret_demand), ("pause", stats.regret_pause)):
            if value is not None:
                regret.add_metric([against, of], value)
    yield from (started, outcomes, moving, is_on, regret)


STATE_UP = "up"

# (field of TierStats, metric, help)
TIER_GAUGES = (
    ("bytes_held", "samovar_tier_bytes", "bytes that a tier holds"),
    ("bytes_max", "samovar_tier_bytes_max", "bytes that a tier may hold"),
    ("extents", "samovar_tier_extents", "extents that a tier holds"),
    ("tokens", "samovar_tier_tokens", "tokens whose blocks a tier holds"),
)
TIER_COUNTERS = (
    ("hits_blocks", "samovar_tier_hit_blocks", "blocks found in a tier"),
    ("read_bytes", "samovar_tier_read_bytes", "bytes read"),
    ("written_bytes", "samovar_tier_written_bytes", "bytes written"),
    ("read_errors", "samovar_tier_read_errors", "reads that failed"),
    ("write_errors", "samovar_tier_write_errors", "writes that failed"),
    ("quarantined", "samovar_tier_quarantined", "bad records taken out of use"),
    ("evicted_extents", "samovar_tier_evicted_extents", "extents evicted for others"),
    ("breaker_opened", "samovar_breaker_opened", "times that a tier's circuit breaker opened"),
)


def node_metrics(nodes: Iterable[NodeStats]) -> Iterator[Metric]:
    """Yield the metrics of nodes. Counters start with their process.

    Labels come from the small fixed sets of `messages.py` (tiers, states, outcomes, reasons).
    """
    nodes = list(nodes)
    yield from _of_tiers(nodes)
    yield _verify_failures(nodes)
    yield _moves(nodes)
    yield from returns_metrics(nodes)


def _of_tiers(nodes: list[NodeStats]) -> Iterator[Metric]:
    for field, name, text in TIER_GAUGES:
        yield _fill_tiers(GaugeMetricFamily(name, text, labels=["tier", "node"]), field, nodes)
    for field, name, text in TIER_COUNTERS:
        yield _fill_tiers(CounterMetricFamily(name, text, labels=["tier", "node"]), field, nodes)
    up = GaugeMetricFamily(
        "samovar_tier_up", "1 = works, 0 = breaker open, read-only or off", labels=["tier", "node"]
    )
    room = GaugeMetricFamily(
        "samovar_tier_medium_free_bytes",
        "bytes that a tier's disk has left, as of its last write",
        labels=["tier", "node"],
    )
    listed = GaugeMetricFamily(
        "samovar_tier_listing_age_seconds",
        "age of the last complete listing of a tier that other nodes write to as well",
        labels=["tier", "node"],
    )
    for node in nodes:
        for tier in node.tiers:
            up.add_metric([tier.name, node.node_id], 1 if tier.state == STATE_UP else 0)
            if tier.listed_ago_s is not None:
                listed.add_metric([tier.name, node.node_id], tier.listed_ago_s)
            if tier.medium_free_bytes is not None:
                room.add_metric([tier.name, node.node_id], tier.medium_free_bytes)
    yield from (up, room, listed)
    restarts = GaugeMetricFamily("samovar_tiers_restarts", "restarts of the tier actor", labels=["node"])
    bad_files = GaugeMetricFamily(
        "samovar_tiers_bad_files", "files of the node that could not be read at its start", labels=["node"]
    )
    pending = GaugeMetricFamily(
        "samovar_tiers_pending_deletes", "deletes that failed and are retried", labels=["node"]
    )
    forgotten = CounterMetricFamily(
        "samovar_tiers_forgotten_deletes",
        "failed deletes that had no room in the list: their bytes stay accounted until a restart",
        labels=["node"],
    )
    queue = GaugeMetricFamily("samovar_tiers_queue", "stores and copies waiting", labels=["node"])
    misses = CounterMetricFamily("samovar_tiers_miss_blocks", "blocks not found", labels=["reason", "node"])
    stores = CounterMetricFamily("samovar_tiers_stores", "extents offered", labels=["outcome", "node"])
    for node in nodes:
        restarts.add_metric([node.node_id], node.restarts)
        bad_files.add_metric([node.node_id], node.bad_files)
        pending.add_metric([node.node_id], node.pending_deletes)
        forgotten.add_metric([node.node_id], node.forgotten_deletes)
        queue.add_metric([node.node_id], node.queue)
        add_words(misses, node.misses, node.node_id)
        add_words(stores, node.stores, node.node_id)
    yield from (restarts, bad_files, pending, forgotten, queue, misses, stores)


def _verify_failures(nodes: list[NodeStats]) -> Metric:
    family = CounterMetricFamily(
        "samovar_verify_failures",
        "records that failed verification, including those that replicas reported",
        labels=["tier", "kind", "node"],
    )
    for node in nodes:
        for tier in node.tiers:
            for kind, count in tier.verify_failures.items():
                family.add_metric([tier.name, kind, node.node_id], count)
    return family


def _moves(nodes: list[NodeStats]) -> Metric:
    """Parse keys such as `cpu>nvme:committed`; a key without `>` has no source."""
    family = CounterMetricFamily(
        "samovar_tier_transfers", "copies of extents between tiers", labels=["from", "to", "outcome", "node"]
    )
    for node in nodes:
        for move, count in node.moves.items():
            way, _, outcome = move.partition(":")
            source, arrow, target = way.partition(">")
            family.add_metric([source if arrow else "", target or source, outcome, node.node_id], count)
    return family


def _fill_tiers(
    family: GaugeMetricFamily | CounterMetricFamily, field: str, nodes: Iterable[NodeStats]
) -> Metric:
    for node in nodes:
        for tier in node.tiers:
            family.add_metric([tier.name, node.node_id], getattr(tier, field))
    return family


def add_words(family: CounterMetricFamily, counts: Mapping[str, int], of: str) -> None:
    for word, count in counts.items():
        family.add_metric([word, of], count)
