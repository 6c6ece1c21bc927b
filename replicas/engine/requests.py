"""Requests of one engine, from their arrival to their last token: what is refused, open, told and counted."""

from __future__ import annotations

import itertools
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from samovar.cache_tiers.blocks import TAG_BYTES, Clear, namespace_digest, session_owner, sources
from samovar.cache_tiers.forecast import Stop
from samovar.cache_tiers.messages import LookupResult
from samovar.cache_tiers.pricing import PrefillMeter, PrefillPrice, in_digits
from samovar.replicas.answers import EngineLimits, OpenAnswers, OutputProcessor, refusal
from samovar.replicas.grammar import GrammarRefused, GrammarState
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    FinishReason,
    GenerateRequest,
    Grammar,
    Receipt,
    Refused,
    Sampled,
    TokenLogprob,
)
from samovar.replicas.model import is_device_lost, is_memory_short
from samovar.replicas.offload import Offload
from samovar.replicas.sampling import NotNumbers, Sampler
from samovar.replicas.scheduling import OWN, Chunk, Fate, Restore, Scheduler, Sequence

logger = logging.getLogger(__name__)


def _score_from(request: GenerateRequest) -> int | None:
    """Return the first slot whose logits give a log-probability of the prompt that is asked for, if any."""
    params = request.sampling
    first = max(0, params.prompt_logprobs_from - 1)
    wanted = params.prompt_logprobs is not None and first < len(request.prompt_token_ids) - 1
    return first if wanted else None


class Intake:
    """Makes the sequences of requests, in the order of their arrival.

    `namespace`: what makes the model's KV interchangeable (G3, docs/guarantees.md); a salt is added to it.
    """

    def __init__(
        self,
        limits: EngineLimits,
        namespace: bytes,
        open_grammar: Callable[[Grammar | None], GrammarState | None],
        draw_seed: Callable[[], int],
    ) -> None:
        self.limits = limits
        self.namespace = namespace
        self._open_grammar = open_grammar
        self._draw_seed = draw_seed
        self._arrivals = itertools.count()

    def sequence(self, request: GenerateRequest) -> Sequence:
        """Return what is to be computed for a request. Raises `GrammarRefused`."""
        params = request.sampling
        return Sequence(
            request_id=request.request_id,
            arrival=next(self._arrivals),
            namespace=namespace_digest(self.namespace, request.salt),
            tokens=array("I", request.prompt_token_ids),
            prompt_tokens=len(request.prompt_token_ids),
            sampling=params,
            seed=self._draw_seed() if params.seed is None else params.seed,
            owner=request.tenant + request.session,
            index=0 if request.resume is None else request.resume.choice,
            forks=request.n,
            priority=request.priority,
            grammar=self._open_grammar(params.grammar),
            score_from=_score_from(request),
            is_cleared=request.is_cleared,
        )


@dataclass(slots=True)
class EngineCounts:
    """What an engine has counted since its start."""

    totals: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # answers, by reason
    by_source: Counter[str] = field(default_factory=Counter)  # tokens of prompts
    missed: Counter[str] = field(default_factory=Counter)  # tokens known and computed again, by reason
    shortages: Counter[str] = field(default_factory=Counter)  # of the device's memory, by what was given up


@dataclass(slots=True, kw_only=True)
class OpenRequest(OpenAnswers):
    """A request with unfinished choices."""

    since_s: float
    sequences: list[Sequence]
    scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens, in their order


