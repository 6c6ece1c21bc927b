"""How long a prompt waits for the tiers, and when they are asked again: by price, and never on the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from samovar.cache_tiers.blocks import CPU
from samovar.cache_tiers.messages import BlockRange, Lookup, LookupResult
from samovar.cache_tiers.pricing import AGAIN_S, TierPrice
from samovar.cache_tiers.vllm.lookups import HURRY_S, HURRY_SHARE, Lookups, PromptLookup
from samovar.cache_tiers.vllm.names.chain import rank_name
from samovar.cache_tiers.vllm.worth import LOOKUP_SHARE, Worth

BLOCK_TOKENS, S_MAX = 16, 4.0
FREE = {CPU.name: TierPrice(0.0, 1e12, True, is_proved=True)}
NAMESPACE, OWNER = b"n" * 32, (b"t" * 16, b"s" * 16)


class Lane(Executor):
    """Runs nothing until it is told to."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Any, *args: Any, **_kwargs: Any) -> Future[Any]:
        self.work.append(lambda: work(*args))
        return Future()

    def run(self) -> int:
        work, self.work = self.work, []
        for one in work:
            one()
        return len(work)


class World:
    """Tiers that answer as they are told, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lane = Lane()
        self.asked: list[Lookup] = []
        self.answer: LookupResult | None = LookupResult("life", 0, prices=FREE)
        self.worth = Worth(BLOCK_TOKENS, 4, lambda: self.now_s)
        self.lookups = Lookups(
            self, self.lane, self.worth, block_tokens=BLOCK_TOKENS, s_max=S_MAX, clock=lambda: self.now_s
        )

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        self.asked.append(lookup)
        return self.answer

    def open(self, tokens: int = 1000) -> PromptLookup:
        return self.lookups.open(NAMESPACE, OWNER, list(range(tokens)), lambda: lambda _tokens: ())

    def waits(self, prompt: PromptLookup, resident: int = 0) -> float:
        """Return how long a prompt is waited for from now on."""
        began_s = self.now_s
        while not self.lookups.is_over(prompt, resident):
            self.now_s += 0.001
        return self.now_s - began_s


def found(blocks: int, *, unlisted: tuple[Any, ...] = ()) -> LookupResult:
    spans = (BlockRange(b"e" * 32, OWNER[0], 0, 0, blocks, CPU.name, blocks * 1000),) if blocks else ()
    return LookupResult("life", 0, spans, prices=FREE, unlisted=unlisted)


@pytest.fixture
def world() -> World:
    return World()


def test_an_answer_ends_the_wait(world: World) -> None:
    prompt = world.open()
    assert not world.lookups.is_over(prompt, 0)
    world.lane.run()
    assert world.lookups.is_over(prompt, 0)
    assert prompt.found == (world.answer,)
    assert world.asked[0].starts_turn


@pytest.mark.parametrize("tokens", [200, 1000, 20_000])
def test_a_prompt_waits_for_a_share_of_what_loading_could_save(world: World, tokens: int) -> None:
    waited_s = world.waits(world.open(tokens))
    saving_s = world.worth.compute_s(tokens - 1, 0)
    assert waited_s == pytest.approx(min(S_MAX, LOOKUP_SHARE * saving_s), abs=0.002)


def test_what_the_pool_has_is_not_waited_for(world: World) -> None:
    assert world.waits(world.open(1000), resident=992) < 0.05


def test_after_one_that_was_late_others_hurry(world: World) -> None:
    first = world.waits(world.open())
    late = world.open()
    assert world.waits(late) == pytest.approx(HURRY_SHARE * first, abs=0.003)
    assert late.why == "lookup late"
    world.now_s += HURRY_S
    assert world.waits(world.open()) == pytest.approx(first, abs=0.003)


def test_tiers_that_are_being_listed_are_asked_again(world: World) -> None:
    """Right after a node's start: what it has not listed yet is found a moment later."""
    world.answer = found(2, unlisted=("s3",))
    prompt = world.open()
    world.lane.run()
    assert not world.lookups.is_over(prompt, 0)
    assert world.lane.run() == 0  # not at once
    world.now_s += AGAIN_S
    assert not world.lookups.is_over(prompt, 0)
    world.answer = found(60)
    assert world.lane.run() == 1
    assert world.lookups.is_over(prompt, 0)
    assert prompt.found == (found(60),)
    assert [one.starts_turn for one in world.asked] == [True, False]


