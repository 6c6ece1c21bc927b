"""One answer in the making: its tokens, how far they are computed, and its page table.

Three integers drive everything (after nano-vllm): tokens known, tokens computed, tokens
scheduled. A prefix hit, a prefill chunk, a decode and a recompute after preemption are the
same arithmetic. The last sampled token is known but not computed: its slot was never written,
so it is never published (law L6).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from cache_tiers.blocks import ROOT, TAG_BYTES, Placement, block_key
from cache_tiers.messages import Fetch, LookupResult
from replicas.kv import ROOT_ENTRY
from replicas.messages import Decision, SamplingParams

# One request's dealings with the cache tiers: what they had, what they were offered. Plain data.
#
# Shared by all choices of the request. Knows nothing of how the tiers are reached.


@dataclass(slots=True, eq=False)
class OffloadState:
    """`waits`: the request is not admitted before the tiers have said what they have, or `deadline_s`.

    `found` may still come after that; it then only tells what need not be stored. `offered`: keys of the
    blocks that one of the choices has handed over already.
    """

    placement: Placement
    deadline_s: float
    waits: bool = True
    found: LookupResult | None = None
    miss: str = ""
    is_over: bool = False  # a choice of it has ended: nobody waits for an answer any more
    offered: set[bytes] = field(default_factory=set)


# One sequence's load under way: which slots are to come from a tier, and which have come. Pure.
#
# Loaded blocks are valid whenever and in whatever order they arrive: the KV of a slot depends on the
# tokens before it, not on how their KV came about. So computing from the front, loading from the
# back, a load that fails in the middle and a load that is overtaken are one arithmetic: `placed`
# runs of slots, and a `computed` mark that stops before a run and jumps over it. Knows nothing of
# bytes, pages, tiers' prices or clocks.

PieceState = Literal["waiting", "placed", "failed", "overtaken"]

OWN = "swap"
"""Source of blocks that this very request computed before it was preempted."""


@dataclass(slots=True)
class RestorePiece:
    """Slots `[start, end)`, from a block's first slot on; only a turn's tail ends inside a block.

    `source`: the tier it comes from, by `fetch`. `placed_end`: up to where its slots are valid;
    `arrived_s`: when its bytes were there, verified.
    """

    start: int
    end: int
    source: str
    nbytes: int
    state: PieceState = "waiting"
    placed_end: int = 0
    arrived_s: float = 0.0
    fetch: Fetch | None = None


@dataclass(slots=True, eq=False)
class Restore:
    """Pieces in the order of their slots, without overlap.

    `waits`: nothing is computed until every piece is decided (or `hedge` is called); otherwise
    computing goes on from the front meanwhile.
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
    is_reported: bool = False  # how long it took has been told
    miss: str = ""

    @property
    def is_over(self) -> bool:
        """No piece is to be waited for any more."""
        return all(piece.state != "waiting" for piece in self.pieces)

    @property
    def holds(self) -> bool:
        return self.waits and not self.is_over

    def hedge(self) -> None:
        """The load is late: compute from the front beside it, and keep whichever comes first."""
        if self.holds:
            self.waits = False
            self.decision = "hedge"
            self.miss = self.miss or "late"

    def usable_from(self, piece: RestorePiece, computed: int) -> int:
        """First slot of `piece` that may still be written: a block that is begun belongs to the computing."""
        first_whole = -(-computed // self.block_tokens) * self.block_tokens
        return max(piece.start, first_whole)

    def placed(self, piece: RestorePiece, start: int, end: int, now_s: float) -> None:
        """Slots `[start, end)` of a waiting piece are in their pages (none: it was overtaken)."""
        if piece.state != "waiting":
            raise ValueError(f"a piece that is {piece.state} was placed")
        if start >= end:
            piece.state = "overtaken"
            piece.start = piece.end = piece.placed_end = end
            return
        piece.start, piece.placed_end = start, end
        piece.state = "placed"
        self.placed_s = now_s

    def failed(self, piece: RestorePiece, reason: str) -> None:
        if piece.state == "waiting":
            piece.state = "failed"
            self.miss = self.miss or reason

    def limit(self, computed: int) -> int | None:
        """Computing must stop at this slot: what follows is there already. None: nothing follows."""
        return min(
            (p.start for p in self.pieces if p.state == "placed" and p.start >= computed), default=None
        )

    def jump(self, computed: int) -> int:
        """Where computing stands when it has come to `computed`: behind all runs that begin there."""
        for piece in self.pieces:
            if piece.state == "placed" and piece.start <= computed < piece.placed_end:
                computed = piece.placed_end
        return computed

    def tokens_by_source(self, tokens: int) -> dict[str, int]:
        """Placed slots below `tokens`, by tier."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            if piece.state == "placed":
                placed = min(piece.placed_end, tokens) - min(piece.start, tokens)
                counts[piece.source] = counts.get(piece.source, 0) + placed
        return counts

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        end = 0
        for piece in self.pieces:
            assert piece.start >= end, "pieces overlap"
            assert piece.start <= piece.end, "a piece ends before it begins"
            assert piece.start % self.block_tokens == 0 or piece.state == "overtaken", (
                "a piece begins inside a block"
            )
            if piece.state == "placed":
                assert piece.start < piece.placed_end <= piece.end, "more was placed than was to come"
            end = piece.end


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one choice of one request. Only the scheduler and the engine change it."""

    request_id: str
    arrival: int  # smaller = earlier; the order of service
    namespace: bytes
    tokens: array[int]  # u32: prompt, then what was sampled
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    owner: bytes = bytes(2 * TAG_BYTES)  # tags of tenant and session: who may have its blocks forgotten
    is_cleared: bool = False  # forgotten while it ran: nothing of it is kept
    index: int = 0  # which of the request's choices
    forks: int = 1  # choices still to be split off when the prompt is computed
    computed: int = 0  # slots [0, computed) hold valid KV
    pages: list[int] = field(default_factory=list)
    admitted_s: float | None = None  # when it first had its pages; the engine's clock
    is_reported: bool = False  # the request has been told what was cached
    resident_tokens: int = 0  # found in the pool at the last admission
    # Of an admission before the last, when it was preempted: found in the pool then, and loaded then.
    first_resident: int | None = None
    earlier_loads: dict[str, int] = field(default_factory=dict)
    riding_s: float = 0.0  # what the step of its admission takes anyway, if all of it can ride along
    restore: Restore | None = None  # what comes from a tier since the last admission
    visit: OffloadState | None = None  # the request's dealings with the tiers; None: it has none
    # Keys of the full blocks so far, and how far they are published.
    keys: list[bytes] = field(default_factory=list)
    published_blocks: int = 0
    chain_entry: int = ROOT_ENTRY
    chain_broken: bool = False  # a key collided: nothing behind it may be published

    @property
    def tenant(self) -> bytes:
        """Tag of whose it is."""
        return self.owner[:TAG_BYTES]

    def keys_of(self, blocks: int, block_tokens: int) -> list[bytes]:
        """Keys of the first `blocks` full blocks of the known tokens, computed once."""
        while len(self.keys) < blocks:
            start = len(self.keys) * block_tokens
            parent = self.keys[-1] if self.keys else ROOT
            self.keys.append(block_key(self.namespace, parent, self.tokens[start : start + block_tokens]))
        return self.keys[:blocks]

    @property
    def holds(self) -> bool:
        """It has its pages and waits for blocks from a tier: nothing of it is computed."""
        return self.restore is not None and self.restore.holds

    @property
    def is_looking(self) -> bool:
        """It waits to hear what the tiers have."""
        return self.visit is not None and self.visit.waits

    @property
    def computable(self) -> int:
        """Tokens that can be computed before a run of slots that came from a tier."""
        limit = None if self.restore is None else self.restore.limit(self.computed)
        return self.pending if limit is None else limit - self.computed

    @property
    def pending(self) -> int:
        """Tokens known but not computed; at least 1 while the sequence runs."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_decode(self) -> bool:
        return self.pending == 1 and self.computed > 0

    def fork(self, index: int) -> Sequence:
        """A sibling with the same computed tokens; the caller adds the references to its pages."""
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
            computed=self.computed,
            pages=list(self.pages),
            admitted_s=self.admitted_s,
            is_reported=self.is_reported,
            resident_tokens=self.resident_tokens,
            first_resident=self.first_resident,
            earlier_loads=dict(self.earlier_loads),
            visit=self.visit,
            keys=list(self.keys),
            published_blocks=self.published_blocks,
            chain_entry=self.chain_entry,
            chain_broken=self.chain_broken,
        )

    def forget_computed(self) -> None:
        """All KV is gone (the pages were released): start over from token 0."""
        if self.restore is not None:
            self.earlier_loads |= self.restore.tokens_by_source(self.prompt_tokens)
        self.computed = 0
        self.pages = []
        self.restore = None
        self.published_blocks = 0
        self.chain_entry = ROOT_ENTRY
        self.chain_broken = False
