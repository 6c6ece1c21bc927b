"""Generates seeded traffic for users without a trace: any number of turns, one at a time in time order.

The shapes follow statistics of published traces: how many turns a session has, when it returns, how its
prompt grows. `fooling` is made to waste prefetches: half of the time the tool calls of a kind return after a
minute, half of the time none ever does, and nothing tells which it is. `rhythm`: people who come back at
their hour of each working day, for weeks, beside those who come once. `tools`: agents whose tools have names,
and times that are generated, too: see `TOOLS`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from bench._trace_patterns import Patterns, mixed
from samovar.cache_tiers.forecast import Role, Stop
from samovar.cluster.plan.traces.trace import ReadTally, Trace, TraceTurn

Shape = Literal["chat", "agentic", "fooling", "rhythm", "tools"]

FOOL_PERIOD_S = 1800.0
FOOL_RETURN_S = 60.0
COMPACT_SYSTEMS_MIN = 2
"""`compact_tokens` is at least so many system prompts long."""
SUMMARY_TOKENS = 1500
_PROMPT_TOKENS_MAX = 190_000
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class GeneratorOptions:
    """Options of a generated trace.

    `sessions_per_s`: rate of new sessions (Poisson); None: the shape's own. `system_prompts`: number of
    different ones, the k-th used in proportion to 1/k. `patterns`: what clients send beside, in addition to
    `turns`. `compact_tokens`: a conversation that would grow longer goes on in a new lineage, with the system
    prompt and a summary; None: in its own, once it is as long as a prompt can be. Memory grows with the
    number of concurrently idle sessions, not with `turns`.
    """

    shape: Shape = "chat"
    turns: int = 10_000
    seed: int = 0
    sessions_per_s: float | None = None
    block_tokens: int = 512
    system_prompts: int = 8
    patterns: Patterns | None = None
    compact_tokens: int | None = None


@dataclass(slots=True)
class _SyntheticSession:
    """A session between two turns. `planned`: its total number of turns; 0: decided after each.

    `pace`: of its machine: how many times as long tools take there.
    """

    started_s: float
    input_tokens: int
    planned: int = 0
    number: int = -1
    turn: int = 0
    lineage: int = 0
    chain_tokens: int = 0
    kept_tokens: int = 0
    role: Role = "user"
    blocks: tuple[int, ...] = ()
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A turn's outcome. `idle_s`: until the next turn; None: never.

    `new_tokens`: that the next turn adds. `kept_share`: of the chain. `tools`: names of those that it calls.
    """

    output_tokens: int
    service_s: float
    stop: Stop
    idle_s: float | None
    new_tokens: int
    kept_share: float = 1.0
    tools: str = "tool-1"


@dataclass(frozen=True, slots=True)
class _Workload:
    sessions_per_s: float
    system_tokens: int
    profile: str
    first: Callable[[random.Random], tuple[int, int]]  # tokens beyond the system prompt, turns planned
    after: Callable[[random.Random, _SyntheticSession], _Outcome]
    pace: Callable[[float], float] | None = None  # share of the rate at a time; None: always 1


def generate(options: GeneratorOptions) -> Trace:
    """Return the trace of these options. Raises `ValueError` if they are invalid."""
    if options.turns < 0 or options.block_tokens < 1 or options.system_prompts < 1:
        raise ValueError("turns must be 0 or more, block_tokens and system_prompts 1 or more")
    if options.sessions_per_s is not None and not 0 < options.sessions_per_s < math.inf:
        raise ValueError("sessions_per_s must be more than 0")
    least = COMPACT_SYSTEMS_MIN * _KINDS[options.shape].system_tokens
    if options.compact_tokens is not None and not least <= options.compact_tokens <= _PROMPT_TOKENS_MAX:
        raise ValueError(
            f"compact_tokens is {options.compact_tokens}, and must be {least} to {_PROMPT_TOKENS_MAX} for "
            f"{options.shape}"
        )

    def read(_: ReadTally) -> Iterator[TraceTurn]:
        return _Generator(options).turns()

    trace = Trace(f"generated-{options.shape}", "generated", options.block_tokens, read)
    return trace if options.patterns is None else mixed(trace, options.patterns, seed=options.seed)


