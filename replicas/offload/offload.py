"""The engine's client of the cache tiers: lookup, load before prefill, swap, handover; `store.py` stores.

Runs on the engine's thread. Blocking work (calls, checksums, copies) runs in worker threads; `collect` takes
in their results between two steps. Only verified bytes are copied into a page, and a sequence computes on
when they are there. A tier that is late, wrong, full or dead costs a recompute, never a request (G9 in
docs/guarantees.md).
`cache_tiers/pricing/load_plan.py` decides which blocks to load.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks import (
    ROOT,
    TAG_BYTES,
    TOP_TIER,
    BadRecord,
    BlockShape,
    Bytes,
    Placement,
    block_key,
    record_bytes,
)
from samovar.cache_tiers.messages import Fetch, FetchFailed, Lookup, LookupResult
from samovar.cache_tiers.pricing import Doubt, LoadPiece, PrefillMeter, TierMeter, TierPrice, plan_load
from samovar.configs.sections import TierSettings
from samovar.replicas.kv import CopyEvent, PageIo, PagePool, PrefixEntry
from samovar.replicas.messages import GenerateRequest
from samovar.replicas.offload.load import (
    Expected,
    LoadedBlocks,
    PageMoves,
    PieceLoad,
    PieceLoads,
    Suspect,
    unpack,
)
from samovar.replicas.offload.lookups import LoadCut, TierLookups, cuts_of, held_keys
from samovar.replicas.offload.store import (
    Origin,
    StoreContext,
    StoredChain,
    StoreRun,
    TurnStore,
    chain_of,
    largest_extent_bytes,
    sealed_record,
)
from samovar.replicas.offload.tier_client import CompletionQueue, TierLink, TierReporter, TurnReporter, begin
from samovar.replicas.scheduling import OWN, OffloadState, Restore, RestorePiece, Sequence

logger = logging.getLogger(__name__)


class Restores:
    """Loads of blocks from the tiers into the pages of sequences that run.

    `swap`: what is held aside for them. `under_way`: the loads by sequence; `touched`: sequences whose loads
    have come or failed; `misses`: blocks that were not loaded, by reason, and slow lookups.
    """

    def __init__(
        self,
        loads: PieceLoads,
        moves: PageMoves,
        swap: SwapSpace,
        reports: TierReporter,
        *,
        shape: BlockShape,
        settings: TierSettings,
        meter: PrefillMeter,
        clock: Callable[[], float],
    ) -> None:
        self.loads = loads
        self.moves = moves
        self.swap = swap
        self.reports = reports
        self.shape = shape
        self.settings = settings
        self.meter = meter
        self.clock = clock
        self.doubt = Doubt(largest_extent_bytes(settings, shape))
        self.decisions: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.under_way: dict[Sequence, Restore] = {}
        self.touched: dict[Sequence, None] = {}

    def plan(self, sequence: Sequence, resident_tokens: int, step_s: float) -> None:
        """Decide what is loaded behind `resident_tokens`, and begin; `step_s`: what waiting costs it."""
        offload_state = sequence.offload_state
        if offload_state is None or offload_state.found is None or sequence.is_cleared:
            return
        bt = self.shape.block_tokens
        missing_blocks = (sequence.reusable - resident_tokens) // bt
        self.doubt.decided(missing_blocks * self.shape.block_bytes)
        offload_state.planned_from = resident_tokens
        cuts = cuts_of(sequence, offload_state.found, bt, resident_tokens // bt)
        if not cuts:
            return
        pieces = {
            LoadPiece(cut.first * bt, cut.tokens, record_bytes(len(cut.keys), self.shape), cut.tier): cut
            for cut in cuts
        }
        plan = plan_load(
            prompt_tokens=len(sequence.tokens),
            resident_tokens=resident_tokens,
            pieces=list(pieces),
            prices=offload_state.found.prices,
            prefill=self.meter.price,
            parallel=self.settings.io_threads,
            hedge_factor=self.settings.hedge_factor,
            hedge_slack_s=self.settings.hedge_slack_s,
            step_s=step_s,
            doubt=self.doubt,
        )
        if plan.decision == "none":
            return
        now_s = self.clock()
        # The wait for the lookup counts: no request waits for longer than it would take to compute, unless
        # the operator rather waits.
        patience_s = max(1.0, self.settings.lookup_share) * max(offload_state.recompute_s, plan.recompute_s)
        hedge_after_s = min(plan.hedge_after_s, max(0.0, patience_s - offload_state.waited_s))
        chosen = [(RestorePiece(p.first_token, p.end, p.tier, p.nbytes), pieces[p]) for p in plan.pieces]
        if plan.decision == "recompute":
            chosen = []
        restore = Restore(
            pieces=sorted((piece for piece, _ in chosen), key=lambda piece: piece.start),
            block_tokens=bt,
            decision=plan.decision,
            waits=plan.decision == "load",
            started_s=now_s,
            hedge_at_s=now_s + hedge_after_s,
            load_price_s=plan.load_s,
            recompute_price_s=plan.recompute_s,
        )
        sequence.restore = restore
        self.decisions[plan.decision] += 1
        if chosen:
            self.under_way[sequence] = restore
        read = self.moves.mark()
        for piece, cut in chosen:
            self._fetch(sequence, restore, piece, cut, read)

    def _fetch(
        self, sequence: Sequence, restore: Restore, piece: RestorePiece, cut: LoadCut, read: CopyEvent
    ) -> None:
        fetch = piece.fetch = Fetch(
            namespace=sequence.namespace,
            tenant=cut.tenant,
            extent_id=cut.extent_id,
            offset=cut.offset,
            blocks=len(cut.keys),
            tier=cut.tier,
            deadline_s=self.settings.load_s_max,
            node=cut.node,
            trace="" if sequence.offload_state is None else sequence.offload_state.trace,
        )
        expected = Expected(sequence.namespace, self.shape, cut.first, cut.keys, cut.token_counts)
        self.loads.fetch(self.load_of(sequence, restore, piece, read, cut.keys), fetch, expected)

    def load_of(
        self,
        sequence: Sequence,
        restore: Restore,
        piece: RestorePiece,
        read: CopyEvent,
        keys: tuple[bytes, ...] = (),
    ) -> PieceLoad:
        """Return the load of a piece, into the pages that it has now, behind `read`."""
        bt = self.shape.block_tokens
        pages = tuple(sequence.pages[piece.start // bt : -(-piece.end // bt)])
        return PieceLoad(restore, piece, pages, read, partial(self._over, sequence, restore, piece, keys))

    def _over(
        self,
        sequence: Sequence,
        restore: Restore,
        piece: RestorePiece,
        keys: tuple[bytes, ...],
        result: LoadedBlocks | FetchFailed,
        failure: BaseException | None,
    ) -> None:
        """Use what was copied into a sequence's pages, unless it has lost them meanwhile."""
        if failure is not None:
            raise failure
        self.moves.let_go(piece)
        if isinstance(result, FetchFailed):
            self._missed(piece, result.reason)
            restore.failed(piece, result.reason)
        else:
            self._came(sequence, piece, keys, result)
            if result.bad is not None and result.good:
                restore.miss = restore.miss or "bad"
            if piece.state == "moving" and sequence.restore is restore:
                restore.placed(piece, self.clock())
            restore.failed(piece, "late" if result.good else "bad")  # where that is not decided
        if piece.source == OWN and sequence.restore is restore:
            if piece.state == "placed":
                self.swap.meter.observe(piece.nbytes, piece.landed_s - restore.started_s)
            self.swap.drop(sequence)
        self._touch(sequence, restore)

    def _missed(self, piece: RestorePiece, reason: str) -> None:
        if piece.fetch is None:
            return
        if reason == "timeout":  # a lower bound of its time
            piece.arrived_s = self.clock()
        self.misses[reason] += piece.fetch.blocks

    def _came(
        self, sequence: Sequence, piece: RestorePiece, keys: tuple[bytes, ...], loaded: LoadedBlocks
    ) -> None:
        """Note what a load says of its source."""
        fetch = piece.fetch
        if fetch is None:
            if loaded.bad is not None:
                self.reports.verify_failures[f"{OWN}:{loaded.bad}"] += 1
            return
        if loaded.is_kept and sequence.offload_state is not None:
            sequence.offload_state.offered.update(
                keys
            )  # fetched from another node and kept here: not stored again
        if loaded.tier is not None and loaded.tier != fetch.tier:
            piece.source = loaded.tier
            piece.fetch = fetch = replace(fetch, tier=loaded.tier)
        if loaded.bad is not None:
            self.reports.bad(fetch, loaded.bad)

    def _touch(self, sequence: Sequence, restore: Restore) -> None:
        if sequence.restore is restore:
            self.touched[sequence] = None
        if restore.is_over and not restore.is_reported:
            restore.is_reported = True
            self.reports.loads(restore, self.settings.io_threads)
            if self.under_way.get(sequence) is restore:
                del self.under_way[sequence]


