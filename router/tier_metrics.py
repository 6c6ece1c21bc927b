"""Prometheus metrics of the cache tiers, as nodes and replicas have last reported them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from samovar.cache_tiers.messages import NodeStats
from samovar.cache_tiers.node_metrics import add_words, node_metrics
from samovar.replicas.messages import EngineStats

# (field of EngineStats, metric, label, help)
REPLICA_WORDS = (
    (
        "decisions",
        "samovar_restore_decisions",
        "decision",
        "prompts by decision: load, recompute, hedge or meet",
    ),
    ("misses", "samovar_restore_misses", "reason", "prompts that loaded less from the tiers than planned"),
    (
        "slow_lookups",
        "samovar_slow_lookups",
        "tier",
        "prompts computed before their lookup was answered, by the tier that was slow (node: none of them)",
    ),
    ("stores", "samovar_stores", "outcome", "extents that replicas had to store, by outcome"),
    (
        "store_tokens",
        "samovar_store_tokens",
        "outcome",
        "tokens that replicas had to store, by outcome: taken and held are in the tiers",
    ),
    (
        "missed_tokens",
        "samovar_missed_tokens",
        "reason",
        "prompt tokens that an earlier turn had computed and that were computed again, by reason",
    ),
    ("audits", "samovar_audits", "outcome", "restored prompts that were recomputed and compared"),
    (
        "memory_shortages",
        "samovar_memory_shortages",
        "outcome",
        "what did not fit into the device's memory: prompt tokens halved, sequence preempted, request "
        "failed, draws done again one by one (resampled)",
    ),
)


def tier_metrics(nodes: Iterable[NodeStats], replicas: Iterable[EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of the cache tiers, as last reported by nodes and replicas.

    Counters of nodes start with their tier actor, those of replicas with the replica. Labels come from the
    small fixed sets of `messages.py` (tiers, states, outcomes, reasons).
    """
    replicas = list(replicas)
    yield from node_metrics(nodes)
    for field, name, label, text in REPLICA_WORDS:
        family = CounterMetricFamily(name, text, labels=[label, "replica"])
        for replica in replicas:
            add_words(family, getattr(replica, field), replica.replica_id)
        yield family
    found_bad = CounterMetricFamily(
        "samovar_replica_verify_failures",
        "loads that failed a replica's verification",
        labels=["tier", "kind", "replica"],
    )
    for replica in replicas:
        for place, count in replica.verify_failures.items():
            tier, _, kind = place.partition(":")
            found_bad.add_metric([tier, kind, replica.replica_id], count)
    yield found_bad
