"""Of a thousand replicas a few are ranked, and the best of all is among them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID

from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.replicas.messages import GenerateRequest, Receipt, Route, SamplingParams
from samovar.replicas.serving.ingress_loads import IngressLoad
from samovar.router.routing import load_tracker
from samovar.router.routing.load_tracker import LOOKS_MAX, RANKED_ALL_MAX, ReplicaLoadTracker
from samovar.router.routing.request_router import SessionRouter
from samovar.router.routing.roster import OTHERS_MAX
from samovar.router.routing.score import Rendezvous, RoutingRequest
from tests.support.clock import Clock
from tests.support.inside import least_loaded, replicas_in

PREFILL = PrefillPrice(0.01, 1e-3, 0.0)
COUNT, PER_NODE = 200, 8
NAMES = [f"r{number}" for number in range(COUNT)]
NODES = {name: f"n{number // PER_NODE}" for number, name in enumerate(NAMES)}
RING = Rendezvous(NAMES)


def never(_: str) -> bool:
    return False


def loaded(seed: int) -> ReplicaLoadTracker:
    """A busy cluster: every replica has prompts waiting, of other lengths, or, one in ten, none."""
    rng = random.Random(seed)
    one = ReplicaLoadTracker(Clock(100.0), rng)
    one.update_replicas(NODES, dict.fromkeys(NAMES, PREFILL))
    for number, name in enumerate(NAMES):
        for waiting in range(rng.randrange(10) and rng.randrange(1, 4)):
            one.routed(f"{number}.{waiting}", name, rng.uniform(0.0, 3.0), None)
    return one


def first(one: ReplicaLoadTracker, ask: RoutingRequest, names: list[str]) -> tuple[str, float]:
    """The best of `names`, and its expected time to the first token."""
    views = one.views(names, never)
    ranking = one.rank(ask, views, affinity_penalty_s=0.05, load_bound_factor=1.25, replicas=COUNT)
    best = ranking.names[0]
    return best, ranking.work_s[best] + next(view.wait_s for view in views if view.name == best)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("home", ["", "r17"])
def test_the_best_of_a_few_is_as_good_as_the_best_of_all(seed: int, home: str) -> None:
    one = loaded(seed)
    ask = RoutingRequest(f"s{seed}", 2000, 1900 if home else 0, home=home, nodes=("n2",) if home else ())
    some = one.shortlist(ask, NAMES, RING, never)
    assert len(some) <= RANKED_ALL_MAX
    assert first(one, ask, some)[1] <= first(one, ask, NAMES)[1] + 1e-9


def test_home_the_replicas_beside_the_blocks_and_the_first_by_hash_are_among_them() -> None:
    one = loaded(1)
    some = one.shortlist(RoutingRequest("s", 2000, 1900, home="r17", nodes=("n2", "n9")), NAMES, RING, never)
    assert "r17" in some
    assert {NODES[name] for name in some} >= {"n2"}
    assert RING.first("s", 1)[0] in some


def test_where_work_is_equal_the_requests_of_all_ingresses_count() -> None:
    one = ReplicaLoadTracker(Clock(100.0), random.Random(0))
    names = ["r0", "r1", "r2"]
    one.update_replicas({name: NODES[name] for name in names}, dict.fromkeys(names, PREFILL))
    for name, own, others in (("r0", 2, 2), ("r1", 2, 0), ("r2", 0, 3)):
        known = replicas_in(one)[name]
        known.others = IngressLoad(open_requests=others)
        for number in range(own):
            one.routed(f"{name}.{number}", name, 0.0, None)
        least_loaded(one).changed(name, known)
    assert least_loaded(one).first(3, replicas_in(one), names, lambda _: True) == ["r1", "r2", "r0"]


def test_those_that_are_full_leaving_avoided_or_not_asked_for_are_left_out() -> None:
    one = loaded(2)
    one.leaving_nodes = frozenset({"n2"})
    asked = NAMES[: COUNT // 2]
    ask = RoutingRequest("s", 2000, nodes=("n2",), avoid=frozenset(RING.first("s", 1)))
    some = one.shortlist(ask, asked, Rendezvous(asked), lambda name: name.endswith("3"))
    assert some
    assert not [name for name in some if name.endswith("3") or NODES[name] == "n2" or name not in asked]
    assert not set(some) & ask.avoid


def test_idle_replicas_of_another_model_hide_none_of_this_one() -> None:
    one = ReplicaLoadTracker(Clock(100.0), random.Random(1))
    one.update_replicas(NODES, {})
    served, idle = NAMES[:50], "r42"
    for name in served:
        one.routed(f"of {name}", name, 0.1 if name == idle else 3.0, None)
    for session in range(20):
        assert idle in one.shortlist(RoutingRequest(f"s{session}", 2000), served, Rendezvous(served), never)


def test_a_failed_look_at_replicas_loses_none() -> None:
    one = loaded(6)
    heap = least_loaded(one)
    with pytest.raises(KeyError):
        heap.first(1, replicas_in(one), NAMES, dict[str, bool]().__getitem__)
    assert {entry[-1] for entry in heap._heap if heap._is_valid(entry, replicas_in(one))} == set(NAMES)


def test_where_all_are_full_there_is_still_somewhere_to_go() -> None:
    one = loaded(3)
    some = one.shortlist(RoutingRequest("s", 2000, home="r17"), NAMES, RING, lambda _: True)
    assert "r17" in some
    assert len(some) > 1


def test_few_replicas_are_all_ranked() -> None:
    one, few = loaded(4), NAMES[:RANKED_ALL_MAX]
    assert one.shortlist(RoutingRequest("s", 10), few, Rendezvous(few), lambda _: True) == few


def test_idle_replicas_share_what_comes_anew() -> None:
    """Several ingresses that know nothing of each other do not all choose the same."""
    chosen = set()
    for seed in range(40):
        one = ReplicaLoadTracker(Clock(100.0), random.Random(seed))
        one.update_replicas(NODES, {})
        chosen.update(least_loaded(one).first(1, replicas_in(one), NAMES, lambda _: True))
    assert len(chosen) > 20


def test_the_heap_of_loads_does_not_grow_with_requests() -> None:
    one = loaded(5)
    for number in range(20_000):
        one.routed("t", NAMES[number % 7], 1.0, None)
        one.ended(f"t{number}")
    assert len(least_loaded(one)._heap) <= 4 * COUNT + LOOKS_MAX + 1
    one.check_integrity()


names, tickets = st.sampled_from(NAMES[:5]), st.sampled_from("tuvwx")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("routed"), tickets, names, st.floats(0, 5)),
        st.tuples(st.sampled_from(["admitted", "ended", "failed"]), tickets),
        st.tuples(st.just("update"), st.sets(names, min_size=1)),
        st.tuples(st.just("passes"), st.floats(0, 5)),
    ),
    max_size=40,
)


@given(steps)
@example([("routed", "u", "r1", 5e-324), ("routed", "t", "r1", 1.0), ("admitted", "t")])
@settings(derandomize=True, deadline=None, max_examples=200)
def test_loads_are_what_is_open_whatever_happens_in_which_order(history: list[Any]) -> None:
    clock = Clock(100.0)
    one = ReplicaLoadTracker(clock, random.Random(0))
    one.update_replicas(dict.fromkeys(NAMES[:5], "n0"), {})
    for what, *args in history:
        if what == "passes":
            clock.now_s += args[0]
        elif what == "update":
            one.update_replicas(dict.fromkeys(args[0], "n0"), {})
        elif what == "routed":
            one.routed(*args, None)
        elif what == "admitted":
            one.admitted(args[0], Receipt())
        else:
            getattr(one, what)(args[0])
        one.check_integrity()
        waits = {view.name: view.wait_s for view in one.views(NAMES[:5], never)}
        assert all(wait_s >= 0 for wait_s in waits.values())
        assert len(least_loaded(one).first(99, replicas_in(one), NAMES, lambda _: True)) == len(
            replicas_in(one)
        )


async def test_serve_gets_a_rank_for_each_of_the_few_and_one_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_tracker, "BOOK", loaded(6))
    router = SessionRouter.__new__(SessionRouter)
    router.initialize_state()
    router._replica_queue_len_cache = {}
    replicas = [
        SimpleNamespace(
            replica_id=ReplicaID(name, DeploymentID("Replica")),
            node_id=NODES[name],
            routing_stats={},
            replica_metadata={"model": "old" if name == "r3" else "new"},
            max_ongoing_requests=10,
        )
        for name in NAMES
    ]
    for model, home in (("new", "r17"), ("old", "r3")):
        request = GenerateRequest(
            "r", [1] * 64, SamplingParams(max_tokens=1), model=model, route=Route(home=home, cached_tokens=60)
        )
        pending: Any = SimpleNamespace(
            args=[request],
            metadata=SimpleNamespace(session_id="s", internal_request_id=model),
            routing_context=SimpleNamespace(should_backoff=False),
        )
        *ranks, others = await router.choose_replicas(replicas, pending)
        if model == "old":
            assert [one.replica_id.unique_id for one in others] == ["r3"]
            assert not ranks
            continue
        assert all(len(rank) == 1 for rank in ranks)
        ranked = {rank[0].replica_id.unique_id for rank in ranks}
        assert home in ranked
        assert 0 < len(others) <= OTHERS_MAX
        assert not ranked & {one.replica_id.unique_id for one in others}
        assert "r3" not in ranked | {one.replica_id.unique_id for one in others}
