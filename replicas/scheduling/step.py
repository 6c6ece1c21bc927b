"""Step plans, the token and time budget of a step, and step times for the prefill meter. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from samovar.cache_tiers.pricing import PrefillMeter, PrefillPrice, pairs_of
from samovar.replicas.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + count)` of a sequence, computed in this step.

    `draft`: guesses of what follows its last known token. They are computed behind it as if they were known;
    their KV is valid as far as they turn out to be right.
    """

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Return the tokens that the step computes: known ones and guesses."""
        return self.count + len(self.draft)

    @property
    def sampled_rows(self) -> range:
        """Return the rows whose logits give a next token: that of the last known one, and the guesses."""
        return range(self.count - 1, self.rows) if self.samples else range(0)

    @property
    def samples(self) -> bool:
        """Whether the chunk includes the last known token, whose logits give the next one.

        Or the token behind it: a step may be launched before that one is known.
        """
        return self.start + self.count >= len(self.sequence.tokens)

    @property
    def scored(self) -> range:
        """Return the slots whose logits give a log-probability of the prompt that is asked for."""
        first, end = self.sequence.score_from, self.start + self.count
        return range(0) if first is None else range(first, min(end, self.sequence.prompt_tokens - 1))


@dataclass(slots=True)
class StepPlan:
    """One forward pass. `copies` (source page, target page) are made before it.

    `is_short`: a running sequence waits for pages whose blocks are being copied out.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    is_short: bool = False

    @property
    def prompts(self) -> list[Chunk]:
        """Return the chunks that are not decodes."""
        return [chunk for chunk in self.chunks if not chunk.sequence.is_decode]

    @property
    def tokens(self) -> int:
        """Return the tokens that the step computes, guesses included."""
        return sum(chunk.rows for chunk in self.chunks)

    def filled(self, pages: Iterable[int]) -> list[int]:
        """Return the pages that hold the bytes of `pages` now: a planned copy's target holds none yet."""
        source_of = {target: source for source, target in self.copies}
        return [source_of.get(page, page) for page in pages]

    def sampling(self) -> list[tuple[int, Chunk]]:
        """Return the chunks that sample, each with the first of its rows of logits.

        Ask before their sequences get new tokens: a chunk does not end with the last known one then.
        """
        sampling, row = [], 0
        for chunk in self.chunks:
            if chunk.samples:
                sampling.append((row, chunk))
                row += len(chunk.sampled_rows)
        return sampling


CHUNK_TOKENS = 16
"""Granularity of chunks: a chunk that does not end its prompt is a multiple of this, and at least this.

Block sizes are multiples of it, and it is a multiple of the rows that exact mode computes together.
"""


def halved(chunks: Listing[Chunk]) -> list[Chunk] | None:
    """Return a step with at most half of the prompt tokens, in the order of `chunks`; decodes stay.

    None: there is nothing left to halve. The last few tokens of a prompt are left out only beside decodes.
    """
    prompts = [chunk for chunk in chunks if not chunk.sequence.is_decode]
    tokens = sum(chunk.count for chunk in prompts)
    left = tokens // 2 // CHUNK_TOKENS * CHUNK_TOKENS
    if left == 0 and len(prompts) == len(chunks):
        left = CHUNK_TOKENS
    kept = []
    for chunk in chunks:
        if chunk.sequence.is_decode:
            kept.append(chunk)
            continue
        count = chunk.count if chunk.count <= left else left // CHUNK_TOKENS * CHUNK_TOKENS
        if count:
            kept.append(Chunk(chunk.sequence, chunk.start, count))
        left -= count
    return kept if sum(chunk.count for chunk in kept) < sum(chunk.count for chunk in chunks) else None


