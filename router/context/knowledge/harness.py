"""Regression tests of a knowledge base: questions with checks of what is retrieved, and of answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from samovar.configs.json_text import parse_json

Subject = Literal["context", "answer"]

REGEX_S_MAX = 0.5
"""How long one pattern may search: patterns come from clients."""


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold, of the retrieved context or of an answer; exactly one rule is given.

    `contains`, `excludes`: a text. `regex`: a pattern that is found. `exact`: all of it, but for blanks
    around it. `retrieves`: the id or title of an entry that is among those retrieved. `json_schema`: it
    is JSON of that schema; of the context, the text of one entry is: all of it stands in a fence.
    """

    of: Subject = "context"
    contains: str | None = None
    excludes: str | None = None
    regex: str | None = None
    exact: str | None = None
    retrieves: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def rules(self) -> dict[str, Any]:
        """The rules that are given."""
        names = ("contains", "excludes", "regex", "exact", "retrieves", "json_schema")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what must hold of it."""

    question: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a question retrieved: ids and titles of the entries, their text as one, and each text alone."""

    entries: tuple[tuple[str, str], ...]
    text: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one question. `failures`: in words, one for each check that does not hold."""

    question: str
    failures: tuple[str, ...]
    entries: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "question": self.question,
            "passed": not self.failures,
            "failures": list(self.failures),
            "entries": list(self.entries),
        }


def verdicts(
    questions: Sequence[Question],
    retrieve: Callable[[str], Found],
    go_on: Callable[[], None] = lambda: None,
) -> list[Verdict]:
    """Return the outcome of all checks of context; those of answers are left out.

    `go_on`: called before each search and check; what it raises ends the run.
    """
    made = []
    for question in questions:
        go_on()
        found = retrieve(question.question)
        failures = []
        for check in question.checks:
            if check.of != "context":
                continue
            go_on()
            failure = broken(check, found.text, found)
            if failure is not None:
                failures.append(failure)
        made.append(Verdict(question.question, tuple(failures), tuple(entry for entry, _ in found.entries)))
    return made


GROUPS_MAX = 12
"""Groups of one pattern: to compile them in each other takes exponential time, which nothing interrupts."""
_GROUP = re.compile(r"\\.|\((?P<special>\?(?!:|=|!|>|<|P<|\||[aims]+[:)]))?", re.DOTALL)


def pattern_fault(pattern: str) -> str | None:
    """Return why a pattern is not compiled, in words; None if it is."""
    groups = [found for found in _GROUP.finditer(pattern) if found[0][0] == "("]
    if len(groups) > GROUPS_MAX:
        return f"it has more than {GROUPS_MAX} groups"
    if any(found["special"] is not None for found in groups):  # recursion takes a GiB before it is stopped
        return "no groups but (), (?:), (?=), (?!), (?<=), (?<!), (?>), (?<name>), (?|) and the flags aims"
    return None


def broken(check: Check, text: str, found: Found | None = None) -> str | None:
    """Return why a check does not hold, in words; None if it does."""
    if check.contains is not None and check.contains not in text:
        return f"contains {check.contains!r}: it does not"
    if check.excludes is not None and check.excludes in text:
        return f"excludes {check.excludes!r}: it is there"
    if check.exact is not None and check.exact.strip() != text.strip():
        return f"exact {check.exact!r}: it is another text"
    if check.regex is not None:
        fault = pattern_fault(check.regex)
        if fault is not None:
            return f"regex {check.regex!r}: {fault}"
        try:
            if regex.search(check.regex, text, timeout=REGEX_S_MAX, concurrent=True) is None:
                return f"regex {check.regex!r}: it matches nothing"
        except TimeoutError:
            return f"regex {check.regex!r}: it takes longer than {REGEX_S_MAX} s"
        except (regex.error, MemoryError, RecursionError) as error:
            return f"regex {check.regex!r}: {error}"
    if check.retrieves is not None:
        entries = found.entries if found is not None else ()
        if not any(check.retrieves in (entry, title) for entry, title in entries):
            return f"retrieves {check.retrieves!r}: it is not among the {len(entries)} entries"
    if check.json_schema is not None:
        texts = (text,) if found is None else found.texts
        faults = [_broken_schema(check.json_schema, one) for one in texts]
        return None if None in faults else next(iter(faults), "json_schema: there is no entry")
    return None


def _broken_schema(schema: dict[str, Any], text: str) -> str | None:
    from jsonschema import SchemaError, ValidationError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        value = parse_json(text)
    except ValueError:
        return "json_schema: it is no JSON"
    try:
        kind = validator_for(schema)
        kind.check_schema(schema)
        kind(schema, registry=Registry()).validate(value)  # an empty registry: nothing is fetched
    except ValidationError as error:
        return f"json_schema: {error.message[:200]}"
    except (SchemaError, Unresolvable) as error:
        return f"json_schema is no schema: {str(error)[:200]}"
    return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same questions before and after a change."""

    before: Sequence[Verdict]
    after: Sequence[Verdict]

    @property
    def worse(self) -> list[Verdict]:
        """Questions that held before and do not hold now."""
        return [
            now for was, now in zip(self.before, self.after, strict=True) if now.failures and not was.failures
        ]

    def json(self) -> dict[str, Any]:
        """Return the report: a line for each question, and what each retrieves now and did not before."""
        return {
            "passed_before": sum(not one.failures for one in self.before),
            "passed_after": sum(not one.failures for one in self.after),
            "broken": len(self.worse),
            "questions": [
                {
                    **now.json(),
                    "passed_before": not was.failures,
                    "entries_new": [one for one in now.entries if one not in was.entries],
                    "entries_gone": [one for one in was.entries if one not in now.entries],
                }
                for was, now in zip(self.before, self.after, strict=True)
            ],
        }
