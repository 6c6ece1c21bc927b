"""A turn as it is kept, the candidate for the knowledge base that feedback makes of it, and its way in.
Pure."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import LoopSettings
from samovar.router.context.knowledge import Check, Content, EntryRef, Kind, as_data, broken, words_of

State = Literal["open", "confirmed", "captured", "rejected"]

TITLE_CHARS = 200
QUESTION = "Question: "
ANSWER = "Answer: "
CORRECTED = "Correct answer: "


@dataclass(frozen=True, slots=True)
class TurnCall:
    """A tool call that the model made."""

    call_id: str
    tool: str


@dataclass(frozen=True, slots=True)
class NotedTurn:
    """Question, context and answer of one turn.

    `calls`: made in the answer. `passed`: results before the answer, of tools that may confirm, that passed.
    """

    question: str
    answer: str
    refs: tuple[EntryRef, ...] = ()
    calls: tuple[TurnCall, ...] = ()
    passed: tuple[TurnCall, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its texts."""
        return len(self.question.encode()) + len(self.answer.encode())

    def json(self) -> str:
        """Return it as text, for `of`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def of(cls, text: str) -> NotedTurn:
        """Return the turn that `json` wrote."""
        found = parse_json(text)
        return cls(
            found["question"],
            found["answer"],
            tuple(EntryRef(**one) for one in found["refs"]),
            tuple(TurnCall(**one) for one in found["calls"]),
            tuple(TurnCall(**one) for one in found["passed"]),
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a candidate is believed. `tool`: the tool whose result confirms it; empty: the client's word."""

    tool: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class CandidateEntry:
    """What may become an entry, or has, or has been refused. Decided ones have no texts any more.

    `digest`: of what it says. `said`: the model's answer where a correction stands in its place. `similar`:
    ids of entries and candidates that are about the same. `seen`: how often feedback said it. `held`: why
    auto-capture left it to a person.
    """

    kind: Kind
    question: str
    answer: str
    digest: str
    refs: tuple[EntryRef, ...] = ()
    said: str = ""
    comment: str = ""
    evidence: Evidence = Evidence()
    similar: tuple[str, ...] = ()
    seen: int = 1
    held: tuple[str, ...] = ()
    entry: str | None = None
    why: str = ""

    @property
    def is_correction(self) -> bool:
        """Whether its answer is the client's."""
        return self.kind == "error_correction"

    @property
    def content(self) -> Content:
        """What it would say as an entry."""
        title = " ".join(self.question.split())[:TITLE_CHARS]
        answer = CORRECTED if self.is_correction else ANSWER
        return Content(self.kind, title, f"{QUESTION}{self.question}\n{answer}{self.answer}")

    def decided(self, entry: str | None, why: str) -> CandidateEntry:
        """Return it without its texts: the entry has them, or nothing should."""
        return replace(
            self, question="", answer="", said="", comment="", held=(), similar=(), entry=entry, why=why
        )

    def json(self) -> str:
        """Return it as text, for `of`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def of(cls, text: str) -> CandidateEntry:
        """Return the candidate that `json` wrote."""
        found = parse_json(text)
        lists = {name: tuple(found[name]) for name in ("similar", "held")}
        refs = tuple(EntryRef(**one) for one in found["refs"])
        return cls(**{**found, **lists, "refs": refs, "evidence": Evidence(**found["evidence"])})


def candidate_of(
    turn: NotedTurn, corrected: str | None, comment: str, evidence: Evidence
) -> CandidateEntry | None:
    """Return the candidate that feedback makes of a turn; None if there is nothing to learn.

    `corrected`: the client's answer in place of the model's, or None. Texts have been cleaned.
    """
    question, answer = turn.question.strip(), (turn.answer if corrected is None else corrected).strip()
    if not question or not answer:
        return None
    kind: Kind = "query_template" if corrected is None else "error_correction"
    return CandidateEntry(
        kind,
        question,
        answer,
        _digest(kind, question, answer).hex(),
        turn.refs,
        said="" if corrected is None else turn.answer,
        comment=comment,
        evidence=evidence,
    )


def question_key(question: str) -> bytes:
    """Return a digest that questions have in common if they differ in case, blanks and punctuation only."""
    return _digest(question)


def _digest(*texts: str) -> bytes:
    digest = hashlib.sha256()
    for text in texts:
        plain = unicodedata.normalize("NFKC", text).casefold()
        raw = " ".join("".join(char if char.isalnum() else " " for char in plain).split()).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def says_the_same(question: str, title: str, share_min: float) -> bool:
    """Whether two questions have nearly all their telling words in common, in whatever order."""
    one, other = set(words_of(question)), set(words_of(title))
    return bool(one and other) and len(one & other) >= share_min * len(one | other)


def card(name: str, state: str, candidate: CandidateEntry, turn: str, at_s: float) -> dict[str, Any]:
    """Return a candidate as a client sees it. `preview`: the lines that would stand in a prompt's fence."""
    is_open = state == "open"
    return {
        "id": name,
        "object": "knowledge.candidate",
        "state": state,
        "kind": candidate.kind,
        "question": candidate.question,
        "answer": candidate.answer,
        "said": candidate.said or None,
        "comment": candidate.comment,
        "context": [{"id": ref.entry, "version": ref.number} for ref in candidate.refs],
        "evidence": asdict(candidate.evidence) if candidate.evidence.tool else None,
        "similar": list(candidate.similar),
        "seen": candidate.seen,
        "held": list(candidate.held),
        "preview": as_data(candidate.content.text, ()) if is_open else None,
        "entry": candidate.entry,
        "why": candidate.why,
        "turn": turn,
        "created": int(at_s),
    }


