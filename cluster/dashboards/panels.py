"""The Grafana dashboard's panels, what is drawn and the PromQL behind it, and the alert rules. Plain data.

`tests/unit/cluster/dashboards` holds that every query names metrics and labels that are declared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samovar.cache_tiers.blocks import S3

RATE = "$__rate_interval"
"""Grafana's own: the shortest range that holds enough scrapes."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """A PromQL expression, and the name of its lines: text with `{{label}}`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit`: as Grafana names it; `is_stacked`: lines add up to something.

    `minimum`: of the axis; None: where the values are, which may be below zero.
    """

    title: str
    text: str
    unit: str
    queries: tuple[PanelQuery, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False
    minimum: float | None = 0


@dataclass(frozen=True, slots=True)
class DashboardRow:
    title: str
    panels: tuple[Panel, ...]


def rate(metric: str, *by: str, where: str = "") -> str:
    """Return the per-second rate of a counter, summed by labels."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (rate({metric}{where}[{RATE}]))"


def over_nodes(gauge: str) -> str:
    """Return a gauge of the tiers, summed over the nodes; all nodes tell of the same bucket."""
    return f'sum by (tier) ({gauge}{{tier!="{S3.name}"}}) or max by (tier) ({gauge}{{tier="{S3.name}"}})'


def _lru_gain(window: str) -> str:
    gained, regretted, asked = (
        f"sum(rate(samovar_lru_{name}_tokens_total[{window}]))" for name in ("gained", "regretted", "asked")
    )
    return f"({gained} - {regretted}) / {asked}"


def quantile(share: float, histogram: str, *by: str) -> str:
    """Return a quantile of a histogram of all instances."""
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket[{RATE}])))"


