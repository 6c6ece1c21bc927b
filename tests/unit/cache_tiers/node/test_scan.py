"""When a shared tier is looked through because a node is silent."""

from __future__ import annotations

from samovar.cache_tiers.node.scan import AGAIN_S, NODES_MAX, RescanCoalescer


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []
        self.works = True
        self.looks = RescanCoalescer(self._look, lambda: self.now_s)

    def _look(self, wait_s: float) -> bool:
        self.waits.append(wait_s)
        return self.works

    def after(self, **silent: bool) -> bool:
        done = self.looks.after(silent, 0.5)
        self.looks.check_integrity()
        return done


def test_one_look_is_enough_for_a_node_that_is_lost() -> None:
    world = World()
    assert world.after(a=True)
    assert not world.after(a=True)
    assert world.waits == [0.5]
    assert world.after(a=True, b=True)  # another one


def test_a_look_that_saw_not_all_is_taken_again() -> None:
    world = World()
    world.works = False
    assert not world.after(a=True)
    world.works = True
    assert world.after(a=True)


def test_a_node_that_only_does_not_answer_is_looked_for_now_and_then() -> None:
    world = World()
    assert world.after(a=False)
    assert not world.after(a=False)
    world.now_s += AGAIN_S
    assert world.after(a=False)
    assert world.after(a=True)  # now it is lost: what it put there last
    world.now_s += AGAIN_S
    assert not world.after(a=False)


def test_nobody_silent_is_no_reason() -> None:
    world = World()
    assert not world.after()
    assert world.waits == []


def test_what_is_remembered_is_bounded() -> None:
    world = World()
    for number in range(NODES_MAX + 10):
        world.looks.after({f"node-{number}": True}, 0.5)
    world.looks.check_integrity()
    assert not world.after(**{f"node-{NODES_MAX + 9}": True})
    assert world.after(**{"node-0": True})  # forgotten
