"""Questions that a change of the knowledge base must not break."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from samovar.router.context.knowledge import (
    Approval,
    Comparison,
    Found,
    KnowledgeBase,
    Question,
    Verdict,
    fenced,
    verdicts,
)
from samovar.router.openai import ApiError, InvalidValue, TooManyRequests, shown

BROKEN_SHOWN = 3


class Gate:
    """Refuses a change that breaks a question which holds before it."""

    def __init__(self, base: KnowledgeBase, tenant: str, questions: Sequence[Question]) -> None:
        self._base = base
        self._tenant = tenant
        self._questions = questions
        self.report: dict[str, Any] = {}

    @property
    def approval(self) -> Approval | None:
        """What approves a change; None without questions."""
        return self.check if self._questions else None

    def check(self, changed: KnowledgeBase) -> None:
        """Run the questions on the present and on the changed state. Raises `ApiError`."""
        before = asked(self._base, self._tenant, self._questions)
        compared = Comparison(before, asked(changed, self._tenant, self._questions))
        self.report = {"test": compared.json()}
        if compared.worse:
            said = "; ".join(
                f"{shown(one.question)} ({one.failures[0]})" for one in compared.worse[:BROKEN_SHOWN]
            )
            message = (
                f"Nothing was changed: {len(compared.worse)} of {len(self._questions)} questions hold, and "
                f"would not any more: {said}."
            )
            raise ApiError(409, message, param="questions", code="questions_broken")


def asked(base: KnowledgeBase, tenant: str, questions: Sequence[Question]) -> list[Verdict]:
    """Return the outcome of questions over what a first question of a conversation would get.

    Only the time that they run counts, not that of others in between.
    """

    def retrieve(question: str) -> Found:
        found = base.excerpt(tenant, question)
        entries = tuple((one.ref.entry, one.version.content.title) for one in found)
        texts = tuple(one.version.content.text for one in found)
        return Found(entries, fenced([one.version for one in found], ()), texts)

    most_s, spent_s = base.settings.questions_s, 0.0
    since_s = time.monotonic()

    def go_on() -> None:
        nonlocal spent_s, since_s
        took_s = time.monotonic() - since_s
        spent_s += took_s
        wait_s = base.question_time.spend(tenant, took_s)
        if spent_s > most_s:
            message = f"questions take longer than {most_s:g} s (knowledge.questions_s). Send fewer."
            raise InvalidValue("questions", message)
        if wait_s:
            message = "questions of this API key have taken too long lately (knowledge.questions_s)."
            raise TooManyRequests(f"{message} Try again later.", wait_s, code="questions_busy")
        base.turns.pass_on()  # each search and each check has a turn of its own
        since_s = time.monotonic()

    found = verdicts(questions, retrieve, go_on)
    go_on()
    return found
