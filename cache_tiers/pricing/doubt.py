"""What of that which a price forbids is done all the same, so that the price is proved or corrected. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from samovar.cache_tiers.pricing.meters import TierPrice

SHARE = 0.01
"""Of the bytes that are decided on, so many may be moved against the price."""
BURST_EXTENTS = 4
"""So many extents at first, and at most at a time: they are loaded side by side, as all loads are."""


class Doubt:
    """Doubts each "do not" that no real load has proved lately (`TierPrice.proves`).

    Without this a price that is too high stays so for good: what is never stored is never loaded, and what is
    never loaded is never measured. Stores, loads and swaps each have one of their own, a token bucket of
    bytes.
    `extent_bytes_max`: of the largest extent, so that one always fits.
    """

    def __init__(self, extent_bytes_max: int) -> None:
        self._burst_bytes = BURST_EXTENTS * extent_bytes_max
        self._bytes = float(self._burst_bytes)

    def decided(self, nbytes: int) -> None:
        """Record that `nbytes` were decided on, whatever was decided."""
        self._bytes = min(self._burst_bytes, self._bytes + SHARE * max(nbytes, 0))

    def leading(self, declined: Iterable[tuple[int, TierPrice]]) -> int:
        """Return how many of these (bytes, price) are tried: none is of use without those before it."""
        count = 0
        for nbytes, price in declined:
            if not self.tries(nbytes, price):
                break
            count += 1
        return count

    def tries(self, nbytes: int, price: TierPrice) -> bool:
        """Return whether `nbytes` that `price` forbids are moved all the same; they are counted then."""
        if price.proves(nbytes) or not price.is_up or nbytes > self._bytes:
            return False
        self._bytes -= nbytes
        return True

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert 0 <= self._bytes <= self._burst_bytes, f"{self._bytes} bytes may be tried"
