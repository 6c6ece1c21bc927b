"""The session table: copies of it agree, whatever order their news came in."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from samovar.cache_tiers.messages import SessionHeld
from samovar.cache_tiers.sessions.session_table import NODES_MAX, SessionRow, SessionsCleared, SessionTable

TENANTS = [bytes([1]) * 16, bytes([2]) * 16]
SESSIONS = [bytes([n]) * 16 for n in range(3, 7)]
REPLICAS = {"r1": "n1", "r2": "n2", "r3": "n1"}


def table(sessions_max: int = 100) -> SessionTable:
    return SessionTable(sessions_max)


def turn(
    one: SessionTable, session: bytes, home: str, now: float = 1.0, tenant: bytes = TENANTS[0]
) -> SessionRow:
    return one.turn(tenant, session, home=home, node=REPLICAS[home], tokens=10, now_unix_s=now)


def test_a_turn_makes_its_replica_the_home_and_its_node_the_first() -> None:
    one = table()
    turn(one, SESSIONS[0], "r1")
    row = turn(one, SESSIONS[0], "r2", 2.0)
    assert (row.home, row.nodes, row.turns, row.generation) == ("r2", ("n2", "n1"), 2, 2)
    one.check_integrity()


def test_the_idlest_sessions_go_when_there_are_too_many() -> None:
    one = table(2)
    for number, session in enumerate(SESSIONS[:3]):
        turn(one, session, "r1", float(number))
    assert one.get(TENANTS[0], SESSIONS[0]) is None
    assert [view.main.session for view in one.page(TENANTS[0], 3)] == [SESSIONS[2], SESSIONS[1]]
    one.check_integrity()


def test_tenants_rows_are_their_own() -> None:
    one = table()
    turn(one, SESSIONS[0], "r1")
    turn(one, SESSIONS[0], "r2", tenant=TENANTS[1])
    assert [row.home for row in one.of(TENANTS[0])] == ["r1"]
    assert len(one.of(None)) == 2


def test_an_older_generation_changes_nothing() -> None:
    one = table()
    old = turn(one, SESSIONS[0], "r1")
    new = turn(one, SESSIONS[0], "r2", 2.0)
    assert one.merge([old]) == 0
    assert one.get(*new.key) == new


def test_what_was_cleared_stays_cleared_whoever_still_tells_of_it() -> None:
    one, other = table(), table()
    row = turn(one, SESSIONS[0], "r1", 5.0)
    other.merge([row])
    assert one.clear(SessionsCleared(TENANTS[0], None, 6.0)) == 1
    assert one.merge(list(other)) == 0
    other.clear(SessionsCleared(TENANTS[0], None, 6.0))
    assert len(one) == len(other) == 0
    turn(one, SESSIONS[0], "r1", 7.0)
    assert len(one) == 1, "a session that begins afterwards is a new one"
    one.check_integrity()


def test_changes_come_in_parts_and_end() -> None:
    one = table()
    for session in SESSIONS:
        turn(one, session, "r1")
    one.clear(SessionsCleared(TENANTS[1], None, 1.0))
    seen: list[SessionRow] = []
    clears = 0
    since = 0
    for _ in range(10):
        rows, cleared, seq = one.changes(since, 2)
        seen += rows
        clears += len(cleared)
        if seq == since:
            break
        since = seq
    assert {row.session for row in seen} == set(SESSIONS)
    assert clears == 1
    assert since == one.seq


def test_a_part_of_the_changes_looks_at_no_more_than_that_part() -> None:
    """An ingress that comes new reads all rows in packets: each row is looked at once, not once a packet."""
    one, packet = SessionTable(5000), 100
    for number in range(2000):
        turn(one, number.to_bytes(8, "big") * 2, "r1")
    for number in range(0, 2000, 3):
        turn(one, number.to_bytes(8, "big") * 2, "r2", 2.0)
    looked, live = 0, one._changed._live

    def counted(begin: int) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        nonlocal looked
        for found in live(begin):
            looked += 1
            yield found

    one._changed._live = counted  # type: ignore[method-assign]
    seen: list[SessionRow] = []
    since = 0
    while since < one.seq:
        rows, _, since = one.changes(since, packet)
        seen += rows
    assert len(seen) == len({row.key for row in seen}) == 2000
    assert looked <= 2000 + 2 * (2000 // packet + 1)


def test_what_tiers_hold_is_only_news_where_nothing_was_known() -> None:
    one = table()
    known = turn(one, SESSIONS[0], "r1", 50.0)
    held = [SessionHeld(TENANTS[0], session, {"nvme": 5}, 1, 16, 10.0) for session in SESSIONS[:2]]
    one.held("n9", held, 60.0)
    first, second = one.get(*known.key), one.get(TENANTS[0], SESSIONS[1])
    assert first is not None
    assert (first.home, first.nodes, first.turns) == ("r1", ("n1", "n9"), 1)
    assert second is not None
    assert (second.home, second.nodes, second.tokens, second.used_unix_s) == ("", ("n9",), 16, 50.0)
    one.check_integrity()


def test_who_has_taken_the_blocks_of_a_node_that_left_is_known_though_the_row_is_full() -> None:
    one = table()
    for number in range(3):
        one.turn(TENANTS[0], SESSIONS[0], home=f"r{number}", node=f"n{number}", tokens=10, now_unix_s=50.0)
    held = [SessionHeld(TENANTS[0], SESSIONS[0], {"nvme": 5}, 1, 16, 10.0)]
    one.held("n9", held, 60.0, {"n0", "n1", "n2", "n9"})
    full = one.get(TENANTS[0], SESSIONS[0])
    assert full is not None
    assert full.nodes == ("n2", "n1", "n0"), "all of them may still have it"
    one.held("n9", held, 60.0, {"n0", "n1", "n9"})
    learned = one.get(TENANTS[0], SESSIONS[0])
    assert learned is not None
    assert learned.nodes == ("n1", "n0", "n9")
    assert learned.generation > full.generation, "or the other copies never hear of it"
    one.check_integrity()


def test_a_hint_is_a_change_and_the_next_turn_ends_it() -> None:
    one = table()
    assert one.hint(TENANTS[0], SESSIONS[0], "typing", None) is None
    turn(one, SESSIONS[0], "r1")
    row = one.hint(TENANTS[0], SESSIONS[0], "tool", 99.0)
    assert row is not None
    assert (row.state, row.returns_unix_s, row.generation) == ("tool", 99.0, 2)
    assert turn(one, SESSIONS[0], "r1").state == "idle"


rows = st.builds(
    SessionRow,
    tenant=st.sampled_from(TENANTS),
    session=st.sampled_from(SESSIONS),
    generation=st.integers(1, 3),
    home=st.sampled_from(list(REPLICAS)),
    nodes=st.sampled_from([(), ("n1",), ("n2", "n1")]),
    turns=st.integers(0, 2),
    created_unix_s=st.sampled_from([1.0, 5.0]),
    used_unix_s=st.sampled_from([1.0, 2.0]),
)
clears = st.builds(
    SessionsCleared,
    tenant=st.sampled_from(TENANTS),
    session=st.sampled_from([None, *SESSIONS]),
    unix_s=st.sampled_from([0.5, 3.0, 6.0]),
)


@given(st.lists(st.one_of(rows, clears), max_size=12), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_f28_copies_converge_whatever_the_order_and_however_often(
    news: list[SessionRow | SessionsCleared], rng: random.Random
) -> None:
    """A partition is news that comes late; the directory converges by generation."""
    copies = []
    for _ in range(2):
        told = news + rng.sample(news, len(news) // 2)
        rng.shuffle(told)
        one = table()
        for item in told:
            one.merge([item]) if isinstance(item, SessionRow) else one.clear(item)
            one.check_integrity()
        copies.append({row.key: row for row in one})
    assert copies[0] == copies[1]


def test_f28_fires_when_rows_are_taken_in_the_order_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionRow, "beats", lambda self, other: True)
    old = SessionRow(TENANTS[0], SESSIONS[0], 1, "r1")
    new = SessionRow(TENANTS[0], SESSIONS[0], 2, "r2")
    one, other = table(), table()
    one.merge([old, new])
    other.merge([new, old])
    assert list(one) != list(other)


class Cluster(RuleBasedStateMachine):
    """Two ingresses and the directory's actor, exchanging as they do, with replies that get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = [table(), table()]
        self.actor = table()
        self.sent = [0, 0]
        self.since = [0, 0]
        self.now = 0.0

    @rule(at=st.integers(0, 1), session=st.sampled_from(SESSIONS), home=st.sampled_from(list(REPLICAS)))
    def turn(self, at: int, session: bytes, home: str) -> None:
        self.now += 1
        turn(self.copies[at], session, home, self.now)

    @rule(at=st.integers(0, 1), session=st.sampled_from([None, *SESSIONS]))
    def clear(self, at: int, session: bytes | None) -> None:
        self.now += 1
        self.copies[at].clear(SessionsCleared(TENANTS[0], session, self.now))

    @rule(at=st.integers(0, 1), is_lost=st.booleans())
    def exchange(self, at: int, is_lost: bool) -> None:
        mine = self.copies[at]
        told, cleared, sent = mine.changes(self.sent[at], 3)
        for one in cleared:
            self.actor.clear(one)
        self.actor.merge(told)
        back, back_cleared, since = self.actor.changes(self.since[at], 3)
        if is_lost:
            return
        for one in back_cleared:
            mine.clear(one)
        mine.merge(back)
        self.sent[at], self.since[at] = sent, since

    @rule()
    def restart(self) -> None:
        self.actor, self.since, self.sent = table(), [0, 0], [0, 0]

    @invariant()
    def books(self) -> None:
        for one in [*self.copies, self.actor]:
            one.check_integrity()

    def teardown(self) -> None:
        for _ in range(60):
            for at in (0, 1):
                self.exchange(at, False)
        views = [{row.key: row for row in one} for one in [*self.copies, self.actor]]
        assert views[0] == views[1] == views[2], "the copies do not agree"


