"""Ray's object store and the cpu tier: sizes that go together, whatever the machine has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.serve.environment import BESIDE_BYTES, MEMORY_SHARE, TIER_SHARE, StoreTooSmall, plan_store
from cluster.serve.preflight import StartFailed, with_object_store
from configs.cluster import ClusterSettings
from configs.sections import CpuTierSettings, TierSettings
from configs.settings import Settings

MIB = 1024**2
GIB = 1024**3


def test_the_store_follows_from_the_tier() -> None:
    plan = plan_store(None, 2 * GIB, 64 * GIB)
    assert plan.store_bytes == int(2 * GIB / 0.6) + 256 * MIB
    assert (plan.tier_bytes, plan.warning) == (2 * GIB, "")
    assert plan_store(None, 2 * GIB, None) == plan
    assert plan_store(None, 0, 64 * MIB).store_bytes == 256 * MIB
    assert plan_store(None, 0, 64 * MIB).warning == ""


def test_a_tier_that_does_not_fit_into_memory_is_made_smaller_with_a_warning() -> None:
    plan = plan_store(None, 2 * GIB, 2 * GIB)
    assert 700 * MIB < plan.tier_bytes < 1024 * MIB
    assert plan.store_bytes <= 0.8 * 2 * GIB
    assert "/dev/shm has 2,048 MiB free" in plan.warning
    assert "instead of 2,048 MiB" in plan.warning
    docker = plan_store(None, 2 * GIB, 64 * MIB)
    assert (docker.tier_bytes, docker.store_bytes) == (0, 256 * MIB)
    assert "--shm-size" in docker.warning


def test_configured_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(StoreTooSmall, match="leaves"):
        plan_store(GIB, 2 * GIB, 64 * GIB)
    assert plan_store(4 * GIB, 2 * GIB, 64 * GIB).warning == ""
    assert "Ray may use the disk" in plan_store(4 * GIB, 2 * GIB, GIB).warning


SIZE = st.integers(0, 1 << 45)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tier_bytes=SIZE, free_bytes=st.none() | SIZE)
def test_the_tier_never_fills_the_store_to_where_ray_spills(tier_bytes: int, free_bytes: int | None) -> None:
    plan = plan_store(None, tier_bytes, free_bytes)
    assert plan.tier_bytes <= tier_bytes
    assert plan.tier_bytes <= TIER_SHARE * plan.store_bytes
    if free_bytes is not None:
        assert plan.store_bytes <= max(BESIDE_BYTES, MEMORY_SHARE * free_bytes + 1)
    assert bool(plan.warning) == (plan.tier_bytes < tier_bytes)


def test_settings_are_completed_and_a_contradiction_stops_the_start() -> None:
    given, warning = with_object_store(Settings(), 2 * GIB)
    assert given.cluster.object_store_bytes is not None
    assert given.tiers.cpu.bytes_max < TierSettings().cpu.bytes_max
    assert "cpu tier" in warning
    off, warning = with_object_store(Settings(tiers=TierSettings(enabled=False)), 2 * GIB)
    assert (off.cluster.object_store_bytes, warning) == (256 * MIB, "")
    wrong = Settings(
        cluster=ClusterSettings(object_store_bytes=GIB),
        tiers=TierSettings(cpu=CpuTierSettings(bytes_max=GIB)),
    )
    with pytest.raises(StartFailed, match=r"cluster\.object_store_bytes"):
        with_object_store(wrong, None)
