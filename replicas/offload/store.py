"""Stores the blocks of a finished turn that no tier has.

Runs on the engine's thread; copying and sealing run on the store thread, offering on the offer thread. The
pages stay referenced until they are copied. A store that fails is dropped and counted; no request waits for
one.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from cache_tiers.actors import StagingBuffer
from cache_tiers.blocks import (
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
from cache_tiers.messages import LookupResult, StoreRequest
from cache_tiers.pricing import PrefillMeter, TierPrice, worth_storing
from configs.sections import TierSettings
from replicas.kv import CopyEvent, PageIo, PagePool
from replicas.offload.block_runs import StoreRun, held_keys, store_runs
from replicas.offload.tier_client import CompletionQueue, TierAccess, TierLink, begin
from replicas.scheduling import OffloadState, Sequence

logger = logging.getLogger(__name__)


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
    of another tenant, and are zeroed (laws L2, L6).
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
    overtaken, even a clear that did not reach this replica.
    """

    namespace: bytes
    owner: bytes
    placement: Placement
    incarnation: str
    clear_seq: int


@dataclass(frozen=True, slots=True)
class StoredChain:
    """A chain of blocks in the pool: `pages` hold the blocks with these `keys`, from the chain's beginning.

    A partial block may follow.
    """

    provenance: StoreContext
    keys: Listing[bytes]
    pages: Listing[int]


