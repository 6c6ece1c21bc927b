"""Whose prompts are computed first, where several tenants have some. Pure.

Each tenant's computed prompt tokens are counted, over its weight, in turns of `turn_tokens`; who is in an
earlier turn goes before the others, so that a long prompt under way does not hold up another tenant's short
one. Who comes after a pause starts with the turn before that of who has had least, and so has a whole one, no
more: going away and coming back gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Listing

from replicas.scheduling.sequence import Sequence
from replicas.scheduling.step import Chunk


class PrefillTurns:
    """`order` is asked once a step, `computed` tells what came of it."""

    def __init__(self, turn_tokens: int, weights: Mapping[bytes, float]) -> None:
        self._turn = float(turn_tokens)
        self._weights = weights
        self._served: dict[bytes, float] = {}
        self._active: set[bytes] = set()

    def order(self, tenants: Collection[bytes]) -> list[set[bytes]]:
        """All of `tenants`, who have something to compute, in groups: those of a group go together."""
        going_on = [self._served[tenant] for tenant in tenants if tenant in self._active]
        ahead = (min(going_on) // self._turn - 1) * self._turn if going_on else 0.0
        for tenant in tenants:
            if tenant not in self._active:
                self._served[tenant] = max(self._served.get(tenant, ahead), ahead)
        self._active = set(tenants)
        # Who is away and would come back no better than a newcomer is forgotten.
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
        """So many tokens of its prompts are in this step."""
        if tenant in self._served:
            self._served[tenant] += tokens / self._weights.get(tenant, 1.0)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert self._active <= set(self._served), "a tenant with work is not counted"


# What tenants hold of a replica, and who makes way for whom. Pure.
#
# A tenant's share is what it holds of the places or of the pages, whichever is more (dominant resource
# fairness: Ghodsi et al., 2011), over its weight. One rule decides all: a tenant may go past another one
# that waits, or push out a running sequence of it, as long as it then has no more than the other has then.
# So a tenant alone may have everything, and what is pushed out never pushes back.

REST_FACTOR = 2.0
"""A tenant with more than this many times another one's share lets its prompts go before its own decodes."""


class TenantShares:
    """What the running sequences hold now. `places`, `pages`: how many there are in all."""

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
        """Its share, with so many more places and pages."""
        held_places, held_pages = self._held.get(tenant, (0, 0))
        share = max((held_places + places) / self._places, (held_pages + pages) / self._pages)
        return share / self._weights.get(tenant, 1.0)

    def may_pass(self, sequence: Sequence, pages: int, others: Collection[bytes]) -> bool:
        """Whether a sequence that needs so many pages may be admitted before these tenants, who wait."""
        mine = self.of(sequence.tenant, sequence.forks, pages)
        return all(mine <= self.of(other) for other in others)

    def richest(self, sequences: Listing[Sequence]) -> list[Sequence]:
        """Those of the tenant who has most, in the order given."""
        tenants = {sequence.tenant for sequence in sequences}
        if len(tenants) == 1:
            return list(sequences)
        richest = max(tenants, key=self.of)
        return [sequence for sequence in sequences if sequence.tenant == richest]

    def make_way(
        self,
        sequence: Sequence,
        pages: int,
        short: tuple[int, int],
        running: Listing[Sequence],
        freed_pages: Callable[[Sequence], int],
    ) -> list[Sequence] | None:
        """Who of `running` has to go so that `sequence`, which needs so many pages, can run.

        None: nobody, not enough of them may be pushed out. `short`: places and pages that are missing;
        `freed_pages`: those that come free when a sequence goes. Uses this object up.
        """
        places_short, pages_short = short
        mine = self.of(sequence.tenant, sequence.forks, pages)
        left = [other for other in running if other.tenant != sequence.tenant]
        gone: list[Sequence] = []
        while places_short > 0 or pages_short > 0:
            if not left:
                return None
            victim = self.richest(left)[-1]  # the newest loses least
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
    """Which tenants' decodes a step leaves out, so that they do not slow down the prompt of a tenant who has
    much less. Bounded: after `turn_tokens` of prompts without them they are in the next step."""

    def __init__(self, turn_tokens: int) -> None:
        self._turn_tokens = turn_tokens
        self._tokens_without = 0

    def choose(
        self, shares: TenantShares, decoding: Collection[bytes], prompts: Listing[Collection[bytes]]
    ) -> set[bytes]:
        """Choose the tenants of `decoding` whose decodes the next step leaves out.

        `prompts`: the tenants with prompts to compute, in groups, in the order of their turns."""
        if not prompts or self._tokens_without >= self._turn_tokens:
            return set()
        most = max(shares.of(tenant, places=1) for tenant in prompts[0])
        others = set(decoding).difference(prompts[0])
        return {tenant for tenant in others if shares.of(tenant) > REST_FACTOR * most}

    def ran(self, resting: Collection[bytes], prompts: Iterable[Chunk]) -> None:
        """Count a step that left `resting` out and computed these chunks."""
        tokens = sum(chunk.count for chunk in prompts)
        self._tokens_without = self._tokens_without + tokens if resting and tokens else 0
