"""Reads WEKA's turns of coding agents (callanjfox/kv-cache-tester).

A CSV of turns, session by session, with times relative to the session's start: sessions are superposed, with
starts drawn at random. `blocks64` and `lcp_blocks64_prev` (blocks shared with the last prompt) give the
length of each prompt and how much of it is a repeat; the rest is new and unique.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from pathlib import Path

from samovar.cache_tiers.forecast import Role, Stop
from samovar.cluster.plan.traces.files import Row, csv_rows
from samovar.cluster.plan.traces.trace import ReadTally, SessionChains, Trace, TraceTurn, whole_blocks

BLOCK_TOKENS = 64
COLUMNS = frozenset(
    {
        *("session", "is_subagent", "turn", "t", "input_tokens", "output_tokens", "input_types", "stop"),
        *("api_s", "blocks64", "lcp_blocks64_prev"),
    }
)
# An unknown end of an answer maps to a kind that no other turn of these has: its meaning can be learned,
# and nothing is inferred from what came after it.
STOPS: dict[str, Stop] = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length", "": "length"}
ROLES: dict[str, Role] = {"tool_result": "tool", "text": "user"}


@dataclass(frozen=True, slots=True)
class _Kept:
    """One line in compact form: all of them are in memory at once."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: int
    shared: int
    service_s: float | None
    stop: Stop
    role: Role


def weka(
    path: Path,
    block_tokens: int | None = None,
    seed: int = 0,
    spread_h: float = 24.0,
    *,
    subagents: bool = False,
) -> Trace:
    """Return the trace in `path`, its sessions starting at random within `spread_h` hours.

    `block_tokens`: a multiple of 64. `subagents`: include the turns of subagents. Raises `ValueError` for
    invalid options.
    """
    size = whole_blocks(block_tokens, BLOCK_TOKENS)
    if not spread_h >= 0:
        raise ValueError(f"spread_h is {spread_h}, and must be 0 or more")

    def read(tally: ReadTally) -> Iterator[TraceTurn]:
        sessions = _load(path, tally, subagents=subagents)
        rng = random.Random(seed)
        begins_s = [rng.uniform(0.0, spread_h * 3600.0) for _ in sessions]
        first_s = min(begins_s, default=0.0)
        yield from _superposed(sessions, [at_s - first_s for at_s in begins_s], size)

    notes = (
        f"sessions start at random within {spread_h:g} h (seed {seed})",
        "an answer whose end is not recorded counts as cut off (length)",
        "blocks that sessions share (system prompts) are not recorded: none are shared",
    )
    return Trace(path.name, "weka", size, read, notes)


def _load(path: Path, tally: ReadTally, *, subagents: bool) -> list[list[_Kept]]:
    sessions: dict[str, list[_Kept]] = {}
    for row in csv_rows(path, needed=COLUMNS):
        if row.text("is_subagent") != "False" and not subagents:
            tally.skipped += 1
            continue
        turns = sessions.setdefault(row.text("session"), [])
        kept = _kept(row)
        if turns and kept.at_s < turns[-1].at_s:
            raise row.error("t", "is earlier than the session's turn before")
        turns.append(kept)
    return list(sessions.values())


def _kept(row: Row) -> _Kept:
    stop = STOPS.get(row.text("stop"))
    if stop is None:
        raise row.error("stop", f"{row.text('stop')!r} is not one of {', '.join(map(repr, STOPS))}")
    return _Kept(
        at_s=row.number("t", least=0),
        input_tokens=row.whole("input_tokens"),
        output_tokens=row.whole("output_tokens"),
        blocks=row.whole("blocks64"),
        shared=row.whole("lcp_blocks64_prev"),
        service_s=row.optional("api_s", least=0),
        stop=stop,
        role=ROLES.get(row.text("input_types"), "other"),
    )


def _superposed(sessions: list[list[_Kept]], begins_s: list[float], block_tokens: int) -> Iterator[TraceTurn]:
    """Yield all turns by time; a session's chain is built as its turns are yielded."""
    chains = SessionChains()
    heap = [(begins_s[key] + turns[0].at_s, key, 0) for key, turns in enumerate(sessions)]
    heapify(heap)
    ids_given = 0
    times = block_tokens // BLOCK_TOKENS
    while heap:
        at_s, key, index = heap[0]
        kept = sessions[key][index]
        session = chains.number(key)
        full = kept.blocks // times
        before = chains.last_blocks(session)[: min(kept.shared // times, full)]
        blocks = before + tuple(range(ids_given, ids_given + full - len(before)))
        ids_given += full - len(before)
        chains.remember(session, kept.input_tokens + kept.output_tokens, blocks)
        yield TraceTurn(
            session=session,
            started_s=at_s,
            input_tokens=kept.input_tokens,
            output_tokens=kept.output_tokens,
            blocks=blocks,
            block_tokens=block_tokens,
            kept_tokens=_kept_tokens(sessions[key], index),
            service_s=kept.service_s,
            stop=kept.stop,
            role=kept.role,
            tool="",
            profile="agent",
        )
        if index + 1 < len(sessions[key]):
            heapreplace(heap, (begins_s[key] + sessions[key][index + 1].at_s, key, index + 1))
        else:
            heappop(heap)


def _kept_tokens(turns: list[_Kept], index: int) -> int:
    """Return the kept tokens as `SessionChains.follow` does, in the file's blocks."""
    if index == 0:
        return 0
    before, turn = turns[index - 1], turns[index]
    if turn.shared < before.blocks:
        return min(turn.shared * BLOCK_TOKENS, turn.input_tokens)
    return min(before.input_tokens + before.output_tokens, turn.input_tokens)
