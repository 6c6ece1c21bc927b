"""Stores the blocks of a finished turn that no tier has.

Runs on the engine's thread; copying and sealing run on the store thread, offering on the offer thread. The
pages stay referenced until they are copied. What finds no room to be staged waits for it, without its pages
being held: no request is short of pages for the sake of a store. A store that fails is dropped and counted;
no request waits for one.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from samovar.cache_tiers.actors import StagingBuffer
from samovar.cache_tiers.blocks import (
    ROOT,
    TAG_BYTES,
    BlockShape,
    Bytes,
    ExtentHeader,
    LoadSource,
    Placement,
    block_key,
    header_bytes,
    record_bytes,
    seal,
)
from samovar.cache_tiers.messages import LookupResult, StoreRequest
from samovar.cache_tiers.pricing import Doubt, PrefillMeter, PrefillPrice, TierPrice, in_digits, worth_storing
from samovar.configs.sections import TierSettings
from samovar.replicas.kv import CopyEvent, PageIo, PagePool, PrefixEntry
from samovar.replicas.offload.lookups import held_keys
from samovar.replicas.offload.tier_client import CompletionQueue, TierAccess, TierLink, begin
from samovar.replicas.scheduling import BlockFates, OffloadState, Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreRun:
    """Blocks `[first, first + len(keys))` of a chain, to be stored as one extent."""

    first: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def end(self) -> int:
        """Return the number of the block behind the last one."""
        return self.first + len(self.keys)


def store_runs(
    keys: Listing[bytes],
    tail: tuple[bytes, int] | None,
    *,
    block_tokens: int,
    blocks_max: int,
    is_held: Callable[[bytes], bool],
) -> list[StoreRun]:
    """Return the runs of blocks that are not held yet, none longer than `blocks_max`.

    `keys`: of the full blocks from the chain's beginning; `tail`: key and tokens of the partial block behind
    them.
    """
    counts = [block_tokens] * len(keys)
    chain = list(keys)
    if tail is not None:
        chain.append(tail[0])
        counts.append(tail[1])
    runs: list[StoreRun] = []
    begin: int | None = None
    for block in range(len(chain) + 1):
        wanted = block < len(chain) and not is_held(chain[block])
        if begin is not None and (not wanted or block - begin == blocks_max):
            runs.append(StoreRun(begin, tuple(chain[begin:block]), tuple(counts[begin:block])))
            begin = None
        if wanted and begin is None:
            begin = block
    return runs


@dataclass(frozen=True, slots=True)
class Origin:
    """Namespace, owner and placement of blocks to store, and the tiers' state when the turn began."""

    namespace: bytes
    tenant: bytes
    session: bytes
    placement: Placement
    incarnation: str
    clear_seq: int
    created_unix_s: float
    trace: str = ""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Work for the store thread: runs with parents, pages and recompute times. `written`: see `PageIo`."""

    origin: Origin
    runs: tuple[StoreRun, ...]
    parents: tuple[bytes, ...]
    pages: tuple[tuple[int, ...], ...]
    recompute_s: tuple[float, ...]
    written: CopyEvent


def sealed_record(
    run: StoreRun,
    parent: bytes,
    pages: Listing[int],
    origin: Origin,
    shape: BlockShape,
    io: PageIo,
    written: CopyEvent,
    copied: Callable[[], None] = lambda: None,
) -> tuple[Bytes, ExtentHeader]:
    """Return the record of one run, in memory of its own. For a worker thread: it waits for the copy.

    `copied` is called when the pages are not needed any more.
    Only computed slots are stored: a partial block's slots behind them hold old content of the page, perhaps
    of another tenant, and are zeroed (G2 and G6 in docs/guarantees.md).
    """
    start = header_bytes(len(run.keys), shape.layers)
    record = io.empty(start + len(run.keys) * shape.block_bytes)
    payload = record[start:]
    io.begin_out(pages, payload, written).wait()
    copied()
    io.geometry.blank_behind(payload[-shape.block_bytes :], run.token_counts[-1])
    header = seal(
        record,
        namespace=origin.namespace,
        tenant=origin.tenant,
        session=origin.session,
        shape=shape,
        parent=parent,
        first_block=run.first,
        keys=run.keys,
        token_counts=run.token_counts,
        placement=origin.placement,
        created_unix_s=origin.created_unix_s,
    )
    return record, header


def stage(
    job: StoreJob, *, shape: BlockShape, io: PageIo, outbox: StagingBuffer, copied: Callable[[], None]
) -> list[StoreRequest]:
    """Put the records of the leading runs into the outbox while there is room. Calls `copied` once.

    Stops at the first run without room: blocks behind a gap would never be found. Runs on a worker thread;
    the pages must stay referenced until `copied` is called.
    """
    offers: list[StoreRequest] = []
    try:
        for place, run in enumerate(job.runs):
            record, header = sealed_record(
                run, job.parents[place], job.pages[place], job.origin, shape, io, job.written
            )
            ticket = outbox.put(record)
            if ticket is None:
                break
            offers.append(
                StoreRequest(
                    ticket=ticket,
                    header=header,
                    nbytes=record.nbytes,
                    incarnation=job.origin.incarnation,
                    clear_seq=job.origin.clear_seq,
                    recompute_s=job.recompute_s[place],
                    trace=job.origin.trace,
                )
            )
    except BaseException:
        for offer in offers:
            outbox.drop(offer.ticket)
        raise
    finally:
        copied()
    return offers


def offer_staged(offers: Listing[StoreRequest], outbox: StagingBuffer, link: TierLink) -> list[str]:
    """Offer staged records to the tiers; return an outcome for each: `taken`, `held` or `refused:...`."""
    outcomes = ["refused:error"] * len(offers)
    try:
        outcomes = list(link.offer(offers).outcomes)
    finally:
        for offer, outcome in zip(offers, outcomes, strict=True):
            if outcome != "taken":
                outbox.drop(offer.ticket)
    return outcomes


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Namespace, owner and placement of a session's blocks, and the tiers' state at its last turn's start.

    `incarnation`, `clear_seq`: as in `LookupResult`. With them the tiers refuse an offer that a clear has
    overtaken, even a clear that did not reach this replica. `trace`: of the request that they are stored for.
    `stores_all`: whatever computing them again costs.
    """

    namespace: bytes
    owner: bytes
    placement: Placement
    incarnation: str
    clear_seq: int
    trace: str = ""
    stores_all: bool = False


