"""Who comes back to this node, and what follows from it: forecasts, the ranks of sessions, prefetches.

Joins the parts: what lookups and turns' ends tell goes to the learner (`turn_learner.py`), its curves to the
table by which tiers are ranked (`idle_sessions.py`), and what is likely soon to `node_prefetch.py`. Nothing
here raises, or waits for the learner, on the way of a lookup. A session is named by its tenant's and its own
tag joined (`owner`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cache_tiers.chain_marks import ChainMarks, kept_blocks
from cache_tiers.idle_sessions import IdleSessions
from cache_tiers.kaplan_meier import TypeKm
from cache_tiers.messages import Clear, Found, Lookup, ReturnsStats, TurnOver
from cache_tiers.node_books import NodeBooks
from cache_tiers.node_prefetch import NodePrefetch
from cache_tiers.predictor import Predictor
from cache_tiers.survival import Curves
from cache_tiers.turn_learner import TurnLearner
from cache_tiers.turns import Hint, HintEvent, Turn

logger = logging.getLogger("samovar.tiers")

ANSWER_S_MAX = 2.0
"""How long a replica's worker waits for a curve; no request does."""
CLOSE_S_MAX = 5.0
KINDS = {"model": "learned", "type-km": "km", "cold": "cold"}


@dataclass(slots=True)
class _Chain:
    """A session's chain after its last turn, and how much of it the turn under way has kept."""

    marks: ChainMarks
    tokens: int
    block_tokens: int
    kept_tokens: int | None = None


class NodeReturns:
    """`sessions`: under the books' lock. `clock`: theirs, `rate` times as quick as time."""

    def __init__(
        self,
        books: NodeBooks,
        sessions: IdleSessions,
        learner: TurnLearner,
        prefetch: NodePrefetch,
        *,
        clock: Callable[[], float],
        rate: float,
        sessions_max: int,
    ) -> None:
        self._books = books
        self._sessions = sessions
        self._learner = learner
        self.prefetch = prefetch
        self._clock = clock
        self._rate = rate
        self._sessions_max = sessions_max
        self._chains: OrderedDict[bytes, _Chain] = OrderedDict()  # the longest untouched first

    def start(self) -> None:
        self._learner.start()

    def asked(self, lookup: Lookup) -> None:
        """A replica of this node begins to look up: before anything of the session counts as used."""
        if lookup.starts_turn:
            owner = lookup.tenant + lookup.session
            with self._books.lock:
                self._sessions.started(owner, self._clock())
                self._books.directory.session_changed(owner, lookup.tenant)

    def looked_up(self, lookup: Lookup, found: Found) -> None:
        """It was answered with `found` (of this node's tiers)."""
        if lookup.starts_turn:
            owner, now_s = lookup.tenant + lookup.session, self._clock()
            with self._books.lock:
                self.prefetch.returned(lookup.tenant, lookup.session, found.spans)
                chain = self._chains.get(owner)
                if chain is not None:
                    chain.kept_tokens = kept_blocks(chain.marks, lookup.keys) * chain.block_tokens
            self._learner.arrived(owner, now_s)
        if lookup.is_queued:
            self.prefetch.promote(lookup.tenant, lookup.session, "queue")

    def turn_over(self, over: TurnOver) -> Curves | None:
        """The session's curve, f32 `[EDGES]`, counted from the turn's end; None: nothing is known.

        Waits for the learner, `ANSWER_S_MAX` at most.
        """
        owner = over.tenant + over.session
        ended_s = self._clock() - max(0.0, over.ago_s) * self._rate
        with self._books.lock:
            kept = self._kept(owner, over)
        turn = Turn(
            owner,
            ended_s - max(0.0, over.service_s) * self._rate,
            ended_s,
            over.input_tokens,
            over.output_tokens,
            kept,
            over.stop,
            over.role,
            over.tool,
            over.profile,
        )
        # First without a curve: the learner may be slow, and the session is idle now.
        with self._books.lock:
            self._sessions.ended(
                owner,
                ended_s,
                tokens=turn.chain_tokens,
                new_tokens=float(max(0, over.input_tokens - kept)),
                is_tool=over.stop == "tool_calls",
            )
            self._books.directory.session_changed(owner, over.tenant)
        curve = self._learner.ended(turn, ANSWER_S_MAX)
        if curve is not None:
            self._told(owner, curve, ended_s)
        self.prefetch.paused(over.tenant, over.session)
        return curve

    def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> bool:
        """What a client says about its idle session. False: it is not known here."""
        owner, now_s = tenant + session, self._clock()
        curve = self._learner.hint(Hint(owner, now_s, event, expected_return_s), ANSWER_S_MAX)
        if event == "closed":
            self.prefetch.cancel([owner])
        if event == "tool_started":
            with self._books.lock:
                self._sessions.calls_tool(owner)
        if curve is not None:
            self._told(owner, curve, now_s)
        return curve is not None

    def clear(self, clear: Clear) -> None:
        """A tenant, or a session of it, is forgotten."""
        with self._books.lock:
            if clear.session is not None:
                owners = [clear.tenant + clear.session]
            else:
                known = {*self._sessions.sessions(), *self._chains, *self.prefetch.of_tenant(clear.tenant)}
                owners = [
                    owner for owner in known if isinstance(owner, bytes) and owner.startswith(clear.tenant)
                ]
            self.prefetch.cancel(owners)
            for owner in owners:
                self._sessions.forget(owner)
                self._chains.pop(owner, None)
                self._books.directory.session_changed(owner, clear.tenant)
        for owner in owners:
            self._learner.forget(owner)

    def work(self) -> None:
        """Learn what waits, in this thread: for nodes without threads."""
        self._learner.work()

    def tick(self) -> None:
        """Every second or so."""
        self.prefetch.tick()

    def close(self) -> None:
        """Save what was learned."""
        self._learner.close(CLOSE_S_MAX)

    def stats(self) -> ReturnsStats:
        learner, predictor = self._learner, self._learner.predictor
        kind, losses = "cold", (0.0, 0.0)
        if isinstance(predictor, Predictor):
            kind, losses = KINDS[predictor.source], (predictor.model_loss, predictor.fallback_loss)
        elif isinstance(predictor, TypeKm):
            kind = "cold" if predictor.is_cold else "km"
        with self._books.lock:
            sessions = len(self._sessions)
        return ReturnsStats(
            predictor=f"off: {learner.off}" if learner.off else kind,
            sessions=sessions,
            turns=learner.turns,
            dropped=learner.dropped,
            failures=learner.failures,
            saves=learner.saves,
            restored=learner.restored,
            model_loss=losses[0],
            fallback_loss=losses[1],
            prefetch=self.prefetch.stats(),
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        with self._books.lock:
            self._sessions.check_integrity()
            assert len(self._chains) <= self._sessions_max, "too many chains are remembered"
        self.prefetch.check_integrity()
        self._learner.check_integrity()

    def _told(self, owner: bytes, curve: Curves, since_s: float) -> None:
        with self._books.lock:
            self._sessions.told(owner, curve, since_s)
            self._books.directory.session_changed(owner, owner[: len(owner) // 2])

    def _kept(self, owner: bytes, over: TurnOver) -> int:
        """Of the chain before this turn; and the chain is now what it says."""
        chain = self._chains.pop(owner, None)
        self._chains[owner] = _Chain(over.marks, over.input_tokens + over.output_tokens, over.block_tokens)
        if len(self._chains) > self._sessions_max:
            self._chains.popitem(last=False)
        if chain is None:
            return 0
        kept = chain.tokens if chain.kept_tokens is None else chain.kept_tokens
        return min(kept, over.input_tokens)
