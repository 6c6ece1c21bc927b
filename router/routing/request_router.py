"""Ray Serve's request router: ranks the replicas by price, see `score.py`.

A thin shell, loaded by Serve into every process that calls replicas. An exception here would hang the
request forever, and forgetting `should_backoff` would spin, so this class does
little and guards against both. Not based on Ray's own ConsistentHashRouter: its copy of the routing loop
loses requests (docs/adr/001).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.messages import GenerateRequest, ReplyTo
from samovar.router.routing import load_tracker, roster, score

logger = logging.getLogger("ray.serve")


class SessionRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is untyped
    """Ranks the replicas for each request by session, load and price.

    Serve tries each rank in turn; a replica with `max_ongoing_requests` open is skipped.
    """

    def initialize_state(
        self,
        affinity_penalty_s: float = 0.05,
        load_bound_factor: float = 1.25,
        has_tiers: bool = True,
        further: str = "",
    ) -> None:
        """Set the options, see `samovar.configs.settings.RouterSettings`.

        `has_tiers`: whether blocks can be loaded on replicas other than home. `further`: of which model in
        `models` the replicas are; empty: of the first.
        """
        self._further = further
        self._options = roster.RankOptions(affinity_penalty_s, load_bound_factor, has_tiers)
        self._rng = random.Random()
        self._candidates: dict[str, roster.FittingReplicas[RunningReplica]] = {}  # by model
        self._candidates_of: Sequence[RunningReplica] = ()
        self._chosen: dict[str, tuple[str, score.Ranking]] = {}  # internal request id -> (ticket, ranking)

    @property
    def book(self) -> load_tracker.ReplicaLoadTracker:
        """The load book of the model whose replicas these are."""
        return load_tracker.book_of(self._further)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica per rank, the best first; of many replicas the others make up the last rank.

        Replicas with another model are left out as long as there are others.
        """
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        try:
            return self._ranked(candidate_replicas, pending_request)
        except Exception:  # an exception here would hang the request
            logger.exception("choosing by session failed; any replica may serve this request")
            return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's update of the replicas, with their routing statistics."""
        super().update_replicas(replicas)
        try:
            nodes = {replica.replica_id.unique_id: str(replica.node_id or "") for replica in replicas}
            prices = {replica.replica_id.unique_id: _prefill(replica.routing_stats) for replica in replicas}
            known = {name: price for name, price in prices.items() if price is not None}
            loads = {replica.replica_id.unique_id: replica.routing_stats.get("load") for replica in replicas}
            self.book.update_replicas(nodes, known, loads)
            roster.roster_of(self._further).update([_listed(replica) for replica in replicas], self._options)
        except Exception:  # the router still works, with older information
            logger.exception("updates from the replicas could not be processed")

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that the replica has accepted the request."""
        chosen = self._chosen.get(pending_request.metadata.internal_request_id)
        if chosen is not None:  # else it has ended already, or was no generation
            ticket, ranking = chosen
            roster.roster_of(self._further).queued.discard(ticket)
            name = replica_id.unique_id
            self.book.routed(ticket, name, ranking.work_s.get(name, 0.0), ranking.outcomes.get(name))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that the request has ended, in whatever way."""
        chosen = self._chosen.pop(internal_request_id, None)
        if chosen is not None:
            self.book.ended(chosen[0])

    def _ranked(
        self, candidates: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        request = _request_of(pending_request)
        if request is None:
            return [candidates]
        known = self._known(candidates, request.model)
        by_name = known.by_name
        if request.route.only in by_name:
            return [[by_name[request.route.only]]]
        tracker = self.book

        def is_full(name: str) -> bool:
            return self._is_full(by_name[name])

        session = pending_request.metadata.session_id or request.request_id
        ranking = roster.ranking(tracker, request, session, known, is_full, self._options)
        ticket = request.route.ticket
        self._chosen[pending_request.metadata.internal_request_id] = (ticket, ranking)
        if ticket and ranking.names:  # at once, so that concurrent choices see it
            tracker.routed(ticket, ranking.names[0], ranking.work_s[ranking.names[0]], None)
        while len(self._chosen) > load_tracker.CHOSEN_MAX:  # requests given up before they were sent
            del self._chosen[next(iter(self._chosen))]
        ranks = [[by_name[name]] for name in ranking.names]
        return [*ranks, others] if (others := known.others(ranking.names)) else ranks

    def _known(self, candidates: list[RunningReplica], model: str) -> roster.FittingReplicas[RunningReplica]:
        """Return the candidates that serve a model; all, if none does."""
        if self._candidates_of is not candidates:  # Serve makes a new list of every new set of replicas
            self._candidates_of, self._candidates = candidates, {}
        known = self._candidates.get(model)
        if known is None:
            fitting = [one for one in candidates if _serves(one, model)] or candidates
            by_name = {one.replica_id.unique_id: one for one in fitting}
            known = self._candidates[model] = roster.FittingReplicas(by_name, self._rng)
        return known

    def _is_full(self, replica: RunningReplica) -> bool:
        """Whether it has as many open as it may: by Serve, which knows what it carries, or by our book."""
        length = self.replica_queue_len_cache.get(replica.replica_id)
        if length is not None and length >= replica.max_ongoing_requests:
            return True
        is_full: bool = self.book.open_requests(replica.replica_id.unique_id) >= replica.max_ongoing_requests
        return is_full


def _request_of(pending_request: PendingRequest) -> GenerateRequest | None:
    """Return the generation request; None for other calls (statistics and the like)."""
    args = pending_request.args
    return args[0] if args and isinstance(args[0], GenerateRequest) else None


def _serves(replica: RunningReplica, model: str) -> bool:
    """Return whether the replica has this model, or has not reported its model yet."""
    return roster.serves(replica.replica_metadata.get("model", ""), model)


def _listed(replica: RunningReplica) -> roster.ListedReplica:
    told = replica.replica_metadata
    address = ReplyTo.of(told.get("address"))
    name, most = replica.replica_id.unique_id, replica.max_ongoing_requests
    return roster.ListedReplica(name, str(told.get("model", "")), most, address)


def _prefill(stats: dict[str, Any]) -> PrefillPrice | None:
    """Return the prefill price a replica has measured; None before its first report."""
    parts = stats.get("prefill")
    if not isinstance(parts, list | tuple) or len(parts) != 3:
        return None
    if not all(isinstance(part, int | float) and math.isfinite(part) and part >= 0 for part in parts):
        return None
    step_tokens = stats.get("step_tokens")
    if not isinstance(step_tokens, int | float) or not step_tokens >= 1:
        step_tokens = math.inf
    c0_s, a_s, b_s = (float(part) for part in parts)
    return PrefillPrice(c0_s, a_s, b_s, step_tokens) if any(parts) else None
