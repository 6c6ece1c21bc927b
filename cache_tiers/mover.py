"""What is on its way into which tier: every copy goes through the same states, and only one at a time.

A move of an extent into a tier is planned -> reserved -> copying -> verified -> committed [-> dropping
its source] -> done, or fails at any point before it is committed. It is fenced by the generation of its
reservation: a move that was given up cannot go on, however late its bytes arrive. Pure bookkeeping: the
bytes are moved by whoever holds the `Move`; this knows no directory, tier or thread, and has no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cache_tiers.extent import Address, TierName

State = Literal["planned", "reserved", "copying", "verified", "committed", "dropping", "done", "failed"]
Source = TierName | Literal["replica", "peer"]

NEXT: dict[State, tuple[State, ...]] = {
    "planned": ("reserved", "failed"),
    "reserved": ("copying", "failed"),
    "copying": ("verified", "failed"),
    "verified": ("committed", "failed"),
    "committed": ("dropping", "done"),
    "dropping": ("done",),
    "done": (),
    "failed": (),
}

Reach = Callable[[str], None]
"""Called with every state that is reached, before what comes next is done. A fault point: may not return."""


def no_fault(_state: str) -> None:
    """The `Reach` of a node without faults."""


@dataclass(frozen=True, slots=True)
class Move:
    """One extent on its way into one tier. `number` is never given out again."""

    number: int
    address: Address
    source: Source
    target: TierName


class StaleMove(Exception):
    """This move was given up or is over: what it copied must not be published."""


@dataclass(slots=True)
class _Progress:
    move: Move
    state: State = "planned"
    generation: int | None = None


class Mover:
    """At most `moves_max` moves, at most one for each (extent, target tier)."""

    def __init__(self, moves_max: int) -> None:
        self._moves_max = moves_max
        self._under_way: dict[tuple[Address, TierName], _Progress] = {}
        self._last_number = 0
        self.reached: Counter[str] = Counter()
        """`"cpu>nvme:committed"` -> how many moves got there."""

    def __len__(self) -> int:
        return len(self._under_way)

    def is_busy(self, address: Address, target: TierName) -> bool:
        return (address, target) in self._under_way

    def under_way(self) -> list[Move]:
        """All moves that are not over."""
        return [progress.move for progress in self._under_way.values()]

    def state(self, move: Move) -> State | None:
        """None when the move is over."""
        progress = self._under_way.get((move.address, move.target))
        return progress.state if progress is not None and progress.move == move else None

    def plan(self, address: Address, source: Source, target: TierName) -> Move | None:
        """None: the extent is on its way there already, or too many moves are under way."""
        if self.is_busy(address, target) or len(self._under_way) >= self._moves_max:
            return None
        self._last_number += 1
        move = Move(self._last_number, address, source, target)
        self._under_way[address, target] = _Progress(move)
        self._count(move, "planned")
        return move

    def reserved(self, move: Move, generation: int) -> None:
        """There is room, fenced by `generation`. Raises `StaleMove`, `ValueError` (not planned)."""
        self._step(move, "reserved").generation = generation

    def advance(self, move: Move, state: State, generation: int) -> None:
        """Into the next state. Raises `StaleMove` when the move is over or `generation` is not its
        reservation's, `ValueError` when that state does not come next.
        """
        progress = self._under_way.get((move.address, move.target))
        if progress is None or progress.move != move or progress.generation != generation:
            raise StaleMove(f"move {move.number} with generation {generation} is over")
        self._step(move, state)

    def end(self, move: Move) -> None:
        """Over: done when it was committed, failed when not. Nothing when it is over already."""
        state = self.state(move)
        if state is not None:
            self._step(move, "done" if state in ("committed", "dropping") else "failed")

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong."""
        assert len(self._under_way) <= self._moves_max, "too many moves"
        for (address, target), progress in self._under_way.items():
            move = progress.move
            assert (move.address, move.target) == (address, target), "a move under another's name"
            assert progress.state not in ("done", "failed"), "a move that is over was left behind"
            assert (progress.generation is None) == (progress.state == "planned"), "state and fence differ"
        started = sum(count for name, count in self.reached.items() if name.endswith(":planned"))
        over = sum(count for name, count in self.reached.items() if name.endswith((":done", ":failed")))
        assert started - over == len(self._under_way), "moves got lost"

    def _step(self, move: Move, state: State) -> _Progress:
        progress = self._under_way.get((move.address, move.target))
        if progress is None or progress.move != move:
            raise StaleMove(f"move {move.number} is over")
        if state not in NEXT[progress.state]:
            raise ValueError(f"{state} does not come after {progress.state}")
        progress.state = state
        self._count(move, state)
        if state in ("done", "failed"):
            del self._under_way[move.address, move.target]
        return progress

    def _count(self, move: Move, state: State) -> None:
        self.reached[f"{move.source}>{move.target}:{state}"] += 1