def test_they_are_asked_again_within_the_wait_only(world: World) -> None:
    world.answer, prompt = found(2, unlisted=("s3",)), world.open()
    began_s = world.now_s
    while not world.lookups.is_over(prompt, 0):
        world.lane.run()
        world.now_s += 0.001
        assert world.now_s < began_s + 2 * S_MAX
    assert 0 < world.now_s - began_s <= S_MAX
    assert 3 < len(world.asked) < 20  # each time later
    assert prompt.found == (world.answer,)  # and what there is is loaded
    world.answer, prompt = found(62, unlisted=("s3",)), world.open()  # all of its blocks
    world.lane.run()
    assert world.waits(prompt) < 0.02


def test_an_answer_that_does_not_come_again_leaves_the_first(world: World) -> None:
    world.answer, prompt = found(2, unlisted=("s3",)), world.open()
    world.lane.run()
    world.lookups.is_over(prompt, 0)
    world.now_s += AGAIN_S
    assert not world.lookups.is_over(prompt, 0)
    world.answer = None
    world.lane.run()
    world.waits(prompt)
    assert prompt.found == (found(2, unlisted=("s3",)),)


def test_what_takes_long_is_not_done_on_the_loop(world: World) -> None:
    """An adapter's files are read for its digest: by a thread of the lane."""
    threads = []

    def extra_of() -> Any:
        threads.append(threading.get_ident())
        return lambda _tokens: ()

    prompt = world.lookups.open(NAMESPACE, OWNER, list(range(100)), extra_of)
    world.lookups.is_over(prompt, 0)
    assert threads == []
    world.lane.run()
    assert len(threads) == 1


def test_what_has_no_name_is_not_looked_up(world: World) -> None:
    def extra_of() -> Any:
        raise ValueError("no local directory")

    prompt = world.lookups.open(NAMESPACE, OWNER, list(range(100)), extra_of)
    world.lane.run()
    assert world.lookups.is_over(prompt, 0)
    assert (prompt.found, prompt.extra, prompt.why) == ((), None, "has no name")
    assert world.asked == []


def test_a_lookup_that_fails_is_not_waited_for(world: World) -> None:
    world.answer = None
    prompt = world.open()
    world.lane.run()
    assert world.lookups.is_over(prompt, 0)
    assert prompt.why == "no answer"
    world.lookup = None  # type: ignore[assignment, method-assign]
    broken = world.open()
    world.lane.run()
    assert world.lookups.is_over(broken, 0)


def test_each_rank_is_asked_for_by_its_own_names(world: World) -> None:
    world.lookups.ranks = 2
    prompt = world.open(33)
    world.lane.run()
    assert [one.namespace for one in world.asked] == [NAMESPACE, rank_name(NAMESPACE, 1)]
    assert world.asked[0].keys == b"".join(prompt.keys[:2])
    assert world.asked[1].keys == b"".join(rank_name(key, 1) for key in prompt.keys[:2])
    assert [one.starts_turn for one in world.asked] == [True, False]
    assert len(prompt.found) == 2


def test_a_rank_without_an_answer_is_no_answer(world: World) -> None:
    world.lookups.ranks = 2
    answers = [found(2), None]
    world.lookup = lambda _lookup: answers.pop(0)  # type: ignore[method-assign]
    prompt = world.open(33)
    world.lane.run()
    assert world.lookups.is_over(prompt, 0)
    assert prompt.found == ()
