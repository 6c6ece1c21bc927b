"""What operators see of who comes back: metrics, and a row of `samovar status`."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.metrics_core import Metric

from samovar.cache_tiers.messages import LruStats, NodeStats, PrefetchStats, ResumptionStats
from samovar.cluster.cli.status import LRU_HEAD, RETURNS_HEAD, Status, all_tables, lru_rows, returns_rows
from samovar.router.metrics import tier_metrics

PREFETCH = PrefetchStats(
    started={"pause": 3 * 1024, "hint": 1024},
    used=2048,
    late=0,
    wasted=1024,
    guesses=3,
    is_on={"pause": True, "hazard": False},
    regret_demand=-0.25,
)
NODE = NodeStats(
    "node-one",
    "first",
    0,
    (),
    returns=ResumptionStats(
        *("off: why", 7, 40, 2, 3, 1, "restored", 0.5, 0.75, PREFETCH),
        calibration=((0.1, 0.2, 3), (0.9, 0.6, 1)),
        hints={"typing:received": 3, "typing:true": 2},
        lru=LruStats(9, 1000, 90, 30, 2, {"cpu": 500, "nvme": 7}, {"cpu": 440}),
    ),
)


class Told:
    def __init__(self, node: NodeStats) -> None:
        self.node = node

    def collect(self) -> list[Metric]:
        return list(tier_metrics([self.node], []))


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("samovar_predictor_turns_total", {}, 40),
        ("samovar_predictor_dropped_total", {}, 2),
        ("samovar_predictor_failures_total", {}, 3),
        ("samovar_predictor", {"kind": "off"}, 1),
        ("samovar_predictor", {"kind": "learned"}, 0),
        ("samovar_predictor_log_loss", {"of": "fallback"}, 0.75),
        ("samovar_prefetch_started_bytes_total", {"why": "pause"}, 3072),
        ("samovar_prefetch_bytes_total", {"outcome": "wasted"}, 1024),
        ("samovar_prefetch_on", {"why": "hazard"}, 0),
        ("samovar_prefetch_regret", {"against": "demand"}, -0.25),
        ("samovar_prefetch_regret", {"against": "pause"}, None),
        ("samovar_lru_lookups_total", {}, 9),
        ("samovar_lru_asked_tokens_total", {}, 1000),
        ("samovar_lru_gained_tokens_total", {}, 90),
        ("samovar_lru_regretted_tokens_total", {}, 30),
        ("samovar_lru_tier_tokens_total", {"tier": "nvme", "of": "policy"}, 7),
        ("samovar_lru_tier_tokens_total", {"tier": "cpu", "of": "lru"}, 440),
        ("samovar_hints_total", {"kind": "typing", "outcome": "true"}, 2),
        ("samovar_predictor_calibration_error", {}, pytest.approx(0.15)),
    ],
)
def test_metrics(name: str, labels: dict[str, str], value: float | None) -> None:
    registry = CollectorRegistry()
    registry.register(Told(NODE))
    assert registry.get_sample_value(name, {**labels, "node": "node-one"}) == value


def test_a_row_of_status() -> None:
    (row,) = returns_rows(Status({}, [], [asdict(NODE)]))
    assert len(row) == len(RETURNS_HEAD)
    assert row[:6] == ("node-one", "off: why", "7", "40", "0.500 (0.750)", "3")
    assert row[6:] == ("pause=3.0 KiB hint=1.0 KiB", "used=2.0 KiB wasted=1.0 KiB", "pause", "-0.250 / -")


def test_a_node_that_has_seen_no_turn_has_no_row() -> None:
    fresh = replace(NODE, returns=ResumptionStats())
    assert returns_rows(Status({}, [], [asdict(fresh), {"node_id": "an older server's"}])) == []


def test_the_table_of_what_the_policy_gains() -> None:
    status = Status(
        {},
        [],
        [
            asdict(NODE),
            asdict(replace(NODE, returns=replace(NODE.returns, lru=LruStats()))),
            {"node_id": "an older server's"},
        ],
    )
    (row,) = lru_rows(status)
    told = dict(zip(LRU_HEAD, row, strict=True))
    assert told["against LRU"] == "+6.00%"
    assert (told["gained tokens"], told["regretted tokens"], told["turns"]) == ("90", "30", "9")
    assert (told["found by tier"], told["LRU by tier"]) == ("cpu=500 nvme=7", "cpu=440")
    assert told["calibration error"] == "0.150"
    assert told["hints"] == "typing:received=3 typing:true=2"
    assert LRU_HEAD in [head for head, _ in all_tables(Status({}, [], [asdict(NODE)]))]
