"""The worker's half: blocks between vLLM's pages and sealed records, each checked when it arrives.

Pages are `Pages`; what is loaded goes through no other process, and what is stored is copied once. No vLLM
and no torch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Protocol

import numpy as np

from samovar.cache_tiers.blocks import (
    TIERS,
    TOP_TIER,
    BadRecord,
    BlockShape,
    Bytes,
    LoadSource,
    TierError,
    header_bytes,
    record_bytes,
    seal,
)
from samovar.cache_tiers.media import MemoryFile, Room, SharedRecord
from samovar.cache_tiers.messages import BadReport, BlockRange, Fetch, FetchFailed, LoadReport
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.socket.messages import Offer
from samovar.cache_tiers.vllm.idle_wait import IdleWait
from samovar.cache_tiers.vllm.messages import (
    EXTENT_BYTES_MAX,
    ConnectorOptions,
    Load,
    PageLayout,
    Store,
    StoresTaken,
)
from samovar.cache_tiers.vllm.names.chain import chain_keys, rank_name
from samovar.cache_tiers.vllm.scheduler import fetch_of

logger = logging.getLogger(__name__)


class Pages(Protocol):
    """The engine's KV pages. `gather`, `scatter`: between pages and u8 `[blocks, layers, layer_bytes]`."""

    layout: PageLayout

    def gather(self, pages: Sequence[int], out: Bytes) -> None: ...
    def scatter(self, pages: Sequence[int], blocks: Bytes) -> None: ...


class WorkerCalls(Protocol):
    """See `SocketLink`."""

    def fetch(self, fetch: Fetch, room: Room | None = None) -> Loaded | FetchFailed: ...
    def offer(self, offers: Sequence[tuple[Offer, SharedRecord]]) -> tuple[str, ...]: ...
    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None: ...


class _LoadRun:
    """A load whose spans are loaded by several threads. `starts`: of each span, the load's blocks before it.

    `ends_s`: no span is fetched for longer. `good`: by number of span, once it is over, how many of its
    leading blocks are in their pages.
    """

    def __init__(self, load: Load, spans: Sequence[BlockRange], ends_s: float) -> None:
        self.load, self.spans, self.ends_s = load, spans, ends_s
        self.starts = [*itertools.accumulate((span.blocks for span in spans), initial=0)][:-1]
        self.good: dict[int, int] = {}

    @property
    def done(self) -> int:
        """The leading blocks of the whole load that are in their pages."""
        done = 0
        for number, span in enumerate(self.spans):
            done += self.good[number]
            if self.good[number] < span.blocks:
                break
        return done


