"""Alibaba's usage traces of Qwen on Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon).

Source: "KVCache Cache in the Wild", USENIX ATC'25. One JSON object a request: `chat_id`, `parent_chat_id`
(-1: none), `timestamp` in s, `input_length`, `output_length`, `type`, `turn`, `hash_ids`: one of each 16
tokens. Their page says that each block is hashed by itself: ids are chained here, with digests of 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

from cluster.trace import SessionChains, Tally, Trace, TraceTurn, whole_blocks
from cluster.trace_file import Row, in_time_order, json_rows

BLOCK_TOKENS = 16
SLACK_S = 60.0
_ID = (1 << 64) - 1


def qwen(path: Path, block_tokens: int | None = None) -> Trace:
    """`block_tokens`: of 16 each. Raises `ValueError`."""
    size = whole_blocks(block_tokens, BLOCK_TOKENS)

    def read(_: Tally) -> Iterator[TraceTurn]:
        rows = ((row.number("timestamp", least=0), row) for row in json_rows(path))
        chains = SessionChains()
        sessions: dict[int, int] = {}  # of each request
        first_s: float | None = None
        for at_s, row in in_time_order(rows, SLACK_S):
            first_s = at_s if first_s is None else first_s
            session = sessions.get(row.whole("parent_chat_id", least=-1))
            if session is None:  # a first turn, or one whose parent is not in the file
                session = chains.add()
            sessions[row.whole("chat_id")] = session
            yield _turn(chains, session, at_s - first_s, row, size)

    no_stop = (
        "why answers ended is not told: all are taken for ends of a turn (stop), all prompts for a user's"
    )
    return Trace(path.name, "qwen-bailian", size, read, (no_stop,))


def _turn(chains: SessionChains, session: int, started_s: float, row: Row, block_tokens: int) -> TraceTurn:
    input_tokens, output_tokens = row.whole("input_length"), row.whole("output_length")
    blocks = _chained(row, input_tokens // block_tokens, block_tokens // BLOCK_TOKENS)
    return TraceTurn(
        session=session,
        started_s=started_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        block_tokens=block_tokens,
        kept_tokens=chains.follow(session, input_tokens, output_tokens, blocks, block_tokens),
        service_s=None,
        stop="stop",
        role="user",
        tool="",
        profile=row.text("type"),
    )


def _chained(row: Row, full: int, times: int) -> tuple[int, ...]:
    """At most `full` blocks, each of `times` of the row's."""
    ids = row.ids("hash_ids")
    if any(not 0 <= one <= _ID for one in ids):
        raise row.error("hash_ids", "an id is not between 0 and 2^64")
    blocks: list[int] = []
    before = 0
    for end in range(times, min(len(ids) // times, full) * times + 1, times):
        before = xxhash.xxh3_64_intdigest(struct.pack(f"<{times}Q", *ids[end - times : end]), seed=before)
        blocks.append(before)
    return tuple(blocks)
