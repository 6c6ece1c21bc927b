"""What a simulation has counted."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Tally:
    """Of the turns that count, but for `computed_s`: how long GPUs computed prompts in the whole run.

    `hit_tokens`: by where they were found, `gpu` or a tier; what else is in `prompt_tokens` was computed.
    `reusable_tokens`: what a tier or the GPU had at arrival; `upper_tokens`: of that, what was in the GPU or
    in the uppermost tier of the node.
    """

    turns: int = 0
    prompt_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    upper_tokens: int = 0
    reusable_tokens: int = 0
    computed_s: float = 0.0
    ttft_s: array[float] = field(default_factory=lambda: array("f"))

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    @property
    def upper_share(self) -> float:
        return self.upper_tokens / max(1, self.reusable_tokens)

    def ttft_at(self, percent: float) -> float:
        """Seconds that so many of the requests did not exceed; 0 when there were none."""
        return (
            float(np.percentile(np.frombuffer(self.ttft_s, dtype=np.float32), percent))
            if self.ttft_s
            else 0.0
        )
