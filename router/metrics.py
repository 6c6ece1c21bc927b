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

from cache_tiers.messages import NodeStats
from cache_tiers.session_table import SessionState
from replicas.messages import EngineStats, Source
from router.routing import Outcome

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
        "loads that failed a replica's verification",
        labels=["tier", "kind", "replica"],
    )
    for replica in replicas:
        for place, count in replica.verify_failures.items():
            tier, _, kind = place.partition(":")
            found_bad.add_metric([tier, kind, replica.replica_id], count)
    yield found_bad


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
        _add_words(misses, node.misses, node.node_id)
        _add_words(stores, node.stores, node.node_id)
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


def _add_words(family: CounterMetricFamily, counts: Mapping[str, int], of: str) -> None:
    for word, count in counts.items():
        family.add_metric([word, of], count)


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

    def front_door(self) -> Iterator[Metric]:
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
