"""Before a tenant is refused it is made sure that the ingresses that fill its limit live."""

from __future__ import annotations

import threading

from samovar.cache_tiers.sessions import Use
from samovar.cache_tiers.sessions.actor import IngressDeaths
from samovar.cache_tiers.sessions.session_table import Sync
from tests.support.router.fake_directory import StillActor

TENANT = bytes(16)
WAIT_S = 60.0


def test_the_dead_are_buried_and_faults_are_no_deaths() -> None:
    buried: list[str] = []

    def is_dead(actor: str) -> bool:
        if actor == "3":
            raise OSError("GCS is away")
        return actor == "2"

    deaths = IngressDeaths(is_dead, buried.append, wait_s=WAIT_S, pause_s=0.0)
    assert not deaths.look({})
    assert not deaths.look({"a": "1", "c": "3"})
    assert deaths.look({"c": "3", "b": "2", "a": "1"})
    assert buried == ["b"]


def test_after_a_look_there_is_a_pause() -> None:
    asked: list[str] = []

    def is_dead(actor: str) -> bool:
        asked.append(actor)
        return False

    deaths = IngressDeaths(is_dead, asked.append, wait_s=WAIT_S, pause_s=3600.0)
    for _ in range(5):
        assert not deaths.look({"a": "1"})
    assert asked == ["1"]


def test_a_cluster_that_does_not_answer_holds_up_nobody() -> None:
    answers, begun = threading.Event(), threading.Event()

    def is_dead(actor: str) -> bool:
        begun.set()
        return answers.wait(WAIT_S)

    buried: list[str] = []
    deaths = IngressDeaths(is_dead, buried.append, wait_s=0.01, pause_s=0.0)
    assert not deaths.look({"a": "1"})
    assert begun.wait(WAIT_S)
    assert not deaths.look({"a": "1"}), "and no second thread waits for it"
    assert sum(thread.name == "ingress-deaths" for thread in threading.enumerate()) == 1
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "ingress-deaths":
            thread.join(WAIT_S)
    assert buried == ["a"]


class Actor(StillActor):
    """`dead`: actors that have died."""

    dead: frozenset[str] = frozenset()

    def _is_dead(self, actor: str) -> bool:
        return actor in self.dead


def test_the_actor_frees_what_a_dead_ingress_had_before_it_refuses() -> None:
    actor = Actor(1000, 32, 60.0, ingress_silent_s=0.0)
    actor._deaths = IngressDeaths(actor._is_dead, actor._bury, wait_s=WAIT_S, pause_s=0.0)
    actor._quotas._silent_s = 3600.0  # no silence has told of it
    limit = Use(4, 4, 40)
    for ingress in ("a", "b"):
        for _ in range(2):
            actor.sync(Sync("", 0, ingress=ingress, ingresses=2, actor=f"actor of {ingress}"))
    actor.sync(Sync("", 0, ingress="b", uses={TENANT: Use(3, 3, 30)}, ingresses=2, actor="actor of b"))
    assert not actor.allow("a", 1, TENANT, Use(3, 3, 30), limit), "b lives"
    actor.dead = frozenset({"actor of b"})
    assert actor.allow("a", 2, TENANT, Use(3, 3, 30), limit)
    assert actor.sync(Sync("", 0, ingress="a", ingresses=2, asked=2, actor="actor of a")).ingresses == 1
    actor.check_integrity()
