"""The bodies of /v1/knowledge, and the entries of an import."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge.entries import Change, Content, Kind, Provenance, clean
from samovar.router.context.knowledge.harness import PATTERN_CHARS_MAX, Check, Question, Subject
from samovar.router.openai import ApiError, InvalidValue, StrictModel, error_of, shown

TITLE_CHARS_MAX = 200
TOPIC_CHARS_MAX = 64
WHY_CHARS_MAX = 1000
NAME_CHARS_MAX = 128
COUNT_MAX = 2**31 - 1

Why = Annotated[str, Field(max_length=WHY_CHARS_MAX)]
TurnId = Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None
TagName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Positive = Annotated[int, Field(ge=1, le=COUNT_MAX)]


class _KnowledgeBody(StrictModel):
    model_config = ConfigDict(extra="forbid")


class EntryBody(_KnowledgeBody):
    """An entry, or its next version. `base`: the version that the writer has seen; checked, if given."""

    kind: Kind
    text: Annotated[str, Field(min_length=1)]
    title: Annotated[str, Field(max_length=TITLE_CHARS_MAX)] = ""
    topics: list[Annotated[str, Field(min_length=1, max_length=TOPIC_CHARS_MAX)]] = Field(
        default_factory=list
    )
    why: Why = ""
    turn: TurnId = None
    base: Positive | None = None


class CheckBody(_KnowledgeBody):
    """See `Check`."""

    of: Subject = "context"
    contains: Annotated[str, Field(min_length=1)] | None = None
    excludes: Annotated[str, Field(min_length=1)] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=PATTERN_CHARS_MAX)] | None = None
    exact: str | None = None
    retrieves: Annotated[str, Field(min_length=1)] | None = None
    json_schema: dict[str, Any] | None = None


class QuestionBody(_KnowledgeBody):
    """See `Question`."""

    question: Annotated[str, Field(min_length=1)]
    checks: Annotated[list[CheckBody], Field(min_length=1, max_length=64)]


class _Gated(_KnowledgeBody):
    """A change that lands only if no question that holds before it is broken by it."""

    why: Why = ""
    questions: list[QuestionBody] = Field(default_factory=list)


class ImportBody(_Gated):
    """Entries as one text. `kind`: of Markdown sections that name none."""

    format: Literal["jsonl", "markdown"]
    text: Annotated[str, Field(min_length=1)]
    kind: Kind = "document_chunk"


class RevertBody(_Gated):
    """Which version of an entry is to be the newest again."""

    version: Positive


class RevertAllBody(_Gated):
    """Which named state all entries are to have again."""

    tag: TagName


class TagBody(_KnowledgeBody):
    """A name for the present state of all entries."""

    name: TagName


class SearchBody(_KnowledgeBody):
    """A question. `budget_tokens`: only what a chat would get within it."""

    query: Annotated[str, Field(min_length=1)]
    limit: Positive = 10
    kinds: Annotated[list[Kind], Field(max_length=16)] = Field(default_factory=list)
    budget_tokens: Positive | None = None


class TestBody(_KnowledgeBody):
    """Questions whose checks are to be run."""

    __test__ = False  # it is no test of pytest's

    questions: Annotated[list[QuestionBody], Field(min_length=1)]


def content_of(body: EntryBody, settings: KnowledgeSettings, place: str = "") -> Content:
    """Return an entry's content, cleaned. Raises `InvalidValue`; `place`: what stands before its fields."""
    title = " ".join(clean(body.title).split())
    text, topics = (
        clean(body.text).strip("\n"),
        tuple(dict.fromkeys(clean(one).strip() for one in body.topics)),
    )
    if not text.strip():
        raise InvalidValue(f"{place}text", f"{place}text holds no characters that can be seen.")
    if len(topics) > settings.topics_max:
        raise InvalidValue(
            f"{place}topics",
            f"{place}topics may have at most {settings.topics_max} items.",
        )
    content = Content(body.kind, title, text, tuple(one for one in topics if one))
    if content.nbytes > settings.entry_bytes_max:
        message = (
            f"{place}text: with title and topics it has {content.nbytes} bytes, more than "
            f"{settings.entry_bytes_max} (knowledge.entry_bytes_max). Split it."
        )
        raise InvalidValue(f"{place}text", message)
    return content


