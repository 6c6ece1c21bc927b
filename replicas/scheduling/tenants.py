"""Fairness between tenants: order of prefill, shares of a replica, preemption and resting decodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Listing

from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import Chunk


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
