"""Load or compute: what of a prompt to load from the tiers, and how long to wait for it, decided by price.

Pure arithmetic over prices. The caller that carries out the plan verifies what the tiers return, and
computes what does not arrive in time. What a price forbids is done all the same now and then (`Doubt`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from samovar.cache_tiers.blocks import LoadSource
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice

PlanDecision = Literal["none", "load", "recompute", "meet"]

# Meeting keeps the engine computing while others could use it, so it must save this share of the cost of
# computing all. By then the load is a quarter of the recompute or more. It is a price, not a threshold, so
# that a faster tier can never make a plan more expensive.
MEET_COST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """`tokens` consecutive tokens from `first_token` on that are in `tier`; a fetch moves `nbytes`."""

    first_token: int
    tokens: int
    nbytes: int
    tier: LoadSource

    @property
    def end(self) -> int:
        return self.first_token + self.tokens


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load and what to compute of a prompt.

    `decision`: `none` (nothing to load), `load` (fetch `pieces`, then compute the rest), `recompute` (there
    was something, but computing costs no more), `meet` (fetch `pieces`, ordered from the back, while
    computing from the front, up to where the last of them begins).
    `load_s`: until the last piece has arrived. `recompute_s`: what computing the loaded tokens would add
    to the prefill that is due anyway. With `recompute` these two describe the best load that was
    declined. `total_s`: price of the whole prompt until its first token. `hedge_after_s`: a load that
    takes longer is late; at a price that no real load has proved, not before computing would be done. 0 if
    nothing is loaded.
    """

    decision: PlanDecision
    pieces: tuple[LoadPiece, ...]
    load_s: float
    recompute_s: float
    total_s: float
    hedge_after_s: float


def plan_load(
    *,
    prompt_tokens: int,
    resident_tokens: int,
    pieces: Sequence[LoadPiece],
    prices: Mapping[LoadSource, TierPrice],
    prefill: PrefillPrice,
    parallel: int,
    hedge_factor: float,
    hedge_slack_s: float,
    step_s: float = 0.0,
    doubt: Doubt | None = None,
) -> LoadPlan:
    """Return the cheapest plan for a prompt of which `resident_tokens` are in the pool.

    `pieces` continue from there, in order; the run ends at the first piece that does not follow the one
    before it, exceeds the prompt, or whose tier is down or has no price. `parallel` fetches of a tier run
    at a time: they share its bandwidth, their latencies overlap; tiers do not wait for each other.
    `step_s`: what is lost by not being in the step that runs now for other sequences: what is loaded
    meanwhile has to wait for the next one, so a few tokens are computed in this one.
    `doubt`: may add pieces that it costs more to load, so that their price is proved.
    At least one token is always computed. Raises `ValueError` unless
    `0 <= resident_tokens < prompt_tokens` and `parallel >= 1`.
    """
    if not 0 <= resident_tokens < prompt_tokens or parallel < 1:
        raise ValueError(f"no plan for {resident_tokens} of {prompt_tokens} tokens, {parallel} at a time")
    usable = tuple(_usable(pieces, resident_tokens, prompt_tokens, prices))
    compute_all_s = prefill.seconds(prompt_tokens - resident_tokens, resident_tokens)
    if not usable:
        return LoadPlan("none", (), 0.0, 0.0, compute_all_s, 0.0)
    loads = _Loads(usable, prices, parallel)

    def rest_s(loaded: int) -> float:
        end = usable[loaded - 1].end
        return prefill.seconds(max(1, prompt_tokens - end), min(end, prompt_tokens - 1))

    def added_s(first: int, end: int) -> float:
        start = usable[first].first_token
        return prefill.added_seconds(usable[end - 1].end - start, start)

    counts = range(1, len(usable) + 1)
    load_total_s, loaded = min((max(loads.seconds(0, n), step_s) + rest_s(n), n) for n in counts)
    meet_total_s, met, meet_first = math.inf, 0, 0
    for n in counts:
        first, until_met_s = _meeting_point(loads, n, prefill, resident_tokens)
        total_s = until_met_s + rest_s(n) + MEET_COST_SHARE * compute_all_s
        if total_s < meet_total_s:
            meet_total_s, met, meet_first = total_s, n, first

    decision: PlanDecision = "load" if load_total_s < compute_all_s else "recompute"
    total_s, first, end = min(load_total_s, compute_all_s), 0, loaded
    if meet_total_s < total_s:
        decision, total_s, first, end = "meet", meet_total_s, meet_first, met
    declined = usable[0 if decision == "recompute" else end :]
    tried = 0 if doubt is None else doubt.leading((piece.nbytes, prices[piece.tier]) for piece in declined)
    if tried:
        first, end = (0, tried) if decision == "recompute" else (first, end + tried)
        decision = "load" if decision == "recompute" else decision
        total_s = max(total_s, loads.seconds(first, end) + rest_s(end))
    load_s = loads.seconds(first, end)
    chosen = () if decision == "recompute" else usable[first:end]
    recompute_s = added_s(first, end)
    hedge_after_s = load_s * hedge_factor + hedge_slack_s if chosen else 0.0
    if not all(prices[piece.tier].proves(piece.nbytes) for piece in chosen):
        # At a price that no real load has proved none is late: a hedge takes the core that it needs.
        hedge_after_s = max(hedge_after_s, recompute_s)
    return LoadPlan(
        decision=decision,
        pieces=chosen[::-1] if decision == "meet" else chosen,
        load_s=load_s,
        recompute_s=recompute_s,
        total_s=total_s,
        hedge_after_s=hedge_after_s,
    )


