"""Who makes room when the pages run out, and what becomes of its blocks. Pure.

`drop` forgets the victim's pages and computes them again later. The second way, `swap` (keep
the blocks in a cache tier and load them back, where that is cheaper), comes with the tiers:
it is another `PreemptionPolicy`.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Literal, Protocol

from replicas.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Sequence
    how: Literal["drop", "swap"]


class PreemptionPolicy(Protocol):
    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        """One of `candidates` (running, oldest first, never empty) gives up its pages."""
        ...


class DropNewest:
    """The newest loses least service and delays nobody who came before it."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "drop")
