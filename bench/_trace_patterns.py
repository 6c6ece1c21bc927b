"""Adds to a trace what real clients send under a conversation's id, as recorded from them, at stated shares.

The conversations' own turns stay as they are, so that what caches find of them can be compared with and
without the rest. Streaming: only the next `AHEAD_S` seconds of the trace are in memory, because some requests
fill the pause before the conversation's next turn.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from samovar.cache_tiers.forecast import Role, Stop
from samovar.cluster.plan.traces.trace import Trace, TraceTurn

AHEAD_S = 900.0
"""A turn that begins later than this after the session's turn before does not count as its return."""
QUOTED_TOKENS_MAX = 4000
"""A side request quotes this much of the conversation at most."""
SUBAGENTS_PAUSE_S = 30.0
"""A shorter pause is too short for sub-agents."""
_SUBAGENT_SYSTEM_TOKENS = 8000
_SUBAGENT_TURN_S_MIN = 2.0
_LINEAGE_FROM = 1 << 19  # far from those that the trace itself numbers
_BLOCK_FROM = -(1 << 60)  # ids below this; traces have none there


@dataclass(frozen=True, slots=True)
class _Task:
    """A one-shot request: tokens of its instructions, and of an answer (median)."""

    name: str
    instruction_tokens: int
    answer_tokens: int


AFTER_ANSWER = (_Task("title", 300, 12), _Task("tags", 250, 25), _Task("follow-ups", 350, 60))
BESIDE_FIRST = _Task("first-title", 600, 12)


@dataclass(frozen=True, slots=True)
class Patterns:
    """Shares, 0 to 1, of the turns after (or beside) which clients send more.

    `side`: title, tags and follow-up questions after any answer, each one user message that quotes the
    conversation under instructions of its own (Open WebUI). `title`: a title request beside a first turn
    (opencode). `subagents`: in a pause of `SUBAGENTS_PAUSE_S` or more, 2 to 6 sub-agents of 3 to 20 turns
    under a system prompt of their own; their parent returns after them (Claude Code). `regenerate`: the same
    prompt is answered again. `edit`: a message is sent that the conversation's next turn replaces.
    """

    side: float = 0.0
    title: float = 0.0
    subagents: float = 0.0
    regenerate: float = 0.0
    edit: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            share = getattr(self, field.name)
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"the share of the pattern {field.name} is {share}, and must be 0 to 1")


USUAL = Patterns(side=1.0, title=1.0, subagents=0.05, regenerate=0.1, edit=0.1)
"""Shares of patterns that are named without one."""


def parse_patterns(text: str) -> Patterns:
    """Return the patterns of `NAME[=SHARE]+NAME[=SHARE]...`. Raises `ValueError`, naming what is wrong."""
    names = [field.name for field in fields(Patterns)]
    found: dict[str, float] = {}
    for part in text.split("+"):
        name, given, share = part.strip().partition("=")
        if name not in names:
            raise ValueError(f"there is no pattern {name!r}: choose of {', '.join(names)}")
        if name in found:
            raise ValueError(f"the pattern {name} is given twice")
        try:
            found[name] = float(share) if given else getattr(USUAL, name)
        except ValueError:
            raise ValueError(f"the share of the pattern {name} is {share!r}, and must be 0 to 1") from None
    return Patterns(**found)


def mixed(trace: Trace, patterns: Patterns, *, seed: int = 0) -> Trace:
    """Return the trace with these patterns added; what is added to a turn differs by `seed` only.

    Added lineages have numbers that are unique in the whole trace.
    """

    def change(turns: Iterator[TraceTurn]) -> Iterator[TraceTurn]:
        return _Mixer(patterns, trace.block_tokens, seed).turns(turns)

    said = ", ".join(
        f"{field.name} {getattr(patterns, field.name):g}"
        for field in fields(patterns)
        if getattr(patterns, field.name)
    )
    return trace.changed(change, f"requests beside the conversations are added, not recorded: {said}")


