"""Prometheus metrics of who comes back: forecasts and prefetches, as nodes last told of them.

Counters begin at the node's tier actor's start. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cache_tiers.messages import NodeStats

PREDICTORS = ("learned", "km", "cold", "off")
OUTCOMES = ("used", "late", "wasted", "cancelled")
# (field of ReturnsStats, metric, help)
COUNTERS = (
    ("turns", "samovar_predictor_turns", "turns that were forecast and learned from"),
    ("dropped", "samovar_predictor_dropped", "turns not learned from: too many waited"),
    ("failures", "samovar_predictor_failures", "failures of the predictor, or of its file"),
)


def returns_metrics(nodes: Iterable[NodeStats]) -> Iterator[Metric]:
    """All metrics of this module."""
    nodes = list(nodes)
    for field, name, text in COUNTERS:
        family = CounterMetricFamily(name, text, labels=["node"])
        for node in nodes:
            family.add_metric([node.node_id], getattr(node.returns, field))
        yield family
    kind = GaugeMetricFamily("samovar_predictor", "1 = whose forecasts are used", labels=["kind", "node"])
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


def _of_prefetch(nodes: list[NodeStats]) -> Iterator[Metric]:
    started = CounterMetricFamily(
        "samovar_prefetch_started_bytes",
        "bytes brought up before they were asked for",
        labels=["why", "node"],
    )
    outcomes = CounterMetricFamily(
        "samovar_prefetch_bytes", "bytes that were guessed, by what came of it", labels=["outcome", "node"]
    )
    moving = GaugeMetricFamily("samovar_prefetch_moving_bytes", "bytes on their way", labels=["node"])
    is_on = GaugeMetricFamily("samovar_prefetch_on", "1 = guesses of a kind are made", labels=["why", "node"])
    regret = GaugeMetricFamily(
        "samovar_prefetch_regret",
        "share of asked bytes by which another way has more up in time, on sessions without guesses",
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
