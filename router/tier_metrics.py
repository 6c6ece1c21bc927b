"""Prometheus metrics of the cache tiers, as nodes and replicas last told of them.

Counters of nodes begin at their tier actor's start, those of replicas at the replica's. Labels come
from the small fixed sets of `messages.py` (tiers, states, outcomes, reasons). Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cache_tiers.messages import NodeStats
from replicas.messages import EngineStats
from router.returns_metrics import returns_metrics

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
    ("quarantined", "samovar_tier_quarantined", "bad records that are not found any more"),
    ("evicted_extents", "samovar_tier_evicted_extents", "extents that made room for others"),
    ("breaker_opened", "samovar_breaker_opened", "times that a tier was given a rest after failures"),
)
# (field of EngineStats, metric, label, help)
REPLICA_WORDS = (
    ("decisions", "samovar_decisions", "decision", "prompts by what was done about blocks in the tiers"),
    ("misses", "samovar_miss", "reason", "prompts that got less from the tiers than they wanted"),
    ("stores", "samovar_stores", "outcome", "extents that replicas had to store, by what came of it"),
    ("audits", "samovar_audits", "outcome", "restored prompts that were computed again and compared"),
)


def tier_metrics(nodes: Iterable[NodeStats], replicas: Iterable[EngineStats]) -> Iterator[Metric]:
    """All metrics of this module."""
    nodes, replicas = list(nodes), list(replicas)
    yield from _of_tiers(nodes)
    yield _verify_failures(nodes)
    yield _moves(nodes)
    yield from returns_metrics(nodes)
    for field, name, label, text in REPLICA_WORDS:
        family = CounterMetricFamily(name, text, labels=[label, "replica"])
        for replica in replicas:
            _add_words(family, getattr(replica, field), replica.replica_id)
        yield family
    found_bad = CounterMetricFamily(
        "samovar_replica_verify_failures",
        "loads that a replica found to be bad",
        labels=["tier", "kind", "replica"],
    )
    for replica in replicas:
        for place, count in replica.verify_failures.items():
            tier, _, kind = place.partition(":")
            found_bad.add_metric([tier, kind, replica.replica_id], count)
    yield found_bad


def _of_tiers(nodes: list[NodeStats]) -> Iterator[Metric]:
    for field, name, text in TIER_GAUGES:
        yield _fill(GaugeMetricFamily(name, text, labels=["tier", "node"]), field, nodes)
    for field, name, text in TIER_COUNTERS:
        yield _fill(CounterMetricFamily(name, text, labels=["tier", "node"]), field, nodes)
    up = GaugeMetricFamily(
        "samovar_tier_up", "1 = works, 0 = breaker open, read-only or off", labels=["tier", "node"]
    )
    for node in nodes:
        for tier in node.tiers:
            up.add_metric([tier.name, node.node_id], 1 if tier.state == STATE_UP else 0)
    yield up
    restarts = GaugeMetricFamily("samovar_tiers_restarts", "starts after the first", labels=["node"])
    bad_files = GaugeMetricFamily(
        "samovar_tiers_bad_files", "a node's own files that could not be read at its start", labels=["node"]
    )
    queue = GaugeMetricFamily("samovar_tiers_queue", "stores and copies that wait", labels=["node"])
    misses = CounterMetricFamily("samovar_tiers_miss_blocks", "blocks not found", labels=["reason", "node"])
    stores = CounterMetricFamily("samovar_tiers_stores", "extents offered", labels=["outcome", "node"])
    for node in nodes:
        restarts.add_metric([node.node_id], node.restarts)
        bad_files.add_metric([node.node_id], node.bad_files)
        queue.add_metric([node.node_id], node.queue)
        _add_words(misses, node.misses, node.node_id)
        _add_words(stores, node.stores, node.node_id)
    yield from (restarts, bad_files, queue, misses, stores)


def _verify_failures(nodes: list[NodeStats]) -> Metric:
    family = CounterMetricFamily(
        "samovar_verify_failures",
        "records that were not what they should be, those that replicas reported included",
        labels=["tier", "kind", "node"],
    )
    for node in nodes:
        for tier in node.tiers:
            for kind, count in tier.verify_failures.items():
                family.add_metric([tier.name, kind, node.node_id], count)
    return family


def _moves(nodes: list[NodeStats]) -> Metric:
    """From `cpu>nvme:committed`; what has no `>` in it came from nowhere."""
    family = CounterMetricFamily(
        "samovar_moves", "copies of extents between tiers", labels=["from", "to", "outcome", "node"]
    )
    for node in nodes:
        for move, count in node.moves.items():
            way, _, outcome = move.partition(":")
            source, arrow, target = way.partition(">")
            family.add_metric([source if arrow else "", target or source, outcome, node.node_id], count)
    return family


def _fill(family: GaugeMetricFamily | CounterMetricFamily, field: str, nodes: Iterable[NodeStats]) -> Metric:
    for node in nodes:
        for tier in node.tiers:
            family.add_metric([tier.name, node.node_id], getattr(tier, field))
    return family


def _add_words(family: CounterMetricFamily, counts: Mapping[str, int], of: str) -> None:
    for word, count in counts.items():
        family.add_metric([word, of], count)