class _Generator:
    def __init__(self, options: GeneratorOptions) -> None:
        self._options = options
        self._rng = random.Random(options.seed)
        self._kind = _KINDS[options.shape]
        self._rate = options.sessions_per_s or self._kind.sessions_per_s
        self._ids = 0
        full = self._kind.system_tokens // options.block_tokens
        self._systems = [self._new_blocks(full) for _ in range(options.system_prompts)]
        self._weights = [1.0 / (rank + 1) for rank in range(options.system_prompts)]

    def turns(self) -> Iterator[TraceTurn]:
        heap: list[tuple[float, int, _SyntheticSession]] = []
        begun = numbered = 0
        next_s = 0.0
        for _ in range(self._options.turns):
            while not heap or heap[0][0] >= next_s:
                heappush(heap, (next_s, begun, self._begin(next_s)))
                begun += 1
                next_s = self._next_s(next_s)
            _, key, session = heappop(heap)
            if session.number < 0:
                session.number, numbered = numbered, numbered + 1
            outcome = self._kind.after(self._rng, session)
            yield self._turn(session, outcome)
            if outcome.idle_s is not None:
                self._go_on(session, outcome)
                heappush(heap, (session.started_s, key, session))

    def _next_s(self, at_s: float) -> float:
        """Return when the next session begins: a Poisson process, thinned where there is a pace."""
        while True:
            at_s += self._rng.expovariate(self._rate)
            if self._kind.pace is None or self._rng.random() < self._kind.pace(at_s):
                return at_s

    def _begin(self, at_s: float) -> _SyntheticSession:
        tokens, planned = self._kind.first(self._rng)
        (system,) = self._rng.choices(self._systems, self._weights)
        session = _SyntheticSession(at_s, min(self._kind.system_tokens + tokens, _PROMPT_TOKENS_MAX), planned)
        session.blocks = self._grown(system, session.input_tokens)
        return session

    def _turn(self, session: _SyntheticSession, outcome: _Outcome) -> TraceTurn:
        return TraceTurn(
            session=session.number,
            started_s=session.started_s,
            input_tokens=session.input_tokens,
            output_tokens=outcome.output_tokens,
            blocks=session.blocks,
            block_tokens=self._options.block_tokens,
            kept_tokens=session.kept_tokens,
            service_s=outcome.service_s,
            stop=outcome.stop,
            role=session.role,
            tool=outcome.tools if outcome.stop == "tool_calls" else "",
            profile=self._kind.profile,
            lineage=session.lineage,
        )

    def _go_on(self, session: _SyntheticSession, outcome: _Outcome) -> None:
        """Prepare the session's next turn: the kept part of the chain, and new blocks."""
        assert outcome.idle_s is not None
        chain = session.input_tokens + outcome.output_tokens
        share = outcome.kept_share
        begins_lineage = chain + outcome.new_tokens > (self._options.compact_tokens or math.inf)
        if begins_lineage or chain + outcome.new_tokens > _PROMPT_TOKENS_MAX:
            share = 0.0  # compacted: the system prompt, and a summary
        session.kept_tokens = chain if share == 1.0 else max(self._kind.system_tokens, int(chain * share))
        session.input_tokens = min(session.kept_tokens + outcome.new_tokens, _PROMPT_TOKENS_MAX)
        if begins_lineage:
            session.input_tokens += min(int(_lognormal(self._rng, SUMMARY_TOKENS, 0.5)), 2 * SUMMARY_TOKENS)
        kept = session.blocks[: session.kept_tokens // self._options.block_tokens]
        session.blocks = self._grown(kept, session.input_tokens)
        if begins_lineage:
            session.lineage += 1
            session.kept_tokens = 0  # of its own lineage's chain
        session.started_s += outcome.service_s + outcome.idle_s
        session.turn += 1
        session.role = "tool" if outcome.stop == "tool_calls" else "user"

    def _grown(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        full = tokens // self._options.block_tokens
        return blocks[:full] + self._new_blocks(full - len(blocks))

    def _new_blocks(self, count: int) -> tuple[int, ...]:
        first = self._ids
        self._ids += max(0, count)
        return tuple(range(first, self._ids))


def _chat_first(rng: random.Random) -> tuple[int, int]:
    return int(_lognormal(rng, 6000, 1.2)), 0


def _chat_after(rng: random.Random, session: _SyntheticSession) -> _Outcome:
    """Draw a turn of a person: never back within 15 s, mostly within minutes, returners return again."""
    output = int(_lognormal(rng, 20, 0.8) if rng.random() < 0.13 else _lognormal(rng, 370, 0.35)) + 1
    likely = (0.33, 0.45)[session.turn] if session.turn < 2 else 0.62
    if session.input_tokens < 1500:
        likely *= 0.55
    return _Outcome(
        output_tokens=output,
        service_s=0.03 * output + session.input_tokens / 20_000,
        stop="stop",
        idle_s=15.0 + _lognormal(rng, 95, 1.1) if rng.random() < likely else None,
        new_tokens=int(_lognormal(rng, 120, 1.4)) + 1,
        kept_share=rng.uniform(0.5, 1.0) if rng.random() < 0.03 else 1.0,  # an edit
    )


def _agentic_first(rng: random.Random) -> tuple[int, int]:
    return int(_lognormal(rng, 20_000, 1.0)), 1 + int(_lognormal(rng, 45, 1.05))


def _agents_turn(
    rng: random.Random, output: int, idle_s: float, *, is_tool: bool, is_over: bool, tools: str = "tool-1"
) -> _Outcome:
    return _Outcome(
        output_tokens=output,
        service_s=3.0 + 0.02 * output,
        stop="tool_calls" if is_tool else "stop",
        idle_s=None if is_over else min(idle_s, _DAY_S),
        new_tokens=int(_lognormal(rng, 600, 1.3)) + 1,
        tools=tools,
    )


def _agentic_after(rng: random.Random, session: _SyntheticSession) -> _Outcome:
    """Draw a turn of an agent: tools answer in seconds, people in minutes or hours, and some never."""
    output = int(_lognormal(rng, 240, 0.85)) + 1
    is_tool = rng.random() < 0.937
    is_over = session.turn + 1 >= session.planned
    if is_over and rng.random() < 0.7:
        is_tool = False  # most sessions end with an answer
    idle_s = _lognormal(rng, 8.5, 1.7) if is_tool else _lognormal(rng, 220, 2.3)
    return _agents_turn(rng, output, idle_s, is_tool=is_tool, is_over=is_over)


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A tool: `share` of all calls, and how long one takes, log-normal: `median_s`, `sigma`."""

    name: str
    share: float
    median_s: float
    sigma: float


TOOLS = (
    ToolKind("Read", 0.26, 0.08, 0.8),
    ToolKind("Edit", 0.14, 0.12, 0.8),
    ToolKind("Grep", 0.12, 0.2, 0.8),
    ToolKind("Write", 0.03, 0.12, 0.8),
    ToolKind("Bash", 0.33, 1.0, 1.6),
    ToolKind("tests", 0.05, 45.0, 1.0),
    ToolKind("WebFetch", 0.02, 4.0, 0.8),
    ToolKind("WebSearch", 0.03, 14.0, 0.5),
    ToolKind("Agent", 0.02, 120.0, 0.9),
)
"""Generated: shares, spreads and most medians are guesses. They are set so that all calls together have the
quantiles published with TraceLab (uw-syfi/TraceLab, CC BY 4.0): half within .3 s, nine of ten within 13.6 s,
1.34 calls a step that has any; file tools take tens to hundreds of ms, shells seconds, agents minutes."""
_CALLS = (0.78, 0.13, 0.06, 0.03)
"""Shares of steps with 1, 2, ... calls in parallel."""
_PACE_SIGMA = 0.4
_CLIENT_S, _CLIENT_SIGMA = 0.8, 0.5
"""What a client takes beside its tools."""


def _tools_after(rng: random.Random, session: _SyntheticSession) -> _Outcome:
    """Draw a turn of an agent whose next turn comes when the last of its tools is done."""
    if not session.turn:
        session.pace = _lognormal(rng, 1.0, _PACE_SIGMA)
    output = int(_lognormal(rng, 240, 0.85)) + 1
    is_over = session.turn + 1 >= session.planned
    is_tool = rng.random() < (0.3 if is_over else 0.92)
    called: list[ToolKind] = []
    idle_s = _lognormal(rng, 84, 2.1)
    if is_tool:
        (calls,) = rng.choices(range(1, len(_CALLS) + 1), _CALLS)
        called = rng.choices(TOOLS, [tool.share for tool in TOOLS], k=calls)
        took_s = max(session.pace * _lognormal(rng, tool.median_s, tool.sigma) for tool in called)
        idle_s = took_s + _lognormal(rng, _CLIENT_S, _CLIENT_SIGMA)
    names = " ".join(tool.name for tool in called)
    return _agents_turn(rng, output, idle_s, is_tool=is_tool, is_over=is_over, tools=names)


def _fooling_first(rng: random.Random) -> tuple[int, int]:
    return int(_lognormal(rng, 8000, 0.5)), 0


def _fooling_after(rng: random.Random, session: _SyntheticSession) -> _Outcome:
    output = int(_lognormal(rng, 100, 0.3)) + 1
    promises = int(session.started_s // FOOL_PERIOD_S) % 2 == 0
    return _Outcome(
        output_tokens=output,
        service_s=0.03 * output,
        stop="tool_calls",
        idle_s=FOOL_RETURN_S * rng.uniform(0.8, 1.2) if promises and rng.random() < 0.8 else None,
        new_tokens=int(_lognormal(rng, 200, 0.5)) + 1,
    )


REGULAR_SHARE = 0.2
LEAVES_SHARE = 0.07
"""Of a regular's visits, the last ones."""


def _is_workday(at_s: float) -> bool:
    return at_s // _DAY_S % 7 < 5


def _rhythm_pace(at_s: float) -> float:
    """Return 1 in office hours; a trace begins on a Monday at midnight."""
    return 1.0 if _is_workday(at_s) and 8.0 <= at_s % _DAY_S / 3600.0 < 18.0 else 0.05


def _rhythm_first(rng: random.Random) -> tuple[int, int]:
    return int(_lognormal(rng, 3000, 0.8)), int(rng.random() < REGULAR_SHARE)


def _rhythm_after(rng: random.Random, session: _SyntheticSession) -> _Outcome:
    """Draw a turn of a visit; after its last one, regulars come back a day later, or after a weekend."""
    output = int(_lognormal(rng, 370, 0.35)) + 1
    service_s = 0.03 * output + session.input_tokens / 20_000
    idle_s: float | None = None
    if rng.random() < 0.7:
        idle_s = 15.0 + _lognormal(rng, 90, 1.0)
    elif session.planned and rng.random() >= LEAVES_SHARE:
        days = 1
        while not _is_workday(session.started_s + days * _DAY_S) or rng.random() < 0.1:
            days += 1
        idle_s = days * _DAY_S + rng.gauss(0.0, 1800.0)
    return _Outcome(output, service_s, "stop", idle_s, int(_lognormal(rng, 300, 1.0)) + 1)


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))


_KINDS: dict[Shape, _Workload] = {
    "chat": _Workload(2.0, 600, "chat", _chat_first, _chat_after),
    "agentic": _Workload(0.02, 17_000, "agent", _agentic_first, _agentic_after),
    "tools": _Workload(0.02, 17_000, "agent", _agentic_first, _tools_after),
    "fooling": _Workload(0.5, 600, "agent", _fooling_first, _fooling_after),
    "rhythm": _Workload(0.002, 600, "chat", _rhythm_first, _rhythm_after, _rhythm_pace),
}
