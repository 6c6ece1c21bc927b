"""Decides which blocks to promote before they are requested, and measures whether that paid off.

It moves nothing itself. There are two kinds. What a waiting request or a client's hint names is known to
be wanted, and bounded only in bytes (`ask`). Guesses (`at_pause`, `by_hazard`) have a byte budget, yield to
demand, and stop while too few prove useful (`PrefetchGate`). For a slice of the sessions nothing is
guessed, as a baseline (`PrefetchRegret`); a guess is judged once, by how many of its bytes were used. Pure:
clock values come in, all sizes are bytes. The service and the simulator make the same calls:
    started = prefetcher.at_pause(...) or by_hazard(...)   # begin to move these
    prefetcher.arrived(session, nbytes, now_s)             # this much of it is up now; or
    prefetcher.failed(session, nbytes, now_s)              # ... will not come
    prefetcher.left(session, nbytes, now_s)                # it was evicted, unused
    prefetcher.returned(session, ...)                      # the session's next turn: judged
    prefetcher.cancel(session, now_s)                      # closed or cleared: no longer wanted
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.messages import PrefetchStats
from samovar.cache_tiers.policy.idle_sessions import IdleSessions
from samovar.configs.sections import PrefetchSettings

Known = Literal["queue", "hint"]
Guessed = Literal["pause", "hazard"]

LOOKED_AT_MAX = 256
"""Likeliest sessions whose bytes are looked up in one call of `by_hazard`."""
SINK_SHARE = 0.9
"""Fill level above which a tier demotes its coldest extents, so that the next store or guess finds room."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A decision to promote the first `nbytes` of the session's chain that are in lower tiers."""

    session: SessionKey
    nbytes: int
    why: Guessed
    probability: float


@dataclass(slots=True)
class _Open:
    """One pause's guess, or consecutive guesses: `moving`, `up` and unused, `gone` unused; bytes."""

    why: Guessed
    moving: int = 0
    up: int = 0
    gone: int = 0


