"""The parts of several ingresses, each alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID

from samovar.cache_tiers.node.drain import COMPANIONS
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.cache_tiers.sessions import Quotas, Use
from samovar.cluster.serve.autoscale import (
    LINGER_LOOKS,
    OneIngressPerNode,
    one_ingress_per_node,
    one_per_node,
)
from samovar.cluster.serve.graph import build_front_app
from samovar.cluster.serve.rollout import FRONT_APP, INGRESS_DEPLOYMENT
from samovar.configs.settings import LimitsSettings, Settings
from samovar.replicas.messages import GenerateRequest, Route, SamplingParams
from samovar.replicas.serving.ingress_loads import IngressLoad, IngressLoads, others_load
from samovar.router.auth import ConcurrencyLimit, Need
from samovar.router.ingresses.all_ingresses import ingress_count, merged
from samovar.router.ingresses.tenant_shares import IngressShares
from samovar.router.openai import TooManyRequests
from samovar.router.proxy.known_ingresses import by_session
from samovar.router.routing import DirectoryLost
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.score import Rendezvous
from tests.support.inside import deployment_of, thread_of
from tests.support.services.service import until

PRICE = PrefillPrice(0.0, 0.001, 0.0)


# Which one a session comes to -------------------------------------------------------------------


def test_a_session_keeps_to_its_ingress_when_others_come_and_go() -> None:
    names = [f"ingress-{n}" for n in range(8)]
    before = {f"s{n}": by_session(f"s{n}", names, Rendezvous(names))[0][0] for n in range(800)}
    assert min(Counter(before.values()).values()) > 50, "some get nothing"
    left = names[:-1]
    after = {session: by_session(session, left, Rendezvous(left))[0][0] for session in before}
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, ingress in before.items() if ingress == names[-1]}


def test_every_ingress_is_tried_once() -> None:
    names = [f"ingress-{n}" for n in range(5)]
    groups = by_session("s", names, Rendezvous(names))
    assert [len(group) for group in groups] == [1, 1, 1, 2]
    assert sorted(name for group in groups for name in group) == names
    assert by_session("s", names[:2], Rendezvous(names[:2]))[-1] != []


# How many there are -----------------------------------------------------------------------------


def settings(**parts: Any) -> Settings:
    return Settings.model_validate(parts)


def test_one_on_a_machine_and_one_a_node_of_a_cluster() -> None:
    cluster = {"cluster": {"ray_address": "auto"}}
    assert ingress_count(settings()) == 1
    assert ingress_count(settings(server={"ingress_replicas": 3})) == 3
    assert ingress_count(settings(**cluster)) is None
    assert ingress_count(settings(engine={"device": "cuda"})) == 2
    assert ingress_count(settings(engine={"device": "cuda"}, server={"record": "/tmp/turns"})) == 1
    assert ingress_count(settings(**cluster, server={"record": "/tmp/turns"})) == 1
    assert ingress_count(settings(**cluster, knowledge={"enabled": True})) == 1


def test_they_follow_the_nodes_and_no_news_is_no_change() -> None:
    assert one_per_node(0, 5) == 5
    assert one_per_node(7, 5) == 7
    assert one_per_node(1000, 5) == 64
    counts = iter([dict.fromkeys("abc", True)])
    policy = OneIngressPerNode(lambda: next(counts), look_s=3600)
    policy.look()
    policy._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]  # this test looks itself
    now = SimpleNamespace(target_num_replicas=1)
    assert policy(now)[0] == 3  # type: ignore[arg-type]
    policy.look()  # and cannot
    assert policy(now)[0] == 3  # type: ignore[arg-type]


def test_a_node_without_replicas_needs_none_and_one_whose_replica_starts_again_keeps_it() -> None:
    """Ray removes no node where an actor runs: an ingress would keep each that was ever used."""
    seen = {"head": True, "one": True}
    policy = OneIngressPerNode(lambda: seen, look_s=3600)
    policy._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]  # this test looks itself

    def wanted() -> int:
        policy.look()
        return policy(SimpleNamespace(target_num_replicas=1))[0]  # type: ignore[arg-type]

    assert wanted() == 2
    seen["spare"] = False
    assert wanted() == 2, "nothing runs there yet"
    seen["one"] = False
    assert [wanted() for _ in range(LINGER_LOOKS - 1)] == [2] * (LINGER_LOOKS - 1)
    assert wanted() == 1
    seen["one"] = True
    assert wanted() == 2
    del seen["one"]
    assert wanted() == 1, "a node that is gone does not linger"


def test_an_ingress_is_nobody_who_stays() -> None:
    title = DeploymentID(INGRESS_DEPLOYMENT, FRONT_APP).to_replica_actor_class_name()
    assert title in COMPANIONS


def test_the_counting_thread_ends_with_the_calls() -> None:
    policy = OneIngressPerNode(lambda: dict.fromkeys("abcde", True), look_s=0.001)
    now = SimpleNamespace(target_num_replicas=1)
    until("it has counted", lambda: policy(now)[0] == 5)  # type: ignore[arg-type]
    thread = thread_of(policy)
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("asked", "replicas", "is_scaling"),
    [
        ({}, 1, False),
        ({"server": {"ingress_replicas": 3}}, 3, False),
        ({"cluster": {"ray_address": "auto"}}, None, True),
    ],
)
def test_serve_is_told_so(asked: dict[str, Any], replicas: int | None, is_scaling: bool) -> None:
    app = build_front_app(settings(**asked), None, "model", 1)
    deployment: Any = deployment_of(app)
    on_head = "node:__internal_head__" in deployment.ray_actor_options.get("resources", {})
    assert on_head == (replicas == 1)
    config = deployment._deployment_config
    assert (config.autoscaling_config is not None) == is_scaling
    if replicas is not None:
        assert config.num_replicas == replicas
    assert config.request_router_config.request_router_class.endswith("IngressRouter")
    assert one_ingress_per_node().max_replicas == 64


# Limits -----------------------------------------------------------------------------------------


class Link:
    def __init__(self) -> None:
        self.may: bool | None = True
        self.fault: Exception | None = None
        self.asked: list[tuple[str, int, bytes, Use, Use]] = []

    async def allow(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        self.asked.append((ingress, asked, tenant, wanted, limit))
        if self.fault is not None:
            raise self.fault
        return self.may


def shares(link: Link | None, ingresses: int = 2, **limits: Any) -> tuple[ConcurrencyLimit, IngressShares]:
    limit = ConcurrencyLimit(LimitsSettings(**{"concurrent_per_key": 4, **limits}))
    made = IngressShares(
        "ingress-a", link, limit, str.encode, ingresses_at_start=ingresses, wait_s=5, clock=lambda: 0.0
    )
    return limit, made


async def test_within_its_share_an_ingress_asks_nobody() -> None:
    link = Link()
    limit, own = shares(link)
    with limit.lease("t"), limit.lease("t"):
        await own.check("t")
        assert not link.asked
        with limit.lease("t"):
            await own.check("t")
            assert link.asked == [("ingress-a", 1, b"t", Use(3, 0, 0), own.limit)]
            link.may = False
            with pytest.raises(TooManyRequests):
                await own.check("t")
        assert own.uses() == {b"t": Use(2, 0, 0)}


async def test_answers_and_tokens_are_shared_too() -> None:
    link = Link()
    link.may = False
    limit, own = shares(link, tokens_per_key=100)
    with limit.lease("t") as lease:
        lease.ask(Need(1, 50))
        await own.check("t")
        lease.ask(Need(1, 51))
        with pytest.raises(TooManyRequests, match="2 ingresses"):
            await own.check("t")


@pytest.mark.parametrize("fault", [DirectoryLost("away"), TimeoutError()])
async def test_without_the_directory_the_share_is_all(fault: Exception) -> None:
    link = Link()
    link.fault = fault
    limit, own = shares(link)
    with limit.lease("t"), limit.lease("t"), limit.lease("t"):
        for _ in range(3):
            with pytest.raises(TooManyRequests):
                await own.check("t")
    assert len(link.asked) == 1, "it is not asked for each request"


async def test_the_only_ingress_asks_nobody() -> None:
    limit, alone = shares(None)
    linked, one = shares(link := Link(), ingresses=1)
    for of, own in ((limit, alone), (linked, one)):
        with of.lease("t"), of.lease("t"), of.lease("t"), of.lease("t"):
            await own.check("t")
    assert not link.asked
    one.heard(3)
    assert one.ingresses == 3
    one.heard(0)
    assert one.ingresses == 3, "a directory that does not know yet says nothing"


# While shares are not known yet ------------------------------------------------------------------

LIMIT = 8
SILENT_S = 3.0


class Fleet:
    """Ingresses over one directory, which begins with the first of them; reports go by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.quotas = Quotas(SILENT_S, lambda: self.now_s)
        self.ingresses: dict[str, tuple[ConcurrencyLimit, IngressShares]] = {}
        self.open: list[ExitStack] = []

    async def allow(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        return self.quotas.ask(ingress, asked, tenant, wanted, limit)

    def add(self, name: str, ingresses_at_start: int = 64, unsettled_s: float = 60.0) -> IngressShares:
        limit = ConcurrencyLimit(LimitsSettings(concurrent_per_key=LIMIT))
        made = IngressShares(
            name,
            self,
            limit,
            str.encode,
            ingresses_at_start=ingresses_at_start,
            wait_s=60.0,
            unsettled_s=unsettled_s,
            clock=lambda: self.now_s,
        )
        self.ingresses[name] = limit, made
        return made

    def report(self) -> None:
        """All report, and hear what the directory says."""
        for name, (_, shares) in self.ingresses.items():
            shares.heard(self.quotas.report(name, shares.uses(), shares.asked, shares.told))

    async def request(self, name: str) -> bool:
        """Open a request until the test ends; whether it was admitted."""
        limit, shares = self.ingresses[name]
        with ExitStack() as leases:
            try:
                leases.enter_context(limit.lease("t"))
                await shares.check("t")
            except TooManyRequests:
                return False
            self.open.append(leases.pop_all())
        return True

    def begin(self, name: str, count: int) -> list[asyncio.Task[bool]]:
        return [asyncio.create_task(self.request(name)) for _ in range(count)]


async def steps() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ingresses_at_start", [3, 64])
async def test_a_fresh_start_refuses_nothing_that_fits(ingresses_at_start: int) -> None:
    fleet = Fleet()
    for name in "abc":
        fleet.add(name, ingresses_at_start)
    fleet.report()
    asked = [*fleet.begin("a", LIMIT - 2), *fleet.begin("b", 1), *fleet.begin("c", 1)]
    await steps()
    assert not all(one.done() for one in asked), "the directory cannot say yet: some wait"
    assert all(one.result() for one in asked if one.done())
    fleet.report()
    fleet.now_s += SILENT_S
    fleet.report()
    await steps()
    assert all(one.done() and one.result() for one in asked)
    assert await fleet.request("a") is False, "the limit is a limit again"


async def test_those_that_waited_are_admitted_up_to_the_limit() -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.add(name)
    fleet.report()
    asked = [*fleet.begin("a", LIMIT - 2), *fleet.begin("b", LIMIT - 2)]
    await steps()
    assert not any(one.done() for one in asked)
    fleet.report()  # what waits is open
    fleet.now_s += SILENT_S
    for _ in range(2):
        fleet.report()
        await steps()
    assert all(one.done() for one in asked)
    assert sum(one.result() for one in asked) == LIMIT


async def test_a_new_ingress_waits_for_its_share_and_serves_then() -> None:
    fleet = Fleet()
    fleet.add("a")
    fleet.report()
    fleet.now_s += SILENT_S
    fleet.report()
    new = fleet.add("b")
    ready = asyncio.create_task(new.settled(asyncio.get_running_loop().time() + 60))
    await steps()
    assert not ready.done(), "the directory has not heard of it"
    new.heard(fleet.quotas.report("b", {}, 0, 0))
    (early,) = fleet.begin("b", 1)
    await steps()
    assert not ready.done(), "a has all of the limit, as far as it has said"
    assert not early.done()
    for _ in range(2):
        fleet.report()
        await steps()
    assert ready.done()
    assert early.result()
    assert new.ingresses == 2


async def test_waiting_ends_and_a_lost_directory_ends_it() -> None:
    fleet = Fleet()
    brief = fleet.add("a", unsettled_s=0.0)
    assert await fleet.request("a") is False
    await brief.settled(asyncio.get_running_loop().time())  # and nothing is raised
    link = Link()
    link.may = None
    limit, own = shares(link, ingresses=4)
    own._unsettled_s = 60.0
    with limit.lease("t"), limit.lease("t"):
        waits = asyncio.create_task(own.check("t"))
        await steps()
        assert not waits.done()
        link.fault = DirectoryLost("away")
        own.heard(0)
        with pytest.raises(TooManyRequests):
            await waits


async def test_without_keys_or_others_nobody_waits_for_shares() -> None:
    _, alone = shares(None)
    await alone.settled(0.0)
    bare = ConcurrencyLimit(LimitsSettings(), has_keys=False)
    own = IngressShares("a", Link(), bare, str.encode, ingresses_at_start=4, wait_s=5)
    await own.settled(asyncio.get_running_loop().time() + 3600)


# Loads ------------------------------------------------------------------------------------------


def request(ingress: str, tokens: int, home: str = "", cached: int = 0) -> GenerateRequest:
    route = Route(home=home, cached_tokens=cached, ingress=ingress)
    return GenerateRequest("id", [1] * tokens, SamplingParams(), route=route)


def test_a_replica_tells_what_each_ingress_has_sent() -> None:
    loads = IngressLoads("r1")
    loads.began(1, request("a", 1000))
    loads.began(2, request("a", 1000, home="r1", cached=900))
    loads.began(3, request("b", 500, home="r2", cached=400))
    number, others = others_load(loads.report(PRICE), "a")
    assert (number, others) == (1, IngressLoad(1, pytest.approx(0.5)))
    assert others_load(loads.report(PRICE), "b")[1].wait_s == pytest.approx(1.1)
    loads.computed(1)
    loads.ended(3)
    loads.computed(3)
    assert others_load(loads.report(PRICE), "b") == (3, IngressLoad(2, pytest.approx(0.1)))


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        7,
        {},
        {"ingresses": 1},
        {"ingresses": {"x": [1]}},
        {"number": 1, "ingresses": {"x": [-1, float("nan")]}},
    ],
)
def test_a_report_that_makes_no_sense_says_nothing(nonsense: object) -> None:
    assert others_load(nonsense, "a")[1] == IngressLoad()


