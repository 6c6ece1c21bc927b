"""How good forecasts are: AUC, expected calibration error, Brier score."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cache_tiers.survival import Floats

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


def brier(forecasts: Floats, came_back: npt.NDArray[np.bool_]) -> float | None:
    """Mean square of the error; None of nothing."""
    return float(np.square(forecasts - came_back).mean()) if len(forecasts) else None
