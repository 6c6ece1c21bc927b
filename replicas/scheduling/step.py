"""What one step computes, as the scheduler has planned it."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from cache_tiers.pricing import PrefillMeter, PrefillPrice, pairs_of
from replicas.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + count)` of a sequence are computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """The last known token is in: its logits give the next one."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """One forward pass. `copies` (source page, target page) come before it."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def prompts(self) -> list[Chunk]:
        """Those that are no decodes."""
        return [chunk for chunk in self.chunks if not chunk.sequence.is_decode]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


# How much of the waiting prompts one step computes: tokens, and time while answers are written. Pure.
#
# A chunk that is cheap beside an idle engine stalls every running stream for as long as it takes. So a
# step that also decodes gets as many tokens of prompts as are expected to end within a target; one that
# does not is filled, but where there are several tenants: who comes waits for the step that runs, whoever's
# it is. A prompt always goes on: every step takes at least a few of its tokens, and may take
# at least as long for them as it takes anyway, so that many decodes slow prompts down and do not stop them.

CHUNK_TOKENS = 16
"""A prompt that does not end with its chunk advances by a multiple of this, and by this at least. Blocks are
multiples of it, and it is one of the rows that exact mode computes together."""


class StepRoom:
    """What is left of one step. `spent_s`: what it is expected to take so far."""

    def __init__(self, price: PrefillPrice, tokens: int, spent_s: float, seconds: float) -> None:
        """`tokens` and `seconds` may go to prompts; `seconds` is infinite where time does not matter."""
        self._price = price
        self._tokens = tokens
        self._seconds = seconds
        self._is_untouched = True
        self.spent_s = spent_s

    @property
    def is_full(self) -> bool:
        """Nothing of another prompt is taken."""
        return self._tokens <= 0 or self._fitting(0) < CHUNK_TOKENS

    def takes(self, tokens: int, context_tokens: int) -> int:
        """How many of a prompt's next `tokens`, which follow `context_tokens`, would be computed."""
        count = min(tokens, self._tokens)
        fitting = self._fitting(context_tokens)
        return count if fitting >= count else min(count, int(fitting) // CHUNK_TOKENS * CHUNK_TOKENS)

    def riding_s(self, tokens: int, context_tokens: int) -> float:
        """What the step takes without them, where it could take all of them, else 0: who is not in it waits
        as long for the next one."""
        return self.spent_s if self.takes(tokens, context_tokens) == tokens else 0.0

    def take(self, tokens: int, context_tokens: int) -> int:
        """As `takes`, and these are computed."""
        count = self.takes(tokens, context_tokens)
        if count > 0:
            took_s = self._price.chunk_seconds(count, context_tokens)
            self._tokens -= count
            self._seconds -= took_s
            self.spent_s += took_s
            self._is_untouched = False
        return max(count, 0)

    def _fitting(self, context_tokens: int) -> float:
        """Tokens that end in time; `CHUNK_TOKENS` at least of the first prompt that is asked for."""
        least = CHUNK_TOKENS if self._is_untouched else 0
        if math.isinf(self._seconds):
            return math.inf
        if self._seconds <= 0:
            return least
        # a * m + b * (2 * n * m + m * m) = seconds, written so that it holds for b = 0, too.
        linear = self._price.a_s + 2 * self._price.b_s * context_tokens
        root = math.sqrt(linear * linear + 4 * self._price.b_s * self._seconds)
        if linear + root <= 0:
            return math.inf
        return max(least, 2 * self._seconds / (linear + root))


class StepBudget:
    """`tokens_max`: of one step, decodes included; `target_s`: of a step with decodes, None for no such
    target; `price`: what computing takes, asked at every step; `has_tenants`: the target holds for all steps,
    as somebody else's request may come at any time."""

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
        """A step with these decodes, each given by the tokens of its context."""
        price = PrefillPrice(0.0, 0.0, 0.0) if self._price is None else self._price()
        tokens = self._tokens_max - len(decodes)
        least_s = price.c0_s + sum(price.chunk_seconds(1, context) for context in decodes)
        spent_s = least_s if decodes else 0.0  # an empty step does not run anyway
        if self._target_s is None or not (decodes or self._has_tenants):
            return StepRoom(price, tokens, spent_s, math.inf)
        return StepRoom(price, tokens, spent_s, max(self._target_s - least_s, least_s))


# What steps take, told to the meter of prefill. Pure.
#
# Which steps teach something: those with a prefill chunk, and of those with decodes alone a few behind
# each, which tell what a step takes that computes next to nothing. Knows no clock.

PREFILL_STEP_TOKENS = 16
"""A step with so many tokens of prompts says what prefill takes."""

LIGHT_STEPS = 8
"""At most so many steps of decodes alone are learned from in a row, and never more than prefill steps before
them: they come in thousands, and would have the meter forget all else."""


class StepTimes:
    """On CUDA a step that samples nothing is only launched: its time is told with the next one that does."""

    def __init__(self, meter: PrefillMeter) -> None:
        self._meter = meter
        self._light = 0  # steps of decodes alone that are still to be learned from
        self._steps = 0
        self._tokens = 0
        self._prefill_tokens = 0
        self._pairs = 0.0
        self._seconds = 0.0

    def ran(self, chunks: Listing[Chunk], seconds: float, *, is_over: bool) -> None:
        """A step of `chunks` took `seconds`; not `is_over`: it may still be under way on the device."""
        self._steps += 1
        self._tokens += sum(chunk.count for chunk in chunks)
        self._prefill_tokens += sum(chunk.count for chunk in chunks if chunk.count > 1)
        self._pairs += sum(pairs_of(chunk.count, chunk.start) for chunk in chunks)
        self._seconds += seconds
        if not is_over:
            return
        if self._prefill_tokens >= PREFILL_STEP_TOKENS * self._steps:
            self._light = min(self._light + self._steps, LIGHT_STEPS)
            self._tell()
        elif self._prefill_tokens == 0 and self._tokens < PREFILL_STEP_TOKENS and self._light:
            self._light -= 1
            self._tell()
        self._steps = self._tokens = self._prefill_tokens = 0
        self._pairs = self._seconds = 0.0

    def _tell(self) -> None:
        self._meter.observe_steps(self._steps, self._tokens, self._pairs, self._seconds)
