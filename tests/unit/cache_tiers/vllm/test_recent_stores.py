"""Which blocks need no store, as one that began a moment ago is under way."""

from __future__ import annotations

from samovar.cache_tiers.vllm.spans import ARRIVES_S, RecentStores

KEYS = [b"a", b"b", b"c"]


def test_what_is_being_stored_is_not_stored_again_until_it_must_have_arrived() -> None:
    recent = RecentStores()
    recent.add(KEYS[:2], 10.0, "one")
    assert recent.held(KEYS, 0, 10.5, "one") == 2
    assert recent.held(KEYS, 1, 10.5, "one") == 2
    assert recent.held(KEYS, 0, 10.0 + ARRIVES_S, "one") == 0


def test_another_life_of_the_tiers_knows_itself_what_it_has() -> None:
    recent = RecentStores()
    recent.add(KEYS, 10.0, "one")
    assert recent.held(KEYS, 0, 10.5, "two") == 0
    recent.add(KEYS[:1], 11.0, "two")
    assert recent.held(KEYS, 0, 11.5, "two") == 1
