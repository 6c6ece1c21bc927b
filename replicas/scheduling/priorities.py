"""Priorities among one tenant's sequences: who takes part in a step, and who gives way. Pure.

A smaller number is better. While a better priority runs, worse ones of its tenant sit a step out, but for
what is due (`FairQueue`) and for each `SHARED_STEPS`-th step, in which all take part: nothing waits for ever.
Of different tenants priorities are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing

from replicas.scheduling.sequence import Sequence
from replicas.scheduling.step import Chunk

SHARED_STEPS = 128
"""Each such step of a tenant's better priorities is shared with its worse ones."""
LATELY_STEPS = 1024
"""For so many steps a priority that has come counts as one that may come again at any time."""
PROMPT_PARTS = 8
"""Prompts of a worse priority than has come lately get this part of a step's tokens: one may come again."""


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
