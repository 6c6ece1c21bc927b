"""Where a conversation that outgrows its window is cut. Pure.

A cut leaves out the oldest turns. It is made in one big step, from `start_tokens` down to `target_tokens`,
and then stays where it is until the rest has grown to `start_tokens` again, or so far that an input as long
as the latest ones would not fit: the prompts in between begin with the same tokens. Whether a cut is due is
asked of the history before the new input only, so that the answer is known when a turn ends; and once more if
the new input does not fit, which its user waits for.

Indices are of the messages behind the leading system messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from samovar.router.openai import ChatMessage

NEVER = 2**62
"""`since` of a cut beside whose questions nothing is put."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left out: all before message `first`, but those of the system and the question it works on.

    `since`: how many messages there were when it was made. Questions from there on get what they need of what
    is left out.
    """

    first: int = 0
    since: int = NEVER


WHOLE = Cut()
LATEST = 4
"""Inputs, the longest of which the next one is expected to be as long as."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How long prompts may become, in tokens.

    `limit_tokens`: the longest prompt. `charge_tokens`: counted for each question that gets something of what
    is left out. `recent_turns`: so many questions stay, if they leave room for a step.
    """

    limit_tokens: int
    start_tokens: int
    target_tokens: int
    charge_tokens: int = 0
    recent_turns: int = 1

    def due_tokens(self, input_tokens: int) -> int:
        """Return the size at which a cut is due before an input of so many tokens.

        Half of a step is used in any case: long inputs must not make each turn begin with other tokens.
        """
        room = self.limit_tokens - self.charge_tokens - input_tokens
        return max((self.target_tokens + self.start_tokens) // 2, min(self.start_tokens, room))


def leading_system(messages: Sequence[ChatMessage]) -> int:
    """Return how many messages the system prompt has."""
    return sum(1 for _ in takewhile(lambda message: message.role == "system", messages))


def boundaries(messages: Sequence[ChatMessage]) -> list[int]:
    """Return before which messages a cut may be made.

    Before a question, or before a step of the assistant that follows results of tools: never between a tool
    call and its result, nor between two messages of the user, which some templates refuse.
    """
    called: dict[str, int] = {}
    is_inside = [False] * (len(messages) + 1)
    for index, message in enumerate(messages):
        called.update((call.call_id, index) for call in message.calls)
        if message.role == "tool":
            for inside in range(called.get(message.call_id, 0) + 1, index + 1):
                is_inside[inside] = True
    found = []
    for index in range(1, len(messages)):
        before, own = messages[index - 1].role, messages[index].role
        begins = (own == "user" and before == "assistant") or (own == "assistant" and before == "tool")
        if begins and not is_inside[index]:
            found.append(index)
    return found


class Talk:
    """A conversation's messages behind its system prompt, each with its tokens in a prompt.

    `fixed_tokens`: of what every prompt has, the system prompt first.
    """

    def __init__(self, messages: Sequence[ChatMessage], tokens: Sequence[int], fixed_tokens: int) -> None:
        self.messages = messages
        self.fixed_tokens = fixed_tokens
        self._sums = [0, *accumulate(tokens)]
        of_system = (
            count if one.role == "system" else 0 for one, count in zip(messages, tokens, strict=True)
        )
        self._system_sums = [0, *accumulate(of_system)]
        self.questions = [index for index, one in enumerate(messages) if one.role == "user"]
        self.boundaries = boundaries(messages)
        self._inputs = _inputs(messages)
        self._ends = [end for _, end in self._inputs]

    def __len__(self) -> int:
        return len(self.messages)

    def tokens(self, first: int, end: int) -> int:
        """Return the tokens of messages `[first, end)`."""
        return self._sums[end] - self._sums[first]

    def anchor(self, first: int) -> int | None:
        """Return the question that message `first` works on, if that is left out before it."""
        if first >= len(self) or first == 0 or self.messages[first].role == "user":
            return None
        at = bisect_left(self.questions, first)
        return self.questions[at - 1] if at else None

    def left_out(self, first: int) -> list[int]:
        """Return the messages that a cut there leaves out."""
        anchor = self.anchor(first)
        return [index for index in range(first) if index != anchor and self.messages[index].role != "system"]

    def left_out_tokens(self, first: int) -> int:
        """Return the tokens of these."""
        anchor = self.anchor(first)
        kept = self._system_sums[first] + (0 if anchor is None else self.tokens(anchor, anchor + 1))
        return self._sums[first] - kept

    def asked(self, cut: Cut, end: int) -> list[int]:
        """Return the questions in the prompt of messages `[0, end)` that something is put beside."""
        if cut.since >= NEVER:
            return []
        anchor = self.anchor(cut.first)
        at = bisect_left(self.questions, max(cut.first, cut.since))
        own = [index for index in self.questions[at:] if index < end]
        return own if anchor is None else [anchor, *own]

    def size(self, cut: Cut, end: int, plan: WindowPlan) -> int:
        """Return about how many tokens the prompt of messages `[0, end)` has."""
        kept = self._sums[end] - self.left_out_tokens(cut.first)
        return self.fixed_tokens + kept + plan.charge_tokens * len(self.asked(cut, end))

    def inputs(self) -> list[tuple[int, int]]:
        """Return where each request's new messages begin and end: what came between two answers."""
        found = list(self._inputs)
        if self.messages and self.messages[-1].role == "assistant":  # an answer that is to be continued
            found.append((len(self), len(self)))
        return found

    def expected_tokens(self, end: int) -> int:
        """Return how long the input that follows messages `[0, end)` is expected to be."""
        known = self._inputs[: bisect_right(self._ends, end)]
        return max((self.tokens(*one) for one in known[-LATEST:]), default=0)


