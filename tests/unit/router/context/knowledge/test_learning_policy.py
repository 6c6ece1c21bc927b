"""What is the same question, what a candidate says, and when one may enter without a person. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from samovar.configs.optional_sections import LoopSettings
from samovar.router.context.knowledge import EntryRef
from samovar.router.context.learning import (
    CandidateEntry,
    CaptureCounts,
    Evidence,
    NotedTurn,
    TurnCall,
    capture_refusals,
)
from samovar.router.context.learning.candidates import candidate_of, passed_calls, question_key, says_the_same

SETTINGS = LoopSettings(auto_of=("tea",), auto_per_session=2, auto_per_window=5, auto_share_max=0.5)
TURN = NotedTurn("Why?", "So.", (EntryRef("kb_1", 2),), (TurnCall("c1", "run"),), (TurnCall("c0", "run"),))


def made() -> CandidateEntry:
    found = candidate_of(TURN, None, "", Evidence("run", "c0"))
    assert found is not None
    return found


MADE = made()
ROOM = CaptureCounts(entries=10, of_auto=0, of_window=0, of_session=0)


def refused(candidate: CandidateEntry = MADE, tenant: str = "tea", counts: CaptureCounts = ROOM) -> str:
    return "; ".join(capture_refusals(candidate, tenant, counts, SETTINGS))


def test_all_that_the_policy_asks_for_is_needed() -> None:
    assert refused() == ""
    assert "auto_of" in refused(tenant="coffee")
    assert "auto_of" in "; ".join(capture_refusals(MADE, "tea", ROOM, LoopSettings())), "off by default"
    assert "a person" in refused(replace(MADE, kind="error_correction"))
    assert "auto_evidence" in refused(replace(MADE, evidence=Evidence()))
    assert "about the same" in refused(replace(MADE, similar=("kb_1",)))
    assert "auto_per_session" in refused(counts=replace(ROOM, of_session=2))
    assert "auto_per_window" in refused(counts=replace(ROOM, of_window=5))
    assert "auto_share_max" in refused(counts=replace(ROOM, of_auto=5))
    assert refused(counts=replace(ROOM, of_auto=4, of_window=4, of_session=1)) == ""


@given(st.integers(0, 400), st.floats(0, 1))
def test_auto_captures_never_have_more_than_their_share(entries: int, share: float) -> None:
    settings = LoopSettings(auto_of=("tea",), auto_share_max=share, auto_per_session=999, auto_per_window=999)
    of_auto = 0
    for _ in range(50):
        counts = CaptureCounts(entries, of_auto, 0, 0)
        if capture_refusals(MADE, "tea", counts, settings):
            break
        entries, of_auto = entries + 1, of_auto + 1
        assert of_auto <= share * entries


@given(st.text(), st.text(), st.text(), st.text())
def test_turns_and_candidates_come_back_as_they_were(
    question: str, answer: str, said: str, comment: str
) -> None:
    turn = replace(TURN, question=question, answer=answer)
    encodable = all(char < "\ud800" or char > "\udfff" for char in question + answer + said + comment)
    if not encodable:
        return
    assert NotedTurn.of(turn.json()) == turn
    one = candidate_of(turn, said or None, comment, Evidence("run", "c"))
    if one is None:
        assert not question.strip() or not (said or answer).strip()
        return
    held = replace(one, similar=("kb_1", "cand_2"), held=("x",))
    assert CandidateEntry.of(held.json()) == held
    done = held.decided("kb_9", "why")
    assert (done.question, done.answer, done.said, done.comment) == ("", "", "", "")
    assert done.digest == one.digest, "the same one is known again"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Why are refunds negative?", "  why ARE refunds, negative ", True),
        ("Why are refunds negative?", "Why are refunds positive?", False),
        ("a b", "ab", False),
        ("\uff52efunds", "refunds", True),
    ],
)
def test_the_same_question_has_one_key(one: str, other: str, same: bool) -> None:
    assert (question_key(one) == question_key(other)) is same


def test_questions_of_the_same_words_say_the_same() -> None:
    assert says_the_same("Why are refunds negative?", "negative refunds", 0.85)
    assert not says_the_same("Why are refunds negative?", "Why are orders negative?", 0.85)
    assert not says_the_same("", "", 0.85)


def test_only_results_that_fit_the_pattern_of_their_tool_pass() -> None:
    results = [
        (TurnCall("a", "tests"), "12 passed, 0 failed"),
        (TurnCall("b", "tests"), "10 failed"),
        (TurnCall("c", "other"), "0 failed"),
    ]
    assert passed_calls(results, {"tests": r"\b0 failed\b"}) == (TurnCall("a", "tests"),)
    assert passed_calls(results, {}) == ()
    assert passed_calls([(TurnCall("a", "t"), "a" * 40)], {"t": "(a*)*b"}) == ()


def test_a_pattern_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ValidationError, match="pattern of tests"):
        LoopSettings(confirming_tools={"tests": "("})
