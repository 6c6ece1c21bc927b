"""The alert rules: what is wrong, for how long, and what to do about it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]
"""`critical`: answers fail, or may be wrong; `warning`: slower or dearer than it should be."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. `summary`: what is seen, with `{{ $labels.x }}`; `action`: what to look at and to change."""

    name: str
    expr: str
    for_s: int
    severity: Severity
    summary: str
    action: str


def grew(metric: str, window: str, where: str = "") -> str:
    """Return an expression for a counter that grew within a window.

    A counter with labels often begins at 1: `increase` alone does not see a series' first value. A series
    that a slow replica left out of one scrape has not begun again: so five minutes are looked at.
    """
    series = f"{metric}{where}"
    is_old = f"last_over_time({series}[5m] offset {window})"
    return f"increase({series}[{window}]) > 0 or ({series} > 0 unless {is_old})"


def _p95(histogram: str) -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({histogram}_bucket[5m])))"


def _hit_rate(window: str) -> str:
    computed = f'sum(rate(samovar_tokens_total{{source="compute"}}[{window}]))'
    return f"1 - {computed} / sum(rate(samovar_tokens_total[{window}]))"


ALERTS = (
    Alert(
        "SamovarDown",
        'up{job="samovar"} == 0',
        60,
        "critical",
        "{{ $labels.instance }} does not answer /metrics",
        "look at `samovar status`, and at /health; with API keys the scrape needs `auth.admin_key`",
    ),
    Alert(
        "SamovarServerErrors",
        'sum(rate(samovar_requests_total{status=~"5.."}[5m])) / sum(rate(samovar_requests_total[5m])) > 0.02',
        300,
        "critical",
        "{{ $value | humanizePercentage }} of the requests fail with 5xx",
        "find one by its x-request-id in the logs; 503 while replicas start or stop is normal",
    ),
    Alert(
        "SamovarFirstTokenSlow",
        f"{_p95('samovar_ttft_seconds')} > 10",
        600,
        "warning",
        "the first token takes {{ $value | humanizeDuration }} (p95)",
        "see which part it is: wait for pages (SamovarQueueSlow), loads, or computing; add replicas",
    ),
    Alert(
        "SamovarQueueSlow",
        f"{_p95('samovar_queue_seconds')} > 5",
        600,
        "warning",
        "requests wait {{ $value | humanizeDuration }} (p95) for pages of a pool",
        "raise `cluster.replicas`, or `engine.pool_bytes_max` where memory is left",
    ),
    Alert(
        "SamovarRefuses",
        "sum by (replica) (rate(samovar_replica_refused_total[5m])) > 0.1",
        600,
        "warning",
        "replica {{ $labels.replica }} refuses requests",
        "its queue is full (`engine.queue_max`), or prompts are too long for the pool: add replicas",
    ),
    Alert(
        "SamovarAnswersLost",
        grew("samovar_failovers_total", "10m", '{outcome="gave_up"}'),
        0,
        "critical",
        "answers were given up after their replica was lost",
        "look for the replica's end in its log; `router.resumes_max` and `router.resume_s_max` bound retries",
    ),
    Alert(
        "SamovarPreempts",
        "sum by (replica) (rate(samovar_replica_preemptions_total[10m])) > 0.1",
        900,
        "warning",
        "sequences of replica {{ $labels.replica }} lose their pages to others",
        "KV memory is the bottleneck: raise `engine.pool_bytes_max`, or add replicas",
    ),
    Alert(
        "SamovarMemoryShort",
        grew("samovar_memory_shortages_total", "10m", '{outcome="failed"}'),
        0,
        "critical",
        "requests failed on replica {{ $labels.replica }}: its device has no memory left",
        "lower `engine.pool_bytes_max` or `engine.step_tokens_max`",
    ),
    Alert(
        "SamovarTierActorDown",
        "samovar_tier_actor_up == 0",
        120,
        "warning",
        "the tier actor of node {{ $labels.node }} does not answer: what is cached there is recomputed",
        "look for its death in Ray's log; Ray restarts it by itself",
    ),
    Alert(
        "SamovarTierDown",
        "samovar_tier_up == 0 and samovar_tier_bytes_max > 0",
        300,
        "warning",
        "tier {{ $labels.tier }} of node {{ $labels.node }} does not work",
        "`samovar status --all` says why: a breaker open after errors, or read-only; see disk or bucket",
    ),
    Alert(
        "SamovarTierErrors",
        "sum by (tier, node) (rate(samovar_tier_read_errors_total[5m]) + "
        "rate(samovar_tier_write_errors_total[5m])) > 0.1",
        600,
        "warning",
        "reads or writes of tier {{ $labels.tier }} fail on node {{ $labels.node }}",
        "see the disk or the bucket; prompts are recomputed meanwhile",
    ),
    Alert(
        "SamovarBlocksBad",
        grew("samovar_verify_failures_total", "15m"),
        0,
        "warning",
        "records of tier {{ $labels.tier }}, node {{ $labels.node }}, are bad ({{ $labels.kind }})",
        "none was served. Again and again: the disk, memory or network alters bytes; replace it",
    ),
    Alert(
        "SamovarAuditMismatch",
        'samovar_audits_total{outcome="mismatch"} > 0',
        0,
        "critical",
        "an audit on replica {{ $labels.replica }} found restored KV that differs from computed KV",
        "the tenant's cache was cleared. Report it; `tiers.enabled: false` serves without the cache. "
        "It holds until the replica restarts",
    ),
    Alert(
        "SamovarPoolBroken",
        "samovar_replica_integrity_failures_total > 0",
        0,
        "critical",
        "the page pool of replica {{ $labels.replica }} failed an integrity check",
        "restart the replica, and report its log",
    ),
    Alert(
        "SamovarTiersStoreNothing",
        "sum by (replica) (increase(samovar_store_tokens_total[30m])) > 10000 unless "
        'sum by (replica) (increase(samovar_store_tokens_total{outcome=~"taken|held"}[30m])) > 0',
        600,
        "warning",
        "the tiers take nothing of replica {{ $labels.replica }}, though it offers turns",
        "see `samovar_store_tokens_total` by outcome and `samovar diagnose`; `skipped:price` says that "
        "loading is dearer than computing, and `samovar doctor` shows both prices",
    ),
    Alert(
        "SamovarHitRateFell",
        f"({_hit_rate('30m')}) < 0.5 * ({_hit_rate('1d')}) and sum(rate(samovar_tokens_total[30m])) > 10",
        900,
        "warning",
        "the hit rate fell to {{ $value | humanizePercentage }}, less than half of the last day's",
        "see `samovar_restore_misses_total` by reason, `samovar_prefixes_left_total` and the tiers' fill",
    ),
    Alert(
        "SamovarPromptsChange",
        "sum by (part) (rate(samovar_prefixes_left_total[30m])) / "
        "scalar(sum(rate(samovar_ttft_seconds_count[30m]))) > 0.3",
        1800,
        "info",
        "{{ $value | humanizePercentage }} of the prompts change in their part {{ $labels.part }}, and lose "
        "the cache behind it",
        "a timestamp in the system prompt, tools in another order: move what changes to the end; "
        "`router.prefix.volatile_lines` helps with dates",
    ),
    Alert(
        "SamovarTiersBusy",
        "samovar_tiers_queue > 100",
        900,
        "warning",
        "{{ $value }} stores and copies wait on node {{ $labels.node }}",
        "the slowest tier is too slow for what is stored: see its write rate, `tiers.io_threads`",
    ),
    Alert(
        "SamovarDirectoryBehind",
        "samovar_sessions_unsynced > 1000",
        600,
        "warning",
        "{{ $value }} changes wait for the session directory",
        "its actor does not answer: look at the head node; requests are served without it",
    ),
    Alert(
        "SamovarPredictorFails",
        grew("samovar_predictor_failures_total", "1h"),
        0,
        "info",
        "the predictor of node {{ $labels.node }} failed",
        "eviction goes by recency meanwhile; look for the error in the node's log",
    ),
    Alert(
        "SamovarPrefetchWasted",
        'sum(rate(samovar_prefetch_bytes_total{outcome="wasted"}[1h])) > '
        '2 * sum(rate(samovar_prefetch_bytes_total{outcome="used"}[1h])) '
        'and sum(rate(samovar_prefetch_bytes_total{outcome="wasted"}[1h])) > 1e6',
        3600,
        "info",
        "more than two thirds of the prefetched bytes are wasted",
        "raise `tiers.prefetch.accuracy_min`, or lower its budget",
    ),
)
