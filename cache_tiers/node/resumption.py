"""Resumption on this node: forecasts, session ranks and prefetches.

Lookups and turn ends go to the learner (`forecast/learner.py`), its curves to the table by which tiers rank
sessions (`policy/idle_sessions.py`), and likely resumptions to `NodePrefetch`. Nothing here raises or waits
for the learner on the path of a lookup. What resumes is a lineage of a session (`blocks/extent.py`),
identified by its tenant tag and its own tag joined (`owner`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from samovar.cache_tiers.blocks import SESSION_BYTES, TAG_BYTES, TOP_TIER, Address, Clear, session_of
from samovar.cache_tiers.catalog import ExtentInfo
from samovar.cache_tiers.forecast import (
    EDGES,
    NO_FILE,
    Curves,
    Floats,
    Forecast,
    Hint,
    HintEvent,
    LineageChains,
    Predictor,
    SessionKey,
    Turn,
    TurnLearner,
    TypeKm,
    log_survival,
)
from samovar.cache_tiers.messages import (
    BlockRange,
    LineageGlance,
    Lookup,
    LookupResult,
    PrefetchStats,
    ResumptionStats,
    TurnEnded,
)
from samovar.cache_tiers.node.state import NodeState
from samovar.cache_tiers.node.store import NodeStores
from samovar.cache_tiers.policy import IdleSessions, Known, Prefetcher, ShadowLru

logger = logging.getLogger(__name__)


def runs_of(extents: Iterable[ExtentInfo]) -> tuple[tuple[str, int], ...]:
    """Return a chain's runs, see `LineageGlance`, of its extents in chain order; branches count once."""
    runs: list[tuple[str, int]] = []
    end = 0
    for extent in extents:
        gap, new = extent.first_block - end, extent.first_block + extent.blocks - max(end, extent.first_block)
        for place, blocks in (("none", gap), (extent.tiers[0], new)):
            if blocks > 0 and runs and runs[-1][0] == place:
                runs[-1] = place, runs[-1][1] + blocks
            elif blocks > 0:
                runs.append((place, blocks))
        end = max(end, extent.first_block + extent.blocks)
    return tuple(runs)


LOOKED_AT_A_TICK = 1000
"""Number of sessions with guesses checked per tick for extents that were evicted unused."""


