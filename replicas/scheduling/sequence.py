"""State of one answer: its tokens, how far they are computed, its page table, its load in flight, its blocks'
fate.

Three integers drive everything (after nano-vllm): tokens known, tokens computed, tokens scheduled. A prefix
hit, a prefill chunk, a decode and a recompute after preemption are the same arithmetic. The last sampled
token is known but not computed: its slot was never written, so it is never published (G6 in
docs/guarantees.md).
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from samovar.cache_tiers.blocks import ROOT, TAG_BYTES, Placement, chain_keys, session_owner
from samovar.cache_tiers.catalog import BlockMemory
from samovar.cache_tiers.messages import Fetch, LookupResult
from samovar.replicas.grammar import GrammarState
from samovar.replicas.kv import ROOT_ENTRY
from samovar.replicas.messages import Decision, SamplingParams
from samovar.replicas.scheduling.drafts import Guesses


@dataclass(slots=True, eq=False)
class OffloadState:
    """What the cache tiers had for one request and what they were offered; shared by all its choices.

    `waits`: the request is not admitted before the tier lookup has finished or `deadline_s` has passed; an
    idle engine admits it from `idle_at_s` on, and computes at most `spare_tokens` of it a step until then.
    `found` may still arrive later: what is not computed by then is loaded. `offered`: keys of the blocks that
    one of the choices has handed over already. `stores_all`: see `GenerateRequest`. `known`: what became of
    the prompt's full blocks in earlier turns, as far as this replica remembers it. `planned_from`: the token
    where the last plan of a load began: what is before it was computed, or in the pool.
    """

    placement: Placement
    opened_s: float
    deadline_s: float = 0.0
    idle_at_s: float = 0.0
    waits: bool = False
    waited_s: float = 0.0  # for the lookup, nothing of it computed
    resident_tokens: int = 0  # in the pool when it came
    recompute_s: float = 0.0  # what computing the others takes
    spare_tokens: int | None = None
    again_at_s: float | None = None  # when the tiers are asked again; None: they are being asked, or never
    again_s: float = 0.0  # the time between that and the last answer
    found: LookupResult | None = None
    miss: str = ""
    is_unanswered: bool = False  # its prompt was computed before an answer that it had waited for came
    is_over: bool = False  # one of its choices has ended: a lookup's answer is no longer needed
    offered: set[bytes] = field(default_factory=set)
    trace: str = ""  # context of the request's span; empty: it is not traced
    stores_all: bool = False
    known: list[Fate | None] = field(default_factory=list)
    planned_from: int = 0


def page_table(pages: Iterable[int] = ()) -> array[int]:
    """Return a page table: int32, as steps hold it, so that a step copies it at once however long it is."""
    return array("i", pages)


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one choice of one request. Only the scheduler and the engine change it."""

    request_id: str
    arrival: int  # smaller = earlier; the order of service
    namespace: bytes
    tokens: array[int]  # u32: prompt, then sampled tokens
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    owner: bytes = bytes(2 * TAG_BYTES)  # tags of tenant and session, by which its blocks are forgotten
    is_cleared: bool = False  # forgotten while it ran: none of its blocks are kept
    index: int = 0  # which of the request's choices
    forks: int = 1  # choices that exist once the prompt is computed
    priority: int = 0  # smaller = sooner, among its tenant's
    is_due: bool = False  # better priorities have had their share before it: it yields to none any more
    grammar: GrammarState | None = None  # what its answer must look like; has accepted the sampled tokens
    # First slot whose logits are wanted for a log-probability of the prompt and not computed; None: none.
    score_from: int | None = None
    computed: int = 0  # slots [0, computed) hold valid KV
    pages: array[int] = field(default_factory=page_table)  # its page table: `page_table`
    known_tokens: int = 0  # of them, in the pool when it came
    passed_tokens: int = 0  # of later prompts that were computed first; see `PromptOrder`
    admitted_s: float | None = None  # when it first had its pages; the engine's clock
    is_reported: bool = False  # the request has been told how much was cached
    resident_tokens: int = 0  # found in the pool at the last admission
    # Of earlier admissions, before a preemption: tokens found in the pool first, and tokens loaded.
    first_resident: int | None = None
    earlier_loads: dict[str, int] = field(default_factory=dict)
    shared_step_s: float = 0.0  # what it loses by not being in its admission's step; see `StepRoom`
    restore: Restore | None = None  # transfer from a tier since the last admission
    offload_state: OffloadState | None = None  # the request's use of the tiers; None: it does not use them
    # Keys of the full blocks so far, and the number of published ones.
    keys: list[bytes] = field(default_factory=list)
    published_blocks: int = 0
    chain_entry: int = ROOT_ENTRY
    chain_broken: bool = False  # a key collided: no block behind it may be published
    guesses: Guesses = field(default_factory=Guesses)  # of its next tokens

    @property
    def tenant(self) -> bytes:
        """Return the tenant's tag."""
        return self.owner[:TAG_BYTES]

    def keys_of(self, blocks: int, block_tokens: int) -> list[bytes]:
        """Return the keys of the first `blocks` full blocks of the known tokens; each is computed once."""
        known = len(self.keys)
        if known < blocks:
            parent, ids = self.keys[-1] if self.keys else ROOT, self.tokens
            more = ids[known * block_tokens : blocks * block_tokens]
            self.keys += chain_keys(self.namespace, parent, more, block_tokens)
        return self.keys[:blocks]

    @property
    def holds(self) -> bool:
        """Whether it has its pages and waits for blocks from a tier: nothing of it is computed.

        Either for all of them, or for those that come into its next pages.
        """
        restore = self.restore
        return restore is not None and (restore.holds or restore.stops_at(self.computed))

    @property
    def is_looking(self) -> bool:
        """Whether its tier lookup is in flight."""
        return self.offload_state is not None and self.offload_state.waits

    @property
    def computable(self) -> int:
        """Return the tokens that can be computed before the next run of slots loaded from a tier.

        While its lookup is still waited for, only a few: what is computed need not be loaded any more.
        """
        limit = None if self.restore is None else self.restore.limit(self.computed)
        count = self.pending if limit is None else limit - self.computed
        spare = None if self.offload_state is None else self.offload_state.spare_tokens
        return count if spare is None else min(count, spare)

    def begin(self, count: int) -> int:
        """Take the next `count` slots for a step, or as many as are not loaded; return how many."""
        return count if self.restore is None else self.restore.compute(self.computed, count)

    @property
    def reusable(self) -> int:
        """Return how many tokens' KV may come from elsewhere: none whose logits are wanted.

        Never includes the last token: its logits give the next one, so it is computed.
        """
        last = len(self.tokens) - 1
        return last if self.score_from is None else min(last, self.score_from)

    @property
    def pending(self) -> int:
        """Return the tokens known but not computed; at least 1 while the sequence runs."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Return how many tokens the answer may still get."""
        return self.sampling.max_tokens - self.output_tokens

    @property
    def is_decode(self) -> bool:
        return self.pending == 1 and self.computed > 0

    @property
    def is_prefill(self) -> bool:
        """Whether something of its prompt can be computed now, or of what it has to compute again."""
        return not (self.is_decode or self.holds)

    def yields_to(self, priority: int) -> bool:
        """Whether it gives way to its tenant's sequences of this priority."""
        return priority < self.priority and not self.is_due

    def fork(self, index: int) -> Sequence:
        """Return a sibling with the same computed tokens; the caller adds the references to its pages."""
        return Sequence(
            request_id=self.request_id,
            arrival=self.arrival,
            namespace=self.namespace,
            tokens=array("I", self.tokens),
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            seed=self.seed,
            owner=self.owner,
            is_cleared=self.is_cleared,
            index=index,
            priority=self.priority,
            is_due=self.is_due,
            grammar=None if self.grammar is None else self.grammar.copy(),
            computed=self.computed,
            pages=self.pages[:],
            admitted_s=self.admitted_s,
            is_reported=self.is_reported,
            resident_tokens=self.resident_tokens,
            first_resident=self.first_resident,
            earlier_loads=dict(self.earlier_loads),
            offload_state=self.offload_state,
            keys=list(self.keys),
            published_blocks=self.published_blocks,
            chain_entry=self.chain_entry,
            chain_broken=self.chain_broken,
        )

    def forget_computed(self) -> None:
        """Start over from token 0: all KV is gone, the pages were released."""
        if self.restore is not None:
            self.earlier_loads |= self.restore.tokens_by_source(self.prompt_tokens)
        self.computed = 0
        self.pages = page_table()
        self.restore = None
        self.published_blocks = 0
        self.chain_entry = ROOT_ENTRY
        self.chain_broken = False


