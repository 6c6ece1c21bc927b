"""When a node's tiers leave, and when a leaving is called off."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.exceptions import ActorDiedError

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.node.drain import NodeLeave, has_refuge, inhabited, is_worth_another
from samovar.cache_tiers.transport.peers import PeerLost
from samovar.configs.sections import NodeSettings, TierSettings
from samovar.replicas.offload.ray_link import RayLink
from tests.support.constants import tuned
from tests.support.nodes.node_harness import sample
from tests.support.nodes.peer_harness import World, home

IDLE_TIMEOUT_S = 60.0


def session(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_it_leaves_when_nobody_has_asked_for_long_and_not_before() -> None:
    leave = NodeLeave(IDLE_TIMEOUT_S, now_s=100.0)
    assert not leave.is_due(159.9)
    assert not leave.empty(159.9)
    assert not leave.go(), "nothing has begun"
    assert leave.is_due(160.0)
    assert not leave.empty(160.0), "whoever lived here may have gone just now"
    assert not leave.empty(219.9)
    assert leave.stage == "staying"
    assert leave.empty(220.0)
    assert leave.stage == "leaving"
    assert leave.go()
    assert leave.stage == "gone"


def test_a_replica_that_asks_puts_it_off() -> None:
    leave = NodeLeave(IDLE_TIMEOUT_S, now_s=0.0)
    assert not leave.used(50.0)
    assert not leave.is_due(100.0)
    assert not leave.used(40.0), "calls come in any order"
    assert leave.is_due(110.0)


def leaving() -> NodeLeave:
    """Since second 60."""
    leave = NodeLeave(IDLE_TIMEOUT_S, now_s=-IDLE_TIMEOUT_S)
    assert not leave.empty(0.0)
    assert leave.empty(60.0)
    return leave


def test_a_replica_that_is_seen_puts_it_off() -> None:
    leave = NodeLeave(IDLE_TIMEOUT_S, now_s=0.0)
    assert not leave.empty(60.0)
    assert not leave.used(61.0)
    assert not leave.empty(121.0)
    assert not leave.empty(180.0)
    assert leave.empty(181.0)


def test_a_replica_that_comes_while_it_leaves_calls_it_off() -> None:
    leave = leaving()
    assert leave.used(61.0)
    assert leave.stage == "staying"
    assert not leave.go()
    assert not leave.empty(62.0)
    assert not leave.empty(121.0)
    assert leave.empty(181.0), "the next time"


def test_once_gone_there_is_no_way_back() -> None:
    leave = leaving()
    assert leave.go()
    assert not leave.used(61.0)
    assert leave.stage == "gone"
    assert not leave.is_due(1000.0)
    assert leave.go(), "whoever asks again is told the same"


def test_zero_is_never() -> None:
    leave = NodeLeave(0.0, now_s=0.0)
    assert not leave.is_due(1e9)
    assert not leave.empty(1e9)
    assert not leave.empty(2e9)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["used", "empty", "go"]), st.floats(0, 100)), max_size=30))
def test_no_call_within_the_time_is_ever_overlooked(calls: list[tuple[str, float]]) -> None:
    leave, now_s, used_s, begun = NodeLeave(IDLE_TIMEOUT_S, 0.0), 0.0, 0.0, False
    for what, later_s in calls:
        now_s += later_s
        was_gone = leave.stage == "gone"
        if what == "used":
            leave.used(now_s)
            used_s, begun = now_s, False
        elif what == "empty":
            begun = leave.empty(now_s)
            assert not begun or now_s - used_s >= 2 * IDLE_TIMEOUT_S
        else:
            assert leave.go() is (was_gone or begun)


def test_of_a_call_and_the_going_only_one_wins() -> None:
    for _ in range(200):
        leave = leaving()
        start, called_off = threading.Barrier(2), list[bool]()

        def ask(leave: NodeLeave = leave, start: Any = start, called_off: list[bool] = called_off) -> None:
            start.wait()
            called_off.append(leave.used(61.0))

        asker = threading.Thread(target=ask)
        asker.start()
        start.wait()
        went = leave.go()
        asker.join()
        assert [went] != called_off


def row(node: str, name: str, state: str = "ALIVE") -> dict[str, Any]:
    return {"Address": {"NodeID": node}, "ActorClassName": name, "State": state}


def test_a_node_is_inhabited_by_what_is_not_there_for_others() -> None:
    replica = "ServeReplica:samovar:Replica"
    rows = [
        row("a", "TierActor"),
        row("a", "ProxyActor"),
        row("a", replica, "DEAD"),
        row("b", replica),
        row("c", replica, "PENDING_CREATION"),
        row("d", replica, "RESTARTING"),
    ]
    assert inhabited(rows) == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("extents", "deletes", "others", "takers", "s3_is_up", "expected"),
    [
        (5, 0, [], [], True, False),  # the last node
        (0, 0, [], [], False, False),
        (5, 0, ["b"], [], False, False),  # nowhere to go with them
        (5, 0, ["b"], [], True, True),
        (5, 0, ["b"], ["b"], False, True),
        (0, 0, ["b"], [], False, True),
        (5, 1, ["b"], ["b"], True, False),  # found by the world, seed 10000098: nobody else deletes it
        (0, 1, ["b"], [], True, False),
    ],
)
def test_it_stays_where_there_is_no_other_place(
    extents: int, deletes: int, others: list[str], takers: list[str], s3_is_up: bool, expected: bool
) -> None:
    assert has_refuge(extents, deletes, others=others, takers=takers, s3_is_up=s3_is_up) is expected


def test_another_drain_is_worth_it_while_the_last_one_came_on() -> None:
    assert is_worth_another({}, {"s3": 3, "left": 2})
    assert is_worth_another({"peer": 3, "left": 2}, {"peer": 4, "left": 3})
    assert not is_worth_another({"left": 2}, {"left": 4}), "nobody takes anything"
    assert not is_worth_another({"peer": 3, "left": 2}, {"peer": 9, "failed": 1, "left": 2}), "all was tried"


def test_the_settings_are_checked() -> None:
    assert NodeSettings().spot_notice == "off"
    for wrong in (
        {"idle_timeout_s": -1},
        {"spot_notice": "gcp"},
        {"spot_notice_url": "file:///etc"},
        {"spot_poll_s": 0},
    ):
        with pytest.raises(ValidationError):
            NodeSettings.model_validate(wrong)


# -- what a drain does for it --------------------------------------------------------------


def test_all_of_a_session_goes_to_one_node() -> None:
    world = World()
    a, b, c = (home(world, name) for name in "abc")
    of_session = {one: [sample(2 * one + n, session=session(one)) for n in range(2)] for one in range(6)}
    for wanted in (one for chains in of_session.values() for one in chains):
        a.store(wanted)
    assert a.node.drain(20.0, ("b", "c")) == {"peer": 12, "left": 0}
    for chains in of_session.values():
        assert len({bool(b.holds(one)) for one in chains}) == 1
        assert all(bool(b.holds(one)) != bool(c.holds(one)) for one in chains)
    assert b.node.stats().tiers[0].extents == c.node.stats().tiers[0].extents == 6


def test_what_one_node_does_not_take_another_may() -> None:
    world = World()
    a, _, c = (home(world, name) for name in "abc")
    take = world.take

    def refuses(node: str, ask: object, timeout_s: float) -> str:
        return "failed:no room" if node == "b" else take(node, ask, timeout_s)  # type: ignore[arg-type]

    world.take = refuses  # type: ignore[assignment]
    for number in range(4):
        a.store(sample(number, session=session(number)))
    assert a.node.drain(20.0, ("b", "c")) == {"peer": 4, "left": 0}
    assert c.node.stats().tiers[0].extents == 4
    world.take = lambda node, ask, timeout_s: "failed:no room"  # type: ignore[method-assign, assignment]
    a.node.drain_over()
    assert a.node.drain(20.0, ("b", "c"))["failed"] == 4


def test_a_drain_that_is_called_off_ends_soon_and_may_begin_anew() -> None:
    world = World()
    a, b = home(world, "a", settings=TierSettings(io_threads=1)), home(world, "b")
    for number in range(4):
        a.store(sample(number, session=session(number)))
    take = world.take

    def one_then_over(node: str, ask: object, timeout_s: float) -> str:
        a.node.drain_over()
        return take(node, ask, timeout_s)  # type: ignore[arg-type]

    world.take = one_then_over  # type: ignore[assignment]
    assert a.node.drain(20.0, ("b",)) == {"peer": 1, "left": 3}
    assert not a.node.stats().draining
    world.take = take
    done = a.node.drain(20.0, ("b",))
    assert done["peer"] == 5, "what is there already counts again"
    assert b.node.stats().tiers[0].extents == 4
    a.node.check_integrity()
    b.node.check_integrity()


# -- a replica whose tiers have left -------------------------------------------------------


class DeadActor:
    """Every call raises, as Ray does for a call to an actor that has gone for good."""

    def __getattr__(self, name: str) -> Any:
        class Method:
            def remote(self, *args: object) -> Any:
                raise ActorDiedError

        return Method()


class Made:
    """Actors that a link has made, one after the other, and its clock."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self.now_s = 100.0
        settings = TierSettings(node=tuned(NodeSettings(), restart_backoff_s_max=8.0))
        self.link = RayLink(self.find, source=None, settings=settings, clock=lambda: self.now_s)

    def find(self) -> Any:
        self.actors.append(DeadActor())
        return self.actors[-1]


