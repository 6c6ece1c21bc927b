"""One sequence's load in flight: which slots are to come from a tier, and which of them a step computes.

Worker threads copy verified bytes into a sequence's pages while the engine plans and computes steps. Each
slot is taken once, by one of them: `claim` for a copy, `compute` for a step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from samovar.cache_tiers.messages import Fetch
from samovar.replicas.messages import Decision

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
    """One sequence's load in flight. Pure; `claim` and `is_wanted` are for any thread.

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
