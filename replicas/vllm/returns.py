"""When the sessions of a replica are expected back, for the autoscaler: as the tiers' forecasts say. Pure."""

from __future__ import annotations

from collections.abc import Callable

from samovar.cache_tiers.forecast import Forecast, Hint, HintEvent, hinted
from samovar.cache_tiers.policy import IdleSessions
from samovar.replicas.messages import GenerateRequest


class SessionReturns:
    """Of at most `sessions_max` sessions. `clock`: that of the forecasts."""

    def __init__(self, sessions_max: int, clock: Callable[[], float]) -> None:
        self._sessions = IdleSessions(sessions_max)
        self._clock = clock

    def began(self, owner: bytes) -> None:
        """Note that a turn has begun."""
        self._sessions.started(owner, self._clock())

    def ended(self, owner: bytes, request: GenerateRequest, tokens: int, *, calls_tool: bool) -> float:
        """Note that a turn has ended, with prompt and answer of `tokens`; return when."""
        now_s = self._clock()
        new_tokens = float(max(0, len(request.prompt_token_ids) - request.route.cached_tokens))
        self._sessions.ended(owner, now_s, tokens=tokens, new_tokens=new_tokens, is_tool=calls_tool)
        return now_s

    def told(self, owner: bytes, forecast: Forecast, since_s: float) -> None:
        """Take in a forecast, counted from `since_s`."""
        if owner in self._sessions:
            self._sessions.told(owner, forecast, since_s)

    def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """Apply a client's hint about an idle session; ignored if it is unknown."""
        if owner not in self._sessions:
            return
        slot, now_s = self._sessions.slot(owner), self._clock()
        hint = Hint(owner, now_s, event, expected_return_s)
        idle_s = now_s - float(self._sessions.ended_s[slot])
        self._sessions.set_curve(owner, hinted(self._sessions.curves[slot], idle_s, hint), now_s)

    def forget(self, owner: bytes) -> None:
        """Forget a session."""
        self._sessions.forget(owner)

    def within(self, horizon_s: float) -> tuple[float, float]:
        """Return the expected resumptions within `horizon_s`, and the tokens of those."""
        now_s, slots = self._clock(), self._sessions.all_slots()
        idle = slots[~self._sessions.are_running(slots, now_s)]
        likely = self._sessions.probabilities(idle, now_s, horizon_s)
        return float(likely.sum()), float(likely @ self._sessions.tokens[idle])