def test_a_replica_finds_the_new_actor_when_its_own_has_gone() -> None:
    made = Made()
    assert made.link.stats() is None
    made.now_s += rpc.FIND_S
    assert made.link.stats() is None
    assert len(made.actors) == 2
    made.now_s += 2 * rpc.FIND_S
    with pytest.raises(TimeoutError):
        made.link.clear(Clear(b"t" * 16))
    made.now_s += 2 * rpc.FIND_S
    assert not made.link.ping()
    assert len(made.actors) == 3


def test_a_dead_actor_is_not_replaced_at_every_call() -> None:
    made = Made()
    for _ in range(5):
        assert made.link.stats() is None
    assert len(made.actors) == 1


@pytest.mark.guarantee("G9", "F17")
def test_an_actor_that_cannot_start_is_made_again_less_and_less_often() -> None:
    """Each costs a process and its imports: one per `restart_backoff_s_max`, for any number of requests."""
    made, at_s = Made(), []
    for _ in range(1000):
        before = len(made.actors)
        made.link.stats()
        made.link.ping()
        if len(made.actors) > before:
            at_s.append(made.now_s - 100.0)
        made.now_s += 0.1
    pauses = [round(after - before) for before, after in itertools.pairwise([0.0, *at_s])]
    assert pauses[:5] == [1, 2, 4, 8, 8]
    assert set(pauses[5:]) == {8}


