"""Hints that a trace's clients would send, and what they do in the bench's cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench._policy_hints import Telling, hints_of, parse_telling
from bench._single_tier import hits_with
from samovar.cache_tiers.policy import make_policy
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicySettings
from tests.support.traffic import turn as request

ALL = Telling(share=1.0, tool_s=2.0, typing_s=5.0, closed_s=60.0, duration_error=0.0)


def turns() -> list[TraceTurn]:
    """One second each: a call of a tool, of one that is back at once, an answer, the last answer."""
    made = [request(0, at_s, (0, 1)) for at_s in (0.0, 31.0, 33.0, 134.0)]
    return [replace(turn, stop="tool_calls") for turn in made[:2]] + made[2:]


def test_clients_tell_what_comes_next() -> None:
    told = [(hint.at_s, hint.event, hint.expected_return_s) for hint in hints_of(turns(), ALL, seed=0)]
    assert told == [
        (1.0, None, 30.0),
        (29.0, "tool_finished", None),
        (32.0, None, 1.0),
        (129.0, "typing", None),
        (195.0, "closed", None),
    ]


def test_only_what_is_chosen_is_told_and_by_some() -> None:
    told = hints_of(turns(), Telling(share=1.0, closed_s=60.0), seed=0)
    assert [hint.event for hint in told] == ["closed"]
    assert not hints_of(turns(), replace(ALL, share=0.0), seed=0)
    many = [request(session, float(session), (session,)) for session in range(1000)]
    assert 420 < len(hints_of(many, Telling(closed_s=1.0), seed=0)) < 580


def test_times_are_told_with_their_error() -> None:
    many = [
        replace(request(session, at_s + session * 100.0, (session,)), stop="tool_calls")
        for session in range(2000)
        for at_s in (0.0, 11.0)
    ]
    hints = hints_of(many, Telling(share=1.0, duration_error=1.0), seed=1)
    errors = [math.log(hint.expected_return_s / 10.0) for hint in hints if hint.expected_return_s]
    assert len(errors) == 2000
    assert abs(sum(errors) / len(errors)) < 0.1
    assert 0.9 < math.sqrt(sum(error**2 for error in errors) / len(errors)) < 1.1


def test_hints_are_read_from_words() -> None:
    assert parse_telling("tool_s=2,share=1") == Telling(share=1.0, tool_s=2.0)
    for text, words in (("tool=2", "no such hint"), ("tool_s=-1", "0 or more"), ("tool_s=x", "float")):
        with pytest.raises(ValueError, match=words):
            parse_telling(text)


def test_what_is_told_to_be_over_makes_room() -> None:
    """Of two sessions the one that is gone was used last: only its client can know."""
    comes, goes = request(0, 0.0, (0, 1)), request(1, 10.0, (10, 11))
    other, again = request(2, 100.0, (20, 21)), request(0, 200.0, (0, 1))
    traffic = [comes, goes, other, again]
    settings = PolicySettings()
    found = [
        hits_with(traffic, 4, make_policy(settings), settings, count_from_s=150.0, hints=hints).hit_tokens
        for hints in ((), hints_of([goes], Telling(share=1.0, closed_s=5.0), seed=0))
    ]
    assert found == [0, again.input_tokens]
