"""Priority among a tenant's own requests: sooner, by places and pages of others, and none starves."""

from __future__ import annotations

import random
from array import array
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.cache_tiers.pricing import PrefillPrice, TierPrice
from samovar.replicas.answers import EngineLimits
from samovar.replicas.messages import GenerateRequest, SamplingParams
from samovar.replicas.scheduling.order import SHARED_STEPS, gives
from samovar.replicas.scheduling.queues import AnswerLengths, ByPrice
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepPlan
from samovar.replicas.turns.fair_queue import PRIORITY_SHARE, FairQueue
from tests.support.amounts import examples
from tests.support.engines.engines import refusal_now
from tests.unit.replicas.scheduling.test_tenants import ALICE, BLOCK, BOB
from tests.unit.replicas.scheduling.test_tenants import Replica as ReplicaOfTenants

STEP_TOKENS = 36
"""What a step costs beside its tokens, in tokens: as of the default model on one core."""


class Replica(ReplicaOfTenants):
    """One whose requests have priorities; its clock counts what its steps cost, in tokens."""

    def __init__(self, *, places: int = 8, pages: int = 200, step_tokens: int = 64) -> None:
        super().__init__(places, pages, step_tokens)
        self.now = 0
        self.came: dict[Sequence, int] = {}
        self.silent: set[Sequence] = set()  # no token yet
        self.first: dict[int, list[int]] = defaultdict(list)  # by priority: the time until a first token
        self.ended: Counter[int] = Counter()
        self.preempted: list[Sequence] = []

    def ask(self, priority: int, *, prompt: int = 40, answer: int = 20, tenant: bytes = ALICE) -> Sequence:
        sequence = self.sequence(tenant, prompt, answer, priority=priority)
        self.came[sequence] = self.now
        self.silent.add(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        done = len(self.finished)
        plan = super().step()
        self.preempted += plan.preempted
        self.now += plan.tokens + (STEP_TOKENS if plan.tokens else 0)
        for one in dict.fromkeys(chunk.sequence for chunk in plan.chunks):
            if one in self.silent and one.output_tokens:
                self.first[one.priority].append(self.now - self.came[one])
                self.silent.remove(one)
        self.ended.update(one.priority for one in self.finished[done:])
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_better_priorities_are_admitted_first_and_take_places_of_worse_ones() -> None:
    replica = Replica(places=2)
    low = [replica.ask(5) for _ in range(4)]
    for _ in range(3):
        replica.step()
    assert set(replica.scheduler.running) == set(low[:2])
    high = [replica.ask(0) for _ in range(2)]
    for _ in range(3):
        replica.step()
    assert set(replica.scheduler.running) == set(high)
    assert set(replica.preempted) == set(low[:2])
    replica.run()
    assert replica.ended == {0: 2, 5: 4}


def test_a_better_priority_takes_pages_of_worse_ones_and_never_the_other_way() -> None:
    replica = Replica(places=8, pages=16)
    low = [replica.ask(5, prompt=60, answer=60) for _ in range(2)]
    for _ in range(4):
        replica.step()
    high = replica.ask(0, prompt=100, answer=60)
    while replica.scheduler.has_work:
        replica.step()
        assert high not in replica.preempted
    assert set(replica.preempted) & set(low)
    assert replica.ended == {0: 1, 5: 2}


def test_a_waiting_prompt_goes_before_a_long_one_of_a_worse_priority() -> None:
    replica = Replica(pages=400)
    long = replica.ask(5, prompt=2000, answer=1)
    for _ in range(3):
        replica.step()
    high = replica.ask(0, prompt=300, answer=1)
    replica.ask(5, prompt=20, answer=1)
    replica.run()
    assert replica.first[0][0] <= 600, "the long one's chunks went on before it"
    assert long.computed or replica.ended[5] == 2
    assert high.priority == 0


def test_decodes_of_a_worse_priority_rest_while_a_better_prompt_is_computed() -> None:
    replica = Replica(places=16, step_tokens=32)
    low = [replica.ask(3, prompt=16, answer=400) for _ in range(8)]
    while not all(one.is_decode for one in low):
        replica.step()
    before = [one.output_tokens for one in low]
    replica.ask(0, prompt=200, answer=1)
    while not replica.first[0]:
        replica.step()
    assert replica.first[0][0] <= 7 * (32 + STEP_TOKENS), "32 tokens a step, all of them the prompt's"
    assert [one.output_tokens for one in low] == before
    replica.run()


def test_priorities_are_nothing_to_other_tenants() -> None:
    def ttft(priority: int) -> list[int]:
        replica = Replica(places=4)
        for _ in range(30):
            replica.ask(0, tenant=BOB)
            replica.ask(priority, tenant=ALICE)
        order = []
        while replica.scheduler.has_work:
            replica.step()
            order.append(len(replica.first[0]))
        return order if priority == 0 else [sum(map(len, replica.first.values()))]

    alone = Replica(places=4)
    for _ in range(30):
        alone.ask(0, tenant=BOB)
        alone.ask(-50, tenant=ALICE)
    bobs = [sequence for sequence in alone.came if sequence.tenant == BOB]
    while any(not one.output_tokens for one in bobs[:15]):
        alone.step()
    served = sum(one.output_tokens > 0 for one in alone.came if one.tenant == ALICE)
    assert served <= 15 + 4, "a better priority does not take another tenant's turns"
    assert ttft(0)[-1] == 60


def test_a_better_priority_that_cannot_enter_stops_nobody() -> None:
    """Of one tenant a prompt is computed, of another one waits for pages; a better one comes behind it."""
    for pages in range(30, 60):
        replica = Replica(pages=pages)
        replica.ask(5, prompt=400, answer=4)
        replica.step()
        replica.ask(0, prompt=300, answer=4, tenant=BOB)
        replica.step()
        replica.ask(0, prompt=48, answer=4)
        for _ in range(400):
            if not replica.scheduler.has_work:
                break
            before = replica.now
            replica.step()
            assert replica.now > before, "there is work, and nothing is planned"
        assert sum(replica.ended.values()) == 3


def test_a_long_prompt_of_a_worse_priority_goes_on_beside_an_endless_stream_of_better_ones() -> None:
    replica = Replica(pages=400)
    long = replica.ask(5, prompt=1000, answer=1)
    replica.step()
    for _ in range(40 * SHARED_STEPS):
        replica.ask(0, prompt=20, answer=1)
        replica.step()
        if replica.ended[5]:
            break
    assert replica.ended[5], long.computed


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60), deadline=None)
def test_some_work_is_planned_in_each_step(seed: int) -> None:
    """Whatever tenants, priorities and sizes: each step with work computes something, and all ends."""
    rng = random.Random(seed)
    replica = Replica(places=rng.choice((1, 3, 8)), pages=rng.choice((30, 45, 90)))
    for _ in range(rng.randrange(3, 25)):
        tenant, priority = rng.choice((ALICE, BOB)), rng.choice((-5, 0, 0, 5))
        replica.ask(priority, prompt=rng.randrange(2, 300), answer=rng.randrange(1, 40), tenant=tenant)
        for _ in range(rng.randrange(4)):
            if replica.scheduler.has_work:
                before = replica.now
                replica.step()
                assert replica.now > before
    while replica.scheduler.has_work:
        before = replica.now
        replica.step()
        assert replica.now > before


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60), deadline=None)
def test_no_priority_starves(seed: int) -> None:
    """While better ones keep all places busy for ever, what waits ends after a bounded amount of work."""
    rng = random.Random(seed)
    replica = Replica(places=rng.choice((2, 4)), pages=rng.choice((24, 80)))
    low = [replica.ask(9, prompt=rng.randrange(20, 200), answer=rng.randrange(1, 40)) for _ in range(3)]
    size = sum(one.prompt_tokens + one.sampling.max_tokens for one in low)
    for _ in range(40_000):
        while len(replica.scheduler.waiting) < 6:
            replica.ask(rng.choice((0, 1)), prompt=rng.randrange(5, 100), answer=rng.randrange(1, 40))
        replica.step()
        if replica.ended[9] == 3:
            break
    assert replica.ended[9] == 3
    assert replica.now <= 6 * PRIORITY_SHARE * (size + 400), "the bound holds"


