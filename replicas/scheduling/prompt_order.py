"""Which prompt is computed next: short ones first, and no one waits forever. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from itertools import islice

from replicas.scheduling.sequence import Sequence

LOOKED_AT_MAX = 64
"""So many waiting prompts of a tenant are looked at: more would take time in every step."""


def expected_tokens(sequence: Sequence, block_tokens: int) -> int:
    """Return how many of a sequence's known tokens are still to be computed, at least 1.

    Of a waiting one: without what was in the pool when it came, or what the tiers have said they hold.
    """
    if sequence.pages:
        return sequence.pending
    found = None if sequence.visit is None else sequence.visit.found
    spans = () if found is None else found.spans
    held = max(((span.first + span.blocks) * block_tokens for span in spans), default=0)
    return max(1, len(sequence.tokens) - max(held, sequence.known_tokens))


class PromptOrder:
    """Orders the prompts of one turn (`tenants.py`) by what is left of them.

    The one with the fewest tokens goes first, also before earlier ones: these are passed. At most
    `passed_tokens_max` tokens of later prompts are computed before a prompt, and one more for each that is
    computed of itself. So a long prompt gets at least every second token from then on, and is computed after
    at most `passed_tokens_max`, twice its own length and all prompts that came before it.
    """

    def __init__(self, passed_tokens_max: int) -> None:
        self._passed_max = passed_tokens_max

    def first(self, prompts: Listing[Sequence]) -> int:
        """Return the position of the one to compute now, of `prompts` by arrival, none of them empty."""
        best, passed = 0, 0
        for position, one in enumerate(prompts):
            if one.pending < prompts[best].pending and passed + one.pending <= self._passed_max:
                best = position
            passed = max(passed, one.passed_tokens)
        return best

    def may_go_before(
        self, line: Iterable[Sequence], prompts: Listing[Sequence], than: Sequence, block_tokens: int
    ) -> set[Sequence]:
        """Return who of a `line` of waiting prompts, in order, may be computed before `than`.

        `prompts`: those that are being computed, `than` among them.
        """
        able: set[Sequence] = set()
        in_line = 0
        for one in islice(line, LOOKED_AT_MAX):
            tokens = expected_tokens(one, block_tokens)
            if tokens < than.pending:
                earlier = (other.passed_tokens for other in prompts if other.arrival < one.arrival)
                if max(in_line, *earlier, 0) + tokens <= self._passed_max:
                    able.add(one)
            # What passes it already goes on.
            passing = sum(other.pending for other in prompts if other.arrival > one.arrival)
            in_line = max(in_line, one.passed_tokens + passing)
        return able

    @staticmethod
    def computed(one: Sequence, tokens: int, others: Iterable[Sequence]) -> None:
        """Count tokens of a prompt in this step; `others`: those that are not in it, waiting ones, too."""
        one.passed_tokens = max(0, one.passed_tokens - tokens)
        for other in others:
            if other.arrival < one.arrival:
                other.passed_tokens += tokens
