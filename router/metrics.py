"""Prometheus metrics of one ingress: its own measurements and its replicas' latest counters.

Names start with `samovar_`. Labels come from small fixed sets (routes, states, replicas), never from what
clients send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from samovar.cache_tiers.messages import NodeStats
from samovar.cache_tiers.node_metrics import add_words, node_metrics
from samovar.cache_tiers.sessions import SessionState
from samovar.replicas.messages import EngineStats, Source
from samovar.router.routing import Outcome

FORMER_NAMES = {
    "samovar_prefetch_inflight_bytes": "samovar_prefetch_moving_bytes",
    "samovar_tier_transfers": "samovar_moves",
    "samovar_restore_misses": "samovar_miss",
    "samovar_restore_decisions": "samovar_decisions",
    "samovar_failovers": "samovar_resumes",
    "samovar_sessions_unsynced": "samovar_sessions_untold",
}
"""Metrics that were renamed: each is also exported under its former name, for one release."""


class _WithFormerNames(Collector):
    """Yields the metrics of `registry`, the renamed ones under both names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            if former := FORMER_NAMES.get(metric.name):
                copy = Metric(former, f"deprecated: this metric is now called {metric.name}", metric.type)
                copy.samples = [
                    s._replace(name=former + s.name.removeprefix(metric.name)) for s in metric.samples
                ]
                yield copy


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# (field of EngineStats, metric, help)
REPLICA_GAUGES = (
    ("running", "samovar_replica_running", "sequences running now"),
    ("waiting", "samovar_replica_waiting", "sequences waiting for admission now"),
    ("loading", "samovar_replica_loading", "sequences whose blocks are being loaded now"),
    ("staged_bytes", "samovar_replica_staged_bytes", "staged bytes that the tiers have not pulled yet"),
)
REPLICA_COUNTERS = (
    ("steps", "samovar_replica_steps", "engine steps"),
    ("prompt_tokens", "samovar_replica_prompt_tokens", "prompt tokens admitted"),
    ("cached_tokens", "samovar_replica_cached_tokens", "prompt tokens found in the pool"),
    ("prefill_tokens", "samovar_replica_prefill_tokens", "prompt tokens computed"),
    ("generated_tokens", "samovar_replica_generated_tokens", "tokens sampled"),
    ("drafted_tokens", "samovar_replica_drafted_tokens", "guesses of next tokens that steps checked"),
    ("accepted_tokens", "samovar_replica_accepted_tokens", "guesses that were right"),
    ("preemptions", "samovar_replica_preemptions", "sequences that lost their pages to others"),
    ("cow_copies", "samovar_replica_cow_copies", "shared pages copied before a write"),
    ("swaps", "samovar_swaps", "sequences whose blocks were kept in main memory while they waited"),
    ("evictions", "samovar_replica_evictions", "cached blocks dropped for new ones"),
    ("refused", "samovar_replica_refused", "requests refused"),
    ("aborted", "samovar_replica_aborted", "requests whose client went away"),
    ("integrity_failures", "samovar_replica_integrity_failures", "failed integrity checks of the page pool"),
)
PAGE_STATES = ("free", "cached", "active")


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """A metric by its family's name, with its type (`counter`, `gauge`, `histogram`) and own labels."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def samples(self) -> dict[str, tuple[str, ...]]:
        """The names of its samples, as queries write them, with their labels."""
        if self.kind == "counter":
            return {f"{self.name}_total": self.labels}
        if self.kind == "histogram":
            with_bound = {f"{self.name}_bucket": (*self.labels, "le")}
            return with_bound | {f"{self.name}_{part}": self.labels for part in ("sum", "count")}
        return {self.name: self.labels}


class Metrics:
    """All metrics of one ingress, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._replicas = _ReplicaCollector()
        self.registry.register(self._replicas)
        self._exported = CollectorRegistry()
        self._exported.register(_WithFormerNames(self.registry))
        self._sessions = _SessionCollector()
        self.registry.register(self._sessions)
        registry = self.registry
        self.requests = Counter(
            "samovar_requests", "requests answered", ["route", "status"], registry=registry
        )
        self.in_flight = Gauge("samovar_requests_in_flight", "requests open now", registry=registry)
        self.ttft_s = Histogram(
            "samovar_ttft_seconds",
            "time to the first token",
            ["cache"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl_s = Histogram(
            "samovar_itl_seconds", "time between tokens", buckets=ITL_BUCKETS_S, registry=registry
        )
        self.e2e_s = Histogram(
            "samovar_e2e_seconds", "time to the last token", buckets=E2E_BUCKETS_S, registry=registry
        )
        self.queue_s = Histogram(
            "samovar_queue_seconds",
            "wait for the first pages in a replica",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter("samovar_prompt_tokens", "prompt tokens", registry=registry)
        self.tokens = Counter(
            "samovar_tokens", "prompt tokens by where they came from", ["source"], registry=registry
        )
        self.unrecorded = Counter(
            "samovar_unrecorded_turns", "turns missing from the recording: too many waited", registry=registry
        )
        self.failovers = Counter(
            "samovar_failovers", "answers whose replica was lost", ["outcome"], registry=registry
        )
        self.failovers.labels("gave_up")  # from 0 on: the first one after a start is growth, too
        self.prefixes_left = Counter(
            "samovar_prefixes_left",
            "prompts that left the prefix of their conversation's previous prompt, by the part that changed",
            ["part"],
            registry=registry,
        )
        self.prefix_shared = Counter(
            "samovar_prefix_shared_tokens",
            "tokens before the change, of prompts that left a prefix",
            ["part"],
            registry=registry,
        )
        self.prefix_lost = Counter(
            "samovar_prefix_lost_tokens",
            "tokens computed behind the change, of prompts that left a prefix",
            ["part"],
            registry=registry,
        )
        self.returning = Counter(
            "samovar_returning_tokens",
            "tokens that a conversation's last turn had left in the cache, by what became of them: reused or "
            "recomputed",
            ["outcome"],
            registry=registry,
        )
        self.generation_tokens = Counter("samovar_generation_tokens", "tokens generated", registry=registry)
        said = "prompts that old turns were left out of, by what stands for them"
        self.compactions = Counter("samovar_compactions", said, ["mode"], registry=registry)
        said = "prefixes and summaries of long conversations due in idle moments, by outcome"
        self.compaction_jobs = Counter("samovar_compaction_jobs", said, ["outcome"], registry=registry)
        said = "tokens computed for these in idle moments: of prompts, and written"
        self.compaction_tokens = Counter("samovar_compaction_tokens", said, ["of"], registry=registry)

    def left_prefix(self, kind: str, shared_tokens: int, lost_tokens: int) -> None:
        """Record a prompt that left its conversation's prefix, in a part of this kind."""
        self.prefixes_left.labels(kind).inc()
        self.prefix_shared.labels(kind).inc(shared_tokens)
        self.prefix_lost.labels(kind).inc(max(0, lost_tokens))

    def returned(self, left_tokens: int, cached_tokens: int) -> None:
        """Record a prompt whose conversation had left `left_tokens` of it in the cache."""
        reused = min(left_tokens, cached_tokens)
        if left_tokens > 0:
            self.returning.labels("reused").inc(reused)
            self.returning.labels("recomputed").inc(left_tokens - reused)

    def declared(self) -> list[DeclaredMetric]:
        """Return every metric of this registry by name, without those under former names.

        Derived from the metrics themselves: dashboards, alerts and docs are checked against this list.
        """
        # Neither an instrument nor a family tells its label names otherwise before it has samples.
        instruments = [one for one in vars(self).values() if isinstance(one, MetricWrapperBase)]
        families = [*self._replicas.collect(), *self._sessions.collect()]
        found = [
            DeclaredMetric(one._name, str(one._type), tuple(one._labelnames), one._documentation)
            for one in instruments
        ]
        found += [
            DeclaredMetric(one.name, one.type, tuple(getattr(one, "_labelnames", ())), one.documentation)
            for one in families
        ]
        return sorted(found, key=lambda one: one.name)

    def set_sessions(
        self,
        outcomes: Mapping[Outcome, int],
        states: Mapping[SessionState, int],
        unsynced: int,
        salts_changed: int = 0,
    ) -> None:
        """Replace the routing outcomes since the start, and the current session counts.

        `salts_changed`: prompts that continued a session under another salt, since the start.
        """
        self._sessions.outcomes = dict(outcomes)
        self._sessions.states = dict(states)
        self._sessions.unsynced = unsynced
        self._sessions.salts_changed = salts_changed

    def set_replicas(
        self,
        stats: Sequence[EngineStats],
        nodes: Sequence[NodeStats] = (),
        tiers_up: Mapping[str, bool] | None = None,
    ) -> None:
        """Replace the counters of the replicas and of their nodes' tiers.

        `tiers_up`: node id -> whether its tier actor answers.
        """
        self._replicas.stats = list(stats)
        self._replicas.nodes = list(nodes)
        self._replicas.tiers_up = dict(tiers_up or {})

    def ingress(self) -> Iterator[Metric]:
        """Yield the metrics of this ingress that a diagnosis reads, without asking anyone for more."""
        for one in (self.prefixes_left, self.prefix_shared, self.prefix_lost, self.returning, self.queue_s):
            yield from one.collect()
        yield from self._sessions.collect()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._exported)

    def own_text(self) -> bytes:
        """Return the metrics of this ingress, without what all ingresses know alike."""
        told = self._replicas.stats, self._replicas.nodes, self._replicas.tiers_up
        self._replicas.stats, self._replicas.nodes, self._replicas.tiers_up = [], [], {}
        try:
            return self.text()
        finally:
            self._replicas.stats, self._replicas.nodes, self._replicas.tiers_up = told


class RequestTimer:
    """Measures one generation and reports it to `metrics`. Times are `loop.time()` seconds."""

    def __init__(self, metrics: Metrics, started_s: float) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._last_token_s: float | None = None
        self.ttft_s: float | None = None
        """Time to the first token, once that came."""

    def admitted(self, queue_s: float, tokens: Mapping[Source, int]) -> None:
        """Record that all prompts are computed; `tokens`: prompt tokens by source."""
        self._metrics.queue_s.observe(max(0.0, queue_s))
        for source, count in tokens.items():
            self._metrics.prompt_tokens.inc(max(0, count))
            self._metrics.tokens.labels(source).inc(max(0, count))

    def tokens(self, now_s: float, count: int, *, hit: bool) -> None:
        """Record `count` tokens that arrived together, of any choice."""
        if count == 0:
            return
        self._metrics.generation_tokens.inc(count)
        if self._last_token_s is None:
            self.ttft_s = now_s - self._started_s
            self._metrics.ttft_s.labels("hit" if hit else "miss").observe(self.ttft_s)
        else:
            self._metrics.itl_s.observe((now_s - self._last_token_s) / count)
        self._last_token_s = now_s

    def finished(self, now_s: float) -> None:
        """Record the end of the answer."""
        self._metrics.e2e_s.observe(now_s - self._started_s)


class _ReplicaCollector(Collector):
    """Turns the latest `EngineStats` and `NodeStats` into metrics at each scrape."""

    def __init__(self) -> None:
        self.stats: list[EngineStats] = []
        self.nodes: list[NodeStats] = []
        self.tiers_up: dict[str, bool] = {}

    def collect(self) -> Iterator[Metric]:
        for field, name, text in REPLICA_GAUGES:
            yield _fill(GaugeMetricFamily(name, text, labels=["replica"]), field, self.stats)
        for field, name, text in REPLICA_COUNTERS:
            yield _fill(CounterMetricFamily(name, text, labels=["replica"]), field, self.stats)
        pages = GaugeMetricFamily("samovar_pages", "pages of the pool", labels=["replica", "state"])
        finished = CounterMetricFamily(
            "samovar_replica_finished", "answers by how they ended", labels=["replica", "reason"]
        )
        for stats in self.stats:
            for state in PAGE_STATES:
                pages.add_metric([stats.replica_id, state], getattr(stats, f"pages_{state}"))
            for reason, count in stats.finished.items():
                finished.add_metric([stats.replica_id, reason], count)
        yield pages
        yield finished
        yield from tier_metrics(self.nodes, self.stats)
        up = GaugeMetricFamily(
            "samovar_tier_actor_up", "1 = the tier actor of a node with replicas answers", labels=["node"]
        )
        for node_id, is_up in self.tiers_up.items():
            up.add_metric([node_id], 1 if is_up else 0)
        yield up


class _SessionCollector(Collector):
    """Turns the latest routing outcomes and session counts into metrics at each scrape."""

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.states: dict[SessionState, int] = {}
        self.unsynced = 0
        self.salts_changed = 0

    def collect(self) -> Iterator[Metric]:
        affinity = CounterMetricFamily(
            "samovar_affinity",
            "requests by how they came to their replica: home, spilled (elsewhere was quicker), moved (home "
            "is gone or leaving), new",
            labels=["outcome"],
        )
        for outcome, count in self.outcomes.items():
            affinity.add_metric([outcome], count)
        sessions = GaugeMetricFamily("samovar_sessions", "sessions known", labels=["state"])
        for state, count in self.states.items():
            sessions.add_metric([state], count)
        yield affinity
        yield sessions
        yield GaugeMetricFamily(
            "samovar_sessions_unsynced",
            "changes not yet sent to the session directory; the number grows while it is unreachable",
            value=self.unsynced,
        )
        yield CounterMetricFamily(
            "samovar_salts_changed",
            "prompts that continued a session under another cache_salt, and so found nothing of it",
            value=self.salts_changed,
        )


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, field: str, stats: Iterable[EngineStats]
) -> Metric:
    for replica in stats:
        family.add_metric([replica.replica_id], getattr(replica, field))
    return family


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
