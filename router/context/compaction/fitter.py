"""Makes a conversation fit: where it is cut, what stands in place of old turns, and what comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from samovar.configs.optional_sections import CompactionMode, CompactionSettings
from samovar.router.context.compaction.compose import Summary, composed, fenced_summary
from samovar.router.context.compaction.memory import CutMemory, Owner, chain
from samovar.router.context.compaction.pieces import (
    BEGIN,
    END,
    FoundPiece,
    PieceIndex,
    fenced_pieces,
    piece_text,
    pieces_of,
)
from samovar.router.context.compaction.planner import WHOLE, Cut, Talk, WindowPlan, cut_of, leading_system
from samovar.router.context.compaction.summaries import SummaryStore
from samovar.router.context.compaction.tokens import MessageTokens
from samovar.router.context.knowledge import Budget, Embedder, KnowledgeError
from samovar.router.openai import ParsedChat

logger = logging.getLogger(__name__)

ANSWER_SHARE, SUMMARY_SHARE, BUDGET_SHARE = 4, 8, 16
"""Of the window, at most this part is kept for the answer, a summary, and what one question gets back."""
NEARLY = 0.9
"""A prompt that is expected to take this much of its limit is counted whole."""
COUNTS_MAX = 4
CHARS_MIN, CHARS_OF_TOKENS = 80, 2
"""A piece has at least, and at most, so many characters: for each token of the budget, so that some fit."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a request is to be compacted."""

    mode: CompactionMode
    budget_tokens: int


@dataclass(slots=True)
class Fitted:
    """A request as it fits the window; also the receipt's part about it."""

    request: ParsedChat
    wish: Wish
    conversation: Talk
    links: Sequence[bytes]
    plan: WindowPlan
    cut: Cut
    summary: Summary | None
    window_tokens: int
    prompt_tokens: int  # as expected
    before: Cut = WHOLE  # where the conversation was cut before its latest messages
    pieces: dict[int, tuple[FoundPiece, ...]] = field(default_factory=dict)  # by the question's index
    tokens: dict[int, int] = field(default_factory=dict)  # of these, fenced
    now: int | None = None  # the question that is asked now
    waits: bool = False  # for a summary
    forgets: int = 0  # of the memory, when it was made

    @property
    def is_cut(self) -> bool:
        """Whether anything is left out."""
        return self.cut.first > 0

    @property
    def summarised(self) -> int:
        """How many messages the summary stands for."""
        return 0 if self.summary is None else self.summary.messages

    def told(self, cached_tokens: int) -> dict[str, Any]:
        """Return the receipt's part: what was left out, and what came back for which question."""
        return {
            **self.card(),
            "budget_tokens": self.wish.budget_tokens,
            "waits_for_summary": self.waits,
            "pieces": [
                {
                    "turn": one.piece.turn,
                    "piece": one.piece.number,
                    "score": one.score,
                    "is_new": index == self.now,
                }
                for index, got in sorted(self.pieces.items())
                for one in got
            ],
            "pieces_tokens": sum(self.tokens.values()),
        }

    def card(self) -> dict[str, Any]:
        """Return where the conversation is cut."""
        left_out = self.conversation.left_out(self.cut.first)
        roles = [self.conversation.messages[index].role for index in left_out]
        is_summarised = bool(self.summarised) and self.cut.first == self.summarised
        return {
            "mode": "summarise" if is_summarised else "retrieve" if self.is_cut else self.wish.mode,
            "turns_cut": roles.count("user"),
            "messages_cut": len(left_out),
            "tokens_cut": self.conversation.left_out_tokens(self.cut.first),
            "summarised_messages": self.summarised,
            "prompt_tokens": self.prompt_tokens,
            "window_tokens": self.window_tokens,
            "next_cut_at_tokens": self.plan.due_tokens(
                self.conversation.expected_tokens(len(self.conversation))
            ),
        }


