"""A session's turns as the server sees them, from a request, a trace or a generator.

Plain data: lengths, times and kinds, never text. Times are seconds of one clock that the caller chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

SessionKey = Hashable
"""Identifies a session: tags in the service, a number in a trace."""

Stop = Literal["tool_calls", "stop", "length", "gone"]
"""Why an answer ended. `gone`: the client disconnected."""

Role = Literal["user", "tool", "other"]
"""Role of the prompt's last message."""

HintEvent = Literal["typing", "tool_started", "tool_finished", "closed"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn.

    `kept_tokens`: how much of the session's chain this prompt begins with unchanged; 0 at a first turn,
    and less than the chain after an edit. `tool`: the tool that was called, if its name is known.
    `profile`: the use case.
    """

    session: SessionKey
    started_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    kept_tokens: int = 0
    stop: Stop = "stop"
    role: Role = "user"
    tool: str = ""
    profile: str = "chat"

    @property
    def chain_tokens(self) -> int:
        """Return the length of the session's chain after this turn."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Hint:
    """A client's hint about its idle session. `expected_return_s`: from `at_s` on."""

    session: SessionKey
    at_s: float
    event: HintEvent | None = None
    expected_return_s: float | None = None


def fast_clock(clock: Callable[[], float], rate: float) -> Callable[[], float]:
    """Return a clock that runs `rate` times as fast as `clock`; both were 0 at the same moment.

    To serve a recording of an hour in minutes. Used for idle times, resumptions and expiry; deadlines and
    prices stay in real time.
    """
    return clock if rate == 1.0 else lambda: clock() * rate
