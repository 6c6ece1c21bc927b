"""What one front door asks of all, itself included. Without Ray: see `ray_peers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DoorPeers(Protocol):
    """All front doors of the service."""

    async def forget(self, tenant: str, sessions: Sequence[bytes] | None) -> tuple[int, int]:
        """Forget a tenant's replies and responses; return how many replies, and how many did not answer."""

    async def forget_entries(self, tenant: str, entries: Sequence[str] | None) -> int:
        """Erase what was made of these entries of knowledge, or of any; return how many did not answer."""

    async def discard(self, tenant: str, response_id: str) -> int:
        """Delete a stored response; return how many front doors did not answer."""

    async def metrics(self) -> dict[str, bytes]:
        """Return front door -> its own metrics, as text; without those that do not answer."""
