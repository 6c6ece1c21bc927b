"""How many guesses a step checks: as many as are likely to save more than they cost."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.replicas.scheduling.drafts import ROW_DEARNESS, Drafter, DraftLimits, Guesses

PRICE = PrefillPrice(4e-3, 0.3e-3, 0.0)
LOOP = array("I", [5, 6, 7, 8] * 16)


@dataclass
class Decoded:
    tokens: array[int]
    tokens_left: int = 100
    guesses: Guesses = field(default_factory=Guesses)


def looping() -> Decoded:
    one = Decoded(LOOP[:1])
    for end in range(1, len(LOOP) + 1):
        one.guesses.follow(LOOP[:end])
    one.tokens = LOOP
    return one


def drafter(
    price: PrefillPrice = PRICE, tokens_max: int = 7, rows_max: int = 32, stretch: float = 2.25
) -> Drafter:
    return Drafter(DraftLimits(tokens_max, rows_max, stretch), lambda: price)


def test_one_that_repeats_itself_is_drafted_to_the_limit() -> None:
    assert drafter().drafts([looping()]) == [(5, 6, 7, 8, 5, 6, 7)]


def test_what_cannot_be_guessed_is_not() -> None:
    other = Decoded(array("I", range(64)))
    assert drafter().drafts([looping(), other])[1] == ()


def test_an_answer_that_ends_soon_is_not_drafted_beyond_its_end() -> None:
    one = looping()
    for left, count in ((1, 0), (2, 1), (5, 4)):
        one.tokens_left = left
        assert [len(draft) for draft in drafter().drafts([one])] == [count]


def test_the_step_has_a_limit() -> None:
    drafts = drafter(rows_max=12).drafts([looping() for _ in range(4)])
    assert sum(map(len, drafts)) == 12 - 4
    assert drafter(rows_max=2).drafts([looping() for _ in range(4)]) == [()] * 4


def test_a_short_step_is_shared_evenly() -> None:
    """All of them wait for all rows, so none gets many tokens of a step in which others get one."""
    drafts = drafter(rows_max=32).drafts([looping() for _ in range(8)])
    assert [len(draft) for draft in drafts] == [3] * 8
    few = looping()
    few.tokens_left = 2
    assert [len(draft) for draft in drafter(rows_max=11).drafts([looping(), few, looping()])] == [3, 1, 3]


def test_an_answer_without_guesses_does_not_wait_for_all_those_of_others() -> None:
    """Its step takes at most so many times what it takes without them."""
    loops = [looping() for _ in range(4)]
    other = Decoded(array("I", range(64)))
    row_s, rows = ROW_DEARNESS * PRICE.a_s, len(loops) + 1

    def step_s(stretch: float, others: list[Decoded]) -> float:
        drafts = drafter(rows_max=64, stretch=stretch).drafts([*loops, *others])
        return PRICE.c0_s + row_s * (len(loops) + len(others) + sum(map(len, drafts)))

    alone_s = PRICE.c0_s + row_s * rows
    assert 1.5 * alone_s < step_s(2.25, [other]) <= 2.25 * alone_s
    assert step_s(math.inf, [other]) > 3 * alone_s
    assert step_s(2.25, []) == step_s(math.inf, []), "all of them gain by it"


def test_beside_more_answers_less_is_drafted() -> None:
    """Each has a smaller share of the step to save, so its guesses must be surer."""
    counts = []
    for answers in (1, 2, 4, 16, 64):
        unsure = [looping() for _ in range(answers)]
        for one in unsure:
            one.guesses._right = [0.9] * len(one.guesses._right)
        counts.append(len(drafter(tokens_max=64, rows_max=10_000).drafts(unsure)[0]))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1]


def test_nothing_is_drafted_where_a_step_costs_nothing_but_its_rows() -> None:
    assert drafter(PrefillPrice(0.0, 1e-3, 0.0)).drafts([looping()]) == [()]
    assert drafter(PrefillPrice(0.0, 0.0, 0.0)).drafts([looping()]) == [()]
