"""An ingress' copy of the session table, and the directory's actor: they agree, and do without each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError, RayActorError

from samovar.cache_tiers.actors.rpc import ActorRef
from samovar.cache_tiers.blocks import session_of
from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.messages import Cleared, SessionHeld
from samovar.cache_tiers.sessions import Use
from samovar.cache_tiers.sessions import actor as session_actor
from samovar.cache_tiers.sessions.actor import SessionActor
from samovar.cache_tiers.sessions.session_table import Sync, Synced
from samovar.configs.settings import RouterSettings
from samovar.replicas.messages import Route
from samovar.router.routing import ray_clients, session_directory
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.ray_clients import RayDirectoryLink
from samovar.router.routing.session_directory import DirectoryLost, SessionDirectory, TurnEnd
from tests.support.inside import is_quiet
from tests.support.router.fake_directory import FakeLink, StillActor
from tests.support.router.router_harness import until

TENANT, OTHER = bytes([1]) * 16, bytes([2]) * 16
S1, S2 = bytes([3]) * 16, bytes([4]) * 16
REPLICAS = {"r1": "n1", "r2": "n2"}


class Desk:
    """One ingress. `now_s`: its clock."""

    def __init__(self, link: FakeLink | None, **router: Any) -> None:
        self.now_s = 1000.0
        self.link = link
        self.tracker = ReplicaLoadTracker()
        self.tracker.update_replicas(REPLICAS, {})
        self.directory = SessionDirectory(link, self.tracker, RouterSettings(**router), lambda: self.now_s)

    def turn(self, session: bytes = S1, replica: str = "r1", tokens: int = 10) -> None:
        self.now_s += 1
        self.directory.turn_ended(TurnEnd(TENANT, session, replica, tokens))

    def home(self, session: bytes = S1) -> str | None:
        row = self.directory.table.get(TENANT, session)
        return None if row is None else row.home

    async def sync(self) -> bool:
        assert self.link is not None
        more = await self.directory.sync(self.link)
        self.directory.table.check_integrity()
        self.link.actor.check_integrity()
        return more

    async def level(self) -> None:
        """Exchange until there is no more."""
        for _ in range(50):
            if not await self.sync():
                return
        raise AssertionError("it never ends")


# What a request is told ------------------------------------------------------------------------


def test_a_route_is_the_home_its_node_and_what_is_there() -> None:
    desk = Desk(None)
    assert desk.directory.route(TENANT, S1) == Route()
    desk.turn(replica="r1", tokens=10)
    desk.turn(replica="r2", tokens=20)
    assert desk.directory.route(TENANT, S1) == Route(
        home="r2", node="n2", cached_tokens=20, peers=("n2", "n1")
    )
    assert desk.directory.route(OTHER, S1) == Route(), "another tenant's"


def test_a_side_request_goes_where_its_session_is_and_moves_nothing() -> None:
    desk, key = Desk(None), b"k" * 32
    talk, title = list(range(40)), [*range(10), 99]

    def lineage(prompt: list[int]) -> bytes:
        return desk.directory.lineage(TENANT, session_of(S1), prompt, key=key, begin_tokens=0)

    main = lineage(talk)
    desk.turn(main, "r1", tokens=41)
    side = lineage(title)
    assert desk.directory.route(TENANT, side) == Route(home="r1", node="n1", cached_tokens=0, peers=("n1",))
    desk.turn(side, "r2", tokens=12)
    assert lineage([*talk, 7]) == main != side == lineage(title)
    assert desk.directory.route(TENANT, main).home == "r1"
    assert desk.directory.route(TENANT, main).cached_tokens == 41
    assert desk.directory.counts()[1]["idle"] == 1, "it is one session"


def test_a_dead_home_leaves_its_node() -> None:
    desk = Desk(None)
    desk.turn(replica="r2")
    desk.tracker.update_replicas({"r1": "n1"}, {})
    assert desk.directory.route(TENANT, S1) == Route(node="n2", cached_tokens=10, peers=("n2",))


@given(
    st.lists(st.tuples(st.sampled_from(["r1", "r2", "gone", ""]), st.integers(0, 9)), max_size=4),
    st.sampled_from([{}, {"r1": "n1"}, {"r1": ""}, REPLICAS]),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_route_is_found_whatever_became_of_the_replicas(
    turns: list[tuple[str, int]], alive: dict[str, str]
) -> None:
    desk = Desk(None)
    for replica, tokens in turns:
        desk.turn(replica=replica, tokens=tokens)
    desk.tracker.update_replicas(alive, {})
    route = desk.directory.route(TENANT, S1)
    assert route.home in {"", *alive}
    assert route.cached_tokens == (turns[-1][1] if turns else 0)
    desk.directory.table.check_integrity()


def test_sessions_are_counted_by_state() -> None:
    desk = Desk(FakeLink())
    desk.turn(S1)
    desk.turn(S2)
    assert desk.directory.hint(TENANT, S2, "typing", 5) is not None
    assert desk.directory.hint(OTHER, S2, "typing", 5) is None
    outcomes, states, unsynced = desk.directory.counts()
    assert states == {"idle": 1, "typing": 1, "tool": 0, "closed": 0}
    assert set(outcomes) == {"home", "moved", "spilled", "new"}
    assert unsynced == 3


# The exchange ----------------------------------------------------------------------------------


async def test_rows_go_both_ways() -> None:
    link = FakeLink()
    one, other = Desk(link), Desk(link)
    one.turn(S1, "r1")
    other.turn(S2, "r2")
    for desk in (one, other, one):
        await desk.level()
    assert (one.home(S2), other.home(S1)) == ("r2", "r1")
    other.now_s = one.now_s
    other.turn(S1, "r2")
    await other.level()
    await one.level()
    assert one.home(S1) == "r2"
    for desk in (one, other):  # what they have just heard is not told again in the same breath
        await desk.level()
    assert one.directory.counts()[2] == other.directory.counts()[2] == 0


async def test_when_all_is_told_nothing_is_said_again() -> None:
    link = FakeLink()
    one, other = Desk(link), Desk(link)
    one.turn()
    for desk in (one, other, one, other):
        await desk.level()
    link.syncs.clear()
    for desk in (one, other):
        assert not await desk.sync()
    assert [(sync.rows, sync.clears) for sync in link.syncs] == [((), ()), ((), ())]


async def test_what_does_not_fit_one_exchange_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_directory, "ROWS_MAX", 2)
    monkeypatch.setattr(session_actor, "ROWS_MAX", 3)
    link = FakeLink()
    one, other = Desk(link), Desk(link)
    for number in range(7):
        one.turn(bytes([number]) * 16)
    assert [await one.sync() for _ in range(3)] == [True, True, True]
    await one.level()
    assert link.actor.check_integrity() == 7
    assert await other.sync()
    await other.level()
    assert len(other.directory.table) == 7


async def test_the_last_part_says_that_it_is_the_last() -> None:
    """`sync` tells whether to go on at once: never without anything left to tell, or it would spin."""
    link = FakeLink()
    desk = Desk(link)
    assert not await desk.sync()
    desk.turn()
    assert not await desk.sync()
    assert not await desk.sync()


async def test_a_lost_directory_is_missed_by_nobody_and_hears_it_all_later() -> None:
    link = FakeLink()
    desk = Desk(link)
    desk.turn(S1)
    await desk.level()
    link.is_lost = True
    desk.turn(S2)
    with pytest.raises(DirectoryLost):
        await desk.sync()
    assert desk.home(S2) == "r1"
    assert desk.directory.counts()[2] == 1
    link.is_lost = False
    await desk.level()
    assert link.actor.check_integrity() == 2
    assert desk.directory.counts()[2] == 0


async def test_a_reply_that_is_lost_costs_nothing() -> None:
    link = FakeLink()
    desk = Desk(link)
    desk.turn(S1)
    whole = link.sync

    async def deaf(sync: Sync) -> Any:
        await whole(sync)
        raise DirectoryLost("the answer did not come")

    link.sync = deaf  # type: ignore[method-assign]
    with pytest.raises(DirectoryLost):
        await desk.sync()
    link.sync = whole  # type: ignore[method-assign]
    await desk.level()
    assert link.actor.check_integrity() == 1


async def test_a_new_incarnation_is_told_everything() -> None:
    link = FakeLink()
    one, other = Desk(link), Desk(link)
    one.turn(S1)
    one.directory.forget(OTHER, None)
    other.turn(S2)
    for desk in (one, other, one):
        await desk.level()
    link.restart()
    assert await one.sync(), "there is more to tell: all of it"
    await one.level()
    assert link.actor.check_integrity() == 2
    reply = link.actor.sync(Sync("", 0))
    assert {row.session for row in reply.rows} == {S1, S2}
    assert [cleared.tenant for cleared in reply.clears] == [OTHER]
    await other.level()
    assert other.home(S1) == one.home(S1) == "r1"


async def test_a_new_incarnation_counts_anew() -> None:
    link = FakeLink()
    one, other = Desk(link), Desk(link)
    for _ in range(5):
        one.turn(S1)
        await one.level()
    link.restart()
    other.turn(S2)
    await other.level()
    await one.level()
    assert one.home(S2) == "r1", "what it has told is no longer counted from there"


async def test_clears_go_both_ways_and_no_copy_brings_a_session_back() -> None:
    link = FakeLink()
    one, other = Desk(link), Desk(link)
    one.turn(S1)
    await one.level()
    await other.level()
    other.now_s = one.now_s + 1
    other.directory.forget(TENANT, S1)
    await other.level()
    assert one.home(S1) is not None
    await one.level()
    assert one.home(S1) is None
    link.restart()  # and hears of the clear again
    for desk in (one, other, one):
        await desk.level()
    assert link.actor.check_integrity() == 0


def test_f26_a_session_begins_anew_also_when_the_clock_was_set_back() -> None:
    desk, copy = Desk(None), Desk(None)
    desk.turn(S1)
    desk.directory.forget(TENANT, None)
    desk.now_s -= 3600
    desk.turn(S1)
    desk.directory.table.check_integrity()
    rows, clears, _ = desk.directory.table.changes(0, 10)
    copy.directory.table.clear(clears[0])
    assert copy.directory.table.merge(rows) == 1, "others believe it"


async def test_draining_nodes_reach_the_book() -> None:
    link = FakeLink()
    desk = Desk(link)
    link.actor._draining = ("n1",)
    await desk.sync()
    views = desk.tracker.views(REPLICAS, lambda name: False)
    assert {view.name: view.is_leaving for view in views} == {"r1": True, "r2": False}
    link.actor._draining = ()
    await desk.sync()
    assert not any(view.is_leaving for view in desk.tracker.views(REPLICAS, lambda name: False))


# The task --------------------------------------------------------------------------------------


async def test_the_task_goes_on_whatever_happens_and_does_not_spin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = FakeLink()
    desk = Desk(link, sync_s=0.02)
    whole, calls = link.sync, 0

    async def counted(sync: Sync) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("nobody expected this")
        return await whole(sync)

    link.sync = counted  # type: ignore[method-assign]
    desk.directory.start()
    desk.directory.start()  # a second time changes nothing
    try:
        await until(lambda: calls >= 3)
        link.is_lost = True
        before = calls
        await until(lambda: calls >= before + 3)
        desk.turn()
        link.is_lost = False
        await until(lambda: link.actor.check_integrity() == 1)
        loop, before = asyncio.get_running_loop(), calls
        began_s = loop.time()
        await until(lambda: calls >= before + 5)
        assert loop.time() - began_s >= 4 * 0.02 * 0.9, "it does not wait between exchanges"
    finally:
        await desk.directory.stop()
    said = [record.getMessage() for record in caplog.records]
    assert sum("does not answer" in line for line in said) == 1, "said once, not every time"
    assert sum("answers again" in line for line in said) == 1
    assert sum("failed" in line for line in said) == 1


async def test_without_news_it_asks_seldom_and_own_news_do_not_wait_for_that() -> None:
    link = FakeLink()
    desk = alone(Desk(link, sync_s=0.01))
    desk.directory._quiet_s = 3600.0
    whole, calls = link.sync, 0

    async def counted(sync: Sync) -> Any:
        nonlocal calls
        calls += 1
        return await whole(sync)

    link.sync = counted  # type: ignore[method-assign]
    desk.directory.start()
    try:
        await until(lambda: is_quiet(desk.directory))
        for turns in range(1, 4):
            desk.turn(tokens=10 * turns)
            await until(lambda: desk.directory.table.seq == desk.directory._sent_seq)
            assert link.actor.check_integrity() == 1
            await until(lambda: is_quiet(desk.directory))
        assert calls <= 12, "it asked without news"
        link.is_lost = True
        desk.turn(tokens=99)
        await until(lambda: desk.directory._is_lost)
        assert not is_quiet(desk.directory)
        link.is_lost = False
        await until(lambda: is_quiet(desk.directory))
        row = link.actor._table.get(TENANT, S1)
        assert row is not None
        assert row.tokens == 99
    finally:
        await desk.directory.stop()


def alone(desk: Desk) -> Desk:
    """One ingress on one node: nobody else has news for it."""
    desk.tracker.update_replicas({"r1": "n1"}, {})
    return desk


async def ingresses_told(desk: Desk, ingresses: int, uses: dict[bytes, Use]) -> None:
    """Synchronise with a directory that says how many ingresses there are, until both agree on it."""
    assert desk.link is not None
    report = Mock(ingress="d", asked=0, told=ingresses, uses=Mock(return_value=uses))
    desk.directory.report = report
    whole = desk.link.actor.sync

    def told(sync: Sync) -> Synced:
        return replace(whole(sync), ingresses=ingresses)

    desk.link.actor.sync = told  # type: ignore[method-assign]
    for _ in range(3):
        await desk.sync()


async def test_what_tenants_have_open_is_reported_as_often_as_ever() -> None:
    desk = alone(Desk(FakeLink(), sync_s=0.01))
    desk.directory._is_quiet = True
    assert not desk.directory._has_news()
    await ingresses_told(desk, 1, {TENANT: Use(1, 1, 1)})
    assert desk.directory._has_news()
    assert not is_quiet(desk.directory)
    await ingresses_told(desk, 1, {})
    assert is_quiet(desk.directory)


@pytest.mark.parametrize("ingresses", [0, 2, 3])
async def test_other_ingresses_are_heard_as_often_as_ever(ingresses: int) -> None:
    """A session may come to any of them next, and hits only where its row is known."""
    desk = alone(Desk(FakeLink(), sync_s=0.01))
    await ingresses_told(desk, ingresses, {})
    assert not is_quiet(desk.directory)


async def test_other_nodes_are_looked_at_as_often_as_ever() -> None:
    """One of them may be leaving."""
    desk = Desk(FakeLink(), sync_s=0.01)
    await ingresses_told(desk, 1, {})
    assert not is_quiet(desk.directory)
    await ingresses_told(alone(desk), 1, {})
    assert is_quiet(desk.directory)


async def test_without_a_link_there_is_no_task() -> None:
    desk = Desk(None)
    desk.directory.start()
    await desk.directory.stop()


# Ray's link ------------------------------------------------------------------------------------


class Method:
    """Of an actor. None: it never answers."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *args: object) -> Any:
        async def call() -> Any:
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer if self._answer is not None else await asyncio.Event().wait()

        return call()