@dataclass(frozen=True, slots=True)
class StoredChain:
    """A chain of blocks in the pool: `pages` hold the blocks with these `keys`, from the chain's beginning.

    A partial block may follow.
    """

    provenance: StoreContext
    keys: Listing[bytes]
    pages: Listing[int]


class _Rest:
    """What of a chain waits for room: `runs`, the first one first.

    Of its pages only those are referenced that the pool does not know (`held`: a partial block's); another
    sequence may take the others at any time.
    """

    def __init__(self, chain: StoredChain, runs: Listing[StoreRun], pool: PagePool) -> None:
        self.chain = chain
        self.runs = deque(runs)
        self._index = pool.index
        end = runs[-1].end
        self._entries: list[PrefixEntry | None] = [pool.index.of_page(page) for page in chain.pages[:end]]
        self.held = [chain.pages[at] for at, entry in enumerate(self._entries) if entry is None]

    def intact_blocks(self) -> int:
        """Return how many of the chain's leading blocks their pages still hold."""
        for at, entry in enumerate(self._entries):
            if entry is not None and self._index.of_page(self.chain.pages[at]) is not entry:
                return at
        return len(self._entries)


def largest_extent_bytes(settings: TierSettings, shape: BlockShape) -> int:
    """Return the bytes of the largest record that a turn is stored as: of one block, where that is larger."""
    return max(settings.extent_bytes_max, record_bytes(1, shape))


