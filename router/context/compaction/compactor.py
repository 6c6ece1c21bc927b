"""Compaction of an ingress: fits requests, and prepares the next turns of conversations in idle moments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from samovar.configs.optional_sections import CompactionSettings
from samovar.router.context.compaction.compose import ASK, Summary, composed, fenced_summary, usable_summary
from samovar.router.context.compaction.errands import Errands
from samovar.router.context.compaction.fitter import SUMMARY_SHARE, Fitted, Fitter, Wish
from samovar.router.context.compaction.idle import IdleQueue, IdleWork, JobOutcome
from samovar.router.context.compaction.planner import NEVER, Cut, Talk, leading_system, next_cut
from samovar.router.context.knowledge import KnowledgeError
from samovar.router.generation import AnsweredTurn, AskedTurn, Context, PromptStage
from samovar.router.openai import ChatMessage, InvalidValue, ParsedChat, Unavailable
from samovar.router.prompt import PromptBuilder, chars_of

logger = logging.getLogger(__name__)

WORDS_OF_TOKENS = 0.6
"""Words that a summary is asked to have, for each token that it may have."""
CHARS_OF_TOKENS = 8
RETRY_AFTER_S = 1.0
SUMMARY_STEPS_MAX = 32
"""Summaries that one idle moment writes of one conversation, each over the one before."""


class Compactor(PromptStage):
    """Fits chat requests and prepares their next turns. Use it from one event loop; `close` it at the end.

    `count_cut`: called with the mode of each prompt that something was left out of; `count_job`: with the
    outcome of each piece of work in an idle moment.
    """

    name, keeps = "compaction", "summaries of conversations"

    def __init__(
        self,
        settings: CompactionSettings,
        fitter: Fitter,
        errands: Errands,
        prompts: PromptBuilder,
        count_cut: Callable[[str], None],
        count_job: Callable[[JobOutcome], None],
    ) -> None:
        self.settings = settings
        self.fitter = fitter
        self._errands = errands
        self._prompts = prompts
        self._count_cut = count_cut
        self.idle = IdleWork(
            IdleQueue(settings.jobs_max, settings.tries_max),
            idle_s=settings.idle_s,
            job_s_max=settings.job_s_max,
            is_idle=errands.is_idle,
            count=count_job,
        )

    def demand(self) -> AbstractContextManager[None]:
        """Give way to a request for as long as it is served."""
        return self.idle.demand()

    async def place(self, turn: AskedTurn) -> tuple[AskedTurn, Context | None]:
        """Return the turn as it fits the window, and what was done. Raises `ApiError`."""
        request = turn.request
        wish = self.fitter.wish(request, turn.tenant)
        if wish is None:
            return turn, None
        if request.truncate_tokens is not None:
            if request.compaction is None:
                return turn, None
            message = "compaction contradicts truncate_prompt_tokens: leave one of them out."
            raise InvalidValue("compaction", message)
        fitted = await self._fitted(turn, wish)
        if fitted.is_cut:
            self._count_cut(fitted.card()["mode"])
        return replace(turn, placed=fitted.request), fitted

    async def _fitted(self, asked: AskedTurn, wish: Wish) -> Fitted:
        owner = asked.tenant, asked.session
        work = partial(self.fitter.fit, owner, wish, asked.request, asked.placed)
        return await self._prompts.work(work, chars_of(asked.placed), asked.tenant)

    async def answered(self, turn: AskedTurn, context: Context | None, answer: AnsweredTurn) -> None:
        """Prepare the next turn of a conversation when no request is served."""
        wish = self.fitter.wish(turn.request, turn.tenant)
        if wish is None or turn.request.continues or turn.request.truncate_tokens is not None:
            return
        reply = answer.sent or ChatMessage("assistant", answer.choice.text)
        owner = turn.tenant, turn.session
        self.idle.offer(owner, partial(self._prepare, after(turn, reply), wish, answer.home))

    def card(self, tenant: str, session: bytes) -> dict[str, Any]:
        """Return where a session is cut; None: nowhere, or it is not remembered."""
        return {self.name: self.fitter.memory.told((tenant, session))}

    async def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget cuts and pieces, and erase summaries, of these sessions, or of all (None)."""
        self.idle.drop(tenant, sessions)
        self.fitter.memory.forget(tenant, sessions)
        try:  # never 429: it must not queue behind prompts
            await asyncio.to_thread(self.fitter.summaries.forget, tenant, sessions)
        except KnowledgeError as error:
            raise Unavailable(f"{error}.", RETRY_AFTER_S, code="compaction_unavailable") from None

    async def forget_entries(self, tenant: str, entries: Collection[str] | None) -> None:
        """Erase what was made of prompts that had these entries of knowledge, or any (None)."""
        self.idle.drop(tenant, None)  # what is to be summarised or computed may hold one
        try:
            await asyncio.to_thread(self.fitter.summaries.forget_entries, tenant, entries)
        except KnowledgeError as error:
            raise Unavailable(f"{error}.", RETRY_AFTER_S, code="compaction_unavailable") from None

    async def stop(self) -> None:
        """Stop work."""
        await self.idle.close()

    def close(self) -> None:
        """Close the summaries' file."""
        self.fitter.summaries.close()

    async def _prepare(self, asked: AskedTurn, wish: Wish, home: str) -> JobOutcome:
        """Compute what the next turn will begin with, if that is not what this one began with."""
        if self._prompts.forgets(asked.tenant) != asked.forgets:
            return "nothing"
        fitted = await self._fitted(asked, wish)
        begin = fitted.before.first
        if wish.mode == "summarise":
            size = fitted.conversation.size(fitted.cut, len(fitted.conversation), fitted.plan)
            is_due = size > fitted.plan.start_tokens or fitted.cut.first > fitted.summarised
        else:
            is_due = fitted.cut.first != begin
        if not is_due:
            return "nothing"
        if not await self._errands.is_likely(asked):
            return "unlikely"
        if wish.mode == "summarise":
            outcome = await self._summarise(asked, wish, fitted, home)
            if outcome != "done":
                return outcome
            fitted = await self._fitted(asked, wish)
        await self._index(asked, fitted)
        prompt = await self._errands.prompt(asked, fitted.request)
        if self._errands.price_s(home, len(prompt.token_ids)) > self.settings.price_s_max:
            return "too_dear"
        told = await self._errands.prefill(asked, prompt)
        self._note(asked, {"prepared_tokens": told.prompt_tokens})
        return "done"

    async def _index(self, asked: AskedTurn, fitted: Fitted) -> None:
        work = partial(self.fitter.make_ready, (asked.tenant, asked.session), fitted, asked.request)
        await self._prompts.work(work, chars_of(asked.request), asked.tenant)

    def _note(self, asked: AskedTurn, told: dict[str, Any]) -> None:
        memory, owner = self.fitter.memory, (asked.tenant, asked.session)
        memory.note(owner, memory.forgets(asked.tenant), told=told)

    async def _summarise(self, asked: AskedTurn, wish: Wish, fitted: Fitted, home: str) -> JobOutcome:
        """Write summaries, each over the one before, until one stands for all that is to be left out."""
        conversation = fitted.conversation
        plan = replace(fitted.plan, charge_tokens=0)
        begin = Cut(fitted.summarised, NEVER)
        target = max(next_cut(conversation, begin, len(conversation), plan).first, fitted.cut.first)
        summary = fitted.summary
        for _ in range(SUMMARY_STEPS_MAX):
            if summary is not None and summary.messages >= target:
                return "done"
            part = await self._prompts.work(
                partial(self._part, asked, fitted, summary, target), 1, asked.tenant
            )
            if part is None:
                return "failed"
            until, request, tokens_max = part
            if self._errands.price_s(home, fitted.window_tokens) > self.settings.price_s_max:
                return "too_dear"
            told = await self._errands.summary(asked, request, tokens_max)
            text = usable_summary(told.text, told.is_whole, CHARS_OF_TOKENS * tokens_max)
            if text is None or self._prompts.forgets(asked.tenant) != asked.forgets:
                return "failed"
            # A summary that it was written over may repeat what is in the prompt no more.
            entries = {*asked.placed.entries, *(() if summary is None else summary.entries)}
            summary = Summary(until, text, tuple(sorted(entries)))
            work = partial(self._keep, asked, fitted.links[until], summary)
            if not await self._prompts.work(work, 1, asked.tenant):
                return "failed"
            self._note(
                asked, {"summary_tokens": told.tokens, "summary_computed_tokens": told.computed_tokens}
            )
        return "nothing"

    def _keep(self, asked: AskedTurn, link: bytes, summary: Summary) -> bool:
        """Store a summary; nothing interrupts this, so it is erased again if it must not be.

        That is: if the session was deleted meanwhile, or an entry that it was made of. Who erases an entry
        looks for summaries afterwards. Returns whether it is kept.
        """
        self.fitter.summaries.put((asked.tenant, asked.session), link, summary)
        is_lasting = False
        try:
            is_lasting = self.fitter.is_lasting(asked.tenant, summary)
        finally:
            is_kept = is_lasting and self._prompts.forgets(asked.tenant) == asked.forgets
            if not is_kept:
                self.fitter.summaries.forget(asked.tenant, [asked.session])
        return is_kept

    def _part(
        self, asked: AskedTurn, fitted: Fitted, summary: Summary | None, target: int
    ) -> tuple[int, ParsedChat, int] | None:
        """Return what is summarised next: up to which message, the request, its tokens; None: nothing fits.

        The request is the conversation itself up to there, as its prompts begin, and then the wish for a
        summary: what there is of it in the cache is not computed again.
        """
        text, placed = self.fitter.text, asked.placed
        tokens_max = min(self.settings.summary_tokens_max, fitted.window_tokens // SUMMARY_SHARE)
        room = fitted.window_tokens - tokens_max
        head = leading_system(placed.messages)
        front = placed.messages[:head]
        first = 0 if summary is None else summary.messages
        lead = "" if summary is None else fenced_summary(summary, text.marks)
        ask = ChatMessage("user", ASK.format(words=int(WORDS_OF_TOKENS * tokens_max)))
        offer = placed.offer and replace(placed.offer, may_call=False, must_call=False, only=None)
        ends = [at for at in fitted.conversation.boundaries if first < at <= target]
        for until in reversed(ends):
            rest = fitted.conversation.messages[:until]
            cut = Talk(rest, [0] * len(rest), 0)
            if fitted.conversation.tokens(first, until) > room:
                continue
            messages = composed(front, cut, Cut(first, NEVER), summary=lead, summarised=first)
            request = replace(
                placed, messages=(*messages, ask), offer=offer, begins_turn=True, knowledge=None
            )
            if text.prompt(request) <= room:
                return until, request, tokens_max
        return None


def after(asked: AskedTurn, reply: ChatMessage) -> AskedTurn:
    """Return a turn with its answer, as the next one will repeat it."""

    def grown(request: ParsedChat) -> ParsedChat:
        return replace(request, messages=(*request.messages, reply), begins_turn=False)

    return replace(asked, request=grown(asked.request), placed=grown(asked.placed))