class Restorer(Protocol):
    """Brings blocks back from outside the pool, for example from the cache tiers."""

    def plan_restore(self, sequence: Sequence) -> None:
        """Set `sequence.restore` if blocks are to be loaded into the pages that it has just got.

        They may be written to from now on: no step that is planned later reads what was in them.
        """
        ...

    def stop_restore(self, sequence: Sequence) -> None:
        """Let nothing more be loaded into a sequence's pages, which it is about to lose."""
        ...

    def swap_out(self, sequence: Sequence, pages: Listing[int]) -> bool:
        """Copy the blocks of a preempted sequence, which are in `pages`, aside, beside later steps.

        The pages stay referenced meanwhile. False: not possible, the blocks are dropped.
        """
        ...

    def pages_leaving(self) -> int:
        """Return how many pages become available soon: copies are all that they are still needed for."""
        ...


def bare_sequence(ids: list[int], pages: Iterable[int]) -> Sequence:
    """Return a sequence with these tokens and pages, none computed yet, outside of any scheduler."""
    return Sequence(
        request_id="probe",
        arrival=0,
        namespace=bytes(32),
        tokens=array("I", ids),
        prompt_tokens=len(ids),
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        pages=page_table(pages),
    )


PieceState = Literal["waiting", "moving", "placed", "failed", "overtaken"]
"""`moving`: its bytes are being copied into their pages, which no step uses until they are `placed`."""

