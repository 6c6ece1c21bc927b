"""What a node's watch of its cluster does first, and what of it may wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from samovar.cache_tiers.actors import cluster_watch
from samovar.cache_tiers.actors.cluster_watch import ClusterWatch
from samovar.cache_tiers.node.drain import NodeLeave
from tests.support.inside import look_of

HERE, OTHERS = "0" * 56, [f"{number}" * 56 for number in (1, 2, 3)]


class WatchedNode:
    """Notes what its watch asks of it. `answers`: the nodes that can be met."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: set[str] = set()
        self.peers = SimpleNamespace(meet=self.meet, lost=SimpleNamespace(set=lambda: None))
        self.resumption = SimpleNamespace(is_new=False)

    def meet(self, nodes: Sequence[str]) -> set[str]:
        self.asked.append(("meet", *nodes))
        return self.answers & set(nodes)

    def drain(self, deadline_s: float, peers: Sequence[str]) -> None:
        self.asked.append(("drain", deadline_s > 0, *peers))

    def drain_over(self) -> None:
        self.asked.append(("over",))


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What Ray says: the nodes that drain."""
    said: dict[str, int] = {}
    nodes = [{"NodeID": name, "Alive": True, "Resources": {}} for name in (HERE, *OTHERS)]
    monkeypatch.setattr(cluster_watch.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster_watch.gcs_state, "get_draining_nodes", lambda: said)
    return said


def watch_of(node: WatchedNode) -> ClusterWatch:
    return ClusterWatch(node, HERE, 20.0, NodeLeave(0.0, 0.0), lambda: None)  # type: ignore[arg-type]


def test_a_notice_does_not_wait_for_nodes_that_start_or_hang(draining: dict[str, int]) -> None:
    node = WatchedNode()
    draining[HERE] = int((time.time() + 60) * 1000)
    look_of(watch_of(node))
    assert [what for what, *_ in node.asked] == ["over", "drain", "meet"]


def test_each_look_begins_with_another_stranger(draining: dict[str, int]) -> None:
    """One that hangs takes a look's time: those behind it are met in later ones."""
    node = WatchedNode()
    watch = watch_of(node)
    for _ in OTHERS:
        look_of(watch)
    assert {first for what, first, *_ in node.asked if what == "meet"} == {*OTHERS}
    node.answers = {*OTHERS}
    look_of(watch)
    node.asked.clear()
    look_of(watch)
    assert node.asked == [("meet",)]


def test_a_drain_goes_on_with_the_nodes_that_are_there_by_then(
    draining: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = WatchedNode()
    watch = watch_of(node)
    draining[HERE] = int((time.time() + 60) * 1000)
    look_of(watch)
    draining[OTHERS[0]] = 0
    look_of(watch)
    drains = [asked for asked in node.asked if asked[0] == "drain"]
    assert drains == [("drain", True, *OTHERS), ("drain", False, *OTHERS[1:])]
