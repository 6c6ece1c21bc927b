"""Ray Serve's request router of the ingresses, in its HTTP proxies: a session keeps to one ingress.

A session is what the header `x-session-id` names (RAY_SERVE_SESSION_ID_HEADER_KEY): a proxy sees no more of a
request than its head. It goes to the first ingress by its hash that lives, so that most sessions stay
where they are when one comes or dies. All else goes to one of two on this node, whichever has less to do.
What it learns of them is known to the proxy's guard, too, which sends them requests without it.

A thin shell: an exception here would hang the request. Serve sends this class to its
processes by value: what is shared there is reached through its module.
"""

from __future__ import annotations

import logging
import random

from ray.serve.request_router import LocalityMixin, PendingRequest, RequestRouter, RunningReplica

from samovar.router.proxy import known_ingresses
from samovar.router.routing import Rendezvous

logger = logging.getLogger("ray.serve")


class IngressRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray's classes are untyped
    """Sends a session's requests to one ingress."""

    def initialize_state(self) -> None:
        """Begin without ingresses."""
        self._rng = random.Random()
        self._ring: tuple[frozenset[str], Rendezvous] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which ingresses there are, here and for the guard."""
        super().update_replicas(replicas)
        try:
            told = [(one.replica_id.unique_id, one.node_id, one.replica_metadata) for one in replicas]
            known_ingresses.learn(self._deployment_id, told, self._self_node_id)
        except Exception:  # Serve goes on without links
            logger.exception("the addresses of the ingresses are not known")

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the ingresses that a request tries, the best first; of a group, the less busy one."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if len(candidate_replicas) < 2 or pending_request is None:
            return [candidate_replicas]
        try:
            return self._ranked(candidate_replicas, pending_request)
        except Exception:  # an exception here would hang the request
            logger.exception("choosing an ingress failed; any may serve this request")
            return [candidate_replicas]

    def _ranked(
        self, candidates: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        session = pending_request.metadata.session_id
        if session:
            groups = known_ingresses.by_session(session, list(by_name), self._ring_of(frozenset(by_name)))
            return [[by_name[name] for name in group] for group in groups]
        near = [self._replicas[one] for one in self.apply_locality_routing(pending_request)]
        chosen = near if len(near) <= 2 else self._rng.sample(near, 2)
        return [chosen, [one for one in candidates if one not in chosen] or chosen]

    def _ring_of(self, names: frozenset[str]) -> Rendezvous:
        if self._ring is None or self._ring[0] != names:
            self._ring = names, Rendezvous(sorted(names))
        return self._ring[1]
