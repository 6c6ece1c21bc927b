"""Defines the common form of all traces: sessions, times, prompt lengths and block ids, never text.

`readers.py` reads the schemas of the published traces.

An answer's tokens are in no turn's `blocks`. If the next prompt begins with them, its own ids include them
(the ids of Mooncake, WEKA, Qwen-Bailian and of our recordings are those of whole prompts). Most
tables in print put no answer into the cache; a server that does keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from samovar.cache_tiers.forecast import Role, Stop, Turn, tool_tags

TraceKind = Literal[
    "mooncake", "mooncake-turns", "weka", "qwen-bailian", "burstgpt", "samovar", "tracelab", "generated"
]

NO_STOP = "why answers ended is not told: all are taken for ends of a turn (stop), all prompts for a user's"
SERVICE_S_PER_OUTPUT = 0.03
_LINEAGES_FROM = 1 << 40  # keys of side lineages; there are fewer sessions
INPUT_TOKENS_PER_S = 20_000.0


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request.

    `session`: 0, 1, ... in order of first appearance. `started_s`: from the trace's beginning. `blocks`: the
    ids of all the prompt's full blocks of `block_tokens` each; an id stands for a block's content and all
    before it, and is the same in every session. Empty although the prompt has full blocks: unknown; its first
    `kept_tokens` are then as in the session's last turn, the rest is new and unique. `kept_tokens`: see
    `Turn`, of its own lineage. `service_s`: arrival to last token; None: unknown. `lineage`: 0, 1, ... within
    its session, a chain of prompts that extend one another; 0 is the conversation itself, as it began.
    `is_side`: sent beside the conversation (title, sub-agent, discarded attempt), and no turn of its own.
    `tool`: names of the tools that its answer calls, with spaces between; empty: none, or unknown.
    `by_session`: its `key` is the whole session's, as before there were lineages.
    """

    session: int
    started_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int
    kept_tokens: int
    service_s: float | None
    stop: Stop
    role: Role
    tool: str
    profile: str
    lineage: int = 0
    is_side: bool = False
    by_session: bool = False

    @property
    def key(self) -> int:
        """Return its lineage's number among all sessions': what forecasts, homes and queues are kept by."""
        if not self.lineage or self.by_session:
            return self.session
        return self.lineage * _LINEAGES_FROM + self.session

    @property
    def is_main(self) -> bool:
        """Return whether it is a turn of the conversation itself."""
        return not self.is_side

    def turn(self, ended_s: float | None = None) -> Turn:
        """Return the predictor's view of it; `ended_s`: by default as the trace states or assumes."""
        if ended_s is None:
            service_s = self.service_s
            if service_s is None:
                service_s = assumed_service_s(self.input_tokens, self.output_tokens)
            ended_s = self.started_s + service_s
        return Turn(
            session=self.key,
            started_s=self.started_s,
            ended_s=ended_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            kept_tokens=self.kept_tokens,
            stop=self.stop,
            role=self.role,
            tool=tool_tags(self.tool.split()),
            profile=self.profile,
        )


def assumed_service_s(input_tokens: int, output_tokens: int) -> float:
    """Return seconds from arrival to last token if a trace has none: an assumption."""
    return SERVICE_S_PER_OUTPUT * output_tokens + input_tokens / INPUT_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """Counts over a whole trace. `skipped`: rows that were no requests (failed, or of other kinds)."""

    turns: int
    sessions: int
    last_s: float
    skipped: int = 0


class ReadTally:
    """Counts the rows that a reader skipped, from 0 in each pass."""

    def __init__(self) -> None:
        self.skipped = 0


Read = Callable[[ReadTally], Iterator[TraceTurn]]
"""Reads the trace from its beginning."""


