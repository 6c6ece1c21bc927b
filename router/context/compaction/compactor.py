"""Compaction of an ingress: fits requests, and prepares the next turns of conversations in idle moments.

Work for idle moments begins when no request is served, and is stopped as soon as one comes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from samovar.cache_tiers.blocks import tenant_tag
from samovar.configs.optional_sections import CompactionSettings
from samovar.configs.settings import Settings
from samovar.replicas.turns import FairQueue
from samovar.router.context.compaction.compose import ASK, Summary, composed, fenced_summary, usable_summary
from samovar.router.context.compaction.errands import Errands, Served
from samovar.router.context.compaction.fitter import SUMMARY_SHARE, Fitted, Fitter, Wish
from samovar.router.context.compaction.memory import CutMemory, Owner
from samovar.router.context.compaction.planner import NEVER, Cut, Talk, leading_system, next_cut
from samovar.router.context.compaction.summaries import FILE_NAME, SummarySeal, SummaryStore
from samovar.router.context.compaction.tokens import MessageTokens
from samovar.router.context.knowledge import KnowledgeError, open_embedder
from samovar.router.generation import AnsweredTurn, AskedTurn, Context, PromptStage
from samovar.router.metrics import Metrics
from samovar.router.openai import ChatMessage, InvalidValue, ParsedChat, Unavailable
from samovar.router.prompt import PromptBuilder, chars_of
from samovar.router.routing import ReplicaClient, SessionDirectory

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Sealing

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
        if self._errands.is_forgotten(asked):
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
        memory.note(owner, memory.forgets, told=told)

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
            if text is None or self._errands.is_forgotten(asked):
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
        """Store a summary; return whether it is kept.

        Not if the session was deleted meanwhile, or an entry that it was made of: a deletion waits for this
        write, or was before it.
        """

        def may_stay() -> bool:
            is_lasting = self.fitter.is_lasting(asked.tenant, summary)
            return is_lasting and not self._errands.is_forgotten(asked)

        return self.fitter.summaries.put((asked.tenant, asked.session), link, summary, may_stay)

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


TURN_S = 1.0
"""What a turn of a tenant is worth."""

JobOutcome = Literal["done", "nothing", "unlikely", "too_dear", "cancelled", "failed", "dropped"]
Work = Callable[[], Awaitable[JobOutcome]]


@dataclass(slots=True)
class _IdleJob:
    work: Work
    tries: int = 0


class IdleQueue:
    """Which work is next: tenants take turns, by the seconds that their work takes. Pure.

    Of a tenant one job a session, the session that ended last comes last. A job that was stopped goes behind
    the tenant's others, and is given up after `tries_max` attempts. Where there are too many, the oldest of
    the tenant that has the most goes.
    """

    def __init__(self, jobs_max: int, tries_max: int) -> None:
        self._jobs_max = jobs_max
        self._tries_max = tries_max
        self._jobs: dict[Owner, _IdleJob] = {}
        self._turns: FairQueue[str, Owner] = FairQueue(TURN_S)

    def __len__(self) -> int:
        return len(self._jobs)

    def offer(self, owner: Owner, work: Work) -> int:
        """Add the work of a session, in place of what it has; return how many were dropped for it."""
        self._put(owner, _IdleJob(work))
        dropped = 0
        while len(self._jobs) > self._jobs_max:
            (most, _), *_ = Counter(tenant for tenant, _ in self._jobs).most_common(1)
            self._remove(next(self._turns.of(most)))
            dropped += 1
        return dropped

    def take(self) -> tuple[Owner, _IdleJob]:
        """Return the next work, and count the attempt."""
        owner = self._turns.pick()
        assert owner is not None, "nothing is left to do"
        self._turns.take(owner)
        job = self._jobs.pop(owner)
        job.tries += 1
        return owner, job

    def spent(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for what its work took."""
        self._turns.charge(tenant, seconds)

    def stopped(self, owner: Owner, job: _IdleJob) -> bool:
        """Put work back that was stopped, unless its session has newer; return whether it is tried again."""
        if owner in self._jobs or job.tries >= self._tries_max:
            return False
        self._put(owner, job)
        return True

    def drop(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Drop the work of these sessions of a tenant, or of all (None)."""
        for owner in [one for one in self._jobs if one[0] == tenant]:
            if sessions is None or owner[1] in sessions:
                self._remove(owner)

    def _put(self, owner: Owner, job: _IdleJob) -> None:
        if owner in self._jobs:
            self._remove(owner)
        self._jobs[owner] = job
        self._turns.put(owner[0], owner, 0.0)

    def _remove(self, owner: Owner) -> None:
        del self._jobs[owner]
        self._turns.remove(owner)


class IdleWork:
    """Runs the queue on one event loop, one job at a time.

    `is_idle`: asked before each job, once nothing was in flight here for `idle_s`. `job_s_max`: a job that
    takes longer is stopped for good. `count`: called with every outcome.
    """

    def __init__(
        self,
        queue: IdleQueue,
        *,
        idle_s: float,
        job_s_max: float,
        is_idle: Callable[[], Awaitable[bool]],
        count: Callable[[JobOutcome], None],
    ) -> None:
        self.queue = queue
        self.outcomes: Counter[JobOutcome] = Counter()
        self._idle_s = idle_s
        self._job_s_max = job_s_max
        self._is_idle = is_idle
        self._count = count
        self._open = 0
        self._came = 0  # requests so far
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._runner: asyncio.Task[None] | None = None
        self._running: tuple[Owner, asyncio.Task[JobOutcome]] | None = None
        self._is_closed = False

    @contextmanager
    def demand(self) -> Iterator[None]:
        """Let no job run while a request is served."""
        self._open += 1
        self._came += 1
        self._quiet.clear()
        self._stop()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._quiet.set()

    def offer(self, owner: Owner, work: Work) -> None:
        """Have something done for a session in an idle moment."""
        if self._is_closed:
            return
        for _ in range(self.queue.offer(owner, work)):
            self._over("dropped")
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    def drop(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Drop the work of these sessions of a tenant, or of all (None), also what runs."""
        self.queue.drop(tenant, sessions)
        if self._running is not None:
            owner = self._running[0]
            if owner[0] == tenant and (sessions is None or owner[1] in sessions):
                self._stop()

    async def close(self) -> None:
        """Stop everything."""
        self._is_closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None

    def _stop(self) -> None:
        if self._running is not None:
            self._running[1].cancel()

    async def _run(self) -> None:
        while self.queue:
            await self._rest()
            if not self.queue or not self._quiet.is_set():
                continue
            if not await self._is_idle():
                await asyncio.sleep(self._idle_s)
                continue
            if not self.queue or not self._quiet.is_set():
                continue
            owner, job = self.queue.take()
            began_s = time.monotonic()
            outcome = await self._one(owner, job)
            self.queue.spent(owner[0], time.monotonic() - began_s)
            if outcome == "cancelled" and self.queue.stopped(owner, job):
                continue
            self._over(outcome)

    async def _rest(self) -> None:
        """Return once nothing was in flight for `idle_s`."""
        while True:
            await self._quiet.wait()
            came = self._came
            await asyncio.sleep(self._idle_s)
            if self._quiet.is_set() and came == self._came:
                return

    async def _one(self, owner: Owner, job: _IdleJob) -> JobOutcome:
        async def limited() -> JobOutcome:
            async with asyncio.timeout(self._job_s_max):
                return await job.work()

        task = asyncio.create_task(limited())
        self._running = (owner, task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                return "cancelled"
            error = task.exception()
            if error is not None:
                logger.warning("work for an idle moment failed: %s: %s", type(error).__name__, error)
                return "failed"
            return task.result()
        finally:
            self._running = None
            if not task.done():  # this loop is being stopped
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _over(self, outcome: JobOutcome) -> None:
        self.outcomes[outcome] += 1
        self._count(outcome)


def open_compaction(
    settings: Settings,
    *,
    prompts: PromptBuilder,
    client: ReplicaClient,
    directory: SessionDirectory,
    served: Served,
    sealing: Sealing | None,
    metrics: Metrics,
    window_tokens: Callable[[], int],
    has_entries: Callable[[str, Collection[str]], bool] = lambda tenant, entries: True,
) -> Compactor:
    """Open compaction. Raises `ExtraMissing`.

    A file of summaries that cannot be opened does not keep the ingress from starting: conversations are then
    cut without them. `window_tokens`: tells the longest prompt and answer that is served now.
    `has_entries`: whether none of a tenant's entries of knowledge was erased. `sealing`: what summaries are
    sealed with in their file; None: they are not.
    """
    own = settings.compaction
    folder = (own.dir or settings.model.cache_dir / "compaction").expanduser()
    summaries = SummaryStore(
        folder / FILE_NAME,
        of_session_max=own.summaries_per_session,
        rows_max=own.summaries_max,
        busy_s=own.busy_s,
        seal=None if sealing is None else _sealed_summaries(sealing, served.secret),
        cleared_unix_s=lambda owner: directory.table.cleared_unix_s(
            tenant_tag(served.secret, owner[0]), owner[1]
        ),
    )

    def count(prompt_tokens: int, written_tokens: int) -> None:
        metrics.compaction_tokens.labels("prompt").inc(prompt_tokens)
        metrics.compaction_tokens.labels("answer").inc(written_tokens)

    fitter = Fitter(
        own,
        MessageTokens(prompts),
        CutMemory(own.sessions_max, own.notes_max, own.memory_bytes_max),
        summaries,
        open_embedder(own.embedder),
        window_tokens,
        has_entries,
    )
    return Compactor(
        own,
        fitter,
        Errands(own, prompts, client, directory, served, count),
        prompts,
        lambda mode: metrics.compactions.labels(mode).inc(),
        lambda outcome: metrics.compaction_jobs.labels(outcome).inc(),
    )


def _sealed_summaries(sealing: Sealing, secret: bytes) -> SummarySeal:
    from samovar.router.context.sealed import SealedSummaries  # who has no key does not load it

    return SealedSummaries(sealing, partial(tenant_tag, secret))
