"""The knowledge base of an ingress: searches, writes, and the context of chat requests, over one store."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any, Protocol, TypeVar

from configs.optional_sections import KnowledgeSettings
from router.knowledge.embedder import Embedder
from router.knowledge.entries import (
    KINDS,
    Change,
    Content,
    EntryNotFound,
    EntryRef,
    EntryVersion,
    Kind,
    KnowledgeError,
    KnowledgeStore,
    Limits,
    Operation,
    PlacedTurn,
    Provenance,
    QuotaExceeded,
    VersionConflict,
    clean,
    names_in,
)
from router.knowledge.placement import Fence, asks_now, fenced, is_first_turn, place, spans, turn_keys
from router.knowledge.retrieval import Budget, Candidate, fuse, rerank, select, tells, words_of
from router.openai import (
    ApiError,
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


class PromptText(Protocol):
    """What is needed of the served model's tokenizer."""

    def tokens(self, text: str) -> int:
        """Return how many tokens a text has."""
        ...

    def chat_tokens(self, request: ParsedChat) -> int:
        """Return how many tokens a conversation's prompt has. Raises `ApiError`."""
        ...

    @property
    def marks(self) -> Collection[str]:
        """The special tokens, as text."""
        ...

    @property
    def context_tokens_max(self) -> int:
        """The longest prompt and answer."""
        ...


@dataclass(slots=True)
class PlacedContext:
    """What a prompt holds of the knowledge base, for the receipt. `measure` first, then `told`."""

    fences: Sequence[Fence]
    versions: Mapping[EntryRef, EntryVersion]
    scores: Mapping[EntryRef, float]
    turns: Mapping[int, int]  # index of a user message -> which turn that is, from 1
    now: int | None
    budget_tokens: int
    has_meaning: bool
    text: PromptText
    places: Sequence[tuple[int, int]] = ()  # of each fence: first token, tokens
    is_measured: bool = False

    def measure(self, rendered: str | None) -> None:
        """Count the tokens of each fence and of what is before it; None: the prompt was cut."""
        if rendered is None:
            self.places = [(0, self.text.tokens(fence.text)) for fence in self.fences]
            return
        ends = [0, *(at for span in spans(rendered, self.fences) for at in span)]
        pieces = [rendered[start:end] for start, end in pairwise(ends)]
        counts = list(accumulate(self.text.tokens(piece) for piece in pieces))
        self.places = [(counts[2 * i], counts[2 * i + 1] - counts[2 * i]) for i in range(len(self.fences))]
        self.is_measured = True

    def told(self, cached_tokens: int) -> dict[str, Any]:
        """Return the receipt's part: entries with score, version and place; how much was cached."""
        cached = sum(max(0, min(cached_tokens - first, count)) for first, count in self.places)
        return {
            "tokens": sum(count for _, count in self.places),
            "cached_tokens": cached if self.is_measured else None,
            "budget_tokens": self.budget_tokens,
            "meaning": self.has_meaning,
            "entries": [
                {
                    "id": ref.entry,
                    "version": ref.number,
                    "kind": self.versions[ref].content.kind,
                    "score": self.scores.get(ref),
                    "place": "front" if fence.is_front else "beside",
                    "turn": self.turns[fence.turn],
                    "is_new": fence.turn == self.now,
                }
                for fence in self.fences
                for ref in fence.refs
            ],
        }


