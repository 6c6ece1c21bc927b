"""How good forecasts are: AUC, expected calibration error, Brier score.

Of turns that were seen for the whole horizon; calibration also of those that were not (censored).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.turns import Floats

ECE_BINS = 10


def auc(forecasts: Floats, came_back: npt.NDArray[np.bool_]) -> float | None:
    """P(one that came back has the higher forecast than one that did not), ties half; None without both."""
    back = int(came_back.sum())
    if not 0 < back < len(came_back):
        return None
    _, group, sizes = np.unique(forecasts, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    return float((ranks[came_back].sum() - back * (back + 1) / 2) / (back * (len(came_back) - back)))


def ece(forecasts: Floats, came_back: npt.NDArray[np.bool_]) -> float | None:
    """Mean distance of forecast and share over `ECE_BINS` equal ranges of the forecast; None of nothing."""
    if not len(forecasts):
        return None
    bins = np.minimum((forecasts * ECE_BINS).astype(np.intp), ECE_BINS - 1)
    off = np.bincount(bins, weights=forecasts - came_back, minlength=ECE_BINS)
    return float(np.abs(off).sum() / len(forecasts))


def censored_ece(
    forecasts: Floats, idle_s: Floats, seen_s: Floats, horizon_s: float
) -> tuple[float, float] | None:
    """`ece`, the shares by Kaplan-Meier: turns that were seen for less than the horizon count until then.

    `[n]` each; `idle_s`: infinite where nobody came back, `seen_s`: how long it would have been noticed.
    Second, what forecasts without a fault would get by chance, from so few turns (Greenwood, 1926). None
    if no turn was seen for the whole horizon.
    """
    if not (seen_s >= horizon_s).any():
        return None
    bins = np.minimum((forecasts * ECE_BINS).astype(np.intp), ECE_BINS - 1)
    off = chance = 0.0
    for each in range(ECE_BINS):
        own = bins == each
        if not own.any():
            continue
        came_back = idle_s[own] <= np.minimum(seen_s[own], horizon_s)
        until_s = np.minimum(np.minimum(idle_s[own], seen_s[own]), horizon_s)
        at_risk = own.sum() - np.arange(own.sum())
        events = came_back[np.lexsort((~came_back, until_s))]
        stayed = float(np.prod(1.0 - events / at_risk))
        spread = stayed * math.sqrt(float((events / (at_risk * np.maximum(at_risk - 1, 1))).sum()))
        off += float(own.sum()) * abs(float(forecasts[own].mean()) - (1.0 - stayed))
        chance += float(own.sum()) * math.sqrt(2.0 / math.pi) * spread
    return off / len(forecasts), chance / len(forecasts)


def brier(forecasts: Floats, came_back: npt.NDArray[np.bool_]) -> float | None:
    """Mean square of the error; None of nothing."""
    return float(np.square(forecasts - came_back).mean()) if len(forecasts) else None