class WorkerHalf:
    """Carries out loads and stores of one rank on the threads of `pool`. Thread-safe."""

    def __init__(
        self,
        options: ConnectorOptions,
        calls: WorkerCalls,
        pool: Executor,
        pages: Pages,
        *,
        block_tokens: int,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._calls = calls
        self._pool = pool
        self._pages = pages
        self._block_tokens = block_tokens
        self._rank = rank
        self._shape = BlockShape(len(pages.layout.layers), pages.layout.layer_bytes, block_tokens)
        self._record_blocks = max(1, EXTENT_BYTES_MAX // self._shape.block_bytes)
        self._own = threading.local()
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._idle = IdleWait()
        self._under_way = 0
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._bad_pages: set[int] = set()
        self._taken: dict[str, dict[int, int]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def start(self, loads: Iterable[Load], stores: Iterable[Store], until: Callable[[], None]) -> None:
        """Begin a step's loads and stores. `until`: waits, on a thread of the pool, for the step's KV."""
        loads, stores = list(loads), list(stores)
        ends_s = self._clock() + self._options.load_s_max  # of a load with all its spans, and their queue
        with self._lock:
            self._under_way += len(loads) + len(stores)
        for load in loads:
            run = _LoadRun(load, load.ranks[self._rank] if load.ranks else (), ends_s)
            if not run.spans:
                self._loaded(load, 0)
            for number in range(len(run.spans)):
                if not self._begin(self._load, run, number):
                    self._span_over(run, number, 0)
        for store in stores:
            if not self._begin(self._store, store, until):
                self._stored(store, "not begun")

    def finished(self, *, may_wait: bool = False) -> tuple[set[str], set[str], set[int]]:
        """Return requests whose stores and whose loads are over, and pages that could not be loaded.

        `may_wait`: the engine has nothing else to do, so that one of those under way is waited for.
        """
        if may_wait and self._under_way:
            self._idle.wait()
        with self._lock:
            found = self._sent, self._received, self._bad_pages
            self._sent, self._received, self._bad_pages = set(), set(), set()
        return found

    def taken(self) -> StoresTaken:
        """Return the stores that ended since the last call, and how many blocks the tiers have now."""
        with self._lock:
            found, self._taken = self._taken, {}
        return found

    def counted(self) -> Counter[tuple[str, str]]:
        """Return what was counted since the last call."""
        with self._lock:
            found, self._counts = self._counts, Counter()
        return found

    def _count(self, family: str, label: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[family, label] += amount

    def _begin(self, work: Callable[..., None], *args: object) -> bool:
        try:
            self._pool.submit(work, *args)
        except RuntimeError:  # it ends, or no thread can be started
            return False
        return True

    def _load(self, run: _LoadRun, number: int) -> None:
        good = 0
        try:
            good = self._load_span(run.load, run.spans[number], run.starts[number], run.ends_s)
        except Exception:  # what is not loaded is computed
            logger.exception("a load failed")
            self._count("failed_loads", "error")
        self._span_over(run, number, good)

    def _span_over(self, run: _LoadRun, number: int, good: int) -> None:
        with self._lock:
            run.good[number] = good
            is_over = len(run.good) == len(run.spans)
        if is_over:  # not before: until then a thread may still write to the pages of any
            self._loaded(run.load, run.done)

    def _load_span(self, load: Load, span: BlockRange, done: int, ends_s: float) -> int:
        """Return how many blocks of a span are in their pages, and what they should be."""
        began_s = self._clock()
        if began_s >= ends_s:
            self._count("failed_loads", "late")
            return 0
        namespace = rank_name(load.namespace, self._rank)
        room = self._room() if span.tier in TIERS.local and span.tier != TOP_TIER else None
        reply = self._calls.fetch(fetch_of(namespace, span, ends_s - began_s), room)
        if isinstance(reply, FetchFailed):
            self._count("failed_loads", reply.reason)
            return 0
        tier: LoadSource = reply.found.tier or span.tier
        keys = [rank_name(key, self._rank) for key in load.keys[done : done + span.blocks]]
        try:
            payload, good = reply.checked(namespace, self._shape, span.offset, load.first + done, keys)
        except BadRecord as error:
            self._bad(load, span, tier, error.kind)
            return 0
        if good:
            rows = payload[: good * self._shape.block_bytes]
            self._pages.scatter(
                load.pages[done : done + good],
                rows.reshape(good, self._shape.layers, self._shape.layer_bytes),
            )
        if good < span.blocks:
            self._bad(load, span, tier, "checksum")
            return good
        self._count("loaded_blocks", tier, good)
        self._calls.report([], [LoadReport(tier, payload.nbytes, self._clock() - began_s)])
        return good

    def _room(self) -> Room | None:
        """Return this thread's room for records from files, which it fills with one after the other."""
        room: Room | None = getattr(self._own, "room", None)
        if room is None or room.is_lost:
            try:
                room = Room.made(record_bytes(self._record_blocks, self._shape))
            except TierError as error:
                logger.info("records come without room of their own: %s", error)
                room = None
            self._own.room = room
        return room

    def _bad(self, load: Load, span: BlockRange, tier: LoadSource, kind: str) -> None:
        self._count("bad_records", kind)
        logger.warning("a record from %s is bad (%s): its blocks are computed", tier, kind)
        namespace = rank_name(load.namespace, self._rank)
        self._calls.report([BadReport(namespace, span.tenant, span.extent_id, tier, kind)], [])

    def _loaded(self, load: Load, done: int) -> None:
        with self._lock:
            self._bad_pages.update(load.pages[done:])  # never later than that it is received
            self._received.add(load.request_id)
            self._under_way -= 1
        self._idle.ended()

    def _store(self, store: Store, until: Callable[[], None]) -> None:
        outcome, most = "error", self._record_blocks
        try:
            until()
            keys = chain_keys(store.namespace, store.token_ids, store.extra, self._block_tokens, store.parent)
            records = [
                self._record(store, keys, first, min(most, len(keys) - first))
                for first in range(0, len(keys), most)
            ]
        except TierError as error:
            logger.info("a store is left out: %s", error)
            records, outcome = [], "refused: no memory or changed"
        except Exception:
            logger.exception("a store failed")
            records = []
        self._stored(store, "" if records else outcome)  # its pages are copied: vLLM may have them
        blocks, is_whole = 0, True
        try:
            for (offer, record), first in zip(records, range(0, len(store.pages), most), strict=False):
                (said,) = self._calls.offer([(offer, record)])
                self._count("stores", said)
                is_whole = is_whole and said in ("taken", "held")
                blocks = min(first + most, len(store.pages)) if is_whole else blocks
        except Exception:
            logger.exception("a store was not offered")
        with self._lock:
            self._taken[store.request_id] = {self._rank: blocks}

    def _record(self, store: Store, keys: list[bytes], first: int, blocks: int) -> tuple[Offer, SharedRecord]:
        """Copy blocks out of their pages and seal them. Raises `TierError`, `TierFull`."""
        file = MemoryFile(record_bytes(blocks, self._shape))
        start = header_bytes(blocks, self._shape.layers)
        shape = (blocks, self._shape.layers, self._shape.layer_bytes)
        rows = file.data[start:].reshape(shape)
        pages = store.pages[first : first + blocks]
        self._pages.gather(pages, rows)
        header = seal(
            file.data,
            namespace=rank_name(store.namespace, self._rank),
            tenant=store.tenant,
            session=store.session,
            shape=self._shape,
            parent=rank_name(keys[first - 1] if first else store.parent, self._rank),
            first_block=store.first + first,
            keys=[rank_name(key, self._rank) for key in keys[first : first + blocks]],
            token_counts=[self._block_tokens] * blocks,
            placement=store.placement,
            created_unix_s=self._wall_clock(),
        )
        # Read once more, after the seal: what was copied before it was written, or while it was, shows here.
        again = np.empty((1, *shape[1:]), dtype=np.uint8)
        number = header.extent_id[0] % blocks
        self._pages.gather(pages[number : number + 1], again)
        is_same = np.array_equal(again[0], rows[number])
        del rows
        if not is_same:
            self._count("stores", "read too early")
            logger.error("a block changed while it was stored: it is not kept")
            raise TierError("read too early")
        nbytes = int(file.data.nbytes)
        share = store.recompute_s * blocks / len(keys)
        return Offer(nbytes, store.incarnation, store.clear_seq, share), file.seal()

    def _stored(self, store: Store, outcome: str) -> None:
        if outcome:
            self._count("stores", outcome)
        with self._lock:
            self._sent.add(store.request_id)
            self._under_way -= 1
        self._idle.ended()
