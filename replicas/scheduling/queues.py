"""Who runs and who waits, on which pages, and which sequence gives its pages up.

Sequences that run have a page table: pages that the pool had, pages of their own, and blocks that others may
find. Which of them gives its pages up, and what happens to its blocks, goes by what that costs: less, the
less an answer would still hold. How long answers become is learnt. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from samovar.cache_tiers.pricing import BURST_EXTENTS, Doubt, PrefillPrice, TierPrice, swap_or_drop
from samovar.replicas.kv import PagePool, PrefixEntry
from samovar.replicas.scheduling.order import (
    TenantShares,
    gives,
)
from samovar.replicas.scheduling.sequence import Restorer, Sequence, page_table
from samovar.replicas.scheduling.step import StepPlan
from samovar.replicas.turns import FairQueue


class Queues:
    """Who runs and who waits, and how a sequence that runs comes to wait again.

    `sequences_max`: places of running sequences; `quantum_tokens`, `weights`: see `FairQueue`.
    """

    def __init__(
        self,
        tables: PageTables,
        *,
        sequences_max: int,
        policy: PreemptionPolicy,
        restorer: Restorer | None,
        quantum_tokens: int,
        weights: Mapping[bytes, float],
    ) -> None:
        self.tables = tables
        self.sequences_max = sequences_max
        self.policy = policy
        self.restorer = restorer
        self.waiting: FairQueue[bytes, Sequence] = FairQueue(quantum_tokens, weights)
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self.swaps = 0
        self._quantum_tokens = quantum_tokens
        self._weights = weights

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def free_places(self) -> int:
        """Return how many more sequences could run, pages permitting."""
        return self.sequences_max - sum(sequence.forks for sequence in self.running)

    def shares(self) -> TenantShares:
        """Return what each tenant has of the places and pages now."""
        return TenantShares(self.running, self.sequences_max, self.tables.pool.usable, self._weights)

    def pages_leaving(self) -> int:
        """Return how many pages wait only to be copied: preempting more would not be sooner."""
        return 0 if self.restorer is None else self.restorer.pages_leaving()

    def answer_tokens(self, sequence: Sequence) -> int:
        """Return what a sequence's answers count for: they may end early, so at most a turn of each."""
        return min(sequence.tokens_left, self._quantum_tokens) * sequence.forks

    def enter(self, sequence: Sequence, plan: StepPlan) -> None:
        """Let a waiting sequence run that has its pages."""
        sequence.is_due = sequence.is_due or self.waiting.is_due(sequence)
        self.waiting.take(sequence)
        self._insert(sequence)
        plan.admitted.append(sequence)

    def _insert(self, sequence: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Let the other choices of a sequence run whose prompt is computed."""
        siblings = [self.tables.fork(sequence, index) for index in range(1, sequence.forks)]
        for sibling in siblings:
            self._insert(sibling)
        sequence.forks = 1
        return siblings

    def make_room(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Own every page that the step writes. False: it was preempted itself, or waits for pages.

        Until there are enough it owns none: what a plan copies must be computed with in the same step.
        """
        while self.tables.to_own(sequence, count) > self.tables.pool.available:
            if self.pages_leaving():
                plan.is_short = True
                return False
            position = self.running.index(sequence)
            givers = [
                one
                for place, one in enumerate(self.running)
                if one not in plan.admitted and gives(one, sequence, is_later=place > position)
            ]
            if self.preempt_one(givers, plan) is sequence:
                return False
        self.tables.own(sequence, count, plan)
        return True

    def preempt_one(self, givers: Listing[Sequence], plan: StepPlan) -> Sequence:
        """Preempt one of these running sequences, of the tenant with the largest share; return it."""
        choice = self.policy.choose(self.shares().of_largest_tenant(givers))
        self.preempt(choice, plan)
        return choice.victim

    def preempt(self, choice: Preemption, plan: StepPlan) -> None:
        """Take a running sequence's pages and its part in the plan; it is the next of its tenant to run."""
        victim = choice.victim
        if choice.how == "swap" and self.restorer is not None:
            self.swaps += self.restorer.swap_out(victim, plan.filled(victim.pages))
        # A copy planned for the victim must not write into a page that another sequence may get now.
        plan.copies = [(source, target) for source, target in plan.copies if target not in victim.pages]
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not victim]
        self.tables.keep_copied(victim, plan)
        self._release(victim)
        victim.forget_computed()
        size = len(victim.tokens) + self.answer_tokens(victim)
        self.waiting.put_first(victim.tenant, victim, victim.priority, size)
        plan.preempted.append(victim)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if self.restorer is not None:
            self.restorer.stop_restore(sequence)
        self.running.remove(sequence)
        self.tables.pool.release(sequence.pages)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished sequence, whatever the reason; its pages become free or cached."""
        if sequence in self.running:
            self.policy.lengths.ended(sequence.output_tokens)
            self._release(sequence)
            sequence.pages = page_table()
        else:
            self.waiting.remove(sequence)


class PageTables:
    """The page tables of one replica's sequences; `prefix_reuse`: blocks are shared between them."""

    def __init__(self, pool: PagePool, *, prefix_reuse: bool) -> None:
        self.pool = pool
        self.prefix_reuse = prefix_reuse
        self.cow_copies = 0
        self.copied: list[int] = []  # pages that the planned step copies from, and no sequence has now

    def _written(self, sequence: Sequence, count: int) -> range:
        block_tokens = self.pool.block_tokens
        first = sequence.computed // block_tokens
        return range(first, (sequence.computed + count - 1) // block_tokens + 1)

    def to_own(self, sequence: Sequence, count: int) -> int:
        """Return how many pages the next `count` slots need beside those that are the sequence's own."""
        pages = sequence.pages
        written = self._written(sequence, count)
        return sum(block >= len(pages) or self.pool.refs(pages[block]) > 1 for block in written)

    def is_shared(self, sequence: Sequence, count: int) -> bool:
        """Return whether one of the next `count` slots is in a page that something else reads."""
        pages = sequence.pages
        written = self._written(sequence, count)
        return any(block < len(pages) and self.pool.refs(pages[block]) > 1 for block in written)

    def own(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Give a sequence pages of its own for its next `count` slots; what is shared is copied on write."""
        for block in self._written(sequence, count):
            if block == len(sequence.pages):
                sequence.pages.append(self.pool.allocate())
                continue
            page = sequence.pages[block]
            if self.pool.refs(page) > 1:  # shared with a sibling, or an audit: copy on write
                own = self.pool.allocate()
                plan.copies.append((page, own))
                self.pool.release([page])
                sequence.pages[block] = own
                self.cow_copies += 1

    def own_drafts(self, plan: StepPlan) -> None:
        """Own the pages of guesses, of those that the rest of the step has left; else leave them out."""
        for place, chunk in enumerate(plan.chunks):
            if chunk.draft and self.to_own(chunk.sequence, chunk.rows) > self.pool.available:
                plan.chunks[place] = replace(chunk, draft=())
            elif chunk.draft:
                self.own(chunk.sequence, chunk.rows, plan)

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages behind the last known token: only guesses that were wrong needed them."""
        needed = self.pool.pages_for(len(sequence.tokens))
        self.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def resident(self, sequence: Sequence) -> list[PrefixEntry]:
        """Return a sequence's blocks that are in the pool and need not be computed."""
        if not self.prefix_reuse:
            return []
        blocks_max = sequence.reusable // self.pool.block_tokens
        return self.pool.match(sequence.keys_of(blocks_max, self.pool.block_tokens), sequence.tokens)

    def short(self, sequence: Sequence) -> int:
        """Return how many pages are missing for the sequence's prompt."""
        hits = self.resident(sequence)
        revived = sum([self.pool.refs(entry.page) == 0 for entry in hits])  # no longer evictable then
        return self.pool.pages_for(len(sequence.tokens)) - len(hits) + revived - self.pool.available

    def freed(self, sequence: Sequence) -> int:
        """Return how many pages become free when a sequence loses its own."""
        return sum(self.pool.refs(page) == 1 for page in sequence.pages)

    def reserve(self, sequence: Sequence) -> int:
        """Share the cached prefix and own pages for the rest; or return how many pages are missing.

        Then nothing is touched: a long prompt that waits is tried in every step.
        """
        hits = self.resident(sequence)
        shared = [entry.page for entry in hits]
        missing = self.pool.pages_for(len(sequence.tokens)) - len(hits)
        pages_short = missing + sum([self.pool.refs(page) == 0 for page in shared]) - self.pool.available
        if pages_short > 0:
            return pages_short
        self.pool.acquire(*shared)
        self.pool.own(sequence.owner, *shared)
        own = [self.pool.allocate() for _ in range(missing)]
        sequence.pages = page_table([*shared, *own])
        sequence.computed = sequence.resident_tokens = len(hits) * self.pool.block_tokens
        if sequence.first_resident is None:
            sequence.first_resident = sequence.resident_tokens
        sequence.published_blocks = len(hits)
        if hits:
            sequence.chain_entry = hits[-1].number
        return 0

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Return another choice of a sequence whose prompt is computed; both share its pages."""
        sibling = sequence.fork(index)
        self.pool.acquire(*sibling.pages)
        return sibling

    def keep_copied(self, victim: Sequence, plan: StepPlan) -> None:
        """Keep what the plan copies out of a victim's pages: its next owner might load into it at once."""
        copied = {source for source, _ in plan.copies}.intersection(victim.pages)
        self.pool.acquire(*copied)
        self.copied += copied

    def forget_copied(self) -> None:
        """Release what `keep_copied` kept: the step is over, or the next one is planned."""
        self.pool.release(self.copied)
        self.copied = []

    def publish(self, sequence: Sequence) -> None:
        """Let others find a sequence's full blocks."""
        if not self.prefix_reuse or sequence.is_cleared:
            return
        block_tokens = self.pool.block_tokens
        while (
            not sequence.chain_broken and (sequence.published_blocks + 1) * block_tokens <= sequence.computed
        ):
            block = sequence.published_blocks
            ids = sequence.tokens[block * block_tokens : (block + 1) * block_tokens]
            key = sequence.keys_of(block + 1, block_tokens)[block]
            page = sequence.pages[block]
            published = self.pool.publish(key, sequence.chain_entry, ids, page)
            if published is None:
                sequence.chain_broken = True
                return
            if published.duplicate:  # the same block was computed concurrently: share that page
                self.pool.acquire(published.entry.page)
                self.pool.release([page])
                sequence.pages[block] = published.entry.page
            self.pool.own(sequence.owner, published.entry.page)
            sequence.chain_entry = published.entry.number
            sequence.published_blocks = block + 1


BUCKETS = 24
"""Of lengths: [1, 2), [2, 4), ... tokens."""
FADE = 0.999
"""What an answer counts for when the next has ended: about the last thousand count."""
PRIOR_TOKENS = 256
"""How long answers count as before any has ended."""


class AnswerLengths:
    """A fading histogram of answers' lengths, in powers of two."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._counts[_bucket(PRIOR_TOKENS)] = 1.0

    def ended(self, tokens: int) -> None:
        """Count an answer of so many tokens."""
        self._counts = [FADE * count for count in self._counts]
        self._counts[_bucket(tokens)] += 1.0

    def left(self, tokens: int, tokens_max: int) -> float:
        """Return how many more an answer of `tokens` is expected to get, of at most `tokens_max`; at least 1.

        The mean of those that became longer, a bucket counted at its middle; as long again, if none did.
        """
        weight = total = 0.0
        for bucket, count in enumerate(self._counts):
            low, high = 2**bucket, 2 ** (bucket + 1)
            if high > tokens + 1:
                part = count * (high - max(low, tokens + 1)) / (high - low)
                weight += part
                total += part * ((max(low, tokens + 1) + high) / 2 - tokens)
        more = total / weight if weight else float(max(1, tokens))
        return max(1.0, min(more, float(tokens_max)))


def _bucket(tokens: int) -> int:
    return min(BUCKETS - 1, int(math.log2(max(1, tokens))))


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Sequence
    how: Literal["drop", "swap"]


class PreemptionPolicy:
    """Decides which sequence is preempted and what happens to its blocks.

    The victim is of the worst priority; among those, where prices are known, what is cheapest to bring back
    for what it would hold on (`held`); else, and of equals, the newest: it loses least service and delays no
    earlier one. `drop` frees its pages and computes them again later; `swap` copies the blocks out and in.
    """

    def __init__(self) -> None:
        self.lengths = AnswerLengths()

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        """Choose one of `candidates` (running, oldest first, never empty) to give up its pages."""
        yielding = [one for one in candidates if not one.is_due] or candidates
        worst = max(one.priority for one in yielding)
        victim = min(reversed([one for one in yielding if one.priority == worst]), key=self.price)
        return Preemption(victim, self.how(victim))

    def price(self, sequence: Sequence) -> float:
        """Return what preempting a sequence costs for what it frees; 0: it is not known."""
        return 0.0

    def how(self, victim: Sequence) -> Literal["drop", "swap"]:
        """Return what becomes of a victim's blocks."""
        return "drop"

    def held(self, sequence: Sequence) -> float:
        """Return how much a sequence would still hold: pages times expected steps."""
        steps = self.lengths.left(sequence.output_tokens, sequence.tokens_left)
        return max(1, len(sequence.pages)) * steps * sequence.forks


class DropNewest(PreemptionPolicy):
    """Preempts the newest sequence of the worst priority, whose blocks are computed again."""


class SwapPrices(Protocol):
    """What swapping takes (`SwapSpace`)."""

    def price(self) -> TierPrice:
        """Return the price of one direction between pages and memory."""
        ...

    @property
    def bytes_max(self) -> int: ...


class ByPrice(PreemptionPolicy):
    """Preempts what is cheapest to bring back for what it holds, by swap or drop, whichever is cheaper."""

    def __init__(
        self, prefill: Callable[[], PrefillPrice], swap: SwapPrices, block_bytes: int, block_tokens: int
    ) -> None:
        super().__init__()
        self._prefill = prefill
        self._swap = swap
        self._doubt = Doubt(swap.bytes_max // BURST_EXTENTS)
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens

    def price(self, sequence: Sequence) -> float:
        """Return the seconds to bring a sequence back, for each page and step that it would hold on."""
        copy, seconds = self._swap.price(), self._prefill().seconds(sequence.computed, 0)
        if copy.is_up:
            seconds = min(seconds, 2 * copy.seconds(self._nbytes(sequence)))
        return seconds / self.held(sequence)

    def how(self, victim: Sequence) -> Literal["drop", "swap"]:
        """Return what is cheaper, or a swap, to learn what that takes."""
        nbytes, copy = self._nbytes(victim), self._swap.price()
        self._doubt.decided(nbytes)
        how = swap_or_drop(victim.computed, nbytes, copy, self._prefill())
        if how == "drop" and nbytes and self._doubt.tries(nbytes, copy):
            return "swap"
        return how

    def _nbytes(self, sequence: Sequence) -> int:
        return -(-sequence.computed // self._block_tokens) * self._block_bytes


class SwapNewest(PreemptionPolicy):
    """Preempts the newest sequence of the worst priority; always swaps its blocks out if there is room."""

    def how(self, victim: Sequence) -> Literal["drop", "swap"]:
        """Return that they are swapped."""
        return "swap"


def preemption_policy(
    name: str, prefill: Callable[[], PrefillPrice], swap: SwapPrices, block_bytes: int, block_tokens: int
) -> PreemptionPolicy:
    """Return the policy of `engine.preemption`."""
    if name == "drop":
        return DropNewest()
    if name == "swap":
        return SwapNewest()
    return ByPrice(prefill, swap, block_bytes, block_tokens)