class KnowledgeBase:
    """Entries, their search, and the context of chats. Its methods block: call them by `run`. Thread-safe.

    They raise `KnowledgeError`, and `ApiError` for what a client asks wrongly. `embedder`: None: entries are
    found by words and names only.
    """

    def __init__(
        self,
        store: KnowledgeStore,
        embedder: Embedder | None,
        text: PromptText,
        settings: KnowledgeSettings,
        retry_after_s: float = 1.0,
    ) -> None:
        self.store = store
        self.settings = settings
        self.limits = Limits(settings.entries_max, settings.bytes_max, settings.tags_max)
        self._embedder = embedder
        self._text = text
        self._retry_after_s = retry_after_s
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="knowledge")
        self._waiting = 0
        self._lock = Lock()
        self._counted: OrderedDict[EntryRef, int] = OrderedDict()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in one of the knowledge base's threads. Raises `TooManyRequests` if too many wait."""
        if self._waiting >= self.settings.waiting_max:
            message = (
                f"{self._waiting} calls wait for the knowledge base (knowledge.waiting_max). Try again later."
            )
            raise TooManyRequests(message, self._retry_after_s, code="queue_full")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except KnowledgeError as error:
            raise self._told(error) from None
        finally:
            self._waiting -= 1

    def _told(self, error: KnowledgeError) -> ApiError:
        """Return a refusal of the store as an error of the API."""
        message = f"{error}."
        if isinstance(error, EntryNotFound):
            return ApiError(404, message, param="id", code="entry_not_found")
        if isinstance(error, VersionConflict):
            return ApiError(409, message, param="base", code="version_conflict")
        if isinstance(error, QuotaExceeded):
            return InvalidValue("text", f"No room for it: {message}", code="quota_exceeded")
        logger.warning("the knowledge base fails: %s", error)
        return Unavailable(message, self._retry_after_s, code="knowledge_unavailable")

    @property
    def has_meaning(self) -> bool:
        """Whether entries are found by meaning."""
        return self._embedder is not None

    def close(self) -> None:
        """Stop the threads and close the store."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def write(
        self, tenant: str, changes: Sequence[Change], approve: Callable[[], None] | None = None
    ) -> list[EntryVersion]:
        """Append versions, all or none. `approve` sees them first, and what it raises undoes them."""
        vectors = self._vectors([change.content for change in changes if change.operation != "retire"])
        fitted = [
            change if change.operation == "retire" else replace(change, vector=next(vectors))
            for change in changes
        ]
        return self.store.write(tenant, fitted, self.limits, approve)

    def _vectors(self, contents: Sequence[Content]) -> Any:
        if self._embedder is None:
            return iter([None] * len(contents))
        return iter(self._embedder.embed([content.words for content in contents]))

    def revert(
        self,
        tenant: str,
        entry: str,
        number: int,
        provenance: Provenance,
        approve: Callable[[], None] | None = None,
    ) -> EntryVersion:
        """Append a version that repeats an earlier one."""
        before = self.store.version(tenant, EntryRef(entry, number))
        (made,) = self.write(tenant, [_repeated(before, provenance)], approve)
        return made

    def revert_to(
        self, tenant: str, tag: str, provenance: Provenance, approve: Callable[[], None] | None = None
    ) -> list[EntryVersion]:
        """Append versions to all entries that differ from the named state, so that they are as they were.

        What was created since is retired; what was erased since is gone.
        """
        tags = self.store.tags(tenant)
        if tag not in tags:
            raise EntryNotFound(f"there is no tag {shown(tag)}")
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
        return self.write(tenant, changes, approve) if changes else []

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

    async def place(
        self, request: ParsedChat, tenant: str, session: bytes
    ) -> tuple[ParsedChat, PlacedContext | None]:
        """Return the request with its context, and what that is; as it came if it wants none."""
        wish = request.knowledge
        if wish is None:
            if tenant not in self.settings.always_of:
                return request, None
            wish = KnowledgeWish()
        try:
            return await self.run(partial(self._place, request, tenant, session, wish, _kinds_of(wish)))
        except Unavailable:
            if request.knowledge is not None:
                raise
            return request, None  # it did not ask; `_told` has logged it

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget what the turns of these sessions got, or of all (None)."""
        await self.run(partial(self.store.forget_sessions, tenant, sessions))

    async def measure(self, context: PlacedContext, rendered: str | None) -> None:
        """Count the tokens of a context in its prompt."""
        await self.run(partial(context.measure, rendered))

    def _place(
        self, request: ParsedChat, tenant: str, session: bytes, wish: KnowledgeWish, kinds: Sequence[Kind]
    ) -> tuple[ParsedChat, PlacedContext | None]:
        messages, settings = request.messages, self.settings
        keys = turn_keys(messages)
        if not keys:
            return request, None
        recorded = self.store.turns(tenant, session, list(keys.values()))
        turns = {index: recorded[key] for index, key in keys.items() if key in recorded}
        now = max(keys) if wish.retrieve and asks_now(messages) else None
        scores: dict[EntryRef, float] = {}
        budget_tokens = 0
        if now is not None:
            before = turns.pop(now, None)
            placed = {ref for turn in turns.values() for ref in (*turn.front, *turn.beside)}
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
                budget_tokens = max(0, min(budget_tokens, self._room(request, kept)))
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
                self.store.note_turn(tenant, session, keys[now], got)
            turns[now] = got
        refs = {ref for turn in turns.values() for ref in (*turn.front, *turn.beside)}
        known = self.store.versions(tenant, refs)
        made, fences = place(messages, turns, known, self._text.marks)
        numbers = {index: number for number, index in enumerate(sorted(keys), 1)}
        context = PlacedContext(
            fences, known, scores, numbers, now, budget_tokens, self.has_meaning, self._text
        )
        return replace(request, messages=made), context

    def _room(self, request: ParsedChat, messages: Sequence[Any]) -> int:
        """Return how many tokens the context window has left beside the conversation and its answer."""
        if request.compaction is not None and request.compaction.mode != "off":
            return self._text.context_tokens_max  # old turns make room
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
