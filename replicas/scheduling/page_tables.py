"""Page tables of sequences: what the pool has, pages of their own, blocks that others may find. Pure."""

from __future__ import annotations

from dataclasses import replace

from samovar.replicas.kv import PagePool, PrefixEntry
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepPlan


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

    def own(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Give a sequence pages of its own for its next `count` slots; what is shared is copied on write."""
        for block in self._written(sequence, count):
            if block == len(sequence.pages):
                sequence.pages.append(self.pool.allocate())
                continue
            page = sequence.pages[block]
            if self.pool.refs(page) > 1:  # shared with a sibling: copy on write
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
        revived = sum(self.pool.refs(entry.page) == 0 for entry in hits)  # no longer evictable then
        return self.pool.pages_for(len(sequence.tokens)) - len(hits) + revived - self.pool.available

    def freed(self, sequence: Sequence) -> int:
        """Return how many pages become free when a sequence loses its own."""
        return sum(self.pool.refs(page) == 1 for page in sequence.pages)

    def reserve(self, sequence: Sequence) -> bool:
        """Share the cached prefix and own pages for the rest, or change nothing and return False."""
        hits = self.resident(sequence)
        for entry in hits:
            self.pool.acquire(entry.page)
        missing = self.pool.pages_for(len(sequence.tokens)) - len(hits)
        if missing > self.pool.available:
            self.pool.release([entry.page for entry in hits])
            return False
        for entry in hits:
            self.pool.own(entry.page, sequence.owner)
        sequence.pages = [entry.page for entry in hits] + [self.pool.allocate() for _ in range(missing)]
        sequence.computed = sequence.resident_tokens = len(hits) * self.pool.block_tokens
        if sequence.first_resident is None:
            sequence.first_resident = sequence.resident_tokens
        sequence.published_blocks = len(hits)
        if hits:
            sequence.chain_entry = hits[-1].number
        return True

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Return another choice of a sequence whose prompt is computed; both share its pages."""
        sibling = sequence.fork(index)
        for page in sibling.pages:
            self.pool.acquire(page)
        return sibling

    def keep_copied(self, victim: Sequence, plan: StepPlan) -> None:
        """Keep what the plan copies out of a victim's pages: its next owner might load into it at once."""
        copied = {source for source, _ in plan.copies}.intersection(victim.pages)
        for page in copied:
            self.pool.acquire(page)
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
            self.pool.own(published.entry.page, sequence.owner)
            sequence.chain_entry = published.entry.number
            sequence.published_blocks = block + 1