class Offload:
    """Coordinates lookups, loads, swaps and stores of one engine.

    Call `collect` when `arrivals` wakes, and after `wake_in_s`.
    """

    def __init__(
        self,
        *,
        link: TierLink,
        lookups: TierLookups,
        restores: Restores,
        turns: TurnStore,
        handover: Handover,
        arrivals: CompletionQueue,
        reporter: TurnReporter,
    ) -> None:
        self.link = link
        self.restores = restores
        self.turns = turns
        self.handover = handover
        self.reporter = reporter
        self.arrivals = arrivals
        self.moves = restores.moves
        self.swap = restores.swap
        self.reports = restores.reports
        self.is_engine_idle = False  # nothing can be computed before something arrives
        self._lookups = lookups
        self._shape = restores.shape
        self._clock = restores.clock

    def open(self, sequence: Sequence, request: GenerateRequest, *, is_queued: bool = False) -> None:
        """Start the tier lookup of a prompt; the request waits for it where that may pay.

        `is_queued`: the request cannot be admitted at once.
        """
        if request.placement is None:
            return
        sequence.offload_state = OffloadState(
            request.placement,
            opened_s=self._clock(),
            trace=request.trace,
            stores_all=request.stores_all,
        )
        bt = self._shape.block_tokens
        keys = sequence.keys_of((len(sequence.tokens) - 1) // bt, bt)
        # Now: when the prompt is computed, another turn of the session may have ended.
        sequence.offload_state.known = self.turns.results.fates.of(keys)
        resident = len(self.moves.pool.match(keys, sequence.tokens)) * bt
        self._lookups.open(sequence, request, resident_tokens=resident, is_queued=is_queued)

    def prompt_computed(self, sequence: Sequence) -> None:
        """Note that a prompt is computed; without its lookup's answer, that lookup was slow."""
        if self._lookups.computed(sequence):
            self.restores.misses["slow lookup"] += 1

    def plan_restore(self, sequence: Sequence) -> None:
        """Set `sequence.restore` and start its loads. The scheduler calls it at every admission."""
        sequence.restore = None
        swapped = self.swap.get(sequence)
        if swapped is not None:
            self._swap_in(sequence, swapped)
            return
        self.restores.plan(sequence, sequence.computed, sequence.shared_step_s)

    def _plan_late(self, sequence: Sequence) -> None:
        """Plan for a sequence that is being computed: its lookup's answer came late, or is not complete.

        What is computed by now stays; what is loaded begins with the next whole block.
        """
        bt = self._shape.block_tokens
        resident = -(-sequence.computed // bt) * bt
        has_plan = sequence.restore is not None and bool(sequence.restore.pieces)
        if sequence.pages and not has_plan and resident < len(sequence.tokens):
            self.restores.plan(sequence, resident, 0.0)

    def swap_out(self, sequence: Sequence, pages: Listing[int]) -> bool:
        """Begin to copy a preempted sequence's computed blocks aside; False if there is no room."""
        if self.swap.get(sequence) is not None:
            return True  # preempted again before it had its blocks back: it has computed none since
        bt = self._shape.block_tokens
        keys, tail = chain_of(sequence, bt)
        counts = [bt] * len(keys) + ([tail[1]] if tail else [])
        run = StoreRun(0, (*keys, *((tail[0],) if tail else ())), tuple(counts))
        if not run.keys:
            return False
        some = list(pages[: len(run.keys)])
        swapped = self.swap.reserve(sequence, run)
        if swapped is None:
            return False
        shape, io, clock = self._shape, self.moves.io, self._clock

        def take(written: CopyEvent, copied: Callable[[], None]) -> tuple[Bytes, float]:
            began_s = clock()
            record = swap_record(sequence, run, some, shape, io, written, copied)
            return record, clock() - began_s

        self.moves.take_out(some, take, partial(self._swapped_out, sequence, swapped))
        return True

    def _swapped_out(
        self, sequence: Sequence, swapped: SwappedBlocks, taken: tuple[Bytes, float] | None
    ) -> None:
        if taken is not None:
            self.swap.meter.observe(swapped.nbytes, taken[1])
        if self.swap.get(sequence) is not swapped:
            return  # its request has ended
        restore = sequence.restore
        if taken is None:
            self.swap.drop(sequence)
        else:
            swapped.record = taken[0]
        if restore is not None and restore.pieces and restore.pieces[0].source == OWN:
            self._check_swapped(sequence, restore, swapped)

    def _swap_in(self, sequence: Sequence, swapped: SwappedBlocks) -> None:
        """Plan to bring the blocks back; they may still be on their way out."""
        bt, run = self._shape.block_tokens, swapped.run
        first = sequence.computed // bt
        end = min(run.tokens, len(sequence.tokens) - 1)
        if end <= first * bt:
            self.swap.drop(sequence)  # all of it is in the pool again
            return
        nbytes = (len(run.keys) - first) * self._shape.block_bytes
        piece = RestorePiece(first * bt, end, OWN, nbytes)
        now_s = self._clock()
        restore = Restore([piece], bt, "none", waits=True, started_s=now_s, hedge_at_s=math.inf)
        sequence.restore = restore
        if swapped.record is not None:
            self._check_swapped(sequence, restore, swapped)

    def _check_swapped(self, sequence: Sequence, restore: Restore, swapped: SwappedBlocks) -> None:
        """Verify swapped blocks in a worker thread, and copy them into their pages."""
        (piece,) = restore.pieces
        record, shape = swapped.record, self._shape
        first = piece.start // shape.block_tokens
        load = self.restores.load_of(sequence, restore, piece, self.moves.mark())
        restore.started_s = self._clock()  # not before: it may have been on its way out until now

        def check(record: Bytes) -> None:
            try:
                loaded = check_swapped(sequence, swapped.run, record, first, shape)
            except Exception:  # it must not leave the request waiting
                logger.exception("swapped blocks could not be checked")
                self.arrivals.post(lambda: load.over(FetchFailed("error"), None))
            else:
                self.restores.loads.place(load, loaded)

        if record is None or not begin(self.moves.lane, check, record):
            load.over(FetchFailed("error"), None)

    def cleared(self, tags: Collection[bytes]) -> None:
        """Record that the pages of these owners, sessions or tenants were forgotten."""
        self.turns.results.fates.cleared(tags)

    def finish(self, sequence: Sequence) -> None:
        """Store the blocks of a finished turn, before the scheduler releases the pages."""
        if sequence.offload_state is not None and sequence.offload_state.found is None:
            self.arrivals.take_in()  # in a turn of one step the lookup may have finished during it
        self.turns.store(sequence)

    def collect(self) -> list[Sequence]:
        """Take in completed work and handle late lookups and loads; return the sequences affected."""
        self.arrivals.take_in()
        now_s = self._clock()
        for sequence in self._lookups.collect(is_idle=self.is_engine_idle):
            self._plan_late(sequence)
        self.is_engine_idle = False
        for sequence, restore in self.restores.under_way.items():
            if restore.is_awaited and now_s >= restore.hedge_at_s:
                restore.hedge()
                self.restores.decisions["hedge"] += 1
                self.restores.touched[sequence] = None
        return self.take_touched()

    def take_touched(self) -> list[Sequence]:
        """Return the sequences whose loads have come or failed since the last call."""
        touched, self.restores.touched = list(self.restores.touched), {}
        return touched

    def wake_in_s(self) -> float | None:
        """Return the seconds until `collect` must be called even if nothing arrives, or None."""
        times = list(self._lookups.wake_at_s(is_idle=self.is_engine_idle))
        times += [restore.hedge_at_s for restore in self.restores.under_way.values() if restore.is_awaited]
        return max(0.0, min(times) - self._clock()) if times else None

    def stop_restore(self, sequence: Sequence) -> None:
        """Let nothing more be loaded into a sequence's pages, which it is about to lose."""
        bt, restore = self._shape.block_tokens, sequence.restore
        for piece in [] if restore is None else restore.stop():
            self.moves.keep(piece, sequence.pages[piece.start // bt : -(-piece.placed_end // bt)])

    def close(self, sequence: Sequence, *, keep_swapped: bool = False) -> None:
        """Drop the pending work of a sequence that is over or has lost its pages."""
        self.stop_restore(sequence)
        sequence.restore = None
        if not keep_swapped:
            self.swap.drop(sequence)
            if sequence.offload_state is not None:
                sequence.offload_state.is_over = True
            self._lookups.close(sequence)
        self.restores.under_way.pop(sequence, None)
        self.restores.touched.pop(sequence, None)

    def pages_leaving(self) -> int:
        """Return how many pages become available as soon as their blocks have been copied."""
        return self.moves.pages_leaving()

    def pages_held(self) -> list[list[int]]:
        """Return the pages that are being copied, one list per move or store; each is referenced once."""
        return [*self.turns.pages_held(), *self.moves.pages_held()]

    def frees_pages(self) -> bool:
        """Return whether pages come free when they have been copied, or are free now.

        Where no copy is under way, stores that wait for room give theirs up: the tiers may never make any.
        """
        if self.turns.is_copying or self.moves.pages_held():
            return True
        if not self.turns.yield_pages():
            return False
        self.arrivals.post(self.turns.refill)  # so that there is another step
        return True

    def suspects(self, sequence: Sequence) -> list[Suspect]:
        """Return the runs of a sequence that were loaded from a tier, for an audit."""
        return [
            Suspect(piece.start, piece.placed_end, partial(self.reports.bad, piece.fetch, "audit"))
            for piece in (sequence.restore.pieces if sequence.restore else [])
            if piece.state == "placed" and piece.fetch is not None
        ]

    def stats(self) -> dict[str, Any]:
        """Return these fields of `EngineStats`."""
        return {
            "decisions": dict(self.restores.decisions),
            "misses": dict(self.restores.misses),
            "slow_lookups": dict(self._lookups.slow),
            "verify_failures": dict(self.reports.verify_failures),
            "stores": dict(self.turns.results.outcomes),
            "store_tokens": dict(self.turns.results.tokens),
            "loading": len(self.restores.under_way),
            "staged_bytes": self.turns.staged_bytes,
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        for sequence, restore in self.restores.under_way.items():
            restore.check_integrity()
            assert sequence.restore is restore, "a load is under way for a sequence that forgot it"
        self._lookups.check_integrity()
        self.restores.loads.check_integrity()
        self.restores.doubt.check_integrity()
        self.turns.check_integrity()
        self.reporter.check_integrity()
        self.swap.check_integrity()


LOOKUPS_MAX = 4
"""Limit of lookups in flight."""


class Handover:
    """Hands the pool's chains to the tiers before a replica stops.

    Most blocks were offered at the end of their turn; this covers those that were not looked up then, found
    no room or have been dropped by a tier since. Highest value first: P(resumes) x seconds saved / bytes.
    Runs on the engine's thread; lookups run in `lane`.

    `horizon_s`: limit, by the pool's clock, of the resumptions that count.
    """

    def __init__(
        self,
        *,
        link: TierLink,
        pool: PagePool,
        turns: TurnStore,
        meter: PrefillMeter,
        lane: Executor,
        arrivals: CompletionQueue,
        horizon_s: float,
    ) -> None:
        self.skipped = 0
        """Chains that cannot be handed over: their owner is unknown, or the tiers do not answer."""
        self._link = link
        self._pool = pool
        self._turns = turns
        self._meter = meter
        self._lane = lane
        self._arrivals = arrivals
        self._horizon_s = horizon_s
        self._known: OrderedDict[bytes, StoreContext] = OrderedDict()  # by owner; longest untouched first
        self._chains: deque[StoredChain] = deque()
        self._entries: dict[int, PrefixEntry] = {}  # page -> its entry when the chains were listed
        self._offered: set[bytes] = set()
        self._looking = self._looking_blocks = 0

    def learned(self, provenance: StoreContext) -> None:
        """Record the tiers' answer at the start of a turn; keeps as many sessions as the pool can hold."""
        self._known[provenance.owner] = provenance
        self._known.move_to_end(provenance.owner)
        if len(self._known) > self._pool.usable:
            self._known.popitem(last=False)

    def begin(self) -> int:
        """List the pool's chains; return their number."""
        valued = []
        for entries in self._pool.index.chains():
            found = self._owner_of(entries)
            if found is None:
                self.skipped += 1
                continue
            provenance, likely = found
            tokens = len(entries) * self._pool.block_tokens
            value = likely * self._meter.price.added_seconds(tokens, 0) / len(entries)
            chain = StoredChain(provenance, [one.key for one in entries], [one.page for one in entries])
            valued.append((value, chain))
            self._entries.update((entry.page, entry) for entry in entries)
        valued.sort(key=lambda pair: pair[0], reverse=True)
        self._chains = deque(chain for _, chain in valued)
        return len(self._chains)

    def advance(self) -> int:
        """Start as many chains as may be in flight; return how many are left. Call until that is 0."""
        while self._chains and self._may_begin(self._chains[0]):
            chain = self._chains.popleft()
            of = chain.provenance
            lookup = Lookup(of.namespace, b"".join(chain.keys), of.owner[:TAG_BYTES], of.owner[TAG_BYTES:])
            if begin(self._lane, self._look, chain, lookup):
                self._looking += 1
                self._looking_blocks += len(chain.keys)
            else:
                self.skipped += 1
        return len(self._chains) + self._looking

    def _may_begin(self, chain: StoredChain) -> bool:
        """Return whether all of a chain fits beside the lookups in flight."""
        blocks = len(chain.keys) + self._looking_blocks
        has_room = self._turns.has_room(blocks, or_none_staged=self._looking == 0)
        return has_room and self._looking < LOOKUPS_MAX

    def _look(self, chain: StoredChain, lookup: Lookup) -> None:
        """Look up a chain, on a lookup thread."""
        found: LookupResult | None = None
        try:
            found = self._link.lookup(lookup)
        except Exception:  # a fault of the tiers costs only this chain
            logger.exception("a lookup failed")
        self._arrivals.post(lambda: self._found(chain, found))

    def _found(self, chain: StoredChain, found: LookupResult | None) -> None:
        self._looking -= 1
        self._looking_blocks -= len(chain.keys)
        index = self._pool.index
        if found is None or any(index.of_page(page) is not self._entries[page] for page in chain.pages):
            self.skipped += 1  # or its pages have been reused meanwhile
            return
        held = held_keys(found, chain.keys) | self._offered
        offered = self._turns.offer_chain(chain, None, held, found.prices)
        self._offered |= offered

    def _owner_of(self, entries: Listing[PrefixEntry]) -> tuple[StoreContext, float] | None:
        """Return the chain's owner who is most likely to resume, and the probability."""
        owners = sorted(self._pool.owners_of(entries[-1].page) & self._known.keys())
        first, known = entries[0], [self._known[owner] for owner in owners]
        fitting = [one for one in known if block_key(one.namespace, ROOT, first.token_ids) == first.key]
        if not fitting:
            return None
        sessions = self._pool.sessions
        slots = np.array([sessions.slot(one.owner) for one in fitting], dtype=np.intp)
        likely = sessions.probabilities(slots, self._pool.returns.now_s, self._horizon_s)
        best = int(likely.argmax())
        return fitting[best], float(likely[best])


_NOWHERE = Placement(first=TOP_TIER, write_behind=(), lowest=TOP_TIER)


def swap_record(
    sequence: Sequence,
    run: StoreRun,
    pages: Listing[int],
    shape: BlockShape,
    io: PageIo,
    written: CopyEvent,
    copied: Callable[[], None] = lambda: None,
) -> Bytes:
    """Return the sealed record of the blocks of `run`, copied out of `pages`. For a worker thread.

    `copied` is called when the pages are not needed any more.
    """
    tags = sequence.owner[:TAG_BYTES], sequence.owner[TAG_BYTES:]
    origin = Origin(sequence.namespace, tags[0], tags[1], _NOWHERE, "", 0, 0.0)
    return sealed_record(run, ROOT, pages, origin, shape, io, written, copied)[0]


def check_swapped(
    sequence: Sequence, run: StoreRun, record: Bytes, first_block: int, shape: BlockShape
) -> LoadedBlocks:
    """Return the verified blocks of a record from `first_block` on. For a worker thread."""
    keys, counts = run.keys[first_block:], run.token_counts[first_block:]
    expected = Expected(sequence.namespace, shape, first_block, keys, counts)
    try:
        payload, good = unpack(record, 0, first_block, expected)
    except BadRecord as bad:
        return LoadedBlocks(record[:0], 0, 0.0, bad.kind)
    return LoadedBlocks(payload, good, 0.0, None if good == len(keys) else "checksum")


@dataclass(slots=True, eq=False)
class SwappedBlocks:
    """The blocks of one sequence, `nbytes` as a record. `record`: None while they are being copied."""

    run: StoreRun
    nbytes: int
    record: Bytes | None = None


class SwapSpace:
    """Keeps blocks of preempted sequences in this process until they run again. For the engine's thread.

    Sealed and verified like every record: all bytes leave a page and come back the same way. At most
    `bytes_max` bytes, one record per sequence: one that finds no room loses its blocks and computes them
    again.

    `meter`: learns what one direction takes, checksums included.
    """

    def __init__(self, bytes_max: int, shape: BlockShape, meter: TierMeter) -> None:
        self.meter = meter
        self.bytes_max = bytes_max
        self._shape = shape
        self._swapped: dict[Sequence, SwappedBlocks] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def has_room(self) -> bool:
        """Whether it can hold anything."""
        return record_bytes(1, self._shape) <= self.bytes_max

    def price(self) -> TierPrice:
        """Return the price of one direction; it is not up where there is no room."""
        return self.meter.price(self.has_room)

    def get(self, sequence: Sequence) -> SwappedBlocks | None:
        return self._swapped.get(sequence)

    def reserve(self, sequence: Sequence, run: StoreRun) -> SwappedBlocks | None:
        """Make room for the blocks of `run`, in place of those that were held. None: there is not enough."""
        self.drop(sequence)
        nbytes = record_bytes(len(run.keys), self._shape)
        if self._nbytes + nbytes > self.bytes_max:
            return None
        swapped = self._swapped[sequence] = SwappedBlocks(run, nbytes)
        self._nbytes += nbytes
        return swapped

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's blocks, if there are any."""
        if sequence in self._swapped:
            self._nbytes -= self._swapped.pop(sequence).nbytes

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        held = sum(swapped.nbytes for swapped in self._swapped.values())
        assert held == self._nbytes, f"{self._nbytes} swapped bytes accounted, {held} held"
        assert self._nbytes <= self.bytes_max, "more is swapped out than there is room for"
        for swapped in self._swapped.values():
            assert swapped.record is None or swapped.record.nbytes == swapped.nbytes, (
                "a record of another size"
            )
