"""How the front door reaches replicas: a protocol and what can go wrong.

Knows nothing of Ray (see `ray_replica_client.py`) and decides nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from replicas.messages import Delta, EngineStats, Event, Failed, GenerateRequest, Refused, ReplicaInfo


class ReplicaLost(Exception):
    """The replica died or cannot be reached. The request may be tried again."""


class ReplicaFailed(Exception):
    """The replica raised. A fault of ours; trying again will not help."""


class ReplicaClient(Protocol):
    """What the front door needs of replicas."""

    def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        """Events of one request. `aclose()` cancels it on the replica.

        Iterating raises `ReplicaLost` or `ReplicaFailed`.
        """
        ...

    async def describe(self) -> list[ReplicaInfo]:
        """The replicas that answer now; empty when none is up."""
        ...

    async def stats(self) -> list[EngineStats]:
        """Counters of the replicas that answer now."""
        ...


def choices_ended(events: Sequence[Event], choices_open: int) -> int:
    """How many of a request's `choices_open` answers end with `events`."""
    if any(isinstance(event, Refused | Failed) for event in events):
        return choices_open
    return sum(1 for event in events if isinstance(event, Delta) and event.finish_reason is not None)
