"""How many replicas there should be: bounds, growth, calm, and what is done about those that say nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from samovar.cluster.serve.autoscale import (
    DOWN_SHARE,
    STEP_S_MAX,
    Demand,
    KvPressurePolicy,
    ScaleState,
    autoscaling_config,
    replicas_needed,
    wanted_replicas,
)
from samovar.cluster.serve.graph import build_front_app, build_model_app
from samovar.configs.cluster import AutoscalingSettings, ClusterSettings
from samovar.configs.settings import Settings
from samovar.replicas.serving.served_engine import FIELDS, PREFIX, ReplicaLoad
from samovar.router.generation.services import Readiness
from tests.support.inside import deployment_of

IDLE = ReplicaLoad(0, 0, 8, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
LIMITS = AutoscalingSettings(
    enabled=True,
    replicas_min=1,
    replicas_max=5,
    target_utilization=0.5,
    queue_wait_s=2.0,
    resumption_weight=0.5,
    upscale_delay_s=10.0,
    downscale_delay_s=60.0,
    downscale_to_zero_delay_s=120.0,
    metrics_interval_s=5.0,
)
SLEEPY = LIMITS.model_copy(update={"replicas_min": 0})

amounts = st.floats(0, 1e4)
shares = st.floats(0, 3)
loads = st.builds(
    ReplicaLoad,
    running=st.integers(0, 50).map(float),
    waiting=st.integers(0, 500).map(float),
    sequences_max=st.just(8.0),
    prompts=st.integers(0, 500).map(float),
    prefill_s=amounts,
    pool_share=shares,
    pool_share_waiting=shares,
    returns=amounts,
    returns_pool_share=shares,
)
limits = st.builds(
    lambda low, more, **rest: AutoscalingSettings(replicas_min=low, replicas_max=max(1, low + more), **rest),
    st.integers(0, 5),
    st.integers(0, 20),
    target_utilization=st.floats(0.05, 1),
    queue_wait_s=st.floats(0.1, 60),
    resumption_weight=st.sampled_from([0.0, 0.3, 1.0]),
    upscale_delay_s=st.sampled_from([0.0, 10.0]),
    downscale_delay_s=st.sampled_from([0.0, 60.0]),
    downscale_to_zero_delay_s=st.sampled_from([0.0, 120.0]),
)


@dataclass
class Scaler:
    """A deployment that does at once what it is told. `split`: its load, whoever carries it."""

    limits: AutoscalingSettings
    target: int
    now_s: float = 1000.0
    state: ScaleState = field(default_factory=ScaleState)
    open_requests: float = 0.0

    def look(self, loads: list[ReplicaLoad | None]) -> int:
        self.target, self.state = wanted_replicas(
            *(loads, self.now_s, self.limits, self.state),
            target=self.target,
            open_requests=self.open_requests,
        )
        return self.target

    def run(self, loads: list[ReplicaLoad | None], seconds: float, step_s: float = 1.0) -> list[int]:
        """What was wanted when, from now on until `seconds` later."""
        seen = [self.look(loads)]
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            seen.append(self.look(loads))
        return seen


# -- what is needed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "needed"),
    [
        (replace(IDLE, running=4), 1),  # half of 8 places
        (replace(IDLE, running=4, waiting=1), 2),
        (replace(IDLE, running=4, returns=2), 2),  # a return counts half
        (replace(IDLE, running=1, pool_share=0.51), 2),
        (replace(IDLE, waiting=1, pool_share_waiting=1.2), 3),
        (replace(IDLE, running=1, returns=1, returns_pool_share=1.2), 2),
        (replace(IDLE, waiting=3, prompts=3, prefill_s=4.1), 3),
        (replace(IDLE, waiting=1, prompts=1, prefill_s=60.0), 1),  # one prompt is one replica's
        (replace(IDLE, returns=0.4), 0),
        (replace(IDLE, returns=0.6), 1),
        (IDLE, 0),
    ],
)
def test_what_is_needed(load: ReplicaLoad, needed: int) -> None:
    assert replicas_needed(Demand((load,)), LIMITS) == needed


def test_requests_on_their_way_count_and_returns_only_where_they_are_to() -> None:
    assert replicas_needed(Demand((IDLE,), open_requests=9.0), LIMITS) == 3
    dozing = replace(IDLE, returns=50.0, returns_pool_share=2.0)
    assert replicas_needed(Demand((dozing,)), LIMITS) == 7
    assert replicas_needed(Demand((dozing,)), LIMITS.model_copy(update={"resumption_weight": 0.0})) == 0


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(loads, min_size=1, max_size=6), st.data(), limits, amounts)
def test_more_load_never_needs_fewer(
    some: list[ReplicaLoad], data: st.DataObject, limits: AutoscalingSettings, requests: float
) -> None:
    place = data.draw(st.integers(0, len(some) - 1))
    name = data.draw(st.sampled_from([name for name in FIELDS if name != "sequences_max"]))
    more = list(some)
    more[place] = replace(some[place], **{name: getattr(some[place], name) + data.draw(amounts)})
    needed = replicas_needed(Demand(tuple(some), requests), limits)
    assert replicas_needed(Demand(tuple(more), requests), limits) >= needed
    assert replicas_needed(Demand(tuple(some), requests + 1), limits) >= needed
    assert replicas_needed(Demand(tuple(some), requests), limits, share=DOWN_SHARE) >= needed


# -- when it is done -----------------------------------------------------------------------


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(st.lists(st.none() | loads, max_size=4), min_size=1, max_size=12),
    st.lists(st.floats(-1e6, 1e9), min_size=12, max_size=12),
    limits,
    st.integers(0, 40),
    amounts | st.just(math.nan),
)
def test_always_within_bounds_whatever_the_clock_does(
    looks: list[list[ReplicaLoad | None]],
    times_s: list[float],
    limits: AutoscalingSettings,
    target: int,
    requests: float,
) -> None:
    scaler = Scaler(limits, target, open_requests=requests)
    for loads_now, now_s in zip(looks, times_s, strict=False):
        scaler.now_s = now_s
        before = min(max(scaler.target, limits.replicas_min), limits.replicas_max)
        wanted = scaler.look(loads_now)
        assert limits.replicas_min <= wanted <= limits.replicas_max
        if None in loads_now or not loads_now:
            assert wanted >= before, "nobody is sent away while one says nothing"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(loads, min_size=1, max_size=4), limits, st.integers(0, 25))
def test_a_constant_load_settles_and_stays(
    some: list[ReplicaLoad], limits: AutoscalingSettings, target: int
) -> None:
    scaler = Scaler(limits, target)
    known: list[ReplicaLoad | None] = list(some)
    scaler.run(known, 400.0, 4.0)
    assert len(set(scaler.run(known, 400.0, 4.0))) == 1


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(loads, min_size=1, max_size=4), limits, st.integers(1, 25))
def test_nobody_is_left_alone_but_nobody(
    some: list[ReplicaLoad], limits: AutoscalingSettings, target: int
) -> None:
    assume(sum(load.running + load.waiting for load in some) > 0)
    assert min(Scaler(limits, target).run(list(some), 400.0, 4.0)) >= 1


def test_more_are_wanted_for_a_while_first_and_then_the_fewest_of_what_was_wanted() -> None:
    scaler = Scaler(LIMITS, 1)
    busy, busier = replace(IDLE, running=8), replace(IDLE, running=20)
    assert scaler.run([busy], 9.0)[-1] == 1
    assert scaler.run([busier], 1.0)[-1] == 2
    assert scaler.run([busier], 9.0)[-1] == 2
    assert scaler.run([busier], 2.0)[-1] == 5


def test_a_short_peak_changes_nothing() -> None:
    scaler = Scaler(LIMITS, 1)
    for _ in range(5):
        assert scaler.run([replace(IDLE, running=40)], 8.0)[-1] == 1
        assert scaler.run([IDLE], 1.0)[-1] == 1


def test_fewer_are_wanted_for_a_while_first_and_then_the_most_of_what_was_wanted() -> None:
    scaler = Scaler(LIMITS, 5)
    half: list[ReplicaLoad | None] = [replace(IDLE, running=2)] * 4  # two replicas, with a margin three
    assert scaler.run([IDLE] * 4, 30.0)[-1] == 5
    assert scaler.run(half, 29.0)[-1] == 5
    assert scaler.run(half, 2.0)[-1] == 3
    assert scaler.run([IDLE] * 3, 70.0)[-1] == 1


def test_what_would_just_fit_stays() -> None:
    assert replicas_needed(Demand((replace(IDLE, running=4),)), LIMITS) == 1
    assert set(Scaler(LIMITS, 2).run([replace(IDLE, running=4), IDLE], 500.0)) == {2}
    assert Scaler(LIMITS, 2).run([replace(IDLE, running=3), IDLE], 500.0)[-1] == 1


def test_the_last_one_goes_when_nobody_was_there_for_long() -> None:
    scaler = Scaler(SLEEPY, 2)
    assert scaler.run([IDLE, IDLE], 100.0)[-1] == 1
    assert scaler.run([replace(IDLE, running=1)], 5.0)[-1] == 1
    assert scaler.run([IDLE], 119.0)[-1] == 1
    assert scaler.run([IDLE], 2.0)[-1] == 0
    assert scaler.run([], 500.0)[-1] == 0


@pytest.mark.parametrize("somebody", [{"running": 1.0}, {"waiting": 1.0}, {"returns": 0.7}])
def test_the_last_one_stays_for_whoever_runs_waits_or_is_expected(somebody: dict[str, float]) -> None:
    assert set(Scaler(SLEEPY, 1).run([replace(IDLE, **somebody)], 1000.0)) == {1}
    assert Scaler(SLEEPY, 1).run([IDLE], 1000.0)[-1] == 0


def test_nor_does_it_go_while_a_request_is_on_its_way() -> None:
    scaler = Scaler(SLEEPY, 1, open_requests=0.9)
    assert set(scaler.run([IDLE], 1000.0)) == {1}
    scaler.open_requests = 0.05  # somebody asks for statistics now and then
    assert scaler.run([IDLE], 200.0)[-1] == 0


def test_who_says_nothing_keeps_everybody_and_still_there_may_be_more() -> None:
    scaler = Scaler(LIMITS, 3)
    assert scaler.run([IDLE, IDLE, None], 1000.0)[-1] == 3
    assert scaler.run([replace(IDLE, running=30), None, None], 20.0)[-1] == 5
    assert scaler.run([None], 1000.0)[-1] == 5


def test_a_clock_that_jumps_counts_for_little() -> None:
    scaler = Scaler(LIMITS, 3)
    scaler.look([IDLE] * 3)
    for jump_s in (1e6, -1e6, 1e9, -5.0):
        scaler.now_s += jump_s
        assert scaler.look([IDLE] * 3) == 3
    assert scaler.state.fewer_s <= 2 * STEP_S_MAX


# -- in Serve's hands ----------------------------------------------------------------------


def test_garbage_is_no_load() -> None:
    good = IDLE.metrics()
    assert ReplicaLoad.of_metrics(good) == IDLE
    for bad in (math.nan, math.inf, -1.0, "much", None):
        assert ReplicaLoad.of_metrics({**good, PREFIX + "running": bad}) is None  # type: ignore[dict-item]
    assert ReplicaLoad.of_metrics({**good, PREFIX + "sequences_max": 0.0}) is None
    assert ReplicaLoad.of_metrics({name: good[name] for name in list(good)[1:]}) is None


def context(loads: dict[str, ReplicaLoad | None], *, at_s: float, target: int, state: Any = None) -> Any:
    """As Serve makes it, by what replicas have said at `at_s` of their clocks."""
    raw: dict[str, dict[str, list[SimpleNamespace]]] = {}
    for replica, load in loads.items():
        for name, value in ({} if load is None else load.metrics()).items():
            raw.setdefault(name, {})[replica] = [
                SimpleNamespace(timestamp=at_s - 5.0, value=value * 0.5),
                SimpleNamespace(timestamp=at_s, value=value * 1.5),
            ]
    return SimpleNamespace(
        running_replicas=list(loads),
        raw_metrics=raw,
        policy_state=state or {},
        target_num_replicas=target,
        total_num_requests=0.0,
    )


class TestPolicy:
    def setup_method(self) -> None:
        self.now_s = 50.0
        self.policy = KvPressurePolicy(lambda: self.now_s, **LIMITS.model_dump(mode="json"))

    def run(
        self, loads: dict[str, ReplicaLoad | None], target: int, seconds: int, speaks: bool = True
    ) -> int:
        state: dict[str, Any] = {}
        spoke_s = 7.0  # a clock of its own
        for _ in range(seconds):
            self.now_s += 1.0
            spoke_s += speaks
            target, state = self.policy(context(loads, at_s=spoke_s, target=target, state=state))
        return target

    def test_it_reads_the_average_of_what_each_has_said(self) -> None:
        assert self.run({"a": replace(IDLE, running=8)}, 1, 15) == 2
        assert self.run({"a": IDLE, "b": IDLE}, 2, 65) == 1

    def test_who_has_fallen_silent_is_not_known_to_be_idle(self) -> None:
        assert self.run({"a": IDLE, "b": IDLE}, 2, 300, speaks=False) == 2
        assert self.run({"a": IDLE, "b": None}, 2, 300) == 2

    def test_whatever_happens_it_answers(self, caplog: pytest.LogCaptureFixture) -> None:
        broken = context({"a": IDLE}, at_s=1.0, target=3)
        broken.running_replicas = None
        assert self.policy(broken) == (3, {})
        assert "the autoscaling policy failed" in caplog.text


def test_what_serve_is_told() -> None:
    config = autoscaling_config(LIMITS, 2)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 5)
    assert config.metrics_interval_s == LIMITS.metrics_interval_s
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    wanted, _ = policy(context({"a": IDLE}, at_s=1.0, target=2))
    assert wanted == 2


def test_nodes_are_shared_by_as_many_as_may_come() -> None:
    scaling = LIMITS.model_copy(update={"replicas_max": 6})
    assert ClusterSettings(replicas=3).sharing_node(8) == 3
    assert ClusterSettings(replicas=3, replicas_per_node_max=2).sharing_node(8) == 2
    assert ClusterSettings(replicas=3, replica_cpus=4).sharing_node(8) == 2
    assert ClusterSettings(replicas=3, replica_cpus=16).sharing_node(8) == 1
    cluster = ClusterSettings(replicas=9, autoscaling=scaling)
    assert (cluster.sharing_node(8), cluster.replicas_first, cluster.replicas_ready) == (6, 6, 1)
    assert (ClusterSettings(replicas=3).replicas_first, ClusterSettings(replicas=3).replicas_ready) == (3, 3)
    with pytest.raises(ValidationError, match="replicas_min=3 is more than"):
        AutoscalingSettings(replicas_min=3, replicas_max=2)


def test_the_model_application_scales_only_where_it_is_told_to() -> None:
    fixed = deployment_of(build_model_app(Settings(), "/model", 3))
    assert (fixed.num_replicas, fixed._deployment_config.autoscaling_config) == (3, None)
    cluster = ClusterSettings(autoscaling=LIMITS)
    scaled = deployment_of(build_model_app(Settings(cluster=cluster), "/model", 9))
    config = scaled._deployment_config.autoscaling_config
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 5, 5)
    assert scaled._deployment_config.graceful_shutdown_timeout_s == 30.0 + 5.0
    front = deployment_of(build_front_app(Settings(cluster=cluster), "/model", "app", 9))
    assert front._deployment_config.user_config == {"replicas": 1}


def test_with_nobody_there_the_ingress_is_open_if_that_is_how_it_should_be() -> None:
    client: Any = SimpleNamespace()
    assert (Readiness(client, 1).state, Readiness(client, 1).takes_work) == ("loading", False)
    sleeping = Readiness(client, 0)
    assert (sleeping.state, sleeping.takes_work) == ("ok", True)
    sleeping.drain()
    assert (sleeping.state, sleeping.takes_work) == ("draining", False)
