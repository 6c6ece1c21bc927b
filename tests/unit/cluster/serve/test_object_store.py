"""Ray's object store and the cpu tier: sizes that go together, whatever the machine has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cluster.serve.environment import (
    BESIDE_BYTES,
    MEMORY_SHARE,
    TIER_SHARE,
    FreeMemory,
    StoreTooSmall,
    plan_store,
)
from samovar.cluster.serve.preflight import StartFailed, with_object_store
from samovar.configs.cluster import ClusterSettings
from samovar.configs.sections import CpuTierSettings, TierSettings
from samovar.configs.settings import EngineSettings, Settings

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
    set_to = Settings(tiers=TierSettings(cpu=CpuTierSettings(bytes_max=2 * GIB)))
    given, warning = with_object_store(set_to, 2 * GIB)
    assert given.cluster.object_store_bytes is not None
    assert given.tiers.cpu.bytes_planned < 2 * GIB
    assert "cpu tier" in warning
    off, warning = with_object_store(Settings(tiers=TierSettings(enabled=False)), 2 * GIB)
    assert (off.cluster.object_store_bytes, warning) == (256 * MIB, "")
    wrong = Settings(
        cluster=ClusterSettings(object_store_bytes=GIB),
        tiers=TierSettings(cpu=CpuTierSettings(bytes_max=GIB)),
    )
    with pytest.raises(StartFailed, match=r"cluster\.object_store_bytes"):
        with_object_store(wrong, None)


def sized(settings: Settings, shm_bytes: int | None, memory: FreeMemory | None) -> tuple[int, str]:
    given, warning = with_object_store(settings, shm_bytes, memory)
    assert given.tiers.cpu.bytes_max is not None
    return given.tiers.cpu.bytes_max, warning


def test_a_tier_without_a_size_gets_half_of_what_nothing_else_has_planned_for() -> None:
    """On a GPU machine of 125 GB the preset gave 16 GiB to back a pool of 98.8 (issue 43, 5)."""
    settings = Settings()
    beside = settings.tiers.staged_bytes_max + settings.tiers.swap_bytes_max
    gpu = FreeMemory(116 * GIB, 15 * GIB, has_gpu=True, cores=16)
    assert sized(settings, None, gpu) == ((116 * GIB - beside) // 2, "")
    in_shm, warning = sized(settings, 62 * GIB, gpu)
    assert in_shm == int((0.8 * 62 * GIB - 256 * MIB) * 0.6)
    assert not warning, "nobody asked for more"
    # On a CPU the weights and the pool are in the same memory.
    cpu = FreeMemory(16 * GIB, 4 * GIB, has_gpu=False, cores=4)
    assert sized(settings, None, cpu)[0] == (12 * GIB - int(12 * GIB * 0.3) - beside) // 2


def test_a_tier_without_a_size_follows_the_store_and_a_small_dev_shm_is_told() -> None:
    much = FreeMemory(64 * GIB, GIB, has_gpu=True, cores=8)
    given = Settings(cluster=ClusterSettings(object_store_bytes=GIB))
    assert sized(given, None, much) == (int(0.6 * GIB), "")
    assert sized(given, None, None) == (int(0.6 * GIB), "")
    nbytes, warning = sized(Settings(), 64 * MIB, much)
    assert nbytes == 0
    assert "--shm-size" in warning
    assert sized(Settings(), 64 * GIB, None) == (2 * GIB, ""), "on a cluster nobody looks at this machine"


def test_a_size_that_is_set_stays() -> None:
    much = FreeMemory(64 * GIB, GIB, has_gpu=True, cores=8)
    for nbytes in (0, GIB):
        set_to = Settings(tiers=TierSettings(cpu=CpuTierSettings(bytes_max=nbytes)))
        assert sized(set_to, 64 * GIB, much) == (nbytes, "")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    free_bytes=SIZE,
    weights_bytes=SIZE,
    shm_bytes=st.none() | SIZE,
    has_gpu=st.booleans(),
    pool_bytes_max=st.none() | st.integers(MIB, 1 << 42),
)
def test_a_measured_tier_leaves_room_for_weights_and_pool_and_never_asks_for_more_than_there_is(
    free_bytes: int, weights_bytes: int, shm_bytes: int | None, has_gpu: bool, pool_bytes_max: int | None
) -> None:
    given = Settings(engine=EngineSettings(pool_bytes_max=pool_bytes_max))
    memory = FreeMemory(free_bytes, weights_bytes, has_gpu=has_gpu, cores=4)
    nbytes, warning = sized(given, shm_bytes, memory)
    left_bytes = free_bytes if has_gpu else max(0, free_bytes - weights_bytes)
    pool_bytes = 0 if has_gpu else int(left_bytes * given.engine.pool_memory_fraction)
    pool_bytes = pool_bytes if pool_bytes_max is None else min(pool_bytes, pool_bytes_max)
    assert 0 <= nbytes <= max(0, left_bytes - pool_bytes) / 2
    if shm_bytes is not None:
        assert nbytes <= 0.6 * 0.8 * shm_bytes
    assert not (warning and nbytes), "a tier that fits is not warned of"