@given(st.integers(0, 10**6))
@settings(max_examples=examples(40), deadline=None)
def test_all_of_one_priority_is_as_without_priorities(seed: int) -> None:
    def order(priority: int) -> list[tuple[int, int]]:
        rng, replica = random.Random(seed), Replica(places=4, pages=40)
        for _ in range(20):
            replica.ask(
                priority,
                prompt=rng.randrange(5, 200),
                answer=rng.randrange(1, 60),
                tenant=rng.choice((ALICE, BOB)),
            )
            for _ in range(rng.randrange(4)):
                replica.step()
        replica.run()
        return [(one, replica.now) for one in replica.first[priority]]

    assert order(0) == order(7) == order(-3)


def test_two_classes_at_twice_the_load() -> None:
    """The high class waits nearly as if it were alone, and the low one ends."""

    def served(*, has_low: bool) -> Replica:
        rng, replica = random.Random(5), Replica(places=8, pages=400, step_tokens=64)
        following = 0.0
        while replica.now < 300_000:
            while following <= replica.now:  # half of what the replica can do, at random
                replica.ask(0, prompt=80, answer=20)
                following += rng.expovariate(1 / 900)
            while has_low and len(replica.scheduler.waiting) < 12:
                replica.ask(5, prompt=rng.randrange(40, 120), answer=40)
            replica.step()
            if not replica.scheduler.has_work:
                replica.now += STEP_TOKENS
        replica.run()
        return replica

    alone, beside = served(has_low=False), served(has_low=True)
    assert beside.ended[5] > 20

    def p95(replica: Replica) -> int:
        return sorted(replica.first[0])[int(0.95 * len(replica.first[0]))]

    assert p95(beside) <= 1.3 * p95(alone), (p95(beside), p95(alone))


