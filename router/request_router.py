"""Ray Serve's question "which replica?", answered by session: home first, the others when it is full.

A thin shell over `ring.py`, loaded by Serve into every process that calls replicas. An exception
in here would hang the request for ever, and forgetting `should_backoff` would spin (FACTS.md
part A, 0.4), so it does little and guards that. Not Ray's own ConsistentHashRouter: its copy of
the routing loop loses requests (docs/adr/001).
"""

from __future__ import annotations

import logging

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.ring import rendezvous_order

logger = logging.getLogger("ray.serve")


class SessionRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is untyped
    """Serve tries each rank in turn; a replica with `max_ongoing_requests` open is passed over."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One replica a rank: the session's home, then its deputies in their order."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        try:
            metadata = pending_request.metadata
            by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            order = rendezvous_order(metadata.session_id or metadata.internal_request_id, by_name)
            return [[by_name[name]] for name in order]
        except Exception:  # see above: any answer is better than none
            logger.exception("choosing by session failed; any replica may serve this request")
            return [candidate_replicas]