class Prefetcher:
    """Decides prefetches, see the module. Not thread-safe. `seed`: of the hold-out and the probes."""

    def __init__(self, settings: PrefetchSettings, *, seed: int = 0) -> None:
        self._settings = settings
        self._seed = seed
        self._budget = ByteBudget(settings.bytes_per_s_max, settings.burst_s)
        self._chunk_max = min(self._budget.capacity, settings.inflight_bytes_max)
        rng = random.Random(seed)
        self._meters: dict[Guessed, PrefetchGate] = {
            why: PrefetchGate(
                accuracy_min=settings.accuracy_min,
                guesses=settings.accuracy_window,
                probe_share=settings.probe_share,
                rng=rng,
            )
            for why in ("pause", "hazard")
        }
        self._regret = PrefetchRegret(settings.pending_max)
        self._open: OrderedDict[SessionKey, _Open] = OrderedDict()
        self._known: dict[SessionKey, int] = {}  # bytes in flight that are known to be wanted
        # Sessions without further guesses of a kind in this pause: judged already, or refused by the gate.
        self._decided: OrderedDict[tuple[SessionKey, Guessed], None] = OrderedDict()
        self._moving = 0
        self._started: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._guesses = 0

    @property
    def moving_bytes(self) -> int:
        """Bytes in flight, guesses and others; never more than `inflight_bytes_max`."""
        return self._moving

    def is_held_out(self, session: SessionKey) -> bool:
        """Return whether nothing is guessed for it: the same at every start with the same seed."""
        name = session if isinstance(session, bytes) else repr(session).encode()
        digest = hashlib.blake2b(name, digest_size=8, salt=self._seed.to_bytes(8, "little")).digest()
        return int.from_bytes(digest, "little") < self._settings.holdout_share * 2**64

    # -- known to be wanted ----------------------------------------------------------------

    def ask(self, why: Known, session: SessionKey, nbytes: int) -> int:
        """Return how many of the first `nbytes` in lower tiers to promote now; 0: none.

        A request waits for them (`queue`), or a client announced itself (`hint`). Report `arrived` or
        `failed`. Limited only by `inflight_bytes_max`, not by the budget or the gates.
        """
        is_wanted = self._settings.at_queue if why == "queue" else self._settings.at_hint
        nbytes = min(nbytes, self._settings.inflight_bytes_max - self._moving)
        if not is_wanted or nbytes <= 0:
            return 0
        self._known[session] = self._known.get(session, 0) + nbytes
        self._moving += nbytes
        self._started[why] += nbytes
        return nbytes

    # -- guesses ---------------------------------------------------------------------------

    def at_pause(
        self,
        session: SessionKey,
        below_bytes: int,
        now_s: float,
        *,
        room_bytes: int,
        stays_s: float = math.inf,
        is_demand_busy: bool = False,
    ) -> Guess | None:
        """Decide what to promote after a turn with `below_bytes` of its chain in lower tiers.

        Call it at every pause, also with 0 bytes. `room_bytes`: free in the upper tier. `stays_s`: how
        long that tier keeps what is not used (only for the regret estimate). `is_demand_busy`: loads that
        requests wait for are in flight.
        """
        nbytes = min(below_bytes, room_bytes)
        if self.is_held_out(session):
            self._regret.paused(session, max(nbytes, 0), now_s + stays_s)
            return None
        if not self._settings.at_pause or is_demand_busy or self._is_settled(session, "pause"):
            return None
        return self._start(session, nbytes, "pause", 1.0, now_s)

    def by_hazard(
        self,
        sessions: IdleSessions,
        below_bytes: Callable[[SessionKey], int],
        now_s: float,
        *,
        lead_s: float,
        room_bytes: int,
        is_demand_busy: bool = False,
    ) -> list[Guess]:
        """Decide what to promote for sessions likely to resume within `lead_s`, likeliest first.

        A promoted byte is worth the same for any session, so the probability alone ranks bytes. Call it
        about once a second. `below_bytes(session)` is called only for the likeliest. Nothing is evicted for
        a guess: `room_bytes` is free in the upper tier, where there is always some (`SINK_SHARE`).
        """
        if not self._settings.by_hazard or is_demand_busy or not len(sessions):
            return []
        slots = sessions.all_slots()
        likely = sessions.probabilities(slots, now_s, lead_s)
        likely = np.where(sessions.are_running(slots, now_s), 0.0, likely)
        wanted = np.flatnonzero((likely >= self._settings.probability_min) & (likely > 0))
        wanted = wanted[np.argsort(-likely[wanted], kind="stable")]
        names = sessions.sessions()
        guesses: list[Guess] = []
        looked_at = 0
        for at in wanted.tolist():
            session, probability = names[at], float(likely[at])
            if self._is_settled(session, "hazard") or self.is_held_out(session):
                continue
            looked_at += 1
            if looked_at > LOOKED_AT_MAX:
                break
            nbytes = min(below_bytes(session), room_bytes)
            if nbytes <= 0:
                continue
            if not self._can_start(nbytes, now_s):
                break  # a later guess would only take the budget that this one needs
            guess = self._start(session, nbytes, "hazard", probability, now_s)
            if guess is not None:
                guesses.append(guess)
                room_bytes = max(0, room_bytes - guess.nbytes)
        return guesses

    # -- outcomes --------------------------------------------------------------------------

    def arrived(self, session: SessionKey, nbytes: int, now_s: float) -> None:
        """Record that `nbytes` in flight for the session are up now."""
        nbytes = self._settle_known(session, nbytes)
        guess = self._open.get(session)
        if guess is not None:
            nbytes = min(nbytes, guess.moving)
            guess.moving -= nbytes
            guess.up += nbytes
            self._moving -= nbytes

    def failed(self, session: SessionKey, nbytes: int, now_s: float) -> None:
        """Record that `nbytes` were never moved and will not come; gives their budget back."""
        nbytes = self._settle_known(session, nbytes)
        guess = self._open.get(session)
        if guess is None:
            return
        nbytes = min(nbytes, guess.moving)
        self._abandon(guess, nbytes)
        self._budget.give_back(nbytes)
        if not guess.moving and not guess.up:
            self._judge(session, guess, used=0)

    def left(self, session: SessionKey, nbytes: int, now_s: float) -> None:
        """Record that `nbytes` promoted by a guess were evicted (or expired) before any use."""
        guess = self._open.get(session)
        if guess is None:
            return
        nbytes = min(nbytes, guess.up)
        guess.up -= nbytes
        guess.gone += nbytes
        if not guess.up and not guess.moving:
            self._judge(session, guess, used=0)

    def returned(
        self,
        session: SessionKey,
        now_s: float,
        *,
        up_bytes: int,
        asked_bytes: int,
        used_bytes: int | None = None,
    ) -> int:
        """Record that its next turn begins or is queued: once a turn, before `started` of `IdleSessions`.

        `asked_bytes`: what the tiers hold of its prompt, `up_bytes` of it in the upper one; `used_bytes`:
        of what a guess has promoted (None: all that is still there). What is still in flight is late and
        no longer wanted as a guess: demand loads it. Returns how many bytes that are.
        """
        self._regret.returned(session, up_bytes, asked_bytes, now_s, is_held_out=self.is_held_out(session))
        guess = self._open.get(session)
        late = 0
        if guess is not None:
            used = guess.up if used_bytes is None else min(used_bytes, guess.up)
            late = guess.moving
            self._abandon(guess, late, as_late=True)
            self._judge(session, guess, used=used, late=late)
        for why in self._meters:
            self._decided.pop((session, why), None)
        return late

    def unmoved(self, nbytes: int) -> None:
        """Give back the budget of bytes that `cancel` or `returned` called off before they moved."""
        self._budget.give_back(nbytes)

    def cancel(self, session: SessionKey, now_s: float) -> int:
        """Stop wanting anything of a closed or cleared session; return its bytes in flight."""
        self._regret.forget(session)
        moving = self._known.pop(session, 0)
        self._moving -= moving
        self._bytes["cancelled"] += moving
        guess = self._open.get(session)
        if guess is not None:
            moving += guess.moving
            self._abandon(guess, guess.moving)
            self._judge(session, guess, used=0)
        return moving

    def stats(self) -> PrefetchStats:
        return PrefetchStats(
            started=dict(self._started),
            used=self._bytes["used"],
            late=self._bytes["late"],
            wasted=self._bytes["wasted"],
            cancelled=self._bytes["cancelled"],
            guesses=self._guesses,
            moving=self._moving,
            is_on={"pause": self._is_on("pause"), "hazard": self._is_on("hazard")},
            regret_demand=self._regret.against_demand,
            regret_pause=self._regret.against_pause,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        moving = sum(guess.moving for guess in self._open.values()) + sum(self._known.values())
        assert moving == self._moving, "bytes being prefetched now differ from the guesses'"
        assert 0 <= moving <= self._settings.inflight_bytes_max, "too much is on its way"
        assert len(self._open) <= self._settings.pending_max, "too many guesses are remembered"
        assert len(self._decided) <= 2 * self._settings.pending_max, "too many sessions are remembered"
        for guess in self._open.values():
            assert min(guess.moving, guess.up, guess.gone) >= 0, "a guess has lost more than it had"
            assert guess.moving or guess.up, "a guess that is over is remembered"
        for meter in self._meters.values():
            meter.check_integrity()
        self._regret.check_integrity()

    def _is_on(self, why: Guessed) -> bool:
        is_wanted = self._settings.at_pause if why == "pause" else self._settings.by_hazard
        return is_wanted and self._chunk_max > 0 and self._meters[why].is_on

    def _is_settled(self, session: SessionKey, why: Guessed) -> bool:
        """Return whether no (further) guess is due in this pause, or not while one is in flight."""
        guess = self._open.get(session)
        if session in self._known or (guess is not None and (guess.moving > 0 or guess.gone > 0)):
            return True
        return (session, why) in self._decided

    def _can_start(self, nbytes: int, now_s: float) -> bool:
        """Return whether the first chunk of `nbytes` fits the budget and the in-flight limit."""
        chunk = min(nbytes, self._chunk_max)
        return 0 < chunk <= min(self._budget.saved(now_s), self._settings.inflight_bytes_max - self._moving)

    def _start(
        self, session: SessionKey, nbytes: int, why: Guessed, probability: float, now_s: float
    ) -> Guess | None:
        if not self._can_start(nbytes, now_s):
            return None
        nbytes = min(nbytes, self._chunk_max)
        guess = self._open.get(session)
        if guess is None:
            if not self._meters[why].allows():
                self._decide(session, why)
                return None
            if len(self._open) >= self._settings.pending_max and not self._judge_oldest():
                return None
            guess = self._open[session] = _Open(why)
            self._guesses += 1
        self._budget.spend(nbytes, now_s)
        guess.moving += nbytes
        self._moving += nbytes
        self._started[why] += nbytes
        return Guess(session, nbytes, why, probability)

    def _settle_known(self, session: SessionKey, nbytes: int) -> int:
        """Settle bytes known to be wanted; return how many are left for the guess."""
        known = self._known.get(session, 0)
        settled = min(known, nbytes)
        self._moving -= settled
        if settled == known:
            self._known.pop(session, None)
        else:
            self._known[session] = known - settled
        return nbytes - settled

    def _abandon(self, guess: _Open, nbytes: int, *, as_late: bool = False) -> None:
        guess.moving -= nbytes
        self._moving -= nbytes
        if not as_late:
            self._bytes["cancelled"] += nbytes

    def _judge(self, session: SessionKey, guess: _Open, *, used: int, late: int = 0) -> None:
        """Close a guess. What came too late counts as unused, too."""
        del self._open[session]
        moved = guess.up + guess.gone + late
        self._bytes["used"] += used
        self._bytes["late"] += late
        self._bytes["wasted"] += moved - used - late
        self._meters[guess.why].judged(used, moved)
        self._decide(session, guess.why)

    def _judge_oldest(self) -> bool:
        """Close the oldest guess, unused so far, as wasted. False: it is still in flight."""
        session, guess = next(iter(self._open.items()))
        if guess.moving:
            return False
        self._judge(session, guess, used=0)
        return True

    def _decide(self, session: SessionKey, why: Guessed) -> None:
        self._decided[session, why] = None
        self._decided.move_to_end((session, why))
        if len(self._decided) > 2 * self._settings.pending_max:
            self._decided.popitem(last=False)


class PrefetchGate:
    """Stops guesses while less than `accuracy_min` of the bytes of the last `guesses` was used.

    On until that many were judged. While off, `probe_share` of the guesses is still made: their outcomes
    switch it on again. `rng`: draws which.
    """

    def __init__(self, *, accuracy_min: float, guesses: int, probe_share: float, rng: random.Random) -> None:
        self._accuracy_min = accuracy_min
        self._guesses = guesses
        self._probe_share = probe_share
        self._rng = rng
        self._judged: deque[tuple[int, int]] = deque()  # bytes used, bytes moved
        self._used = self._moved = 0
        self.switched = 0  # how often it went off or on

    @property
    def useful_share(self) -> float:
        """Share of the latest judged bytes that were used; 1 if nothing was judged."""
        return self._used / self._moved if self._moved else 1.0

    @property
    def is_on(self) -> bool:
        return len(self._judged) < self._guesses or self.useful_share >= self._accuracy_min

    def allows(self) -> bool:
        """Return whether to make this guess. Call once per guess: while off, each call may be a probe."""
        return self.is_on or self._rng.random() < self._probe_share

    def judged(self, used: int, moved: int) -> None:
        """Record that `used` of a guess's `moved` bytes were used. No-op if none was moved."""
        if moved <= 0:
            return
        was_on = self.is_on
        used = min(used, moved)
        self._judged.append((used, moved))
        self._used += used
        self._moved += moved
        while len(self._judged) > self._guesses:
            old_used, old_moved = self._judged.popleft()
            self._used -= old_used
            self._moved -= old_moved
        self.switched += was_on != self.is_on

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._judged) <= self._guesses, "too many outcomes are remembered"
        sums = [sum(column) for column in zip(*self._judged, strict=True)] or [0, 0]
        assert sums == [self._used, self._moved], "the sums differ from the outcomes"