def _inputs(messages: Sequence[ChatMessage]) -> list[tuple[int, int]]:
    found, begin = [], 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            begin = index + 1
        elif index + 1 == len(messages) or messages[index + 1].role == "assistant":
            found.append((begin, index + 1))
    return found


def next_cut(conversation: Talk, cut: Cut, end: int, plan: WindowPlan) -> Cut:
    """Return the cut that requests after messages `[0, end)` are made with, whatever they ask."""
    if conversation.size(cut, end, plan) <= plan.due_tokens(conversation.expected_tokens(end)):
        return cut
    return _moved(conversation, cut, end, end, plan, plan.start_tokens)


def fitting_cut(
    conversation: Talk, cut: Cut, begin: int, end: int, plan: WindowPlan, limit_tokens: int
) -> Cut:
    """Return the cut that lets the new messages `[begin, end)` into a prompt of `limit_tokens`."""
    if conversation.size(cut, end, plan) <= limit_tokens:
        return cut
    return _moved(conversation, cut, begin, end, plan, limit_tokens)


def _moved(conversation: Talk, cut: Cut, since: int, end: int, plan: WindowPlan, limit_tokens: int) -> Cut:
    """Move a cut so that the prompt of `[0, end)` has the target's tokens, or as few as can be."""
    after = [at for at in conversation.boundaries if cut.first < at < end]
    if not after:
        return cut
    cuts = [Cut(at, since) for at in after]
    recent = [at for at in conversation.questions if at < end][-plan.recent_turns :]
    keeping = [one for one in cuts if not recent or one.first <= recent[0]]
    aim = min(plan.target_tokens, limit_tokens)
    # A cut that leaves less room than half of a step would be followed by another one soon.
    for fitting, tokens in ((keeping, aim), (cuts, (aim + limit_tokens) // 2), (keeping, limit_tokens)):
        for one in fitting:
            if conversation.size(one, end, plan) <= tokens:
                return one
    return next((one for one in cuts if conversation.size(one, end, plan) <= limit_tokens), cuts[-1])


def cut_of(
    conversation: Talk,
    plan: WindowPlan,
    *,
    begin: Cut = WHOLE,
    known: Mapping[int, Cut] | None = None,
    is_early: bool = True,
    limit_tokens: int | None = None,
) -> Cut:
    """Return the cut of a conversation whose last messages are the new request's.

    The same as when its earlier requests came: they are gone through again. `begin`: a cut that holds from
    its message on. `known`: cuts by how many messages there were, as they were made then, which count more
    than what would be made of them now. `is_early`: False: nothing is left out before it must be.
    `limit_tokens`: of this request's prompt, if that is less than others'.
    """
    known = known or {}
    cut = begin
    inputs = conversation.inputs()
    latest = max((at for at in known if at <= len(conversation)), default=-1)
    if latest >= 0 and known[latest].first > begin.first:
        cut = known[latest]
    for first, end in inputs:
        if end <= max(latest, begin.first):
            continue
        if is_early and first > max(latest, begin.first):
            cut = next_cut(conversation, cut, first, plan)
        is_now = (first, end) == inputs[-1]
        limit = plan.limit_tokens if limit_tokens is None or not is_now else limit_tokens
        cut = fitting_cut(conversation, cut, first, end, plan, limit)
    return cut
