"""The sizes of a fleet are computed from what its parts cost."""

from __future__ import annotations

import pytest

from bench import front_scale
from bench.front_scale import RowCost, breaks_at, load, row_cost

COST = RowCost(memory_bytes=1000, wire_bytes=100, record_us=10, send_us=5, take_us=20)


def test_the_actor_is_full_where_it_is_said_to_be() -> None:
    for ingresses in (2, 10, 100):
        size = load(COST, 200, breaks_at(COST, ingresses), ingresses, 1000)
        assert size["actor_cores"] == pytest.approx(1)


def test_every_row_goes_to_every_other_ingress() -> None:
    alone, two, many = (load(COST, 200, 1000, ingresses, 10) for ingresses in (1, 2, 11))
    assert alone["actor_out_mb_s"] == 0
    assert many["actor_out_mb_s"] == pytest.approx(10 * two["actor_out_mb_s"])
    assert two["ingress_routing_cores"] == pytest.approx(alone["ingress_routing_cores"] / 2)


def test_rows_are_measured_on_the_products_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_scale, "ROWS", 4000)
    cost = row_cost()
    assert 300 < cost.memory_bytes < 10_000
    assert 50 < cost.wire_bytes < 1000
    assert min(cost.record_us, cost.send_us, cost.take_us) > 0
