"""What having a copy saves: seconds a byte, to get it back from the next tier or to compute it again. Pure.

Prices are told by the node; extents of which nobody has said what computing them takes (found at a start) are
taken to be like the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cache_tiers.extent import TIERS, LoadSource
from cache_tiers.messages import TierPrice

if TYPE_CHECKING:
    from cache_tiers.held_extent import HeldCopy

RATE = 0.05
"""How fast the usual price of computing follows what is offered."""


class SavingPrices:
    """`cost_weighting`: by what its own blocks take to compute, which grows with their depth.

    Without it every byte of them is as dear as the others'.
    """

    def __init__(self, cost_weighting: bool) -> None:
        self._cost_weighting = cost_weighting
        self._recompute_s = 0.0  # a byte, the usual; 0: nothing was offered yet
        self._loads: Mapping[LoadSource, TierPrice] = {}

    def loads(self, prices: Mapping[LoadSource, TierPrice]) -> None:
        """What loading from each tier takes now."""
        self._loads = prices

    def offered(self, recompute_s: float, nbytes: int) -> None:
        """A record of `nbytes` was offered whose blocks take `recompute_s` to compute; 0 says nothing."""
        if recompute_s > 0 and nbytes > 0:
            now_s = recompute_s / nbytes
            self._recompute_s += (now_s - self._recompute_s) * (RATE if self._recompute_s else 1.0)

    def saved_s(self, copy: HeldCopy) -> float:
        """Seconds a byte; 1 for all as long as nothing is known."""
        if not self._recompute_s:
            return 1.0
        extent, recompute_s = copy.extent, self._recompute_s
        if self._cost_weighting and extent.recompute_s:
            recompute_s = extent.recompute_s / copy.nbytes
        for below in TIERS[TIERS.index(copy.tier) + 1 :]:
            price = self._loads.get(below)
            if below in extent.copies and price is not None and price.is_up:
                return min(recompute_s, price.seconds(copy.nbytes) / copy.nbytes)
        return recompute_s