def _usable(
    pieces: Sequence[LoadPiece],
    resident_tokens: int,
    prompt_tokens: int,
    prices: Mapping[LoadSource, TierPrice],
) -> Iterator[LoadPiece]:
    """Yield the pieces until the run ends."""
    end = resident_tokens
    for piece in pieces:
        price = prices.get(piece.tier)
        if price is None or not price.is_up:
            return
        # No sum with this price may become infinite or NaN.
        if not (math.isfinite(price.latency_s) and price.latency_s >= 0 and price.bytes_per_s >= 1):
            return
        if piece.first_token != end or piece.tokens < 1 or piece.nbytes < 0 or piece.end > prompt_tokens:
            return
        end = piece.end
        yield piece


class _Loads:
    """Time to load `pieces[first:end]`, for any `first <= end`."""

    def __init__(
        self,
        pieces: Sequence[LoadPiece],
        prices: Mapping[LoadSource, TierPrice],
        parallel: int,
    ) -> None:
        self.pieces = pieces
        self._parallel = parallel
        self._prices = [(tier, prices[tier]) for tier in dict.fromkeys(piece.tier for piece in pieces)]
        # Per tier, prefix sums over the pieces: how many of the first n are in it, and their bytes.
        self._count = [
            list(accumulate((int(p.tier == tier) for p in pieces), initial=0)) for tier, _ in self._prices
        ]
        self._nbytes = [
            list(accumulate((p.nbytes if p.tier == tier else 0 for p in pieces), initial=0))
            for tier, _ in self._prices
        ]

    def seconds(self, first: int, end: int) -> float:
        """Return the time until they are there; `first < end`."""
        slowest_s = 0.0
        for (_, price), count, nbytes in zip(self._prices, self._count, self._nbytes, strict=True):
            rounds = -(-(count[end] - count[first]) // self._parallel)
            moved_s = (nbytes[end] - nbytes[first]) / price.bytes_per_s
            slowest_s = max(slowest_s, rounds * price.latency_s + moved_s)
        return slowest_s


def _meeting_point(loads: _Loads, end: int, prefill: PrefillPrice, resident_tokens: int) -> tuple[int, float]:
    """Return the best `first` to compute `pieces[:first]` while `pieces[first:end]` load, and its time.

    At least one piece is computed and one loaded; (0, infinity) if there are too few.
    """

    def compute_s(first: int) -> float:
        start = loads.pieces[first].first_token
        return prefill.seconds(start - resident_tokens, resident_tokens)

    # With every piece computed, computing takes longer and loading less: the best is where they cross, or
    # just before that.
    crossing = bisect_left(range(1, end), True, key=lambda k: compute_s(k) >= loads.seconds(k, end)) + 1
    best = (math.inf, 0)
    for first in (crossing - 1, crossing):
        if 1 <= first < end:
            best = min(best, (max(compute_s(first), loads.seconds(first, end)), first))
    return best[1], best[0]


DOUBT_SHARE = 0.01
"""Of the bytes that are decided on, so many may be moved against the price."""
BURST_EXTENTS = 4
"""So many extents at first, and at most at a time: they are loaded side by side, as all loads are."""


class Doubt:
    """Doubts each "do not" that no real load has proved lately (`TierPrice.proves`).

    Without this a price that is too high stays so for good: what is never stored is never loaded, and what is
    never loaded is never measured. Stores, loads and swaps each have one of their own, a token bucket of
    bytes.
    `extent_bytes_max`: of the largest extent, so that one always fits.
    """

    def __init__(self, extent_bytes_max: int) -> None:
        self._burst_bytes = BURST_EXTENTS * extent_bytes_max
        self._bytes = float(self._burst_bytes)

    def decided(self, nbytes: int) -> None:
        """Record that `nbytes` were decided on, whatever was decided."""
        self._bytes = min(self._burst_bytes, self._bytes + DOUBT_SHARE * max(nbytes, 0))

    def leading(self, declined: Iterable[tuple[int, TierPrice]]) -> int:
        """Return how many of these (bytes, price) are tried: none is of use without those before it."""
        count = 0
        for nbytes, price in declined:
            if not self.tries(nbytes, price):
                break
            count += 1
        return count

    def tries(self, nbytes: int, price: TierPrice) -> bool:
        """Return whether `nbytes` that `price` forbids are moved all the same; they are counted then."""
        if price.proves(nbytes) or not price.is_up or nbytes > self._bytes:
            return False
        self._bytes -= nbytes
        return True

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert 0 <= self._bytes <= self._burst_bytes, f"{self._bytes} bytes may be tried"


AGAIN_S, AGAIN_S_MAX = 0.02, 0.25
"""Until the tiers are asked again for what they were still being listed for, at first and at most."""


def next_again_s(again_s: float) -> float:
    """Return how long to wait the next time, if it was `again_s` this time."""
    return min(2 * again_s, AGAIN_S_MAX)


@dataclass(frozen=True, slots=True)
class LookupWait:
    """Seconds from a prompt's arrival.

    `until_s`: without an answer by then it is computed; 0: waiting does not pay. `idle_s`: from then on an
    engine with nothing else to do computes it in small steps meanwhile; `until_s`: it does not.
    `recompute_s`: what computing the missing tokens takes: more than any wait for at most all of the saving.
    """

    until_s: float
    idle_s: float
    recompute_s: float


def plan_wait(
    *,
    missing_tokens: int,
    resident_tokens: int,
    nbytes: int,
    prefill: PrefillPrice,
    prices: Mapping[LoadSource, TierPrice],
    usual_s: float,
    share: float,
    idle_share: float,
    s_max: float,
) -> LookupWait:
    """Return the wait for the lookup of `missing_tokens` behind `resident_tokens` in the pool.

    It is `share` of what loading would save, at most `s_max`: computing them, less loading their `nbytes`
    from the cheapest tier in `prices` (as last heard; without any, or where none is proved, loading counts as
    free). `usual_s`: what
    a lookup takes as a rule; an answer that is not expected in time is not waited for. An idle engine begins
    after `idle_share` of the wait, but not before twice `usual_s`: most answers come until then, and a step
    that has begun cannot be taken back.
    """
    recompute_s = prefill.added_seconds(max(0, missing_tokens), resident_tokens)
    loads_s = (price.seconds(nbytes) if price.is_proved else 0.0 for price in prices.values() if price.is_up)
    load_s = min(loads_s, default=0.0)
    until_s = min(s_max, share * max(0.0, recompute_s - load_s))
    if until_s <= usual_s:
        return LookupWait(0.0, 0.0, recompute_s)
    return LookupWait(until_s, min(until_s, max(idle_share * until_s, 2 * usual_s)), recompute_s)


def break_even_tokens(load: TierPrice, prefill: PrefillPrice, bytes_per_token: float) -> int | None:
    """Return the least number of tokens whose load takes less time than computing them; None: none does.

    Both as parts of a prompt whose rest is computed in any case, as `plan_load` compares them: what computing
    gains over a load is a*n + b*n*n - latency, so above the result loading always wins.
    """
    if not load.is_up or not load.bytes_per_s > 0:
        return None
    computed_s = prefill.a_s + prefill.c0_s / prefill.step_tokens  # a token's, without attention
    linear_s = computed_s - bytes_per_token / load.bytes_per_s
    if load.latency_s <= 0 and linear_s > 0:
        return 1
    root = math.sqrt(linear_s * linear_s + 4 * prefill.b_s * max(load.latency_s, 0.0))
    # Two numbers of one sign are added: the other formula loses all digits where the result is far off.
    if linear_s > 0:
        tokens = 2 * load.latency_s / (linear_s + root)
    elif prefill.b_s > 0:
        tokens = (root - linear_s) / (2 * prefill.b_s)
    else:
        return None
    # The next whole number: at the root itself both take as long.
    return max(1, math.floor(tokens) + 1) if tokens < TOKENS_MAX else None


TOKENS_MAX = 1 << 32
"""A context that is longer is none."""


def in_digits(number: float) -> str:
    """Return a price as people read it: three digits, no exponent where it can be helped."""
    return f"{float(f'{number:.3g}'):,.12g}"
