"""The loop over a store: turns are kept, feedback is logged and makes candidates, and some become entries."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import KnowledgeSettings, LoopSettings
from samovar.router.context.knowledge import (
    Approval,
    Change,
    EntryBody,
    EntryVersion,
    KnowledgeBase,
    KnowledgeStore,
    KnowledgeTurn,
    LoopRecord,
    Question,
    QuestionBody,
    QuotaExceeded,
    RecordBounds,
    RecordKind,
    StateChanged,
    clean,
    content_of,
    origin_of,
    questions_of,
)
from samovar.router.context.learning.bodies import ConfirmBody, FeedbackBody, QuestionsBody
from samovar.router.context.learning.candidates import (
    AUTHOR,
    CandidateEntry,
    CaptureCounts,
    Evidence,
    NotedTurn,
    State,
    TurnCall,
    candidate_of,
    capture_refusals,
    card,
    passed_calls,
    question_key,
    says_the_same,
)
from samovar.router.context.learning.gate import Gate
from samovar.router.openai import ApiError, ChatMessage, InvalidValue, no_such_cursor, shown

TURN_PREFIX, FEEDBACK_PREFIX, CANDIDATE_PREFIX = "turn_", "fb_", "cand_"
QUESTIONS = "questions"
SIMILAR_SHOWN = 5
CALLS_MAX = 16
TURNS_LOOKED_AT = 64
"""Turns of a conversation that are searched for a tool call."""


class LoopMemory:
    """Keeps answered turns in a store. See `TurnMemory`. `clock`: Unix time."""

    def __init__(
        self, store: KnowledgeStore, settings: LoopSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock

    def record(self, asked: KnowledgeTurn, said: ChatMessage) -> LoopRecord | None:
        """Return a turn as it is to be kept; None for one that is too long."""
        results = [
            (TurnCall(clean(one.call_id), clean(one.tool)), one.content) for one in asked.results[-CALLS_MAX:]
        ]
        turn = NotedTurn(
            clean(asked.question),
            clean(said.content),
            asked.refs,
            tuple(TurnCall(call.call_id, clean(call.name)) for call in said.calls[:CALLS_MAX]),
            passed_calls(results, self._settings.confirming_tools),
        )
        if turn.nbytes > self._settings.turn_bytes_max:
            return None
        now_s, name = self._clock(), TURN_PREFIX + secrets.token_hex(12)
        end_s = now_s + self._settings.turns_s
        return LoopRecord("turn", name, turn.json(), name, asked.session, "", b"", now_s, end_s)

    def keep(self, tenant: str, record: LoopRecord) -> None:
        """Write a turn; the oldest make room for it."""
        bounds = RecordBounds(self._settings.turns_max, self._settings.turns_bytes_max)
        self._store.records.put(tenant, record, bounds)


class LearningLoop:
    """Feedback, candidates and what becomes of them, of a knowledge base. Its methods block. Thread-safe.

    They raise `ApiError` and `KnowledgeError`. Each write is whole or not at all.
    """

    def __init__(
        self, base: KnowledgeBase, settings: KnowledgeSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._base = base
        self._records = base.store.records
        self._all = settings
        self._settings = settings.loop
        self._clock = clock

    def feedback(self, tenant: str, body: FeedbackBody) -> dict[str, Any]:
        """Log what became of an answer, and make a candidate of it, or the entry where the policy says so."""
        comment = self._comment(body)
        corrected = None if body.corrected is None else clean(body.corrected).strip()
        self._refuse_contradictions(body, corrected)
        record = self._turn(tenant, body.turn_id)
        turn = NotedTurn.of(record.body)
        evidence = Evidence()
        if body.tool_call_id is not None:
            evidence = self._evidence(tenant, record, turn, body.tool_call_id)
        name = FEEDBACK_PREFIX + secrets.token_hex(10)
        made: CandidateEntry | None = None
        if body.verdict == "success" or corrected is not None:
            made = candidate_of(turn, corrected, comment, evidence)
        candidate_id, reason = None, ""
        with self._base.store.transaction():
            if made is not None:
                candidate_id, reason = self._proposed(tenant, record, made)
            self._log(tenant, record, name, body.verdict, comment, evidence, candidate_id)
            self._turn(tenant, body.turn_id)  # raises if its session was deleted since: nothing is written
        if candidate_id is not None:
            self._try_capture(tenant, candidate_id, evidence)
        return {
            "id": name,
            "object": "knowledge.feedback",
            "turn_id": body.turn_id,
            "verdict": body.verdict,
            "candidate": None if candidate_id is None else self.candidate(tenant, candidate_id),
            "reason": reason or None,
        }

    def _comment(self, body: FeedbackBody) -> str:
        most = self._settings.comment_chars_max
        if len(body.comment) > most:
            message = f"comment has more than {most} characters."
            raise InvalidValue("comment", message)
        return clean(body.comment)

    def _refuse_contradictions(self, body: FeedbackBody, corrected: str | None) -> None:
        if body.verdict == "success" and corrected is not None:
            raise InvalidValue("corrected", "corrected goes with verdict=failure only.")
        if body.verdict == "failure" and body.tool_call_id is not None:
            raise InvalidValue("tool_call_id", "tool_call_id confirms: it goes with verdict=success only.")
        if corrected is not None and not corrected:
            raise InvalidValue("corrected", "corrected holds no characters that can be seen.")
        if corrected is not None and len(corrected.encode()) > self._all.entry_bytes_max:
            message = (
                f"corrected has more than {self._all.entry_bytes_max} bytes (knowledge.entry_bytes_max)."
            )
            raise InvalidValue("corrected", message)

    def _turn(self, tenant: str, turn_id: str) -> LoopRecord:
        found = self._records.find(tenant, "turn", ids=[turn_id])
        if not found:
            message = (
                f"There is no turn {shown(turn_id)}: it is older than {self._settings.turns_s:g} s "
                "(knowledge.loop.turns_s), was deleted or pushed out, or never was."
            )
            raise ApiError(404, message, param="turn_id", code="turn_not_found")
        return found[0]

    def _evidence(self, tenant: str, record: LoopRecord, turn: NotedTurn, call_id: str) -> Evidence:
        """Return what a tool's result says for a turn.

        The model has made the call, in this turn's conversation; its result was in this turn's prompt, behind
        the question; the operator has named the tool; and the result fits the operator's pattern.
        """
        passed = next((one for one in turn.passed if one.call_id == call_id), None)
        if passed is not None:
            session = self._records.find(
                tenant, "turn", session=record.session, limit=TURNS_LOOKED_AT, after=record.id
            )
            if any(passed in NotedTurn.of(one.body).calls for one in session):
                return Evidence(passed.tool, call_id)
        message = (
            f"tool_call_id={shown(call_id)}: no call that the model made in this conversation, whose result "
            "stood behind this turn's question, and passed as knowledge.loop.confirming_tools says."
        )
        raise InvalidValue("tool_call_id", message, code="not_confirmed")

    def _proposed(self, tenant: str, record: LoopRecord, made: CandidateEntry) -> tuple[str | None, str]:
        """Return the id of the candidate that says this, made if it is new; or why there is none."""
        most = self._all.entry_bytes_max
        if made.content.nbytes > most:
            return None, f"question and answer have more than {most} bytes (knowledge.entry_bytes_max)"
        key, now_s = question_key(made.question), self._clock()
        alike = self._records.find(tenant, "candidate", key=key)
        for one in alike:
            known = CandidateEntry.of(one.body)
            if known.digest == made.digest:
                evidence = known.evidence if known.evidence.tool else made.evidence
                self._put(tenant, one, replace(known, seen=known.seen + 1, evidence=evidence))
                return one.id, ""
        most = self._settings.candidates_per_session
        if self._records.count(tenant, "candidate", session=record.session) >= most:
            return None, f"this conversation has {most} candidates"
        (vector,) = self._base.vectors([made.content.words])
        fresh = LoopRecord(
            "candidate",
            CANDIDATE_PREFIX + secrets.token_hex(10),
            "",
            record.turn,
            record.session,
            "open",
            key,
            now_s,
            now_s + self._settings.candidates_s,
            vector,
        )
        try:
            self._put(tenant, fresh, replace(made, similar=self._similar(tenant, made, fresh)))
        except QuotaExceeded:
            return None, "there is no room for candidates: decide on some"
        return fresh.id, ""

    def _similar(self, tenant: str, made: CandidateEntry, record: LoopRecord) -> tuple[str, ...]:
        """Return entries and other candidates that are about the same as a candidate."""
        store, least = self._base.store, self._settings.similar_min
        found = [one.id for one in self._records.find(tenant, "candidate", key=record.key)]
        if record.vector is not None:
            near = self._records.similar(tenant, "candidate", record.vector, least, SIMILAR_SHOWN)
            found += [name for name, _ in near]
            entries = store.by_meaning(tenant, record.vector, (), SIMILAR_SHOWN)
            found += [ref.entry for ref, cosine in entries if cosine >= least]
        for one in self._base.search(tenant, made.question, limit=SIMILAR_SHOWN):
            if says_the_same(made.question, one.version.content.title, least):
                found.append(one.ref.entry)
        return tuple(one for one in dict.fromkeys(found) if one != record.id)

    def _put(
        self, tenant: str, record: LoopRecord, candidate: CandidateEntry, state: State | None = None
    ) -> None:
        vector = None if state is not None else record.vector  # what is decided has no text, and no vector
        bounds = RecordBounds(
            self._settings.candidates_max,
            self._settings.candidates_bytes_max,
            leaving=("confirmed", "captured", "rejected"),
        )
        kept = replace(record, body=candidate.json(), state=state or record.state, vector=vector)
        self._records.put(tenant, kept, bounds)

    def _log(
        self,
        tenant: str,
        turn: LoopRecord,
        name: str,
        verdict: str,
        comment: str,
        evidence: Evidence,
        candidate: str | None,
    ) -> None:
        row = {"verdict": verdict, "comment": comment, "tool": evidence.tool, "candidate": candidate}
        now_s = self._clock()
        record = LoopRecord(
            "log",
            name,
            json.dumps(row, ensure_ascii=False),
            turn.turn,
            turn.session,
            verdict,
            at_s=now_s,
            expires_s=now_s + self._settings.log_s,
        )
        bounds = RecordBounds(
            self._settings.log_max, self._settings.log_bytes_max, leaving=("success", "failure")
        )
        self._records.put(tenant, record, bounds)

    def log(self, tenant: str, verdict: str | None, limit: int, after: str) -> list[dict[str, Any]]:
        """Return rows of feedback, the newest first. Raises `InvalidValue` for an unknown `after`."""
        found = self._page(tenant, "log", verdict, limit, after)
        return [
            {
                "id": one.id,
                "object": "knowledge.feedback",
                "turn_id": one.turn,
                **parse_json(one.body),
                "created": int(one.at_s),
            }
            for one in found
        ]

    def _try_capture(self, tenant: str, name: str, evidence: Evidence) -> None:
        """Make a candidate an entry if the policy allows it; else note why it waits for a person."""
        if tenant not in self._settings.auto_of:
            return

        def refusals(candidate: CandidateEntry, session: bytes) -> list[str]:
            since_s = self._clock() - self._settings.auto_window_s
            written = self._base.store.authorship(tenant, AUTHOR, since_s)
            captured = self._records.count(tenant, "candidate", session=session, state="captured")
            counts = CaptureCounts(written.entries, written.entries_of, written.versions_since, captured)
            return capture_refusals(candidate, tenant, counts, self._settings)

        def allowed(candidate: CandidateEntry, record: LoopRecord) -> None:
            # What is similar now: others may have written since the candidate was made.
            similar = self._similar(tenant, candidate, record)
            reasons = refusals(replace(candidate, similar=similar), record.session)
            if reasons:
                raise _Held(reasons)

        why = f"a result of {shown(evidence.tool)} passed" if evidence.tool else "success"
        try:
            gate = Gate(self._base, tenant, self._kept_questions(tenant))
            self._decide(tenant, name, _Decision("captured", AUTHOR, why), gate.approval, allowed)
        except _Held as held:
            self._hold(tenant, name, held.reasons)
        except (ApiError, StateChanged, QuotaExceeded) as error:
            self._hold(tenant, name, [str(error)])

    def _hold(self, tenant: str, name: str, reasons: Sequence[str]) -> None:
        with self._base.store.transaction():
            record = next(iter(self._records.find(tenant, "candidate", ids=[name], state="open")), None)
            if record is not None:
                self._put(tenant, record, replace(CandidateEntry.of(record.body), held=tuple(reasons)))

    def confirm(self, tenant: str, name: str, body: ConfirmBody) -> dict[str, Any]:
        """Make a candidate an entry, on a person's word: with what `body` gives in place of its own."""
        self._open(tenant, name)
        questions = [*self._kept_questions(tenant), *questions_of(body.questions, self._all)]
        gate = Gate(self._base, tenant, questions)
        self._decide(tenant, name, _Decision("confirmed", tenant, body.why, body), gate.approval)
        return {**self.candidate(tenant, name), **gate.report}

    def _decide(
        self,
        tenant: str,
        name: str,
        decision: _Decision,
        approve: Approval | None,
        allowed: Callable[[CandidateEntry, LoopRecord], None] | None = None,
    ) -> None:
        """Write an entry and that its candidate is decided, in one. `allowed` raises if it must not be."""

        def make() -> list[Change]:
            record = self._open(tenant, name)
            candidate = CandidateEntry.of(record.body)
            if allowed is not None:
                allowed(candidate, record)
            entry = _entry(candidate, decision.body)
            origin = origin_of(decision.who, decision.why, record.turn)
            return self._base.fitted([Change(content_of(entry, self._all), origin)])

        def along(made: list[EntryVersion]) -> None:
            record = self._open(tenant, name)  # as it is now: others may have decided
            done = CandidateEntry.of(record.body).decided(made[0].ref.entry, clean(decision.why))
            self._put(tenant, record, done, decision.state)

        self._base.land(tenant, make, approve, along)

    def reject(self, tenant: str, name: str, why: str) -> dict[str, Any]:
        """Refuse a candidate. Its texts are dropped; the same one is not made again while it is kept."""
        with self._base.store.transaction():
            record = self._open(tenant, name)
            self._put(tenant, record, CandidateEntry.of(record.body).decided(None, clean(why)), "rejected")
        return self.candidate(tenant, name)

    def erase(self, tenant: str, name: str) -> None:
        """Erase a candidate, so that no file holds a byte of it. Its entry, if it has one, stays."""
        if not self._records.erase(tenant, kind="candidate", ids=[name]):
            raise _no_candidate(name)

    def candidate(self, tenant: str, name: str) -> dict[str, Any]:
        """Return a candidate for a client."""
        return _card(self._candidate(tenant, name))

    def candidates(self, tenant: str, state: str | None, limit: int, after: str) -> list[dict[str, Any]]:
        """Return candidates for a client, the newest first. Raises `InvalidValue` for an unknown `after`."""
        return [_card(one) for one in self._page(tenant, "candidate", state, limit, after)]

    def _page(
        self, tenant: str, kind: RecordKind, state: str | None, limit: int, after: str
    ) -> list[LoopRecord]:
        if after and not self._records.find(tenant, kind, ids=[after], limit=1):
            raise no_such_cursor(after)
        return self._records.find(tenant, kind, state=state, limit=limit, after=after)

    def _candidate(self, tenant: str, name: str) -> LoopRecord:
        found = self._records.find(tenant, "candidate", ids=[name])
        if not found:
            raise _no_candidate(name)
        return found[0]

    def _open(self, tenant: str, name: str) -> LoopRecord:
        record = self._candidate(tenant, name)
        if record.state != "open":
            message = f"{shown(name)} is {record.state} already."
            raise ApiError(409, message, param="id", code="candidate_decided")
        return record

    def questions(self, tenant: str) -> list[Any]:
        """Return the kept questions, as they were given."""
        found = self._records.find(tenant, "questions", ids=[QUESTIONS])
        return cast(list[Any], parse_json(found[0].body)) if found else []

    def keep_questions(self, tenant: str, body: QuestionsBody) -> int:
        """Keep questions in place of those before, for all that the loop adds from now on."""
        questions_of(body.questions, self._all)  # refuses those that are none
        given = [one.model_dump(exclude_unset=True) for one in body.questions]
        record = LoopRecord("questions", QUESTIONS, json.dumps(given, ensure_ascii=False), at_s=self._clock())
        try:
            self._records.put(tenant, record, RecordBounds(1, self._settings.questions_bytes_max, ()))
        except QuotaExceeded:
            most = self._settings.questions_bytes_max
            message = f"questions have more than {most} bytes."
            raise InvalidValue("questions", message) from None
        return len(given)

    def forget_questions(self, tenant: str) -> None:
        """Erase the kept questions."""
        self._records.erase(tenant, kind="questions")

    def _kept_questions(self, tenant: str) -> list[Question]:
        bodies = [QuestionBody.model_validate(one) for one in self.questions(tenant)]
        return questions_of(bodies, self._all)


@dataclass(frozen=True, slots=True)
class _Decision:
    """How a candidate becomes an entry. `body`: what a person gives in place of its own texts."""

    state: State
    who: str
    why: str
    body: ConfirmBody | None = None


class _Held(Exception):
    """The policy leaves a candidate to a person."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def _entry(candidate: CandidateEntry, body: ConfirmBody | None) -> EntryBody:
    own = candidate.content
    if body is None:
        return EntryBody(kind=own.kind, title=own.title, text=own.text)
    return EntryBody(
        kind=body.kind or own.kind,
        title=own.title if body.title is None else body.title,
        text=body.text or own.text,
        topics=body.topics,
    )


def _card(record: LoopRecord) -> dict[str, Any]:
    return card(record.id, record.state, CandidateEntry.of(record.body), record.turn, record.at_s)


def _no_candidate(name: str) -> ApiError:
    return ApiError(404, f"there is no candidate {shown(name)}.", param="id", code="candidate_not_found")
