"""What is advised can be done, is no contradiction, and rests on numbers of one and the same time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from samovar.cache_tiers.messages import ResumptionStats, TierStats
from samovar.cache_tiers.pricing import TierPrice
from samovar.configs.sections import GIB, MIB
from samovar.configs.settings import Settings
from samovar.router.observe.diagnosis import Diagnosis, IngressCounts, SettingChange, Snapshot, diagnose
from tests.support.amounts import examples
from tests.support.router.snapshots import (
    CPU,
    FRONT,
    HEALTHY,
    NODE,
    NVME,
    OFF,
    PLANTED,
    REPLICA,
    SERVING,
    with_replica,
    with_settings,
    with_tiers,
)

FULL = replace(NVME, bytes_held=NVME.bytes_max - MIB, evicted_extents=900)
LOSSY = replace(FRONT, returning={"reused": 60_000.0, "recomputed": 90_000.0})


def changes_of(found: Diagnosis) -> list[SettingChange]:
    return [change for finding in found.holding for change in finding.changes if change.setting]


def is_accepted(change: SettingChange) -> bool:
    """Whether the setting takes the value, whatever the others are."""
    *path, last = change.setting.split(".")
    section: Any = Settings()
    for name in path:
        section = getattr(section, name)
    try:
        type(section).__pydantic_validator__.validate_assignment(section.model_copy(), last, change.to)
    except ValidationError as error:
        return not any(found["loc"] == (last,) for found in error.errors())
    return True


counts = st.integers(0, 10**6)
few = st.sampled_from([0, 1, 3, 200, 10**6])
states = st.sampled_from(["up", "open", "half-open", "read-only", "off: not configured"])


def words(*names: str) -> st.SearchStrategy[dict[str, int]]:
    return st.dictionaries(st.sampled_from(names), few, max_size=len(names))


@st.composite
def tiers(draw: st.DrawFn, name: Any) -> TierStats:
    most = draw(st.sampled_from([0, MIB, 8 * GIB]))
    return TierStats(
        name,
        draw(states),
        bytes_held=draw(st.sampled_from([0, most // 2, most])),
        bytes_max=most,
        tokens=draw(few),
        hits_blocks=draw(few),
        evicted_extents=draw(few),
        breaker_opened=draw(few),
        price=draw(st.sampled_from([None, TierPrice(0.0, float("inf")), TierPrice(0.02, 1e5)])),
        medium_free_bytes=draw(st.sampled_from([None, 0, MIB, 80 * GIB])),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    running, total = draw(few), draw(st.sampled_from([0, 1, 1024]))
    active = draw(st.integers(0, total))
    replica = replace(
        REPLICA,
        running=running,
        waiting=draw(few),
        pages_total=total,
        pages_active=active,
        pages_cached=total - active,
        pages_free=0,
        steps=draw(few),
        prompt_tokens=draw(counts),
        prefill_tokens=draw(counts),
        generated_tokens=draw(counts),
        preemptions=draw(few),
        swaps=draw(few),
        refused=draw(few),
        evictions=draw(few),
        finished=draw(words("stop", "length")),
        decisions=draw(words("load", "recompute")),
        misses=draw(words("late", "timeout")),
        slow_lookups=draw(words("nvme", "node")),
        stores=draw(words("taken", "skipped:price", "refused:full", "refused:quota", "dropped:staged")),
        prefill_price=draw(st.sampled_from([(0.0, 0.0, 0.0), (0.01, 1e-3, 1e-8), (0.0, 1e-6, 0.0)])),
    )
    front = IngressCounts(
        prefixes_left={name: float(n) for name, n in draw(words("system", "tools", "other")).items()},
        returning={name: float(n) for name, n in draw(words("reused", "recomputed")).items()},
        affinity={name: float(n) for name, n in draw(words("home", "spilled", "moved")).items()},
        queue_s=float(draw(few)),
        queued=float(draw(few)),
        salts_changed=float(draw(few)),
    )
    returns = ResumptionStats(
        predictor=draw(st.sampled_from(["off: x", "cold", "learned"])), failures=draw(few)
    )
    node = replace(NODE, tiers=tuple(draw(tiers(name)) for name in ("cpu", "nvme", "s3")), returns=returns)
    found = Snapshot(
        100.0,
        draw(st.sampled_from([(), (replica,), (replica, replace(REPLICA, replica_id="b"))])),
        draw(st.sampled_from([(), (node,), (node, replace(NODE, node_id="b" * 16))])),
        draw(st.sampled_from([(), (SERVING,)])),
        draw(st.sampled_from([HEALTHY.settings, {}])),
        front,
        draw(st.sampled_from([(), ("0123456789abcdef",)])),
    )
    if not found.settings:
        return found
    return with_settings(
        found,
        engine__pool_memory_fraction=draw(st.sampled_from([0.3, 0.95])),
        engine__pool_bytes_max=draw(st.sampled_from([None, 8 * GIB])),
        tiers__load_s_max=draw(st.sampled_from([30.0, 600.0])),
        tiers__lookup_share=draw(st.sampled_from([0.5, 100.0])),
        tiers__store_queue_max=draw(st.sampled_from([64, 65536])),
        tiers__tenant_share=draw(st.sampled_from([None, 0.5, 1.0])),
        router__affinity_penalty_s=draw(st.sampled_from([0.0, 60.0])),
        cluster__replicas=draw(st.sampled_from([1, 1000])),
        tiers__enabled=draw(st.booleans()),
    )


@settings(max_examples=examples(120), deadline=None)
@given(snapshots(), st.none() | snapshots())
def test_whatever_is_counted_the_advice_can_be_followed(now: Snapshot, before: Snapshot | None) -> None:
    found = diagnose(now, before)
    json.dumps(found.json(), allow_nan=False)
    ways: dict[str, set[bool]] = {}
    for change in changes_of(found):
        assert change.to != change.now, str(change)
        assert is_accepted(change), str(change)
        if isinstance(change.now, int | float):
            ways.setdefault(change.setting, set()).add(change.to > change.now)
    assert all(len(way) == 1 for way in ways.values()), list(map(str, changes_of(found)))


def test_a_full_tier_on_a_full_disk_is_not_to_be_made_larger() -> None:
    full = replace(with_tiers(CPU, replace(FULL, medium_free_bytes=MIB // 2), OFF), front=LOSSY)
    found = {one.condition: one for one in diagnose(full).holding}
    assert found.keys() == {"evicted", "disk_full"}
    assert not [c for c in found["evicted"].changes if c.setting]
    half = replace(with_tiers(CPU, replace(FULL, medium_free_bytes=4 * GIB), OFF), front=LOSSY)
    (change,) = changes_of(diagnose(half))
    assert FULL.bytes_max < change.to <= FULL.bytes_held + 4 * GIB, "more than the disk has"


def test_a_disk_with_room_whose_tier_is_read_only_is_not_to_be_filled_further() -> None:
    (finding,) = diagnose(with_tiers(CPU, replace(NVME, state="read-only"), OFF)).holding
    assert finding.condition == "disk_full"
    assert not [c for c in finding.changes if c.setting and c.to > c.now]


def test_tiers_that_do_not_answer_are_not_taken_for_tiers_that_are_off() -> None:
    full = replace(with_replica(pages_free=10, pages_cached=900, pages_active=114), nodes=())
    full = with_settings(full, tiers__cpu__bytes_max=64 * GIB)
    silent = replace(full, silent_nodes=(NODE.node_id,))
    assert [one.condition for one in diagnose(silent).holding] == ["breaker_open"]
    (finding,) = diagnose(full).holding
    assert finding.condition == "idle_sessions"
    assert not [c for c in finding.changes if c.setting and c.to < c.now]


def test_a_tier_whose_files_are_still_being_listed_has_no_open_breaker() -> None:
    assert diagnose(with_tiers(CPU, replace(NVME, state="open"), OFF)).holding == ()


@pytest.mark.parametrize("name", ["prompt_changes", "other_namespace"])
def test_prompts_are_compared_with_prompts_also_after_replicas_were_replaced(name: str) -> None:
    """The ingress counts since its own start, a new replica since its."""
    long = replace(FRONT, queued=20_000.0, prefixes_left={"system": 400.0}, salts_changed=400.0)
    assert diagnose(replace(HEALTHY, front=long)).holding == ()
    (cause,) = (cause for of, cause in PLANTED if of == name and cause in ("system", ""))
    fresh = replace(PLANTED[name, cause], replicas=(replace(REPLICA, finished={}),))
    assert f"of {int(FRONT.queued)} prompts" in diagnose(fresh).holding[0].evidence


def test_failures_of_the_predictor_count_in_the_period_that_was_asked_for() -> None:
    failed = with_tiers(CPU, NVME, OFF, returns=replace(NODE.returns, failures=9))
    assert [one.condition for one in diagnose(failed).holding] == ["predictor_off"]
    assert diagnose(replace(failed, at_s=130.0), failed).holding == ()


def test_with_autoscaling_more_replicas_are_its_bound() -> None:
    scaled = with_settings(PLANTED["prefill_bound", ""], cluster__autoscaling__enabled=True)
    (change,) = changes_of(diagnose(scaled))
    assert (change.setting, change.now, change.to) == ("cluster.autoscaling.replicas_max", 4, 5)


def test_a_context_that_does_not_fit_raises_what_bounds_the_pool() -> None:
    small = replace(
        with_replica(refused=3), serving=(replace(SERVING, pages=65, pool_bytes=64 * 16 * 50_000),)
    )
    (by_share,) = changes_of(diagnose(small))
    assert by_share.setting == "engine.pool_memory_fraction"
    (by_bytes,) = changes_of(diagnose(with_settings(small, engine__pool_bytes_max=64 * 16 * 50_000)))
    assert by_bytes.setting == "engine.pool_bytes_max"
    assert by_bytes.to >= SERVING.context_tokens_max * SERVING.bytes_per_token
