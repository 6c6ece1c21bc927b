"""Which ingress a proxy sends a request to, and what it hears of them from Serve."""

from __future__ import annotations

import random
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from samovar.replicas.messages import ReplyTo
from samovar.router.proxy import KNOWN, KnownIngresses, ListedIngress, ServeProxy
from samovar.router.proxy.ingress_router import IngressRouter
from samovar.router.proxy.known_ingresses import ADDRESS
from tests.support.router.linked_replicas import ServeDouble

TO = ReplyTo("127.0.0.1", 1, "s")


def known(*ingresses: tuple[str, str], node: str = "a") -> KnownIngresses:
    made = KnownIngresses(random.Random(7))
    made.update([ListedIngress(name, there, TO) for name, there in ingresses], node)
    return made


def names(ingresses: KnownIngresses, session: str = "") -> list[str]:
    return [ingress.name for ingress in ingresses.order(session)]


def test_the_less_busy_of_two_on_this_node_comes_first_and_all_others_after_them() -> None:
    ingresses = known(("1", "a"), ("2", "b"), ("3", "a"))
    first, second = ingresses.order("")[:2]
    with ingresses.busy(first):
        assert names(ingresses)[0] == second.name
        with ingresses.busy(second), ingresses.busy(second):
            assert names(ingresses)[0] == first.name
    assert {first.name, second.name} == {"1", "3"}
    assert names(ingresses)[2:] == ["2"]
    assert not ingresses._open


def test_two_of_many_are_drawn_anew_for_each_request() -> None:
    ingresses = known(*((str(n), "a") for n in range(10)))
    orders = [names(ingresses) for _ in range(200)]
    assert all(sorted(order) == sorted(map(str, range(10))) for order in orders)
    assert len({order[0] for order in orders}) == 10


def test_without_one_on_this_node_any_will_do() -> None:
    assert sorted(names(known(("1", "b"), ("2", "c"), node="a"))) == ["1", "2"]
    assert names(KnownIngresses()) == []
    assert names(KnownIngresses(), "s") == []


def test_a_session_keeps_to_its_ingress_wherever_that_is() -> None:
    ingresses = known(*((str(n), "a" if n else "b") for n in range(5)))
    homes = {session: names(ingresses, session) for session in map(str, range(100))}
    assert len({order[0] for order in homes.values()}) == 5
    for session, order in homes.items():
        with ingresses.busy(ingresses.order(session)[0]):
            assert names(ingresses, session) == order
    left = known(*((str(n), "a" if n else "b") for n in range(5) if n != 3))
    for session, order in homes.items():
        assert names(left, session)[0] == next(name for name in order if name != "3")


def replica(name: str, metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), node_id="n", replica_metadata=metadata)


def test_serve_s_router_tells_the_guard_what_ingresses_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: seen.append(replicas))
    router = object.__new__(IngressRouter)
    router._deployment_id, router._self_node_id = uuid.uuid4().hex, "n"
    address = {ADDRESS: ["127.0.0.1", 5, "secret"]}
    router.update_replicas([replica("new", address), replica("old", {})])
    ingresses = {ingress.name: ingress for ingress in KNOWN[router._deployment_id].order("")}
    assert ingresses == {
        "new": ListedIngress("new", "n", ReplyTo("127.0.0.1", 5, "secret")),
        "old": ListedIngress("old", "n", None),
    }
    router.update_replicas([])
    assert KNOWN[router._deployment_id].order("") == []
    router.update_replicas([replica("bad", {ADDRESS: "x"})])  # Serve goes on
    assert len(seen) == 3


def test_what_is_not_routed_to_the_ingresses_is_serve_s() -> None:
    async def app(*_: Any) -> None:
        """Never called."""

    double = ServeDouble(app)
    there = KNOWN.setdefault(double.deployment_id, KnownIngresses())

    class Middleware:
        _app = double

    serve = ServeProxy(Middleware())  # type: ignore[arg-type]
    assert serve.ingresses("/v1/models") is there
    double.route = "/other"
    assert serve.ingresses("/other/x") is None
    double.route = None
    assert serve.ingresses("/v1/models") is None
    assert ServeProxy(app).ingresses("/v1/models") is None
    other = ServeDouble(app)  # of another kind: its router is not ours
    assert ServeProxy(other).ingresses("/") is None
