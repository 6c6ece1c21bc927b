"""What the scheduler asks of whoever keeps blocks outside the pool."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Protocol

from replicas.sequence import Sequence


class Restorer(Protocol):
    """Brings blocks back from somewhere else. The engine's side of the cache tiers is one."""

    def plan_restore(self, sequence: Sequence) -> None:
        """`sequence` has just got its pages: set its `restore` if something is to be loaded into them."""
        ...

    def swap_out(self, sequence: Sequence, pages: Listing[int]) -> bool:
        """Keep the blocks of a preempted sequence, which are in `pages`, aside, now.

        False: not possible, they are dropped.
        """
        ...
