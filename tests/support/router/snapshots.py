"""A healthy service's snapshot, with a disk, and what makes each condition of the diagnosis hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from samovar.cache_tiers.messages import LruStats, NodeStats, ResumptionStats, TierStats
from samovar.cache_tiers.pricing import TierPrice
from samovar.configs.sections import GIB, MIB
from samovar.configs.settings import Settings
from samovar.replicas.messages import EngineStats, ReplicaInfo
from samovar.router.observe.diagnosis import IngressCounts, Snapshot, settings_told
from tests.support.router.fake_replica import INFO

PREFILL = (0.01, 1e-3, 1e-8)
"""A prompt token takes a millisecond."""
SERVING: ReplicaInfo = replace(
    INFO,
    model_name="a/model",
    context_tokens_max=8192,
    bytes_per_token=50_000,
    pages=1025,
    block_tokens=16,
    pool_bytes=1024 * 16 * 50_000,
    kv_dtype="bfloat16",
)
REPLICA = EngineStats(
    "replica-1",
    kv_dtype="bfloat16",
    running=4,
    pages_total=1024,
    pages_free=300,
    pages_cached=500,
    pages_active=224,
    steps=20_000,
    prompt_tokens=200_000,
    cached_tokens=150_000,
    prefill_tokens=20_000,
    generated_tokens=60_000,
    preemptions=2,
    swaps=2,
    evictions=400,
    finished={"stop": 195, "length": 5},
    tokens_by_source={"gpu": 150_000, "cpu": 30_000, "compute": 20_000},
    decisions={"load": 50, "recompute": 2, "meet": 3},
    misses={"late": 4},
    slow_lookups={"nvme": 1},
    stores={"taken": 300, "held": 40, "skipped:price": 5, "dropped:staged": 2},
    prefill_price=PREFILL,
)
CPU = TierStats(
    "cpu",
    "up",
    bytes_held=GIB,
    bytes_max=2 * GIB,
    extents=300,
    tokens=20_000,
    hits_blocks=2000,
    evicted_extents=50,
    price=TierPrice(1e-3, 4e9),
)
NVME = TierStats(
    "nvme",
    "up",
    bytes_held=2 * GIB,
    bytes_max=8 * GIB,
    extents=600,
    tokens=40_000,
    hits_blocks=900,
    price=TierPrice(3e-3, 1e9),
    medium_free_bytes=80 * GIB,
)
OFF = TierStats("s3", "off: no bucket")
NODE = NodeStats(
    "0123456789abcdef",
    "i",
    0,
    (CPU, NVME, OFF),
    returns=ResumptionStats(predictor="learned", turns=200, sessions=40, model_loss=0.3, fallback_loss=0.4),
)
FRONT = IngressCounts(
    prefixes_left={"messages": 4.0},
    prefix_shared={"messages": 800.0},
    prefix_lost={"messages": 400.0},
    returning={"reused": 150_000.0, "recomputed": 3_000.0},
    affinity={"home": 150.0, "spilled": 5.0, "new": 40.0},
    sessions={"idle": 30.0, "typing": 1.0},
    queue_s=4.0,
    queued=200.0,
)
HEALTHY = Snapshot(100.0, (REPLICA,), (NODE,), (SERVING,), settings_told(Settings()), FRONT)


def with_replica(**fields: Any) -> Snapshot:
    """The healthy service, but for these fields of its replica."""
    return replace(HEALTHY, replicas=(replace(REPLICA, **fields),))


def with_front(**fields: Any) -> Snapshot:
    """The healthy service, but for these counts of its ingress."""
    return replace(HEALTHY, front=replace(FRONT, **fields))


def with_tiers(*tiers: TierStats, **fields: Any) -> Snapshot:
    """The healthy service with these tiers."""
    return replace(HEALTHY, nodes=(replace(NODE, tiers=tiers, **fields),))


def with_settings(snapshot: Snapshot, **values: Any) -> Snapshot:
    """A service with other settings; `tiers__enabled` is the key tiers.enabled."""
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return replace(snapshot, settings={**snapshot.settings, **changed})


def _slow_disk() -> Snapshot:
    slow = replace(NVME, price=TierPrice(0.02, 20e6))
    found = with_tiers(slow, OFF)
    return replace(found, replicas=with_replica(decisions={"load": 3, "recompute": 60}).replicas)


def _full_and_lossy() -> Snapshot:
    full = replace(NVME, bytes_held=NVME.bytes_max - MIB, evicted_extents=900)
    found = with_tiers(CPU, full, OFF)
    front = replace(FRONT, returning={"reused": 60_000.0, "recomputed": 90_000.0})
    return replace(found, front=front)


def _no_tiers() -> Snapshot:
    found = with_replica(pages_free=10, pages_cached=900, pages_active=114, stores={}, decisions={})
    return with_settings(replace(found, nodes=()), tiers__enabled=False)


PLANTED: dict[tuple[str, str], Snapshot] = {
    ("kv_memory", ""): with_replica(
        pages_active=1000, pages_cached=14, pages_free=10, waiting=12, running=20, preemptions=15, swaps=15
    ),
    ("no_offload", ""): with_settings(with_replica(preemptions=12, swaps=0), engine__preemption="drop"),
    ("idle_sessions", ""): _no_tiers(),
    ("prompt_changes", "system"): with_front(
        prefixes_left={"system": 120.0, "messages": 4.0},
        prefix_shared={"system": 1920.0, "messages": 800.0},
        prefix_lost={"system": 240_000.0, "messages": 400.0},
    ),
    ("prompt_changes", "tools"): with_front(
        prefixes_left={"tools": 60.0}, prefix_shared={"tools": 6000.0}, prefix_lost={"tools": 90_000.0}
    ),
    ("other_namespace", ""): with_front(salts_changed=80.0),
    ("never_stored", "dropped:staged"): with_replica(stores={"taken": 30, "dropped:staged": 200}),
    ("evicted", "nvme"): _full_and_lossy(),
    ("timeouts", "nvme"): with_replica(slow_lookups={"nvme": 70, "node": 3}),
    ("storage_slow", ""): _slow_disk(),
    ("storage_slow", "nothing stored"): with_replica(
        # As it was on a GPU on 2026-11-26 (docs/benchmarks/gpu.md), and nobody was told.
        stores={"skipped:price": 1707},
        store_tokens={"skipped:price": 571_000},
        missed_tokens={"not stored: price": 240_000},
        decisions={},
        misses={},
    ),
    ("prefill_bound", ""): replace(
        with_replica(waiting=9, prefill_tokens=900_000, cached_tokens=20_000),
        front=replace(FRONT, queue_s=900.0),
    ),
    ("router_spills", ""): with_front(affinity={"home": 60.0, "spilled": 90.0, "new": 40.0}),
    ("predictor_off", "off"): with_tiers(
        CPU, NVME, OFF, returns=ResumptionStats(predictor="off: its file cannot be read")
    ),
    ("predictor_loses", ""): with_tiers(
        CPU, NVME, OFF, returns=replace(NODE.returns, lru=LruStats(900, 100_000, 2_000, 7_000, 60))
    ),
    ("breaker_open", "nvme"): with_tiers(
        CPU, replace(NVME, state="open", read_errors=4, breaker_opened=2), OFF
    ),
    ("breaker_open", "s3"): with_tiers(CPU, NVME, TierStats("s3", "off: no such bucket", bytes_max=GIB)),
    ("disk_full", ""): with_tiers(CPU, replace(NVME, medium_free_bytes=200 * MIB), OFF),
}
"""(condition, cause) -> a snapshot in which it holds, and no other."""
