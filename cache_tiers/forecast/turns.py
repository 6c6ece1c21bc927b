"""A session's turns as the server sees them, from a request, a trace or a generator.

Plain data: lengths, times and kinds, never text. Times are seconds of one clock that the caller chooses.
What is called a session here and in all tables of this folder is one lineage of a client's session, a chain
of prompts that extend one another: beside the conversation its client sends titles, sub-agents and the like
under the same id. `Opening.whole` names the client's session.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

SessionKey = Hashable
"""Identifies a lineage of a session: tags in the service, a number in a trace."""

TURN_S_MAX = 900.0
"""A turn begun longer ago counts as over without a report: its replica has died."""

Stop = Literal["tool_calls", "stop", "length", "gone"]
"""Why an answer ended. `gone`: the client disconnected."""

Role = Literal["user", "tool", "other"]
"""Role of the prompt's last message."""

HintEvent = Literal["typing", "tool_started", "tool_finished", "closed"]


@dataclass(frozen=True, slots=True)
class Opening:
    """What the beginning of a turn says of its prompt, without its text.

    `whole`: the client's session, of which the turn's session is one lineage. `roots`: digests of the
    prompt's first 1, 2, 4, ... blocks (`lineages.py`). `branches`: how many branches of the lineage's chain
    were left behind by edits and regenerated answers; `regained`: how much of them this prompt goes back
    to, each counting 1.
    """

    whole: SessionKey
    roots: tuple[int, ...] = ()
    branches: int = 0
    regained: float = 0.0


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
