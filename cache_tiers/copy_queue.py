"""Copies that wait for a worker: those that are needed, then guesses. Each (extent, target) once.

Pure; its owner holds the lock. What waits can be called off, and whoever asked for it hears how it ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cache_tiers.extent import Address, TierName

Ended = Callable[[bool], None]
"""Called with whether the copy is there now, from the worker's thread, without the lock."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`sinks_from`: this tier's copy goes when the target has it, if it was not used meanwhile.

    `is_guess`: nobody has asked for it; not while requests wait for a load. `ended`: see `Ended`.
    """

    address: Address
    target: TierName
    sinks_from: TierName | None
    last_used_s: float
    is_guess: bool = False
    ended: Ended | None = None

    @property
    def key(self) -> tuple[Address, TierName]:
        return self.address, self.target


class CopyQueue:
    """`copies_max`: copies that may wait."""

    def __init__(self, copies_max: int) -> None:
        self._copies_max = copies_max
        self._needed: OrderedDict[tuple[Address, TierName], Copy] = OrderedDict()
        self._guesses: OrderedDict[tuple[Address, TierName], Copy] = OrderedDict()

    def __len__(self) -> int:
        return len(self._needed) + len(self._guesses)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._copies_max

    def __contains__(self, key: tuple[Address, TierName]) -> bool:
        return key in self._needed or key in self._guesses

    def add(self, copy: Copy, *, is_urgent: bool) -> None:
        """Before all others of its kind if it `is_urgent`. Raises `ValueError` when full, or in already."""
        if self.is_full or copy.key in self:
            raise ValueError("the copy cannot be queued")
        into = self._guesses if copy.is_guess else self._needed
        into[copy.key] = copy
        if is_urgent:
            into.move_to_end(copy.key, last=False)

    def has_next(self, *, may_guess: bool) -> bool:
        return bool(self._needed or (may_guess and self._guesses))

    def take(self, *, may_guess: bool) -> Copy | None:
        """The next one; guesses only if it `may_guess`."""
        if self._needed:
            return self._needed.popitem(last=False)[1]
        if may_guess and self._guesses:
            return self._guesses.popitem(last=False)[1]
        return None

    def cancel_guess(self, address: Address, target: TierName) -> bool:
        """Call off a guess; its `ended` is not called. False: it does not wait (any more)."""
        return self._guesses.pop((address, target), None) is not None

    def clear(self) -> None:
        self._needed.clear()
        self._guesses.clear()

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self) <= self._copies_max, "too many copies wait"
        assert not self._needed.keys() & self._guesses.keys(), "a copy waits twice"
        for key, copy in [*self._needed.items(), *self._guesses.items()]:
            assert key == copy.key, "a copy that waits is not known"
