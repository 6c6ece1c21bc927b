"""Rendezvous hashing: everybody agrees, load is even, and little moves when a replica comes or goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from samovar.router.routing.score import Rendezvous, rendezvous_order

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


@given(key=st.text(max_size=40), members=names, data=st.data())
def test_the_order_does_not_depend_on_how_members_are_listed(
    key: str, members: list[str], data: st.DataObject
) -> None:
    order = rendezvous_order(key, members)
    assert sorted(order) == sorted(members)
    assert rendezvous_order(key, data.draw(st.permutations(members))) == order


@given(key=st.text(max_size=40), members=names)
def test_without_the_home_the_deputy_takes_over(key: str, members: list[str]) -> None:
    order = rendezvous_order(key, members)
    assert rendezvous_order(key, order[1:]) == order[1:]


def test_load_is_even_and_a_newcomer_takes_only_its_share() -> None:
    keys = [f"session-{i}" for i in range(4000)]
    before = {key: rendezvous_order(key, ["a", "b", "c"])[0] for key in keys}
    after = {key: rendezvous_order(key, ["a", "b", "c", "d"])[0] for key in keys}
    assert all(1150 < count < 1520 for count in Counter(before.values()).values())
    moved = [key for key in keys if before[key] != after[key]]
    assert all(after[key] == "d" for key in moved)
    assert 850 < len(moved) < 1150


@given(st.text(max_size=8), st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=40))
def test_a_few_are_ordered_as_all_are(key: str, members: set[str]) -> None:
    assert Rendezvous(members).first(key, len(members)) == rendezvous_order(key, members)