class OpenRequests:
    """The requests that are not over, and what becomes of them: each event belongs to a request's `key`.

    `offload`: the client of the cache tiers, if any. `opened`: by key; `key_of`: of each of their sequences.
    `is_stalled`: nothing can be computed before something arrives.
    """

    def __init__(
        self,
        intake: Intake,
        output: OutputProcessor,
        sampler: Sampler,
        scheduler: Scheduler,
        *,
        offload: Offload | None,
        meter: PrefillMeter,
        clock: Callable[[], float],
        replica_id: str,
    ) -> None:
        self.intake = intake
        self.output = output
        self.sampler = sampler
        self.replica_id = replica_id
        self.counts = EngineCounts()
        self.opened: dict[int, OpenRequest] = {}
        self.key_of: dict[Sequence, int] = {}
        self.is_stalled = False
        self._scheduler = scheduler
        self._offload = offload
        self._meter = meter
        self.clock = clock
        self._spoiled: list[Sequence] = []  # in this step

    def open_keys(self) -> list[int]:
        """Return the keys of the unfinished requests."""
        return list(self.opened)

    def add(self, key: int, request: GenerateRequest) -> Refused | None:
        """Queue a request under the caller's unique `key`, or return why it is refused."""
        queues, waiting, pool = self._scheduler.queues, self._scheduler.waiting, self._scheduler.pool
        refused = refusal(
            request,
            self.intake.limits,
            waiting.of(request.tenant),
            waiting,
            free_places=queues.free_places,
            sequences_max=queues.sequences_max,
            pool_tokens=pool.usable * pool.block_tokens,
        )
        if refused is None:
            try:
                sequence = self.intake.sequence(request)
                opened = OpenRequest(request=request, since_s=self.clock(), sequences=[sequence])
                if request.resume is not None:
                    refused = self.output.resume(opened, sequence, request.resume.token_ids)
            except GrammarRefused as error:
                refused = error.event
        if refused is not None:
            self.counts.totals["refused"] += 1
            return refused
        self.opened[key] = opened
        self.key_of[sequence] = key
        if self._offload is not None:
            self._offload.open(sequence, request, is_queued=not self._scheduler.admission.at_once(sequence))
            self._offload.reporter.began(sequence.owner)
        self._scheduler.add(sequence)
        self.is_stalled = False
        self.counts.totals["prompt_tokens"] += sequence.prompt_tokens
        return None

    def abort(self, key: int) -> bool:
        """Abort a request and release its pages before returning. False if it is already over."""
        opened = self.opened.pop(key, None)
        if opened is None:
            return False
        self._turn_over(opened, opened.sequences[-1], "gone")
        for sequence in opened.sequences:
            if self._offload is not None:
                self._offload.turns.gave_up(sequence)
            self._release(sequence)
        self.counts.totals["aborted"] += 1
        return True

    def fail(self, sequence: Sequence, event: Event) -> tuple[int, Event]:
        """End the request of a sequence with this event; its pages are released."""
        key = self.key_of[sequence]
        self.abort(key)
        return key, event

    def _distrust(self, sequence: Sequence) -> None:
        """Forget the session of a sequence with possibly bad blocks; a retry then starts from nothing.

        Its blocks are forgotten even if others own them, too: they would spoil the retry, and others' turns.
        """
        self.forget({session_owner(sequence.owner)})
        self._scheduler.pool.unpublish(sequence.pages)
        if self._offload is not None:
            for suspect in self._offload.suspects(sequence):
                suspect.condemn()
            tenant, session = sequence.owner[:TAG_BYTES], sequence.owner[TAG_BYTES:]
            self._offload.reports.distrust(Clear(tenant, session))

    def distrust_tenant(self, owner: bytes) -> None:
        """Forget a tenant's cache after an audit found a wrong block: all KV behind it may be wrong."""
        tenant = owner[:TAG_BYTES]
        self.forget({tenant})
        if self._offload is not None:
            self._offload.reports.distrust(Clear(tenant))

    def _release(self, sequence: Sequence) -> None:
        if self._offload is not None:
            self._offload.close(sequence)
        self._scheduler.queues.finish(sequence)
        del self.key_of[sequence]
        self.is_stalled = False

    def forget(self, tags: Collection[bytes]) -> int:
        """Forget the pages of these owners or tenants; return their number. See `GenerateRequest`."""
        if self._offload is not None:
            self._offload.cleared(tags)
        return self._scheduler.forget(tags)

    def jump(self, sequences: Collection[Sequence]) -> None:
        """Move the computed marks of sequences past what has been loaded for them."""
        for sequence in sequences:
            if sequence in self.key_of and sequence.pages:
                self._scheduler.advance(sequence, sequence.computed)

    def score(self, chunk: Chunk, start: int, logits: torch.Tensor) -> None:
        """Keep the log-probabilities of the prompt's tokens behind slots `start` and following."""
        sequence, end = chunk.sequence, start + logits.shape[0]
        top, given = sequence.sampling.prompt_logprobs, sequence.tokens[start + 1 : end + 1].tolist()
        assert top is not None, "the prompt's log-probabilities are not wanted"
        scores = self.opened[self.key_of[sequence]].scores
        for sampled in self.sampler.score(logits, given, top):
            scores += self.output.text.logprobs(sampled)
        if any(math.isnan(score.logprob) for score in scores[-len(given) :]):
            self._spoiled.append(sequence)
        sequence.score_from = end if end < sequence.prompt_tokens - 1 else None

    def drop_spoiled(self) -> list[tuple[int, Event]]:
        """End the requests whose prompt has log-probabilities that are not numbers."""
        events: list[tuple[int, Event]] = []
        for sequence in dict.fromkeys(self._spoiled):
            if sequence not in self.key_of:
                continue  # it failed for another reason in the same step
            self._distrust(sequence)
            events.append(self.fail(sequence, Failed("the model's logits are not numbers (NaN)")))
        self._spoiled = []
        return events

    def _prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprob, ...]:
        """Return all tokens of a computed prompt."""
        scores = self.opened[self.key_of[sequence]].scores
        before = sequence.tokens[: sequence.prompt_tokens - len(scores)]
        return (*map(self.output.text.unscored, before), *scores)

    def admitted(self, sequence: Sequence) -> tuple[int, Event]:
        """Report where the KV of a computed prompt came from."""
        key = self.key_of[sequence]
        sequence.is_reported = True
        if self._offload is not None:
            self._offload.prompt_computed(sequence)
        left_tokens = self.opened[key].request.route.cached_tokens
        receipt = receipt_of(sequence, self._meter.price, self._scheduler.pool.block_tokens, left_tokens)
        self.counts.missed.update(receipt.missed)
        self.counts.by_source.update({str(source): count for source, count in receipt.tokens.items()})
        cached = sequence.prompt_tokens - receipt.tokens["compute"]
        self.counts.totals["cached_tokens"] += cached
        admitted_s = self.clock() if sequence.admitted_s is None else sequence.admitted_s
        queue_s = admitted_s - self.opened[key].since_s
        logprobs = () if sequence.sampling.prompt_logprobs is None else self._prompt_logprobs(sequence)
        return key, Admitted(self.replica_id, cached, queue_s, receipt, logprobs)

    def split(self, sequence: Sequence) -> list[Sequence]:
        """Start the request's other choices, on the pages of its computed prompt."""
        if sequence.forks == 1:
            return []
        key = self.key_of[sequence]
        siblings = self._scheduler.queues.fork(sequence)
        for sibling in siblings:
            self.opened[key].sequences.append(sibling)
            self.key_of[sibling] = key
        return siblings

    def next_token(self, sequence: Sequence, sampled: Sampled | Exception) -> tuple[int, Event]:
        """Apply the next token; an error ends only this sequence's request."""
        try:
            if isinstance(sampled, NotNumbers):
                self._distrust(sequence)
                raise FloatingPointError(str(sampled))
            if isinstance(sampled, Exception):
                raise sampled
            return self._advance(sequence, sampled)
        except GrammarRefused as refused:
            return self.fail(sequence, refused.event)
        except Exception as error:
            if is_device_lost(error):
                raise
            self.counts.shortages += Counter(failed=int(is_memory_short(error)))
            logger.exception("request %s failed", sequence.request_id)
            return self.fail(sequence, Failed(f"{type(error).__name__}: {error}"))

    def _advance(self, sequence: Sequence, sampled: Sampled) -> tuple[int, Event]:
        """Append a sampled token and decide whether the answer ends with it."""
        key = self.key_of[sequence]
        told = self.output.append(self.opened[key], sequence, sampled.token_id)
        self.counts.totals["generated_tokens"] += 1
        if told.reason is not None:
            self._finish(key, sequence, told.reason)
        # Of the end token, too: as many as there are ids.
        logprobs = () if sampled.logprob is None else self.output.text.logprobs(sampled)
        return key, Delta(sequence.index, told.text, (sampled.token_id,), logprobs, told.reason)

    def _finish(self, key: int, sequence: Sequence, reason: FinishReason) -> None:
        if self._offload is not None:
            self._offload.finish(sequence)
            self.jump(self._offload.take_touched())  # it may have taken in what came for others
        opened = self.opened[key]
        opened.sequences.remove(sequence)
        if not opened.sequences:
            self._turn_over(opened, sequence, reason)
            del self.opened[key]
        self._release(sequence)
        self.counts.finished[reason] += 1

    def _turn_over(self, opened: OpenRequest, sequence: Sequence, stop: Stop) -> None:
        if self._offload is not None:
            tools = opened.called_tools(sequence.index) if stop == "stop" else ""
            self._offload.reporter.over(
                opened.request,
                sequence,
                "tool_calls" if tools else stop,
                self.clock() - opened.since_s,
                tool=tools,
            )


