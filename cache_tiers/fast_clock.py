"""A clock that runs faster than another one: to serve a recording of an hour in minutes.

For who is idle for how long, who comes back when, and what expires; deadlines and prices stay real.
"""

from __future__ import annotations

from collections.abc import Callable


def fast_clock(clock: Callable[[], float], rate: float) -> Callable[[], float]:
    """Where `clock` tells a second, this one tells `rate` of them; both have been at 0 at once."""
    return clock if rate == 1.0 else lambda: clock() * rate
