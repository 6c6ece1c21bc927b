"""Order among sequences: priorities of one tenant's, and which prompt is computed first. Pure.

A smaller priority is better. While a better one runs, worse ones of its tenant sit a step out, but for what
is due (`FairQueue`) and for each `SHARED_STEPS`-th step, in which all take part: nothing waits for ever. Of
different tenants priorities are not compared. Short prompts go first, within bounds (`PromptOrder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing
from itertools import islice

from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk

SHARED_STEPS = 128
"""Each such step of a tenant's better priorities is shared with its worse ones."""
LATELY_STEPS = 1024
"""For so many steps a priority that has come counts as one that may come again at any time."""
PROMPT_PARTS = 8
"""Prompts of a worse priority than has come lately get this part of a step's tokens: one may come again."""
LOOKED_AT_MAX = 64
"""So many waiting prompts of a tenant are looked at: more would take time in every step."""


class Priorities:
    """The priorities of one replica's sequences, step by step. `step_tokens_max`: of a step."""

    def __init__(self, step_tokens_max: int) -> None:
        self._part = max(1, step_tokens_max // PROMPT_PARTS)
        self._steps = 0
        self._apart = 0  # steps in which some sat out
        # By tenant: its best priority, and the last step for which that counts; its best one in this step.
        self._lately: dict[bytes, tuple[int, int]] = {}
        self._running: dict[bytes, int] = {}
        self._is_shared = False

    def came(self, sequence: Sequence) -> None:
        """Note a new request."""
        priority, until = self._lately.get(sequence.tenant, (sequence.priority, 0))
        if sequence.priority <= priority or until < self._steps:
            self._lately[sequence.tenant] = sequence.priority, self._steps + LATELY_STEPS

    def begin(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Begin a step: `running` are all that have pages; those that wait for a load take no part.

        `waiting`: those that may enter next, of each tenant the first.
        """
        self._steps += 1
        if self._steps % LATELY_STEPS == 0:
            self._lately = {tenant: one for tenant, one in self._lately.items() if one[1] >= self._steps}
        self._running = {}
        able = [one for one in running if not one.holds]
        for one in (*able, *waiting):
            self.entered(one)
        are_apart = any(one.yields_to(self._running[one.tenant]) for one in able)
        self._apart += are_apart
        self._is_shared = are_apart and self._apart % SHARED_STEPS == 0

    def entered(self, one: Sequence) -> None:
        """Note a sequence that takes part in this step."""
        self._running[one.tenant] = min(one.priority, self._running.get(one.tenant, one.priority))

    def share(self) -> None:
        """Let all take part in this step."""
        self._is_shared = True

    def sits_out(self, one: Sequence) -> bool:
        """Return whether a sequence takes no part in this step."""
        return not self._is_shared and one.yields_to(self._running.get(one.tenant, one.priority))

    def part(self, sequence: Sequence, prompts: Iterable[Chunk], tokens: int) -> int:
        """Return how many of `tokens` of a prompt this step may compute beside these."""
        if self._is_shared or not self._may_be_outranked(sequence):
            return tokens
        taken = sum(chunk.count for chunk in prompts if self._may_be_outranked(chunk.sequence))
        return min(tokens, max(0, self._part - taken))

    def _may_be_outranked(self, sequence: Sequence) -> bool:
        priority, until = self._lately.get(sequence.tenant, (sequence.priority, 0))
        return until >= self._steps and priority < sequence.priority


def foremost(sequences: Listing[Sequence]) -> list[Sequence]:
    """Return the sequences that yield to no other of their tenant among these, in the order given."""
    best: dict[bytes, int] = {}
    for one in sequences:
        best[one.tenant] = min(best.get(one.tenant, one.priority), one.priority)
    return [one for one in sequences if not one.yields_to(best[one.tenant])]


def gives(one: Sequence, sequence: Sequence, *, is_later: bool) -> bool:
    """Return whether a running sequence may lose its pages to another: later ones, and those that yield."""
    if one.tenant != sequence.tenant or one is sequence:
        return is_later or one is sequence
    return one.yields_to(sequence.priority) or (is_later and not sequence.yields_to(one.priority))


def giving_way(
    sequence: Sequence,
    short: tuple[int, int],
    running: Listing[Sequence],
    freed_pages: Callable[[Sequence], int],
    choose: Callable[[Listing[Sequence]], Sequence],
) -> list[Sequence]:
    """Choose which sequences of its tenant yield, so that one of a better priority can run.

    Empty: not enough do. `short`, `freed_pages`: see `TenantShares.victims_for`. `choose`: the next one.
    """
    places_short, pages_short = short
    left = [one for one in running if one.tenant == sequence.tenant and one.yields_to(sequence.priority)]
    gone: list[Sequence] = []
    while places_short > 0 or pages_short > 0:
        if not left:
            return []
        victim = choose(left)
        left.remove(victim)
        gone.append(victim)
        places_short -= victim.forks
        pages_short -= freed_pages(victim)
    return gone


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
