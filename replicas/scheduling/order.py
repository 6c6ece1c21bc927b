"""Order among sequences: tenants in turn, priorities of one tenant's, which prompt is computed first. Pure.

A smaller priority is better. While a better one runs, worse ones of its tenant sit a step out, but for what
is due (`FairQueue`) and for each `SHARED_STEPS`-th step, in which all take part: nothing waits for ever. Of
different tenants priorities are not compared. Short prompts go first, within bounds (`PromptOrder`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
    found = None if sequence.offload_state is None else sequence.offload_state.found
    spans = () if found is None else found.spans
    held = max(((span.first + span.blocks) * block_tokens for span in spans), default=0)
    return max(1, len(sequence.tokens) - max(held, sequence.known_tokens))


class PromptOrder:
    """Orders the prompts of one turn (`PrefillTurns`) by what is left of them.

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


class PrefillTurns:
    """Decides whose prompts are computed first. Call `order` once a step, and `computed` with the result.

    Each tenant's computed prompt tokens, divided by its weight, are counted in turns of `quantum_tokens`. A
    tenant in an earlier turn goes first, so that a long prompt in progress does not hold up another tenant's
    short one. A tenant that returns after a pause starts one turn before the tenant with the least, and so
    gets one whole turn and no more: pausing gains nothing.
    """

    def __init__(self, quantum_tokens: int, weights: Mapping[bytes, float]) -> None:
        self._turn = float(quantum_tokens)
        self._weights = weights
        self._served: dict[bytes, float] = {}
        self._active: set[bytes] = set()

    def order(self, tenants: Collection[bytes]) -> list[set[bytes]]:
        """Group `tenants`, all of which have prompts to compute, by turn; a group is served together."""
        going_on = [self._served[tenant] for tenant in tenants if tenant in self._active]
        ahead = (min(going_on) // self._turn - 1) * self._turn if going_on else 0.0
        for tenant in tenants:
            if tenant not in self._active:
                self._served[tenant] = max(self._served.get(tenant, ahead), ahead)
        self._active = set(tenants)
        # Forget absent tenants that would resume in the same place as a newcomer.
        self._served = {
            tenant: served
            for tenant, served in self._served.items()
            if tenant in self._active or (going_on and served > ahead)
        }
        groups: dict[float, set[bytes]] = {}
        for tenant in tenants:
            groups.setdefault(self._served[tenant] // self._turn, set()).add(tenant)
        return [groups[turn] for turn in sorted(groups)]

    def computed(self, tenant: bytes, tokens: int) -> None:
        """Count prompt tokens of a tenant in this step."""
        if tenant in self._served:
            self._served[tenant] += tokens / self._weights.get(tenant, 1.0)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._active <= set(self._served), "a tenant with work is not counted"


REST_FACTOR = 2.0
"""A tenant above this multiple of another's share lets that one's prompts go before its own decodes."""


class TenantShares:
    """Shares of a replica by tenant, and which sequences may be preempted for which.

    A tenant's share is its part of the places or of the pages, whichever is larger (dominant resource
    fairness: Ghodsi et al., 2011), divided by its weight. One rule decides everything: a tenant may pass
    another one that waits, or preempt a running sequence of it, if its share afterwards is no larger than the
    other's share afterwards. So a tenant alone may use everything, and a preempted sequence never preempts
    back.

    `places`, `pages`: how many there are in total.
    """

    def __init__(
        self, running: Iterable[Sequence], places: int, pages: int, weights: Mapping[bytes, float]
    ) -> None:
        self._places = places
        self._pages = pages
        self._weights = weights
        self._held: dict[bytes, tuple[int, int]] = {}
        for sequence in running:
            self._add(sequence.tenant, sequence.forks, len(sequence.pages))

    def of(self, tenant: bytes, places: int = 0, pages: int = 0) -> float:
        """Return a tenant's share, with this many more places and pages."""
        held_places, held_pages = self._held.get(tenant, (0, 0))
        share = max((held_places + places) / self._places, (held_pages + pages) / self._pages)
        return share / self._weights.get(tenant, 1.0)

    def may_pass(self, sequence: Sequence, pages: int, others: Collection[bytes]) -> bool:
        """Whether a sequence that needs `pages` may be admitted before these waiting tenants."""
        mine = self.of(sequence.tenant, sequence.forks, pages)
        return all(mine <= self.of(other) for other in others)

    def of_largest_tenant(self, sequences: Listing[Sequence]) -> list[Sequence]:
        """Return the sequences of the tenant with the largest share, in the order given."""
        tenants = {sequence.tenant for sequence in sequences}
        if len(tenants) == 1:
            return list(sequences)
        largest = max(tenants, key=self.of)
        return [sequence for sequence in sequences if sequence.tenant == largest]

    def victims_for(
        self,
        sequence: Sequence,
        pages: int,
        short: tuple[int, int],
        running: Listing[Sequence],
        freed_pages: Callable[[Sequence], int],
    ) -> list[Sequence] | None:
        """Choose the sequences of `running` to preempt so that `sequence`, which needs `pages`, can run.

        None: not enough sequences may be preempted. `short`: places and pages that are missing;
        `freed_pages`: pages that become free when a sequence is preempted. Modifies this object: use it only
        once.
        """
        places_short, pages_short = short
        mine = self.of(sequence.tenant, sequence.forks, pages)
        left = [other for other in running if other.tenant != sequence.tenant]
        gone: list[Sequence] = []
        while places_short > 0 or pages_short > 0:
            if not left:
                return None
            victim = self.of_largest_tenant(left)[-1]  # the newest loses least
            self._add(victim.tenant, -victim.forks, -len(victim.pages))
            if mine > self.of(victim.tenant):
                return None
            left.remove(victim)
            gone.append(victim)
            places_short -= victim.forks
            pages_short -= freed_pages(victim)
        return gone

    def _add(self, tenant: bytes, places: int, pages: int) -> None:
        held_places, held_pages = self._held.get(tenant, (0, 0))
        self._held[tenant] = held_places + places, held_pages + pages


class DecodeRests:
    """Decides which tenants' decodes a step leaves out.

    They must not slow down the prompt of a tenant with a much smaller share. Bounded: after
    `quantum_tokens` of prompts without them they are in the next step.
    """

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._tokens_without = 0

    def choose(
        self, shares: TenantShares, decoding: Collection[bytes], prompts: Listing[Collection[bytes]]
    ) -> set[bytes]:
        """Choose the tenants of `decoding` whose decodes the next step leaves out.

        `prompts`: the tenants with prompts to compute, in groups, in the order of their turns.
        """
        if not prompts or self._tokens_without >= self._quantum_tokens:
            return set()
        most = max(shares.of(tenant, places=1) for tenant in prompts[0])
        others = set(decoding).difference(prompts[0])
        return {tenant for tenant in others if shares.of(tenant) > REST_FACTOR * most}

    def ran(self, resting: Collection[bytes], prompts: Iterable[Chunk]) -> None:
        """Count a step that left `resting` out and computed these chunks."""
        tokens = sum(chunk.count for chunk in prompts)
        self._tokens_without = self._tokens_without + tokens if resting and tokens else 0
