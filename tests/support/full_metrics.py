"""/metrics of an ingress with a value of every metric, as if a service had written it."""

from __future__ import annotations

from samovar.cache_tiers.messages import LruStats, NodeStats, PrefetchStats, ResumptionStats, TierStats
from samovar.replicas.messages import EngineStats
from samovar.router.metrics import Metrics, RequestTimer

REPLICA = EngineStats(
    replica_id="replica-1",
    running=2,
    waiting=1,
    pages_total=64,
    pages_free=32,
    pages_cached=16,
    pages_active=16,
    steps=100,
    prompt_tokens=4000,
    cached_tokens=3000,
    prefill_tokens=1000,
    generated_tokens=500,
    drafted_tokens=60,
    accepted_tokens=40,
    finished={"stop": 9, "length": 1},
    decisions={"load": 4, "recompute": 2},
    misses={"late": 1},
    slow_lookups={"s3": 1},
    verify_failures={"nvme:checksum": 1},
    stores={"taken": 5},
    store_tokens={"taken": 80},
    missed_tokens={"evicted": 16},
    audits={"equal": 3},
    memory_shortages={"halved": 1},
)
NODE = NodeStats(
    node_id="node-1",
    incarnation="first",
    restarts=0,
    tiers=(
        TierStats("cpu", "up", bytes_held=2**20, bytes_max=2**22, extents=4, tokens=1000, hits_blocks=9),
        TierStats(
            "nvme",
            "up",
            bytes_max=2**30,
            verify_failures={"checksum": 1},
            listed_ago_s=3.0,
            medium_free_bytes=2**31,
        ),
    ),
    moves={"cpu>nvme:committed": 5},
    stores={"taken": 6},
    misses={"gone": 7},
    returns=ResumptionStats(
        lru=LruStats(9, 900, 90, 30, 2, {"cpu": 500}, {"cpu": 440}),
        calibration=((0.1, 0.2, 3),),
        hints={"typing:received": 3, "typing:true": 2},
        predictor="learned: 7 turns",
        turns=7,
        prefetch=PrefetchStats(
            started={"guess": 9},
            used=5,
            late=1,
            wasted=2,
            is_on={"guess": True},
            regret_demand=0.1,
            regret_pause=0.2,
        ),
    ),
)


def filled_metrics() -> Metrics:
    """Metrics of an ingress with one replica and one node, of which every one has a sample."""
    metrics = Metrics()
    metrics.set_replicas([REPLICA], [NODE], {"node-1": True})
    metrics.set_sessions({"home": 3, "new": 1}, {"idle": 2}, 0)
    metrics.requests.labels("/v1/chat/completions", "200").inc(10)
    metrics.failovers.labels("resumed").inc()
    metrics.left_prefix("system", 10, 90)
    metrics.returned(left_tokens=90, cached_tokens=60)
    metrics.compactions.labels("retrieve").inc()
    metrics.compaction_jobs.labels("done").inc()
    metrics.compaction_tokens.labels("prompt").inc(100)
    timer = RequestTimer(metrics, 0.0)
    timer.admitted(0.1, {"compute": 1000, "gpu": 2000, "cpu": 1000})
    timer.tokens(0.2, 1, hit=True)
    timer.tokens(0.3, 2, hit=True)
    timer.finished(0.4)
    return metrics
