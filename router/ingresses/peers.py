"""What one ingress asks of all, itself included. Without Ray: see `ray_peers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class IngressesCleared:
    """How many replies were forgotten; how many ingresses did not answer, and how many go on forgetting."""

    replies: int
    silent: int = 0
    unfinished: int = 0


class Ingresses(Protocol):
    """All ingresses of the service."""

    async def forget(self, tenant: str, sessions: Sequence[bytes] | None) -> IngressesCleared:
        """Forget a tenant's replies, responses and summaries."""

    async def forget_entries(self, tenant: str, entries: Sequence[str] | None) -> int:
        """Erase what was made of these entries of knowledge, or of any; return how many did not answer."""

    async def discard(self, tenant: str, response_id: str) -> int:
        """Delete a stored response; return how many ingresses did not answer."""

    async def metrics(self) -> dict[str, bytes]:
        """Return ingress -> its own metrics, as text; without those that do not answer."""