def test_one_that_answers_is_replaced_at_once_when_it_dies_much_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made()
    for pause_s in (1.0, 2.0, 4.0):
        made.link.stats()  # it is dead
        made.now_s += pause_s
        made.link.stats()  # a new one is made
    assert len(made.actors) == 4
    monkeypatch.setattr(DeadActor, "__getattr__", lambda self, name: _Answers())
    monkeypatch.setattr(rpc.ray, "get", lambda answer, timeout: answer)
    made.now_s += 8.0
    assert made.link.ping()
    assert len(made.actors) == 5
    monkeypatch.undo()
    made.link.stats()
    made.now_s += rpc.FIND_S
    made.link.stats()
    assert len(made.actors) == 6


class _Answers:
    def remote(self, *args: object) -> str:
        return "the incarnation"


def test_a_peer_that_is_gone_costs_its_deadline_and_is_then_left_alone(tmp_path: Path) -> None:
    """A node that died without a word: lookups ask it a few times, and stop."""
    world = World()
    a, b = home(world, "a"), home(world, "b")
    wanted = sample(1, placement=Placement(write_behind=()))
    b.store(wanted)
    assert a.look(wanted, "b").spans
    asked: list[float] = []

    def silent(node: str, lookup: object, timeout_s: float) -> Any:
        asked.append(timeout_s)
        a.clock.now_s += timeout_s
        raise PeerLost("its tier actor is dead")

    world.lookup = silent  # type: ignore[method-assign, assignment]
    peer = TierSettings().peer
    for _ in range(10):
        began_s = a.clock.now_s
        assert a.look(wanted, "b").spans == ()
        assert a.clock.now_s - began_s <= peer.lookup_s_max + 1e-9
    assert len(asked) == peer.breaker_failures
    a.clock.now_s += peer.breaker_open_s
    a.look(wanted, "b")
    assert len(asked) == peer.breaker_failures + 1, "one question tells whether it is back"
