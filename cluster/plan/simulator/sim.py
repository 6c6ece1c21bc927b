"""Simulates a fleet under a trace, on a virtual clock, with the product's policy, router and predictor.

Prices and load plans are the product's, too. Only the machine is simulated: GPUs that compute one prompt
after the other, tiers with a number of blocks, links with bytes per second. Requests arrive when the trace
says, whatever happened before. Simplifications: while a prompt waits for a load, others compute; answers
take `decode_token_s` per token whatever else runs, and are not cached as blocks; a started load never fails.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from samovar.cache_tiers.blocks import LoadSource
from samovar.cache_tiers.forecast import Forecast, Forecaster, SessionKey, forecast
from samovar.cache_tiers.policy import IdleSessions, ResidencyPolicy
from samovar.cache_tiers.pricing import Doubt, LoadPlan, plan_load
from samovar.cluster.plan.simulator.fleet import Fleet, SimRouter
from samovar.cluster.plan.simulator.node import SimNode, new_doubt, saver
from samovar.cluster.plan.simulator.tier import SimTier
from samovar.cluster.plan.traces.replay import Growth, TraceOpenings
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import ProfileSettings
from samovar.router.routing import ReplicaView


@dataclass(slots=True)
class SimTally:
    """Counts over the counted turns, except `computed_s`: GPU seconds of prefill in the whole run.

    `hit_tokens`: by where they were found, `gpu` or a tier; the rest of `prompt_tokens` was computed.
    `reusable_tokens`: those that a tier or the GPU had at arrival; `upper_tokens`: of these, those in the GPU
    or in the node's uppermost tier. `main_...`: of the conversations alone, without what is sent beside them.
    """

    turns: int = 0
    prompt_tokens: int = 0
    main_prompt_tokens: int = 0
    main_hit_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    upper_tokens: int = 0
    reusable_tokens: int = 0
    computed_s: float = 0.0
    ttft_s: array[float] = field(default_factory=lambda: array("f"))

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)

    @property
    def upper_share(self) -> float:
        return self.upper_tokens / max(1, self.reusable_tokens)

    def ttft_at(self, percent: float) -> float:
        """Return the TTFT percentile in seconds; 0 without requests."""
        return (
            float(np.percentile(np.frombuffer(self.ttft_s, dtype=np.float32), percent))
            if self.ttft_s
            else 0.0
        )


Kind = Literal["end", "hint", "arrivals", "tick"]


@dataclass(frozen=True, slots=True)
class Foresight:
    """What is known of each turn beforehand, by its number in the trace.

    `curves`: its forecast (`replay.forecasts`). `next_s`: when its lineage goes on, for the oracle.
    `hints`: when its client reports typing the next one.
    """

    curves: Sequence[Forecast] | None = None
    next_s: Sequence[float] | None = None
    hints: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Replica:
    """A replica. `free_s`: when its current prompts are computed. `waiting`: requests without a slot."""

    number: int
    node: SimNode
    gpu: SimTier
    waiting: deque[tuple[int, TraceTurn]]
    doubt: Doubt
    running: int = 0
    free_s: float = 0.0


class Sim:
    """One simulation run. `predictors`: one per node, or one for all; they learn as it runs.

    Without them, forecasts are those of `foresight`. `tick_s`: interval at which prefetching by hazard looks
    for sessions likely to return.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: ResidencyPolicy,
        block_tokens: int,
        foresight: Foresight | None = None,
        *,
        predictors: Sequence[Forecaster] = (),
        count_from_s: float = 0.0,
        tick_s: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.tally = SimTally()
        self.fleet = fleet
        self._block_tokens = block_tokens
        self._foresight = foresight or Foresight()
        self._predictors = predictors
        self._count_from_s = count_from_s
        self._tick_s = tick_s
        self._growth = Growth()
        self._openings = TraceOpenings()
        self._events: list[tuple[float, int, Kind, int, int, TraceTurn | None]] = []
        self._serial = itertools.count()
        self._fleet_sessions = IdleSessions(fleet.sessions_max * fleet.nodes)
        self._placed: dict[SessionKey, ProfileSettings] = {}
        self._s3: SimTier | None = None
        block_bytes = block_tokens * fleet.bytes_per_token
        if fleet.s3_bytes // block_bytes:
            self._s3 = SimTier(
                fleet.s3_bytes // block_bytes,
                block_tokens,
                policy,
                fleet.policy,
                self._fleet_sessions,
                placed=self._placed.__getitem__,
            )
        self._now_s = 0.0
        self.nodes = [
            SimNode(at, fleet, policy, block_tokens, self._s3, lambda: self._now_s, self._placed.__getitem__)
            for at in range(fleet.nodes)
        ]
        self.replicas = [self._new_replica(at, policy) for at in range(fleet.replicas)]
        self.router = SimRouter(fleet, self._view, seed=seed)
        self._arrivals_due: dict[int, float] = {}  # node -> when its next "arrivals" event is due

    def _new_replica(self, number: int, policy: ResidencyPolicy) -> _Replica:
        node = self.nodes[number // self.fleet.replicas_per_node]
        blocks = self.fleet.gpu_bytes // node.block_bytes
        saved_s = saver(self.fleet, self._block_tokens)
        gpu = SimTier(blocks, self._block_tokens, policy, self.fleet.policy, node.sessions, saved_s=saved_s)
        return _Replica(number, node, gpu, deque(), new_doubt(node.block_bytes))

    def run(self, turns: Iterable[TraceTurn]) -> SimTally:
        """Run all `turns`, which are ordered by start."""
        ticks = [node for node in self.nodes if node.early is not None]
        for number, turn in enumerate(turns):
            if number == 0:
                for node in ticks:
                    self._push(turn.started_s + self._tick_s, "tick", node.number)
            self._until(turn.started_s)
            self._now_s = turn.started_s
            self._arrive(number, turn)
        self._drain()
        return self.tally

    def _until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            self._step()

    def _drain(self) -> None:
        """Process the events until all running requests have ended."""
        while any(kind == "end" for _, _, kind, *_ in self._events):
            self._step()

    def _step(self) -> None:
        self._now_s, _, kind, where, number, turn = heapq.heappop(self._events)
        if turn is None:
            self._look_at(self.nodes[where], kind)
        elif kind == "end":
            self._end(self.replicas[where], number, turn)
        else:
            self._hint(turn)

    def _look_at(self, node: SimNode, kind: Kind) -> None:
        early = node.early
        assert early is not None
        if kind == "tick":
            early.tick(self._now_s)
            self._push(self._now_s + self._tick_s, "tick", node.number)
        else:
            self._arrivals_due.pop(node.number, None)
            early.arrivals(self._now_s)
        self._expect(node)

    def _expect(self, node: SimNode) -> None:
        """Schedule an event for the next prefetch completion."""
        if node.early is None:
            return
        due_s = node.early.next_s(self._now_s) + 1e-6
        if due_s < self._arrivals_due.get(node.number, math.inf):
            self._arrivals_due[node.number] = due_s
            self._push(due_s, "arrivals", node.number)

    def _arrive(self, number: int, turn: TraceTurn) -> None:
        self._placed[turn.key] = self.fleet.profiles.named(turn.profile)
        before = self.router.home(turn.key)
        at = self.router.choose(turn.key, turn.input_tokens)
        replica = self.replicas[at]
        peer = None
        if before is not None and self.replicas[before].node is not replica.node:
            peer = self.replicas[before].node
        if self._predictors:
            opening = self._openings.began(turn, self._now_s)
            self._predictor(replica.node).arrived(turn.key, self._now_s, opening)
        self._count_upper(replica, turn, peer)
        for one in (replica.node.sessions, self._fleet_sessions):
            one.started(turn.key, self._now_s)  # also if it has to wait: it will need its blocks
        if replica.running >= self.fleet.slots:
            replica.waiting.append((number, turn))
            replica.node.waits(turn.key, turn.blocks, self._now_s)
            self._expect(replica.node)
        else:
            self._begin(replica, number, turn, peer)

    def _begin(self, replica: _Replica, number: int, turn: TraceTurn, peer: SimNode | None) -> None:
        """Start a request that has a slot: plan, load, compute."""
        now_s, node, session = self._now_s, replica.node, turn.key
        node.began(session, turn.blocks, now_s)
        hits = replica.gpu.prefix(turn.blocks)
        resident = min(hits * self._block_tokens, turn.input_tokens - 1)
        pieces = node.pieces(turn.blocks, hits, peer) if resident < turn.input_tokens - 1 else []
        missing_tokens = turn.input_tokens - 1 - max(0, resident)
        replica.doubt.decided(missing_tokens * self.fleet.bytes_per_token)
        plan = plan_load(
            prompt_tokens=turn.input_tokens,
            resident_tokens=max(0, resident),
            pieces=pieces,
            prices={tier: link.price_now(now_s) for tier, link in node.links.items()},
            prefill=self.fleet.prefill,
            parallel=self.fleet.loads_parallel,
            hedge_factor=self.fleet.hedge_factor,
            hedge_slack_s=self.fleet.hedge_slack_s,
            doubt=replica.doubt,
        )
        first_s = self._compute(replica, turn, max(0, resident), plan)
        until_s = first_s + self.fleet.decode_token_s * turn.output_tokens
        replica.running += 1
        replica.gpu.use(turn.blocks, session, now_s, until_s)
        if plan.pieces:
            node.loaded(session, turn.blocks[: max(p.end for p in plan.pieces) // self._block_tokens], now_s)
        node.changed(session)
        self._push(until_s, "end", replica.number, number, turn)
        self._expect(node)
        if turn.started_s >= self._count_from_s:
            self._count(turn, max(0, resident), plan, first_s)

    def _compute(self, replica: _Replica, turn: TraceTurn, resident: int, plan: LoadPlan) -> float:
        """Occupy the links and the GPU for a prompt, and return when its first token is ready."""
        now_s, prefill = self._now_s, self.fleet.prefill
        loaded = sum(piece.tokens for piece in plan.pieces)
        by_tier: dict[LoadSource, int] = {}
        for piece in plan.pieces:
            by_tier[piece.tier] = by_tier.get(piece.tier, 0) + piece.nbytes
        there_s = now_s
        for tier, nbytes in by_tier.items():
            there_s = max(there_s, replica.node.links[tier].demand(nbytes, now_s))
        late_s = now_s + min(plan.hedge_after_s, plan.recompute_s)
        if (
            plan.decision == "load" and there_s > late_s
        ):  # computed from there on, as if nothing had been loaded
            all_s = prefill.seconds(turn.input_tokens - resident, resident)
            replica.free_s = max(late_s, replica.free_s) + all_s
            self.tally.computed_s += all_s
            return replica.free_s
        front = 0  # computed while the rest loads
        if plan.decision == "meet":
            front = min(piece.first_token for piece in plan.pieces) - resident
        end = resident + front + loaded
        rest_s = prefill.seconds(max(1, turn.input_tokens - end), min(end, turn.input_tokens - 1))
        front_s = prefill.seconds(front, resident)
        starts_s = max(now_s, replica.free_s)
        replica.free_s = starts_s + front_s + rest_s
        self.tally.computed_s += front_s + rest_s
        return max(starts_s + front_s, there_s) + rest_s

    def _end(self, replica: _Replica, number: int, turn: TraceTurn) -> None:
        now_s, node = self._now_s, replica.node
        given = self._foresight
        told = None if given.curves is None else given.curves[number]
        if self._predictors:
            self._openings.ended(turn)
            told = forecast(self._predictor(node), turn.turn(now_s))
        chain = turn.input_tokens + turn.output_tokens
        new_tokens = self._growth.after(turn.key, turn.input_tokens - turn.kept_tokens)
        next_s = math.inf if given.next_s is None else given.next_s[number]
        for one in (node.sessions, self._fleet_sessions):
            one.ended(
                turn.key,
                now_s,
                tokens=chain,
                new_tokens=new_tokens,
                is_tool=turn.stop == "tool_calls",
                next_s=next_s,
            )
        changed: list[SessionKey] = [turn.key]
        if told is not None:
            changed += node.sessions.told(turn.key, told, now_s)
            self._fleet_sessions.told(turn.key, told, now_s)
        for key in changed:
            self._changed(node, key)
        node.ended(turn.key, turn.blocks, now_s)
        self.router.ended(turn.key, chain)
        for at_s in given.hints.get(number, ()):
            if at_s > now_s:
                self._push(at_s, "hint", replica.number, number, turn)
        replica.running -= 1
        if replica.waiting:
            following, next_turn = replica.waiting.popleft()
            self._begin(replica, following, next_turn, None)
        self._expect(node)

    def _changed(self, node: SimNode, key: SessionKey) -> None:
        """Rerank what a lineage uses on a node and in S3."""
        for replica in self.replicas:
            if replica.node is node:
                replica.gpu.changed(key)
        node.changed(key)
        if self._s3 is not None:
            self._s3.changed(key)

    def _hint(self, turn: TraceTurn) -> None:
        home = self.router.home(turn.key)
        if home is not None:
            node = self.replicas[home].node
            if node.early is not None:
                node.early.ask("hint", turn.key, self._now_s)
                self.replicas[home].gpu.changed(turn.key)
                self._expect(node)

    def _count(self, turn: TraceTurn, resident: int, plan: LoadPlan, first_s: float) -> None:
        tally = self.tally
        tally.turns += 1
        tally.prompt_tokens += turn.input_tokens
        tally.hit_tokens["gpu"] += resident
        for piece in plan.pieces:
            tally.hit_tokens[piece.tier] += piece.tokens
        if turn.is_main:
            tally.main_prompt_tokens += turn.input_tokens
            tally.main_hit_tokens += resident + sum(piece.tokens for piece in plan.pieces)
        tally.ttft_s.append(first_s - turn.started_s)

    def _count_upper(self, replica: _Replica, turn: TraceTurn, peer: SimNode | None) -> None:
        """Count tokens cached anywhere at arrival, and those in the GPU or the node's uppermost tier."""
        if turn.started_s < self._count_from_s:
            return
        top = replica.node.top
        for number in turn.blocks:
            source = replica.node.source(number)
            is_upper = number in replica.gpu or (source is not None and source == top)
            if not is_upper and source is None:
                break
            self.tally.reusable_tokens += self._block_tokens
            self.tally.upper_tokens += self._block_tokens * is_upper

    def _predictor(self, node: SimNode) -> Forecaster:
        return self._predictors[node.number % len(self._predictors)]

    def _view(self, number: int) -> ReplicaView:
        replica = self.replicas[number]
        return ReplicaView(
            name=str(number),
            node=str(replica.node.number),
            wait_s=max(0.0, replica.free_s - self._now_s),
            open_requests=replica.running + len(replica.waiting),
            prefill=self.fleet.prefill,
        )

    def _push(
        self, at_s: float, kind: Kind, where: int, number: int = 0, turn: TraceTurn | None = None
    ) -> None:
        heapq.heappush(self._events, (at_s, next(self._serial), kind, where, number, turn))

    def moved_bytes(self) -> dict[str, int]:
        """Return bytes by `from->to`: loads (`cpu->gpu`), stores, demotions, and prefetches (`->early`)."""
        found: dict[str, int] = {}
        for node in self.nodes:
            for way, nbytes in node.moved_bytes.items():
                found[way] = found.get(way, 0) + nbytes
            for tier, link in node.links.items():
                for way, nbytes in (
                    (f"{tier}->gpu", link.demand_bytes),
                    (f"{tier}->early", link.guess_bytes),
                ):
                    if nbytes:
                        found[way] = found.get(way, 0) + nbytes
        return found

    def check_integrity(self) -> None:
        """Raise `AssertionError`, naming the violated invariant."""
        for replica in self.replicas:
            replica.gpu.check_integrity()
            assert 0 <= replica.running <= self.fleet.slots, "more requests run than there are slots"
            assert not replica.waiting or replica.running == self.fleet.slots, "one waits beside a free slot"
        for node in self.nodes:
            node.check_integrity()