NO_RECORD: Final = "no record"
DEARER: Final = "dearer to load"
WORDS: Mapping[str, str] = {
    NO_RECORD: "the tiers have no record of it",
    "meet": "computed while the rest was loaded",
    "gap": "blocks before it are missing",
    "silent peer": "another node does not answer",
    "evicted": "evicted from all tiers",
    "expired": "unused for too long, expired",
    "lost": "lost by its tier",
    "not written": "its tier could not write it",
    "down": "its tier is down",
    "tiers not used": "the tiers are off, or not used for this request",
    DEARER: "dearer to load than to compute",
    "not stored: price": "not stored: dearer to load than to compute",
}
"""What people are told, where that is more than the reason's name."""


def receipt_of(sequence: Sequence, prefill: PrefillPrice, block_tokens: int, left_tokens: int = 0) -> Receipt:
    """Return the receipt of a sequence whose prompt is computed.

    Counts its tokens by source, also by one that only the tier actor, which is older, knows of;
    `cached_tokens` are all but `compute`. `left_tokens`: see `missed_of`.
    """
    prompt, restore = sequence.prompt_tokens, sequence.restore
    resident = min(sequence.resident_tokens, prompt)
    tokens = dict.fromkeys(sources(), 0) | {"gpu": resident}
    if sequence.first_resident is not None and sequence.first_resident < resident:
        # Preempted before its first token. What it finds in the pool now, and did not find then, it has
        # loaded or computed itself in between.
        tokens["gpu"], own = sequence.first_resident, resident - sequence.first_resident
        for source, count in sequence.earlier_loads.items():
            if source != OWN:
                loaded_before = min(count, own)
                tokens[source] = tokens.get(source, 0) + loaded_before
                own -= loaded_before
    miss = "" if sequence.offload_state is None else sequence.offload_state.miss
    if restore is None:
        tokens["compute"] = prompt - sum(tokens.values())
        missed, why = missed_of(sequence, block_tokens, tokens["compute"], left_tokens)
        return Receipt(tokens=tokens, miss=miss or why, missed=missed)
    placed = restore.tokens_by_source(prompt)
    for source, count in placed.items():
        if source != OWN:
            tokens[source] = tokens.get(source, 0) + count
    tokens["compute"] = prompt - sum(tokens.values())
    loaded = sum(placed.values()) - placed.get(OWN, 0)
    missed, why = missed_of(sequence, block_tokens, tokens["compute"], left_tokens)
    return Receipt(
        tokens=tokens,
        decision=restore.decision,
        load_s=max(0.0, restore.placed_s - restore.started_s) if loaded else 0.0,
        load_bytes=sum(p.nbytes for p in restore.pieces if p.state == "placed" and p.source != OWN),
        load_price_s=restore.load_price_s,
        recompute_price_s=restore.recompute_price_s,
        saved_s=prefill.added_seconds(loaded, resident),
        miss=restore.miss or miss or why,
        missed=missed,
    )


