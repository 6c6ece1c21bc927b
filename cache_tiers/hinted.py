"""What a client's hint makes of a survival curve.

A hint is believed for the most part and no further: the rest of the curve stays what it was, so that a
client that says it will be back and is not is soon an idle session like others. Pure arithmetic.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cache_tiers.survival import EDGES, EDGES_S, LAST_S, Curves, Floats
from cache_tiers.turns import Hint, HintEvent

TRUST: Final = 0.9
"""Share of hinted sessions that are taken to return when they say."""

RETURN_S: Final[dict[HintEvent, float]] = {"typing": 10.0, "tool_finished": 2.0}
"""When a session is expected that says only what it is doing."""

_SOONEST_S: Final = 0.5
_STEEPNESS: Final = 4.0
_LOG_MIN: Final = -80.0


def hinted(curve: Curves, idle_s: float, hint: Hint) -> Curves:
    """The curve `[EDGES]` from `hint.at_s` on, of a session with `curve` that had been idle for `idle_s`.

    `closed`: never. An expected return, or one that follows from the event: most of the probability lies
    around it (log-logistic). Else what is left of `curve`.
    """
    if hint.event == "closed":
        return np.zeros(EDGES, dtype=np.float32)
    since = np.interp(max(idle_s, 0.0) + EDGES_S, EDGES_S, curve)
    rest = since - since[0]
    expected_s = hint.expected_return_s
    if expected_s is None or expected_s != expected_s:
        expected_s = RETURN_S.get(hint.event) if hint.event is not None else None
    if expected_s is None:
        return _curve(rest)
    expected_s = min(max(expected_s, _SOONEST_S), LAST_S)
    waiting = 1.0 / (1.0 + (EDGES_S / expected_s) ** _STEEPNESS)
    mixed = TRUST * waiting + (1.0 - TRUST) * np.exp(np.maximum(rest, _LOG_MIN))
    return _curve(np.log(mixed))


def _curve(log_s: Floats) -> Curves:
    curve: Curves = log_s.astype(np.float32)
    return curve
