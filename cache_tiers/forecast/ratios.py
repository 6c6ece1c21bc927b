"""How much likelier than forecast sessions resume under known circumstances, counted online.

Per circumstance (a cell): how many resumed, over how many should have by their forecast, which is the sum of
the forecasts' cumulative hazards over the time that was observed. The quotient is the maximum likelihood
estimate of a factor on the hazards (proportional hazards: Cox, 1972), here with a gamma prior around that of
a more general cell, in the end around 1. Sessions that are still idle count for the time that has passed:
to leave them out until they resume, or until they never will, would bias the factor. Clock values come in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.survival import EDGES_S, Curves, Floats
from samovar.cache_tiers.forecast.turns import SessionKey

PRIOR: Final = 1.0
"""Expected returns that the more general cell counts for."""
RATIO_MIN, RATIO_MAX = 0.01, 50.0
KNOWN: Final = 2.0
"""Trials before a cell says anything."""
WINDOW: Final = 200.0
"""Trials of a cell after which its counts are halved, so that old ones fade."""
AGES_S: Final = (20.0, 60.0, 300.0, 1200.0, 3600.0)
"""Idle times at which a trial is counted as far as it has got; at the last one it ends."""

_MOVES_MAX: Final = 256
"""Trials looked at per call, so that a clock jump blocks no caller."""

Cells = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class _Trial:
    """One idle session. `hazard`: its forecast, cumulative at `EDGES_S`. `counted`: so much of it by now."""

    session: SessionKey
    cells: tuple[int, ...]
    at_s: float
    hazard: Floats
    counted: float = 0.0
    is_over: bool = False

    def until(self, idle_s: float) -> float:
        """Return what the forecast expected up to `idle_s`, less what was counted."""
        expected = float(np.interp(idle_s, EDGES_S, self.hazard)) - self.counted
        self.counted += max(0.0, expected)
        return max(0.0, expected)


class ReturnRatios:
    """Factors on hazards by cell, a number below 2**64; see the module.

    `cells_max`: the least recently used is forgotten. `trials_max`: idle sessions followed at a time; the
    oldest is dropped, as far as it was counted.
    """

    def __init__(self, cells_max: int, trials_max: int) -> None:
        self._cells_max = cells_max
        self._trials_max = trials_max
        self._cells: OrderedDict[int, list[float]] = OrderedDict()  # trials, returned, expected
        self._trials: OrderedDict[SessionKey, _Trial] = OrderedDict()
        self._ages: list[deque[_Trial]] = [deque() for _ in AGES_S]

    def __len__(self) -> int:
        return len(self._cells)

    def ratio(self, cells: Sequence[int]) -> float:
        """Return the factor of the last of `cells` (general ones first), shrunk to those before it."""
        ratio = 1.0
        for cell in cells:
            trials, returned, expected = self._cells.get(cell, _NOTHING)
            if trials >= KNOWN:
                ratio = (returned + PRIOR * ratio) / (expected + PRIOR)
        return min(max(ratio, RATIO_MIN), RATIO_MAX)

    def is_known(self, cell: int) -> bool:
        """Return whether the cell has had enough trials to say something."""
        return self._cells.get(cell, _NOTHING)[0] >= KNOWN

    def is_open(self, session: SessionKey) -> bool:
        """Return whether the session is followed."""
        return session in self._trials

    def opened(self, session: SessionKey, cells: Sequence[int], curve: Curves | Floats, at_s: float) -> None:
        """Follow a session that is idle from `at_s` on, with the forecast `curve` `[EDGES]` from then on."""
        self.dropped(session)
        if len(self._trials) >= self._trials_max:
            self.dropped(next(iter(self._trials)))
        trial = _Trial(session, tuple(dict.fromkeys(cells)), at_s, -np.asarray(curve, dtype=np.float64))
        self._trials[session] = trial
        self._ages[0].append(trial)
        for cell in trial.cells:
            self._add(cell, 0, 1.0)

    def came_back(self, session: SessionKey, at_s: float) -> None:
        """Count a session as resumed; no-op if it is not followed, or not idle by then."""
        trial = self._trials.get(session)
        self.dropped(session)
        if trial is not None and at_s >= trial.at_s:
            self._count(trial, at_s - trial.at_s, 1.0)

    def dropped(self, session: SessionKey) -> None:
        """Stop following a session; what was counted stays."""
        trial = self._trials.pop(session, None)
        if trial is not None:
            trial.is_over = True

    def advance(self, now_s: float) -> None:
        """Count the sessions that are idle, as far as they have got."""
        left = _MOVES_MAX
        for age, waiting in enumerate(self._ages):
            while waiting and left and (waiting[0].is_over or now_s - waiting[0].at_s >= AGES_S[age]):
                left -= 1
                trial = waiting.popleft()
                if trial.is_over:
                    continue
                self._count(trial, AGES_S[age], 0.0)
                if age + 1 < len(AGES_S):
                    self._ages[age + 1].append(trial)
                else:
                    self.dropped(trial.session)

    @property
    def cells(self) -> Cells:
        """`[cells]`: those known, least recently used first, to save."""
        return np.fromiter(self._cells, dtype=np.uint64, count=len(self._cells))

    @property
    def counts(self) -> Floats:
        """`[cells, 3]`: trials, returned, expected."""
        return np.array(list(self._cells.values()), dtype=np.float64).reshape(-1, 3)

    def restore(self, cells: Cells, counts: Floats) -> None:
        """Continue with saved `cells` and `counts`, as many of the latest as there is room for."""
        newest = list(zip(cells.tolist(), counts.tolist(), strict=True))[-self._cells_max :]
        self._cells = OrderedDict(newest)

    def _count(self, trial: _Trial, idle_s: float, returned: float) -> None:
        expected = trial.until(idle_s)
        for cell in trial.cells:
            self._add(cell, 1, returned)
            self._add(cell, 2, expected)

    def _add(self, cell: int, place: int, amount: float) -> None:
        counts = self._cells.get(cell)
        if counts is None:
            if len(self._cells) >= self._cells_max:
                self._cells.popitem(last=False)
            counts = self._cells[cell] = [0.0, 0.0, 0.0]
        self._cells.move_to_end(cell)
        counts[place] += amount
        if counts[0] >= WINDOW:
            counts[:] = [count * 0.5 for count in counts]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._cells) <= self._cells_max, "too many cells are remembered"
        assert len(self._trials) <= self._trials_max, "too many idle sessions are followed"
        waiting = {trial for ages in self._ages for trial in ages if not trial.is_over}
        assert waiting == set(self._trials.values()), "a trial is lost"
        assert np.isfinite(self.counts).all(), "a count is not finite"
        assert (self.counts >= 0.0).all(), "a count is negative"


_NOTHING: Final = (0.0, 0.0, 0.0)
