"""Lineages: which prompts of a session belong together, told from tags and tokens alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import TAG_BYTES, Clear, lineage_tag, root_tokens, session_of

KEY = b"k" * 32
SESSION = session_of(random.Random(0).randbytes(TAG_BYTES))
OTHER = session_of(random.Random(1).randbytes(TAG_BYTES))

SYSTEM = list(range(100))
FIRST = [*SYSTEM, 500, 501, 502]
ANSWERED = [*FIRST, 600, 601]
SECOND = [*ANSWERED, 700, 701]


def tag(prompt: list[int], *known: bytes, key: bytes = KEY, begin_tokens: int = 0) -> bytes:
    return lineage_tag(SESSION, prompt, known, key=key, begin_tokens=begin_tokens)


def test_a_lineage_begins_with_its_first_prompt() -> None:
    first = tag(FIRST)
    assert len(first) == TAG_BYTES
    assert (session_of(first), root_tokens(first)) == (SESSION, len(FIRST))
    assert first == tag(FIRST), "every ingress decides alike"
    assert root_tokens(SESSION) == 0, "a whole session's tag is no lineage's"


@pytest.mark.parametrize(
    ("prompt", "is_of_first"),
    [
        (FIRST, True),  # asked again
        (SECOND, True),  # the next turn
        ([*ANSWERED, 800], True),  # the second turn edited
        ([*FIRST, 610], True),  # the first answer given otherwise
        ([*SYSTEM, 510, 511], False),  # the first turn edited: another conversation under the same rules
        ([*SYSTEM, 500, 501], False),  # the beginning of it only
        ([*SYSTEM, 900, *SECOND], False),  # compacted, or quoted by a title request
        ([900], False),
    ],
)
def test_a_turn_belongs_to_the_lineage_whose_first_prompt_it_repeats(
    prompt: list[int], is_of_first: bool
) -> None:
    first = tag(FIRST)
    assert (tag(prompt, first) == first) == is_of_first


def test_the_longest_of_several_counts_and_order_does_not() -> None:
    short, long, side = tag(FIRST), tag(SECOND), tag([*SYSTEM, 7])
    for known in ((short, long, side), (side, long, short)):
        assert tag([*SECOND, 1], *known) == long
        assert tag([*ANSWERED, 1], *known) == short


def test_what_a_template_puts_before_the_answer_only_is_no_part_of_the_first_prompt() -> None:
    thinking = [*FIRST, 98, 99]  # "<think>", which no later prompt repeats
    first = tag(thinking, begin_tokens=len(FIRST))
    assert tag(SECOND, first) == first
    assert tag(thinking, first, begin_tokens=len(FIRST)) == first


def test_other_sessions_secrets_and_old_tags_do_not_match() -> None:
    first = tag(FIRST)
    assert lineage_tag(OTHER, SECOND, [first], key=KEY) != first
    assert tag(SECOND, first, key=b"other") != first, "a tag says nothing without the secret"
    assert tag(FIRST, key=b"other")[-5:] != first[-5:]
    before_lineages = SESSION[:8] + random.Random(2).randbytes(8)
    assert tag(SECOND, before_lineages, SESSION) == tag(SECOND)


def test_an_empty_prompt_is_no_lineages() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        tag([])


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_it_is_the_longest_first_prompt_that_is_a_prefix(prompts: list[list[int]], prompt: list[int]) -> None:
    roots = {tag(one): one for one in prompts}
    fitting = [one for one in roots.values() if prompt[: len(one)] == one]
    expected = max(fitting, key=len) if fitting else prompt
    assert tag(prompt, *roots) == tag(expected)


def test_a_clear_of_a_lineage_is_of_its_whole_session() -> None:
    first, other = tag(FIRST), lineage_tag(OTHER, FIRST, key=KEY)
    clear = Clear(b"t" * TAG_BYTES, first, (other,))
    assert (clear.session, clear.also) == (SESSION, (OTHER,))
    assert clear.each() == (Clear(b"t" * TAG_BYTES, SESSION), Clear(b"t" * TAG_BYTES, OTHER))