class Fitter:
    """Fits requests, one call on the calling thread each. It should be one of the tokenizer's. Thread-safe.

    `window_tokens`: tells the longest prompt and answer that is served now. `has_entries`: whether none of a
    tenant's entries was erased; it raises `KnowledgeError`.
    """

    def __init__(
        self,
        settings: CompactionSettings,
        text: MessageTokens,
        memory: CutMemory,
        summaries: SummaryStore,
        embedder: Embedder | None,
        window_tokens: Callable[[], int],
        has_entries: Callable[[str, Collection[str]], bool] = lambda tenant, entries: True,
    ) -> None:
        self.settings = settings
        self.text = text
        self.memory = memory
        self.summaries = summaries
        self._embedder = embedder
        self.window_tokens = window_tokens
        self._has_entries = has_entries

    def wish(self, request: ParsedChat, tenant: str) -> Wish | None:
        """Return how a request wants to be compacted; None: not at all."""
        own, asked = self.settings, request.compaction
        mode = own.mode_for(tenant, asked is not None, None if asked is None else asked.mode)
        if mode is None:
            return None
        window = self.window_tokens()
        budget = min(own.budget_tokens, window // BUDGET_SHARE)
        if asked is not None and asked.budget_tokens is not None:
            budget = min(asked.budget_tokens, own.budget_tokens_max, window // ANSWER_SHARE)
        return Wish(mode, max(1, budget))

    def plan(self, wish: Wish) -> tuple[WindowPlan, int]:
        """Return how long prompts may become, and the whole window."""
        own, window = self.settings, self.window_tokens()
        limit = max(1, window - min(own.answer_tokens, window // ANSWER_SHARE))
        return (
            WindowPlan(
                limit_tokens=limit,
                start_tokens=min(limit, int(window * own.start_fill)),
                target_tokens=int(window * own.target_fill),
                charge_tokens=wish.budget_tokens,
                recent_turns=own.recent_turns,
            ),
            window,
        )

    def fit(self, owner: Owner, wish: Wish, request: ParsedChat, placed: ParsedChat) -> Fitted:
        """Fit a request. Raises `ApiError` if it cannot be rendered."""
        forgets = self.memory.forgets
        raw = request.messages[leading_system(request.messages) :]
        # Documents may have made a system prompt where the client sent none.
        head = len(placed.messages) - len(raw)
        front = placed.messages[:head]
        links = chain(raw)
        plan, window = self.plan(wish)
        limit = plan.limit_tokens
        if not request.is_length_default and request.sampling.max_tokens:
            limit = max(window // ANSWER_SHARE, min(limit, window - request.sampling.max_tokens))
        summary = self.summary(owner, links) if wish.mode == "summarise" else None
        lead = fenced_summary(summary, self.text.marks) if summary else ""
        fixed = self.text.front(front, placed) + self.text.text(lead)
        rest = placed.messages[head:]
        conversation = Talk(rest, [self.text.message(one, placed) for one in rest], fixed)
        known = self.memory.cuts(owner, wish.mode, links)
        begin = WHOLE if summary is None else Cut(summary.messages)
        made = Fitted(placed, wish, conversation, links, plan, begin, summary, window, 0, forgets=forgets)
        at = max((count for count in known if count < len(raw)), default=0)
        made.before = known[at] if at and known[at].first > begin.first else begin
        aim = limit
        for _ in range(COUNTS_MAX):
            made.cut = cut_of(
                conversation,
                plan,
                begin=begin,
                known=known,
                is_early=wish.mode == "retrieve",
                limit_tokens=aim,
            )
            self._give_back(owner, made, raw, forgets)
            made.request = self._composed(made, front, lead)
            made.prompt_tokens = self._expected(made)
            if made.prompt_tokens > NEARLY * limit:
                made.prompt_tokens = self.text.prompt(made.request)
            over = made.prompt_tokens - limit
            if over <= 0 or made.cut.first >= max(conversation.boundaries, default=0):
                break
            # What stands around messages takes more in this template than was expected.
            aim, known = aim - over, {count: cut for count, cut in known.items() if count < len(raw)}
        made.waits = wish.mode == "summarise" and made.prompt_tokens > plan.start_tokens
        if made.is_cut or made.before.first:
            self.memory.note(owner, forgets, cut=(wish.mode, links[-1], made.cut), told=made.card())
        return made

    def make_ready(self, owner: Owner, made: Fitted, request: ParsedChat) -> None:
        """Index what a cut leaves out, so that no question waits for that. `request`: what was fitted."""
        if made.is_cut:
            raw = request.messages[leading_system(request.messages) :]
            self._indexed(owner, made, raw, made.forgets)

    def summary(self, owner: Owner, links: Sequence[bytes]) -> Summary | None:
        """Return the longest summary of a conversation; None also if the store fails: it is only a saving.

        One that was made of an entry which was erased since is erased: another ingress may not have known.
        """
        try:
            found = self.summaries.latest(owner, links)
            while found is not None and not self.is_lasting(owner[0], found):
                self.summaries.forget_entries(owner[0], found.entries)
                found = self.summaries.latest(owner, links)
            return found
        except KnowledgeError as error:
            logger.warning("summaries cannot be read: %s", error)
            return None

    def is_lasting(self, tenant: str, summary: Summary) -> bool:
        """Whether nothing that it was made of was erased. Raises `KnowledgeError`."""
        return not summary.entries or self._has_entries(tenant, summary.entries)

    def _expected(self, made: Fitted) -> int:
        """Return the tokens of a prompt, with what its questions really got."""
        charged = made.plan.charge_tokens * len(made.pieces)
        size = made.conversation.size(made.cut, len(made.conversation), made.plan)
        return size - charged + sum(made.tokens.values())

    def _composed(self, made: Fitted, front: Sequence[Any], lead: str) -> ParsedChat:
        if not made.is_cut:
            return made.request
        beside = {
            index: fenced_pieces([one.piece for one in got], self.text.marks)
            for index, got in made.pieces.items()
        }
        messages = composed(
            front, made.conversation, made.cut, summary=lead, summarised=made.summarised, beside=beside
        )
        return replace(made.request, messages=messages)

    def _give_back(self, owner: Owner, made: Fitted, raw: Sequence[Any], forgets: int) -> None:
        """Find what each question in the prompt gets of what is left out."""
        made.pieces, made.tokens = {}, {}
        questions = made.conversation.asked(made.cut, len(made.conversation))
        made.now = questions[-1] if questions and questions[-1] == len(raw) - 1 else None
        placed: set[int] = set()
        for index in questions:
            link = made.links[index + 1]
            got = self.memory.pieces(owner, link, made.cut)
            if got is None:
                got = self._found(owner, made, raw, index, placed, forgets)
                self.memory.note(owner, forgets, pieces=(link, made.cut, got))
            placed.update(one.piece.number for one in got)
            made.pieces[index] = got
            fence = fenced_pieces([one.piece for one in got], self.text.marks)
            made.tokens[index] = self.text.text(fence)

    def _found(
        self, owner: Owner, made: Fitted, raw: Sequence[Any], question: int, placed: set[int], forgets: int
    ) -> tuple[FoundPiece, ...]:
        own, index = self.settings, self._indexed(owner, made, raw, forgets)
        asked = raw[question].content[: own.query_chars_max]
        candidates = index.search(asked, own.candidates, own.meaning_min)
        tokens_of = {
            one.ref: self.text.text(piece_text(index.pieces[one.ref], self.text.marks)) for one in candidates
        }
        fence = self.text.text(f"{BEGIN}\n{END}\n")
        budget = Budget(made.wish.budget_tokens - fence, own.pieces_per_turn)
        return tuple(index.choose(candidates, tokens_of, budget, placed))

    def _indexed(self, owner: Owner, made: Fitted, raw: Sequence[Any], forgets: int) -> PieceIndex:
        """Return the index of what a cut leaves out; it is made once."""
        own = self.settings
        key = made.links[made.cut.first] + b"%d %d" % (made.summarised, made.wish.budget_tokens)
        index = self.memory.index(owner, key)
        if index is None:
            left_out = [one for one in made.conversation.left_out(made.cut.first) if one >= made.summarised]
            chars = min(own.piece_chars, max(CHARS_MIN, CHARS_OF_TOKENS * made.wish.budget_tokens))
            index = PieceIndex(pieces_of(raw, left_out, chars, own.pieces_max), self._embedder)
            self.memory.note(owner, forgets, index=(key, index))
        return index