def missed_of(
    sequence: Sequence, block_tokens: int, computed_tokens: int, left_tokens: int
) -> tuple[dict[str, int], str]:
    """Return tokens computed again by reason, and what most of them say; "" if there are none.

    Counts what is in full blocks, the unit of reuse. `computed_tokens`: of the prompt, which is computed.
    `left_tokens`: what the session's last turn left, as its ingress remembers: it counts where this
    replica remembers none of the prompt, as that turn was elsewhere.
    """
    missed: Counter[str] = Counter()
    words: dict[str, str] = {}
    for block, tokens, fate in _computed_again(sequence, block_tokens, left_tokens):
        again = min(tokens, computed_tokens - sum(missed.values()))
        if again > 0:
            reason, said = _why(sequence, block, fate, block_tokens)
            missed[reason] += again
            words.setdefault(reason, said)
    if not missed:
        return {}, ""
    most = max(missed, key=lambda reason: missed[reason])
    return dict(missed), words[most]


def _computed_again(
    sequence: Sequence, block_tokens: int, left_tokens: int
) -> Iterator[tuple[int, int, Fate | None]]:
    """Yield the known blocks of a prompt that were not in the pool, with the tokens that no tier brought."""
    resident = sequence.resident_tokens
    if sequence.first_resident is not None:  # what it found later it has computed or loaded itself
        resident = min(resident, sequence.first_resident)
    loaded: Counter[int] = Counter()
    for piece in sequence.restore.pieces if sequence.restore is not None else ():
        if piece.state == "placed" and piece.source != OWN:
            for start in range(piece.start, piece.placed_end, block_tokens):
                loaded[start // block_tokens] += min(block_tokens, piece.placed_end - start)
    known = [] if sequence.offload_state is None else sequence.offload_state.known
    # The last block of an answer is often tokenized otherwise in the next prompt.
    left = min(left_tokens // block_tokens - 1, sequence.reusable // block_tokens)
    is_remembered = any(known)
    for block in range(resident // block_tokens, len(known) if is_remembered else left):
        fate = known[block] if is_remembered else None
        if fate is not None or not is_remembered:
            yield block, block_tokens - loaded[block], fate


def _why(sequence: Sequence, block: int, fate: Fate | None, block_tokens: int) -> tuple[str, str]:
    """Return why a known block was not loaded: the reason's name, and what people are told."""
    offload_state, restore = sequence.offload_state, sequence.restore
    if sequence.is_cleared or (fate is not None and fate.outcome == "cleared"):
        return _named("cleared")
    if offload_state is None:
        return _named("tiers not used")
    found = offload_state.found
    if found is None:
        return _named(offload_state.miss or "slow lookup")
    if _has(found, block):
        if restore is None or restore.decision == "none":
            return _named(offload_state.miss or "gap")
        if block * block_tokens < offload_state.planned_from:
            return _named(offload_state.miss or "slow lookup")
        planned = max((piece.end for piece in restore.pieces), default=offload_state.planned_from)
        if _is_behind_gap(found, -(-planned // block_tokens), block):
            return _named("gap")
        return _not_loaded(restore, offload_state.miss)
    absent = next((run for run in found.absent if run.first <= block < run.first + run.blocks), None)
    if absent is not None:
        return _named(absent.reason)
    if fate is not None and fate.outcome in ("storing", "refused:busy"):
        return _named("being stored")
    if fate is not None and not fate.is_stored:
        reason = f"not stored: {fate.outcome.partition(':')[2]}"
        return reason, f"not stored: {fate.detail}" if fate.detail else _named(reason)[1]
    if found.has_silent_peer:
        return _named("silent peer")
    return _named(offload_state.miss or ("slow lookup" if found.unlisted else NO_RECORD))


def _not_loaded(restore: Restore, lookup_miss: str) -> tuple[str, str]:
    """Return why a plan did not bring what the tiers had."""
    if restore.decision == "recompute":
        computing, loading = in_digits(1e3 * restore.recompute_price_s), in_digits(1e3 * restore.load_price_s)
        return DEARER, f"dearer to load: computing {computing} ms, loading {loading}"
    return _named(restore.miss or lookup_miss or ("meet" if restore.decision == "meet" else DEARER))


def _has(found: LookupResult, block: int) -> bool:
    return any(span.first <= block < span.first + span.blocks for span in found.spans)


def _is_behind_gap(found: LookupResult, first: int, block: int) -> bool:
    """Return whether a block between `first` and `block` is in no span; spans are in order."""
    end = first
    for span in found.spans:
        if span.first > end:
            break
        end = max(end, span.first + span.blocks)
    return block >= end


def _named(reason: str) -> tuple[str, str]:
    return reason, WORDS.get(reason, reason)
