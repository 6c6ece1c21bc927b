"""Prices of computing and loading, learned while serving, and two decisions that follow.

Pure; `load_plan.py` decides what to load. Meters are for one user at a time, but a price they returned
is frozen and may be shared.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class TierPrice:
    """Expected time of a load from a tier: `latency_s + nbytes / bytes_per_s`.

    From its plan until its bytes are in the pool's pages: found, fetched, verified, copied.
    `is_proved`: a real load has said so lately; what an unproved price forbids is tried (`Doubt`). That load
    says it of up to `proved_bytes`: of bandwidth, small loads say too little to forbid a large one.
    """

    latency_s: float
    bytes_per_s: float
    is_up: bool = True
    is_proved: bool = True
    proved_bytes: float = math.inf

    @property
    def is_known(self) -> bool:
        """Whether anything was measured; else a load counts as free, until the first has been."""
        return math.isfinite(self.bytes_per_s)

    def proves(self, nbytes: int) -> bool:
        """Whether a real load has lately proved what a load of `nbytes` takes."""
        return self.is_proved and nbytes <= self.proved_bytes

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


SECONDS_MIN, SECONDS_MAX = 1e-7, 600.0
BYTE_S_MIN, BYTE_S_MAX = 1e-13, 0.1

# A nearly zero part still gets its share of a surprise, and so can grow: in units of a_s.
C0_TOKENS_MIN = 1.0
B_PER_A_MIN = 1e-6

# Lower bound of a token's price: c0_s / (this * tokens of the largest step that was measured).
UNSEEN_FACTOR = 8

Sample = tuple[int, int, float]
"""(new tokens, tokens in context, seconds) of one step."""

# Subsets of (c0, a, b) to fit with, in order of preference: a later one must explain more.
_FITS = ((1,), (1, 2), (0, 1), (0, 1, 2), (2,), (0,), (0, 2))


@dataclass(frozen=True, slots=True)
class PrefillPrice:
    """Seconds of a prefill: `c0_s` per step, `a_s` per token, `b_s` per pair of tokens that attend.

    `step_tokens`: most tokens computed in one step; a longer prefill pays `c0_s` several times, which is
    the whole cost of a long prompt where a step takes nothing but its launch.
    Raises `ValueError` if a part is negative or not finite, or a step has no tokens.
    """

    c0_s: float
    a_s: float
    b_s: float
    step_tokens: float = math.inf

    def __post_init__(self) -> None:
        if not all(math.isfinite(part) and part >= 0 for part in (self.c0_s, self.a_s, self.b_s)):
            raise ValueError(f"no price: {self}")
        if not self.step_tokens >= 1:
            raise ValueError(f"no price: {self}")

    def seconds(self, new_tokens: int, context_tokens: int) -> float:
        """Return the time to compute `new_tokens` after `context_tokens`; 0 if there are none."""
        if new_tokens <= 0:
            return 0.0
        steps = max(1, math.ceil(new_tokens / self.step_tokens))
        return steps * self.c0_s + self.chunk_seconds(new_tokens, context_tokens)

    def added_seconds(self, new_tokens: int, context_tokens: int) -> float:
        """Return what they add to a prefill that is due anyway: a share of full steps, no first step."""
        return self.c0_s * new_tokens / self.step_tokens + self.chunk_seconds(new_tokens, context_tokens)

    def step_seconds(self, tokens: int, pairs: float) -> float:
        """Return the time of one step of `tokens` with `pairs` attending, of any number of sequences."""
        return self.c0_s + self.a_s * tokens + self.b_s * pairs

    def chunk_seconds(self, new_tokens: int, context_tokens: int) -> float:
        """Return what they add to a step that runs anyway."""
        return self.a_s * new_tokens + self.b_s * pairs_of(new_tokens, context_tokens)


UNKNOWN_PREFILL = PrefillPrice(0.04, 1.1e-3, 4.5e-7)
"""If nothing could be measured: a 135 M model on one CPU core, where loading always wins."""


def pairs_of(new_tokens: int, context_tokens: int) -> float:
    """Return the pairs of tokens that attend, each counted twice."""
    return float(2 * context_tokens * new_tokens + new_tokens * new_tokens)


class _Learner:
    """Fits positive parts to the last `window` measurements: seconds are about `sum(part * size)`.

    Each measurement makes one Gauss-Newton step in the logs of the parts, on log(measured / predicted):
    each part is adjusted by its share of the seconds. Robust: a surprise counts no more than `CALM`, so a
    few stalls do not matter, while a real change of speed takes over as it fills the window. `KEEP` ties
    the parts to their values, for those that the measurements do not tell apart.
    """

    CALM = 0.3
    KEEP = 0.2
    STEP_MAX = 0.4
    NEWER = 0.93

    def __init__(self, window: int = 48) -> None:
        self._seen: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)

    def forget(self) -> None:
        self._seen.clear()

    def recall(self, sizes: tuple[float, ...], seconds: float) -> None:
        """Add a measurement that the parts already account for."""
        self._seen.append((sizes, math.log(seconds)))

    def learn(self, parts: tuple[float, ...], sizes: tuple[float, ...], seconds: float) -> list[float]:
        """Return `parts` after one more measurement; all finite, parts and seconds positive."""
        self.recall(sizes, seconds)
        now = np.array(parts)
        shares = np.array([seen for seen, _ in self._seen]) * now
        predicted = shares.sum(axis=1)
        shares /= predicted[:, None]
        surprise = np.array([log_s for _, log_s in self._seen]) - np.log(predicted)
        newest_last = np.arange(len(self._seen))[::-1]
        weights = self.NEWER**newest_last * np.minimum(1.0, self.CALM / np.maximum(np.abs(surprise), 1e-9))
        weighted = shares.T * weights
        step = np.linalg.solve(weighted @ shares + self.KEEP * np.eye(len(now)), weighted @ surprise)
        learned: list[float] = (now * np.exp(np.clip(step, -self.STEP_MAX, self.STEP_MAX))).tolist()
        return learned


class PrefillMeter:
    """Learns the price of a prefill from the engine's steps, each part from the steps it dominates.

    `samples`, as in `fit_prefill`, are what `price` was fitted to: they keep the parts apart until steps
    of other lengths were observed.
    """

    def __init__(self, price: PrefillPrice, samples: Sequence[Sample] = ()) -> None:
        self._price = _bounded(price)
        self._learner = _Learner()
        self._largest_tokens = 0
        for new_tokens, context_tokens, seconds in _sane(samples):
            self._learner.recall(_sizes(1, new_tokens, pairs_of(new_tokens, context_tokens)), seconds)
            self._largest_tokens = max(self._largest_tokens, new_tokens)

    @property
    def price(self) -> PrefillPrice:
        return self._price

    def observe(self, new_tokens: int, context_tokens: int, seconds: float) -> None:
        """Record a step that computed `new_tokens` after `context_tokens`; ignores invalid values."""
        if context_tokens >= 0:
            self.observe_steps(1, new_tokens, pairs_of(new_tokens, context_tokens), seconds)

    def observe_steps(self, steps: int, tokens: int, pairs: float, seconds: float) -> None:
        """Record steps that together computed `tokens` with `pairs` attending; ignores invalid values."""
        if steps <= 0 or tokens <= 0 or pairs < 0 or not (math.isfinite(seconds) and seconds > 0):
            return
        now = self._price
        self._largest_tokens = max(self._largest_tokens, tokens // steps)
        parts = (now.c0_s, _floor(now.c0_s, now.a_s, self._largest_tokens), now.b_s)
        c0_s, a_s, b_s = self._learner.learn(parts, _sizes(steps, tokens, pairs), seconds)
        a_s = _floor(c0_s, a_s, self._largest_tokens)
        self._price = _bounded(PrefillPrice(c0_s, a_s, b_s, now.step_tokens))

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._price == _bounded(self._price), f"price out of bounds: {self._price}"


def _sizes(steps: int, tokens: int, pairs: float) -> tuple[float, ...]:
    return float(steps), float(tokens), pairs


def _floor(c0_s: float, a_s: float, largest_tokens: int) -> float:
    """Return the least price of a token, given steps of up to `largest_tokens` were measured.

    If all steps take as long as a nearly empty one, a token's time is too small to see, not zero: with a
    price of zero nothing would be stored or loaded, and a zero part takes no share of a surprise, so it
    could never be learned either.
    """
    return max(a_s, c0_s / (UNSEEN_FACTOR * largest_tokens)) if largest_tokens > 0 else a_s


def _bounded(price: PrefillPrice) -> PrefillPrice:
    a_s = min(max(price.a_s, SECONDS_MIN / 1e3), SECONDS_MAX)
    c0_s = min(max(price.c0_s, C0_TOKENS_MIN * a_s), SECONDS_MAX)
    return replace(price, c0_s=c0_s, a_s=a_s, b_s=min(max(price.b_s, B_PER_A_MIN * a_s), SECONDS_MAX))


def _sane(samples: Sequence[Sample]) -> list[Sample]:
    return [(m, n, s) for m, n, s in samples if m > 0 and n >= 0 and math.isfinite(s) and s > 0]


def fit_prefill(samples: Sequence[Sample], step_tokens: float = math.inf) -> PrefillPrice:
    """Return the price that fits `(new_tokens, context_tokens, seconds)` best, by relative error.

    Non-negative least squares over the three parts. Invalid samples are left out; a part that they do
    not show is small, not zero; without any sample it is `UNKNOWN_PREFILL`. No token is cheaper than
    `c0_s / (8 * largest sample)`. `step_tokens`: as in the price.
    """
    good = _sane(samples)
    if not good:
        return replace(UNKNOWN_PREFILL, step_tokens=step_tokens)
    # Each row divided by its seconds: every sample counts alike, and the target is a row of ones.
    rows = np.array([[1.0 / s, m / s, pairs_of(m, n) / s] for m, n, s in good])
    scale = rows.max(axis=0)
    aim = np.ones(len(good))
    best, best_error = np.zeros(3), math.inf
    for chosen in _FITS:
        columns = list(chosen)
        found = np.linalg.lstsq(rows[:, columns] / scale[columns], aim, rcond=None)[0]
        error = float(np.linalg.norm(rows[:, columns] / scale[columns] @ found - aim))
        if (found >= 0).all() and error < 0.99 * best_error - 1e-9:
            best, best_error = np.zeros(3), error
            best[columns] = found / scale[columns]
    c0_s, a_s, b_s = (float(part) for part in best)
    a_s = _floor(c0_s, a_s, max(m for m, _, _ in good))
    return _bounded(PrefillPrice(c0_s, a_s, b_s, step_tokens))


def moving_seconds(small_s: float, whole_s: float) -> float:
    """Return what the bytes take that the larger of two measured loads moves more.

    On a fast medium noise hides the difference; a tenth of the whole bounds the bandwidth that is claimed.
    """
    return max(whole_s - small_s, whole_s / 10, 1e-9)


EVEN_BYTES = 1 << 20
"""`even_bytes` of a meter: the first load of a tier of which nothing is known is taken apart as if latency
were the time of so many bytes. A small one then says little of bandwidth, a large one little of latency."""


PROVED_TIMES = 4
"""A load proves the price of those that are up to so many times as large."""


class TierMeter:
    """Learns latency and bandwidth of the road of a load from loads of any sizes.

    `first`: what a start has measured, None: nothing yet, and a load counts as free. A price that no load has
    confirmed for `doubt_s` is unproved: then a load that was cheaper is believed at once, since nothing but a
    quicker road makes one cheaper, and the next loads would correct it. The penalty of failures is halved in
    `failure_fade_s`. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        first: TierPrice | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        doubt_s: float = 20.0,
        failure_fade_s: float = 30.0,
        even_bytes: int = EVEN_BYTES,
    ) -> None:
        """Raises `ValueError` if a price or a time is not positive and finite."""
        if not all(math.isfinite(x) and x > 0 for x in (doubt_s, failure_fade_s)):
            raise ValueError(f"no times: {doubt_s} s, {failure_fade_s} s")
        self._parts: tuple[float, float] | None = None
        self._learner = _Learner()
        self._clock = clock
        self._doubt_s = doubt_s
        self._failure_fade_s = failure_fade_s
        self._even_bytes = even_bytes
        self._proved_at_s: float | None = None
        self._large_at_s = -math.inf  # when a load of `_large_bytes` or more was last observed
        self._large_bytes = 0
        self._penalty_s = 0.0
        self._penalty_at_s = clock()
        if first is not None:
            self.measured(first)

    def measured(self, first: TierPrice) -> None:
        """Take over what a start has measured, unless a real load has said more.

        Raises `ValueError` if it is no price.
        """
        if not all(math.isfinite(x) and x > 0 for x in (first.latency_s, first.bytes_per_s)):
            raise ValueError(f"no price: {first.latency_s} s, {first.bytes_per_s} B/s")
        if self._proved_at_s is None:
            self._parts = _bounded_transfer(first.latency_s, 1.0 / first.bytes_per_s)

    def price(self, is_up: bool = True) -> TierPrice:
        """Return the expected price of a load now."""
        penalty_s = self._fade_penalty()
        if self._parts is None:
            return TierPrice(penalty_s, math.inf, is_up, is_proved=False)
        latency_s, byte_s = self._parts
        is_proved = self._is_proved()
        return TierPrice(
            min(latency_s + penalty_s, SECONDS_MAX),
            1.0 / byte_s,
            is_up,
            is_proved,
            PROVED_TIMES * self._large_bytes if is_proved else math.inf,
        )

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record that a load of `nbytes` took `seconds`; ignores invalid values."""
        if nbytes < 0 or not (math.isfinite(seconds) and seconds >= 0):
            return
        seconds = max(seconds, SECONDS_MIN)
        if self._parts is None:
            byte_s = seconds / (self._even_bytes + nbytes)
            self._believe((self._even_bytes * byte_s, byte_s), nbytes, seconds)
        elif not self._is_proved(nbytes) and (cheaper := seconds / self._seconds(nbytes)) < 1.0:
            latency_s, byte_s = self._parts
            self._believe((latency_s * cheaper, byte_s * cheaper), nbytes, seconds)
        else:
            learned = self._learner.learn(self._parts, (1.0, float(nbytes)), seconds)
            self._parts = _bounded_transfer(*learned)
        self._proved_at_s = self._clock()
        if nbytes >= self._large_bytes or self._proved_at_s - self._large_at_s >= self._doubt_s:
            self._large_at_s, self._large_bytes = self._proved_at_s, nbytes
        self._penalty_s = self._fade_penalty() / 2

    def observe_failure(self, seconds: float) -> None:
        """Record a failure after `seconds`: for a while each load is priced higher by the lost time."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        least_s = 0.0 if self._parts is None else self._parts[0]
        self._penalty_s = min(self._fade_penalty() + max(seconds, least_s), SECONDS_MAX)

    def forgive(self) -> None:
        """Drop the penalty of failures: the tier was tried and works."""
        self._penalty_s = 0.0

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        latency_s, byte_s = self._parts or (SECONDS_MIN, BYTE_S_MIN)
        assert SECONDS_MIN <= latency_s <= SECONDS_MAX, f"latency out of bounds: {latency_s} s"
        assert BYTE_S_MIN <= byte_s <= BYTE_S_MAX, f"bandwidth out of bounds: {byte_s} s a byte"
        assert 0 <= self._penalty_s <= SECONDS_MAX, f"penalty out of bounds: {self._penalty_s} s"

    def _believe(self, parts: tuple[float, float], nbytes: int, seconds: float) -> None:
        """Replace what was known by what one load says."""
        self._parts = _bounded_transfer(*parts)
        self._learner.forget()
        self._learner.recall((1.0, float(nbytes)), seconds)

    def _seconds(self, nbytes: int) -> float:
        assert self._parts is not None, "nothing is known"
        return self._parts[0] + nbytes * self._parts[1]

    def _is_proved(self, nbytes: int = 0) -> bool:
        if self._proved_at_s is None or nbytes > PROVED_TIMES * self._large_bytes:
            return False
        now_s = self._clock()
        self._proved_at_s = min(self._proved_at_s, now_s)  # if the clock jumped back
        return now_s - self._proved_at_s < self._doubt_s

    def _fade_penalty(self) -> float:
        now_s = self._clock()
        self._penalty_s *= 0.5 ** (max(0.0, now_s - self._penalty_at_s) / self._failure_fade_s)
        self._penalty_at_s = now_s
        return self._penalty_s


def _bounded_transfer(latency_s: float, byte_s: float) -> tuple[float, float]:
    return (
        min(max(latency_s, SECONDS_MIN), SECONDS_MAX),
        min(max(byte_s, BYTE_S_MIN), BYTE_S_MAX),
    )


def swap_or_drop(
    computed_tokens: int, nbytes: int, copy: TierPrice, prefill: PrefillPrice
) -> Literal["swap", "drop"]:
    """Decide for a sequence that must leave: copy its blocks out and in again, or recompute them."""
    if not copy.is_up or 2 * copy.seconds(nbytes) >= prefill.seconds(computed_tokens, 0):
        return "drop"
    return "swap"


def worth_storing(tokens: int, nbytes: int, prefill: PrefillPrice, load: TierPrice) -> bool:
    """Return whether loading a chain of `tokens` from its beginning beats recomputing it.

    As a whole: a deep block costs more to compute than a shallow one, but is of no use without it. Without
    what is paid once a turn, not once an extent: the latency (all extents of a chain are fetched at once)
    and `c0_s`. With them a chat of short turns would never be stored at all.
    """
    return load.is_up and nbytes / load.bytes_per_s < prefill.added_seconds(tokens, 0)
