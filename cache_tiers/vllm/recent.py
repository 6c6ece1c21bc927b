"""What this engine has lately stored, of which a lookup may know nothing yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KEYS_MAX = 20_000
ARRIVES_S = 5.0
"""A store is in the tiers so soon after it began; if not, a later turn stores it again."""


class RecentStores:
    """Keys of blocks with the time at which their store began: those of requests that ran side by side."""

    def __init__(self) -> None:
        self._began_s: dict[bytes, float] = {}

    def add(self, keys: Iterable[bytes], now_s: float) -> None:
        """Record that the blocks are being stored."""
        for key in keys:
            self._began_s.pop(key, None)
            self._began_s[key] = now_s
        while len(self._began_s) > KEYS_MAX:
            del self._began_s[next(iter(self._began_s))]

    def held(self, keys: Sequence[bytes], held: int, looked_up_s: float) -> int:
        """Return how many leading blocks there are, of which `held` were found by a lookup at that time."""
        while held < len(keys) and self._began_s.get(keys[held], float("-inf")) > looked_up_s - ARRIVES_S:
            held += 1
        return held
