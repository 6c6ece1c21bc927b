"""Whose document is worked on next: tenants take turns, by the time that their documents take. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.replicas.turns import FairQueue

TURN_S = 1.0
"""What a turn of a tenant is worth."""


class DocumentTurns:
    """Of a tenant one document at a time: its slow one leaves the other workers to the other tenants."""

    def __init__(self) -> None:
        self._turns: FairQueue[str, str] = FairQueue(TURN_S)  # each tenant is an item of its own
        self._busy: set[str] = set()

    def begin(self, waiting: Sequence[str]) -> str | None:
        """Return the tenant whose turn it is among those with open work; None: all are worked on."""
        for gone in [one for one in self._turns if one not in waiting]:
            self._turns.remove(gone)
        for one in waiting:
            if one not in self._turns:
                self._turns.put(one, one, 0.0)
        tenant = self._turns.pick(lambda one: one not in self._busy)
        if tenant is not None:
            self._turns.take(tenant)
            self._busy.add(tenant)
        return tenant

    def over(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for what its document has taken, and let its next one begin."""
        self._busy.discard(tenant)
        self._turns.charge(tenant, seconds)