class _Mixer:
    def __init__(self, patterns: Patterns, block_tokens: int, seed: int) -> None:
        self._patterns = patterns
        self._block_tokens = block_tokens
        # One for each pattern: its draws do not depend on which others are on.
        self._rngs = {field.name: random.Random(f"{seed}-{field.name}") for field in fields(patterns)}
        self._sessions = 0
        self._ids = itertools.count(_BLOCK_FROM, -1)
        self._lineages = itertools.count(_LINEAGE_FROM)
        sizes = {task.name: task.instruction_tokens for task in (*AFTER_ANSWER, BESIDE_FIRST)}
        sizes["subagent"] = _SUBAGENT_SYSTEM_TOKENS
        self._roots = {name: self._grown((), size) for name, size in sizes.items()}

    def turns(self, turns: Iterable[TraceTurn]) -> Iterator[TraceTurn]:
        added: list[tuple[float, int, TraceTurn]] = []
        serials = itertools.count()
        for turn, next_s in _with_returns(turns):
            while added and added[0][0] < turn.started_s:
                yield heapq.heappop(added)[2]
            yield turn
            if turn.is_main:
                for one in self._beside(turn, next_s):
                    heapq.heappush(added, (one.started_s, next(serials), one))
        while added:
            yield heapq.heappop(added)[2]

    def _beside(self, turn: TraceTurn, next_s: float) -> Iterator[TraceTurn]:
        """Yield what comes with a turn, before its session's next one at `next_s` (inf: none, or late)."""
        is_first = turn.session >= self._sessions  # sessions are numbered as they appear
        self._sessions = max(self._sessions, turn.session + 1)
        over_s = turn.turn().ended_s
        if is_first and self._is_drawn("title"):
            rng = self._rngs["title"]
            quoted = turn.input_tokens
            yield self._one_shot(rng, turn, BESIDE_FIRST, turn.started_s + rng.uniform(0.02, 0.2), quoted)
        if self._is_drawn("side"):
            rng = self._rngs["side"]
            at_s = over_s + rng.uniform(0.05, 0.5)
            quoted = turn.input_tokens - turn.kept_tokens + turn.output_tokens
            for task in AFTER_ANSWER:
                yield self._one_shot(rng, turn, task, at_s, quoted)
                at_s += rng.uniform(0.0, 0.02)
        if self._is_drawn("regenerate"):
            at_s = over_s + self._rngs["regenerate"].uniform(2.0, 10.0)
            if at_s + (over_s - turn.started_s) < (over_s + next_s) / 2:
                yield replace(turn, started_s=at_s, kept_tokens=turn.input_tokens, is_side=True)
        if next_s - over_s >= 2 * _SUBAGENT_TURN_S_MIN and next_s < math.inf and self._is_drawn("edit"):
            yield self._edited(self._rngs["edit"], turn, over_s, next_s)
        if SUBAGENTS_PAUSE_S <= next_s - over_s < math.inf and self._is_drawn("subagents"):
            rng = self._rngs["subagents"]
            for _ in range(rng.randint(2, 6)):
                yield from self._subagent(rng, turn, over_s + rng.uniform(0.1, 1.5), next_s - 0.1)

    def _is_drawn(self, pattern: str) -> bool:
        share: float = getattr(self._patterns, pattern)
        return share > 0.0 and self._rngs[pattern].random() < share

    def _one_shot(
        self, rng: random.Random, turn: TraceTurn, task: _Task, at_s: float, quoted: int
    ) -> TraceTurn:
        tokens = task.instruction_tokens + min(quoted, QUOTED_TOKENS_MAX)
        return self._side(
            turn,
            next(self._lineages),
            at_s,
            tokens,
            output_tokens=_around(rng, task.answer_tokens, 0.4),
            blocks=self._grown(self._roots[task.name], tokens),
        )

    def _edited(self, rng: random.Random, turn: TraceTurn, over_s: float, next_s: float) -> TraceTurn:
        """Return the turn that extends the conversation and that its next turn replaces."""
        chain = turn.input_tokens + turn.output_tokens
        tokens = chain + _around(rng, 120, 1.0)
        at_s = over_s + (next_s - over_s) * rng.uniform(0.5, 0.7)
        is_told = bool(turn.blocks) or turn.input_tokens < turn.block_tokens
        return replace(
            turn,
            started_s=at_s,
            input_tokens=tokens,
            blocks=self._grown(turn.blocks, tokens) if is_told else (),
            kept_tokens=chain,
            service_s=0.8 * (next_s - at_s) * rng.random(),  # the answer is read, if only in part
            stop="stop",
            role="user",
            tool="",
            is_side=True,
        )

    def _subagent(
        self, rng: random.Random, turn: TraceTurn, at_s: float, until_s: float
    ) -> Iterator[TraceTurn]:
        """Yield a sub-agent's turns, all over by `until_s`."""
        most = int((until_s - at_s) / _SUBAGENT_TURN_S_MIN)
        lasts_s = [_around(rng, 9, 0.6) for _ in range(min(rng.randint(3, 20), most))]
        pace = min(1.0, (until_s - at_s) / sum(lasts_s))
        lineage = next(self._lineages)
        kept, tokens = 0, _SUBAGENT_SYSTEM_TOKENS + _around(rng, 500, 0.6)
        blocks = self._grown(self._roots["subagent"], tokens)
        for number, turn_s in enumerate(lasts_s):
            output = _around(rng, 150, 0.8)
            yield self._side(
                turn,
                lineage,
                at_s,
                tokens,
                output_tokens=output,
                blocks=blocks,
                kept_tokens=kept,
                service_s=0.5 * pace * turn_s,
                stop="stop" if number == len(lasts_s) - 1 else "tool_calls",
                role="tool" if number else "user",
            )
            at_s += pace * turn_s
            kept = tokens + output
            tokens = kept + _around(rng, 600, 1.0)
            blocks = self._grown(blocks, tokens)

    def _side(
        self,
        turn: TraceTurn,
        lineage: int,
        at_s: float,
        input_tokens: int,
        *,
        output_tokens: int,
        blocks: tuple[int, ...],
        kept_tokens: int = 0,
        service_s: float | None = None,
        stop: Stop = "stop",
        role: Role = "user",
    ) -> TraceTurn:
        """Return a turn of a lineage of its own, under the session of `turn`."""
        return TraceTurn(
            session=turn.session,
            started_s=at_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            blocks=blocks,
            block_tokens=self._block_tokens,
            kept_tokens=kept_tokens,
            service_s=service_s,
            stop=stop,
            role=role,
            tool="tool-1" if stop == "tool_calls" else "",
            profile=turn.profile,
            lineage=lineage,
            is_side=True,
        )

    def _grown(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Return the blocks of a prompt of `tokens` that begins with these: new ones follow."""
        more = max(0, tokens // self._block_tokens - len(blocks))
        return blocks + tuple(itertools.islice(self._ids, more))


def _with_returns(turns: Iterable[TraceTurn]) -> Iterator[tuple[TraceTurn, float]]:
    """Yield each turn with the beginning of its session's next one of the conversation itself.

    Infinity if none begins within `AHEAD_S`.
    """
    ahead: deque[_Ahead] = deque()
    last: dict[int, _Ahead] = {}

    def given() -> tuple[TraceTurn, float]:
        first = ahead.popleft()
        if last.get(first.turn.session) is first:
            del last[first.turn.session]
        return first.turn, first.next_s

    for turn in turns:
        while ahead and ahead[0].turn.started_s < turn.started_s - AHEAD_S:
            yield given()
        entry = _Ahead(turn)
        if turn.is_main:
            before = last.get(turn.session)
            if before is not None:
                before.next_s = turn.started_s
            last[turn.session] = entry
        ahead.append(entry)
    while ahead:
        yield given()


@dataclass(slots=True)
class _Ahead:
    """A turn that was read ahead, and when its session's next one begins."""

    turn: TraceTurn
    next_s: float = math.inf


def _around(rng: random.Random, median: float, sigma: float) -> int:
    """Draw a positive whole number, log-normal."""
    return max(1, round(median * math.exp(sigma * rng.gauss(0.0, 1.0))))
