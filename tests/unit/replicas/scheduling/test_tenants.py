"""Tenants share one replica: whoever sends how much, the others get in, and one alone has all of it (S2)."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import TAG_BYTES
from samovar.replicas.answers import EngineLimits
from samovar.replicas.engine.engine import Engine
from samovar.replicas.kv.page_pool import PagePool
from samovar.replicas.messages import Delta, Failed, GenerateRequest, Refused, SamplingParams
from samovar.replicas.scheduling.queues import DropNewest, PageTables
from samovar.replicas.scheduling.scheduler import Scheduler
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepBudget, StepPlan
from tests.support.engines.engines import prompt_of, refusal_now, small_engine

BLOCK = 16
ALICE, BOB, CAROL = (bytes([number]) * TAG_BYTES for number in (1, 2, 3))
NAMES = {ALICE: "alice", BOB: "bob", CAROL: "carol"}


class Replica:
    """A scheduler whose model answers with zeros."""

    def __init__(self, places: int = 32, pages: int = 1000, step_tokens: int = 64, **options: object) -> None:
        self.scheduler = Scheduler(
            PagePool(pages + 1, BLOCK),
            budget=StepBudget(step_tokens),
            sequences_max=places,
            policy=DropNewest(),
            **options,  # type: ignore[arg-type]
        )
        self.arrivals = 0
        self.steps = 0
        self.generated: Counter[bytes] = Counter()
        self.finished: list[Sequence] = []

    def send(self, tenant: bytes, sequences: int = 1, prompt: int = 20, answer: int = 50, n: int = 1) -> None:
        for _ in range(sequences):
            self.scheduler.add(self.sequence(tenant, prompt, answer, forks=n))

    def sequence(
        self, tenant: bytes, prompt: int, answer: int, *, forks: int = 1, priority: int = 0
    ) -> Sequence:
        """The next one to come. No two prompts are alike, so that nothing is shared by chance."""
        self.arrivals += 1
        return Sequence(
            request_id=str(self.arrivals),
            arrival=self.arrivals,
            namespace=2 * tenant,
            tokens=array("I", [self.arrivals, *range(prompt - 1)]),
            prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=answer),
            seed=0,
            owner=tenant + bytes(TAG_BYTES),
            forks=forks,
            priority=priority,
        )

    def step(self) -> StepPlan:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        assert plan.tokens <= scheduler.budget.tokens_max
        assert not set(plan.admitted) & set(plan.preempted)
        assert all(chunk.sequence in scheduler.running for chunk in plan.chunks)
        copied = {source for source, _ in plan.copies}
        assert not any(copied.intersection(one.pages) for one in plan.admitted), (
            "a step reads a page that has been given away, and that may be loaded into by now"
        )
        scheduler.commit(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                for one in [chunk.sequence, *scheduler.queues.fork(chunk.sequence)]:
                    one.tokens.append(0)
                    self.generated[one.owner[:TAG_BYTES]] += 1
                    if one.output_tokens == one.sampling.max_tokens:
                        scheduler.queues.finish(one)
                        self.finished.append(one)
        scheduler.check_integrity()
        self.steps += 1
        return plan

    def runs(self) -> Counter[str]:
        return Counter(NAMES[one.owner[:TAG_BYTES]] for one in self.scheduler.running)

    def steps_until_admitted(self, tenant: bytes, steps_max: int = 5000) -> int:
        for number in range(1, steps_max):
            if any(one.owner[:TAG_BYTES] == tenant for one in self.step().admitted):
                return number
        raise AssertionError(f"not admitted in {steps_max} steps")

    def drain(self, steps_max: int = 100_000) -> None:
        for _ in range(steps_max):
            if not self.scheduler.has_work:
                return
            assert self.step().chunks, "work, and a step that does nothing"
        raise AssertionError(f"work is left after {steps_max} steps")


def test_what_a_step_copies_from_is_not_given_away_in_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alice's second choice makes way for Bob just when the first copies the page that both have."""

    def bob_comes() -> StepPlan:
        replica = Replica(places=2)
        replica.send(ALICE, n=2)
        replica.step()
        replica.send(BOB)
        plan = replica.step()
        assert plan.copies
        assert plan.admitted
        replica.drain()
        assert replica.scheduler.pool.active == 0
        return plan

    bob_comes()
    monkeypatch.setattr(PageTables, "keep_copied", lambda *_: None)
    with pytest.raises(AssertionError, match="given away"):
        bob_comes()


