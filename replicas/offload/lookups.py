"""Looks prompts up in the tiers, decides how long each of them waits, and which blocks are loaded.

A prompt waits for a share of what loading could save it (`cache_tiers/pricing/load_plan.py`). Meanwhile
an engine that has nothing else to do computes it from the front, each step no longer than the wait so far:
so this costs at most as much again. The answer is used whenever it comes: what is not computed by then is
loaded. Runs on the engine's thread; the calls on lookup threads.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from samovar.cache_tiers.blocks import ROOT, BlockShape, LoadSource, block_key, record_bytes
from samovar.cache_tiers.media import Breaker
from samovar.cache_tiers.messages import Lookup, LookupResult, PartialBlock
from samovar.cache_tiers.pricing import (
    AGAIN_S,
    LookupWait,
    PrefillPrice,
    TierPrice,
    next_again_s,
    plan_wait,
)
from samovar.configs.sections import TierSettings
from samovar.replicas.messages import GenerateRequest
from samovar.replicas.offload.tier_client import CompletionQueue, begin
from samovar.replicas.scheduling import OffloadState, Sequence, StepRoom

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadCut:
    """Blocks `[first, first + len(keys))` of the chain, at blocks `[offset, ...)` of an extent in `tier`.

    `token_counts`: of these blocks; only the last may be partial. `node`: as in `BlockRange`.
    """

    extent_id: bytes
    tenant: bytes
    tier: LoadSource
    offset: int
    first: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]
    node: str = ""

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)


def load_cuts(
    found: LookupResult,
    *,
    namespace: bytes,
    keys: Listing[bytes],
    token_ids: Listing[int],
    block_tokens: int,
    resident_blocks: int,
) -> list[LoadCut]:
    """Return what the tiers have directly behind the pool's `resident_blocks`, without a gap.

    `keys`: of the full blocks that may be loaded; `token_ids`: of the prompt without its last token, which is
    always computed.
    """
    cuts: list[LoadCut] = []
    end = resident_blocks
    for span in sorted(found.spans, key=lambda span: span.first):
        last = min(span.first + span.blocks, len(keys))
        if last <= end:
            continue
        if span.first > end:
            break
        offset = span.offset + end - span.first
        counts = (block_tokens,) * (last - end)
        cuts.append(
            LoadCut(
                span.extent_id,
                span.tenant,
                span.tier,
                offset,
                end,
                tuple(keys[end:last]),
                counts,
                node=span.node,
            )
        )
        end = last
    tail = _longest_tail(found.tails, namespace, keys, token_ids, end, block_tokens)
    if tail is None:
        return cuts
    at = tail.span
    last_cut = cuts[-1] if cuts else None
    if (
        last_cut is not None
        and (last_cut.extent_id, last_cut.tier, last_cut.node) == (at.extent_id, at.tier, at.node)
        and last_cut.offset + len(last_cut.keys) == at.offset
    ):
        # Directly behind, in the same extent: one fetch.
        cuts[-1] = LoadCut(
            last_cut.extent_id,
            last_cut.tenant,
            last_cut.tier,
            last_cut.offset,
            last_cut.first,
            (*last_cut.keys, tail.key),
            (*last_cut.token_counts, tail.tokens),
            last_cut.node,
        )
    else:
        cuts.append(
            LoadCut(
                at.extent_id,
                at.tenant,
                at.tier,
                at.offset,
                end,
                (tail.key,),
                (tail.tokens,),
                node=at.node,
            )
        )
    return cuts


def _longest_tail(
    tails: Iterable[PartialBlock],
    namespace: bytes,
    keys: Listing[bytes],
    token_ids: Listing[int],
    end: int,
    block_tokens: int,
) -> PartialBlock | None:
    """Return the longest partial block behind block `end - 1` that matches the prompt, or None."""
    if end > len(keys):
        return None
    parent = keys[end - 1] if end else ROOT
    best: PartialBlock | None = None
    for tail in tails:
        start = end * block_tokens
        fits = 0 < tail.tokens < block_tokens and start + tail.tokens <= len(token_ids)
        if tail.span.first != end or not fits or (best is not None and tail.tokens <= best.tokens):
            continue
        if block_key(namespace, parent, token_ids[start : start + tail.tokens]) == tail.key:
            best = tail
    return best


def held_keys(found: LookupResult, keys: Listing[bytes]) -> set[bytes]:
    """Return the keys held by this node's tiers; blocks that only another node holds must be stored."""
    held = {tail.key for tail in found.tails if tail.span.tier != "peer"}
    for span in found.spans:
        if span.tier != "peer":
            held.update(keys[span.first : span.first + span.blocks])
    return held


