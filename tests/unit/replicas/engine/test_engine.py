"""The engine on a tiny random model: requests in, events out, and not a page lost on any way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.replicas.messages import Delta
from samovar.replicas.sampling import draws, sampler
from tests.support.engines.engines import Driver, prompt_of, small_engine
from tests.support.engines.tiny_models import EOS_ID

BLOCK = 16


@pytest.fixture(scope="module")
def model_dir(tiny_llama: Path) -> Path:
    return tiny_llama


@pytest.fixture
def driver(model_dir: Path) -> Driver:
    return Driver(small_engine(model_dir).engine)


def pages_in_use(driver: Driver) -> int:
    return driver.engine.stats().pages_active


class TestReuse:
    def test_second_turn_hits_every_full_block_of_the_first(self, driver: Driver) -> None:
        prompt = prompt_of(50)
        first = driver.run(prompt, max_tokens=20)
        assert first.admitted is not None
        assert first.admitted.cached_tokens == 0
        computed = 50 + 20 - 1  # the last sampled token was never computed
        second = driver.run(prompt + first.ids + prompt_of(9, seed=1))
        assert second.admitted is not None
        assert second.admitted.cached_tokens == computed // BLOCK * BLOCK

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49])
    @pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17])
    def test_f24_never_a_slot_that_was_not_written(
        self, model_dir: Path, length: int, max_tokens: int
    ) -> None:
        """Ends on, before and behind page boundaries: a replay that hits equals one that does not."""
        prompt = prompt_of(length, seed=length)
        driver = Driver(small_engine(model_dir, exact=True).engine)
        first = driver.run(prompt, max_tokens=max_tokens)
        again = prompt + first.ids
        warm = driver.run(again, max_tokens=6)
        assert warm.admitted is not None
        assert warm.admitted.cached_tokens <= (length + max_tokens - 1) // BLOCK * BLOCK
        cold = Driver(small_engine(model_dir, exact=True, prefix_reuse=False).engine).run(again, max_tokens=6)
        assert warm.ids == cold.ids

    def test_whole_prompt_cached_still_computes_its_last_token(self, driver: Driver) -> None:
        prompt = prompt_of(3 * BLOCK)
        cold = driver.run(prompt)
        warm = driver.run(prompt)
        assert warm.admitted is not None
        assert warm.admitted.cached_tokens == 2 * BLOCK
        assert warm.ids == cold.ids

    @pytest.mark.guarantee("G2", "F14")
    def test_salts_never_share(self, driver: Driver) -> None:
        prompt = prompt_of(40)
        driver.run(prompt, salt=b"tenant a")
        other = driver.run(prompt, salt=b"tenant b")
        same = driver.run(prompt, salt=b"tenant a")
        assert other.admitted is not None
        assert same.admitted is not None
        assert (other.admitted.cached_tokens, same.admitted.cached_tokens) == (0, 32)

    def test_eviction_makes_room_and_forgets_the_oldest(self, model_dir: Path) -> None:
        driver = Driver(small_engine(model_dir, pool_tokens=8 * BLOCK).engine)
        for seed in range(6):
            driver.run(prompt_of(40, seed=seed))
        assert driver.engine.stats().evictions > 0
        recent, oldest = driver.run(prompt_of(40, seed=5)), driver.run(prompt_of(40, seed=0))
        assert recent.admitted is not None
        assert oldest.admitted is not None
        assert recent.admitted.cached_tokens == 32
        assert oldest.admitted.cached_tokens == 0

    def test_concurrent_twins_end_up_on_the_same_pages(self, driver: Driver) -> None:
        keys = [driver.submit(prompt_of(64), max_tokens=4) for _ in range(3)]
        driver.drain()
        assert len({tuple(driver.answers[key].ids) for key in keys}) == 1
        assert driver.engine.stats().pages_cached == 4  # 64 + 3 computed tokens, once


class TestChoices:
    def test_n_choices_share_the_prompt_and_copy_on_write(self, driver: Driver) -> None:
        key = driver.submit(prompt_of(40), n=3, temperature=1.0, seed=7, max_tokens=20)
        driver.step()
        assert driver.engine.stats().running == 3
        assert pages_in_use(driver) <= 3 + 2  # 3 prompt pages, and at most a copy of the tail for two
        driver.drain()
        answer = driver.answers[key]
        assert sorted(answer.finish.items()) == [(0, "length"), (1, "length"), (2, "length")]
        assert len({tuple(ids) for ids in answer.token_ids.values()}) == 3, "choices of a seed differ"
        assert driver.engine.stats().cow_copies == 2

    def test_choices_equal_single_runs_with_the_same_draws(self, model_dir: Path) -> None:
        """Greedy choices are all the same answer, and the same as n=1: copies hold the right bytes."""
        alone = Driver(small_engine(model_dir, exact=True).engine).run(prompt_of(41), max_tokens=30)
        forked = Driver(small_engine(model_dir, exact=True).engine).run(prompt_of(41), n=4, max_tokens=30)
        assert all(ids == alone.ids for ids in forked.token_ids.values())
        assert len(forked.token_ids) == 4

    def test_n_survives_a_pool_that_is_too_small(self, model_dir: Path) -> None:
        wide = Driver(small_engine(model_dir, exact=True, pool_tokens=512).engine)
        params = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 40}
        expected = wide.run(prompt_of(40), **params)
        narrow = Driver(small_engine(model_dir, exact=True, pool_tokens=8 * BLOCK).engine)
        squeezed = narrow.run(prompt_of(40), **params)
        assert narrow.engine.stats().preemptions > 0
        assert squeezed.token_ids == expected.token_ids


class TestEnds:
    def test_length(self, driver: Driver) -> None:
        answer = driver.run(prompt_of(10), max_tokens=5)
        assert (len(answer.ids), answer.finish[0]) == (5, "length")

    def test_stop_token_ends_and_its_text_is_not_sent(self, driver: Driver) -> None:
        free = driver.run(prompt_of(10), max_tokens=12)
        stopped = driver.run(prompt_of(10), max_tokens=12, stop_token_ids=(free.ids[4],))
        at = free.ids.index(free.ids[4])
        assert stopped.ids == free.ids[: at + 1]
        assert stopped.finish[0] == "stop"
        assert free.text.startswith(stopped.text)

    def test_min_tokens_bans_the_end(self, model_dir: Path) -> None:
        driver = Driver(small_engine(model_dir).engine)
        # Any sample may be the end-of-turn token at this temperature; below min_tokens none is.
        for seed in range(30):
            answer = driver.run(
                prompt_of(10), max_tokens=8, min_tokens=8, temperature=50.0, seed=seed, ignore_eos=False
            )
            assert EOS_ID not in answer.ids[:8]
            assert len(answer.ids) == 8

    def test_stop_string_across_tokens(self, driver: Driver) -> None:
        free = driver.run(prompt_of(10), max_tokens=24)
        middle = len(free.text) // 2
        stop = free.text[middle : middle + 5]
        stopped = driver.run(prompt_of(10), max_tokens=24, stop=(stop,))
        assert stopped.text == free.text[: free.text.index(stop)]
        assert stopped.finish[0] == "stop"

    @pytest.mark.guarantee("F23")
    def test_abort_frees_every_page_in_every_state(self, model_dir: Path) -> None:
        driver = Driver(small_engine(model_dir, sequences_max=4).engine)
        running = [driver.submit(prompt_of(100, seed=i), max_tokens=50) for i in range(3)]
        choices = driver.submit(prompt_of(30, seed=9), n=4, max_tokens=50)
        for _ in range(4):
            driver.step()
        assert driver.engine.stats().waiting == 1
        for key in (running[1], choices, running[0], running[2]):
            assert driver.engine.requests.abort(key)
            driver.engine.check_integrity()
        assert not driver.engine.requests.abort(choices), "it is over"
        assert not driver.engine.has_work
        assert pages_in_use(driver) == 0


class TestRefusals:
    def test_too_long(self, driver: Driver) -> None:
        limit = driver.engine.requests.intake.limits.context_tokens_max
        refused = driver.run(prompt_of(limit), max_tokens=1).refused
        assert refused is not None
        assert refused.reason == "too_long"
        assert str(limit) in refused.message

    def test_longest_possible_fits(self, model_dir: Path) -> None:
        driver = Driver(small_engine(model_dir, pool_tokens=128).engine)
        answer = driver.run(prompt_of(127), max_tokens=1)
        assert answer.finish == {0: "length"}

    def test_queue_full(self, model_dir: Path) -> None:
        driver = Driver(small_engine(model_dir, queue_max=2, sequences_max=4).engine)
        keys = [driver.submit(prompt_of(20, seed=i)) for i in range(7)]  # 4 places, 2 in the queue
        *taken, refused = [driver.answers[key].refused for key in keys]
        assert taken == [None] * 6
        assert refused is not None
        assert (refused.reason, refused.retry_after_s) == ("queue_full", 1.0)
        driver.drain()
        key = driver.submit(prompt_of(20, seed=9))
        assert driver.answers[key].refused is None

    def test_more_choices_than_the_queue_holds_are_served_when_nothing_runs(self, model_dir: Path) -> None:
        driver = Driver(small_engine(model_dir, queue_max=1, sequences_max=4).engine)
        assert len(driver.run(prompt_of(20), n=4, max_tokens=2).token_ids) == 4

    def test_token_ids_that_do_not_exist(self, driver: Driver) -> None:
        refused = driver.run([5, 512]).refused
        assert refused is not None
        assert refused.reason == "invalid"


class TestFaults:
    def test_nan_fails_its_own_request_only_and_poisons_no_page(self, model_dir: Path) -> None:
        """NaN in logits is no answer; NaN left in a recycled page is masked and must stay without effect."""
        healthy = Driver(small_engine(model_dir, exact=True, pool_tokens=512).engine)
        expected = healthy.run(prompt_of(40, seed=1), max_tokens=6).ids
        driver = Driver(small_engine(model_dir, exact=True, pool_tokens=512).engine)
        sick = driver.submit(prompt_of(40, seed=2), max_tokens=20)
        well = driver.submit(prompt_of(40, seed=1), max_tokens=6)
        driver.step()
        pool = driver.engine.runner.pool.data
        (sequence,) = [s for s in driver.engine.scheduler.running if s.request_id == f"r{sick}"]
        pool[sequence.pages[-1]] = torch.nan
        driver.drain()
        assert driver.answers[sick].failed is not None
        assert "NaN" in driver.answers[sick].failed.message
        assert driver.answers[well].ids == expected
        pool[:] = torch.nan  # as if every page had been left behind like that
        driver.engine.scheduler.pool.clear_cache()
        assert driver.run(prompt_of(40, seed=1), max_tokens=6).ids == expected

    def test_one_request_that_cannot_be_sampled_is_the_only_one_to_fail(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = driver.submit(prompt_of(20), temperature=1.0, n=3, max_tokens=5)
        good = driver.submit(prompt_of(20), max_tokens=5)

        sound = draws.BegunDraws

        def broken(logits: torch.Tensor, wanted: list[draws.Draw], greedy: torch.Tensor) -> object:
            if wanted:
                raise ValueError("planted")
            return sound(logits, wanted, greedy)

        monkeypatch.setattr(sampler, "BegunDraws", broken)
        driver.drain()
        assert driver.answers[bad].failed is not None
        assert driver.answers[good].finish == {0: "length"}
        assert pages_in_use(driver) == 0


class TestLogprobs:
    def test_top_and_bytes(self, driver: Driver) -> None:
        answer = driver.run(prompt_of(10), max_tokens=4, logprobs=3)
        logprobs = [item for delta in answer.deltas for item in delta.logprobs]
        assert [item.token_id for item in logprobs] == answer.ids
        for item in logprobs:
            assert len(item.top) == 3
            assert item.top[0].token_id == item.token_id, "greedy takes the best"
            assert item.logprob == pytest.approx(item.top[0].logprob)
            assert [top.logprob for top in item.top] == sorted((t.logprob for t in item.top), reverse=True)
        joined = b"".join(item.token_bytes for item in logprobs).decode("utf-8", errors="replace")
        assert joined.startswith(answer.text.rstrip("\ufffd"))

    @pytest.mark.parametrize("ends", [True, False])
    def test_there_are_as_many_as_ids_with_the_end_token_or_without(self, driver: Driver, ends: bool) -> None:
        allowed = (EOS_ID,) if ends else ()
        answer = driver.run(
            prompt_of(10), max_tokens=4, logprobs=0, allowed_token_ids=allowed, ignore_eos=not ends
        )
        assert answer.finish == {0: "stop" if ends else "length"}
        logprobs = [item for delta in answer.deltas for item in delta.logprobs]
        assert [item.token_id for item in logprobs] == answer.ids

    def test_logprobs_do_not_depend_on_temperature(self, driver: Driver) -> None:
        cold = driver.run(prompt_of(10), max_tokens=1, logprobs=5)
        hot = driver.run(prompt_of(10), max_tokens=1, logprobs=5, temperature=5.0, seed=1)
        assert cold.deltas[0].logprobs[0].top == hot.deltas[0].logprobs[0].top


def test_mixed_steps_keep_streams_going(model_dir: Path) -> None:
    """A long prompt arrives: running answers still get a token in every step."""
    driver = Driver(small_engine(model_dir, step_tokens_max=32).engine)
    talker = driver.submit(prompt_of(8), max_tokens=30)
    driver.step()
    driver.submit(prompt_of(300, seed=1), max_tokens=2)
    before = len(driver.answers[talker].deltas)
    for _ in range(8):
        driver.step()
    assert len(driver.answers[talker].deltas) == before + 8


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_answers_and_loses_no_page(tiny_llama: Path, data: st.DataObject) -> None:
    """Random requests, steps and aborts on a tight pool: every answer equals the one given alone."""
    built = small_engine(tiny_llama, exact=True, pool_tokens=12 * BLOCK, step_tokens_max=24, sequences_max=4)
    driver = Driver(built.engine)
    submitted: dict[int, tuple[int, int, int]] = {}
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "step", "abort"]))
        if action == "submit":
            length, seed, n = data.draw(st.tuples(st.integers(1, 80), st.integers(0, 3), st.integers(1, 3)))
            submitted[driver.submit(prompt_of(length, seed=seed), n=n, max_tokens=10)] = (length, seed, n)
        elif action == "abort" and submitted:
            key = data.draw(st.sampled_from(sorted(submitted)))
            driver.engine.requests.abort(key)
            del submitted[key]
        elif driver.engine.has_work:
            driver.step()
    driver.drain()
    assert pages_in_use(driver) == 0
    alone = Driver(_reference(tiny_llama), check=False)
    for key, (length, seed, n) in submitted.items():
        expected = alone.run(prompt_of(length, seed=seed), max_tokens=10).ids
        assert driver.answers[key].token_ids == dict.fromkeys(range(n), expected)


_REFERENCE: dict[Path, object] = {}


def _reference(model_dir: Path):  # type: ignore[no-untyped-def]
    if model_dir not in _REFERENCE:
        _REFERENCE[model_dir] = small_engine(model_dir, exact=True, prefix_reuse=False).engine
    return _REFERENCE[model_dir]


def test_deltas_are_complete(driver: Driver) -> None:
    answer = driver.run(prompt_of(12), max_tokens=9)
    assert all(isinstance(delta, Delta) and len(delta.token_ids) == 1 for delta in answer.deltas)
    assert [delta.finish_reason for delta in answer.deltas] == [None] * 8 + ["length"]
    assert torch.tensor(answer.ids).max() < 512
