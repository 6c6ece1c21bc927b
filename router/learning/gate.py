"""Questions that a change of the knowledge base must not break."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from router.knowledge import Approval, Comparison, Found, KnowledgeBase, Question, Verdict, fenced, verdicts
from router.openai import ApiError, InvalidValue, shown

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
    """Return the outcome of questions over what a first question of a conversation would get."""

    def retrieve(question: str) -> Found:
        found = base.excerpt(tenant, question)
        entries = tuple((one.ref.entry, one.version.content.title) for one in found)
        return Found(entries, fenced([one.version for one in found], ()))

    most_s = base.settings.questions_s
    until_s = time.monotonic() + most_s

    def go_on() -> None:
        if time.monotonic() > until_s:
            message = f"questions take longer than {most_s:g} s (knowledge.questions_s). Send fewer."
            raise InvalidValue("questions", message)

    return verdicts(questions, retrieve, go_on)
