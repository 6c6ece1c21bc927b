"""How often something is used: a count that fades. For what many sessions share. Pure."""

from __future__ import annotations

import math

RATE_S = 600.0
"""Time constant: uses of that long ago count for a third."""


def faded_rate(rate_per_s: float, idle_s: float) -> float:
    """A rate as of now that was `rate_per_s` at the last use, `idle_s` ago."""
    return rate_per_s * math.exp(-max(idle_s, 0.0) / RATE_S)


def used_rate(rate_per_s: float, idle_s: float) -> float:
    """The rate after one more use, `idle_s` after the last one."""
    return faded_rate(rate_per_s, idle_s) + 1.0 / RATE_S
