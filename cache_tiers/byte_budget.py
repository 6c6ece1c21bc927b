"""A token bucket: bytes a second that may be spent, a little of it saved up. Pure; the clock comes in."""

from __future__ import annotations


class ByteBudget:
    """`bytes_per_s` flow in, until `burst_s` worth of them is saved. It begins full."""

    def __init__(self, bytes_per_s: int, burst_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.capacity = int(bytes_per_s * burst_s)
        self._saved = float(self.capacity)
        self._at_s: float | None = None

    def saved(self, now_s: float) -> int:
        """What may be spent now. A clock that went back brings nothing, and costs nothing."""
        if self._at_s is not None:
            flowed = max(0.0, now_s - self._at_s) * self._bytes_per_s
            self._saved = min(float(self.capacity), self._saved + flowed)
        self._at_s = now_s
        return int(self._saved)

    def spend(self, nbytes: int, now_s: float) -> None:
        """Raises `ValueError` when that is more than is saved."""
        if nbytes > self.saved(now_s):
            raise ValueError(f"{nbytes} bytes are more than the budget has")
        self._saved -= nbytes

    def give_back(self, nbytes: int) -> None:
        """What was spent and not used."""
        self._saved = min(float(self.capacity), self._saved + nbytes)