class Trace:
    """Turns ordered by `started_s`, reread each time, so that a long trace is never all in memory.

    `notes`: its assumptions, as sentences for the user.
    """

    def __init__(
        self, name: str, kind: TraceKind, block_tokens: int, read: Read, notes: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.kind = kind
        self.block_tokens = block_tokens
        self.notes = notes
        self._read = read
        self._counts: TraceCounts | None = None

    def turns(self) -> Iterator[TraceTurn]:
        """Yield all turns. Raises `TraceError` if a line cannot be read."""
        tally = ReadTally()
        turns, sessions, last_s = 0, 0, 0.0
        for turn in self._read(tally):
            turns += 1
            sessions = max(sessions, turn.session + 1)
            last_s = turn.started_s
            yield turn
        self._counts = TraceCounts(turns, sessions, last_s, tally.skipped)

    def counts(self) -> TraceCounts:
        """Return the counts of the whole trace; reads it if it has not been read to its end yet."""
        if self._counts is None:
            for _ in self.turns():
                pass
        assert self._counts is not None
        return self._counts

    def coarser(self, block_tokens: int) -> Trace:
        """Return the same trace in larger blocks, a multiple of its own. Raises `ValueError` if it is none.

        Exact: an id also stands for all before it, so the last id of a group identifies the group.
        """
        times, rest = divmod(block_tokens, self.block_tokens)
        if rest or times < 1:
            raise ValueError(
                f"{block_tokens} is no multiple of the trace's {self.block_tokens} tokens a block"
            )
        if times == 1:
            return self

        def read(tally: ReadTally) -> Iterator[TraceTurn]:
            for turn in self._read(tally):
                blocks = turn.blocks[times - 1 :: times]
                yield replace(turn, blocks=blocks, block_tokens=block_tokens)

        return Trace(self.name, self.kind, block_tokens, read, self.notes)

    def changed(self, change: Callable[[Iterator[TraceTurn]], Iterator[TraceTurn]], note: str) -> Trace:
        """Return the trace whose turns are `change` of this one's, in the same blocks; `note`: says so."""

        def read(tally: ReadTally) -> Iterator[TraceTurn]:
            return change(self._read(tally))

        return Trace(self.name, self.kind, self.block_tokens, read, (*self.notes, note))


class SessionChains:
    """Numbers sessions 0, 1, ... in order of first appearance, and remembers each one's last prompt."""

    def __init__(self) -> None:
        self._of: dict[object, int] = {}
        self._last: list[tuple[int, tuple[int, ...]]] = []  # tokens of the chain, blocks of the prompt

    def number(self, key: object) -> int:
        """Return the session's number, a new one for an unknown key."""
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = self.add()
        return found

    def add(self) -> int:
        """Return the number of one more session, without a key."""
        self._last.append((0, ()))
        return len(self._last) - 1

    def last_blocks(self, session: int) -> tuple[int, ...]:
        """Return the blocks of the session's last prompt."""
        return self._last[session][1]

    def follow(
        self, session: int, input_tokens: int, output_tokens: int, blocks: tuple[int, ...], block_tokens: int
    ) -> int:
        """Return the tokens that this prompt keeps of the session's chain, and make it the last prompt.

        If all full blocks of the last prompt are kept, its tail and the answer count as kept, too: nothing
        says otherwise.
        """
        chain, before = self._last[session]
        kept = common_blocks(before, blocks)
        self.remember(session, input_tokens + output_tokens, blocks)
        return min(chain, input_tokens) if kept == len(before) else kept * block_tokens

    def turn(
        self,
        session: int,
        started_s: float,
        input_tokens: int,
        output_tokens: int,
        blocks: tuple[int, ...],
        *,
        block_tokens: int,
        profile: str = "chat",
    ) -> TraceTurn:
        """Return the session's next turn, of a trace that tells lengths and blocks only; see `follow`."""
        return TraceTurn(
            session=session,
            started_s=started_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            blocks=blocks,
            block_tokens=block_tokens,
            kept_tokens=self.follow(session, input_tokens, output_tokens, blocks, block_tokens),
            service_s=None,
            stop="stop",
            role="user",
            tool="",
            profile=profile,
        )

    def remember(self, session: int, chain_tokens: int, blocks: tuple[int, ...]) -> None:
        """Record the blocks of its last prompt and the length of its chain, answer included."""
        self._last[session] = (chain_tokens, blocks)

    def follow_unknown(self, session: int, input_tokens: int, output_tokens: int) -> int:
        """Do as `follow` without ids: a prompt continues the chain if it is as long, else starts another."""
        chain = self._last[session][0]
        self.remember(session, input_tokens + output_tokens, ())
        return chain if input_tokens >= chain else 0


def whole_blocks(block_tokens: int | None, unit: int) -> int:
    """Return `block_tokens`, by default `unit`. Raises `ValueError` if it is no multiple of `unit`."""
    if block_tokens is None:
        return unit
    if block_tokens < unit or block_tokens % unit:
        raise ValueError(f"{block_tokens} is no multiple of the trace's {unit} tokens a block")
    return block_tokens


def common_blocks(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading blocks two chains share; ids are chained, so binary search is enough."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