LOOKUP_RATE = 0.2  # weight of a new measurement in the usual time of a lookup
USUAL_S_MAX = 0.25  # most that one measurement counts for, so that a slow lookup is soon forgotten
NODE = "node"
"""The slow part of a lookup, where it is none of the tiers: the tier actor, or the way to it."""


def cuts_of(
    sequence: Sequence, found: LookupResult, block_tokens: int, resident_blocks: int
) -> list[LoadCut]:
    """Return what the tiers have of a sequence's known tokens behind its first `resident_blocks`."""
    usable = sequence.reusable
    return load_cuts(
        found,
        namespace=sequence.namespace,
        keys=sequence.keys_of(usable // block_tokens, block_tokens),
        token_ids=sequence.tokens[:usable],
        block_tokens=block_tokens,
        resident_blocks=resident_blocks,
    )


def slow_part(found: LookupResult | None, took_s: float) -> str:
    """Return which tier made a lookup that `took_s` late, or `NODE`. Pure."""
    if found is None:
        return NODE
    tier, seconds = max(found.seconds.items(), key=lambda item: item[1], default=("", 0.0))
    if tier and seconds >= took_s / 2:
        return tier
    return found.unlisted[0] if found.unlisted else NODE


def spare_tokens(sequence: Sequence, price: PrefillPrice, seconds: float, block_tokens: int) -> int:
    """Return how many tokens a step of `seconds` computes, up to the end of a block; at least one block."""
    room = StepRoom(price, sequence.pending, 0.0, max(0.0, seconds - price.c0_s))
    computed = sequence.computed
    end = (computed + room.takes(sequence.pending, computed)) // block_tokens * block_tokens
    return max(end, computed // block_tokens * block_tokens + block_tokens) - computed


class TierLookups:
    """Keeps the lookups of prompts that are not computed yet.

    `look`: asks the tiers; returns within its own time limit, None without an answer. `learned`: called with
    every answer. `slow`: lookups that were waited for in vain, by the tier that was slow (or `NODE`).
    """

    def __init__(
        self,
        look: Callable[[Lookup], LookupResult | None],
        learned: Callable[[Sequence, OffloadState, LookupResult], None],
        price: Callable[[], PrefillPrice],
        settings: TierSettings,
        shape: BlockShape,
        lane: Executor,
        arrivals: CompletionQueue,
        clock: Callable[[], float],
    ) -> None:
        self.slow: Counter[str] = Counter()
        self._look_up = look
        self._learned = learned
        self._price = price
        self._settings = settings
        self._shape = shape
        self._lane = lane
        self._arrivals = arrivals
        self._clock = clock
        self._open: dict[Sequence, Lookup] = {}  # not answered completely, prompt not computed
        self._news: dict[Sequence, None] = {}  # answered, or no longer waiting
        self._usual_s = 0.0
        self._prices: Mapping[LoadSource, TierPrice] = {}
        self._breaker = Breaker(
            settings.breaker_failures, settings.breaker_open_s, settings.breaker_open_s_max, clock
        )

    def open(
        self, sequence: Sequence, request: GenerateRequest, *, resident_tokens: int, is_queued: bool
    ) -> None:
        """Begin the lookup of a new prompt of which `resident_tokens` are in the pool.

        `is_queued`: it cannot be admitted at once.
        """
        offload_state = sequence.offload_state
        assert offload_state is not None, "a request that does not use the tiers is not looked up"
        if not self._breaker.allows():
            offload_state.miss = "down"
            return
        wait = self._wait(sequence, resident_tokens, self._usual_s)
        offload_state.resident_tokens = resident_tokens
        offload_state.recompute_s = wait.recompute_s
        offload_state.waits = wait.until_s > 0
        offload_state.deadline_s = offload_state.opened_s + wait.until_s
        offload_state.idle_at_s = offload_state.opened_s + wait.idle_s
        offload_state.again_s = AGAIN_S
        bt = self._shape.block_tokens
        lookup = self._open[sequence] = Lookup(
            sequence.namespace,
            b"".join(sequence.keys_of((len(sequence.tokens) - 1) // bt, bt)),
            request.tenant,
            request.session,
            peers=request.route.peers,
            wait_s=wait.until_s,
            trace=request.trace,
        )
        self._ask(
            sequence, offload_state, replace(lookup, starts_turn=request.resume is None, is_queued=is_queued)
        )

    def _wait(self, sequence: Sequence, known_tokens: int, usual_s: float) -> LookupWait:
        missing = max(0, sequence.reusable - known_tokens)
        settings, blocks = self._settings, -(-missing // self._shape.block_tokens)
        return plan_wait(
            missing_tokens=missing,
            resident_tokens=known_tokens,
            nbytes=record_bytes(blocks, self._shape) if blocks else 0,
            prefill=self._price(),
            prices=self._prices,
            usual_s=usual_s,
            share=settings.lookup_share,
            idle_share=settings.lookup_idle_share,
            s_max=settings.lookup_s_max,
        )

    def _ask(self, sequence: Sequence, offload_state: OffloadState, lookup: Lookup) -> None:
        offload_state.again_at_s = None
        if not begin(self._lane, self._look, sequence, offload_state, lookup):
            self._found(sequence, offload_state, None, 0.0)

    def _look(self, sequence: Sequence, offload_state: OffloadState, lookup: Lookup) -> None:
        """Ask the tiers, on a lookup thread."""
        if offload_state.is_over:  # its request ended while it was queued
            return
        found: LookupResult | None = None
        asked_s = self._clock()
        try:
            found = self._look_up(lookup)
        except Exception:  # a fault of the tiers must not leave the request waiting
            logger.exception("a lookup failed")
        took_s = self._clock() - asked_s
        self._arrivals.post(lambda: self._found(sequence, offload_state, found, took_s))

    def _found(
        self, sequence: Sequence, offload_state: OffloadState, found: LookupResult | None, took_s: float
    ) -> None:
        if offload_state.is_unanswered:
            self._was_slow(offload_state, slow_part(found, took_s))
        if found is None:
            self._breaker.failed()
            if offload_state.found is None:
                offload_state.miss = offload_state.miss or "down"
            self._settle(sequence, offload_state)
            return
        self._breaker.succeeded()
        own_s = max(0.0, took_s - sum(found.seconds.values()))  # the rest is waited for on purpose
        self._usual_s += LOOKUP_RATE * (min(own_s, USUAL_S_MAX) - self._usual_s)
        self._prices = found.prices
        offload_state.found = found
        self._learned(sequence, offload_state, found)
        if not (found.unlisted and self._is_worth_asking_again(sequence, offload_state, found)):
            self._settle(sequence, offload_state)

    def _is_worth_asking_again(
        self, sequence: Sequence, offload_state: OffloadState, found: LookupResult
    ) -> bool:
        """Ask again later for what is still missing, and wait only for what that is worth."""
        if sequence not in self._open:
            return False
        bt = self._shape.block_tokens
        known = max(sequence.computed, offload_state.resident_tokens)
        cuts = cuts_of(sequence, found, bt, known // bt)
        if cuts:
            known = cuts[0].first * bt + sum(cut.tokens for cut in cuts)
        wait = self._wait(sequence, known, 0.0)
        offload_state.deadline_s = min(offload_state.deadline_s, offload_state.opened_s + wait.until_s)
        if not wait.until_s:
            return False
        offload_state.again_at_s = self._clock() + offload_state.again_s
        offload_state.again_s = next_again_s(offload_state.again_s)
        return True

    def _settle(self, sequence: Sequence, offload_state: OffloadState) -> None:
        """End a lookup: nothing more is heard of it."""
        offload_state.again_at_s = None
        if self._open.pop(sequence, None) is not None:
            self._end_wait(sequence, offload_state)

    def _end_wait(self, sequence: Sequence, offload_state: OffloadState) -> None:
        if offload_state.waits:
            offload_state.waited_s = self._clock() - offload_state.opened_s
        offload_state.waits, offload_state.spare_tokens = False, None
        self._news[sequence] = None

    def collect(self, *, is_idle: bool) -> list[Sequence]:
        """End the waits that are over, and ask again where it is time.

        `is_idle`: the engine has nothing to compute, so one of those that wait may begin. Returns the
        sequences whose lookup was answered or no longer holds them since the last call.
        """
        now_s = self._clock()
        for sequence, lookup in list(self._open.items()):
            offload_state = sequence.offload_state
            assert offload_state is not None
            if (
                offload_state.waits or offload_state.spare_tokens is not None
            ) and now_s >= offload_state.deadline_s:
                self._end_wait(sequence, offload_state)
            elif is_idle and offload_state.waits and now_s >= offload_state.idle_at_s:
                offload_state.waits, offload_state.waited_s, is_idle = (
                    False,
                    now_s - offload_state.opened_s,
                    False,
                )
                offload_state.spare_tokens = 0
            if offload_state.spare_tokens is not None:
                offload_state.spare_tokens = spare_tokens(
                    sequence, self._price(), now_s - offload_state.opened_s, self._shape.block_tokens
                )
            if offload_state.again_at_s is not None and now_s >= offload_state.again_at_s:
                if self._breaker.allows():
                    self._ask(sequence, offload_state, lookup)
                else:
                    self._settle(sequence, offload_state)
        news, self._news = list(self._news), {}
        return news

    def wake_at_s(self, *, is_idle: bool) -> Iterator[float]:
        """Yield the times at which `collect` has something to do even if no answer comes."""
        for sequence in self._open:
            offload_state = sequence.offload_state
            assert offload_state is not None
            if offload_state.waits or offload_state.spare_tokens is not None:
                yield offload_state.deadline_s
            if offload_state.waits and is_idle:
                yield offload_state.idle_at_s
            if offload_state.again_at_s is not None:
                yield offload_state.again_at_s

    def computed(self, sequence: Sequence) -> bool:
        """End the lookup of a sequence whose prompt is computed: an answer is of no more use to it.

        Returns whether it had waited for one in vain.
        """
        offload_state = sequence.offload_state
        if offload_state is None or self._open.pop(sequence, None) is None:
            return False
        offload_state.spare_tokens = offload_state.again_at_s = None
        if offload_state.deadline_s <= offload_state.opened_s or offload_state.miss:
            return False  # it did not pay to wait, or was of no use
        offload_state.miss = "slow lookup"
        offload_state.is_unanswered = True
        if offload_state.found is not None:  # answered, but not completely
            self._was_slow(offload_state, slow_part(offload_state.found, 0.0))
        return True

    def _was_slow(self, offload_state: OffloadState, part: str) -> None:
        offload_state.is_unanswered = False
        self.slow[part] += 1

    def close(self, sequence: Sequence) -> None:
        """Drop the lookup of a sequence that is over."""
        self._open.pop(sequence, None)
        self._news.pop(sequence, None)
        if sequence.offload_state is not None and sequence.offload_state.is_unanswered:
            self._was_slow(sequence.offload_state, NODE)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        for sequence in self._open:
            offload_state = sequence.offload_state
            assert offload_state is not None, "a lookup of a request that does not use the tiers"
            assert not offload_state.is_over, "a request that is over is still looked up"
            assert not (offload_state.waits and offload_state.spare_tokens is not None), (
                "what waits is computed"
            )