class NodePrefetch:
    """Promotes extents to main memory before they are requested, as `policy/prefetcher.py` decides.

    Runs under the state's lock and touches no medium: copies are queued, and cancelled when no longer
    wanted. `sessions`: guarded by the state's lock, too. `clock`: theirs. `lead_s`: how far ahead guesses
    look. `stays_s`: how long main memory keeps unused data, at most. `is_demand_busy`: requests wait for
    loads or stores.
    """

    def __init__(
        self,
        state: NodeState,
        stores: NodeStores,
        sessions: IdleSessions,
        prefetcher: Prefetcher,
        *,
        clock: Callable[[], float],
        is_demand_busy: Callable[[], bool],
        lead_s: float,
        stays_s: float,
    ) -> None:
        self._state = state
        self._stores = stores
        self._sessions = sessions
        self._prefetcher = prefetcher
        self._clock = clock
        self._is_demand_busy = is_demand_busy
        self._lead_s = lead_s
        self._stays_s = stays_s
        self._moving: dict[bytes, dict[Address, int]] = {}  # guesses queued or being copied
        self._up: OrderedDict[bytes, dict[Address, int]] = OrderedDict()  # promoted guesses, not used yet

    def promote(self, tenant: bytes, session: bytes, why: Known) -> int:
        """Promote a session's extents, first ones first, for a hint or waiting request; return how many."""
        with self._state.lock:
            owner = tenant + session
            below = self._below(owner)
            granted = self._prefetcher.ask(why, owner, sum(extent.nbytes for extent in below))
            return len(self._begin(owner, below, granted, is_guess=False))

    def returned(self, tenant: bytes, session: bytes, spans: Sequence[BlockRange]) -> None:
        """Judge and end the session's guesses as its next turn begins; `spans`: what was found here."""
        with self._state.lock:
            owner = tenant + session
            self._look_after(owner)
            up = self._up.pop(owner, {})
            used = {
                Address(span.tenant, address.namespace, span.extent_id) for span in spans for address in up
            }
            late = self._prefetcher.returned(
                owner,
                self._clock(),
                up_bytes=sum(span.nbytes for span in spans if span.tier == TOP_TIER),
                asked_bytes=sum(span.nbytes for span in spans),
                used_bytes=sum(nbytes for address, nbytes in up.items() if address in used),
            )
            if late:
                self._call_off(owner)

    def paused(self, tenant: bytes, session: bytes) -> None:
        """Guess at the end of a session's turn."""
        with self._state.lock:
            owner = tenant + session
            below = self._below(owner)
            guess = self._prefetcher.at_pause(
                owner,
                sum(extent.nbytes for extent in below),
                self._clock(),
                room_bytes=self._room_bytes(),
                stays_s=self._stays_s,
                is_demand_busy=self._is_demand_busy(),
            )
            if guess is not None:
                self._begin(owner, below, guess.nbytes, is_guess=True)

    def tick(self) -> None:
        """Check for lost guesses and guess again; called about every second."""
        with self._state.lock:
            for owner in list(self._up)[:LOOKED_AT_A_TICK]:
                self._look_after(owner)
                if owner in self._up:
                    self._up.move_to_end(owner)
            if TOP_TIER not in self._state.guards:
                return
            guesses = self._prefetcher.by_hazard(
                self._sessions,
                self._below_bytes,
                self._clock(),
                lead_s=self._lead_s,
                room_bytes=self._room_bytes(),
                is_demand_busy=self._is_demand_busy(),
            )
            for guess in guesses:
                owner = _owner(guess.session)
                self._begin(owner, self._below(owner), guess.nbytes, is_guess=True)

    def cancel(self, owners: Iterable[SessionKey]) -> None:
        """Cancel the guesses of closed or cleared sessions."""
        with self._state.lock:
            now_s = self._clock()
            for owner in map(_owner, owners):
                self._prefetcher.cancel(owner, now_s)
                self._call_off(owner)
                self._up.pop(owner, None)

    def of_tenant(self, tenant: bytes) -> list[bytes]:
        """Return the tenant's sessions that have guesses."""
        with self._state.lock:
            return [owner for owner in {*self._moving, *self._up} if owner.startswith(tenant)]

    def stats(self) -> PrefetchStats:
        with self._state.lock:
            return self._prefetcher.stats()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self._state.lock:
            self._prefetcher.check_integrity()
            for owner, extents in [*self._moving.items(), *self._up.items()]:
                assert extents, "a session without guesses is remembered"
                assert len(owner) == 2 * TAG_BYTES, "a session is named otherwise than others"

    def _below(self, owner: bytes) -> list[ExtentInfo]:
        """Return the chain's extents that are not in main memory and could be, in chain order."""
        if TOP_TIER not in self._state.guards:
            return []
        tenant, session = owner[:TAG_BYTES], owner[TAG_BYTES:]
        extents = self._state.catalog.extents_of(tenant, session)
        return [extent for extent in extents if TOP_TIER not in extent.tiers]

    def _below_bytes(self, session: SessionKey) -> int:
        return sum(extent.nbytes for extent in self._below(_owner(session)))

    def _room_bytes(self) -> int:
        guard = self._state.guards.get(TOP_TIER)
        return 0 if guard is None else guard.bytes_max - self._state.catalog.usage(TOP_TIER).bytes_accounted

    def _begin(
        self, owner: bytes, below: Sequence[ExtentInfo], granted: int, *, is_guess: bool
    ) -> list[Address]:
        """Queue the first extents that total at most `granted` bytes; the remainder is given back."""
        chosen: list[ExtentInfo] = []
        for extent in below:
            if sum(one.nbytes for one in chosen) + extent.nbytes > granted:
                break
            chosen.append(extent)
        begun = []
        for extent in chosen if is_guess else reversed(chosen):  # the last one queued is done first
            address, nbytes = extent.address, extent.nbytes
            ended = partial(self._ended, owner, address, nbytes, is_guess)
            if self._stores.copy(address, TOP_TIER, is_urgent=not is_guess, is_guess=is_guess, ended=ended):
                begun.append(address)
                granted -= nbytes
                if is_guess:
                    self._moving.setdefault(owner, {})[address] = nbytes
        if granted > 0:
            self._prefetcher.failed(owner, granted, self._clock())
        return begun

    def _ended(self, owner: bytes, address: Address, nbytes: int, is_guess: bool, is_there: bool) -> None:
        """Record the end of a copy; runs in a worker's thread."""
        with self._state.lock:
            moving = self._moving.get(owner, {})
            if is_guess and moving.pop(address, None) is None:
                return  # cancelled meanwhile
            if not moving:
                self._moving.pop(owner, None)
            if not is_there:
                self._prefetcher.failed(owner, nbytes, self._clock())
                return
            self._prefetcher.arrived(owner, nbytes, self._clock())
            if is_guess:
                self._up.setdefault(owner, {})[address] = nbytes

    def _call_off(self, owner: bytes) -> None:
        for address, nbytes in self._moving.pop(owner, {}).items():
            if self._stores.cancel_guess(address, TOP_TIER):
                self._prefetcher.unmoved(nbytes)

    def _look_after(self, owner: bytes) -> None:
        """Note which of its guesses were evicted or have expired."""
        up = self._up.get(owner, {})
        gone = [address for address in up if TOP_TIER not in self._state.catalog.copies(address)]
        for address in gone:
            self._prefetcher.left(owner, up.pop(address), self._clock())
        if gone and not up:
            del self._up[owner]


