"""Regression tests of a knowledge base: questions with checks of what is retrieved, and of answers. Pure."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import regex

from samovar.configs.json_text import parse_json

Subject = Literal["context", "answer"]

REGEX_S_MAX = 0.5
"""How long one pattern may search: patterns come from clients."""
SCHEMA_S_MAX = 2.0
"""Time of a processor that one schema may take, its patterns included."""
PATTERN_CHARS_MAX = 1000
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold, of the retrieved context or of an answer; exactly one rule is given.

    `contains`, `excludes`: a text. `regex`: a pattern that is found. `exact`: all of it, but for blanks
    around it. `retrieves`: the id or title of an entry that is among those retrieved. `json_schema`: it
    is JSON of that schema; of the context, the text of one entry is: all of it stands in a fence.
    `unevaluatedItems` and `unevaluatedProperties` of a schema are refused.
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


class _NotChecked(Exception):
    """A check cannot be made; the message says why."""


def _finds(pattern: str, text: str, timeout_s: float = REGEX_S_MAX) -> bool:
    """Return whether a client's pattern is found. Raises `_NotChecked`."""
    fault = pattern_fault(pattern)
    if fault is None:
        try:
            return regex.search(pattern, text, timeout=timeout_s, concurrent=True) is not None
        except TimeoutError:
            fault = f"it takes longer than {timeout_s:.2g} s"
        except (regex.error, MemoryError, RecursionError) as error:
            fault = str(error)
    raise _NotChecked(f"{pattern[:SHOWN_CHARS]!r}: {fault}")


def broken(check: Check, text: str, found: Found | None = None) -> str | None:
    """Return why a check does not hold, in words; None if it does."""
    if check.contains is not None and check.contains not in text:
        return f"contains {check.contains!r}: it does not"
    if check.excludes is not None and check.excludes in text:
        return f"excludes {check.excludes!r}: it is there"
    if check.exact is not None and check.exact.strip() != text.strip():
        return f"exact {check.exact!r}: it is another text"
    if check.regex is not None:
        try:
            if not _finds(check.regex, text):
                return f"regex {check.regex!r}: it matches nothing"
        except _NotChecked as why:
            return f"regex {why}"
    if check.retrieves is not None:
        entries = found.entries if found is not None else ()
        if not any(check.retrieves in (entry, title) for entry, title in entries):
            return f"retrieves {check.retrieves!r}: it is not among the {len(entries)} entries"
    if check.json_schema is not None:
        texts = (text,) if found is None else found.texts
        return _broken_schema(check.json_schema, texts)
    return None


_until = threading.local()
"""`cpu_s`: by `time.thread_time`, when this thread's check of a schema ends: so a busy machine ends none."""


def _left_s() -> float:
    left_s: float = _until.cpu_s - time.thread_time()
    if left_s <= 0:
        raise _NotChecked(f"it takes longer than {SCHEMA_S_MAX:g} s")
    return left_s


def _broken_schema(schema: dict[str, Any], texts: Sequence[str]) -> str | None:
    """Return why the first of these texts is no JSON of a schema; None if one of them is."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    first = "json_schema: there is no entry" if not texts else None
    try:
        kind = validator_for(schema)
        rules = _within_bounds(kind)
        _until.cpu_s = time.thread_time() + SCHEMA_S_MAX
        for error in rules(kind.META_SCHEMA, registry=Registry()).iter_errors(schema):
            return f"json_schema is no schema: {error.message[:SHOWN_CHARS]}"
        own = rules(schema, registry=Registry())  # an empty registry: nothing is fetched
        for text in texts:
            fault = _misfit(own, text)
            if fault is None:
                return None
            first = first or fault
    except _NotChecked as why:
        return f"json_schema: {why}"
    except RecursionError:
        return "json_schema: it is too deep, or a $ref leads back to itself"
    except Exception as error:  # noqa: BLE001 - a $ref may lead to a part that is no schema: it raises anything
        return f"json_schema is no schema: {str(error)[:SHOWN_CHARS]}"
    return first


def _misfit(rules: Any, text: str) -> str | None:
    try:
        value = parse_json(text)
    except ValueError:
        return "json_schema: it is no JSON"
    for error in rules.iter_errors(value):
        return f"json_schema: {error.message[:SHOWN_CHARS]}"
    return None


@cache  # there are few kinds, and a class that is made stays in memory
def _within_bounds(kind: Any) -> Any:
    """Return a kind of validator whose rules end in time, however often parts of a schema name each other."""
    from jsonschema import ValidationError
    from jsonschema.validators import extend

    def limited(rule: Any) -> Any:
        def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            _left_s()
            return rule(validator, value, instance, schema)

        return checked

    def finds(one: str, text: str) -> bool:
        if len(one) > PATTERN_CHARS_MAX:
            raise _NotChecked(f"{one[:SHOWN_CHARS]!r}: it has more than {PATTERN_CHARS_MAX} characters")
        return _finds(one, text, _left_s())

    def pattern(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not finds(value, instance):
            yield ValidationError(f"{instance!r} does not match {value!r}")

    def pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "object"):
            for one, below in value.items():
                for name in instance:
                    if finds(one, name):
                        yield from validator.descend(instance[name], below, path=name, schema_path=one)

    def additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        patterns = schema.get("patternProperties", {})
        if patterns and validator.is_type(instance, "object"):
            found = [name for name in instance if any(finds(one, name) for one in patterns)]
            schema = {"properties": {**schema.get("properties", {}), **dict.fromkeys(found)}}
        return kind.VALIDATORS["additionalProperties"](validator, value, instance, schema)

    def unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        is_list = value and validator.is_type(instance, "array")
        if is_list and len({_comparable(one) for one in instance}) < len(instance):
            yield ValidationError("the array has equal elements")

    def refused(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        raise _NotChecked("unevaluatedItems and unevaluatedProperties are not followed")

    own = {
        "pattern": pattern,  # `re` cannot be interrupted
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "uniqueItems": unique_items,  # else each is compared with each
        "unevaluatedItems": refused,  # they go through the schema by themselves, with `re`
        "unevaluatedProperties": refused,
    }
    rules = {**kind.VALIDATORS, **{name: rule for name, rule in own.items() if name in kind.VALIDATORS}}
    made = extend(kind, {name: limited(rule) for name, rule in rules.items()})
    evolved = made.evolve

    def evolve(self: Any, **changes: Any) -> Any:
        below = changes.get("schema")
        if isinstance(below, dict):  # its "$schema" would choose rules without bounds
            changes["schema"] = {name: one for name, one in below.items() if name != "$schema"}
        return evolved(self, **changes)

    made.evolve = evolve
    return made


def _comparable(value: Any) -> Any:
    """Return what is equal for equal JSON only, and has a hash: 1 is 1.0, and not true."""
    if isinstance(value, dict):
        return frozenset((name, _comparable(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(_comparable, value))
    return frozenset([value]) if isinstance(value, bool) else value


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
