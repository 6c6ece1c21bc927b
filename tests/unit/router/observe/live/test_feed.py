"""Merge patches give back the state they were made for; streams are bounded, slow ones hold nothing up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.configs.optional_sections import LiveSettings
from samovar.router.observe.live.feed import Audience, Feed, Feeds, Json, LookPace, Outbox, diff
from samovar.router.openai import TooManyRequests
from tests.support.amounts import examples
from tests.support.router.live_reader import events_of, patched

ALL, ONE, TWO = Audience("local", True), Audience("a", False), Audience("b", False)
KEYS = st.sampled_from(["a", "b", "sess_1", "t", ""])
LEAVES = st.one_of(
    st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from(["", "x"])
)
VALUES = st.recursive(
    st.one_of(LEAVES, st.lists(LEAVES, max_size=3)),
    lambda inner: st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
STATES = st.dictionaries(KEYS, VALUES, max_size=5)


@settings(max_examples=examples(120))
@given(STATES, STATES)
def test_a_patch_makes_the_new_state_of_the_old_and_is_empty_only_if_they_are_equal(
    old: Json, new: Json
) -> None:
    patch = diff(old, new)
    assert json.dumps(patched(old, patch), sort_keys=True) == json.dumps(new, sort_keys=True)
    assert (not patch) == (json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True))


@settings(max_examples=examples(90))
@given(STATES.map(lambda state: {**state, "t": 0}), st.lists(STATES, max_size=6), st.sets(st.integers(0, 5)))
def test_a_reader_ends_with_the_last_state_whenever_it_reads(
    first: Json, later: list[Json], reads: set[int]
) -> None:
    feed, outbox = Feed(ALL), Outbox(4, lambda: None)
    feed.outboxes.add(outbox)
    states = [first, *({**state, "t": number} for number, state in enumerate(later, 1))]
    seen: Json | None = None
    for number, state in enumerate(states):
        feed.publish(state)
        if number in reads or number == len(states) - 1:
            seen = read(outbox, seen)
    assert {**(seen or {}), "t": 0} == {**states[-1], "t": 0}


def read(outbox: Outbox, seen: Json | None) -> Json | None:
    for name, data in events_of(outbox.take()):
        seen = data if name == "state" else patched(seen or {}, data)
    return seen


def test_a_state_that_only_its_time_tells_apart_is_not_sent() -> None:
    feed, woken = Feed(ALL), []
    outbox = Outbox(4, lambda: woken.append(1))
    feed.outboxes.add(outbox)
    assert feed.publish({"t": 1, "a": 1})
    assert not feed.publish({"t": 2, "a": 1})
    assert feed.publish({"t": 3, "a": 2})
    assert len(woken) == 2
    assert events_of(outbox.take()) == [("state", {"t": 3, "a": 2})]
    assert outbox.take() == b""


def test_the_smaller_of_state_and_change_is_sent() -> None:
    outbox = Outbox(4, lambda: None)
    outbox.put({"t": 1, "long": "x" * 100, "b": 1})
    outbox.take()
    outbox.put({"t": 2, "long": "x" * 100, "b": 2})
    assert events_of(outbox.take()) == [("change", {"t": 2, "b": 2})]
    outbox.put({"t": 3})
    assert events_of(outbox.take()) == [("state", {"t": 3})]


def test_turns_wait_for_a_slow_reader_up_to_a_limit_and_it_learns_how_many_it_missed() -> None:
    outbox = Outbox(2, lambda: None)
    for number in range(5):
        outbox.add({"n": number})
    assert outbox.take() == b"", "a turn is no use before the first state"
    outbox.put({"t": 1})
    outbox.add({"n": 5})
    turns = [data for name, data in events_of(outbox.take()) if name == "turn"]
    assert turns == [{"n": 4, "missed": 4}, {"n": 5, "missed": 0}]
    assert outbox.take() == b""


def test_a_turn_reaches_those_who_may_see_it_and_no_other() -> None:
    feeds = Feeds(LiveSettings(), 1.0)
    boxes: dict[Audience, Outbox] = {one: feeds.open(one, lambda: None) for one in (ALL, ONE, TWO)}
    for feed in feeds:
        feed.publish({"t": 0})
    for box in boxes.values():
        box.take()
    assert feeds.turn("a", lambda audience: {"all": audience.sees_all})
    assert {one: events_of(box.take()) for one, box in boxes.items()} == {
        ALL: [("turn", {"all": True, "missed": 0})],
        ONE: [("turn", {"all": False, "missed": 0})],
        TWO: [],
    }


@pytest.mark.parametrize(
    ("limits", "named"),
    [({"listeners_max": 3}, "listeners_max"), ({"listeners_per_key_max": 2}, "listeners_per_key_max")],
)
def test_streams_are_bounded_in_all_and_per_tenant(limits: dict[str, Any], named: str) -> None:
    feeds = Feeds(LiveSettings.model_validate(limits), 7.0)
    first, _ = feeds.open(ONE, lambda: None), feeds.open(ONE, lambda: None)
    if named == "listeners_max":
        feeds.open(TWO, lambda: None)
    with pytest.raises(TooManyRequests, match=f"live.{named}") as refused:
        feeds.open(ONE, lambda: None)
    assert refused.value.headers["retry-after"] == "7"
    feeds.check_integrity()
    feeds.close(ONE, first)
    feeds.open(ONE, lambda: None)
    feeds.check_integrity()


def test_a_later_reader_gets_the_state_at_once_and_an_audience_without_readers_is_forgotten() -> None:
    feeds = Feeds(LiveSettings(), 1.0)
    first = feeds.open(ONE, lambda: None)
    (feed,) = feeds
    feed.publish({"t": 1})
    second = feeds.open(ONE, lambda: None)
    assert events_of(second.take()) == [("state", {"t": 1})]
    feeds.close(ONE, first)
    feeds.close(ONE, second)
    assert (list(feeds), len(feeds)) == ([], 0)


def test_the_pace_is_quick_after_a_change_and_slow_while_nothing_changes() -> None:
    pace, now_s, rests = LookPace(LiveSettings(), 0.0), 0.0, []
    for changed in (True, False, False, False, True):
        least_s, most_s = pace.after(changed, now_s)
        rests.append((least_s, most_s))
        now_s += most_s
    assert rests == [(0.5, 0.5), (0.5, 1.0), (0.5, 2.0), (0.5, 2.0), (0.5, 0.5)]
    assert LookPace(LiveSettings(period_s=3.0), 0.0).after(False, 0.0) == (3.0, 3.0)


def test_changes_that_go_on_are_looked_at_quickly_at_first_and_then_at_the_pace_that_may_last() -> None:
    pace, now_s, rests = LookPace(LiveSettings(), 0.0), 0.0, []
    for _ in range(200):
        rests.append(pace.after(True, now_s)[0])
        now_s += rests[-1]
    assert rests[:12] == [0.5] * 12
    assert now_s / len(rests) > 1.8
    assert rests[-1] == 2.0
    assert pace.after(True, now_s + 60.0)[0] == 0.5, "the credit is back after a rest"
