"""`ServedEngine` over vLLM: whose turn it is, what vLLM is asked, and what a replica is asked."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from contextlib import aclosing
from functools import partial

from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.cache_tiers.vllm.replica_turn import FromConnector, PromptTold, ReplicaTurn, StoresTold, TurnTold
from samovar.replicas.answers import EngineLimits, refusal
from samovar.replicas.grammar import GrammarCompiler, GrammarRefused
from samovar.replicas.messages import (
    EngineStats,
    Failed,
    GenerateRequest,
    Grammar,
    Refused,
    ReplicaGlance,
)
from samovar.replicas.serving.served_engine import Deliver, ReplicaLoad
from samovar.replicas.turns import FairQueue
from samovar.replicas.vllm.answers import Job, Telling, job_of
from samovar.replicas.vllm.forgetting import PageSalts
from samovar.replicas.vllm.source import Ask, AskRefused, SourceLost, TokenSource, is_replayed, vllm_sampling
from samovar.replicas.vllm.turns import TurnReports

logger = logging.getLogger(__name__)

POLL_S = 0.02


class Asks:
    """Makes what vLLM is asked. `ends`: ids that end an answer. `has_tiers`: its connector hears of turns."""

    def __init__(
        self, ends: tuple[int, ...], grammars: GrammarCompiler, salts: PageSalts, *, has_tiers: bool
    ) -> None:
        self.grammars = grammars
        self.salts = salts
        self._ends = ends
        self._has_tiers = has_tiers
        self._numbers = itertools.count()

    def of(self, job: Job) -> Ask:
        """Return what to ask for a job. Raises `GrammarRefused`."""
        request, params = job.request, job.request.sampling
        first = job.choices[0]
        begun = first.tokens[first.prompt_tokens :]
        spent = 0 if is_replayed(params) else len(begun)
        turn = ReplicaTurn(
            job.key, request.tenant, request.session, request.salt, request.placement, request.route.peers
        )
        return Ask(
            f"{job.key}-{next(self._numbers)}",
            [*request.prompt_token_ids, *(begun if spent else ())],
            vllm_sampling(params, request.n, self._ends, spent=spent, choice=first.index),
            self.salts.salt(request.tenant, request.salt),
            turn.params() if self._has_tiers else {},
            "" if params.grammar is None else self.grammars.lark(params.grammar),
            request.adapter,
        )


class VllmEngine:
    """vLLM behind a replica, on the replica's event loop.

    At most `sequences_max` sequences are in vLLM; what waits, waits in `queue`, by tenants' turns.
    `connector`: where vLLM's connector tells what the tiers gave; None without tiers.
    """

    def __init__(
        self,
        source: TokenSource,
        telling: Telling,
        asks: Asks,
        turns: TurnReports,
        queue: FairQueue[bytes, Job],
        limits: EngineLimits,
        sequences_max: int,
        connector: FromConnector | None = None,
    ) -> None:
        self.info = telling.info
        self._source = source
        self._telling = telling
        self._asks = asks
        self._turns = turns
        self._queue = queue
        self._limits = limits
        self._sequences_max = sequences_max
        self._connector = connector
        self._clock = telling.clock
        self._jobs: dict[int, Job] = {}
        self._running = 0  # sequences that vLLM has
        self._saving = 0  # turns that are being stored
        self._is_hearing = False

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def answer(self, key: int, request: GenerateRequest) -> None:
        self._hear_always()
        refused = refusal(
            request,
            self._limits,
            self._queue.of(request.tenant),
            self._queue,
            free_places=max(0, self._sequences_max - self._running),
            sequences_max=self._sequences_max,
            pool_tokens=self.info.pool_tokens,
        )
        if refused is None:
            try:
                job = job_of(key, request, self._clock(), self._asks.grammars.open)
            except GrammarRefused as error:
                refused = error.event
            else:
                resume = request.resume
                if resume is not None and resume.token_ids:
                    refused = self._telling.output.resume(job, job.choices[0], resume.token_ids)
        if refused is not None:
            self._telling.totals["refused"] += 1
            self._deliver([(key, refused)])
            return
        self._jobs[key] = job
        self._telling.totals["prompt_tokens"] += len(request.prompt_token_ids)
        self._turns.returns.began(job.owner)
        self._queue.put(request.tenant, job, job.tokens, request.priority)
        self._begin_next()

    def _begin_next(self) -> None:
        """Give vLLM what it has room for."""
        while (job := self._queue.pick()) is not None and self._running + job.forks <= self._sequences_max:
            self._queue.take(job)
            for other in self._jobs.values():
                if other.begun_s is not None:
                    other.is_alone = job.is_alone = False
            self._running += job.forks
            job.begun_s = self._clock()
            job.task = asyncio.get_running_loop().create_task(self._run(job))
            # Not in `_run`: a task that is cancelled before its first step runs none of it.
            job.task.add_done_callback(partial(self._over, job))

    async def _run(self, job: Job) -> None:
        try:
            async with aclosing(self._source.generate(self._asks.of(job))) as steps:
                async for pieces in steps:
                    if not job.is_admitted:
                        self._hear()  # what was told before this was computed
                    self._deliver(self._telling.events(job, pieces))
                    if job.is_over:
                        break
            job.stop = "stop"
            if not job.is_over:
                self._deliver([(job.key, Failed("vLLM has ended this answer", replica_lost=True))])
        except GrammarRefused as error:
            self._deliver([(job.key, error.event)])
        except AskRefused as error:
            self._telling.totals["refused"] += 1
            self._deliver([(job.key, Refused("invalid", str(error)))])
        except SourceLost as error:
            self._deliver([(job.key, Failed(f"vLLM's engine has ended: {error}", replica_lost=True))])
        except Exception as error:
            logger.exception("request %s failed", job.request.request_id)
            self._deliver([(job.key, Failed(f"{type(error).__name__}: {error}"))])

    def _over(self, job: Job, task: asyncio.Task[None]) -> None:
        """Take an answer out that vLLM has no part of any more."""
        self._running -= job.forks
        self._jobs.pop(job.key, None)
        self._telling.totals["aborted"] += task.cancelled()
        self._turns.over(job, self._clock() - job.since_s)
        self._begin_next()

    def _hear(self) -> None:
        """Take in what the connector has told."""
        for told in () if self._connector is None else self._connector.heard():
            match told:
                case PromptTold(key=key):
                    if key in self._jobs and self._jobs[key].told is None:
                        self._jobs[key].told = told
                case TurnTold():
                    self._turns.marked(told)
                case StoresTold(saving=saving):
                    self._saving = saving

    def _hear_always(self) -> None:
        """Have what the connector tells taken in as it comes; from the first request on there is a loop."""
        if self._connector is not None and not self._is_hearing:
            asyncio.get_running_loop().add_reader(self._connector.fileno(), self._hear)
            self._is_hearing = True

    def abort(self, key: int) -> None:
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if job.task is not None:
            job.task.cancel()  # its end does the rest
        else:
            self._queue.remove(job)
            self._telling.totals["aborted"] += 1
            self._turns.over(job, self._clock() - job.since_s)

    def refusal_of(self, grammar: Grammar) -> Refused | None:
        try:
            self._asks.grammars.check(grammar)
        except GrammarRefused as refused:
            return refused.event
        return None

    async def stats(self) -> EngineStats:
        usable, used = self.info.pages - 1, round(self._source.pool_share * (self.info.pages - 1))
        price = self._telling.meter.price
        return EngineStats(
            self.info.replica_id,
            kv_dtype=self.info.kv_dtype,
            running=self._running,
            waiting=sum(job.forks for job in self._queue),
            pages_total=usable,
            pages_free=usable - used,
            pages_active=used,
            prompt_tokens=self._telling.totals["prompt_tokens"],
            cached_tokens=self._telling.totals["cached_tokens"],
            prefill_tokens=self._telling.by_source["compute"],
            generated_tokens=self._telling.totals["generated_tokens"],
            refused=self._telling.totals["refused"],
            aborted=self._telling.totals["aborted"],
            finished=dict(self._telling.finished),
            tokens_by_source=dict(self._telling.by_source),
            missed_tokens=dict(self._telling.missed),
            loading=self._saving,
            prefill_price=(price.c0_s, price.a_s, price.b_s),
        )

    async def load(self, horizon_s: float) -> ReplicaLoad:
        waiting, price = list(self._queue), self._telling.meter.price
        prompts = [job for job in self._jobs.values() if not job.is_admitted]
        pool, (sessions, tokens) = self.info.pool_tokens, self._turns.returns.within(horizon_s)
        return ReplicaLoad(
            running=self._running,
            waiting=sum(job.forks for job in waiting),
            sequences_max=self._sequences_max,
            prompts=len(prompts),
            prefill_s=sum(price.seconds(len(job.request.prompt_token_ids), 0) for job in prompts),
            pool_share=self._source.pool_share,
            pool_share_waiting=sum(len(job.request.prompt_token_ids) for job in waiting) / pool,
            returns=sessions,
            returns_pool_share=min(tokens / pool, sessions),
        )

    async def prices(self) -> PrefillPrice:
        return self._telling.meter.price

    async def glance(self, owners: tuple[bytes, ...]) -> ReplicaGlance:
        """Return the counters. vLLM does not say whose blocks it has."""
        return ReplicaGlance(await self.stats(), None)

    async def pool_bytes(self, owner: bytes) -> None:
        """Return None: see `glance`."""

    async def cool(self, owner: bytes) -> int:
        """Do nothing: vLLM evicts what was used least recently, and there is no other way to say it."""
        return 0

    async def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        self._turns.returns.hint(owner, event, expected_return_s)

    async def forget(self, tags: Collection[bytes]) -> int:
        """Make the pages of these tenants, and of these sessions' tenants, unreachable (see `PageSalts`).

        Returns 0: no page is free before it is overwritten.
        """
        self._asks.salts.forget(tags)
        for tag in tags:
            self._turns.returns.forget(tag)
        return 0

    async def settle(self, timeout_s: float) -> bool:
        deadline_s = self._clock() + timeout_s
        while True:
            self._hear()
            if not self._jobs and not self._saving:
                return True
            if self._clock() >= deadline_s:
                return False
            await asyncio.sleep(POLL_S)

    async def hand_over(self, timeout_s: float) -> bool:
        """Wait for the last stores: what a turn has computed is stored at its end, so no page is alone."""
        return await self.settle(timeout_s)

    async def check_integrity(self) -> None:
        self._queue.check_integrity()
        in_vllm = sum(job.forks for job in self._jobs.values() if job.task is not None)
        # Of an answer that was aborted vLLM may still have a part.
        assert in_vllm <= self._running <= self._sequences_max, "sequences in vLLM are miscounted"
        assert {job.key for job in self._queue} <= self._jobs.keys(), "what waits is not open"

    def check_health(self) -> None:
        self._source.check()

    async def close(self) -> None:
        for key in list(self._jobs):
            self._deliver([(key, Failed("this replica ends", replica_lost=True))])
            self.abort(key)
        self._turns.close()
        if self._connector is not None:
            if self._is_hearing:
                asyncio.get_running_loop().remove_reader(self._connector.fileno())
            self._connector.close()
        await asyncio.to_thread(self._source.close)
