"""Whose prompts are computed first, where several tenants have some. Pure.

Each tenant's computed prompt tokens are counted, over its weight, in turns of `turn_tokens`; who is in an
earlier turn goes before the others, so that a long prompt under way does not hold up another tenant's short
one. Who comes after a pause starts with the turn before that of who has had least, and so has a whole one, no
more: going away and coming back gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


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