class ByteBudget:
    """A token bucket: refilled at `bytes_per_s` up to `burst_s` worth; starts full. Pure."""

    def __init__(self, bytes_per_s: int, burst_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.capacity = int(bytes_per_s * burst_s)
        self._saved = float(self.capacity)
        self._at_s: float | None = None

    def saved(self, now_s: float) -> int:
        """Return what may be spent now. A clock that jumped back adds and costs nothing."""
        if self._at_s is not None:
            flowed = max(0.0, now_s - self._at_s) * self._bytes_per_s
            self._saved = min(float(self.capacity), self._saved + flowed)
        self._at_s = now_s
        return int(self._saved)

    def spend(self, nbytes: int, now_s: float) -> None:
        """Spend bytes. Raises `ValueError` if that is more than is saved."""
        if nbytes > self.saved(now_s):
            raise ValueError(f"{nbytes} bytes are more than the budget has")
        self._saved -= nbytes

    def give_back(self, nbytes: int) -> None:
        """Put back bytes that were spent but not used."""
        self._saved = min(float(self.capacity), self._saved + nbytes)


DECAY = 0.999
"""A return that was a thousand returns ago counts for a third."""


@dataclass(slots=True)
class _Share:
    up: float = 0.0
    asked: float = 0.0

    def add(self, up: int, asked: int) -> None:
        self.up = DECAY * self.up + min(up, asked)
        self.asked = DECAY * self.asked + asked

    @property
    def share(self) -> float | None:
        return self.up / self.asked if self.asked > 0 else None


class PrefetchRegret:
    """What guessing gains: the share of requested bytes promoted in time, compared with a hold-out.

    Three shares, of the latest returns: of sessions with guesses, of the hold-out (demand alone, as LRU
    does), and of the hold-out had everything been promoted at the pause. The third is computed, not done:
    what would have been promoted then counts as there for the tier's residence time. Pure.
    `sessions_max`: remembered pauses of the hold-out.
    """

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._shadows: OrderedDict[SessionKey, tuple[int, float]] = OrderedDict()  # bytes, until when there
        self._guessed = _Share()
        self._demand = _Share()
        self._pause = _Share()

    def paused(self, session: SessionKey, nbytes: int, until_s: float) -> None:
        """Record a hold-out pause: `nbytes` could have been promoted now, to stay until `until_s`."""
        self._shadows[session] = (nbytes, until_s)
        self._shadows.move_to_end(session)
        if len(self._shadows) > self._sessions_max:
            self._shadows.popitem(last=False)

    def returned(
        self, session: SessionKey, up_bytes: int, asked_bytes: int, now_s: float, *, is_held_out: bool
    ) -> None:
        """Record a request for `asked_bytes` that some tier held, `up_bytes` of them in the upper one."""
        shadow, until_s = self._shadows.pop(session, (0, now_s))
        if asked_bytes <= 0:
            return
        if not is_held_out:
            self._guessed.add(up_bytes, asked_bytes)
            return
        self._demand.add(up_bytes, asked_bytes)
        self._pause.add(up_bytes + (shadow if now_s <= until_s else 0), asked_bytes)

    def forget(self, session: SessionKey) -> None:
        self._shadows.pop(session, None)

    @property
    def against_demand(self) -> float | None:
        """Share by which demand alone has more in time; below 0: guessing gains. None: not known yet."""
        return _less(self._demand.share, self._guessed.share)

    @property
    def against_pause(self) -> float | None:
        """As `against_demand`, for promoting everything at the pause."""
        return _less(self._pause.share, self._guessed.share)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._shadows) <= self._sessions_max, "too many pauses are remembered"
        for share in (self._guessed, self._demand, self._pause):
            assert 0 <= share.up <= share.asked + 1e-6, "more was up than was asked for"


def _less(other: float | None, ours: float | None) -> float | None:
    return None if other is None or ours is None else other - ours
