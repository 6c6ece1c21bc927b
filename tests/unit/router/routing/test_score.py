"""Which replica is best, and what the router's books say of them."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID

from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.replicas.messages import GenerateRequest, Receipt, Route, SamplingParams
from samovar.router.routing import load_tracker
from samovar.router.routing.load_tracker import SUSPECT_S, ReplicaLoadTracker
from samovar.router.routing.request_router import SessionRouter
from samovar.router.routing.score import (
    LoadPrice,
    Ranking,
    ReplicaView,
    RoutingRequest,
    Way,
    missing_work_s,
    rank,
    rendezvous_order,
)
from tests.support.clock import Clock

PREFILL = PrefillPrice(0.01, 1e-3, 0.0)  # a millisecond a token
LOADS: dict[Way, LoadPrice] = {"node": LoadPrice(0.005, 1e-5), "peer": LoadPrice(0.02, 1e-4)}
NAMES = ["a", "b", "c"]


def view(name: str, node: str = "n1", **more: Any) -> ReplicaView:
    given = {"wait_s": 0.0, "open_requests": 0, "prefill": PREFILL} | more
    return ReplicaView(name=name, node=node, **given)


def ranked(ask: RoutingRequest, *views: ReplicaView) -> Ranking:
    return rank(ask, views, LOADS, affinity_penalty_s=0.05, load_bound_factor=1.25)


RETURNING = RoutingRequest("session", prompt_tokens=1100, cached_tokens=1000, home="b", nodes=("n1",))


def test_a_session_goes_home() -> None:
    ranking = ranked(RETURNING, *map(view, NAMES))
    assert ranking.names[0] == "b"
    assert ranking.outcomes["b"] == "home"
    assert ranking.outcomes["a"] == "spilled"


def test_it_leaves_home_when_that_is_quicker_and_only_then() -> None:
    missing = 0.005 + 1000 * 1e-5  # what it takes to load the thousand from the node's tiers
    for wait_s, first in ((missing + 0.04, "b"), (missing + 0.06, "a")):
        ranking = ranked(RETURNING, view("b", wait_s=wait_s), view("a"))
        assert ranking.names[0] == first


@pytest.mark.parametrize("cached", [0, 1000])
def test_a_home_that_was_measured_on_a_busy_machine_is_not_left(cached: int) -> None:
    slow = PrefillPrice(1.0, 10e-3, 0.0)
    ask = replace(RETURNING, cached_tokens=cached)
    ranking = ranked(ask, view("a"), view("b", prefill=slow), view("c", "n2"))
    assert ranking.names[0] == "b"
    assert ranked(ask, view("a"), view("b", prefill=slow, wait_s=20.0)).names[0] == "a"
    assert ranked(ask, view("a", prefill=slow), view("b"), view("c")).names == ("b", "c", "a")


def test_another_node_is_farther_than_another_replica_of_the_same() -> None:
    here, there = view("a", "n1"), view("c", "n2")
    work = [missing_work_s(RETURNING, one, LOADS) for one in (view("b"), here, there)]
    assert work == sorted(work)
    assert ranked(RETURNING, view("b", wait_s=9.0), there, here).names[0] == "a"


def test_computing_is_a_way_too_where_loading_is_dearer() -> None:
    slow: dict[Way, LoadPrice] = {"peer": LoadPrice(60.0, 1.0)}
    assert missing_work_s(RETURNING, view("c", "n2"), slow) == PREFILL.seconds(1100, 0)
    assert missing_work_s(RETURNING, view("c", "n2"), {}) == PREFILL.seconds(1100, 0)


def test_a_dead_home_leaves_its_node_the_nearest() -> None:
    ask = replace(RETURNING, nodes=("n2",))
    ranking = ranked(ask, view("a", "n1"), view("c", "n2"))
    assert ranking.names[0] == "c"
    assert ranking.outcomes["c"] == "moved"


@pytest.mark.parametrize("why", [{"is_full": True}, {"is_leaving": True}])
def test_full_and_leaving_replicas_come_last_but_come(why: dict[str, bool]) -> None:
    ranking = ranked(RETURNING, view("b", **why), view("a", wait_s=100.0), view("c", wait_s=200.0))
    assert ranking.names == ("a", "c", "b")


def test_a_replica_that_failed_this_request_comes_last() -> None:
    assert ranked(replace(RETURNING, avoid=frozenset("b")), *map(view, NAMES)).names[-1] == "b"


@given(st.text(min_size=1, max_size=20), st.permutations(NAMES))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_callers_that_know_nothing_decide_alike(session: str, order: list[str]) -> None:
    ranking = ranked(RoutingRequest(session, prompt_tokens=100), *map(view, order))
    assert ranking.names[0] == rendezvous_order(session, NAMES)[0]
    assert ranking.outcomes[ranking.names[0]] == "new"


def test_new_sessions_do_not_pile_up_where_many_are() -> None:
    order = rendezvous_order("session", NAMES)
    busy = [view(name, open_requests=5 if name == order[0] else 1) for name in NAMES]
    assert ranked(RoutingRequest("session", prompt_tokens=100), *busy).names[0] == order[1]


@given(
    st.lists(
        st.builds(
            view,
            st.sampled_from(NAMES),
            st.sampled_from(["n1", "n2", ""]),
            wait_s=st.floats(0, 100),
            open_requests=st.integers(0, 50),
            is_full=st.booleans(),
            is_leaving=st.booleans(),
        ),
        max_size=3,
        unique_by=lambda one: one.name,
    ),
    st.integers(-1, 2000),
    st.integers(0, 2000),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_every_replica_is_ranked_once_whatever_they_look_like(
    views: list[ReplicaView], prompt: int, cached: int
) -> None:
    ask = RoutingRequest("s", prompt, cached, home="b", nodes=("n1",))
    ranking = ranked(ask, *views)
    assert sorted(ranking.names) == sorted(one.name for one in views)
    assert all(work >= 0 for work in ranking.work_s.values())


def tracker() -> tuple[ReplicaLoadTracker, Clock]:
    clock = Clock(100.0)
    one = ReplicaLoadTracker(clock)
    one.update_replicas(dict.fromkeys(NAMES, "n1"), {"a": PREFILL})
    return one, clock


def waits(one: ReplicaLoadTracker) -> list[float]:
    return [seen.wait_s for seen in one.views(NAMES, lambda name: False)]


def test_a_queue_is_what_was_sent_and_shrinks_with_time() -> None:
    one, clock = tracker()
    one.routed("t1", "a", 2.0, "home")
    one.routed("t2", "a", 1.0, "new")
    assert waits(one) == [3.0, 0.0, 0.0]
    clock.now_s += 1.5
    assert waits(one)[0] == 1.5
    clock.now_s += 0.5
    one.admitted("t1", Receipt())
    assert waits(one)[0] == 1.0, "the second is all that is left"
    clock.now_s += 1.0
    one.admitted("t2", Receipt())
    assert waits(one)[0] == 0.0
    assert [seen.open_requests for seen in one.views(NAMES, lambda name: False)] == [2, 0, 0]
    one.ended("t1")
    one.ended("t2")
    one.ended("t2")
    assert one.outcomes == {"home": 1, "moved": 0, "spilled": 0, "new": 1}
    one.check_integrity()


def test_a_prompt_that_is_late_is_still_in_front_and_so_are_those_behind_it() -> None:
    one, clock = tracker()
    one.routed("t1", "a", 1.0, None)
    one.routed("t2", "a", 3.0, None)
    clock.now_s += 50
    assert waits(one)[0] == pytest.approx(0.2 + 3.0)
    one.ended("t1")  # given up before it was computed
    assert waits(one)[0] == pytest.approx(3.0)
    one.ended("t2")
    assert waits(one)[0] == 0.0
    one.check_integrity()


def test_a_replica_that_takes_longer_than_its_prices_has_a_longer_queue() -> None:
    one, clock = tracker()
    for number in range(30):
        one.routed(f"t{number}", "a", 1.0, None)
        clock.now_s += 3.0
        one.admitted(f"t{number}", Receipt())
        one.ended(f"t{number}")
    one.routed("next", "a", 1.0, None)
    assert waits(one)[0] == pytest.approx(3.0, rel=0.05)
    one.routed("trifle", "b", 0.001, None)
    clock.now_s += 5
    one.admitted("trifle", Receipt())
    one.routed("next at b", "b", 1.0, None)
    assert waits(one)[1] == 1.0, "a trifle says nothing about the pace"
    one.check_integrity()


def test_a_call_that_is_over_is_not_counted_when_serve_chooses_for_it_late() -> None:
    one, _ = tracker()
    one.ended("t")
    one.routed("t", "a", 5.0, None)
    assert waits(one)[0] == 0.0


def test_suspects_and_draining_nodes_are_leaving() -> None:
    one, clock = tracker()
    one.routed("t0", "b", 1.0, None)
    one.failed("t0")
    one.leaving_nodes = frozenset({"n7"})
    one.update_replicas({"a": "n1", "b": "n1", "c": "n7"}, {})
    assert [seen.is_leaving for seen in one.views(NAMES, lambda name: False)] == [False, True, True]
    clock.now_s += SUSPECT_S + 1
    assert [seen.is_leaving for seen in one.views(NAMES, lambda name: False)] == [False, False, True]
    one.routed("t", "b", 1.0, None)
    one.failed("t")
    one.admitted("t", Receipt())
    assert not one.views(["b"], lambda name: False)[0].is_leaving, "it has just answered"


def test_what_a_replica_that_went_away_had_is_forgotten() -> None:
    one, _ = tracker()
    one.routed("t", "b", 5.0, None)
    one.update_replicas({"a": "n1"}, {})
    assert one.views(["b"], lambda name: False)[0].wait_s == 0.0
    one.ended("t")
    one.check_integrity()


def test_load_prices_follow_the_receipts() -> None:
    one, _ = tracker()
    before = one.loads()["node"].seconds(1000)
    for _ in range(40):
        one.routed("t", "a", 0.0, None)
        one.admitted("t", Receipt(tokens={"nvme": 1000}, load_s=1.0))
    assert one.loads()["node"].seconds(1000) == pytest.approx(1.0, rel=0.05)
    assert before == one.loads()["peer"].seconds(1000) == 0.0, "nothing is known before the first"


# -- the shell --------------------------------------------------------------------------------


def replica(name: str, model: str = "", node: str = "n1", full: int = 10) -> Any:
    return SimpleNamespace(
        replica_id=ReplicaID(name, DeploymentID("Replica")),
        node_id=node,
        routing_stats={},
        replica_metadata={"model": model},
        max_ongoing_requests=full,
    )


def pending(request: object, session: str = "s") -> Any:
    return SimpleNamespace(
        args=[request] if request is not None else [],
        metadata=SimpleNamespace(session_id=session, internal_request_id="internal-1"),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def request(**more: Any) -> GenerateRequest:
    return GenerateRequest("r", [1] * 64, SamplingParams(max_tokens=1), **more)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> SessionRouter:
    one = SessionRouter.__new__(SessionRouter)
    one.initialize_state()
    one._replica_queue_len_cache = {}
    monkeypatch.setattr(load_tracker, "BOOK", tracker()[0])
    return one


async def chosen(router: SessionRouter, ask: Any, *replicas: Any) -> list[str]:
    ranks = await router.choose_replicas(list(replicas), ask)
    assert ask.routing_context.should_backoff
    return [one.replica_id.unique_id for some in ranks for one in some]


async def test_the_router_follows_the_route(router: SessionRouter) -> None:
    ask = pending(request(route=Route(home="c", node="n1", cached_tokens=60, ticket="t")))
    assert (await chosen(router, ask, *map(replica, NAMES)))[0] == "c"
    router.on_request_routed(ask, SimpleNamespace(unique_id="c"), None)
    assert load_tracker.BOOK.replica_of("t") == "c"
    router.on_request_completed(SimpleNamespace(unique_id="c"), "internal-1")
    assert load_tracker.BOOK.replica_of("t") == ""
    load_tracker.BOOK.check_integrity()


async def test_without_tiers_a_busy_home_is_left_only_for_what_computing_saves(router: SessionRouter) -> None:
    route = Route(home="c", node="n1", cached_tokens=63, ticket="t")
    load_tracker.BOOK.routed("before", "c", 0.06, None)
    assert (await chosen(router, pending(request(route=route)), *map(replica, NAMES)))[0] != "c"
    router.initialize_state(has_tiers=False)
    assert (await chosen(router, pending(request(route=route)), *map(replica, NAMES)))[0] == "c"


async def test_those_who_choose_in_the_same_moment_see_each_other(router: SessionRouter) -> None:
    firsts = []
    for number in range(6):
        ask = pending(request(route=Route(ticket=f"t{number}")), session="the same for all")
        ask.metadata.internal_request_id = f"internal-{number}"
        firsts.append((await chosen(router, ask, *map(replica, NAMES)))[0])
    assert max(firsts.count(name) for name in NAMES) <= 3


async def test_a_call_that_was_over_before_it_was_routed_leaves_nothing_open(router: SessionRouter) -> None:
    ask = pending(request(route=Route(ticket="t")))
    await chosen(router, ask, *map(replica, NAMES))
    router.on_request_completed(SimpleNamespace(unique_id="a"), "internal-1")
    router.on_request_routed(ask, SimpleNamespace(unique_id="a"), None)
    load_tracker.BOOK.check_integrity()
    assert load_tracker.BOOK.replica_of("t") == ""


async def test_replicas_of_another_model_are_left_out_while_there_are_others(router: SessionRouter) -> None:
    old, new = replica("a", "old"), replica("b", "new")
    assert await chosen(router, pending(request(model="new")), old, new) == ["b"]
    assert await chosen(router, pending(request(model="newer")), old, new) != []


async def test_the_router_never_raises(router: SessionRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(load_tracker.BOOK, "rank", broken)
    assert sorted(await chosen(router, pending(request()), *map(replica, NAMES))) == NAMES
    assert await router.choose_replicas([replica("a")], None) != []


async def test_other_calls_may_go_anywhere(router: SessionRouter) -> None:
    assert sorted(await chosen(router, pending(None), *map(replica, NAMES))) == NAMES


async def test_choosing_is_quick(router: SessionRouter) -> None:
    """Not a measurement (`bench/router.py` is): a bound that a quadratic choice would break."""
    replicas = [replica(f"r{n}") for n in range(64)]
    load_tracker.BOOK.update_replicas({f"r{n}": "n1" for n in range(64)}, {})
    for n in range(500):
        load_tracker.BOOK.routed(f"t{n}", f"r{n % 64}", 0.1, None)
    began_s = time.process_time()
    for n in range(20):
        await chosen(router, pending(request(), f"s{n}"), *replicas)
    assert (time.process_time() - began_s) / 20 < 0.05