def test_lengths_of_answers() -> None:
    lengths = AnswerLengths()
    assert lengths.left(0, 10) == 10, "never more than it may have"
    for _ in range(5000):
        lengths.ended(20)
    assert 10 < lengths.left(0, 1000) < 40
    assert lengths.left(15, 1000) < lengths.left(0, 1000)
    assert lengths.left(600, 2000) == pytest.approx(600), "longer than any: as long again, if it may"
    for _ in range(5000):
        lengths.ended(4000)
    assert lengths.left(100, 10_000) > 2000
    assert all(lengths.left(have, 5) >= 1 for have in range(100))


class Swap:
    bytes_max = 1 << 30

    def price(self) -> TierPrice:
        return TierPrice(0.001, 1e9)


def running(
    arrival: int, computed: int, output: int, answer: int, priority: int = 0, pages: int = 4
) -> Sequence:
    prompt = computed - output + 1
    return Sequence(
        request_id=str(arrival),
        arrival=arrival,
        namespace=bytes(32),
        tokens=array("I", range(computed + 1)),
        prompt_tokens=prompt,
        sampling=SamplingParams(max_tokens=answer),
        seed=0,
        priority=priority,
        computed=computed,
        pages=list(range(pages)),
    )


def test_the_victim_is_of_the_worst_priority_then_what_is_cheapest_for_what_it_holds() -> None:
    policy = ByPrice(lambda: PrefillPrice(0.0, 1e-3, 0.0), Swap(), 10**9, BLOCK)
    short, long = running(1, 100, 0, 400), running(2, 1000, 0, 400)
    assert policy.choose([short, long]).victim is short, "the newer is dearer to compute again"
    ending, begun = running(1, 100, 399, 400), running(2, 120, 1, 400)
    assert policy.choose([begun, ending]).victim is begun, "the other will give its pages back by itself"
    worse = running(3, 5000, 0, 400, priority=2)
    assert policy.choose([short, long, worse]).victim is worse
    due = running(4, 10, 0, 400, priority=9)
    due.is_due = True
    assert policy.choose([short, due]).victim is short
    same = [running(number, 100, 0, 400) for number in range(3)]
    assert policy.choose(same).victim is same[-1], "of equals the newest"


def test_pages_of_another_tenants_earlier_answer_are_not_taken_by_priority() -> None:
    replica = Replica(places=4, pages=20)
    bob = replica.ask(0, prompt=100, answer=60, tenant=BOB)
    replica.step()
    replica.ask(-50, prompt=100, answer=120)
    while replica.scheduler.has_work:
        replica.step()
        assert bob not in replica.preempted, "it came first, and has no more than its share"
    mine, theirs = running(2, 100, 0, 400, priority=-50), running(1, 100, 0, 400)
    assert gives(theirs, mine, is_later=False), "of one tenant"
    theirs.owner = bytes([9]) * 2 * TAG_BYTES
    assert not gives(theirs, mine, is_later=False), "of two"


def test_a_full_queue_of_a_worse_priority_refuses_no_better_one() -> None:
    replica = Replica(places=1)
    limits = EngineLimits(
        vocab=10_000, context_tokens_max=1000, queue_max=4, retry_after_s=1.0, tenant_queue_max=2
    )

    def asked(priority: int) -> str | None:
        request = GenerateRequest(
            "r", [1] * 10, SamplingParams(max_tokens=5), tenant=ALICE, priority=priority
        )
        refused = refusal_now(request, limits, replica.scheduler)
        return None if refused is None else refused.reason

    replica.ask(0)
    replica.step()
    for _ in range(2):
        assert asked(5) is None
        replica.ask(5)
    assert asked(5) == "queue_full"
    for _ in range(2):
        assert asked(0) is None
        replica.ask(0)
    assert asked(0) == "queue_full"
    assert asked(-1) == "queue_full", "twice the limit is the most"


def test_the_queue_alone_keeps_priorities_in_order_and_serves_each() -> None:
    queue: FairQueue[str, str] = FairQueue(100.0)
    queue.put("a", "low", 10.0, 5)
    served = []
    for number in range(100):
        queue.put("a", f"high {number}", 10.0, 0)
        item = queue.pick()
        assert item is not None
        is_due = queue.is_due(item)
        queue.take(item)
        queue.check_integrity()
        served.append(item)
        if item == "low":
            assert is_due
            break
    assert served.index("low") == PRIORITY_SHARE
    queue.put_first("a", "back", 5, size=50.0)
    assert queue.pick() == f"high {PRIORITY_SHARE:.0f}"
