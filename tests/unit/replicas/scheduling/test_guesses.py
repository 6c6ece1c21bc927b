"""Guesses of what follows in a text: from its own past, and only where such guesses were right."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.replicas.scheduling import drafts
from samovar.replicas.scheduling.drafts import Guesses, last_match

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def text(*tokens: int) -> array[int]:
    return array("I", tokens)


def followed(*tokens: int, of: int = 1) -> Guesses:
    """Guesses of a text that was followed token by token from its first `of` on."""
    known = Guesses()
    for end in range(of, len(tokens) + 1):
        known.follow(text(*tokens[:end]))
    return known


@given(TOKENS)
def test_the_match_is_the_last_one_of_the_longest_suffix(tokens: list[int]) -> None:
    expected: tuple[int | None, int] = (None, 0)
    for length in drafts.SUFFIXES:
        places = [
            place
            for place in range(length, len(tokens))
            if tokens[place - length : place] == tokens[len(tokens) - length :]
        ]
        if places:
            expected = places[-1], length
    assert last_match(text(*tokens)) == expected


@given(st.lists(st.sampled_from([0, 1, 256, 1 << 24, 1 << 16]), max_size=60))
def test_tokens_are_matched_and_not_bytes(tokens: list[int]) -> None:
    place, length = last_match(text(*tokens))
    if place is not None:
        assert tokens[place - length : place] == tokens[len(tokens) - length :]


def test_nothing_further_back_than_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "LOOKBACK_TOKENS", 8)
    near = [1, 2, 3, 9, 9, 9, 1, 2]
    assert last_match(text(*near)) == (2, 2)
    assert last_match(text(*near[:3], 9, *near[3:])) == (None, 0)
    assert last_match(text(5, 5, 5, *near)) == (5, 2), "places are those in the whole text"


def test_nothing_is_asked_for_before_a_guess_was_right() -> None:
    fresh = followed(1, 2, 3, 4, 1, 2)
    assert fresh.next(text(1, 2, 3, 4, 1, 2), 0.1, 4) == ()
    right = followed(1, 2, 3, 4, 1, 2, 3)
    assert right.next(text(1, 2, 3, 4, 1, 2, 3), 0.1, 4) == (4,), "how far it goes right is not known yet"


def test_a_loop_is_expected_to_go_on() -> None:
    tokens = [7, 8, 9] * 12
    assert followed(*tokens).next(text(*tokens), 0.2, 7) == (7, 8, 9, 7, 8, 9, 7)


def test_surer_guesses_only_where_more_is_asked_of_them() -> None:
    tokens = text(*[7, 8, 9] * 12)
    known = followed(*tokens)
    counts = [len(known.next(tokens, odds, 64)) for odds in (0.05, 0.5, 0.9, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_wrong_guesses_end_it() -> None:
    tokens = [7, 8, 9] * 12
    known = followed(*tokens)
    for other in range(100, 140):
        tokens += [7, 8, other]
        known.follow(text(*tokens))
    assert known.next(text(*tokens[:-1]), 0.2, 7) == ()


def test_a_text_that_begins_again_is_a_new_one() -> None:
    known = followed(*[7, 8, 9] * 12)
    known.follow(text(1, 2))
    assert known.next(text(1, 2), 0.01, 7) == ()


@given(TOKENS, st.floats(0, 1), st.integers(0, 20))
def test_any_text_gives_at_most_so_many_of_its_own_tokens(tokens: list[int], odds: float, count: int) -> None:
    known = Guesses()
    for end in range(len(tokens) + 1):
        known.follow(text(*tokens[:end]))
        drafted = known.next(text(*tokens[:end]), odds, count)
        assert len(drafted) <= count
        assert set(drafted) <= set(tokens[:end])