TestCluster = Cluster.TestCase
TestCluster.settings = settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=25)


def test_no_more_nodes_than_agreed() -> None:
    one = table()
    for number in range(6):
        one.turn(TENANTS[0], SESSIONS[0], home="r", node=f"n{number}", tokens=1, now_unix_s=1.0)
    row = one.get(TENANTS[0], SESSIONS[0])
    assert row is not None
    assert row.nodes == ("n5", "n4", "n3")
    assert len(row.nodes) == NODES_MAX


# Lineages ------------------------------------------------------------------------------------------


def lineage(session: bytes, number: int) -> bytes:
    return session[:8] + bytes([0, 0, number]) + bytes([number]) * 5


def test_a_side_request_does_not_move_the_conversation() -> None:
    one, talk, title = table(), lineage(SESSIONS[0], 1), lineage(SESSIONS[0], 2)
    turn(one, talk, "r1", 1.0)
    turn(one, talk, "r1", 2.0)
    turn(one, title, "r2", 3.0)
    row = one.get(TENANTS[0], talk)
    assert row is not None
    assert (row.home, row.turns) == ("r1", 2)
    view = one.view(TENANTS[0], SESSIONS[0])
    assert view is not None
    assert [row.session for row in view.rows] == [title, talk], "the latest used first"
    assert view.main is row
    assert view.living == (row,)
    assert one.page(TENANTS[0], 9) == [view], "one session in the list"


