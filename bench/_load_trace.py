"""Where the time of a return goes, from its request to its first token: by the times that its pieces keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench._gpu_model import Asked, Caller
from samovar.replicas.scheduling import Restore, RestorePiece

STAGES = ("looked up", "fetched", "verified", "moved", "waited for the engine", "computed")


@dataclass(frozen=True, slots=True)
class Passed:
    """One stage of a return. `first_s`, `last_s`: since the request, when it began and was over.

    `sum_s`: of all `pieces`, which pass through it side by side.
    """

    stage: str
    pieces: int
    first_s: float
    last_s: float
    sum_s: float


def trace_of(restore: Restore, asked_s: float, first_token_s: float) -> Iterator[Passed]:
    """Yield the stages of a load, some of whose pieces are in their pages, in their order."""
    came = [piece for piece in restore.pieces if piece.landed_s > 0]

    def passed(stage: str, spans: Sequence[tuple[float, float]]) -> Passed:
        begins, ends = zip(*spans, strict=True)
        seconds = sum(end - begin for begin, end in spans)
        return Passed(stage, len(spans), min(begins) - asked_s, max(ends) - asked_s, seconds)

    def times(piece: RestorePiece) -> tuple[float, ...]:
        return piece.begun_s, piece.fetched_s, piece.arrived_s, piece.landed_s

    of_pieces = [times(piece) for piece in came]
    landed_s = max(piece.landed_s for piece in came)
    yield passed(STAGES[0], [(asked_s, restore.started_s)])
    for at, stage in enumerate(STAGES[1:4]):
        yield passed(stage, [(some[at], some[at + 1]) for some in of_pieces])
    yield passed(STAGES[4], [(landed_s, restore.placed_s)])
    yield passed(STAGES[5], [(restore.placed_s, first_token_s)])


def asked_and_traced(caller: Caller, turn: list[int], session: bytes) -> tuple[Asked, tuple[Passed, ...]]:
    """Return what became of a turn of which the pool has nothing, and the stages of its load, if any."""
    caller.forget()
    key = caller.ask(turn, 1, session=session)
    asked, restore = caller.asked[key], None
    while not asked.is_over:
        caller.step()
        running = caller.engine.scheduler.running
        restore = running[0].restore if running else restore
    if restore is None or asked.first_s is None or not any(piece.landed_s > 0 for piece in restore.pieces):
        return asked, ()
    return asked, tuple(trace_of(restore, asked.at_s, asked.first_s))