def test_what_others_have_sent_counts_until_it_should_be_done() -> None:
    now_s = 0.0
    tracker = ReplicaLoadTracker(lambda: now_s)
    nodes = {"r1": "n", "r2": "n"}
    report = {"number": 5, "ingresses": {"other": [3, 2.0], tracker.ingress: [9, 9.0]}}
    tracker.update_replicas(nodes, {}, {"r1": report, "r2": None})
    views = {view.name: view for view in tracker.views(nodes, lambda name: False)}
    assert (views["r1"].open_requests, views["r1"].wait_s) == (3, 2.0)
    assert (views["r2"].open_requests, views["r2"].wait_s) == (0, 0.0)
    now_s = 1.5
    tracker.update_replicas(nodes, {}, {"r1": report})  # the same report again: it has aged
    assert tracker.views(["r1"], lambda name: False)[0].wait_s == pytest.approx(0.5)
    tracker.check_integrity()
    tracker.update_replicas({"r2": "n"}, {}, {"r1": report})
    tracker.check_integrity()


def herd(*, is_told: bool) -> int:
    """The most that one of four replicas gets of 40 requests from four ingresses, ten at a time."""
    nodes = {f"r{n}": "n" for n in range(4)}
    ingresses = [ReplicaLoadTracker(lambda: 0.0) for _ in range(4)]
    loads = {name: IngressLoads(name) for name in nodes}
    for number in range(40):
        tracker = ingresses[number // 10]  # one ingress after the other
        if is_told:
            tracker.update_replicas(nodes, {}, {name: load.report(PRICE) for name, load in loads.items()})
        else:
            tracker.update_replicas(nodes, {})
        views = tracker.views(nodes, lambda name: False)
        best = min(views, key=lambda view: (view.wait_s, view.open_requests, view.name)).name
        tracker.routed(f"t{number}", best, 1.0 if number % 10 < 3 else 0.5, None)
        loads[best].began(number, request(tracker.ingress, 1000 if number % 10 < 3 else 500))
    return max(len(load._calls) for load in loads.values())


def test_ingresses_do_not_herd_onto_one_replica() -> None:
    assert herd(is_told=True) <= 11 <= herd(is_told=False)


# Metrics ----------------------------------------------------------------------------------------


def test_metrics_of_all_are_one_text() -> None:
    own = b"# HELP a_total x\n# TYPE a_total counter\na_total 1.0\n# HELP g y\n# TYPE g gauge\ng 3.0\n"
    ingresses = {
        "one": b"# TYPE a_total counter\na_total 1.0\n",
        "two": b"# TYPE a_total counter\na_total 2.0\n",
    }
    text = merged(own, ingresses).decode()
    assert 'a_total{ingress="one"} 1.0' in text
    assert 'a_total{ingress="two"} 2.0' in text
    assert "\ng 3.0" in text
    assert text.count("# TYPE a_total") == 1
    assert merged(own, {}) == own


async def test_waiting_for_an_answer_is_bounded() -> None:
    class Stuck(Link):
        async def allow(
            self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use
        ) -> bool | None:
            await asyncio.Event().wait()
            return True

    limit = ConcurrencyLimit(LimitsSettings(concurrent_per_key=4))
    own = IngressShares("a", Stuck(), limit, str.encode, ingresses_at_start=4, wait_s=0.01)
    with limit.lease("t"), limit.lease("t"), pytest.raises(TooManyRequests):
        await own.check("t")