@pytest.mark.guarantee("G10")
def test_four_big_requests_do_not_lock_the_others_out() -> None:
    """Alice's 4 x 8 prompts x n=8 of 1,500 tokens each; Bob is in at the next step. It was 1,500 later."""
    replica = Replica()
    replica.send(ALICE, sequences=32, n=8, answer=1500)
    for _ in range(20):
        replica.step()
    assert replica.runs() == {"alice": 32}, "alone she has all places"
    replica.send(BOB)
    assert replica.steps_until_admitted(BOB) <= 2
    assert replica.runs() == {"alice": 31, "bob": 1}, "only as many make way as are needed"


def test_a_tenant_gets_half_of_the_places_and_no_more() -> None:
    replica = Replica()
    replica.send(ALICE, sequences=200, answer=1500)
    for _ in range(60):
        replica.step()
    replica.send(BOB, sequences=200, answer=1500)
    for _ in range(60):
        replica.step()
    assert replica.runs() == {"alice": 16, "bob": 16}
    before = replica.scheduler.queues.preemptions
    for _ in range(100):
        replica.step()
    assert replica.scheduler.queues.preemptions == before, "nobody pushes back"
    replica.send(CAROL, sequences=2, n=8, answer=100)
    assert replica.steps_until_admitted(CAROL) <= 2
    assert replica.runs()["carol"] >= 1


def test_weights_share_out_the_places() -> None:
    replica = Replica(weights={BOB: 3.0})
    replica.send(ALICE, sequences=100, answer=1500)
    replica.step()
    replica.send(BOB, sequences=100, answer=1500)
    for _ in range(100):
        replica.step()
    assert replica.runs() == {"alice": 8, "bob": 24}


def test_pages_are_shared_out_as_places_are() -> None:
    """Few long sequences of Alice's have all pages, with places to spare."""
    replica = Replica(places=32, pages=100)
    replica.send(ALICE, sequences=20, prompt=10 * BLOCK, answer=300)
    for _ in range(60):
        replica.step()
    assert replica.scheduler.pool.available < 10
    replica.send(BOB, prompt=15 * BLOCK, answer=100)
    assert replica.steps_until_admitted(BOB) <= 6  # behind a prompt of hers that is being computed
    for _ in range(50):
        replica.step()
        assert replica.runs()["bob"] == 1, "it is who has most that loses pages when those who run need more"


@pytest.mark.parametrize("prompts", [1, 20])
def test_a_short_prompt_does_not_wait_for_a_long_one_under_way(prompts: int) -> None:
    replica = Replica(pages=10_000)
    replica.send(ALICE, sequences=prompts, prompt=4000, answer=1)
    for _ in range(10):
        replica.step()
    replica.send(BOB, prompt=120, answer=1)
    for step in range(1, 200):
        replica.step()
        if replica.generated[BOB]:
            assert step <= 2, "as if he were alone: 120 tokens, 64 a step"
            break
    assert not replica.generated[ALICE]


def test_many_answers_under_way_do_not_slow_down_anothers_prompt() -> None:
    """Bob's 120 tokens take the two steps that they take alone: Alice's 31 decodes rest meanwhile."""
    replica = Replica(pages=10_000)
    replica.send(ALICE, sequences=31, answer=1500)
    for _ in range(20):
        replica.step()
    replica.send(BOB, prompt=120, answer=1)
    seen = replica.generated[ALICE]
    for _ in range(2):
        assert not replica.generated[BOB]
        replica.step()
    assert replica.generated[BOB] == 1
    assert replica.generated[ALICE] == seen
    replica.step()
    assert replica.generated[ALICE] == seen + 31


