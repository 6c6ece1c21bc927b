"""The bodies of /v1/feedback and of the routes of candidates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from samovar.router.context.knowledge import Kind, QuestionBody
from samovar.router.openai import StrictModel

WHY_CHARS_MAX = 1000
TITLE_CHARS_MAX = 200
TOPIC_CHARS_MAX = 64
NAME_CHARS_MAX = 128
COMMENT_CHARS_MAX = 100_000

LoopVerdict = Literal["success", "failure"]
Why = Annotated[str, Field(max_length=WHY_CHARS_MAX)]


class _LoopBody(StrictModel):
    model_config = ConfigDict(extra="forbid")


class FeedbackBody(_LoopBody):
    """What became of an answer. `turn_id`: of its receipt. `corrected`: what would have been right.

    `tool_call_id`: the call whose result confirms it: one that the model made in this conversation.
    """

    turn_id: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    verdict: LoopVerdict
    corrected: Annotated[str, Field(min_length=1)] | None = None
    comment: Annotated[str, Field(max_length=COMMENT_CHARS_MAX)] = ""
    tool_call_id: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = None


class ConfirmBody(_LoopBody):
    """A person's yes. What is given stands in place of what the candidate says."""

    kind: Kind | None = None
    title: Annotated[str, Field(max_length=TITLE_CHARS_MAX)] | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    topics: list[Annotated[str, Field(min_length=1, max_length=TOPIC_CHARS_MAX)]] = Field(
        default_factory=list
    )
    why: Why = ""
    questions: list[QuestionBody] = Field(default_factory=list)


class RejectBody(_LoopBody):
    """A person's no."""

    why: Why = ""


class QuestionsBody(_LoopBody):
    """Questions that whatever the loop adds must not break, in place of those kept before."""

    questions: list[QuestionBody]
