"""The fair queue: turns by weight and cost, whoever sends how much."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from samovar.replicas.turns import FairQueue

QUANTUM = 100.0


def serve(queue: FairQueue[str, str], items: int) -> list[str]:
    served = []
    for _ in range(items):
        item = queue.pick()
        assert item is not None
        queue.take(item)
        queue.check_integrity()
        served.append(item)
    return served


def test_one_tenant_is_a_plain_queue() -> None:
    queue: FairQueue[str, str] = FairQueue(QUANTUM)
    for number, cost in enumerate((1, 5000, 3, 250, 0)):
        queue.put("a", f"a{number}", cost)
    assert serve(queue, 5) == ["a0", "a1", "a2", "a3", "a4"]
    assert queue.pick() is None
    assert not len(queue)


def test_turns_go_round_by_cost_not_by_items() -> None:
    """Two of 50 tokens each are as much as one of 100, and one of 200 takes two rounds."""
    queue: FairQueue[str, str] = FairQueue(QUANTUM)
    for number in range(8):
        queue.put("small", f"s{number}", 50)
    for number in range(4):
        queue.put("big", f"b{number}", 200)
    assert serve(queue, 10) == ["s0", "s1", "s2", "s3", "b0", "s4", "s5", "s6", "s7", "b1"]


def test_weights() -> None:
    queue: FairQueue[str, str] = FairQueue(QUANTUM, {"gold": 3.0})
    for number in range(40):
        queue.put("gold", f"g{number}", 100)
        queue.put("tin", f"t{number}", 100)
    assert Counter(item[0] for item in serve(queue, 40)) == {"g": 30, "t": 10}


@pytest.mark.guarantee("G10")
def test_a_newcomer_waits_for_one_turn_not_for_the_queue() -> None:
    queue: FairQueue[str, str] = FairQueue(QUANTUM)
    for number in range(256):
        queue.put("alice", f"a{number}", 90)
    serve(queue, 10)
    queue.put("bob", "b0", 60)
    assert "b0" in serve(queue, 3)


def test_those_that_are_not_ready_hold_nobody_up() -> None:
    queue: FairQueue[str, str] = FairQueue(QUANTUM)
    for name in ("a0", "a1", "b0"):
        queue.put(name[0], name, 10)
    assert queue.pick(lambda item: item != "a0") == "a1"
    assert queue.pick(lambda item: item[0] != "a") == "b0"
    assert queue.pick(passed={"a"}) == "b0"
    assert queue.pick(passed={"a", "b"}) is None
    assert queue.pick() == "a0"


def test_what_comes_back_is_first_and_paid_for() -> None:
    queue: FairQueue[str, str] = FairQueue(QUANTUM)
    queue.put("a", "a0", 90)
    queue.put("a", "a1", 90)
    assert serve(queue, 1) == ["a0"]
    queue.put_first("a", "a0")
    assert list(queue.of("a")) == ["a0", "a1"]
    assert serve(queue, 2) == ["a0", "a1"]


def test_who_gives_up_keeps_no_credit() -> None:
    queue: FairQueue[str, str] = FairQueue(QUANTUM)
    queue.put("a", "dear", 1000)
    queue.put("a", "a0", 100)
    for number in range(30):
        queue.put("a", f"x{number}", 100)
        queue.put("b", f"b{number}", 100)
    for _ in range(9):
        serve(queue, 1)
    queue.remove("dear")
    queue.check_integrity()
    assert Counter(item[0] in "ax" for item in serve(queue, 20))[True] <= 12


def test_a_turn_is_worth_something() -> None:
    with pytest.raises(ValueError, match="worth"):
        FairQueue(0)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=4),
    costs=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    steps=st.integers(1, 120),
)
def test_who_always_waits_gets_their_share_within_a_turn(
    weights: list[float], costs: list[int], steps: int
) -> None:
    """Shreedhar and Varghese's bound: two tenants differ by their last turns and the dearest item."""
    costs = [*costs, 1]  # else nothing ever costs anything
    queue: FairQueue[int, tuple[int, int]] = FairQueue(QUANTUM, dict(enumerate(weights)))
    sent: Counter[int] = Counter()
    for number in range(400):
        for tenant in range(len(weights)):
            queue.put(tenant, (tenant, number), costs[(number + tenant) % len(costs)])
    for _ in range(steps):
        item = queue.pick()
        assert item is not None
        queue.take(item)
        sent[item[0]] += costs[(item[1] + item[0]) % len(costs)]
    by_weight = [sent[tenant] / weight for tenant, weight in enumerate(weights)]
    most_by_weight = max(costs) / min(weights)
    assert max(by_weight) - min(by_weight) <= 2 * QUANTUM + 2 * most_by_weight


class Histories(RuleBasedStateMachine):
    """Any order of calls against lines of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int, int] = FairQueue(QUANTUM, {0: 2.0})
        self.lines: dict[int, list[int]] = {}
        self.numbers = 0

    @rule(tenant=st.integers(0, 3), cost=st.integers(0, 500), first=st.booleans())
    def put(self, tenant: int, cost: int, first: bool) -> None:
        self.numbers += 1
        line = self.lines.setdefault(tenant, [])
        if first:
            self.queue.put_first(tenant, self.numbers)
            line.insert(0, self.numbers)
        else:
            self.queue.put(tenant, self.numbers, cost)
            line.append(self.numbers)

    @rule(odd_only=st.booleans(), passed=st.sets(st.integers(0, 3), max_size=2), taken=st.booleans())
    def pick(self, odd_only: bool, passed: set[int], taken: bool) -> None:
        def is_ready(item: int) -> bool:
            return bool(item % 2) or not odd_only

        item = self.queue.pick(is_ready, passed)
        firsts = {
            tenant: next(filter(is_ready, line), None)
            for tenant, line in self.lines.items()
            if tenant not in passed
        }
        if item is None:
            assert not any(firsts.values()), "somebody is ready and nobody is next"
            return
        assert item in firsts.values(), "not the first of its line"
        assert self.queue.pick(is_ready, passed) == item, "the turn is lost by looking"
        if taken:
            self.queue.take(item)
            self._forget(item)

    @rule(at=st.integers(0, 100))
    def remove(self, at: int) -> None:
        items = [item for line in self.lines.values() for item in line]
        if items:
            self.queue.remove(items[at % len(items)])
            self._forget(items[at % len(items)])

    def _forget(self, item: int) -> None:
        for line in self.lines.values():
            if item in line:
                line.remove(item)

    @invariant()
    def books(self) -> None:
        self.queue.check_integrity()
        assert sorted(self.queue) == sorted(item for line in self.lines.values() for item in line)
        for tenant, line in self.lines.items():
            assert list(self.queue.of(tenant)) == line


TestHistories = Histories.TestCase
