"""The answers that vLLM computes, and the events that are made of them."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from samovar.cache_tiers.blocks import sources
from samovar.cache_tiers.forecast import Stop
from samovar.cache_tiers.pricing import PrefillMeter, PrefillPrice, pairs_of
from samovar.cache_tiers.vllm.replica_turn import PromptTold
from samovar.replicas.answers import OpenAnswers, OutputProcessor
from samovar.replicas.grammar import GrammarState
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    FinishReason,
    GenerateRequest,
    Grammar,
    Receipt,
    ReplicaInfo,
    Sampled,
    SamplingParams,
)
from samovar.replicas.vllm.source import TokenPiece, is_replayed

NOT_KEPT = "not in the pool"
NOTHING, DEARER = "nothing there", "cheaper to compute"
"""As the connector says it."""


@dataclass(slots=True)
class VllmChoice:
    """One answer so far. `replay`: tokens that were told by another replica, and are to come again."""

    request_id: str
    tokens: array[int]
    prompt_tokens: int
    sampling: SamplingParams
    index: int
    grammar: GrammarState | None = None
    replay: list[int] = field(default_factory=list)
    is_over: bool = False

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Job(OpenAnswers):
    """A request that is not over. `is_alone`: nothing else has been computed since it was begun.

    `told`: what the tiers gave. `stop`: how it ended, or would end now.
    """

    key: int
    since_s: float
    choices: list[VllmChoice]
    begun_s: float | None = None
    is_alone: bool = True
    is_admitted: bool = False
    told: PromptTold | None = None
    task: asyncio.Task[None] | None = None
    stop: Stop = "gone"

    @property
    def forks(self) -> int:
        return self.request.n

    @property
    def owner(self) -> bytes:
        return self.request.tenant + self.request.session

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def is_over(self) -> bool:
        """Whether all its answers are."""
        return all(choice.is_over for choice in self.choices)

    def yields_to(self, priority: int) -> bool:
        """Whether it gives way to its tenant's requests of this priority."""
        return priority < self.request.priority


def job_of(
    key: int, request: GenerateRequest, since_s: float, open_grammar: Callable[[Grammar], GrammarState]
) -> Job:
    """Return a request's job. Raises `GrammarRefused`."""
    resume, params = request.resume, request.sampling
    replay = list(resume.token_ids) if resume is not None and is_replayed(params) else []
    choices = [
        VllmChoice(
            request.request_id,
            array("I", request.prompt_token_ids),
            len(request.prompt_token_ids),
            params,
            index + (0 if resume is None else resume.choice),
            None if params.grammar is None else open_grammar(params.grammar),
            list(replay),
        )
        for index in range(request.n)
    ]
    return Job(request=request, key=key, since_s=since_s, choices=choices)


class Telling:
    """Makes events of what vLLM has computed, and counts. `step_tokens`: of a prompt in one step."""

    def __init__(
        self,
        info: ReplicaInfo,
        output: OutputProcessor,
        meter: PrefillMeter,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.output = output
        self.meter = meter
        self.clock = clock
        self._step_tokens = step_tokens
        self.totals: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.by_source: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def events(self, job: Job, pieces: list[TokenPiece]) -> list[tuple[int, Event]]:
        """Return the events of what vLLM has computed of a request. Raises `GrammarRefused`."""
        events: list[tuple[int, Event]] = []
        if not job.is_admitted and pieces:
            job.is_admitted = True
            events.append((job.key, self._admitted(job, pieces[0])))
        for piece in pieces:
            choice = job.choices[piece.index]
            if not choice.is_over and (delta := self._delta(job, choice, piece)) is not None:
                events.append((job.key, delta))
        return events

    def _delta(self, job: Job, choice: VllmChoice, piece: TokenPiece) -> Delta | Failed | None:
        """Return the new text of a choice; None: nothing to tell."""
        text, new = "", list[Sampled]()
        reason: FinishReason | None = None
        for sampled in piece.sampled:
            if choice.replay:
                if choice.replay.pop(0) != sampled.token_id:
                    choice.is_over = True
                    return Failed("the answer cannot be continued: vLLM has computed another one here")
                continue
            told = self.output.append(job, choice, sampled.token_id)
            text, reason = text + told.text, told.reason
            new.append(sampled)
            if reason is not None:
                break
        self.totals["generated_tokens"] += len(new)
        if reason is None and piece.ended:
            reason = "length" if piece.ended == "length" else "stop"
            text += job.texts[choice.index].flush() if choice.index in job.texts else ""
        if reason is not None:
            choice.is_over = True
            self.finished[reason] += 1
        if not new and reason is None:
            return None
        scored = [sampled for sampled in new if sampled.logprob is not None]
        logprobs = tuple(one for sampled in scored for one in self.output.text.logprobs(sampled))
        return Delta(choice.index, text, tuple(sampled.token_id for sampled in new), logprobs, reason)

    def _admitted(self, job: Job, piece: TokenPiece) -> Admitted:
        """Return where the KV of a computed prompt came from."""
        ids, now_s = job.request.prompt_token_ids, self.clock()
        begun_s = now_s if job.begun_s is None else job.begun_s
        receipt = receipt_of(job, piece.cached_tokens, self.info, self.meter.price)
        computed, resident = receipt.tokens["compute"], receipt.tokens["gpu"]
        self.by_source.update(receipt.tokens)
        self.missed.update(receipt.missed)
        cached = len(ids) - computed
        self.totals["cached_tokens"] += cached
        if job.is_alone and not receipt.load_bytes and job.forks == 1 and job.request.resume is None:
            steps = -(-computed // self._step_tokens)
            self.meter.observe_steps(steps, computed, pairs_of(computed, resident), now_s - begun_s)
        text = self.output.text
        scores = [one for sampled in piece.prompt_scores for one in text.logprobs(sampled)]
        told = () if not scores else (text.unscored(ids[0]), *scores)
        return Admitted(self.info.replica_id, cached, begun_s - job.since_s, receipt, told)


def receipt_of(job: Job, cached_tokens: int, info: ReplicaInfo, price: PrefillPrice) -> Receipt:
    """Return the receipt of a prompt of which vLLM counts `cached_tokens` as computed before.

    vLLM counts what was to be loaded, too, whether it came or not: the connector knows.
    """
    request, prompt = job.request, len(job.request.prompt_token_ids)
    told = job.told or PromptTold(job.key)
    loaded = dict(told.tokens_by_tier)
    loaded_tokens = sum(loaded.values())
    resident = min(prompt, max(0, cached_tokens - told.asked_tokens))
    tokens = {**dict.fromkeys(sources(), 0), "gpu": resident, **loaded}
    tokens["compute"] = max(0, prompt - resident - loaded_tokens)
    # The last block of an answer is often tokenized otherwise in the next prompt.
    left_blocks = min(request.route.cached_tokens, prompt - 1) // info.block_tokens - 1
    missed = max(0, left_blocks * info.block_tokens - resident - loaded_tokens)
    why = NOT_KEPT if missed and told.why in ("", NOTHING) else told.why
    why = why if missed or why != NOTHING else ""
    return Receipt(
        tokens=tokens,
        decision="load" if loaded else "recompute" if told.why == DEARER else "none",
        load_s=told.load_s,
        load_bytes=loaded_tokens * info.bytes_per_token,
        saved_s=price.added_seconds(loaded_tokens, resident) if loaded else 0.0,
        miss=why,
        missed={why: missed} if missed else {},
    )
