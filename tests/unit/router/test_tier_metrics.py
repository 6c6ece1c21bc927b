"""/metrics and /cache/stats: what nodes and replicas say about the tiers."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError

from samovar.cache_tiers.messages import NodeStats, TierStats
from samovar.cache_tiers.pricing.meters import TierPrice
from samovar.replicas.messages import EngineStats
from samovar.router.metrics import FORMER_NAMES
from samovar.router.routing.ray_clients import RayReplicaClient
from tests.support.router.router_harness import House
from tests.unit.router.test_parts import FakeHandle

NODE = NodeStats(
    node_id="n1",
    incarnation="i1",
    restarts=1,
    tiers=(
        TierStats("cpu", "up", bytes_held=10, bytes_max=20, extents=3, price=TierPrice(0.001, float("inf"))),
        TierStats(
            "nvme", "open", verify_failures={"checksum": 2}, quarantined=3, breaker_opened=4, price=None
        ),
        TierStats("s3", "off: no bucket", listed_ago_s=11.5),
    ),
    moves={"cpu>nvme:committed": 5, "nvme:expired": 1},
    stores={"taken": 6},
    misses={"gone": 7},
    queue=8,
    pending_deletes=9,
    forgotten_deletes=10,
)
REPLICA = EngineStats(
    "r1",
    decisions={"load": 1, "recompute": 2},
    misses={"late": 3},
    slow_lookups={"s3": 12},
    stores={"dropped:queue": 4},
    store_tokens={"dropped:queue": 64},
    missed_tokens={"evicted": 32},
    audits={"equal": 5},
    memory_shortages={"halved": 8},
    verify_failures={"nvme:checksum": 6},
    swaps=7,
    loading=1,
)


# (metric, values of its labels, value)
WANTED = [
    ("samovar_tier_bytes", "cpu n1", 10),
    ("samovar_tiers_pending_deletes", "n1", 9),
    ("samovar_tiers_forgotten_deletes_total", "n1", 10),
    ("samovar_tier_bytes_max", "cpu n1", 20),
    ("samovar_tier_extents", "cpu n1", 3),
    ("samovar_tier_up", "cpu n1", 1),
    ("samovar_tier_up", "nvme n1", 0),
    ("samovar_tier_up", "s3 n1", 0),
    ("samovar_tier_transfers_total", "cpu nvme committed n1", 5),
    ("samovar_verify_failures_total", "nvme checksum n1", 2),
    ("samovar_replica_verify_failures_total", "nvme checksum r1", 6),
    ("samovar_tier_quarantined_total", "nvme n1", 3),
    ("samovar_breaker_opened_total", "nvme n1", 4),
    ("samovar_restore_misses_total", "late r1", 3),
    ("samovar_tier_listing_age_seconds", "s3 n1", 11.5),
    ("samovar_slow_lookups_total", "s3 r1", 12),
    ("samovar_stores_total", "dropped:queue r1", 4),
    ("samovar_store_tokens_total", "dropped:queue r1", 64),
    ("samovar_missed_tokens_total", "evicted r1", 32),
    ("samovar_audits_total", "equal r1", 5),
    ("samovar_memory_shortages_total", "halved r1", 8),
    ("samovar_restore_decisions_total", "recompute r1", 2),
    ("samovar_swaps_total", "r1", 7),
    ("samovar_replica_loading", "r1", 1),
    ("samovar_tiers_queue", "n1", 8),
    ("samovar_tiers_stores_total", "taken n1", 6),
    ("samovar_tiers_miss_blocks_total", "gone n1", 7),
]


@pytest.mark.guarantee("G13")
async def test_metrics_of_tiers_and_replicas() -> None:
    house = House()
    house.replicas.nodes, house.replicas.stats_now = [NODE], [REPLICA]
    async with house.client() as client:
        text = (await client.get("/metrics")).text
    values = {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, labels, value in WANTED:
        assert values[name, frozenset(labels.split())] == value, (name, labels)
    assert ("samovar_tier_transfers_total", frozenset(["", "nvme", "expired", "n1"])) in values


async def test_renamed_metrics_keep_their_former_names_for_one_release() -> None:
    house = House()
    house.replicas.nodes, house.replicas.stats_now = [NODE], [REPLICA]
    house.service.metrics.failovers.labels("resumed").inc()
    async with house.client() as client:
        text = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, former in FORMER_NAMES.items():
        new, old = families[name], families[former]
        assert old.documentation == f"deprecated: this metric is now called {name}"
        assert [(s.labels, s.value) for s in old.samples] == [(s.labels, s.value) for s in new.samples]
        assert new.samples or name == "samovar_prefetch_inflight_bytes"


async def test_stats_are_json_even_where_numbers_are_not_finite() -> None:
    house = House()
    house.replicas.nodes = [NODE]
    async with house.client() as client:
        response = await client.get("/cache/stats")
    body = json.loads(response.text)
    assert [replica["replica_id"] for replica in body["replicas"]] == ["replica-1"]
    tier = body["nodes"][0]["tiers"][0]
    assert (tier["name"], tier["bytes_held"], tier["price"]["bytes_per_s"]) == ("cpu", 10, None)


async def test_each_node_is_told_of_once_however_many_replicas_it_has() -> None:
    newer = NodeStats("n1", "i2", 2, ())
    handle = FakeHandle(NODE, NODE, newer, None, RayActorError())
    client = RayReplicaClient(handle, retry_after_s=1)
    assert await client.cache_stats() == [NODE, newer]
    assert handle.broadcasts == [("tier_stats",)]
