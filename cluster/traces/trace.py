"""The common form of all traces: who asked when, how long a prompt, which blocks of it were seen before.

Lengths, times and block ids, never text. What reads the schemas of the published traces is in
`readers.py`, what makes a trace up in `generator.py`; nothing here knows files or policies.

The answer: its tokens are in no turn's `blocks`. Where the next prompt begins with them, that prompt's own
ids say so (the ids of Mooncake, WEKA, Qwen-Bailian and of our recordings are those of whole prompts).
PREDICTOR.md's tables, like most in print, put no answer into the cache; a server that does keeps more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cache_tiers.forecast import Role, Stop, Turn

TraceKind = Literal["mooncake", "mooncake-turns", "weka", "qwen-bailian", "burstgpt", "samovar", "generated"]

SERVICE_S_PER_OUTPUT = 0.03
INPUT_TOKENS_PER_S = 20_000.0


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request.

    `session`: 0, 1, ... in order of first appearance. `started_s`: from the trace's beginning.
    `blocks`: of the prompt's full blocks of `block_tokens` each, all of them; an id stands for a block's
    content and all before it, and is the same in whichever session. Empty though the prompt has full
    blocks: not known; its first `kept_tokens` are then as in the session's last turn, the rest is new and
    nobody else's. `kept_tokens`: see `Turn`. `service_s`: arrival to last token, where it is known.
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

    def turn(self, ended_s: float | None = None) -> Turn:
        """As the predictor sees it; `ended_s`: when it was over, by default as the trace tells or assumes."""
        if ended_s is None:
            service_s = self.service_s
            if service_s is None:
                service_s = assumed_service_s(self.input_tokens, self.output_tokens)
            ended_s = self.started_s + service_s
        return Turn(
            session=self.session,
            started_s=self.started_s,
            ended_s=ended_s,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            kept_tokens=self.kept_tokens,
            stop=self.stop,
            role=self.role,
            tool=self.tool,
            profile=self.profile,
        )


def assumed_service_s(input_tokens: int, output_tokens: int) -> float:
    """Seconds from arrival to last token where a trace says nothing (PREDICTOR.md's assumption)."""
    return SERVICE_S_PER_OUTPUT * output_tokens + input_tokens / INPUT_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """`skipped`: rows that were no requests (failed ones, those of other kinds)."""

    turns: int
    sessions: int
    last_s: float
    skipped: int = 0


class ReadTally:
    """What a reader has left out, counted anew in each pass."""

    def __init__(self) -> None:
        self.skipped = 0


Read = Callable[[ReadTally], Iterator[TraceTurn]]
"""Begins the trace from its beginning."""


class Trace:
    """Turns in the order of `started_s`, read anew each time, so that a long trace is never all in memory.

    `notes`: what of it is assumed, in sentences for people.
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
        """All turns. Raises `TraceError` where a line cannot be read."""
        tally = ReadTally()
        turns, sessions, last_s = 0, 0, 0.0
        for turn in self._read(tally):
            turns += 1
            sessions = max(sessions, turn.session + 1)
            last_s = turn.started_s
            yield turn
        self._counts = TraceCounts(turns, sessions, last_s, tally.skipped)

    def counts(self) -> TraceCounts:
        """Of the whole trace; reads it once more if nobody has read it to its end yet."""
        if self._counts is None:
            for _ in self.turns():
                pass
        assert self._counts is not None
        return self._counts

    def coarser(self, block_tokens: int) -> Trace:
        """The same in larger blocks, a multiple of its own. Raises `ValueError`.

        Exact: an id stands for all before it too, so the last id of a group names the group.
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


class SessionChains:
    """Numbers sessions 0, 1, ... in order of first appearance, and remembers each one's last prompt."""

    def __init__(self) -> None:
        self._of: dict[object, int] = {}
        self._last: list[tuple[int, tuple[int, ...]]] = []  # tokens of the chain, blocks of the prompt

    def number(self, key: object) -> int:
        """The session's, new if it was never seen."""
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = self.add()
        return found

    def add(self) -> int:
        """The number of one more session, without a key."""
        self._last.append((0, ()))
        return len(self._last) - 1

    def last_blocks(self, session: int) -> tuple[int, ...]:
        """Of its last prompt."""
        return self._last[session][1]

    def follow(
        self, session: int, input_tokens: int, output_tokens: int, blocks: tuple[int, ...], block_tokens: int
    ) -> int:
        """Tokens that this prompt keeps of the session's chain; remembers the prompt as its last one.

        All full blocks of the last prompt kept: nothing says that its tail and the answer were not.
        """
        chain, before = self._last[session]
        kept = common_blocks(before, blocks)
        self.remember(session, input_tokens + output_tokens, blocks)
        return min(chain, input_tokens) if kept == len(before) else kept * block_tokens

    def remember(self, session: int, chain_tokens: int, blocks: tuple[int, ...]) -> None:
        """Its last prompt has these blocks, and its chain is so long with the answer."""
        self._last[session] = (chain_tokens, blocks)

    def follow_unknown(self, session: int, input_tokens: int, output_tokens: int) -> int:
        """The same where no ids are known: a prompt as long as the chain goes on, a shorter one is anew."""
        chain = self._last[session][0]
        self.remember(session, input_tokens + output_tokens, ())
        return chain if input_tokens >= chain else 0


def whole_blocks(block_tokens: int | None, unit: int) -> int:
    """`block_tokens`, or `unit`. Raises `ValueError` if it is no multiple of that."""
    if block_tokens is None:
        return unit
    if block_tokens < unit or block_tokens % unit:
        raise ValueError(f"{block_tokens} is no multiple of the trace's {unit} tokens a block")
    return block_tokens


def common_blocks(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many blocks two chains have in common; ids are chained, so a search by halves is enough."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