def test_prompts_that_wait_for_places_save_up_no_turns() -> None:
    """Alice's 13 prompts have no place beside her 31 answers while Bob's are computed; then her places come
    free, and Bob's next one waits for one turn of hers at most."""
    replica = Replica(pages=10_000, quantum_tokens=128)
    replica.send(ALICE, sequences=32, answer=100)
    replica.send(ALICE, sequences=13, prompt=4000, answer=1)
    for _ in range(20):
        replica.step()
    for _ in range(20):
        before = replica.generated[BOB]
        replica.send(BOB, prompt=120, answer=1)
        steps = 0
        while replica.generated[BOB] == before:
            replica.step()
            steps += 1
        assert steps <= 6, "a turn of hers at most"
        for _ in range(5):
            replica.step()
    assert len(replica.finished) > 32, "her places came free meanwhile"


def test_answers_rest_for_a_turn_at_a_time() -> None:
    """However many prompts Bob sends, Alice's answers go on after each turn of them."""
    replica = Replica(pages=10_000, quantum_tokens=128)
    replica.send(ALICE, sequences=31, answer=1500)
    for _ in range(20):
        replica.step()
    replica.send(BOB, sequences=20, prompt=1000, answer=1)
    without = 0
    for _ in range(100):
        plan = replica.step()
        if any(chunk.sequence.tenant == ALICE for chunk in plan.chunks):
            without = 0
        without += sum(chunk.count for chunk in plan.prompts)
        assert without <= 128 + 64


def test_answers_do_not_rest_for_a_tenant_who_has_as_much() -> None:
    replica = Replica(pages=10_000)
    for tenant in (ALICE, BOB):
        replica.send(tenant, sequences=4, answer=1500)
    for _ in range(20):
        replica.step()
    replica.send(BOB, prompt=120, answer=1)
    for _ in range(3):
        assert {chunk.sequence.tenant for chunk in replica.step().chunks} == {ALICE, BOB}


@pytest.mark.parametrize("steps_before", range(2, 12))
def test_a_prompt_within_a_turn_is_not_interrupted(steps_before: int) -> None:
    """Wherever in their turn the others are when it comes."""
    replica = Replica(pages=10_000, step_tokens=48, quantum_tokens=128)
    replica.send(ALICE, sequences=20, prompt=4000, answer=1)
    for _ in range(steps_before):
        replica.step()
    replica.send(BOB, prompt=120, answer=1)
    for _ in range(3):
        assert not replica.generated[BOB]
        replica.step()
    assert replica.generated[BOB] == 1


def test_prompts_are_computed_by_turns_and_who_keeps_coming_back_gains_nothing() -> None:
    replica = Replica(pages=10_000, quantum_tokens=128)
    replica.send(ALICE, sequences=10, prompt=4000, answer=1)
    done = Counter[bytes]()
    for number in range(400):
        if number % 2 == 0 and not any(one.owner[:TAG_BYTES] == BOB for one in replica.scheduler.queues):
            replica.send(BOB, prompt=64, answer=1)
        for chunk in replica.step().chunks:
            done[chunk.sequence.owner[:TAG_BYTES]] += chunk.count
    assert done[BOB] <= done[ALICE] + 256
    assert done[ALICE] + done[BOB] >= 390 * 64, "no budget is left over"


def test_one_who_needs_all_places_comes_in_though_others_keep_coming() -> None:
    replica = Replica(places=8)
    for _ in range(8):
        replica.send(BOB, answer=30)
    replica.step()
    replica.send(ALICE, n=8, answer=5)
    for _ in range(200):
        replica.send(BOB, answer=30)
        if any(one.owner[:TAG_BYTES] == ALICE for one in replica.step().admitted):
            return
    raise AssertionError("alice starves")


