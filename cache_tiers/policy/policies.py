"""Residency policies: what each eviction candidate is worth to a tier.

Pure functions of plain arrays, one element per candidate, shared by the engine's pool, the node's tiers,
the simulator and `samovar plan`. A policy only ranks: pins, quotas and the choice of candidates are the
caller's (`eviction_queue.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast import LEFT_SHARE, Floats, resume_probability
from samovar.cache_tiers.policy.idle_sessions import NO_SESSION, IdleSessions, Slots
from samovar.configs.sections import PolicySettings

RECENT_SHARE = 1e-3
"""Weight of recency: a hazard is constant within a bin, so among equals the longest unused goes first."""

LEAST = 1e-9
"""P(resumes) of what never does: where no forecast tells things apart, recency and seconds saved do."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What could be evicted next, `[n]` each.

    `slots`: the session's (`NO_SESSION`: unknown). `used_s`: last use. `end_tokens`: where in the session's
    chain it ends. `saved_s`: seconds saved by having it, per byte.
    """

    slots: Slots
    used_s: Floats
    end_tokens: Floats
    saved_s: Floats

    def __len__(self) -> int:
        return len(self.slots)


class ResidencyPolicy(Protocol):
    """The interface of all policies.

    `superseded_share`: worth of a superseded branch, relative to one that its session uses, until a forecast
    says what it is (`IdleSessions.left_share`); 1: such branches are as any other.
    `looks_at_depth`: the worth depends on `Candidates.end_tokens`. `clean_first`: what a lower tier holds
    as well is evicted before all that would be lost; other policies weigh that by `Candidates.saved_s`.
    """

    name: str
    superseded_share: float
    looks_at_depth: bool
    clean_first: bool

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        """Return `[n]`, finite; the least is evicted first. `horizon_s`: how far ahead this tier looks."""
        ...

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        """Return the worth of what several sessions share, in the unit of `worth`.

        `rates`: uses/s. `saved_s`: as in `Candidates`. `best`: the highest worth that it has to one of them.
        """
        ...


class LeastRecentlyUsed:
    """Evicts the least recently used."""

    name = "lru"
    superseded_share = 1.0
    looks_at_depth = False
    clean_first = True

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        return of.used_s

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        return used_s


class TimeToLive:
    """LRU, but expired first: `ttl_s` after a turn, `ttl_tool_s` after a tool call."""

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

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        return np.maximum(used_s, best)


class TailOptimized:
    """LRU, but first what the TTFT target does not need: the end of a long chain.

    A session's next turn keeps its TTFT if it computes at most `slo_tokens`; as much of its chain as that
    allows, less what the turn adds, may be missing (T-LRU: "Tail-Optimized Caching for LLM Inference",
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
        is_needed = (of.end_tokens <= chain - self._slo_tokens) & (of.slots != NO_SESSION)
        return _after_others(of.used_s, is_needed)

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        return np.maximum(used_s, best)


HORIZON_SHARES = (1.0, 1.0 / 8.0, 1.0 / 64.0)
"""Of the tier's horizon: a return counts once for each that it is within, so the sooner the more. Where room
is short most hits are of who is back in seconds, and its room is soon free for another; and no time at which
a return stops counting is right for all sessions."""


class LikelyReturn:
    """Ranks by `P(resumes within the horizon | idle) x seconds saved / bytes`, from any curves.

    That probability is a mean of those within each of `shares` of the horizon. Beyond the range of the
    forecasts, and where they say the same, the least recently used goes first.
    """

    superseded_share = LEFT_SHARE
    looks_at_depth = False
    clean_first = False

    def __init__(self, name: str, shares: Sequence[float] = HORIZON_SHARES) -> None:
        self.name = name
        self._shares = shares

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        since_s = np.where(of.slots == NO_SESSION, of.used_s, sessions.ended_s[of.slots])
        idle_s = now_s - since_s
        curves = sessions.curves.take(of.slots, axis=0)
        likely = np.zeros(len(of))
        for share in self._shares:
            likely += resume_probability(curves, idle_s, share * horizon_s)
        likely /= len(self._shares)
        recent = 1.0 / (1.0 + np.log1p(np.maximum(now_s - of.used_s, 0.0)))
        worth: Floats = (likely + LEAST) * of.saved_s * (1.0 + RECENT_SHARE * recent)
        return worth

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        likely = np.zeros(len(rates))
        for share in self._shares:
            likely -= np.expm1(-rates * (share * horizon_s))
        likely /= len(self._shares)
        worth: Floats = np.maximum(best, (likely + LEAST) * saved_s)
        return worth


class TimeOracle:
    """Ranks by when the session really resumes, which no policy can know (simulator only)."""

    name = "oracle"
    superseded_share = LEFT_SHARE
    looks_at_depth = False
    clean_first = False

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        worth: Floats = 1.0 / (1.0 + np.maximum(sessions.next_s[of.slots] - now_s, 0.0))
        return worth

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        worth: Floats = np.maximum(best, rates / (1.0 + rates))
        return worth


def make_policy(settings: PolicySettings) -> ResidencyPolicy:
    """Return the configured policy."""
    if settings.name == "lru":
        return LeastRecentlyUsed()
    if settings.name == "ttl":
        return TimeToLive(settings.ttl_s, settings.ttl_tool_s)
    if settings.name == "t-lru":
        return TailOptimized(settings.slo_tokens)
    return LikelyReturn(settings.name)


def _after_others(used_s: Floats, is_kept: npt.NDArray[np.bool_]) -> Floats:
    """Rank by last use, kept ones after all others; clock times differ by less than the offset."""
    worth: Floats = used_s + np.where(is_kept, 1e10, 0.0)
    return worth