OWN = "swap"
"""Source of blocks that this same request computed before it was preempted."""


@dataclass(slots=True, eq=False)
class RestorePiece:
    """Slots `[start, end)` to be loaded from one source.

    `start` is a block's first slot; only a turn's tail ends inside a block. `source`: the tier that `fetch`
    reads from. `placed_end`: end of the valid slots. Times of the engine's clock: `begun_s`, when a thread
    began to fetch it; `fetched_s`; `arrived_s`, when its bytes were verified, too; `landed_s`, when they were
    in their pages, though the engine may have taken that in later.
    """

    start: int
    end: int
    source: str
    nbytes: int
    state: PieceState = "waiting"
    placed_end: int = 0
    begun_s: float = 0.0
    fetched_s: float = 0.0
    arrived_s: float = 0.0
    landed_s: float = 0.0
    fetch: Fetch | None = None


@dataclass(slots=True, eq=False)
class Restore:
    """One sequence's load in flight: which slots are to come from a tier, and which of them a step computes.

    Worker threads copy verified bytes into a sequence's pages while the engine plans and computes steps. Each
    slot is taken once, by one of them: `claim` for a copy, `compute` for a step. Pure; `claim` and
    `is_wanted` are for any thread.

    Loaded blocks are valid whenever and in whatever order they arrive: the KV of a slot depends on the tokens
    before it, not on how their KV was produced. So computing from the front, loading from the back, a load
    that fails in the middle and a load that is overtaken are the same arithmetic: `placed` runs of slots, and
    a `computed` mark that stops before a run and jumps over it. It stops as well before a run whose bytes are
    being copied, and, until the load is late (`hedge`), before one that has not come. Then each piece is
    overtaken when computing reaches it, and not before.

    `pieces`: in the order of their slots, without overlap. `waits`: nothing is computed until every piece is
    decided, or the load is late; otherwise computing continues from the front.
    """

    pieces: list[RestorePiece]
    block_tokens: int
    decision: Decision
    waits: bool
    started_s: float
    hedge_at_s: float
    load_price_s: float = 0.0
    recompute_price_s: float = 0.0
    placed_s: float = 0.0
    is_reported: bool = False  # the load time has been reported
    miss: str = ""
    is_late: bool = False
    is_stopped: bool = False
    _front: int = 0  # slots below are computed, or some step is to compute them
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_over(self) -> bool:
        """Whether no piece is pending."""
        return all(piece.state not in ("waiting", "moving") for piece in self.pieces)

    @property
    def holds(self) -> bool:
        return self.waits and not self.is_over

    @property
    def is_awaited(self) -> bool:
        """Whether computing stops somewhere for bytes that have not come: those that have are soon there."""
        return not self.is_late and any(piece.state == "waiting" for piece in self.pieces)

    def stops_at(self, slot: int) -> bool:
        """Return whether computing waits at a slot: its bytes are being copied, or expected."""
        return any(
            piece.start == slot
            and (piece.state == "moving" or (piece.state == "waiting" and not self.is_late))
            for piece in self.pieces
        )

    def hedge(self) -> None:
        """Compute on, into what has not come; whichever is first is kept."""
        if self.is_awaited:
            self.waits, self.is_late = False, True
            self.decision = "hedge"
            self.miss = self.miss or "late"

    def claim(self, piece: RestorePiece, end: int) -> int | None:
        """Take those slots of a waiting piece up to `end` that no step computes, for a copy.

        Returns the first. None: there are none, or nothing may be copied any more.
        """
        with self._lock:
            if piece.state != "waiting":
                raise ValueError(f"a piece that is {piece.state} is copied")
            if self.is_stopped:
                return None
            start = max(piece.start, -(-self._front // self.block_tokens) * self.block_tokens)
            if start >= end:
                piece.start = piece.end = piece.placed_end = end
                piece.state = "overtaken"
                return None
            piece.start, piece.placed_end = start, end
            piece.state = "moving"
            return start

    def compute(self, start: int, count: int) -> int:
        """Take `count` slots from `start` on for a step, or as many as may be; return how many."""
        with self._lock:
            limit = self.limit(start)
            count = count if limit is None else min(count, limit - start)
            self._front = max(self._front, start + count)
            return count

    def is_wanted(self, piece: RestorePiece) -> bool:
        """Return whether a piece can still be of use."""
        return piece.state == "waiting" and not self.is_stopped and self._front < piece.end

    def stop(self) -> list[RestorePiece]:
        """Let nothing more be copied: the sequence loses its pages. Return what is being copied now."""
        with self._lock:
            self.is_stopped = True
            return [piece for piece in self.pieces if piece.state == "moving"]

    def placed(self, piece: RestorePiece, now_s: float) -> None:
        """Record that the slots of a piece that was being copied are in their pages."""
        if piece.state != "moving":
            raise ValueError(f"a piece that is {piece.state} was placed")
        piece.state = "placed"
        self.placed_s = now_s

    def failed(self, piece: RestorePiece, reason: str) -> None:
        if piece.state in ("waiting", "moving"):
            piece.state = "failed"
            self.miss = self.miss or reason

    def limit(self, computed: int) -> int | None:
        """Return the slot where computing must stop, since a run follows that is not to be computed; or None.

        Such as has not come is one while it is expected. Of a late load, a step ends before the next piece.
        """
        beyond = computed + 1 if self.is_late else computed
        return min(
            (
                piece.start
                for piece in self.pieces
                if (piece.state in ("placed", "moving") and piece.start >= computed)
                or (piece.state == "waiting" and piece.start >= beyond)
            ),
            default=None,
        )

    def jump(self, computed: int) -> int:
        """Return the computed mark moved from `computed` past all placed runs that begin there."""
        for piece in self.pieces:
            if piece.state == "placed" and piece.start <= computed < piece.placed_end:
                computed = piece.placed_end
        return computed

    def tokens_by_source(self, tokens: int) -> dict[str, int]:
        """Count the placed slots below `tokens`, by tier."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            if piece.state == "placed":
                placed = min(piece.placed_end, tokens) - min(piece.start, tokens)
                counts[piece.source] = counts.get(piece.source, 0) + placed
        return counts

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            end = 0
            for piece in self.pieces:
                assert piece.start >= end, "pieces overlap"
                assert piece.start <= piece.end, "a piece ends before it begins"
                assert piece.start % self.block_tokens == 0 or piece.state == "overtaken", (
                    "a piece begins inside a block"
                )
                if piece.state in ("placed", "moving"):
                    assert piece.start < piece.placed_end <= piece.end, "more was placed than was to come"
                end = piece.end


STORED: Final = frozenset({"taken", "held"})
"""What became of blocks that the tiers took; all else is why they did not."""

CLEARS_MAX: Final = 4096
"""Clears that are remembered; of what was cleared longer ago no reason is known."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of blocks at the end of a turn.

    `outcome`: as `StoreResults` counts it, `storing` until that is known, or `cleared`. `detail`: the prices
    behind it, in words. `owner`: whose turn it was; `clears`: how many clears there had been.
    """

    outcome: str
    detail: str
    owner: bytes
    clears: int

    @property
    def is_stored(self) -> bool:
        """Whether the tiers took the blocks."""
        return self.outcome in STORED


CLEARED = Fate("cleared", "", b"", 0)


class BlockFates:
    """The fates of the latest blocks; `blocks_max`: how many are remembered."""

    def __init__(self, blocks_max: int) -> None:
        self._fates: BlockMemory[Fate] = BlockMemory(blocks_max)
        self._cleared: OrderedDict[bytes, int] = OrderedDict()  # tag -> which clear it was; oldest first
        self._clears = 0

    def became(self, keys: Listing[bytes], outcome: str, owner: bytes, detail: str = "") -> None:
        """Record what became of an owner's blocks."""
        self._fates.put(keys, Fate(outcome, detail, owner, self._clears))

    def left_alone(self, keys: Listing[bytes], outcome: str, owner: bytes) -> None:
        """Record why an owner's blocks were not offered; those that the tiers took before stay taken."""
        known = self.of(keys)
        new = [key for key, fate in zip(keys, known, strict=True) if fate is None or not fate.is_stored]
        self.became(new, outcome, owner)

    def cleared(self, tags: Collection[bytes]) -> None:
        """Record a clear of these owners, sessions or tenants."""
        self._clears += 1
        for tag in tags:
            self._cleared[tag] = self._clears
            self._cleared.move_to_end(tag)
        while len(self._cleared) > CLEARS_MAX:
            self._cleared.popitem(last=False)

    def of(self, keys: Listing[bytes]) -> list[Fate | None]:
        """Return what is known of each of a chain's blocks."""
        found: list[Fate | None] = []
        before: Fate | None = None
        for fate in self._fates.of(keys):
            if fate is not None and fate is before:
                found.append(found[-1])  # of the same extent
                continue
            before = fate
            found.append(CLEARED if fate is not None and self._is_cleared(fate) else fate)
        return found

    def _is_cleared(self, fate: Fate) -> bool:
        """Return whether its owner was cleared since."""
        tags = fate.owner, session_owner(fate.owner), fate.owner[:TAG_BYTES]
        return any(self._cleared.get(tag, 0) > fate.clears for tag in tags)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._fates.check_integrity()
        assert len(self._cleared) <= CLEARS_MAX, "too many clears are remembered"
