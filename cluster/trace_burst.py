"""BurstGPT's requests (github.com/HPMLL/BurstGPT): a CSV of lengths and times, without block ids.

Release 1 has no session ids, release 2 has them for conversations (`Session ID`) and says how long an answer
took (`Elapsed time`). A request without a session id is a session of one turn: which of them belong together
cannot be told, and is not made up. Without an answer it has failed, and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.trace import SessionChains, Tally, Trace, TraceTurn
from cluster.trace_file import csv_rows, in_time_order

BLOCK_TOKENS = 16  # there are no blocks in the data; any size will do
SLACK_S = 600.0
COLUMNS = frozenset({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"})
PROFILES = {"Conversation log": "chat", "API log": "api"}


def burst(path: Path) -> Trace:
    """With or without the columns of release 2."""

    def read(tally: Tally) -> Iterator[TraceTurn]:
        rows = ((row.number("Timestamp"), row) for row in csv_rows(path, needed=COLUMNS))
        chains = SessionChains()
        first_s: float | None = None
        for at_s, row in in_time_order(rows, SLACK_S):
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
                block_tokens=BLOCK_TOKENS,
                kept_tokens=chains.follow_unknown(session, input_tokens, output_tokens) if key else 0,
                service_s=row.optional("Elapsed time", least=0) if "Elapsed time" in row.values else None,
                stop="stop",
                role="user",
                tool="",
                profile=PROFILES.get(log_type, log_type),
            )

    notes = (
        "requests without a session id are sessions of one turn: nothing of them can be used again",
        "block ids are not told: a prompt at least as long as its session's chain is taken to go on with it",
        "requests without an answer have failed and are left out",
    )
    return Trace(path.name, "burstgpt", BLOCK_TOKENS, read, notes)
