"""What stays and what goes: how much a tier loses with the next thing that a session would give up.

Pure functions of plain arrays, one element a candidate: the engine's pool, the node's tiers, the simulator
and `samovar plan` all ask these. A policy moves nothing and keeps no books: what is pinned, whose quota
is used up and which candidates there are is the caller's concern (`eviction_queue.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache_tiers.forecast import Floats, resume_probability
from cache_tiers.policy.idle_sessions import NOBODY, IdleSessions, Slots
from configs.sections import PolicySettings

SUPERSEDED_SHARE = 0.02
"""What an edited or regenerated branch of a session is worth, beside what the session uses (PREDICTOR.md)."""


RECENT_SHARE = 1e-3
"""A hazard is constant within a bin: of what is equally likely the longest unused goes first."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What could go next, `[n]` each.

    `slots`: whose (`NOBODY`: unknown). `used_s`: last use. `end_tokens`: where in the session's chain it
    ends. `saved_s`: seconds that having it saves, a byte.
    """

    slots: Slots
    used_s: Floats
    end_tokens: Floats
    saved_s: Floats

    def __len__(self) -> int:
        return len(self.slots)


class ResidencyPolicy(Protocol):
    """The one interface of all policies.

    `superseded_share`: what a branch that its session has left behind is worth, beside one that it uses.
    `looks_at_depth`: the worth depends on `Candidates.end_tokens`. `clean_first`: what a lower tier holds as
    well goes before all that would be lost; others weigh that by `Candidates.saved_s`.
    """

    name: str
    superseded_share: float
    looks_at_depth: bool
    clean_first: bool

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        """`[n]`, finite; the least goes first. `horizon_s`: how far ahead this tier looks."""
        ...

    def shared_worth(self, rates: Floats, used_s: Floats, best: Floats, horizon_s: float) -> Floats:
        """Of what several sessions use. `rates`: uses a second; `best`: the worth of the best of them."""
        ...


class LeastRecentlyUsed:
    """By last use."""

    name = "lru"
    superseded_share = 1.0
    looks_at_depth = False
    clean_first = True

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        return of.used_s

    def shared_worth(self, rates: Floats, used_s: Floats, best: Floats, horizon_s: float) -> Floats:
        return used_s


class TimeToLive:
    """Least recently used, but first whose time is over: `ttl_s` after a turn, `ttl_tool_s` after a call."""

    name = "ttl"
    superseded_share = 1.0
    looks_at_depth = False
    clean_first = True

    def __init__(self, ttl_s: float, ttl_tool_s: float) -> None:
        self._ttl_s = ttl_s
        self._ttl_tool_s = ttl_tool_s

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        ttl_s = np.where(sessions.is_tool[of.slots], self._ttl_tool_s, self._ttl_s)
        return _after_others(of.used_s, now_s - of.used_s <= ttl_s)

    def shared_worth(self, rates: Floats, used_s: Floats, best: Floats, horizon_s: float) -> Floats:
        return np.maximum(used_s, best)


class TailOptimized:
    """Least recently used, but first what no promise needs: the end of a long chain.

    A session's next turn keeps its TTFT while it computes `slo_tokens` at most; of its chain as much as
    that allows, less what the turn adds, may be missing (T-LRU: "Tail-Optimized Caching for LLM Inference",
    2025).
    """

    name = "t-lru"
    superseded_share = 1.0
    looks_at_depth = True
    clean_first = True

    def __init__(self, slo_tokens: int) -> None:
        self._slo_tokens = slo_tokens

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        chain = sessions.tokens[of.slots] + sessions.new_tokens[of.slots]
        is_needed = (of.end_tokens <= chain - self._slo_tokens) & (of.slots != NOBODY)
        return _after_others(of.used_s, is_needed)

    def shared_worth(self, rates: Floats, used_s: Floats, best: Floats, horizon_s: float) -> Floats:
        return np.maximum(used_s, best)


class LikelyReturn:
    """`P(comes back within the horizon | idle) x seconds saved / bytes`, whoever has made the curves."""

    superseded_share = SUPERSEDED_SHARE
    looks_at_depth = False
    clean_first = False

    def __init__(self, name: str) -> None:
        self.name = name

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        since_s = np.where(of.slots == NOBODY, of.used_s, sessions.ended_s[of.slots])
        likely = resume_probability(sessions.curves.take(of.slots, axis=0), now_s - since_s, horizon_s)
        recent = 1.0 / (1.0 + np.log1p(np.maximum(now_s - of.used_s, 0.0)))
        worth: Floats = likely * of.saved_s * (1.0 + RECENT_SHARE * recent)
        return worth

    def shared_worth(self, rates: Floats, used_s: Floats, best: Floats, horizon_s: float) -> Floats:
        worth: Floats = np.maximum(best, -np.expm1(-rates * horizon_s))
        return worth


class TimeOracle:
    """By when the session really comes back: what no policy can know (simulator only)."""

    name = "oracle"
    superseded_share = SUPERSEDED_SHARE
    looks_at_depth = False
    clean_first = False

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        worth: Floats = 1.0 / (1.0 + np.maximum(sessions.next_s[of.slots] - now_s, 0.0))
        return worth

    def shared_worth(self, rates: Floats, used_s: Floats, best: Floats, horizon_s: float) -> Floats:
        worth: Floats = np.maximum(best, rates / (1.0 + rates))
        return worth


def make_policy(settings: PolicySettings) -> ResidencyPolicy:
    """The policy that is configured."""
    if settings.name == "lru":
        return LeastRecentlyUsed()
    if settings.name == "ttl":
        return TimeToLive(settings.ttl_s, settings.ttl_tool_s)
    if settings.name == "t-lru":
        return TailOptimized(settings.slo_tokens)
    return LikelyReturn(settings.name)


def _after_others(used_s: Floats, is_kept: npt.NDArray[np.bool_]) -> Floats:
    """By last use, those that are kept after all others; times of one clock are less apart than this."""
    worth: Floats = used_s + np.where(is_kept, 1e10, 0.0)
    return worth
