"""The router bench: its load is a function of the seed, and its books say what happened, planted here."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import _router_tally as tally
from bench import router
from bench._router_clients import ANSWER_TOKENS, GIVEN_UP, TRIES_MAX, Player
from bench._router_load import EVENT_AT, PHASES, Shape, Turn, schedule, zipf_weights
from bench._router_tally import Grow, Kill, Record

SHAPE = Shape(sessions=20, seconds=30.0, turns_per_s=1.2)


# -- the load ------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_load_and_another_is_not() -> None:
    assert schedule(SHAPE) == schedule(SHAPE)
    assert schedule(SHAPE) != schedule(replace(SHAPE, seed=2))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    sessions=st.integers(1, 60),
    seconds=st.floats(1, 120),
    turns_per_s=st.floats(0.1, 5),
    seed=st.integers(0, 1000),
    bursts=st.integers(0, 4),
)
def test_every_turn_is_there_once_and_after_those_before_it(
    sessions: int, seconds: float, turns_per_s: float, seed: int, bursts: int
) -> None:
    shape = Shape(sessions, seconds, turns_per_s, seed=seed, bursts=bursts)
    load = schedule(shape)
    counts: Counter[int] = Counter()
    for phase in ("open", *PHASES):
        turns = load[phase]
        assert [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
        assert all(0 <= turn.at_s <= seconds for turn in turns)
        main = [turn for turn in turns if turn.branch == 0]
        for turn in main:
            assert turn.number == counts[turn.session]
            counts[turn.session] += 1
        side = [turn for turn in turns if turn.branch]
        assert len(side) == (0 if phase == "open" else bursts * shape.burst_turns)
        assert all(0 < turn.number <= counts[turn.session] for turn in side)
    assert set(counts) == set(range(sessions))


def test_first_turns_are_long_and_no_two_begin_alike() -> None:
    load = schedule(replace(SHAPE, document_words=(50, 90)))
    turns = [turn for phase in load.values() for turn in phase]
    first = [turn.text for turn in turns if turn.number == 0 and not turn.branch]
    assert len({text.split(":")[0] for text in first}) == len(first) == SHAPE.sessions
    assert all(50 <= len(text.split()) <= 90 + 2 + SHAPE.turn_words[1] for text in first)
    later = [turn.text for turn in turns if turn.number]
    assert all(8 <= len(text.split()) <= 30 for text in later)


def test_some_sessions_open_while_others_go_on() -> None:
    load = schedule(replace(SHAPE, sessions=24))
    assert len(load["open"]) == 21
    assert [sum(turn.number == 0 for turn in load[phase]) for phase in PHASES] == [1, 1, 1]


def test_a_few_sessions_say_most() -> None:
    assert zipf_weights(3, 1.0) == [1, 0.5, pytest.approx(1 / 3)]
    load = schedule(replace(SHAPE, seconds=3000.0, bursts=0))
    said = Counter(turn.session for turn in load["steady"])
    weights = zipf_weights(20, SHAPE.zipf)
    for session in range(5):
        assert said[session] / said.total() == pytest.approx(weights[session] / sum(weights), rel=0.2)


def test_a_burst_is_many_questions_to_one_point_at_once() -> None:
    load = schedule(replace(SHAPE, bursts=1, burst_turns=5))
    burst = [turn for turn in load["kill"] if turn.branch]
    assert [turn.branch for turn in burst] == [1, 2, 3, 4, 5]
    assert len({(turn.session, turn.number, turn.at_s) for turn in burst}) == 1
    assert len({turn.text for turn in burst}) == 5
    assert burst[0].session < SHAPE.hot_sessions


def test_hot_sessions_speak_soon_after_the_kill() -> None:
    kill_s = EVENT_AT["kill"] * SHAPE.seconds
    for seed in range(20):
        turns = schedule(replace(SHAPE, seed=seed))["kill"]
        soon = {turn.session for turn in turns if not turn.branch and 0 <= turn.at_s - kill_s <= 1}
        assert {0, 1, 2} <= soon


# -- the clients ---------------------------------------------------------------------------


class Completions:
    """An endpoint that answers with the number of messages it got; the first `failures` calls fail."""

    def __init__(self, failures: int = 0, ends_early: bool = False) -> None:
        self.failures, self.ends_early = failures, ends_early
        self.calls: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **body: Any) -> Any:
        self.calls.append(body)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("lost")
        return Stream(f"I got {len(body['messages'])}.", self.ends_early)


class Stream:
    def __init__(self, text: str, ends_early: bool) -> None:
        self._text, self._ends_early = text, ends_early

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        for text in ("", self._text):
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=text))], usage=None)
        if not self._ends_early:
            receipt = {"tokens": {"gpu": 6, "cpu": 0, "compute": 4}, "replica": ["a"]}
            usage = SimpleNamespace(prompt_tokens=10, completion_tokens=ANSWER_TOKENS)
            yield SimpleNamespace(choices=[], usage=usage, model_extra={"receipt": receipt})


async def play(endpoint: Completions, *turns: Turn) -> Player:
    player = Player(endpoint, "model", "pow2", 3)  # type: ignore[arg-type]
    await player.play("steady", turns)
    return player


async def test_turns_of_a_session_wait_for_their_answers_and_side_questions_are_forgotten() -> None:
    endpoint = Completions()
    turns = [Turn(7, 2, 0.0, "c?"), Turn(7, 1, 0.0, "side?", branch=1), Turn(7, 1, 0.0, "b?")]
    player = await play(endpoint, *turns, Turn(7, 0, 0.02, "a?"))
    said = sorted([message["content"] for message in call["messages"]] for call in endpoint.calls)
    assert said == [
        ["a?"],
        ["a?", "I got 1.", "b?"],
        ["a?", "I got 1.", "b?", "I got 3.", "c?"],
        ["a?", "I got 1.", "side?"],
    ]
    assert {call["extra_body"]["session_id"] for call in endpoint.calls} == {"bench-7"}
    assert (player.home(7), player.home(8)) == ("a", "")
    record = player.records[0]
    assert (record.router, record.round, record.phase, record.number) == ("pow2", 3, "steady", 0)
    assert (record.prompt_tokens, record.hit_tokens, record.answer_tokens) == (10, 6, ANSWER_TOKENS)
    assert record.ttft_s is not None
    assert 0 <= record.ttft_s <= record.done_s - record.sent_s


async def test_side_requests_quote_the_turn_under_its_sessions_id_and_are_no_part_of_it() -> None:
    endpoint = Completions()
    player = Player(endpoint, "model", "pow2", 3, side_requests=3)  # type: ignore[arg-type]
    await player.play("steady", [Turn(7, 0, 0.0, "a?"), Turn(7, 1, 0.0, "b?")])
    assert sorted(record.branch for record in player.records) == [-3, -3, -2, -2, -1, -1, 0, 0]
    side = [call["messages"] for call in endpoint.calls if "### Chat" in call["messages"][-1]["content"]]
    assert sorted(len(messages) for messages in side) == [1] * 6
    assert sum("USER: b?\nASSISTANT: I got 3." in messages[0]["content"] for messages in side) == 3
    assert {call["extra_body"]["session_id"] for call in endpoint.calls} == {"bench-7"}
    assert [len(c["messages"]) for c in endpoint.calls if c["messages"] not in side] == [1, 3]


async def test_a_turn_that_fails_is_asked_again_and_each_failure_is_an_error() -> None:
    player = await play(Completions(failures=1), Turn(0, 0, 0.0, "a?"))
    (record,) = player.records
    assert record.errors == ("RuntimeError: lost",)
    assert record.text == "I got 1."
    assert record.ttft_s is not None
    assert record.ttft_s > 0.2  # the wait for the second try is the client's, too


async def test_a_turn_that_is_given_up_does_not_end_the_conversation() -> None:
    endpoint = Completions(failures=TRIES_MAX)
    player = await play(endpoint, Turn(0, 0, 0.0, "a?"), Turn(0, 1, 0.0, "b?"))
    given_up, record = player.records
    assert given_up.ttft_s is None
    assert len(given_up.errors) == TRIES_MAX
    assert record.text == "I got 3."
    assert endpoint.calls[-1]["messages"][1]["content"] == GIVEN_UP


async def test_a_stream_that_is_cut_is_an_error() -> None:
    player = await play(Completions(ends_early=True), Turn(0, 0, 0.0, "a?"))
    assert set(player.records[0].errors) == {"RuntimeError: the stream ended before its usage"}


async def test_the_event_comes_when_it_is_due() -> None:
    came: list[float] = []
    began_s = time.monotonic()
    player = Player(Completions(), "model", "pow2", 0)  # type: ignore[arg-type]
    await player.play("kill", [], at_s=0.05, event=lambda: came.append(time.monotonic() - began_s))
    assert [0.05 <= at_s < 5 for at_s in came] == [True]


async def test_an_event_that_fails_ends_the_run() -> None:
    def fail() -> None:
        raise RuntimeError("no such replica")

    player = Player(Completions(), "model", "pow2", 0)  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(player.play("kill", [Turn(0, 0, 60.0, "a?")], event=fail), 10)
    assert "no such replica" in str(caught.value.exceptions[0])


# -- the books -----------------------------------------------------------------------------


def record(**fields: Any) -> Record:
    """Session 0, answered 1 s after it was asked, by replica a."""
    base = Record(
        router="samovar",
        round=0,
        phase="steady",
        session=0,
        number=1,
        branch=0,
        sent_s=0.0,
        prompt="p",
        first_s=1.0,
        done_s=2.0,
        text="tea",
        prompt_tokens=100,
        answer_tokens=16,
        tokens={"gpu": 50, "cpu": 30, "compute": 20},
        replica="a",
    )
    return replace(base, **fields)


def test_percentiles_lie_between_neighbours() -> None:
    assert tally.percentile([], 0.5) is None
    assert tally.percentile([3.0], 0.99) == 3.0
    assert tally.percentile([4, 1, 3, 2], 0.5) == 2.5
    assert tally.percentile(range(101), 0.95) == 95


def test_a_row_has_exactly_what_the_issue_asks_for() -> None:
    records = [record(first_s=float(n), prompt=str(n)) for n in range(101)]
    records.append(record(prompt="x", first_s=None, tokens={}, prompt_tokens=0, errors=("a", "b", "c")))
    (row,) = tally.rows(records, ["samovar", "pow2"])
    assert row == {
        "router": "samovar",
        "phase": "steady",
        "prompt_tokens": 10100,
        "hit_tokens": 8080,
        "ttft_p50_s": 50,
        "ttft_p95_s": 95,
        "ttft_p99_s": 99,
        "errors": 3,
    }


def test_opening_turns_are_in_no_row_but_in_the_details() -> None:
    records = [record(phase="open"), record(phase="kill", router="pow2")]
    routers = ["pow2", "samovar"]
    assert [(row["router"], row["phase"]) for row in tally.rows(records, routers)] == [("pow2", "kill")]
    assert [row["phase"] for row in tally.details(records, routers, 3)] == ["kill", "open"]


def test_a_text_that_differs_from_what_most_said_is_an_error_of_its_router() -> None:
    same = [record(), record(router="pow2"), record(router="consistent_hash")]
    assert tally.wrong_texts(same) == []
    records = [*same[:2], replace(same[2], text="coffee"), record(prompt="other", text="cake")]
    assert tally.wrong_texts(records) == [records[2]]
    routers = ["samovar", "consistent_hash", "pow2"]
    assert [row["errors"] for row in tally.rows(records, routers)] == [0, 1, 0]


def test_a_turn_without_an_answer_is_no_wrong_text() -> None:
    assert tally.wrong_texts([record(), record(router="pow2", text="", first_s=None)]) == []


def test_the_spread_is_the_busiest_over_the_mean() -> None:
    records = [record(replica=name, prompt=name) for name in "aaabbc"]
    (row,) = tally.details(records, ["samovar"], 3)
    assert row["spread"] == 1.5
    assert row["tokens"] == {"compute": 120, "cpu": 180, "gpu": 300}
    (alone,) = tally.details(records[:3], ["samovar"], 3)
    assert alone["spread"] == 3


def test_who_stays_at_home_is_told_by_the_conversations_own_turns() -> None:
    records = [
        record(number=number, sent_s=float(number), replica=name, branch=branch, phase=phase)
        for number, (name, branch, phase) in enumerate(
            [("a", 0, "open"), ("b", -1, "steady"), ("a", 0, "steady"), ("b", 0, "steady"), ("b", 0, "kill")]
        )
    ]
    assert tally.at_home(records, "samovar", "open") is None
    assert tally.at_home(records, "samovar", "steady") == 0.5
    assert tally.at_home(records, "samovar", "kill") == 1.0


KILL = Kill("samovar", 0, "a", 10.0)
LIVED = [
    record(session=0, sent_s=8.0, first_s=8.5, done_s=9.0),
    record(session=1, sent_s=8.0, first_s=8.5, done_s=9.0, prompt="q"),
    record(session=2, sent_s=8.0, first_s=8.5, done_s=9.0, prompt="r", replica="b"),
]


def test_a_resume_is_counted_from_the_kill_or_the_question_whichever_is_later() -> None:
    after = [
        record(session=0, phase="kill", sent_s=9.5, first_s=11.0, done_s=12.0, replica="b"),
        record(session=0, phase="kill", sent_s=13.0, first_s=19.0, done_s=20.0, replica="b"),
        record(session=1, phase="kill", sent_s=14.0, first_s=17.0, done_s=18.0, tokens={"compute": 150}),
        record(session=2, phase="kill", sent_s=10.0, first_s=10.1, done_s=18.0, replica="b"),
        record(session=1, phase="kill", sent_s=10.0, first_s=10.1, done_s=10.2, branch=1),
        record(session=1, phase="kill", sent_s=10.0, first_s=10.1, done_s=10.2, router="pow2"),
    ]
    found = tally.resumes([*LIVED, *after], KILL)
    assert found["waits_s"] == [1.0, 3.0]
    assert (found["sessions"], found["resumed"], found["within_2s"]) == (2, 2, 1)
    assert found["first_answer_s"] == 1.0
    assert found["cached_tokens"] == 80
    assert found["recomputed_tokens"] == (116 - 80) + 116


def test_nobody_has_come_back_yet() -> None:
    found = tally.resumes(LIVED, KILL)
    assert (found["sessions"], found["resumed"], found["first_answer_s"]) == (2, 0, None)


def test_where_nobody_came_back_nothing_holds() -> None:
    found = tally.expectations([], [tally.resumes(LIVED, KILL)])
    assert [(row["measured"], row["holds"]) for row in found] == [(None, False), (None, False)]


def test_what_the_added_replica_did() -> None:
    grow = Grow("samovar", 0, frozenset("ab"), 10.0)
    records = [
        record(phase="grow", replica="b", first_s=11.0),
        record(phase="grow", replica="c", first_s=15.0),
        record(phase="grow", replica="c", first_s=13.0),
        record(phase="grow", replica="c", first_s=12.0, router="pow2"),
    ]
    found = tally.newcomer(records, grow)
    assert (found["first_answer_s"], found["turns"], found["hit_tokens"]) == (3.0, 2, 160)
    assert tally.newcomer(records[:1], grow)["first_answer_s"] is None


def test_expectations_compare_rounds_and_take_their_median() -> None:
    records = []
    for number, ours_s in enumerate((0.5, 0.7, 5.0)):
        records += [record(round=number, first_s=ours_s), record(round=number, router="pow2")]
        records += [record(round=number, router="consistent_hash", tokens={"gpu": 100})]
    found = {row["what"]: row for row in tally.expectations(records, [])}
    assert found["p95 TTFT of consistent_hash"]["measured"] == 0.7
    assert found["p95 TTFT of consistent_hash"]["holds"]
    assert not found["p95 TTFT of pow2"]["holds"]
    assert found["hit tokens of consistent_hash"]["measured"] == 0.8
    assert not found["hit tokens of consistent_hash"]["holds"]


def test_a_slow_resume_does_not_hold() -> None:
    resumed = tally.resumes(
        [*LIVED, record(session=1, phase="kill", sent_s=10.0, first_s=12.5, done_s=13.0)], KILL
    )
    slow, recomputed = tally.expectations([], [resumed])
    assert (slow["measured"], slow["holds"]) == (2.5, False)
    assert (recomputed["measured"], recomputed["holds"]) == (pytest.approx(36 / 116), False)


# -- the command ---------------------------------------------------------------------------


def test_quick_changes_only_what_nobody_asked_for() -> None:
    quick = router.arguments(["--quick", "--sessions", "5", "--phases", "grow", "steady"])
    assert (quick.sessions, quick.seconds) == (5, router.QUICK["seconds"])
    assert quick.phases == ["steady", "grow"]
    assert router.arguments([]).seconds == 32.0


@pytest.mark.parametrize("policy", router.ROUTERS)
def test_each_service_has_its_router_and_is_exact(policy: str, tmp_path: Any) -> None:
    flags = list(router.service_flags(router.arguments([]), policy, tmp_path))
    chosen = dict(zip(flags[::2], flags[1::2], strict=True))
    assert chosen["--router.policy"] == policy
    assert chosen["--engine.device"] == "cpu"
    assert chosen["--engine.threads"] == "1"
