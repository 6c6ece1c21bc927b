"""Allocator of pieces of one memory range: first fit, adjacent free pieces are merged.

Pure bookkeeping in offsets; the bytes are `link.py`'s. A piece is identified by its generation, a number
that is never reused. While something may still write to a piece (`begin_write`), it is not free, even
after its holder released it. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

ALIGN = 4096
"""Pieces begin at, and occupy, multiples of it."""


@dataclass(frozen=True, slots=True)
class ArenaPiece:
    """A piece: `nbytes` from `offset` on."""

    generation: int
    offset: int
    nbytes: int
    expires: bool


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Arena:
    """Allocates pieces of `nbytes` bytes (rounded down to whole `ALIGN`s)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        if self.nbytes < ALIGN:
            raise ValueError(f"an arena has at least {ALIGN} bytes, not {nbytes}")
        self._free = [(0, self.nbytes)]  # (offset, length), by offset; no two are adjacent
        self._pieces: dict[int, ArenaPiece] = {}
        self._ends_s: dict[int, float] = {}  # expiry of armed pieces
        self._writes: set[int] = set()
        self._released: set[int] = set()  # by their holders, while something may still write there
        self._last = 0

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def writes(self) -> int:
        """Number of pieces that something may write to."""
        return len(self._writes)

    def take(self, nbytes: int, *, expires: bool) -> ArenaPiece | None:
        """Allocate a piece; None: no hole is large enough."""
        if nbytes < 1:
            raise ValueError(f"a piece has bytes, not {nbytes}")
        length = aligned(nbytes)
        fits = (index for index, (_, hole) in enumerate(self._free) if hole >= length)
        index = next(fits, None)
        if index is None:
            return None
        offset, hole = self._free[index]
        self._free[index : index + 1] = [(offset + length, hole - length)] if hole > length else []
        self._last += 1
        piece = self._pieces[self._last] = ArenaPiece(self._last, offset, nbytes, expires)
        return piece

    def held(self, generation: int) -> ArenaPiece | None:
        """Return the piece, unless it was released or has expired."""
        return None if generation in self._released else self._pieces.get(generation)

    def release(self, generation: int) -> None:
        """Release a piece for its holder. No-op if the generation is not held."""
        if generation in self._writes:
            self._released.add(generation)
        elif generation in self._pieces:
            self._give_back(generation)

    def arm(self, generation: int, ends_s: float) -> None:
        """Set a piece to expire at `ends_s`, not before that of earlier calls.

        Raises `ValueError` if the piece is not held or was not taken as one that expires.
        """
        piece = self.held(generation)
        if piece is None or not piece.expires:
            raise ValueError(f"piece {generation} is not held as one that expires")
        self._ends_s.pop(generation, None)  # moves it to the end of the order
        self._ends_s[generation] = ends_s

    def expire(self, now_s: float) -> None:
        """Free the pieces that have expired."""
        while self._ends_s:
            generation, ends_s = next(iter(self._ends_s.items()))
            if ends_s > now_s:
                return
            self._give_back(generation)

    def begin_write(self, generation: int) -> None:
        """Begin writing to a held piece. Raises `ValueError` if it expires or is written to already."""
        piece = self.held(generation)
        if piece is None or piece.expires or generation in self._writes:
            raise ValueError(f"piece {generation} is not free to be written to")
        self._writes.add(generation)

    def end_write(self, generation: int) -> None:
        """End writing to a piece."""
        self._writes.remove(generation)
        if generation in self._released:
            self._released.remove(generation)
            self._give_back(generation)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the bytes that are lost or owned twice."""
        taken = [(piece.offset, aligned(piece.nbytes)) for piece in self._pieces.values()]
        at = 0
        for offset, length in sorted(self._free + taken):
            assert offset == at, (
                f"the bytes from {min(at, offset)} to {max(at, offset)} have no owner or two owners"
            )
            at += length
        assert at == self.nbytes, f"{at} of {self.nbytes} bytes have an owner or are free"
        assert self._free == sorted(self._free), "the free bytes are out of order"
        for one, other in self._neighbours():
            assert one[0] + one[1] < other[0], f"the holes at {one[0]} and {other[0]} are one"
        assert set(self._pieces) >= self._writes | set(self._ends_s), "a piece that is gone is in use"
        assert self._released <= self._writes, "a released piece is kept, and nothing writes there"
        assert not self._writes & set(self._ends_s), "a piece that is written to would be taken back"
        assert list(self._ends_s.values()) == sorted(self._ends_s.values()), (
            "the line of ends is out of order"
        )
        assert all(generation <= self._last for generation in self._pieces), "a generation of the future"

    def _neighbours(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        return zip(self._free, self._free[1:], strict=False)

    def _give_back(self, generation: int) -> None:
        piece = self._pieces.pop(generation)
        self._ends_s.pop(generation, None)
        offset, length = piece.offset, aligned(piece.nbytes)
        index = bisect(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            before, more = self._free.pop(index)
            offset, length = before, more + length
        self._free.insert(index, (offset, length))
