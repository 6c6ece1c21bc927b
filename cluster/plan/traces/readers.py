"""Opens a trace of any known schema, detected from the file, and reads it.

These are our recordings, BurstGPT, Qwen-Bailian, Mooncake's published requests and WEKA's turns of agents.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from pathlib import Path

import xxhash

from samovar.cache_tiers.forecast import Role, Stop
from samovar.cache_tiers.recording import SERVICE_S_MAX, RecordedRow, RecordingError, read_header, read_row
from samovar.cluster.plan.traces.files import (
    Row,
    TraceError,
    csv_rows,
    in_time_order,
    json_rows,
    lines,
    parse_object,
)
from samovar.cluster.plan.traces.trace import (
    NO_STOP,
    ReadTally,
    SessionChains,
    Trace,
    TraceKind,
    TraceTurn,
    whole_blocks,
)

_JITTER_S = 60.0  # rows may be reordered on the way to the file


def recorded(path: Path) -> Trace:
    """Return our own recording, as `cache_tiers/recording.py` writes it.

    Its rows are ordered by the turns' ends. A recording cut off by a kill ends with a partial line, which is
    skipped. The conversation itself is a session's lineage of most turns: its title may have ended before the
    first answer, and lineages are numbered as their first turns end. Raises `TraceError` if the header cannot
    be read.
    """
    block_tokens = _header(path)

    def read(tally: ReadTally) -> Iterator[TraceTurn]:
        chains = SessionChains()
        conversations = _conversations(path, block_tokens)
        first_s: float | None = None
        for at_s, row in in_time_order(_rows(path, tally), SERVICE_S_MAX + _JITTER_S):
            first_s = at_s if first_s is None else first_s
            parsed = _parsed(row, block_tokens)
            main = conversations.get(parsed.session, 0)
            number = 0 if parsed.lineage == main else parsed.lineage + (parsed.lineage < main)
            parsed = replace(parsed, lineage=number)
            yield _recorded_turn(chains, at_s - first_s, parsed, block_tokens)

    return Trace(path.name, "samovar", block_tokens, read)


def _conversations(path: Path, block_tokens: int) -> dict[int, int]:
    """Return the lineage of most turns, the first of several, of each session where that is not 0."""
    turns: dict[int, Counter[int]] = {}
    for _, row in _rows(path, ReadTally()):
        parsed = _parsed(row, block_tokens)
        turns.setdefault(parsed.session, Counter())[parsed.lineage] += 1
    mains = {session: min(of, key=lambda lineage: (-of[lineage], lineage)) for session, of in turns.items()}
    return {session: main for session, main in mains.items() if main}


def _header(path: Path) -> int:
    for number, line in lines(path):
        try:
            return read_header(parse_object(path, number, line))
        except RecordingError as error:
            raise TraceError(str(path), number, error.field, error.reason) from error
    raise TraceError(str(path), 0, "", "the file is empty")


def _rows(path: Path, tally: ReadTally) -> Iterator[tuple[float, Row]]:
    for number, line in lines(path):
        if number == 1:
            continue
        try:
            row = Row(str(path), number, parse_object(path, number, line))
        except TraceError:
            if line.endswith(b"\n"):
                raise
            tally.skipped += 1  # cut off: only the last line can be
            continue
        if "ended" not in row.values:
            yield row.number("started_s"), row


def _parsed(row: Row, block_tokens: int) -> RecordedRow:
    try:
        parsed = read_row(row.values, block_tokens)
    except RecordingError as error:
        raise row.error(error.field, error.reason) from error
    assert parsed is not None, "the last line is no turn"
    return parsed


def _recorded_turn(chains: SessionChains, started_s: float, row: RecordedRow, block_tokens: int) -> TraceTurn:
    return TraceTurn(
        session=chains.number(row.session),
        started_s=started_s,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        blocks=row.blocks,
        block_tokens=block_tokens,
        kept_tokens=row.kept_tokens,
        service_s=row.service_s,
        stop=row.stop,
        role=row.role,
        tool=f"tool-{row.tool}" if row.tool else "",
        profile=f"profile-{row.profile}" if row.profile else "chat",
        lineage=row.lineage,
        is_side=row.lineage > 0,
    )


BURST_BLOCK_TOKENS = 16  # the data has no blocks; any size will do
BURST_SLACK_S = 600.0
BURST_COLUMNS = frozenset({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"})
PROFILES = {"Conversation log": "chat", "API log": "api"}


def burst(path: Path) -> Trace:
    """Return BurstGPT's requests (github.com/HPMLL/BurstGPT).

    A CSV of lengths and times, without block ids. Release 1 has no session ids, release 2 has them for
    conversations (`Session ID`) and the duration of each answer (`Elapsed time`). A request without a session
    id is a session of one turn: which of them belong together is unknown, and is not invented. A request
    without an answer has failed and does not count.
    """

    def read(tally: ReadTally) -> Iterator[TraceTurn]:
        rows = ((row.number("Timestamp"), row) for row in csv_rows(path, needed=BURST_COLUMNS))
        chains = SessionChains()
        first_s: float | None = None
        for at_s, row in in_time_order(rows, BURST_SLACK_S):
            input_tokens, output_tokens = row.whole("Request tokens"), row.whole("Response tokens")
            if not input_tokens or not output_tokens:
                tally.skipped += 1
                continue
            first_s = at_s if first_s is None else first_s
            key = row.values.get("Session ID", "")
            session = chains.number(key) if key else chains.add()
            log_type = row.text("Log Type")
            yield TraceTurn(
                session=session,
                started_s=at_s - first_s,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                blocks=(),
                block_tokens=BURST_BLOCK_TOKENS,
                kept_tokens=chains.follow_unknown(session, input_tokens, output_tokens) if key else 0,
                service_s=row.optional("Elapsed time", least=0) if "Elapsed time" in row.values else None,
                stop="stop",
                role="user",
                tool="",
                profile=PROFILES.get(log_type, log_type),
            )

    notes = (
        "requests without a session id count as sessions of one turn: none of their blocks can be reused",
        "block ids are not recorded: a prompt at least as long as its session's chain counts as its "
        "continuation",
        "requests without an answer have failed and are left out",
    )
    return Trace(path.name, "burstgpt", BURST_BLOCK_TOKENS, read, notes)


QWEN_BLOCK_TOKENS = 16
QWEN_SLACK_S = 60.0
_ID = (1 << 64) - 1


def qwen(path: Path, block_tokens: int | None = None) -> Trace:
    """Return a usage trace of Qwen on Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon).

    Source: "KVCache Cache in the Wild", USENIX ATC'25. One JSON object per request: `chat_id`,
    `parent_chat_id` (-1: none), `timestamp` in s, `input_length`, `output_length`, `type`, `turn`,
    `hash_ids`: one per 16 tokens. According to their page each block is hashed by itself: ids are chained
    here, with digests of 64 bits. `block_tokens`: a multiple of 16. Raises `ValueError` if it is none.
    """
    size = whole_blocks(block_tokens, QWEN_BLOCK_TOKENS)

    def read(_: ReadTally) -> Iterator[TraceTurn]:
        rows = ((row.number("timestamp", least=0), row) for row in json_rows(path))
        chains = SessionChains()
        sessions: dict[int, int] = {}  # chat_id -> session
        first_s: float | None = None
        for at_s, row in in_time_order(rows, QWEN_SLACK_S):
            first_s = at_s if first_s is None else first_s
            session = sessions.get(row.whole("parent_chat_id", least=-1))
            if session is None:  # a first turn, or one whose parent is not in the file
                session = chains.add()
            sessions[row.whole("chat_id")] = session
            input_tokens, output_tokens = row.whole("input_length"), row.whole("output_length")
            blocks = _chained(row, input_tokens // size, size // QWEN_BLOCK_TOKENS)
            yield chains.turn(
                session,
                at_s - first_s,
                input_tokens,
                output_tokens,
                blocks,
                block_tokens=size,
                profile=row.text("type"),
            )

    return Trace(path.name, "qwen-bailian", size, read, (NO_STOP,))


def _chained(row: Row, full: int, times: int) -> tuple[int, ...]:
    """Return at most `full` chained ids, each for `times` of the row's blocks."""
    ids = row.ids("hash_ids")
    if any(not 0 <= one <= _ID for one in ids):
        raise row.error("hash_ids", "an id is not between 0 and 2^64")
    blocks: list[int] = []
    before = 0
    for end in range(times, min(len(ids) // times, full) * times + 1, times):
        before = xxhash.xxh3_64_intdigest(struct.pack(f"<{times}Q", *ids[end - times : end]), seed=before)
        blocks.append(before)
    return tuple(blocks)


MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_SLACK_S = 60.0

TURN_COLUMNS = frozenset(
    {"session", "turn", "t_s", "input_tokens", "output_tokens", "shared_depth_blocks512", "idle_after_s"}
)


def mooncake(path: Path) -> Trace:
    """Return the trace of Mooncake's published requests, with reconstructed sessions.

    Source: "Mooncake: Trading More Storage for Less Computation", FAST'25. One JSON object per line:
    `timestamp` in ms, `input_length`, `output_length`, `hash_ids`: one for each block of 512 tokens, the last
    partial one included, chained with all before it. Sessions are not in the data: see `_Owners`.
    """

    def read(_: ReadTally) -> Iterator[TraceTurn]:
        rows = ((row.number("timestamp", least=0) / 1000.0, row) for row in json_rows(path))
        sessions, owners = SessionChains(), _Owners()
        first_s: float | None = None
        for at_s, row in in_time_order(rows, MOONCAKE_SLACK_S):
            first_s = at_s if first_s is None else first_s
            input_tokens = row.whole("input_length")
            ids = row.ids("hash_ids")
            full = input_tokens // MOONCAKE_BLOCK_TOKENS
            if not full <= len(ids) <= full + 1:
                raise row.error(
                    "hash_ids", f"{len(ids)} blocks of {MOONCAKE_BLOCK_TOKENS} are not {input_tokens} tokens"
                )
            session = owners.find(ids)
            if session is None:
                session = sessions.add()
            owners.owns(session, ids)
            output_tokens = row.whole("output_length")
            yield sessions.turn(
                session,
                at_s - first_s,
                input_tokens,
                output_tokens,
                ids[:full],
                block_tokens=MOONCAKE_BLOCK_TOKENS,
            )

    rebuilt = "sessions are rebuilt: a request that continues a prompt's blocks belongs to its session"
    return Trace(path.name, "mooncake", MOONCAKE_BLOCK_TOKENS, read, (rebuilt, NO_STOP))


def mooncake_turns(path: Path) -> Trace:
    """Return the trace of the derived table: sessions, and blocks shared with the session's last prompt."""

    def read(_: ReadTally) -> Iterator[TraceTurn]:
        rows = ((row.number("t_s", least=0), row) for row in csv_rows(path, needed=TURN_COLUMNS))
        sessions = SessionChains()
        ids_given = 0
        first_s: float | None = None
        for at_s, row in in_time_order(rows, MOONCAKE_SLACK_S):
            first_s = at_s if first_s is None else first_s
            session = sessions.number(row.text("session"))
            input_tokens = row.whole("input_tokens")
            full = input_tokens // MOONCAKE_BLOCK_TOKENS
            shared = min(row.whole("shared_depth_blocks512"), full)
            kept = sessions.last_blocks(session)[:shared]
            blocks = kept + tuple(range(ids_given, ids_given + full - len(kept)))
            ids_given += full - len(kept)
            output_tokens = row.whole("output_tokens")
            yield sessions.turn(
                session,
                at_s - first_s,
                input_tokens,
                output_tokens,
                blocks,
                block_tokens=MOONCAKE_BLOCK_TOKENS,
            )

    alone = "blocks that sessions share (system prompts) are not recorded: none are shared"
    return Trace(path.name, "mooncake-turns", MOONCAKE_BLOCK_TOKENS, read, (alone, NO_STOP))


class _Owners:
    """Maps blocks to the session that used them last; the deepest known block gives a prompt's session.

    The first block alone does not count (the system prompt), nor one that `FORKS_MAX` prompts have continued
    differently (a template). Ids are never dropped: some 100 bytes each.
    """

    FORKS_MAX = 8

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._forks: dict[int, int] = {}

    def find(self, ids: tuple[int, ...]) -> int | None:
        """Return the session that this prompt continues; None if unknown."""
        known = 0
        while known < len(ids) and ids[known] in self._owner:
            known += 1
        if known < 2 or self._forks.get(ids[known - 1], 0) >= self.FORKS_MAX:
            return None
        return self._owner[ids[known - 1]]

    def owns(self, session: int, ids: tuple[int, ...]) -> None:
        """Record these blocks as those of the session's last prompt."""
        for before, block in zip((None, *ids), ids, strict=False):
            if block not in self._owner and before is not None:
                self._forks[before] = self._forks.get(before, 0) + 1
            self._owner[block] = session


WEKA_BLOCK_TOKENS = 64
WEKA_COLUMNS = frozenset(
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
    """Return WEKA's turns of coding agents (callanjfox/kv-cache-tester).

    A CSV of turns, session by session, with times relative to the session's start: sessions are superposed,
    with starts drawn at random within `spread_h` hours. `blocks64` and `lcp_blocks64_prev` (blocks shared
    with the last prompt) give the length of each prompt and how much of it is a repeat; the rest is new and
    unique.

    `block_tokens`: a multiple of 64. `subagents`: include the turns of subagents. Raises `ValueError` for
    invalid options.
    """
    size = whole_blocks(block_tokens, WEKA_BLOCK_TOKENS)
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
    for row in csv_rows(path, needed=WEKA_COLUMNS):
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
    times = block_tokens // WEKA_BLOCK_TOKENS
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
        return min(turn.shared * WEKA_BLOCK_TOKENS, turn.input_tokens)
    return min(before.input_tokens + before.output_tokens, turn.input_tokens)


_BY_KEYS: tuple[tuple[TraceKind, frozenset[str]], ...] = (
    ("samovar", frozenset({"samovar_trace"})),
    ("qwen-bailian", frozenset({"chat_id", "parent_chat_id", "timestamp", "hash_ids"})),
    ("mooncake", frozenset({"timestamp", "input_length", "output_length", "hash_ids"})),
)
_BY_COLUMNS: tuple[tuple[TraceKind, frozenset[str]], ...] = (
    ("mooncake-turns", TURN_COLUMNS),
    ("weka", WEKA_COLUMNS),
    ("burstgpt", BURST_COLUMNS),
)
KNOWN = "Mooncake requests or derived turns, WEKA turns, Qwen-Bailian, BurstGPT, a recording of Samovar"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace. `block_tokens`: None: as in the file; else a multiple of that.

    For WEKA: `seed`, `spread_h`: session starts are not in the data, and are drawn within this many hours.
    `subagents`: include the turns of subagents.
    """

    seed: int = 0
    spread_h: float = 24.0
    subagents: bool = False
    block_tokens: int | None = None


def open_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """Return the trace in `path`, plain or gz. Raises `TraceError`, or `ValueError` for unfit options."""
    options = options or TraceOptions()
    kind = detect(path)
    if kind == "weka":
        trace = weka(path, options.block_tokens, options.seed, options.spread_h, subagents=options.subagents)
    elif kind == "qwen-bailian":
        trace = qwen(path, options.block_tokens)
    elif kind == "burstgpt":
        trace = burst(path)
    elif kind == "samovar":
        trace = recorded(path)
    else:
        trace = mooncake(path) if kind == "mooncake" else mooncake_turns(path)
    return trace if options.block_tokens is None else trace.coarser(options.block_tokens)


def detect(path: Path) -> TraceKind:
    """Return the schema, detected from the first line. Raises `TraceError` if it is unknown."""
    for number, line in lines(path):
        if not line.strip():
            continue
        if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
            names, by = frozenset(parse_object(path, number, line)), _BY_KEYS
        else:
            text = line.decode("utf-8", "replace").strip().lstrip("\ufeff")
            names = frozenset(text.replace('"', "").split(","))
            by = _BY_COLUMNS
        for kind, needed in by:
            if needed <= names:
                return kind
        raise TraceError(str(path), number, "", f"is not the beginning of a known schema: {KNOWN}")
    raise TraceError(str(path), 0, "", "the file is empty")
