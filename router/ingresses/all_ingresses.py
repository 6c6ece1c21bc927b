"""How many ingresses there are to be, and what one asks of all, itself included; see `ray_ingresses.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from samovar.configs.settings import Settings


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


def ingress_count(settings: Settings) -> int | None:
    """Return the number of ingresses; None: one on each node.

    One where something is written by one ingress only: a recording, a knowledge base in a file.
    """
    wanted = settings.server.ingress_replicas
    if wanted is not None:
        return wanted
    is_single = settings.server.record is not None or settings.knowledge.is_one_file
    return 1 if is_single or settings.cluster.ray_address == "local" else None