def passed_calls(
    results: Sequence[tuple[TurnCall, str]], patterns: Mapping[str, str]
) -> tuple[TurnCall, ...]:
    """Return the calls whose results passed. `results`: with texts; `patterns`: of tools that confirm."""
    return tuple(
        call
        for call, text in results
        if call.tool in patterns and broken(Check(regex=patterns[call.tool]), text) is None
    )


AUTHOR = "auto-capture"
"""`who` of versions that no person has confirmed."""


@dataclass(frozen=True, slots=True)
class CaptureCounts:
    """What a tenant's base has at a moment. `of_auto`: entries whose newest version is auto-capture's.

    `of_window`: auto-captures in the last `auto_window_s`; `of_session`: of this conversation.
    """

    entries: int
    of_auto: int
    of_window: int
    of_session: int


def capture_refusals(
    candidate: CandidateEntry, tenant: str, counts: CaptureCounts, settings: LoopSettings
) -> list[str]:
    """Return why a candidate has to wait for a person; nothing: it may enter."""
    if tenant not in settings.auto_of:
        return ["auto-capture is off (knowledge.loop.auto_of)"]
    reasons = []
    if candidate.is_correction:
        reasons.append("a correction is the client's text: it needs a person")
    if settings.auto_evidence == "tool" and not candidate.evidence.tool:
        reasons.append("no tool's result confirms it (knowledge.loop.auto_evidence)")
    if candidate.similar:
        reasons.append("there is something about the same")
    if counts.of_session >= settings.auto_per_session:
        reasons.append(
            f"{counts.of_session} of this conversation have entered (knowledge.loop.auto_per_session)"
        )
    if counts.of_window >= settings.auto_per_window:
        reasons.append(
            f"{counts.of_window} have entered in {settings.auto_window_s:g} s "
            "(knowledge.loop.auto_per_window)"
        )
    if counts.of_auto + 1 > settings.auto_share_max * (counts.entries + 1):
        reasons.append(
            f"{counts.of_auto} of {counts.entries} entries are auto-captures (knowledge.loop.auto_share_max)"
        )
    return reasons