class Handle:
    def __init__(self, answer: Any) -> None:
        self.sync = self.held = self.move = self.clear = Method(answer)


async def test_ray_link_turns_silence_and_death_into_a_lost_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The real one would start a Ray of its own, in this process.
    monkeypatch.setattr(
        ray_clients, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "me")
    )
    assert await RayDirectoryLink(ActorRef(lambda: Handle(3))).move(TENANT, S1, "promote") == 3
    for answer in (RayActorError(), None):
        link = RayDirectoryLink(ActorRef(Handle, handle=Handle(answer)), timeout_s=0.01, clear_s_max=0.01)
        for call in (
            link.sync(Sync("", 0)),
            link.held(TENANT, (S1,)),
            link.move(TENANT, S1, "demote"),
            link.clear(Clear(TENANT)),
        ):
            with pytest.raises(DirectoryLost):
                await call


# The actor -------------------------------------------------------------------------------------


class Tiers:
    """A node's tier actor; a call's "ref" is its outcome. None: it does not answer."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, tuple[object, ...]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        tiers = self

        class Call:
            def remote(self, *args: object) -> Any:
                tiers.asked.append((name, args))
                return (tiers, name, tiers._answers.get(name))

        return Call()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tiers]:
    """Node -> its tier actor, as Ray would know them."""
    known: dict[str, Tiers] = {}

    def get(call: Any, timeout: float | None = None) -> Any:
        answer = call[2]
        if answer is None:
            raise GetTimeoutError
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(calls: Sequence[Any], *, num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(calls)
        return [call for call in calls if call[2] is not None], [call for call in calls if call[2] is None]

    monkeypatch.setattr(session_actor, "tier_actors", lambda: dict(known))
    monkeypatch.setattr(session_actor.ray, "get", get)
    monkeypatch.setattr(session_actor.ray, "wait", wait)
    monkeypatch.setattr(session_actor.gcs_state, "get_draining_nodes", lambda: {"n2": 0, "n1": 0})
    return known


def test_all_nodes_are_asked_and_those_that_are_silent_left_out(nodes: dict[str, Tiers]) -> None:
    nodes["n1"] = Tiers(session_bytes={S1: {"cpu": 1}, S2: {}}, clear=Cleared(1, 2), promote=2)
    nodes["n2"] = Tiers(session_bytes={S1: {"cpu": 2, "nvme": 5}, S2: {}}, clear=RayActorError(), promote=1)
    nodes["n3"] = Tiers()
    actor = StillActor(10, 32, 60.0)
    assert actor.held(TENANT, [S1, S2]) == {S1: {"cpu": 3, "nvme": 5}, S2: {}}
    assert actor.clear(Clear(TENANT)) == {"n1": Cleared(1, 2), "n2": None, "n3": None}
    assert actor.move(TENANT, S1, "promote") == 3, "of all nodes, as it is not known where it is"
    actor._table.turn(TENANT, S1, home="r", node="n1", tokens=1, now_unix_s=1.0)
    assert actor.move(TENANT, S1, "promote") == 2
    assert [name for name, _ in nodes["n2"].asked].count("promote") == 1


def test_the_tiers_tell_a_new_directory_which_sessions_there_are(
    nodes: dict[str, Tiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes["stuck"] = Tiers()
    nodes["n1"] = Tiers(sessions=[SessionHeld(TENANT, S1, {"nvme": 5}, 1, 16, 10.0)])
    looks = 0

    def stop_after_three(timeout: float) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            actor._stopped.set()
        return False

    monkeypatch.setattr(session_actor.threading.Thread, "start", lambda thread: None)
    actor = SessionActor(10, 32, 60.0)
    monkeypatch.setattr(actor._stopped, "wait", stop_after_three)
    actor._watch()
    reply = actor.sync(Sync("", 0))
    assert [(row.session, row.home, row.nodes, row.tokens) for row in reply.rows] == [(S1, "", ("n1",), 16)]
    assert reply.draining == ("n1", "n2")
    assert [name for name, _ in nodes["n1"].asked] == ["sessions"], "once"
    assert len(nodes["stuck"].asked) == 3, "again and again, while the others are heard"
