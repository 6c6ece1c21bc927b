"""How long answers become, from those that have ended. Pure."""

from __future__ import annotations

import math

BUCKETS = 24
"""Of lengths: [1, 2), [2, 4), ... tokens."""
FADE = 0.999
"""What an answer counts for when the next has ended: about the last thousand count."""
PRIOR_TOKENS = 256
"""How long answers count as before any has ended."""


class AnswerLengths:
    """A fading histogram of answers' lengths, in powers of two."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._counts[_bucket(PRIOR_TOKENS)] = 1.0

    def ended(self, tokens: int) -> None:
        """Count an answer of so many tokens."""
        self._counts = [FADE * count for count in self._counts]
        self._counts[_bucket(tokens)] += 1.0

    def left(self, tokens: int, tokens_max: int) -> float:
        """Return how many more an answer of `tokens` is expected to get, of at most `tokens_max`; at least 1.

        The mean of those that became longer, a bucket counted at its middle; as long again, if none did.
        """
        weight = total = 0.0
        for bucket, count in enumerate(self._counts):
            low, high = 2**bucket, 2 ** (bucket + 1)
            if high > tokens + 1:
                part = count * (high - max(low, tokens + 1)) / (high - low)
                weight += part
                total += part * ((max(low, tokens + 1) + high) / 2 - tokens)
        more = total / weight if weight else float(max(1, tokens))
        return max(1.0, min(more, float(tokens_max)))


def _bucket(tokens: int) -> int:
    return min(BUCKETS - 1, int(math.log2(max(1, tokens))))
