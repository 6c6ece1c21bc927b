"""A session's turns as the server sees them, whatever they come from: a request, a trace, a generator.

Plain data: lengths, times and kinds, never text. Times are seconds of one clock that the caller chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

SessionKey = Hashable
"""Names a session: tags in the service, a number in a trace."""

Stop = Literal["tool_calls", "stop", "length", "gone"]
"""Why an answer ended. `gone`: the client hung up."""

Role = Literal["user", "tool", "other"]
"""Whose the last message of the prompt is."""

HintEvent = Literal["typing", "tool_started", "tool_finished", "closed"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that is over.

    `kept_tokens`: of the session's chain so far, what stands at the front of this prompt unchanged; 0 at a
    first turn, and less than the chain after an edit. `tool`: of the tool that was called, if its name is
    known. `profile`: the use case.
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
        """Length of the session's chain after this turn."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Hint:
    """What a client says about its idle session. `expected_return_s`: from `at_s` on."""

    session: SessionKey
    at_s: float
    event: HintEvent | None = None
    expected_return_s: float | None = None


# A clock that runs faster than another one: to serve a recording of an hour in minutes.
#
# For who is idle for how long, who comes back when, and what expires; deadlines and prices stay real.


def fast_clock(clock: Callable[[], float], rate: float) -> Callable[[], float]:
    """Where `clock` tells a second, this one tells `rate` of them; both have been at 0 at once."""
    return clock if rate == 1.0 else lambda: clock() * rate