class StoreResults:
    """What became of runs of blocks. `outcomes` and `tokens`: counts of runs by result, and of their tokens.

    `fates`: of the latest blocks, so that a turn that computes them again can say why.
    """

    def __init__(self, blocks_max: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.fates = BlockFates(blocks_max)

    def became(self, runs: Iterable[StoreRun], outcome: str, of: StoredChain, detail: str = "") -> None:
        """Count runs by what became of them, and remember it."""
        for run in runs:
            self.outcomes[outcome] += 1
            self.tokens[outcome] += run.tokens
            self.fates.became(run.keys, outcome, of.provenance.owner, detail)


class StoreWorth:
    """Decides which runs are worth storing, by the prices of loading and of computing."""

    def __init__(
        self, results: StoreResults, shape: BlockShape, settings: TierSettings, meter: PrefillMeter
    ) -> None:
        self.doubt = Doubt(largest_extent_bytes(settings, shape))
        self._results = results
        self._shape = shape
        self._meter = meter

    def that_pay(
        self, runs: Listing[StoreRun], chain: StoredChain, prices: Mapping[LoadSource, TierPrice]
    ) -> list[StoreRun]:
        """Return all runs of a chain if loading the chain will be cheaper than computing it.

        Else the leading ones that are stored to prove the price of a load: without those before them others
        would never be found.
        """
        of = chain.provenance
        up = [
            price
            for tier, price in prices.items()
            if tier != "peer" and price.is_up and of.placement.allows(tier)
        ]
        if not runs or (up and of.stores_all):
            return list(runs)
        if not up:
            self._results.became(runs, "skipped:no tier", chain)
            return []
        nbytes = runs[-1].end * self._shape.block_bytes
        tokens = runs[-1].first * self._shape.block_tokens + runs[-1].tokens
        known = [
            price for price in up if price.is_known
        ] or up  # a tier that was never loaded from is not free
        cheapest = min(known, key=lambda price: price.seconds(nbytes))
        new_bytes = [len(run.keys) * self._shape.block_bytes for run in runs]
        self.doubt.decided(sum(new_bytes))
        prefill = self._meter.price
        if worth_storing(tokens, nbytes, prefill, cheapest):
            return list(runs)
        tried = self.doubt.leading((nbytes, cheapest) for nbytes in new_bytes)
        why = prices_in_words(tokens, nbytes, prefill, cheapest)
        self._results.became(runs[tried:], "skipped:price", chain, why)
        return list(runs[:tried])


class TurnStore:
    """Stores turns of one replica."""

    def __init__(
        self,
        access: TierAccess,
        arrivals: CompletionQueue,
        *,
        io: PageIo,
        pool: PagePool,
        shape: BlockShape,
        settings: TierSettings,
        meter: PrefillMeter,
    ) -> None:
        self.results = StoreResults(settings.policy.remembered_blocks_max)
        self._link = access.link
        self._outbox = access.outbox
        self._io = io
        self._pool = pool
        self._shape = shape
        self._settings = settings
        self._meter = meter
        self._lanes = access.lanes
        self._arrivals = arrivals
        self._wall_clock = access.wall_clock
        self._storing: dict[int, list[int]] = {}  # job -> pages referenced for it
        self._copying: dict[int, int] = {}  # job -> bytes being copied
        self._offering = 0
        self._waiting: list[_Rest] = []  # longest first
        self._outbox.freed = self._freed
        self._job = 0
        self._blocks_max = max(1, settings.extent_bytes_max // shape.block_bytes)
        self._worth = StoreWorth(self.results, shape, settings, meter)

    @property
    def is_settled(self) -> bool:
        """Whether no page is being copied and no staged record waits to be fetched."""
        # The outbox first: what has expired there leaves it now, and makes room for what waits.
        return len(self._outbox) == 0 and not (self._storing or self._offering or self._waiting)

    @property
    def staged_bytes(self) -> int:
        return self._outbox.nbytes

    @property
    def is_copying(self) -> bool:
        """Whether pages are held until they are copied."""
        return bool(self._storing)

    def pages_held(self) -> list[list[int]]:
        """Return the pages held to be copied out, one list per job; each is referenced once."""
        return [*self._storing.values(), *(rest.held for rest in self._waiting)]

    def store(self, sequence: Sequence) -> None:
        """Store the blocks that no tier has. Call before the scheduler releases the pages."""
        offload_state = sequence.offload_state
        if offload_state is None:
            return
        keys, tail = chain_of(sequence, self._shape.block_tokens)
        if sequence.is_cleared:
            self.results.fates.became(keys, "cleared", sequence.owner)
            return
        if offload_state.found is None:
            self.results.outcomes["skipped:not looked up"] += 1
            self.results.fates.left_alone(keys, "skipped:not looked up", sequence.owner)
            return
        held = held_keys(offload_state.found, sequence.keys)
        self.results.fates.became([key for key in keys if key in held], "held", sequence.owner)
        held |= offload_state.offered
        stored_for = replace(
            provenance_of(sequence, offload_state, offload_state.found), trace=offload_state.trace
        )
        chain = StoredChain(stored_for, keys, sequence.pages)
        offload_state.offered |= self.offer_chain(chain, tail, held, offload_state.found.prices)

    def gave_up(self, sequence: Sequence) -> None:
        """Note that an answer ended early: its blocks are not stored. Call before its pages are released."""
        if sequence.offload_state is not None:
            # One that waits to get its pages back has computed its prompt before.
            computed = max(sequence.computed, sequence.prompt_tokens if sequence.is_reported else 0)
            keys = sequence.keys_of(computed // self._shape.block_tokens, self._shape.block_tokens)
            outcome = "cleared" if sequence.is_cleared else "skipped:ended early"
            self.results.fates.left_alone(keys, outcome, sequence.owner)

    def offer_chain(
        self,
        chain: StoredChain,
        tail: tuple[bytes, int] | None,
        held: AbstractSet[bytes],
        prices: Mapping[LoadSource, TierPrice],
    ) -> set[bytes]:
        """Store the blocks of a chain that are not `held` and are worth it; return their keys.

        `tail`: key and tokens of the partial block behind the full ones. The pages must be published or
        referenced now. What finds no room waits for it, up to `store_queue_max` chains and stores.
        """
        waited = self._supersede(chain)
        runs = store_runs(
            chain.keys,
            tail,
            block_tokens=self._shape.block_tokens,
            blocks_max=self._blocks_max,
            # Choices of one prompt take each other's blocks for offered: what only waited is none of these.
            is_held=lambda key: key in held and key not in waited,
        )
        runs = self._worth.that_pay(runs, chain, prices)
        for run in runs:
            self.results.fates.became(run.keys, "storing", chain.provenance.owner)
        fitting = self._that_fit(runs)
        if fitting and not self._submit(chain, fitting):
            return set()
        taken = fitting + self._wait_for_room(chain, runs[len(fitting) :])
        return {key for run in taken for key in run.keys}

    def yield_pages(self) -> bool:
        """Give up what waits for room if a request waits for its pages; return whether pages came free."""
        some = [rest for rest in self._waiting if rest.held]
        for rest in some:
            self._give_up(rest.chain, "dropped:evicted")
        return bool(some)

    def refill(self) -> None:
        """Store what has waited for room, as far as there is room now, and forget what the pool has lost."""
        for rest in list(self._waiting):
            blocks = rest.intact_blocks()
            runs = [run for run in self._that_fit(rest.runs) if run.end <= blocks]
            for _ in runs:
                rest.runs.popleft()
            if runs and not self._submit(rest.chain, runs):
                continue
            if rest.runs and rest.runs[0].end > blocks:
                self._give_up(rest.chain, "dropped:evicted")
            elif rest.runs:
                return
            else:
                self._forget(rest)

    def _freed(self) -> None:
        """Look for what waits, on the engine's thread. Called from any thread."""
        if self._waiting:
            self._arrivals.post(self.refill)

    def _wait_for_room(self, chain: StoredChain, runs: Listing[StoreRun]) -> list[StoreRun]:
        """Keep in mind what found no room; return it, or nothing, if it never can or too many wait."""
        if not runs:
            return []
        largest = max(record_bytes(len(run.keys), self._shape) for run in runs)
        is_full = len(self._waiting) + len(self._storing) >= self._settings.store_queue_max
        if is_full or largest > self._settings.staged_bytes_max:
            self.results.became(runs, "dropped:staged", chain)
            return []
        rest = _Rest(chain, runs, self._pool)
        self._pool.acquire(*rest.held)
        self._waiting.append(rest)
        self.refill()  # a record may have been fetched before this chain waited
        return list(runs)

    def _supersede(self, chain: StoredChain) -> set[bytes]:
        """Forget what waits of a chain that this one repeats or extends; return its keys: it offers them."""
        keys = set(chain.keys) if self._waiting else set()
        waited: set[bytes] = set()
        for rest in list(self._waiting):
            if rest.chain.keys and rest.chain.keys[-1] in keys:
                waited.update(key for run in rest.runs for key in run.keys)
                self._forget(rest)
        return waited

    def _give_up(self, chain: StoredChain, reason: str) -> None:
        """Forget what waits of a chain: blocks behind a gap would never be found."""
        for rest in [rest for rest in self._waiting if rest.chain is chain]:
            self.results.became(rest.runs, reason, chain)
            self._forget(rest)

    def _forget(self, rest: _Rest) -> None:
        self._waiting.remove(rest)
        self._pool.release(rest.held)

    def has_room(self, blocks: int, *, or_none_staged: bool) -> bool:
        """Return whether this many blocks can be staged now, or, for `or_none_staged`, nothing is staged.

        The latter lets a chain that is larger than the whole staging memory use all of it.
        """
        room = self._room_bytes
        is_empty = room >= self._settings.staged_bytes_max
        return (or_none_staged and is_empty) or room >= record_bytes(blocks, self._shape)

    @property
    def _room_bytes(self) -> int:
        if len(self._storing) >= self._settings.store_queue_max:
            return 0
        return self._settings.staged_bytes_max - self._outbox.nbytes - sum(self._copying.values())

    def _that_fit(self, runs: Iterable[StoreRun]) -> list[StoreRun]:
        """Return the leading runs that fit into the staging memory: a prefix is useful, too."""
        room = self._room_bytes
        fitting = []
        for run in runs:
            room -= record_bytes(len(run.keys), self._shape)
            if room < 0:
                break
            fitting.append(run)
        return fitting

    def _submit(self, chain: StoredChain, runs: list[StoreRun]) -> bool:
        """Begin to copy and stage runs of a chain; False: no thread can, and what waits of it is given up."""
        bt, price, of = self._shape.block_tokens, self._meter.price, chain.provenance
        tags = of.owner[:TAG_BYTES], of.owner[TAG_BYTES:]
        origin = Origin(
            of.namespace, *tags, of.placement, of.incarnation, of.clear_seq, self._wall_clock(), of.trace
        )
        pages = tuple(tuple(chain.pages[run.first : run.first + len(run.keys)]) for run in runs)
        # From the chain's beginning: released later than its parents, a block would outlive them in the pool,
        # and a block without its parents is never found.
        held = list(chain.pages[: runs[-1].end])
        self._pool.acquire(*held)
        self._job += 1
        self._storing[self._job] = held
        self._copying[self._job] = sum(record_bytes(len(run.keys), self._shape) for run in runs)
        job = StoreJob(
            origin=origin,
            runs=tuple(runs),
            parents=tuple(chain.keys[run.first - 1] if run.first else ROOT for run in runs),
            pages=pages,
            recompute_s=tuple(price.added_seconds(run.tokens, run.first * bt) for run in runs),
            written=self._io.mark(),
        )
        if not begin(self._lanes.store, self._stage, self._job, chain, job):
            self._copied(self._job)
            self.results.became(runs, "dropped:error", chain)
            self._give_up(chain, "dropped:error")
            return False
        return True

    def _stage(self, number: int, chain: StoredChain, job: StoreJob) -> None:
        """Copy, seal and stage the records, on the store thread."""
        offers: list[StoreRequest] = []
        reason = "dropped:staged"
        try:
            offers = stage(
                job,
                shape=self._shape,
                io=self._io,
                outbox=self._outbox,
                copied=lambda: self._arrivals.post(lambda: self._copied(number)),
            )
        except Exception:  # a failed store is only dropped
            logger.exception("a store failed")
            reason = "dropped:error"
        self._arrivals.post(lambda: self._staged(chain, job.runs, offers, reason))

    def _copied(self, number: int) -> None:
        self._pool.release(self._storing.pop(number))
        del self._copying[number]

    def _staged(
        self, chain: StoredChain, runs: Listing[StoreRun], offers: list[StoreRequest], reason: str
    ) -> None:
        """Offer the leading runs that were staged; the others were dropped for `reason`."""
        runs, dropped = runs[: len(offers)], runs[len(offers) :]
        if dropped:
            self.results.became(dropped, reason, chain)
            self._give_up(chain, reason)
        if not offers:
            self.refill()  # what it was to take is free again
            return
        # On its own thread: an actor that does not answer must not delay the copying of pages.
        self._offering += 1
        if not begin(self._lanes.offer, self._offer, chain, runs, offers):
            self._offering -= 1
            self.results.became(runs, "dropped:error", chain)
            self._give_up(chain, "dropped:error")
            for offer in offers:
                self._outbox.drop(offer.ticket)

    def _offer(self, chain: StoredChain, runs: Listing[StoreRun], offers: list[StoreRequest]) -> None:
        """Offer the staged records, on the offer thread."""
        outcomes = ["refused:error"] * len(offers)
        try:
            outcomes = offer_staged(offers, self._outbox, self._link)
        except Exception:  # a failed store is only dropped
            logger.exception("an offer failed")
        self._arrivals.post(lambda: self._offered(chain, runs, outcomes))

    def _offered(self, chain: StoredChain, runs: Listing[StoreRun], outcomes: list[str]) -> None:
        self._offering -= 1
        for run, outcome in zip(runs, outcomes, strict=True):
            self.results.became([run], outcome, chain)
            if outcome.startswith("refused") and outcome != "refused:busy":  # busy: it is on its way already
                self._give_up(chain, outcome)
        self.refill()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._waiting) <= self._settings.store_queue_max, "more stores wait than may"
        assert all(rest.runs for rest in self._waiting), "a store waits for nothing"
        self._worth.doubt.check_integrity()
        self._outbox.check_integrity()
        self.results.fates.check_integrity()


def prices_in_words(tokens: int, nbytes: int, prefill: PrefillPrice, load: TierPrice) -> str:
    """Return what a token of a chain costs to compute and to load, as `worth_storing` compares them."""
    computing_us = prefill.added_seconds(tokens, 0) / tokens * 1e6
    loading_us = nbytes / load.bytes_per_s / tokens * 1e6
    return f"computing {in_digits(computing_us)} us a token, loading {in_digits(loading_us)}"


def provenance_of(sequence: Sequence, offload_state: OffloadState, found: LookupResult) -> StoreContext:
    """Return the store context of a sequence's blocks."""
    return StoreContext(
        sequence.namespace,
        sequence.owner,
        offload_state.placement,
        found.incarnation,
        found.clear_seq,
        stores_all=offload_state.stores_all,
    )


def chain_of(sequence: Sequence, block_tokens: int) -> tuple[list[bytes], tuple[bytes, int] | None]:
    """Return the keys of the computed full blocks, and (key, tokens) of the partial one behind them.

    The slot of the last sampled token is not computed and is in neither.
    """
    full, rest = divmod(sequence.computed, block_tokens)
    keys = sequence.keys_of(full, block_tokens)
    if not rest:
        return keys, None
    ids: array[int] = sequence.tokens[full * block_tokens : full * block_tokens + rest]
    return keys, (block_key(sequence.namespace, keys[-1] if keys else ROOT, ids), rest)