def _quantiles(histogram: str) -> tuple[PanelQuery, ...]:
    return tuple(PanelQuery(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


HIT_RATE = (
    f'1 - {rate("samovar_tokens_total", where="""{source="compute"}""")} / {rate("samovar_tokens_total")}'
)

STORED_SHARE = (
    f'({rate("samovar_store_tokens_total", where="""{outcome=~"taken|held"}""")} or vector(0)) / '
    + rate("samovar_store_tokens_total")
)
_REUSED = rate("samovar_tokens_total", where="""{source!="compute"}""")
REUSED_SHARE = f"{_REUSED} / ({_REUSED} + ({rate('samovar_missed_tokens_total')} or vector(0)))"

ROWS = (
    DashboardRow(
        "At a glance",
        (
            Panel(
                "Hit rate",
                "share of prompt tokens whose KV was not computed",
                "percentunit",
                (PanelQuery(HIT_RATE, "cached"),),
                "stat",
            ),
            Panel(
                "First token, p95",
                "time to the first token",
                "s",
                (PanelQuery(quantile(0.95, "samovar_ttft_seconds"), "p95"),),
                "stat",
            ),
            Panel(
                "Requests",
                "requests answered in a second",
                "reqps",
                (PanelQuery(rate("samovar_requests_total"), "requests"),),
                "stat",
            ),
            Panel(
                "Server errors",
                "share of requests answered with 5xx",
                "percentunit",
                (
                    PanelQuery(
                        f'({rate("samovar_requests_total", where="""{status=~"5.."}""")} or vector(0)) / '
                        + rate("samovar_requests_total"),
                        "5xx",
                    ),
                ),
                "stat",
            ),
            Panel(
                "Tier actors that answer",
                "of nodes with replicas",
                "none",
                (
                    PanelQuery("sum(samovar_tier_actor_up)", "up"),
                    PanelQuery("count(samovar_tier_actor_up)", "of"),
                ),
                "stat",
            ),
            Panel(
                "Blocks that failed verification",
                "in the last hour; none of them was served",
                "none",
                (PanelQuery("sum(increase(samovar_verify_failures_total[1h])) or vector(0)", "failures"),),
                "stat",
            ),
        ),
    ),
    DashboardRow(
        "Requests",
        (
            Panel(
                "Requests by status",
                "requests answered in a second",
                "reqps",
                (PanelQuery(rate("samovar_requests_total", "status"), "{{status}}"),),
                is_stacked=True,
            ),
            Panel("Time to the first token", "", "s", _quantiles("samovar_ttft_seconds")),
            Panel(
                "Time to the first token, hit and miss",
                "p95 of prompts with and without cached tokens",
                "s",
                (PanelQuery(quantile(0.95, "samovar_ttft_seconds", "cache"), "{{cache}}"),),
            ),
            Panel("Time between tokens", "", "s", _quantiles("samovar_itl_seconds")),
            Panel("Time to the last token", "", "s", _quantiles("samovar_e2e_seconds")),
            Panel(
                "Wait for pages",
                "in a replica, before anything is computed",
                "s",
                _quantiles("samovar_queue_seconds"),
            ),
            Panel("Requests open", "", "none", (PanelQuery("sum(samovar_requests_in_flight)", "open"),)),
            Panel(
                "Tokens generated",
                "in a second",
                "none",
                (PanelQuery(rate("samovar_generation_tokens_total"), "tokens"),),
            ),
        ),
    ),
    DashboardRow(
        "Cache",
        (
            Panel(
                "Prompt tokens by source",
                "where the KV of prompts came from, tokens in a second",
                "none",
                (PanelQuery(rate("samovar_tokens_total", "source"), "{{source}}"),),
                is_stacked=True,
            ),
            Panel(
                "Decisions",
                "load, recompute, hedge (the load was late, computing began beside it) or meet",
                "none",
                (PanelQuery(rate("samovar_restore_decisions_total", "decision"), "{{decision}}"),),
                is_stacked=True,
            ),
            Panel(
                "Why less was loaded than planned",
                "",
                "none",
                (PanelQuery(rate("samovar_restore_misses_total", "reason"), "{{reason}}"),),
                is_stacked=True,
            ),
            Panel(
                "Prompts that changed early",
                "prompts that left their conversation's prefix, by the part that changed",
                "none",
                (PanelQuery(rate("samovar_prefixes_left_total", "part"), "{{part}}"),),
                is_stacked=True,
            ),
            Panel(
                "Blocks not found",
                "by reason",
                "none",
                (PanelQuery(rate("samovar_tiers_miss_blocks_total", "reason"), "{{reason}}"),),
                is_stacked=True,
            ),
            Panel(
                "Stores",
                "extents that replicas had to store, by outcome",
                "none",
                (PanelQuery(rate("samovar_stores_total", "outcome"), "{{outcome}}"),),
                is_stacked=True,
            ),
            Panel(
                "What the tiers are given, and give back",
                "share of the tokens offered to the tiers that were stored, and of the tokens known from "
                "earlier turns that were reused",
                "percentunit",
                (PanelQuery(STORED_SHARE, "stored"), PanelQuery(REUSED_SHARE, "reused")),
            ),
            Panel(
                "Known tokens computed again",
                "prompt tokens that an earlier turn had computed, in a second, by reason",
                "none",
                (PanelQuery(rate("samovar_missed_tokens_total", "reason"), "{{reason}}"),),
                is_stacked=True,
            ),
        ),
    ),
    DashboardRow(
        "Tiers",
        (
            Panel(
                "Fill",
                "share of what each tier may hold",
                "percentunit",
                (
                    PanelQuery(
                        "sum by (tier, node) (samovar_tier_bytes) / "
                        "(sum by (tier, node) (samovar_tier_bytes_max) > 0)",
                        "{{tier}} {{node}}",
                    ),
                ),
            ),
            Panel(
                "Bytes held",
                "",
                "bytes",
                (PanelQuery(over_nodes("samovar_tier_bytes"), "{{tier}}"),),
                is_stacked=True,
            ),
            Panel(
                "Tokens held",
                "",
                "none",
                (PanelQuery(over_nodes("samovar_tier_tokens"), "{{tier}}"),),
                is_stacked=True,
            ),
            Panel(
                "Read", "", "Bps", (PanelQuery(rate("samovar_tier_read_bytes_total", "tier"), "{{tier}}"),)
            ),
            Panel(
                "Written",
                "",
                "Bps",
                (PanelQuery(rate("samovar_tier_written_bytes_total", "tier"), "{{tier}}"),),
            ),
            Panel(
                "Copies between tiers",
                "extents in a second",
                "none",
                (
                    PanelQuery(
                        rate("samovar_tier_transfers_total", "from", "to", "outcome"),
                        "{{from}} to {{to}}: {{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Evicted",
                "extents in a second",
                "none",
                (PanelQuery(rate("samovar_tier_evicted_extents_total", "tier"), "{{tier}}"),),
            ),
            Panel(
                "Waiting",
                "stores and copies",
                "none",
                (PanelQuery("sum by (node) (samovar_tiers_queue)", "{{node}}"),),
            ),
            Panel(
                "Tiers that work",
                "0 = breaker open, read-only or off",
                "none",
                (PanelQuery("min by (tier, node) (samovar_tier_up)", "{{tier}} {{node}}"),),
            ),
            Panel(
                "Errors",
                "of reads and writes, in a second",
                "none",
                (
                    PanelQuery(rate("samovar_tier_read_errors_total", "tier"), "{{tier}} read"),
                    PanelQuery(rate("samovar_tier_write_errors_total", "tier"), "{{tier}} write"),
                ),
            ),
        ),
    ),
    DashboardRow(
        "Replicas",
        (
            Panel(
                "Sequences",
                "",
                "none",
                (
                    PanelQuery("sum(samovar_replica_running)", "running"),
                    PanelQuery("sum(samovar_replica_waiting)", "waiting"),
                    PanelQuery("sum(samovar_replica_loading)", "loading"),
                ),
            ),
            Panel(
                "Pages of the pools",
                "",
                "percentunit",
                (PanelQuery("sum by (state) (samovar_pages) / scalar(sum(samovar_pages))", "{{state}}"),),
                is_stacked=True,
            ),
            Panel(
                "Tokens computed",
                "in a second",
                "none",
                (
                    PanelQuery(rate("samovar_replica_prefill_tokens_total", "replica"), "{{replica}} prompt"),
                    PanelQuery(
                        rate("samovar_replica_generated_tokens_total", "replica"), "{{replica}} answer"
                    ),
                ),
            ),
            Panel(
                "Drafts",
                "guesses of next tokens in a second, and those that were right",
                "none",
                (
                    PanelQuery(
                        rate("samovar_replica_drafted_tokens_total", "replica"), "{{replica}} guessed"
                    ),
                    PanelQuery(rate("samovar_replica_accepted_tokens_total", "replica"), "{{replica}} right"),
                ),
            ),
            Panel(
                "Preemptions and swaps",
                "sequences in a second that lost their pages to others",
                "none",
                (
                    PanelQuery(rate("samovar_replica_preemptions_total", "replica"), "{{replica}} preempted"),
                    PanelQuery(rate("samovar_swaps_total", "replica"), "{{replica}} swapped"),
                ),
            ),
            Panel(
                "Refused",
                "requests in a second",
                "none",
                (PanelQuery(rate("samovar_replica_refused_total", "replica"), "{{replica}}"),),
            ),
            Panel(
                "Routing",
                "requests by how they came to their replica",
                "none",
                (PanelQuery(rate("samovar_affinity_total", "outcome"), "{{outcome}}"),),
                is_stacked=True,
            ),
            Panel(
                "Replicas lost",
                "answers that were resumed or given up, in a second",
                "none",
                (PanelQuery(rate("samovar_failovers_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "Memory of the device short",
                "what was given up, in a second",
                "none",
                (PanelQuery(rate("samovar_memory_shortages_total", "outcome"), "{{outcome}}"),),
            ),
        ),
    ),
    DashboardRow(
        "Prediction",
        (
            Panel(
                "Sessions",
                "",
                "none",
                (PanelQuery("sum by (state) (samovar_sessions)", "{{state}}"),),
                is_stacked=True,
            ),
            Panel(
                "Predictor in use", "", "none", (PanelQuery("sum by (kind) (samovar_predictor)", "{{kind}}"),)
            ),
            Panel(
                "Log loss",
                "of the forecasts over the latest turns: lower is better",
                "none",
                (PanelQuery("avg by (of) (samovar_predictor_log_loss)", "{{of}}"),),
            ),
            Panel(
                "Gain against LRU",
                "tokens that were found, and that least recently used would have evicted, less those that it "
                "would still have, as a share of those asked for",
                "percentunit",
                (PanelQuery(_lru_gain(RATE), "all nodes"),),
                minimum=None,
            ),
            Panel(
                "Found by tier, and by LRU",
                "prompt tokens in a second",
                "none",
                (PanelQuery(rate("samovar_lru_tier_tokens_total", "tier", "of"), "{{tier}} {{of}}"),),
            ),
            Panel(
                "Calibration error",
                "mean distance between the forecast P(resumes within 600 s) and what happened",
                "percentunit",
                (PanelQuery("avg(samovar_predictor_calibration_error)", "all nodes"),),
            ),
            Panel(
                "Hints",
                "of clients, in an hour: received, and come true or not",
                "none",
                (
                    PanelQuery(
                        "sum by (kind, outcome) (increase(samovar_hints_total[1h]))", "{{kind}} {{outcome}}"
                    ),
                ),
            ),
            Panel(
                "Prefetched bytes",
                "by outcome, in a second",
                "Bps",
                (PanelQuery(rate("samovar_prefetch_bytes_total", "outcome"), "{{outcome}}"),),
                is_stacked=True,
            ),
            Panel(
                "Regret",
                "of prefetching, against other strategies",
                "percentunit",
                (PanelQuery("avg by (against) (samovar_prefetch_regret)", "{{against}}"),),
                minimum=None,
            ),
            Panel(
                "Audits",
                "restored prompts that were recomputed and compared",
                "none",
                (PanelQuery(rate("samovar_audits_total", "outcome"), "{{outcome}}"),),
                is_stacked=True,
            ),
        ),
    ),
)


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
    that was not scraped for a time, for one replica was slow or Prometheus was away, has not begun again:
    so a day is looked at.
    """
    series = f"{metric}{where}"
    is_old = f"last_over_time({series}[1d] offset {window})"
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
        "`samovar status --all` says why: a breaker open after errors, read-only, or off, as it could not be "
        "opened; see disk or bucket",
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
        "SamovarPredictorLoses",
        f"({_lru_gain('6h')}) < -0.01 and sum(increase(samovar_lru_lookups_total[6h])) > 200",
        3600,
        "info",
        "least recently used would find {{ $value | humanizePercentage }} (less than 0: more) of the tokens "
        "asked for",
        "`tiers.policy.name: lru` switches the predictor off; `samovar diagnose` has the numbers",
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
