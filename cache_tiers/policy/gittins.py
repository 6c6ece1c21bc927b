"""The index by which sessions that return soonest per second of room are kept: Gittins (1979), of curves.

Of a session that was idle for so long it is the best, over all times to wait, of the probability that it
returns by then over the expected time spent waiting: a rate, 1/s. Where hazards fall it is the hazard; where
they rise it looks beyond, as far as that pays. Pure functions of plain arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast import BINS, EDGES_S, LAST_S, WIDTHS_S, Curves, Floats, bins_of

Slots = npt.NDArray[np.intp]

_LEAST: Final = 1e-12
"""Of what a bin adds: less is none."""
_NOTICED: Final = 1e-6
"""An index above the hazard by a smaller share is the hazard: rounding must not order sessions."""
_IS_LATER: Final = np.tri(BINS, BINS, 0, dtype=bool).T
"""`[begin, bin]`: whether the bin is the one that begins there, or later."""


def excesses(curves: Curves) -> Curves:
    """Return f32 `[n, BINS]`: by how much the index at each bin's beginning is above the bin's hazard.

    `curves`: `[n, EDGES]`. 0 where hazards fall.
    """
    log_s = curves.astype(np.float64)
    steps = np.maximum(log_s[:, :-1] - log_s[:, 1:], 0.0)
    hazards = steps / WIDTHS_S
    # Within a bin: P(returns in it), and the expected time waited in it, of who is idle at its beginning.
    lost = -np.expm1(-steps)
    waited = np.where(steps > _LEAST, lost / np.maximum(hazards, _LEAST / LAST_S), WIDTHS_S)
    reached = np.where(_IS_LATER, np.exp(log_s[:, None, :-1] - log_s[:, :-1, None]), 0.0)
    back, spent = np.cumsum(reached * lost[:, None], axis=2), np.cumsum(reached * waited[:, None], axis=2)
    best = np.where(_IS_LATER, back / np.maximum(spent, _LEAST), 0.0).max(axis=2)
    excess: Curves = np.where(best > hazards * (1.0 + _NOTICED), best - hazards, 0.0).astype(np.float32)
    return excess


def indices(curves: Curves, excess: Curves, idle_s: Floats) -> Floats:
    """Return the index, `[n]`, 1/s, of sessions idle for `idle_s`; `excess`: of their `curves`.

    Linear between a bin's beginning and its end, where it is the next bin's, or the bin's own hazard.
    """
    at_s = np.minimum(np.maximum(idle_s, 0.0), LAST_S)
    place = bins_of(at_s)
    rows = np.arange(len(curves))
    following = np.minimum(place + 1, BINS - 1)
    hazard, after = _hazards(curves, rows, place), _hazards(curves, rows, following)
    begin = excess[rows, place].astype(np.float64)
    end = np.maximum(after + excess[rows, following] - hazard, 0.0)
    share = (at_s - EDGES_S[place]) / WIDTHS_S[place]
    index: Floats = (hazard + begin + (end - begin) * share) * (LAST_S / np.maximum(idle_s, LAST_S))
    return index


def _hazards(curves: Curves, rows: Slots, place: Slots) -> Floats:
    lost = curves[rows, place].astype(np.float64) - curves[rows, place + 1]
    hazards: Floats = np.maximum(lost, 0.0) / WIDTHS_S[place]
    return hazards
