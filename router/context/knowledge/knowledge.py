"""The knowledge base of an ingress: searches, writes, and the context of chat requests, over one store."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar

from samovar.configs.optional_sections import KnowledgeSettings
from samovar.replicas.turns import PlacesTaken, TenantThreads
from samovar.router.context.knowledge.embedder import Embedder
from samovar.router.context.knowledge.entries import (
    KINDS,
    Change,
    EntryNotFound,
    EntryRef,
    EntryVersion,
    Kind,
    KnowledgeError,
    KnowledgeStore,
    Limits,
    LoopRecord,
    Operation,
    PlacedTurn,
    Provenance,
    QuotaExceeded,
    StateChanged,
    Vector,
    VersionConflict,
    clean,
    names_in,
)
from samovar.router.context.knowledge.placement import (
    KnowledgeTurn,
    PlacedContext,
    PromptText,
    TurnKey,
    asks_now,
    chained,
    fenced,
    is_first_turn,
    place,
    turn_keys,
)
from samovar.router.context.knowledge.retrieval import (
    Budget,
    Candidate,
    fuse,
    rerank,
    select,
    tells,
    words_of,
)
from samovar.router.generation import AnsweredTurn, AskedTurn, PromptStage
from samovar.router.openai import (
    ApiError,
    ChatMessage,
    InvalidValue,
    KnowledgeWish,
    ParsedChat,
    TooManyRequests,
    Unavailable,
    shown,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RANKINGS = ("words", "meaning", "names")
RECENT_FRONTS = 8
"""Sets of stable entries, in front of the latest conversations, that are compared with the best one."""
COUNTED_MAX = 20_000
"""Versions whose tokens are remembered."""
EMBEDDED_AT_ONCE = 256
QUESTIONS_SHARE = 0.5
"""Of a thread, that the questions of a tenant may take in the long run."""


class TurnMemory(Protocol):
    """Keeps turns, so that feedback need not say what was asked and answered."""

    def record(self, asked: KnowledgeTurn, said: ChatMessage) -> LoopRecord | None:
        """Return a turn as it is to be kept; None if it is not."""
        ...

    def keep(self, tenant: str, record: LoopRecord) -> None:
        """Write it. Raises `KnowledgeError`."""
        ...


Approval = Callable[["KnowledgeBase"], None]
"""Looks at a knowledge base as it would be with a change; what it raises keeps the change out."""


class KnowledgeBase(PromptStage):
    """Entries, their search, and the context of chats. Its methods block: call them by `run`. Thread-safe.

    They raise `KnowledgeError`, and `ApiError` for what a client asks wrongly. `embedder`: None: entries are
    found by words and names only. `memory`: keeps answered turns; None: they are not kept. `makes_room`:
    whether old turns leave the prompt of a tenant's chat where it would not fit. `turns`: its threads, in
    which tenants take turns.
    """

    name, keeps, is_shared = "knowledge", "knowledge of conversations", True

    def __init__(
        self,
        store: KnowledgeStore,
        embedder: Embedder | None,
        text: PromptText,
        settings: KnowledgeSettings,
        retry_after_s: float = 1.0,
        memory: TurnMemory | None = None,
        makes_room: Callable[[ParsedChat, str], bool] = lambda request, tenant: False,
        turns: TenantThreads | None = None,
    ) -> None:
        self.store = store
        self._memory = memory
        self._makes_room = makes_room
        self.settings = settings
        self.limits = Limits(settings.entries_max, settings.bytes_max, settings.tags_max)
        self._embedder = embedder
        self._text = text
        self._retry_after_s = retry_after_s
        self.turns = turns or TenantThreads("knowledge", settings.threads, places=settings.waiting_max)
        self.question_time = QuestionTime(settings.questions_s)
        self._lock = Lock()
        self._counted: OrderedDict[EntryRef, int] = OrderedDict()

    async def run(
        self, tenant: str, work: Callable[[], Result], *, is_long: bool = False, must_run: bool = False
    ) -> Result:
        """Run `work` for a tenant in one of the knowledge base's threads.

        `is_long`: it may take longer than a search does. Raises `TooManyRequests` if too much waits, unless
        it `must_run`: deletions, and what has a bound of its own.
        """
        try:
            return await self.turns.run(tenant, work, is_long=is_long, must_run=must_run)
        except PlacesTaken as taken:
            limits = "knowledge.waiting_max" + (", limits.tenant_share" if taken.is_of_tenant else "")
            message = f"Too many calls wait for the knowledge base ({limits}). Try again later."
            raise TooManyRequests(message, self._retry_after_s, code="queue_full") from None
        except KnowledgeError as error:
            raise self._told(error) from None

    def _told(self, error: KnowledgeError) -> ApiError:
        """Return a refusal of the store as an error of the API."""
        message = f"{error}."
        if isinstance(error, EntryNotFound):
            return ApiError(404, message, param=error.param, code="entry_not_found")
        if isinstance(error, VersionConflict):
            return ApiError(409, message, param=error.param, code="version_conflict")
        if isinstance(error, QuotaExceeded):
            return InvalidValue(error.param, f"No room for it: {message}", code="quota_exceeded")
        if isinstance(error, StateChanged):
            return Unavailable(f"Nothing was changed: {message}", self._retry_after_s, code="knowledge_busy")
        logger.warning("the knowledge base fails: %s", error)
        return Unavailable(message, self._retry_after_s, code="knowledge_unavailable")

    @property
    def has_meaning(self) -> bool:
        """Whether entries are found by meaning."""
        return self._embedder is not None

    def close(self) -> None:
        """Stop the threads and close the store."""
        self.turns.close(wait=True)
        self.store.close()

    def has(self, tenant: str, entries: Collection[str]) -> bool:
        """Whether none of these entries was erased."""
        first = {EntryRef(entry, 1) for entry in entries}
        return not first or len(self.store.versions(tenant, first)) == len(first)

    def over(self, store: KnowledgeStore) -> KnowledgeBase:
        """Return a knowledge base that searches another store: a trial of this one's."""
        other = copy.copy(self)
        other.store, other._counted = store, OrderedDict()
        return other

    def write(
        self, tenant: str, changes: Sequence[Change], approve: Approval | None = None
    ) -> list[EntryVersion]:
        """Append versions, all or none. `approve` sees them first, and what it raises keeps them out."""
        fitted = self.fitted(changes)
        if approve is None:
            return self.store.write(tenant, fitted, self.limits)
        return self.land(tenant, lambda: fitted, approve)

    def fitted(self, changes: Sequence[Change]) -> list[Change]:
        """Return changes with the vectors of their texts."""
        vectors = self.vectors([change.content.words for change in changes if change.operation != "retire"])
        return [
            change if change.operation == "retire" else replace(change, vector=next(vectors))
            for change in changes
        ]

    def vectors(self, texts: Sequence[str]) -> Iterator[Vector | None]:
        """Return the vector of each text; None without an embedder."""
        return iter([None] * len(texts) if self._embedder is None else self._embedder.embed(texts))

    def land(
        self,
        tenant: str,
        make: Callable[[], Sequence[Change]],
        approve: Approval | None,
        along: Callable[[list[EntryVersion]], None] | None = None,
    ) -> list[EntryVersion]:
        """Write what `make` returns for the present state, once it is approved. `along`: in the same write.

        Others do not wait for the approval, which sees a copy. If they have written meanwhile, all is done
        again, once; then `StateChanged` is raised. What `make` and `along` raise keeps the change out.
        """
        for is_last in (False, True):
            state = self.store.state(tenant)
            changes = make()
            if not changes:
                return []
            if approve is not None:
                with self.store.trial(tenant, changes) as tried:
                    approve(self.over(tried))
            try:
                with self.store.transaction():
                    made = self.store.write(tenant, changes, self.limits, state)
                    if along is not None:
                        along(made)
                return made
            except StateChanged:
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def revert(
        self,
        tenant: str,
        entry: str,
        number: int,
        provenance: Provenance,
        approve: Approval | None = None,
    ) -> EntryVersion:
        """Append a version that repeats an earlier one."""
        before = self.store.version(tenant, EntryRef(entry, number))
        (made,) = self.write(tenant, [_repeated(before, provenance)], approve)
        return made

    def revert_to(
        self, tenant: str, tag: str, provenance: Provenance, approve: Approval | None = None
    ) -> list[EntryVersion]:
        """Append versions to all entries that differ from the named state, so that they are as they were.

        What was created since is retired; what was erased since is gone.
        """

        def make() -> list[Change]:
            tags = self.store.tags(tenant)
            if tag not in tags:
                raise EntryNotFound(f"there is no tag {shown(tag)}", "tag")
            then = self.store.state_at(tenant, tags[tag])
            now = self.store.state_at(tenant, 2**62)
            changes = []
            for entry, head in sorted(now.items()):
                before = then.get(entry)
                if before is None:
                    if head.operation != "retire":
                        changes.append(Change(head.content, provenance, entry, "retire"))
                elif not _is_same(before, head):
                    changes.append(_repeated(before, provenance))
            return self.fitted(changes)

        return self.land(tenant, make, approve)

    def search(
        self,
        tenant: str,
        question: str,
        *,
        kinds: Collection[Kind] = (),
        limit: int = 10,
        rankings: Collection[str] = RANKINGS,
    ) -> list[Candidate]:
        """Return the entries that a question finds, the best first."""
        question = clean(question[: self.settings.query_chars_max])
        store, most = self.store, self.settings.candidates
        found: dict[str, list[EntryRef]] = {}
        if "words" in rankings:
            words = words_of(question)
            refs = [ref for ref, _ in store.by_words(tenant, words, kinds, most)]
            texts = store.versions(tenant, refs)
            found["words"] = [ref for ref in refs if ref in texts and tells(words, texts[ref])]
        if "meaning" in rankings and self._embedder is not None:
            self._catch_up(tenant)
            (vector,) = self._embedder.embed([question])
            near = store.by_meaning(tenant, vector, kinds, most)
            found["meaning"] = [ref for ref, cosine in near if cosine >= self.settings.meaning_min]
        if "names" in rankings:
            found["names"] = [ref for ref, _ in store.by_names(tenant, names_in(question), kinds, most)]
        fused = fuse(found)[: max(most, limit)]
        versions = store.versions(tenant, [ref for ref, _, _ in fused])
        # An entry that was changed or erased in between is not there.
        hits = [Candidate(versions[ref], score, ranks) for ref, score, ranks in fused if ref in versions]
        return rerank(question, hits)[:limit]

    def _catch_up(self, tenant: str) -> None:
        """Make the vectors of entries that were written without this embedder."""
        assert self._embedder is not None
        missing = self.store.without_vector(tenant, EMBEDDED_AT_ONCE)
        if missing:
            vectors = self._embedder.embed([one.content.words for one in missing])
            self.store.put_vectors(
                tenant, [(one.ref, made) for one, made in zip(missing, vectors, strict=True)]
            )

    def excerpt(
        self, tenant: str, question: str, kinds: Collection[Kind] = (), budget_tokens: int | None = None
    ) -> list[Candidate]:
        """Return what a first question of a conversation would get as context, the best first."""
        candidates = self.search(tenant, question, kinds=kinds, limit=self.settings.candidates)
        budget = Budget(budget_tokens or self.settings.budget_tokens, self.settings.entries_per_turn)
        return select(candidates, self._tokens_of(candidates), budget)

    async def place(self, turn: AskedTurn) -> tuple[AskedTurn, PlacedContext | None]:
        """Return the turn with its context, and what that is; as it came if it wants none."""
        wish, tenant = turn.request.knowledge, turn.tenant
        if wish is None:
            if tenant not in self.settings.always_of:
                return turn, None
            wish = KnowledgeWish()
        work = partial(self._place, turn.placed, tenant, turn.session, wish, _kinds_of(wish))
        try:
            placed, context = await self.run(tenant, work)
        except Unavailable:
            if turn.request.knowledge is not None:
                raise
            return turn, None  # it did not ask; `_told` has logged it
        return replace(turn, placed=placed), context

    async def erase(self, tenant: str, entries: Sequence[str] | None, before_s: float | None = None) -> int:
        """Erase entries with their history, or all of a tenant (None); return how many there were.

        `before_s`: Unix time; of all, what was written since then stays.
        """

        def work() -> int:
            if entries is not None:
                return self.store.erase_all(tenant, entries)
            return self.store.erase_before(tenant, math.inf if before_s is None else before_s)

        return await self.run(tenant, work, is_long=True, must_run=True)

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget what the turns of these sessions got, or of all (None)."""
        await self.run(tenant, partial(self.store.forget_sessions, tenant, sessions), must_run=True)

    async def answered(self, turn: AskedTurn, context: PlacedContext | None, answer: AnsweredTurn) -> None:
        """Keep a turn with its answer, as the client gets it. Where that fails, its receipt has no id."""
        if context is None or answer.is_replayed:
            return
        said = answer.sent or ChatMessage("assistant", answer.choice.reply.content)
        try:
            work = partial(self._answered, context.asked, said, answer.is_deleted)
            context.turn_id = await self.run(context.asked.tenant, work)
        except ApiError as error:  # the answer is the client's all the same
            logger.warning("a turn is not kept, so that there is no feedback on it: %s", error)

    def _answered(
        self, asked: KnowledgeTurn, said: ChatMessage, is_deleted: Callable[[], bool]
    ) -> str | None:
        # Before the write, which others wait for: the texts of tools are looked at.
        record = self._memory.record(asked, said) if self._memory is not None and asked.is_kept else None
        try:
            with self.store.transaction():
                if self._memory is not None and record is not None:
                    self._memory.keep(asked.tenant, record)
                if asked.key is not None:
                    key = chained(asked.key, said)
                    self.store.note_turn(asked.tenant, asked.session, key, asked.placed)
                if is_deleted():  # asked behind the writes: a deletion from now on waits for them
                    raise _Deleted
        except _Deleted:
            return None
        return None if record is None else record.id

    async def measured(self, context: PlacedContext, rendered: str | None) -> None:
        """Count the tokens of a context in its prompt."""
        await self.run(context.asked.tenant, partial(context.measure, rendered))

    def _place(
        self, request: ParsedChat, tenant: str, session: bytes, wish: KnowledgeWish, kinds: Sequence[Kind]
    ) -> tuple[ParsedChat, PlacedContext | None]:
        messages, settings = request.messages, self.settings
        keys = turn_keys(messages)
        if not keys:
            return request, None
        turns = self._recorded(tenant, session, keys)
        last = max(keys)
        is_asked = asks_now(messages)
        # What another conversation that began alike got for its question, or this one the time before.
        before = turns.pop(last, None) if is_asked else None
        turns, dropped = self._fitting(request, tenant, turns)
        now = last if wish.retrieve and is_asked else None
        scores: dict[EntryRef, float] = {}
        budget_tokens = 0
        if now is not None:
            placed = _refs_of(turns)
            known = self.store.versions(tenant, placed)
            asked = settings.budget_tokens if wish.budget_tokens is None else wish.budget_tokens
            spent = sum(self._tokens(version) for version in known.values())
            budget_tokens = max(
                0, min(asked, settings.budget_tokens_max, settings.session_tokens_max - spent)
            )
            candidates: list[Candidate] = []
            if budget_tokens:
                question = messages[now].content if wish.query is None else wish.query
                candidates = self.search(tenant, question, kinds=kinds, limit=settings.candidates)
                scores = {one.ref: one.score for one in candidates}
            if any(ref not in placed for ref in scores):
                kept, _ = place(messages, turns, known, self._text.marks)
                budget_tokens = max(0, min(budget_tokens, self._room(request, tenant, kept)))
            is_first = is_first_turn(messages)
            chosen = select(
                candidates,
                self._tokens_of(candidates),
                Budget(budget_tokens, wish.entries or settings.entries_per_turn),
                placed=placed,
                in_use=self.store.recent_fronts(tenant, RECENT_FRONTS) if is_first else (),
                tie_share=settings.tie_share,
            )
            got = PlacedTurn(
                tuple(one.ref for one in chosen if is_first and one.is_stable),
                tuple(one.ref for one in chosen if not (is_first and one.is_stable)),
            )
            if got != (before or PlacedTurn()):
                self.store.note_turn(tenant, session, keys[now].asked, got)
            turns[now] = got
        refs = _refs_of(turns)
        known = self.store.versions(tenant, refs)
        made, fences = place(messages, turns, known, self._text.marks)
        numbers = {index: number for number, index in enumerate(sorted(keys), 1)}
        turn = KnowledgeTurn(
            tenant,
            session,
            messages[last].content,
            tuple(known),
            tuple(one for one in messages[last:] if one.role == "tool"),
            keys[last].asked if is_asked else None,
            turns.get(last, PlacedTurn()),
            wish.remember,
        )
        context = PlacedContext(
            fences, known, scores, numbers, now, budget_tokens, self.has_meaning, self._text, turn, dropped
        )
        entries = tuple(sorted({ref.entry for ref in known}))
        return replace(request, messages=made, entries=entries), context

    def _recorded(self, tenant: str, session: bytes, keys: Mapping[int, TurnKey]) -> dict[int, PlacedTurn]:
        """Return what the turns got: those that were answered so, before those that were only asked so."""
        wanted = [key for one in keys.values() for key in (one.answered, one.asked) if key is not None]
        found = self.store.turns(tenant, session, wanted)
        turns = {}
        for index, key in keys.items():
            got = found.get(key.answered or b"", found.get(key.asked))
            if got is not None:
                turns[index] = got
        return turns

    def _fitting(
        self, request: ParsedChat, tenant: str, turns: dict[int, PlacedTurn]
    ) -> tuple[dict[int, PlacedTurn], int]:
        """Return what earlier turns got; nothing of it if the window has no room for all, and how many left.

        All at once: to drop a little in each turn would compute the rest of the prompt in each.
        """
        known = self.store.versions(tenant, _refs_of(turns))
        if not known:
            return turns, 0
        kept, _ = place(request.messages, turns, known, self._text.marks)
        return (turns, 0) if self._room(request, tenant, kept) >= 0 else ({}, len(known))

    def _room(self, request: ParsedChat, tenant: str, messages: Sequence[Any]) -> int:
        """Return how many tokens the context window has left beside the conversation and its answer."""
        if self._makes_room(request, tenant):
            return self._text.context_tokens_max
        sampling = request.sampling
        answer = 1 if request.is_length_default else max(1, sampling.max_tokens)
        own = self._text.chat_tokens(replace(request, messages=tuple(messages)))
        return self._text.context_tokens_max - own - answer

    def _tokens_of(self, candidates: Sequence[Candidate]) -> dict[EntryRef, int]:
        return {one.ref: self._tokens(one.version) for one in candidates}

    def _tokens(self, version: EntryVersion) -> int:
        """Return the tokens of an entry in a fence of its own."""
        with self._lock:
            known = self._counted.get(version.ref)
        if known is not None:
            return known
        count = self._text.tokens(fenced([version], self._text.marks))
        with self._lock:
            self._counted[version.ref] = count
            if len(self._counted) > COUNTED_MAX:
                self._counted.popitem(last=False)
        return count


class QuestionTime:
    """How long the questions of each tenant may still take, all its requests together. Thread-safe.

    A tenant has twice `most_s`, as a change asks its questions twice, and gets half a second back each
    second: so its questions take half of a thread, however many requests it sends.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._full_s = 2 * most_s
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # tenant -> seconds, and when that was
        self._lock = Lock()

    def spend(self, tenant: str, seconds: float) -> float:
        """Take from a tenant's time; return how long it is until it has some, 0 if it has."""
        with self._lock:
            now_s = self._clock()
            left_s, at_s = self._left.get(tenant, (self._full_s, now_s))
            left_s = min(left_s + QUESTIONS_SHARE * (now_s - at_s), self._full_s) - seconds
            self._left[tenant] = left_s, now_s
        return max(0.0, -left_s / QUESTIONS_SHARE)


class _Deleted(Exception):
    """The session of a turn was deleted before the turn was kept: nothing of it is."""


def _refs_of(turns: Mapping[int, PlacedTurn]) -> set[EntryRef]:
    return {ref for turn in turns.values() for ref in (*turn.front, *turn.beside)}


def _repeated(before: EntryVersion, provenance: Provenance) -> Change:
    operation: Operation = "retire" if before.operation == "retire" else "revert"
    return Change(before.content, provenance, before.ref.entry, operation, of_number=before.ref.number)


def _is_same(one: EntryVersion, other: EntryVersion) -> bool:
    return one.content == other.content and (one.operation == "retire") == (other.operation == "retire")


def _kinds_of(wish: KnowledgeWish) -> list[Kind]:
    """Return the kinds that a request names. Raises `InvalidValue` for one that there is not."""
    found: list[Kind] = []
    for index, name in enumerate(wish.kinds):
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind is None:
            param = f"knowledge.kinds[{index}]"
            raise InvalidValue(param, f"{param}={shown(name)} is none of {', '.join(KINDS)}.")
        found.append(kind)
    return found
