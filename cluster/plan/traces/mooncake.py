"""Reads Mooncake's published requests, and the turns derived from them.

Source: "Mooncake: Trading More Storage for Less Computation", FAST'25. One JSON object per line: `timestamp`
in ms, `input_length`, `output_length`, `hash_ids`: one for each block of 512 tokens, the last partial one
included, chained with all before it. Sessions are not in the data: see `_Owners`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from samovar.cluster.plan.traces.files import csv_rows, in_time_order, json_rows
from samovar.cluster.plan.traces.trace import NO_STOP, ReadTally, SessionChains, Trace, TraceTurn

BLOCK_TOKENS = 512
SLACK_S = 60.0

TURN_COLUMNS = frozenset(
    {"session", "turn", "t_s", "input_tokens", "output_tokens", "shared_depth_blocks512", "idle_after_s"}
)


def mooncake(path: Path) -> Trace:
    """Return the trace of the requests, with reconstructed sessions."""

    def read(_: ReadTally) -> Iterator[TraceTurn]:
        rows = ((row.number("timestamp", least=0) / 1000.0, row) for row in json_rows(path))
        sessions, owners = SessionChains(), _Owners()
        first_s: float | None = None
        for at_s, row in in_time_order(rows, SLACK_S):
            first_s = at_s if first_s is None else first_s
            input_tokens = row.whole("input_length")
            ids = row.ids("hash_ids")
            full = input_tokens // BLOCK_TOKENS
            if not full <= len(ids) <= full + 1:
                raise row.error(
                    "hash_ids", f"{len(ids)} blocks of {BLOCK_TOKENS} are not {input_tokens} tokens"
                )
            session = owners.find(ids)
            if session is None:
                session = sessions.add()
            owners.owns(session, ids)
            output_tokens = row.whole("output_length")
            yield sessions.turn(
                session, at_s - first_s, input_tokens, output_tokens, ids[:full], block_tokens=BLOCK_TOKENS
            )

    rebuilt = "sessions are rebuilt: a request that continues a prompt's blocks belongs to its session"
    return Trace(path.name, "mooncake", BLOCK_TOKENS, read, (rebuilt, NO_STOP))


def mooncake_turns(path: Path) -> Trace:
    """Return the trace of the derived table: sessions, and blocks shared with the session's last prompt."""

    def read(_: ReadTally) -> Iterator[TraceTurn]:
        rows = ((row.number("t_s", least=0), row) for row in csv_rows(path, needed=TURN_COLUMNS))
        sessions = SessionChains()
        ids_given = 0
        first_s: float | None = None
        for at_s, row in in_time_order(rows, SLACK_S):
            first_s = at_s if first_s is None else first_s
            session = sessions.number(row.text("session"))
            input_tokens = row.whole("input_tokens")
            full = input_tokens // BLOCK_TOKENS
            shared = min(row.whole("shared_depth_blocks512"), full)
            kept = sessions.last_blocks(session)[:shared]
            blocks = kept + tuple(range(ids_given, ids_given + full - len(kept)))
            ids_given += full - len(kept)
            output_tokens = row.whole("output_tokens")
            yield sessions.turn(
                session, at_s - first_s, input_tokens, output_tokens, blocks, block_tokens=BLOCK_TOKENS
            )

    alone = "blocks that sessions share (system prompts) are not recorded: none are shared"
    return Trace(path.name, "mooncake-turns", BLOCK_TOKENS, read, (alone, NO_STOP))


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