def _owner(session: SessionKey) -> bytes:
    assert isinstance(session, bytes), "a node's sessions are named by tags"
    return session


ANSWER_S_MAX = 2.0
"""How long a replica's worker waits for a curve; no request does."""
CLOSE_S_MAX = 5.0
KINDS = {"model": "learned", "type-km": "km", "constant": "km", "cold": "cold"}


class NodeResumption:
    """Feeds the learner and keeps session ranks. `sessions`: guarded by the state's lock.

    `clock`: of the sessions, `rate` times as fast as real time.
    """

    def __init__(
        self,
        state: NodeState,
        sessions: IdleSessions,
        learner: TurnLearner,
        prefetch: NodePrefetch,
        shadow: ShadowLru,
        *,
        clock: Callable[[], float],
        rate: float,
        sessions_max: int,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._learner = learner
        self.prefetch = prefetch
        self.shadow = shadow
        self._history = state.catalog.history
        self._history.log = shadow.log
        self._clock = clock
        self._rate = rate
        self._chains = LineageChains(sessions_max)

    def start(self) -> None:
        self._learner.start()

    def asked(self, lookup: Lookup) -> None:
        """Note the start of a replica's lookup, before anything of the session counts as used."""
        if lookup.starts_turn:
            owner = lookup.tenant + lookup.session
            with self._state.lock:
                self._sessions.started(owner, self._clock())
                self._state.catalog.session_changed(owner, lookup.tenant)

    def looked_up(self, lookup: Lookup, found: LookupResult) -> None:
        """Note a lookup's answer `found` (of this node's tiers)."""
        if lookup.starts_turn:
            owner, now_s = lookup.tenant + lookup.session, self._clock()
            self.shadow.log.append((lookup.keys, found.spans))
            with self._state.lock:
                self.prefetch.returned(lookup.tenant, lookup.session, found.spans)
                whole = lookup.tenant + session_of(lookup.session)
                opening = self._chains.began(owner, whole, lookup.keys, now_s)
            self._learner.arrived(owner, now_s, opening)
        if lookup.is_queued:
            self.prefetch.promote(lookup.tenant, lookup.session, "queue")

    def history(self, lookup: Lookup) -> bytes:
        """Return what is known of the turns of a lookup's session, for a node that it has moved to."""
        if not lookup.starts_turn:
            return b""
        return self._learner.history(lookup.tenant + lookup.session, self._clock())

    def moved_here(self, lookup: Lookup, history: bytes) -> None:
        """Go on with a peer's `history` of a lookup's session, if nothing is known of it here."""
        self._learner.moved_here(lookup.tenant + lookup.session, history, self._clock())

    @property
    def is_new(self) -> bool:
        """Whether nothing was learned here so far, nor read from a file."""
        return self._learner.turns == 0 and self._learner.restored in ("", NO_FILE)

    def learned(self) -> bytes:
        """Return what was learned here, for a node that joins; empty: too little. Waits for the learner."""
        return self._learner.learned(ANSWER_S_MAX)

    def start_from(self, model: bytes) -> None:
        """Begin with what a peer has `learned`; no-op if that is empty, or no longer needed."""
        if model:
            self._learner.start_from(model)

    def turn_over(self, over: TurnEnded) -> Forecast | None:
        """Return the forecast for the session, counted from the turn's end; None: nothing is known.

        Waits for the learner, `ANSWER_S_MAX` at most.
        """
        owner = over.tenant + over.session
        ended_s = self._clock() - max(0.0, over.ago_s) * self._rate
        with self._state.lock:
            kept = self._chains.ended(
                owner,
                over.marks,
                input_tokens=over.input_tokens,
                tokens=over.input_tokens + over.output_tokens,
                block_tokens=over.block_tokens,
            )
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
        with self._state.lock:
            self._sessions.ended(
                owner,
                ended_s,
                tokens=turn.chain_tokens,
                new_tokens=float(max(0, over.input_tokens - kept)),
                is_tool=over.stop == "tool_calls",
            )
            self._state.catalog.session_changed(owner, over.tenant)
        forecast = self._learner.ended(turn, ANSWER_S_MAX)
        if forecast is not None:
            self._told(owner, forecast, ended_s)
        if forecast is not None and (over.is_final or over.returns_s is not None):
            curve = self._hinted(
                over.tenant, over.session, "closed" if over.is_final else None, over.returns_s
            )
            forecast = forecast if curve is None else replace(forecast, curve=curve)
        self.prefetch.paused(over.tenant, over.session)
        return forecast

    def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> bool:
        """Apply a client's hint about its idle session; False if the session is not known here."""
        return self._hinted(tenant, session, event, expected_return_s) is not None

    def _hinted(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> Curves | None:
        owner, now_s = tenant + session, self._clock()
        hint = Hint(owner, now_s, event, expected_return_s)
        with self._state.lock:
            if owner in self._sessions:
                hint = self._sessions.hints.told(hint)
        curve = self._learner.hint(hint, ANSWER_S_MAX)
        if event == "closed":
            self.prefetch.cancel([owner])
        if event == "tool_started":
            with self._state.lock:
                self._sessions.calls_tool(owner)
        if curve is not None:
            with self._state.lock:
                self._sessions.set_curve(owner, curve, now_s)
                self._state.catalog.session_changed(owner, tenant)
        return curve

    def likely(self, tenant: bytes, sessions: Sequence[bytes], horizon_s: float) -> dict[bytes, float]:
        """Return P(resumes within `horizon_s`) of those lineages that are known here; 1 while a turn runs."""
        known = [session for session in sessions if tenant + session in self._sessions]
        with self._state.lock:
            now_s = self._clock()
            slots = np.array([self._sessions.slot(tenant + session) for session in known], dtype=np.intp)
            likely = self._sessions.probabilities(slots, now_s, horizon_s * self._rate)
            likely[self._sessions.are_running(slots, now_s)] = 1.0
        return dict(zip(known, likely.tolist(), strict=True))

    def glance(self, owners: Sequence[bytes], at_s: Sequence[float]) -> dict[bytes, LineageGlance]:
        """Return what is held and expected of these lineages (`owner`), without those unknown here.

        `at_s`: times of the survival curves, real seconds since the idle time began.
        """
        times_s = np.array(at_s, dtype=np.float64) * self._rate
        found = {}
        for owner in owners:  # a lock for each: lookups wait for one at most
            with self._state.lock:
                extents = self._state.catalog.extents_of(owner[:TAG_BYTES], owner[TAG_BYTES:])
                forecast = self._expected(owner, times_s)
            if extents or forecast != LineageGlance():
                nbytes: Counter[str] = Counter()
                blocks: Counter[str] = Counter()
                for extent in extents:
                    nbytes.update(dict.fromkeys(extent.tiers, extent.nbytes))
                    blocks.update(dict.fromkeys(extent.tiers, extent.blocks))
                found[owner] = replace(
                    forecast, nbytes=dict(nbytes), blocks=dict(blocks), runs=runs_of(extents)
                )
        return found

    def _expected(self, owner: bytes, times_s: Floats) -> LineageGlance:
        if owner not in self._sessions:
            return LineageGlance()
        now_s, slot = self._clock(), self._sessions.slot(owner)
        is_running = bool(self._sessions.are_running(np.array([slot]), now_s)[0])
        ended_s = float(self._sessions.ended_s[slot])
        if is_running and ended_s == 0.0:  # its first turn
            return LineageGlance(is_running=True)
        curves = np.broadcast_to(self._sessions.curves[slot], (len(times_s), EDGES))
        survival = np.exp(log_survival(np.ascontiguousarray(curves), times_s))
        return LineageGlance(
            survival=tuple(survival.round(3).tolist()),
            since_ago_s=max(0.0, now_s - ended_s) / self._rate,
            is_running=is_running,
        )

    def clear(self, clear: Clear) -> None:
        """Forget a tenant, or all lineages of one of its sessions."""
        of = clear.tenant if clear.session is None else clear.tenant + clear.session[:SESSION_BYTES]
        with self._state.lock:
            known = {*self._sessions.sessions(), *self._chains, *self.prefetch.of_tenant(clear.tenant)}
            owners = [owner for owner in known if isinstance(owner, bytes) and owner.startswith(of)]
            self.prefetch.cancel(owners)
            for owner in owners:
                self._sessions.forget(owner)
                self._chains.forget(owner)
                self._state.catalog.session_changed(owner, clear.tenant)
        for owner in owners:
            self._learner.forget(owner)

    def work(self) -> None:
        """Process what the learner has queued, in this thread: for nodes without threads."""
        self._learner.work()

    def tick(self) -> None:
        """Run the prefetch tick, and let the shadow follow; called about every second."""
        self.prefetch.tick()
        self._compare()

    def _compare(self) -> None:
        with self._state.lock:
            adopted = list(self._history.adopted)
            self._history.adopted.clear()
        if adopted:
            self.shadow.seed(adopted)
        self.shadow.work()

    def close(self) -> None:
        """Save what was learned."""
        self._learner.close(CLOSE_S_MAX)

    def stats(self) -> ResumptionStats:
        self._compare()
        learner, predictor = self._learner, self._learner.predictor
        kind, losses = "cold", (0.0, 0.0)
        if isinstance(predictor, Predictor):
            kind, losses = KINDS[predictor.source], predictor.losses
        elif isinstance(predictor, TypeKm):
            kind = "cold" if predictor.is_cold else "km"
        with self._state.lock:
            sessions, hints = len(self._sessions), self._sessions.hints.stats()
        return ResumptionStats(
            predictor=f"off: {learner.off}" if learner.off else kind,
            calibration=predictor.calibration if isinstance(predictor, Predictor) else (),
            sessions=sessions,
            turns=learner.turns,
            dropped=learner.dropped,
            failures=learner.failures,
            saves=learner.saves,
            restored=learner.restored,
            model_loss=losses[0],
            fallback_loss=losses[1],
            hints=hints,
            lru=self.shadow.stats(),
            prefetch=self.prefetch.stats(),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self._state.lock:
            self._sessions.check_integrity()
            self._chains.check_integrity()
        self.prefetch.check_integrity()
        self._learner.check_integrity()

    def _told(self, owner: bytes, forecast: Forecast, since_s: float) -> None:
        with self._state.lock:
            for changed in self._sessions.told(owner, forecast, since_s):
                self._state.catalog.session_changed(changed, owner[:TAG_BYTES])