def test_a_tenant_alone_is_served_in_order_and_never_preempted_for_fairness() -> None:
    replica = Replica(places=4)
    replica.send(ALICE, sequences=30, answer=20)
    replica.drain()
    assert [one.arrival for one in replica.finished] == sorted(one.arrival for one in replica.finished)
    assert replica.scheduler.queues.preemptions == 0


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([ALICE, BOB, CAROL]),
            st.integers(1, 100),  # prompt
            st.integers(1, 60),  # answer
            st.sampled_from([1, 1, 2, 4]),  # n
            st.integers(0, 4),  # steps before it comes
        ),
        min_size=1,
        max_size=25,
    ),
    pages=st.integers(42, 120),
)
def test_whatever_comes_all_are_served(requests: list[tuple[bytes, int, int, int, int]], pages: int) -> None:
    replica = Replica(places=4, pages=pages, quantum_tokens=32, weights={CAROL: 2.0})
    for tenant, prompt, answer, n, steps in requests:
        for _ in range(steps):
            if replica.scheduler.has_work:
                assert replica.step().chunks
        replica.send(tenant, prompt=prompt, answer=answer, n=n)
    replica.drain()
    assert len(replica.finished) == sum(n for *_, n, _ in requests)
    for tenant in NAMES:
        firsts = [one for one in replica.finished if one.owner[:TAG_BYTES] == tenant]
        assert len(firsts) == sum(n for name, _, _, n, _ in requests if name == tenant)
    assert replica.scheduler.pool.active == 0


def request(tenant: bytes, n: int = 1) -> GenerateRequest:
    return GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=5), n, tenant=tenant)


def test_a_tenant_fills_its_part_of_the_queue_and_others_still_come_in() -> None:
    replica = Replica(places=4)
    limits = EngineLimits(512, 2048, queue_max=20, retry_after_s=3.0, tenant_queue_max=10)
    taken = 0
    while (refused := refusal_now(request(ALICE), limits, replica.scheduler)) is None:
        replica.send(ALICE, answer=1500)
        taken += 1
        if taken == 4:
            replica.step()
    assert taken == 14
    assert refused.reason == "queue_full"
    assert refused.retry_after_s == 3.0
    assert "10" in refused.message
    assert "limits.tenant_share" in refused.message
    assert refusal_now(request(BOB, n=2), limits, replica.scheduler) is None


def test_who_is_pushed_out_goes_on_as_if_nothing_had_been(tiny_llama: Path) -> None:
    """On the real engine: sequences of Alice's make way in the middle of their answers, to the same words."""

    def asks() -> dict[int, GenerateRequest]:
        sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
        alices = {
            key: GenerateRequest(f"a{key}", prompt_of(30, seed=key), sampling, 2, ALICE, ALICE)
            for key in (1, 2)
        }
        return alices | {
            3: GenerateRequest("b", prompt_of(20, seed=3), replace(sampling, max_tokens=10), 1, BOB, BOB)
        }

    def answers(engine: Engine, at_once: bool) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
        said: dict[tuple[int, int], list[int]] = {}
        over: list[int] = []
        for key, ask in asks().items():
            if key == 3 and at_once:
                for _ in range(10):
                    collect(engine, said, over)
            assert engine.requests.add(key, ask) is None
            while not at_once and engine.has_work:
                collect(engine, said, over)
        while engine.has_work:
            collect(engine, said, over)
        return said, over

    def collect(engine: Engine, said: dict[tuple[int, int], list[int]], over: list[int]) -> None:
        for key, event in engine.step():
            assert not isinstance(event, (Failed, Refused))
            if isinstance(event, Delta):
                said.setdefault((key, event.index), []).extend(event.token_ids)
                over += [key] if event.finish_reason else []
        engine.check_integrity()

    expected, _ = answers(small_engine(tiny_llama, exact=True, sequences_max=4).engine, at_once=False)
    engine = small_engine(tiny_llama, exact=True, sequences_max=4).engine
    said, over = answers(engine, at_once=True)
    assert said == expected
    assert engine.stats().preemptions == 1
    assert over[0] == 3, "bob need not wait for hers to end"
