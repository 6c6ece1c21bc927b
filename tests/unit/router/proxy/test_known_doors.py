"""Which front door a proxy sends a request to, and what it hears of them from Serve."""

from __future__ import annotations

import random
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from replicas.messages import ReplyTo
from router.proxy import KNOWN, Door, KnownDoors, ServeProxy
from router.proxy.door_router import DoorRouter
from router.proxy.known_doors import ADDRESS
from tests.support.router.linked_replicas import ServeDouble

TO = ReplyTo("127.0.0.1", 1, "s")


def known(*doors: tuple[str, str], node: str = "a") -> KnownDoors:
    made = KnownDoors(random.Random(7))
    made.update([Door(name, there, TO) for name, there in doors], node)
    return made


def names(doors: KnownDoors, session: str = "") -> list[str]:
    return [door.name for door in doors.order(session)]


def test_the_less_busy_of_two_on_this_node_comes_first_and_all_others_after_them() -> None:
    doors = known(("1", "a"), ("2", "b"), ("3", "a"))
    first, second = doors.order("")[:2]
    with doors.busy(first):
        assert names(doors)[0] == second.name
        with doors.busy(second), doors.busy(second):
            assert names(doors)[0] == first.name
    assert {first.name, second.name} == {"1", "3"}
    assert names(doors)[2:] == ["2"]
    assert not doors._open


def test_two_of_many_are_drawn_anew_for_each_request() -> None:
    doors = known(*((str(n), "a") for n in range(10)))
    orders = [names(doors) for _ in range(200)]
    assert all(sorted(order) == sorted(map(str, range(10))) for order in orders)
    assert len({order[0] for order in orders}) == 10


def test_without_one_on_this_node_any_will_do() -> None:
    assert sorted(names(known(("1", "b"), ("2", "c"), node="a"))) == ["1", "2"]
    assert names(KnownDoors()) == []
    assert names(KnownDoors(), "s") == []


def test_a_session_keeps_to_its_front_door_wherever_that_is() -> None:
    doors = known(*((str(n), "a" if n else "b") for n in range(5)))
    homes = {session: names(doors, session) for session in map(str, range(100))}
    assert len({order[0] for order in homes.values()}) == 5
    for session, order in homes.items():
        with doors.busy(doors.order(session)[0]):
            assert names(doors, session) == order
    left = known(*((str(n), "a" if n else "b") for n in range(5) if n != 3))
    for session, order in homes.items():
        assert names(left, session)[0] == next(name for name in order if name != "3")


def replica(name: str, metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), node_id="n", replica_metadata=metadata)


def test_serve_s_router_tells_the_guard_what_front_doors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: seen.append(replicas))
    router = object.__new__(DoorRouter)
    router._deployment_id, router._self_node_id = uuid.uuid4().hex, "n"
    address = {ADDRESS: ["127.0.0.1", 5, "secret"]}
    router.update_replicas([replica("new", address), replica("old", {})])
    doors = {door.name: door for door in KNOWN[router._deployment_id].order("")}
    assert doors == {
        "new": Door("new", "n", ReplyTo("127.0.0.1", 5, "secret")),
        "old": Door("old", "n", None),
    }
    router.update_replicas([])
    assert KNOWN[router._deployment_id].order("") == []
    router.update_replicas([replica("bad", {ADDRESS: "x"})])  # Serve goes on
    assert len(seen) == 3


def test_what_is_not_routed_to_the_front_doors_is_serve_s() -> None:
    async def app(*_: Any) -> None:
        """Never called."""

    double = ServeDouble(app)
    there = KNOWN.setdefault(double.deployment_id, KnownDoors())

    class Middleware:
        _app = double

    serve = ServeProxy(Middleware())  # type: ignore[arg-type]
    assert serve.doors("/v1/models") is there
    double.route = "/other"
    assert serve.doors("/other/x") is None
    double.route = None
    assert serve.doors("/v1/models") is None
    assert ServeProxy(app).doors("/v1/models") is None
    other = ServeDouble(app)  # of another kind: its router is not ours
    assert ServeProxy(other).doors("/") is None