def origin_of(who: str, why: str, turn: str | None = None) -> Provenance:
    """Return where a version comes from, without characters that would steer the terminal that shows it."""
    return Provenance(who, clean(why), clean(turn or "") or None)


def questions_of(bodies: Sequence[QuestionBody], settings: KnowledgeSettings) -> list[Question]:
    """Return the questions of a test. Raises `InvalidValue` for a check without a rule, or too many."""
    if len(bodies) > settings.questions_max:
        most = settings.questions_max
        raise InvalidValue("questions", f"questions may have at most {most} items.")
    made = []
    for index, body in enumerate(bodies):
        checks = []
        for number, given in enumerate(body.checks):
            check = Check(**{name: getattr(given, name) for name in CheckBody.model_fields})
            if len(check.rules) != 1:
                param = f"questions[{index}].checks[{number}]"
                raise InvalidValue(param, f"{param} must have exactly one rule, and has {len(check.rules)}.")
            checks.append(check)
        made.append(Question(body.question, tuple(checks)))
    return made


def imported(body: ImportBody, settings: KnowledgeSettings, who: str) -> list[Change]:
    """Return the entries of an import. Raises `InvalidValue` naming the line or section at fault."""
    read = _lines if body.format == "jsonl" else _sections
    found = read(body)
    if not found:
        raise InvalidValue("text", "text holds no entry.")
    if len(found) > settings.import_entries_max:
        message = f"text holds {len(found)} entries, more than {settings.import_entries_max}."
        raise InvalidValue("text", message)
    return [
        Change(content_of(one, settings, place), origin_of(who, one.why or body.why, one.turn))
        for place, one in found
    ]


IMPORTED = frozenset({"kind", "title", "text", "topics", "why", "turn"})
EXPORTED = frozenset({"id", "object", "version", "operation", "of_version", "who", "created"})
"""What `samovar kb export` writes besides: the store gives a new entry its own."""


def _lines(body: ImportBody) -> list[tuple[str, EntryBody]]:
    found = []
    for number, line in enumerate(body.text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"text[line {number}]."
        try:
            value = parse_json(line)
        except ValueError:
            raise InvalidValue("text", f"line {number} of text is no JSON.") from None
        if not isinstance(value, dict):
            raise InvalidValue("text", f"line {number} of text is no JSON object.")
        unknown = next((name for name in value if name not in IMPORTED | EXPORTED), None)
        if unknown is not None:
            message = f"{place}{shown(unknown)} is no field of an entry. Leave it out, or mend its name."
            raise InvalidValue("text", message)
        fields = {name: value[name] for name in value if name in IMPORTED}
        found.append((place, _entry(fields, place)))
    return found


def _entry(fields: dict[str, Any], place: str) -> EntryBody:
    try:
        return EntryBody.model_validate(fields)
    except ValidationError as refused:
        error: ApiError = error_of(refused)
        raise InvalidValue("text", f"{place}{error.message}") from None


HEADING = re.compile(r"#{1,6}[ \t]+(.*)")  # what ends it is stripped: a pattern for that is quadratic
CODE_FENCE = re.compile(r" {0,3}(```+|~~~+)")
FIELD = re.compile(r"(kind|topics):[ \t]*(.*)")


def _sections(body: ImportBody) -> list[tuple[str, EntryBody]]:
    """Split Markdown at its headings; lines `kind: ...` and `topics: a, b` may stand right below one."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    code = ""
    for line in clean(body.text).split("\n"):
        fence = CODE_FENCE.match(line)
        if fence is not None and (not code or fence[1].startswith(code)):
            code = "" if code else fence[1]
        heading = None if code else HEADING.fullmatch(line)
        if heading is not None:
            sections.append((heading[1].rstrip(" \t#")[:TITLE_CHARS_MAX], []))
        else:
            sections[-1][1].append(line)
    found = []
    for title, lines in sections:
        fields: dict[str, Any] = {"kind": body.kind, "title": title}
        first = 0
        while first < len(lines) and (field := FIELD.fullmatch(lines[first])):
            first += 1
            parts = [part.strip() for part in field[2].split(",") if part.strip()]
            fields[field[1]] = parts if field[1] == "topics" else field[2].strip()
        fields["text"] = "\n".join(lines[first:]).strip()
        if fields["text"]:
            place = f"text[section {shown(title)}]."
            found.append((place, _entry(fields, place)))
    return found
