"""Calls of actors: bounded, in an empty context, and to the new actor when the old one is dead."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from samovar.cache_tiers.actors import rpc, tier
from samovar.cache_tiers.actors.rpc import PeerActors
from samovar.cache_tiers.messages import Fetched, Lookup
from samovar.cache_tiers.transport.peers import PeerError, PeerLate, PeerLost
from samovar.configs.sections import TierSettings

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


class Actor:
    """`outcome`: what every call gives: raised, or returned; `...`: the call never ends."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: object) -> Any:
        self._actor.calls.append((self._name, *args, REQUEST.get()))
        return self._actor.outcome


@pytest.fixture(autouse=True)
def ray_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is its outcome."""

    def get(ref: Any, timeout: float) -> Any:
        assert timeout >= 0
        if ref is ...:
            raise GetTimeoutError
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(rpc.ray, "get", get)
    monkeypatch.setattr(rpc.ray, "wait", lambda refs, num_returns, timeout: None)


def ref_to(*actors: Actor, **more: Any) -> rpc.ActorRef:
    """The actors that are found, one after the other, and then none."""
    found = iter(actors)

    def find() -> Actor:
        try:
            return next(found)
        except StopIteration:
            raise ValueError("no actor has this name") from None

    return rpc.ActorRef(find, **more)


def test_a_call_runs_in_an_empty_context_and_finds_its_actor_once() -> None:
    actor = Actor("yes")
    ref = ref_to(actor)
    REQUEST.set("r1")
    assert [ref.call("ask", 1, timeout_s=1.0), ref.call("ask", 2, timeout_s=1.0)] == ["yes", "yes"]
    assert actor.calls == [("ask", 1, "none"), ("ask", 2, "none")]


def test_failures_of_ray_become_ours() -> None:
    cases = [(..., PeerLate), (ActorDiedError(), PeerLost), (RayActorError(), PeerError)]
    for outcome, kind in cases:
        with pytest.raises(kind) as caught:
            ref_to(Actor(outcome)).call("ask", timeout_s=0.01)
        assert type(caught.value) is kind
    with pytest.raises(PeerLost):
        ref_to().call("ask", timeout_s=1.0)


def test_a_known_actor_that_died_is_looked_up_again_by_the_same_call() -> None:
    old, new = Actor("old"), Actor("new")
    ref = ref_to(old, new)
    assert ref.call("ask", timeout_s=1.0) == "old"
    old.outcome = ActorDiedError()
    assert ref.call("ask", timeout_s=1.0) == "new"
    new.outcome = ActorDiedError()
    with pytest.raises(PeerLost):
        ref.call("ask", timeout_s=1.0)


def test_a_look_up_that_hangs_costs_each_caller_its_time_and_one_thread() -> None:
    go_on, looks = threading.Event(), []

    def find() -> Actor:
        looks.append(threading.current_thread().name)
        go_on.wait(60)
        return Actor("there")

    ref = rpc.ActorRef(find)
    for _ in range(3):
        with pytest.raises(PeerLate):
            ref.call("ask", timeout_s=0.01)
    go_on.set()
    assert ref.call("ask", timeout_s=60.0) == "there"
    assert looks == ["find-actor"]


def test_a_look_up_that_fails_is_made_again() -> None:
    outcomes: list[Any] = [RuntimeError("GCS is away"), Actor("there")]

    def find() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    ref = rpc.ActorRef(find)
    with pytest.raises(PeerError, match="RuntimeError"):
        ref.call("ask", timeout_s=60.0)
    assert ref.call("ask", timeout_s=60.0) == "there"


def test_an_actor_that_cannot_be_made_is_tried_again_after_a_pause() -> None:
    now_s, looks = [0.0], []

    def find() -> Any:
        looks.append(now_s[0])
        raise ValueError("no place for it")

    ref = rpc.ActorRef(find, restart_backoff_s_max=2.0, clock=lambda: now_s[0])
    for _ in range(80):
        with pytest.raises(PeerLost):
            ref.call("ask", timeout_s=60.0)
        now_s[0] += 0.1
    assert [round(at_s) for at_s in looks] == [0, 1, 3, 5, 7]


def test_tell_reaches_only_an_actor_that_is_known_and_raises_nothing() -> None:
    actor = Actor("yes")
    ref = ref_to(actor)
    ref.tell("hear", 1)
    assert actor.calls == []
    ref.call("ask", timeout_s=1.0)
    ref.tell("hear", 2)
    assert actor.calls[-1] == ("hear", 2, "none")


async def test_an_event_loop_waits_for_the_answer_no_longer_than_told() -> None:
    async def answer() -> str:
        return "yes"

    assert await ref_to(Actor(answer())).call_async("ask", timeout_s=60.0) == "yes"
    with pytest.raises(PeerLate):
        await ref_to(Actor(asyncio.get_running_loop().create_future())).call_async("ask", timeout_s=0.01)
    dead, new = asyncio.get_running_loop().create_future(), Actor(answer())
    dead.set_exception(ActorDiedError())
    ref = ref_to(Actor(dead), new)
    with pytest.raises(PeerLost):
        await ref.call_async("ask", timeout_s=60.0)
    assert await ref.call_async("ask", timeout_s=60.0) == "yes"


def test_all_are_asked_and_the_silent_left_out() -> None:
    actors = {"a": Actor(1), "b": Actor(...), "c": Actor(RayActorError()), "d": Actor(4)}
    assert rpc.ask_all(actors, "count", timeout_s=1.0) == {"a": 1, "d": 4}
    assert rpc.ask_all({}, "count", timeout_s=1.0) == {}


def test_peers_are_found_by_name_and_forgotten_when_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tiers:b": Actor(Fetched(0, ref=["bytes"]))}

    def get_actor(name: str) -> Actor:
        if name not in there:
            raise ValueError(name)
        return there[name]

    monkeypatch.setattr(rpc.ray, "get_actor", get_actor)
    peers = PeerActors(lambda node: f"tiers:{node}")
    ask: Any = "ask"
    assert peers.read("b", ask, 60.0) == "bytes"
    peers.check("b", ask)
    peers.check("unknown", ask)
    assert there["tiers:b"].calls == [("peer_read", ask, "none"), ("peer_check", ask, "none")]
    there["tiers:b"].outcome = ActorDiedError()
    for node in ("b", "c"):
        with pytest.raises(PeerLost):
            peers.lookup(node, Lookup(b"", b"", b"", b""), 60.0)
    assert peers._actors == {}


def test_each_method_of_the_tier_actor_has_its_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray runs a method without a group in the actor's one thread: a fetch would hold up every lookup."""
    made: list[tuple[Any, dict[str, int]]] = []
    ray_remote = tier.ray.remote

    def remote(*, concurrency_groups: dict[str, int], **options: Any) -> Any:
        def make(cls: type) -> Any:
            made.append((ray_remote(num_cpus=0)(cls), concurrency_groups))
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None))

        return make

    monkeypatch.setattr(tier.ray, "remote", remote)
    tier.tier_actor(TierSettings(), "00" * 28, tmp_path)
    ((actor, groups),) = made
    methods = actor.__ray_metadata__.method_meta
    group_of = methods.concurrency_group_for_methods
    public = {name for name in methods.methods if not name.startswith("_")}
    assert group_of.keys() == public
    assert set(group_of.values()) == groups.keys()
    assert (group_of["lookup"], group_of["fetch"], group_of["peer_take"]) == ("lookup", "io", "take")
