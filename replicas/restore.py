"""One sequence's load under way: which slots are to come from a tier, and which have come. Pure.

Loaded blocks are valid whenever and in whatever order they arrive: the KV of a slot depends on the
tokens before it, not on how their KV came about. So computing from the front, loading from the
back, a load that fails in the middle and a load that is overtaken are one arithmetic: `placed`
runs of slots, and a `computed` mark that stops before a run and jumps over it. Knows nothing of
bytes, pages, tiers' prices or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache_tiers.messages import Fetch
from replicas.messages import Decision

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