class TurnStore:
    """Stores turns of one replica. `outcomes` counts runs of blocks by result."""

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
        self.outcomes: Counter[str] = Counter()
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
        self._job = 0
        self._blocks_max = max(1, settings.extent_bytes_max // shape.block_bytes)

    @property
    def is_settled(self) -> bool:
        """Whether no page is being copied and no staged record waits to be fetched."""
        return not self._storing and not self._offering and len(self._outbox) == 0

    @property
    def staged_bytes(self) -> int:
        return self._outbox.nbytes

    def pages_held(self) -> list[list[int]]:
        """Return the pages being copied out, one list per job; each is referenced once."""
        return list(self._storing.values())

    def store(self, sequence: Sequence) -> None:
        """Store the blocks that no tier has. Call before the scheduler releases the pages."""
        visit = sequence.visit
        if visit is None or sequence.is_cleared:
            return
        if visit.found is None:
            self.outcomes["skipped:not looked up"] += 1
            return
        held = held_keys(visit.found, sequence.keys) | visit.offered
        keys, tail = chain_of(sequence, self._shape.block_tokens)
        chain = StoredChain(provenance_of(sequence, visit, visit.found), keys, sequence.pages)
        visit.offered |= self.offer_chain(chain, tail, held, visit.found.prices)

    def offer_chain(
        self,
        chain: StoredChain,
        tail: tuple[bytes, int] | None,
        held: AbstractSet[bytes],
        prices: Mapping[LoadSource, TierPrice],
    ) -> set[bytes]:
        """Store the blocks of a chain that are not `held`, are worth it and fit; return their keys.

        `tail`: key and tokens of the partial block behind the full ones. The pages must be published or
        referenced now.
        """
        runs = store_runs(
            chain.keys,
            tail,
            block_tokens=self._shape.block_tokens,
            blocks_max=self._blocks_max,
            is_held=held.__contains__,
        )
        placement = chain.provenance.placement
        runs = self._that_fit([run for run in runs if self._is_worth(run, placement, prices)])
        if not runs:
            return set()
        self._submit(chain, runs)
        return {key for run in runs for key in run.keys}

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

    def _that_fit(self, runs: list[StoreRun]) -> list[StoreRun]:
        """Return the leading runs that fit into the staging memory: a prefix is useful, too."""
        room = self._room_bytes
        fitting = []
        for run in runs:
            room -= record_bytes(len(run.keys), self._shape)
            if room < 0:
                break
            fitting.append(run)
        if len(fitting) < len(runs):
            self.outcomes["dropped:staged"] += len(runs) - len(fitting)
        return fitting

    def _submit(self, chain: StoredChain, runs: list[StoreRun]) -> None:
        bt, price, of = self._shape.block_tokens, self._meter.price, chain.provenance
        origin = Origin(
            namespace=of.namespace,
            tenant=of.owner[:TAG_BYTES],
            session=of.owner[TAG_BYTES:],
            placement=of.placement,
            incarnation=of.incarnation,
            clear_seq=of.clear_seq,
            created_unix_s=self._wall_clock(),
        )
        pages = tuple(tuple(chain.pages[run.first : run.first + len(run.keys)]) for run in runs)
        # From the chain's beginning: released later than its parents, a block would outlive them in the pool,
        # and a block without its parents is never found.
        held = list(chain.pages[: runs[-1].first + len(runs[-1].keys)])
        for page in held:
            self._pool.acquire(page)
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
        if not begin(self._lanes.store, self._stage, self._job, job):
            self._copied(self._job)
            self.outcomes["dropped:error"] += len(runs)

    def _stage(self, number: int, job: StoreJob) -> None:
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
        self._arrivals.post(lambda: self._staged(offers, len(job.runs) - len(offers), reason))

    def _copied(self, number: int) -> None:
        self._pool.release(self._storing.pop(number))
        del self._copying[number]

    def _staged(self, offers: list[StoreRequest], dropped: int, reason: str) -> None:
        if dropped:
            self.outcomes[reason] += dropped
        if not offers:
            return
        # On its own thread: an actor that does not answer must not delay the copying of pages.
        self._offering += 1
        if not begin(self._lanes.offer, self._offer, offers):
            self._offering -= 1
            for offer in offers:
                self._outbox.drop(offer.ticket)

    def _offer(self, offers: list[StoreRequest]) -> None:
        """Offer the staged records, on the offer thread."""
        outcomes = ["refused:error"] * len(offers)
        try:
            outcomes = offer_staged(offers, self._outbox, self._link)
        except Exception:  # a failed store is only dropped
            logger.exception("an offer failed")
        self._arrivals.post(lambda: self._offered(outcomes))

    def _offered(self, outcomes: list[str]) -> None:
        self._offering -= 1
        self.outcomes.update(outcomes)

    def _is_worth(self, run: StoreRun, placement: Placement, prices: Mapping[LoadSource, TierPrice]) -> bool:
        up = [
            price
            for tier, price in prices.items()
            if tier != "peer" and price.is_up and placement.allows(tier)
        ]
        cheapest = min(up, key=lambda price: price.seconds(self._shape.block_bytes), default=None)
        if cheapest is None:
            cheapest = TierPrice(0.0, 1.0, is_up=False)
        nbytes = len(run.keys) * self._shape.block_bytes
        first_token = run.first * self._shape.block_tokens
        if worth_storing(first_token, run.tokens, nbytes, self._meter.price, cheapest):
            return True
        self.outcomes["skipped:price" if cheapest.is_up else "skipped:no tier"] += 1
        return False

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._outbox.check_integrity()


def provenance_of(sequence: Sequence, visit: OffloadState, found: LookupResult) -> StoreContext:
    """Return the store context of a sequence's blocks."""
    return StoreContext(
        sequence.namespace, sequence.owner, visit.placement, found.incarnation, found.clear_seq
    )


def chain_of(sequence: Sequence, block_tokens: int) -> tuple[list[bytes], tuple[bytes, int] | None]:
    """Return the keys of the computed full blocks, and (key, tokens) of the partial one behind them.

    The slot of the last sampled token is not computed and is in neither (law L6).
    """
    full, rest = divmod(sequence.computed, block_tokens)
    keys = sequence.keys_of(full, block_tokens)
    if not rest:
        return keys, None
    ids: array[int] = sequence.tokens[full * block_tokens : full * block_tokens + rest]
    return keys, (block_key(sequence.namespace, keys[-1] if keys else ROOT, ids), rest)
