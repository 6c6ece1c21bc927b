"""The table of kinds: an order, and what is true of each tier."""

from __future__ import annotations

import pytest

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.blocks.tiers import SHARED_TIER, TIERS, TOP_TIER


def test_names_are_the_strings_of_settings_metrics_and_the_api_in_order_of_cost() -> None:
    assert list(TIERS) == ["cpu", "nvme", "s3"]
    assert (TIERS[0], TIERS[-1], TIERS[1:]) == (TOP_TIER, SHARED_TIER, ("nvme", "s3"))
    assert [TIERS.index(name) for name in TIERS] == [0, 1, 2]
    assert "peer" not in TIERS
    with pytest.raises(ValueError, match="not in"):
        TIERS.index("peer")
    with pytest.raises(KeyError):
        TIERS.kind("peer")


def test_what_is_true_of_each_tier() -> None:
    assert (TIERS.local, TIERS.shared) == (("cpu", "nvme"), ("s3",))
    assert [TIERS.kind(name).survives_process for name in TIERS] == [False, True, True]
    # S3 checks what it is given, memory does not rot.
    assert [TIERS.kind(name).verify_writes for name in TIERS] == [False, True, False]
    assert [Placement("cpu", (), lowest).is_durable for lowest in TIERS] == [False, True, True]
