"""Step plans, the token and time budget of a step, and step times for the prefill meter. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_tiers.pricing import PrefillMeter, PrefillPrice, pairs_of
from replicas.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + count)` of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk includes the last known token, whose logits give the next one."""
        return self.start + self.count == len(self.sequence.tokens)

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
        return sum(chunk.count for chunk in self.chunks)


CHUNK_TOKENS = 16
"""Granularity of chunks: a chunk that does not end its prompt is a multiple of this, and at least this.

Block sizes are multiples of it, and it is a multiple of the rows that exact mode computes together.
"""


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
        """Return the step's time without these tokens if it can take all of them, else 0.

        A sequence that is not in this step waits as long for the next one.
        """
        return self.spent_s if self.takes(tokens, context_tokens) == tokens else 0.0

    def take(self, tokens: int, context_tokens: int) -> int:
        """Reserve room for a prompt's next tokens; return their number as `takes` does."""
        count = self.takes(tokens, context_tokens)
        if count > 0:
            took_s = self._price.chunk_seconds(count, context_tokens)
            self._tokens -= count
            self._seconds -= took_s
            self.spent_s += took_s
            self._is_untouched = False
        return max(count, 0)

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


class StepBudget:
    """Limits how much of the waiting prompts one step computes: tokens, and time while answers are decoded.

    A chunk that is cheap on an idle engine stalls every running stream for its duration. So a step with
    decodes gets as many prompt tokens as are expected to finish within a target. A step without decodes is
    filled, unless there are several tenants: a new request waits for the running step, whichever tenant's it
    is. A prompt always progresses: every step takes at least a few of its tokens, and may spend at least as
    long on them as it takes anyway, so that many decodes slow prompts down but do not stop them.

    `tokens_max`: of one step, decodes included; `target_s`: of a step with decodes, None: no target; `price`:
    the price of computing, read at every step; `has_tenants`: the target holds for all steps, as another
    tenant's request may come at any time.
    """

    def __init__(
        self,
        tokens_max: int,
        target_s: float | None = None,
        price: Callable[[], PrefillPrice] | None = None,
        *,
        has_tenants: bool = False,
    ) -> None:
        self._tokens_max = tokens_max
        self._target_s = target_s
        self._price = price
        self._has_tenants = has_tenants

    def open(self, decodes: Listing[int]) -> StepRoom:
        """Return the room of a step with these decodes, each given by its context tokens."""
        price = PrefillPrice(0.0, 0.0, 0.0) if self._price is None else self._price()
        tokens = self._tokens_max - len(decodes)
        least_s = price.c0_s + sum(price.chunk_seconds(1, context) for context in decodes)
        spent_s = least_s if decodes else 0.0  # an empty step does not run
        if self._target_s is None or not (decodes or self._has_tenants):
            return StepRoom(price, tokens, spent_s, math.inf)
        return StepRoom(price, tokens, spent_s, max(self._target_s - least_s, least_s))


PREFILL_STEP_TOKENS = 16
"""A step with at least this many prompt tokens measures prefill."""

LIGHT_STEPS = 8
"""At most this many decode-only steps in a row are measured, and never more than prefill steps before them.

They come in thousands, and would make the meter forget everything else.
"""


RUNNING_MAX = 64
"""Steps on the device whose times are not known yet; of more, the oldest ones are not measured."""


class _Launched(NamedTuple):
    tokens: int
    prefill_tokens: int
    pairs: float
    seconds: Callable[[], float | None]


class StepTimes:
    """Reports step times to the prefill meter: steps with a prefill chunk, and a few decode-only ones.

    The latter show the time of a step that computes almost nothing. On CUDA a step that samples nothing is
    only launched: its time is read when it is over, as a rule a step later.
    """

    def __init__(self, meter: PrefillMeter) -> None:
        self._meter = meter
        self._light = 0  # decode-only steps still to be measured
        self._running: deque[_Launched] = deque(maxlen=RUNNING_MAX)

    def ran(self, chunks: Listing[Chunk], seconds: Callable[[], float | None]) -> None:
        """Record a step of `chunks`. `seconds`: what it took; None: it still runs on the device."""
        tokens = sum(chunk.count for chunk in chunks)
        prefill_tokens = sum(chunk.count for chunk in chunks if chunk.count > 1)
        pairs = sum(pairs_of(chunk.count, chunk.start) for chunk in chunks)
        self._running.append(_Launched(tokens, prefill_tokens, pairs, seconds))
        while self._running and (took_s := self._running[0].seconds()) is not None:
            self._over(self._running.popleft(), took_s)

    def _over(self, step: _Launched, seconds: float) -> None:
        if step.prefill_tokens >= PREFILL_STEP_TOKENS:
            self._light = min(self._light + 1, LIGHT_STEPS)
        elif step.prefill_tokens == 0 and step.tokens < PREFILL_STEP_TOKENS and self._light:
            self._light -= 1
        else:
            return
        self._meter.observe_steps(1, step.tokens, step.pairs, seconds)