class StepRoom:
    """Holds what is left of one step's budget. `spent_s`: the expected time of the step so far."""

    def __init__(self, price: PrefillPrice, tokens: int, spent_s: float, seconds: float) -> None:
        """Limit prompts to `tokens` and `seconds`; `seconds` is infinite where time does not matter."""
        self._price = price
        self._tokens = tokens
        self._seconds = seconds
        self._is_untouched = True
        self.spent_s = spent_s

    @property
    def is_full(self) -> bool:
        """Whether no token of another prompt fits."""
        return self._tokens <= 0 or self._fitting(0) < CHUNK_TOKENS

    def takes(self, tokens: int, context_tokens: int) -> int:
        """Return how many of a prompt's next `tokens`, behind `context_tokens`, would be computed."""
        count = min(tokens, self._tokens)
        fitting = self._fitting(context_tokens)
        return count if fitting >= count else min(count, int(fitting) // CHUNK_TOKENS * CHUNK_TOKENS)

    def shared_step_s(self, tokens: int, context_tokens: int) -> float:
        """Return what a sequence with these tokens loses if it is not in this step.

        It waits as long for the next one, the step's time without it; and if this one cannot take all of its
        tokens, no longer than those that it can take would need.
        """
        taken = self.takes(tokens, context_tokens)
        if taken == tokens:
            return self.spent_s
        return min(self.spent_s, self._price.chunk_seconds(max(taken, 0), context_tokens))

    def take(self, tokens: int, context_tokens: int) -> int:
        """Reserve room for a prompt's next tokens; return their number as `takes` does."""
        count = self.takes(tokens, context_tokens)
        if count > 0:
            took_s = self._price.chunk_seconds(count, context_tokens)
            self._tokens -= count
            self._seconds -= took_s
            self.spent_s = (self.spent_s or self._price.c0_s) + took_s
            self._is_untouched = False
        return max(count, 0)

    def end_at(self, step_s: float) -> None:
        """Take no more than is expected to be computed when the step has taken `step_s`."""
        self._seconds = min(self._seconds, max(0.0, step_s - self.spent_s))

    def _fitting(self, context_tokens: int) -> float:
        """Return the tokens that fit in the time left; at least `CHUNK_TOKENS` for the first prompt."""
        least = CHUNK_TOKENS if self._is_untouched else 0
        if math.isinf(self._seconds):
            return math.inf
        if self._seconds <= 0:
            return least
        # a * m + b * (2 * n * m + m * m) = seconds, solved in a form that also holds for b = 0.
        linear = self._price.a_s + 2 * self._price.b_s * context_tokens
        root = math.sqrt(linear * linear + 4 * self._price.b_s * self._seconds)
        if linear + root <= 0:
            return math.inf
        return max(least, 2 * self._seconds / (linear + root))


class Work(NamedTuple):
    """Tokens of a step, and the pairs of them that attend (`pairs_of`)."""

    tokens: int
    pairs: float

    def with_chunk(self, tokens: int, context_tokens: int) -> Work:
        """Return this and `tokens` more, behind `context_tokens`."""
        return Work(self.tokens + tokens, self.pairs + pairs_of(tokens, context_tokens))


NO_WORK = Work(0, 0.0)

RECENT_STEPS = 5
NEWER = 0.5
"""Weight of a step, of the one after it."""
SURPRISE_MAX = math.log(2.0)
"""Further from the median of the latest steps, none counts: an odd one costs little."""
FACTOR_MAX = 64.0
CHUNK_SHARE_MIN = 0.02
"""Least share of a step's time that its prompts are assumed to take."""


def _typical(factors: Iterable[float]) -> float:
    """Return the weighted mean of the latest factors, newest last; 1 without any."""
    logs = [math.log(factor) for factor in factors]
    if not logs:
        return 1.0
    middle = median(logs)
    total, weight, weights = 0.0, 1.0, 0.0
    for log in reversed(logs):
        total += weight * max(middle - SURPRISE_MAX, min(log, middle + SURPRISE_MAX))
        weights += weight
        weight *= NEWER
    return max(1 / FACTOR_MAX, min(math.exp(total / weights), FACTOR_MAX))


class StepPace:
    """Follows what the latest steps took against their price: their decodes, and what prompts add to them.

    A price follows the machine over tens of steps, so that a few odd ones do not matter, and cannot tell its
    parts apart while all steps are alike; streams would wait too long in each of them. This follows within a
    few steps: what a step took beyond its decodes is its prompts'. It keeps seconds, not factors, so that
    they stay what they are while the price moves. Fed by `StepTimes`.
    """

    def __init__(self) -> None:
        self._decodes: deque[tuple[Work, float]] = deque(maxlen=RECENT_STEPS)
        self._prompts: deque[tuple[Work, Work, float]] = deque(maxlen=RECENT_STEPS)

    def of_decodes(self, price: PrefillPrice) -> float:
        """Return how many times its price a step of decodes takes."""
        return _typical(seconds / _priced(price.step_seconds(*work)) for work, seconds in self._decodes)

    def of_prompts(self, price: PrefillPrice) -> float:
        """Return how many times their price prompts add to a step; before any was seen, as `of_decodes`."""
        slower = self.of_decodes(price)
        if not self._prompts:
            return slower
        return _typical(
            max(seconds - slower * price.step_seconds(*decodes), CHUNK_SHARE_MIN * seconds)
            / _priced(price.a_s * prompts.tokens + price.b_s * prompts.pairs)
            for decodes, prompts, seconds in self._prompts
        )

    def ran(self, decodes: Work, prompts: Work, seconds: float) -> None:
        """Record a step; ignores invalid values."""
        if not 0 < seconds < math.inf:
            return
        if prompts.tokens > 0:
            self._prompts.append((decodes, prompts, seconds))
            if any(
                work.tokens <= decodes.tokens and work.pairs <= decodes.pairs and took > seconds
                for work, took in self._decodes
            ):
                # Less took longer then: that was another machine. All of this step bounds its decodes.
                self._decodes.append((decodes, seconds))
        elif decodes.tokens > 0:
            self._decodes.append((decodes, seconds))


def _priced(seconds: float) -> float:
    return max(seconds, 1e-9)


class StepBudget:
    """Limits how much of the waiting prompts one step computes: tokens, and time while answers are decoded.

    A chunk that is cheap on an idle engine stalls every running stream for its duration. So a step with
    decodes gets as many prompt tokens as are expected to finish within a target: a time, and a multiple of
    what its decodes take alone. A step without decodes is filled, unless there are several tenants: a new
    request waits for the running step, whichever tenant's it is. A prompt always progresses: every step takes
    at least a few of its tokens, and may spend at least as long on them as its decodes take (less if the
    multiple is below 2), so that many decodes slow prompts down but do not stop them.

    `tokens_max`: of one step, decodes included; `target_s`: of a step with decodes, None: no target; `price`:
    the price of computing, read at every step; `has_tenants`: `target_s` holds for all steps, as another
    tenant's request may come at any time; `stretch`: the multiple, None: none; `pace`: corrects the price,
    fed by `StepTimes`; `passed_tokens_max`: as in `PromptOrder`, 0: prompts are computed in order of arrival.
    """

    def __init__(
        self,
        tokens_max: int,
        target_s: float | None = None,
        price: Callable[[], PrefillPrice] | None = None,
        *,
        has_tenants: bool = False,
        stretch: float | None = None,
        pace: StepPace | None = None,
        passed_tokens_max: int = 0,
    ) -> None:
        self.pace = pace or StepPace()
        self.passed_tokens_max = passed_tokens_max
        self.tokens_max = tokens_max
        self._target_s = math.inf if target_s is None else target_s
        self._price = price
        self._has_tenants = has_tenants
        self._stretch = math.inf if stretch is None else stretch

    def open(self, decodes: Listing[int]) -> StepRoom:
        """Return the room of a step with these decodes and guesses, each given by its context tokens."""
        price = PrefillPrice(0.0, 0.0, 0.0) if self._price is None else self._price()
        tokens = self.tokens_max - len(decodes)
        slower, chunks_slower = self.pace.of_decodes(price), self.pace.of_prompts(price)
        now = replace(
            price, c0_s=slower * price.c0_s, a_s=chunks_slower * price.a_s, b_s=chunks_slower * price.b_s
        )
        if not decodes:  # an empty step does not run
            limit_s = self._target_s if self._has_tenants else math.inf
            return StepRoom(now, tokens, 0.0, max(limit_s - now.c0_s, now.c0_s))
        pairs = sum(pairs_of(1, context) for context in decodes)
        alone_s = slower * price.step_seconds(len(decodes), pairs)
        limit_s = min(self._target_s, self._stretch * alone_s) if alone_s > 0 else self._target_s
        return StepRoom(now, tokens, alone_s, max(limit_s - alone_s, min(1.0, self._stretch - 1.0) * alone_s))

    def answers(self, room: StepRoom) -> None:
        """Limit the rest of a step with which a first token comes, as one beside a stream.

        What is computed so far takes the place of its decodes.
        """
        if room.spent_s > 0:
            room.end_at(min(self._target_s, self._stretch * room.spent_s))


PREFILL_STEP_TOKENS = 16
"""A step with at least this many prompt tokens measures prefill."""

LIGHT_STEPS = 8
"""At most this many decode-only steps in a row are measured, and never more than prefill steps before them.

They come in thousands, and would make the meter forget everything else.
"""


RUNNING_MAX = 64
"""Steps on the device whose times are not known yet; of more, the oldest ones are not measured."""


class _Launched(NamedTuple):
    decodes: Work
    prompts: Work
    seconds: Callable[[], float | None]
    prices: bool


class StepTimes:
    """Reports step times: all to the pace, those with prompts and a few decode-only ones to the meter.

    The latter show the time of a step that computes almost nothing. On CUDA a step that samples nothing is
    only launched: its time is read when it is over, as a rule a step later.
    """

    def __init__(self, meter: PrefillMeter, pace: StepPace | None = None) -> None:
        self._meter = meter
        self._pace = pace or StepPace()
        self._light = 0  # decode-only steps still to be measured
        self._running: deque[_Launched] = deque(maxlen=RUNNING_MAX)

    def ran(
        self, chunks: Listing[Chunk], seconds: Callable[[], float | None], *, prices: bool = True
    ) -> None:
        """Record a step of `chunks`.

        `seconds`: what it took; None: it still runs on the device. Not `prices`: it went another way than
        prompts go, which says nothing of what they take.
        """
        decodes, prompts = NO_WORK, NO_WORK
        for chunk in chunks:
            if chunk.count == 1:
                decodes = decodes.with_chunk(chunk.rows, chunk.start)
            else:
                prompts = prompts.with_chunk(chunk.count, chunk.start)
        self._running.append(_Launched(decodes, prompts, seconds, prices))
        while self._running and (took_s := self._running[0].seconds()) is not None:
            self._over(self._running.popleft(), took_s)

    def _over(self, step: _Launched, seconds: float) -> None:
        tokens, prefill_tokens = step.decodes.tokens + step.prompts.tokens, step.prompts.tokens
        if prefill_tokens == 0 or prefill_tokens >= PREFILL_STEP_TOKENS:
            self._pace.ran(step.decodes, step.prompts, seconds)
        if not step.prices:
            return
        if prefill_tokens >= PREFILL_STEP_TOKENS:
            self._light = min(self._light + 1, LIGHT_STEPS)
        elif prefill_tokens == 0 and tokens < PREFILL_STEP_TOKENS and self._light:
            self._light -= 1
        else:
            return
        self._meter.observe_steps(1, tokens, step.decodes.pairs + step.prompts.pairs, seconds)