def test_of_a_session_with_too_many_lineages_the_least_worth_goes() -> None:
    one = SessionTable(100, lineages_max=3)
    talk, *sides = (lineage(SESSIONS[0], number) for number in range(1, 7))
    for at_s in (1.0, 2.0):
        turn(one, talk, "r1", at_s)
    for at, side in enumerate(sides):
        turn(one, side, "r1", 3.0 + at)
        one.check_integrity()
    turn(one, SESSIONS[1], "r1", 1.0)
    left = {row.session for row in one.lineages(TENANTS[0], SESSIONS[0])}
    assert left == {talk, *sides[-2:]}, "what went on stays, and of the others the latest"
    assert one.get(TENANTS[0], SESSIONS[1]) is not None, "another session's are not touched"


def test_a_clear_takes_all_lineages_and_no_other_session() -> None:
    one = table()
    for number in range(3):
        turn(one, lineage(SESSIONS[0], number), "r1")
    turn(one, SESSIONS[1], "r1")
    assert one.clear(SessionsCleared(TENANTS[0], lineage(SESSIONS[0], 1), 5.0)) == 3
    one.check_integrity()
    late = SessionRow(TENANTS[0], lineage(SESSIONS[0], 9), 3, created_unix_s=4.0)
    assert one.merge([late]) == 0, "it began before the clear"
    assert [row.session for row in one] == [SESSIONS[1]]


def test_the_recent_sessions_are_those_of_the_latest_turns_whoever_is_asked() -> None:
    one = table()
    for at, (number, tenant) in enumerate([(0, 0), (1, 0), (2, 1), (0, 0), (3, 1)]):
        turn(one, SESSIONS[number], "r1", float(at), TENANTS[tenant])
    assert [view.session for view in one.recent(None, 10)] == [
        SESSIONS[n][:8] + bytes(8) for n in (3, 0, 2, 1)
    ]
    assert [view.session for view in one.recent(TENANTS[0], 10)] == [
        SESSIONS[n][:8] + bytes(8) for n in (0, 1)
    ]
    assert [len(one.recent(tenant, 1)) for tenant in (None, TENANTS[1], b"nobody")] == [1, 1, 0]
    assert one.recent(None, 4) == one.page(None, 4)
