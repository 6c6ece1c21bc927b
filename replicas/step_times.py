"""What steps take, told to the meter of prefill. Pure.

Which steps teach something: those with a prefill chunk, and of those with decodes alone a few behind
each, which tell what a step takes that computes next to nothing. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

from cache_tiers.cost import PrefillMeter, pairs_of
from replicas.scheduler import Chunk

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
