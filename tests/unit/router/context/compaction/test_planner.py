"""Cuts keep what they must, fit the window, stay where they are for many turns, and are the same again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.router.context.compaction import (
    WHOLE,
    Cut,
    Talk,
    WindowPlan,
    boundaries,
    chain,
    composed,
    cut_of,
    next_cut,
)
from samovar.router.openai import ChatMessage, ToolCall

PLAN = WindowPlan(limit_tokens=900, start_tokens=800, target_tokens=400, charge_tokens=20, recent_turns=2)
FRONT = (ChatMessage("system", "Be brief."),)
FIXED = 20


def turn(number: int, steps: int = 0, calls: int = 1, *, middle_system: bool = False) -> list[ChatMessage]:
    """A question, steps with tool calls and their results, and an answer."""
    made = [ChatMessage("user", f"question {number}")]
    if middle_system:
        made.insert(0, ChatMessage("system", f"rule {number}"))
    for step in range(steps):
        ids = [f"call-{number}-{step}-{call}" for call in range(calls)]
        asked = tuple(ToolCall(one, "look", "{}") for one in ids)
        made.append(ChatMessage("assistant", "", calls=asked))
        made += [ChatMessage("tool", "result", call_id=one, tool="look") for one in reversed(ids)]
    return [*made, ChatMessage("assistant", f"answer {number}")]


TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 3), st.booleans()).map(
        lambda one: (one[0], one[1], one[2] and one[0] == 3)
    ),
    min_size=1,
    max_size=14,
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[ChatMessage], list[int]]:
    """Messages that end where a request does: with a question, or with results of tools."""
    turns = draw(TURNS)
    messages = [
        message
        for number, (steps, calls, is_told) in enumerate(turns)
        for message in turn(number, steps, calls, middle_system=is_told)
    ]
    ends = [
        end
        for end in range(1, len(messages) + 1)
        if messages[end - 1].role != "assistant"
        and (end == len(messages) or messages[end].role == "assistant")
    ]
    messages = messages[: draw(st.sampled_from(ends))]
    # A message may be long, but any two and a charge fit: a request that could never be served is a 400.
    tokens = draw(st.lists(st.integers(1, 120), min_size=len(messages), max_size=len(messages)))
    return messages, tokens


def made(messages: list[ChatMessage], tokens: list[int]) -> Talk:
    return Talk(messages, tokens, FIXED)


@given(conversations())
def test_system_prompt_and_recent_turns_are_kept_to_the_letter(
    given_: tuple[list[ChatMessage], list[int]],
) -> None:
    messages, tokens = given_
    conversation = made(messages, tokens)
    cut = cut_of(conversation, PLAN)
    asked = conversation.asked(cut, len(messages))
    kept = composed(FRONT, conversation, cut, beside=dict.fromkeys(asked, "[piece]\n"))
    assert kept[: len(FRONT)] == FRONT
    left_out = set(conversation.left_out(cut.first))
    original = [one for index, one in enumerate(messages) if index not in left_out]
    assert len(kept) == len(FRONT) + len(original)
    for one, before in zip(kept[len(FRONT) :], original, strict=True):
        if before.role == "user":
            assert one.content.endswith(before.content)
        else:
            assert one == before
    assert [one for one in messages if one.role == "system"] == [
        one for one in original if one.role == "system"
    ]
    last = max(index for index, one in enumerate(messages) if one.role == "user")
    assert last not in left_out, "what is asked now is never left out"


@given(conversations())
def test_no_prompt_is_over_the_window(given_: tuple[list[ChatMessage], list[int]]) -> None:
    messages, tokens = given_
    conversation = made(messages, tokens)
    cut = cut_of(conversation, PLAN)
    size = conversation.size(cut, len(messages), PLAN)
    could = [conversation.size(Cut(at, len(messages)), len(messages), PLAN) for at in boundaries(messages)]
    assert size <= PLAN.limit_tokens or size <= min(could) + PLAN.charge_tokens


@given(conversations())
def test_calls_and_their_results_stay_together(given_: tuple[list[ChatMessage], list[int]]) -> None:
    messages, tokens = given_
    conversation = made(messages, tokens)
    for at in (cut_of(conversation, PLAN).first, *boundaries(messages)):
        left_out = set(conversation.left_out(at))
        kept = [one for index, one in enumerate(messages) if index not in left_out]
        called = {call.call_id for one in kept for call in one.calls}
        answered = {one.call_id for one in kept if one.role == "tool"}
        assert answered <= called
        gone = {call.call_id for index in left_out for call in messages[index].calls}
        assert gone.isdisjoint(answered)


@given(conversations())
def test_the_same_conversation_is_cut_in_the_same_place_whatever_is_remembered(
    given_: tuple[list[ChatMessage], list[int]],
) -> None:
    messages, tokens = given_
    known: dict[int, Cut] = {}
    for _, end in made(messages, tokens).inputs():
        request = made(messages[:end], tokens[:end])
        remembered = cut_of(request, PLAN, known=known)
        assert remembered == cut_of(request, PLAN), "as if nothing had been remembered"
        known[end] = remembered
        if end < len(messages) and messages[end].role == "assistant":
            # What the end of the turn decides is what the next request begins with.
            grown = made(messages[: end + 1], tokens[: end + 1])
            decided = cut_of(grown, PLAN, known=known)
            assert decided == next_cut(grown, remembered, end + 1, PLAN)
            later = [one for one in made(messages, tokens).inputs() if one[0] == end + 1]
            if later and not messages[end].calls:
                following = made(messages[: later[0][1]], tokens[: later[0][1]])
                both = cut_of(following, PLAN, known={**known, end + 1: decided})
                assert both == cut_of(following, PLAN, known=known)


def test_the_prefix_stays_for_many_turns_between_two_cuts() -> None:
    messages: list[ChatMessage] = []
    prefixes: list[tuple[ChatMessage, ...]] = []
    changes, sizes = 0, []
    for number in range(120):
        messages.append(ChatMessage("user", f"question {number}"))
        conversation = made(messages, [20] * len(messages))
        cut = cut_of(conversation, PLAN)
        beside = {index: f"[piece {index}]\n" for index in conversation.asked(cut, len(messages))}
        prompt = composed(FRONT, conversation, cut, beside=beside)
        sizes.append(conversation.size(cut, len(messages), PLAN))
        if prefixes and prompt[: len(prefixes[-1])] != prefixes[-1]:
            changes += 1
        prefixes.append(prompt)
        messages.append(ChatMessage("assistant", f"answer {number}"))
    assert max(sizes) <= PLAN.limit_tokens
    # A turn adds 60 with its charge, so that a step of 400 lasts for six or seven turns.
    assert 12 <= changes <= 16
    assert min(sizes[20:]) < PLAN.target_tokens + 100


@pytest.mark.parametrize("limit_tokens", [800, 840, 900])
@pytest.mark.parametrize("said", [[20], [60], [20, 60, 30], [90, 90, 20, 20, 20]])
def test_no_turn_waits_for_a_cut_if_what_is_said_is_as_long_as_lately(
    said: list[int], limit_tokens: int
) -> None:
    plan = replace(PLAN, limit_tokens=limit_tokens)
    messages: list[ChatMessage] = []
    tokens: list[int] = []
    early, forced = 0, []
    for number in range(150):
        before = cut_of(made(messages, tokens), plan) if messages else WHOLE
        messages.append(ChatMessage("user", f"question {number}"))
        tokens.append(said[number % len(said)])
        after = cut_of(made(messages, tokens), plan)
        if after != before:
            forced.append(number)
        early += bool(messages[:-1]) and before != cut_of(made(messages[:-2], tokens[:-2]), plan)
        messages.append(ChatMessage("assistant", f"answer {number}"))
        tokens.append(20)
    assert early > 5
    assert not forced, "a user waited"


def test_long_inputs_do_not_make_every_turn_begin_with_other_tokens() -> None:
    assert [PLAN.due_tokens(tokens) for tokens in (0, 80, 100, 280, 10_000)] == [800, 800, 780, 600, 600]


def test_without_early_cuts_nothing_is_left_out_before_it_must_be() -> None:
    messages = [message for number in range(21) for message in turn(number)][:-1]
    conversation = made(messages, [20] * len(messages))
    assert conversation.size(WHOLE, len(messages), PLAN) == FIXED + 41 * 20 < PLAN.limit_tokens
    assert cut_of(conversation, PLAN, is_early=False) == WHOLE
    assert cut_of(conversation, PLAN) != WHOLE
    for limit in (800, 500, 300):
        cut = cut_of(conversation, PLAN, is_early=False, limit_tokens=limit)
        assert conversation.size(cut, len(messages), PLAN) <= limit


def test_a_summary_is_where_a_cut_begins() -> None:
    messages = [message for number in range(15) for message in turn(number)][:-1]
    conversation = made(messages, [20] * len(messages))
    begin = Cut(20)
    assert cut_of(conversation, PLAN, begin=begin, is_early=False) == begin
    assert not conversation.asked(begin, len(messages)), "nothing is put beside questions"
    known = {10: Cut(4, 10)}
    assert cut_of(conversation, PLAN, begin=begin, known=known, is_early=False) == begin


def test_one_long_turn_of_tools_is_cut_between_its_steps_and_keeps_its_question() -> None:
    messages = [*turn(0), *turn(1, steps=30)[:-1]]
    conversation = made(messages, [20] * len(messages))
    cut = cut_of(conversation, PLAN)
    assert conversation.size(cut, len(messages), PLAN) <= PLAN.limit_tokens
    assert messages[cut.first].role == "assistant"
    assert conversation.anchor(cut.first) == 2
    kept = composed(FRONT, conversation, cut)
    assert (
        kept[1].content
        == f"[{len(conversation.left_out(cut.first))} earlier messages are left out here]\n\nquestion 1"
    )
    assert kept[2] == messages[cut.first]


def test_what_is_left_out_is_counted_without_what_is_kept() -> None:
    messages = [*turn(0), ChatMessage("system", "rule"), *turn(1, steps=2)]
    conversation = made(messages, list(range(1, len(messages) + 1)))
    assert boundaries(messages) == [6, 8], "not between a question and the rule before it"
    assert conversation.left_out(6) == [0, 1, 4, 5]
    assert conversation.left_out_tokens(6) == 1 + 2 + 5 + 6
    whole = conversation.size(WHOLE, len(messages), PLAN)
    assert conversation.size(Cut(6), len(messages), PLAN) == whole - 14


def test_two_messages_of_the_user_are_not_parted() -> None:
    messages = [ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("assistant", "c")]
    assert boundaries(messages) == []
    assert made(messages, [1, 1, 1]).inputs() == [(0, 2), (3, 3)]


@pytest.mark.parametrize("changed", [0, 3, 6])
def test_a_changed_message_changes_all_links_behind_it(changed: int) -> None:
    messages = [message for number in range(4) for message in turn(number)]
    other = list(messages)
    other[changed] = ChatMessage(messages[changed].role, "another text")
    one, two = chain(messages), chain(other)
    assert one[: changed + 1] == two[: changed + 1]
    assert not set(one[changed + 1 :]) & set(two[changed + 1 :])
    thought = [
        ChatMessage(m.role, m.content, reasoning="hm" if m.role == "assistant" else "") for m in messages
    ]
    assert chain(thought) == one, "a client may leave out what the model thought"
