"""The order in which copies go, as the policy alone sees it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers.policy import LeastRecentlyUsed
from cache_tiers.residency import Resident
from tests.directory_world import header, tag

COPY = Resident(
    address=header([1]).address,
    sessions=frozenset({tag("s1")}),
    nbytes=100,
    first_block=0,
    blocks=1,
    last_used_s=100.0,
    keep_s=0.0,
    is_clean=False,
)
NOW_S = 1000.0


def order(*copies: Resident, now_s: float = NOW_S) -> list[int]:
    return LeastRecentlyUsed().order(copies, "cpu", now_s)


def test_the_least_recently_used_goes_first() -> None:
    assert order(*(replace(COPY, last_used_s=at) for at in (30.0, 10.0, 20.0))) == [1, 2, 0]


def test_what_is_kept_goes_last_however_old() -> None:
    kept = replace(COPY, last_used_s=1.0, keep_s=1000.0)
    clean_kept = replace(kept, last_used_s=2.0, is_clean=True)
    assert order(kept, COPY, clean_kept) == [1, 2, 0]
    assert order(kept, COPY, now_s=1001.0) == [0, 1], "kept for long enough"


def test_clean_goes_before_dirty_within_a_class() -> None:
    clean = replace(COPY, last_used_s=900.0, is_clean=True)
    assert order(COPY, clean) == [1, 0]


def test_of_equal_use_the_deeper_goes_first() -> None:
    assert order(*(replace(COPY, first_block=first) for first in (0, 8, 4))) == [1, 2, 0]


def test_f26_a_use_in_the_future_is_a_use_now() -> None:
    future = replace(COPY, last_used_s=NOW_S + 3600, keep_s=10.0)
    assert order(future, COPY) == [1, 0]
    assert order(replace(future, keep_s=0.0), COPY) == [1, 0]


copies = st.lists(
    st.builds(
        Resident,
        address=st.just(COPY.address),
        sessions=st.just(COPY.sessions),
        nbytes=st.integers(1, 1000),
        first_block=st.integers(0, 3),
        blocks=st.integers(1, 3),
        last_used_s=st.floats(-100, 2000),
        keep_s=st.sampled_from([0.0, 10.0, 500.0]),
        is_clean=st.booleans(),
    ),
    max_size=20,
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(copies=copies)
def test_an_order_names_each_once_and_its_classes_do_not_mix(copies: list[Resident]) -> None:
    answer = order(*copies)
    assert sorted(answer) == list(range(len(copies)))
    kept = [max(0.0, NOW_S - copies[index].last_used_s) < copies[index].keep_s for index in answer]
    assert kept == sorted(kept)
    for is_kept in (False, True):
        clean = [copies[index].is_clean for index, mine in zip(answer, kept, strict=True) if mine == is_kept]
        assert clean == sorted(clean, reverse=True)


def test_no_candidates_are_an_empty_order() -> None:
    assert order() == []
