"""Our own recordings, as `cache_tiers/recording.py` writes them.

Their rows are in the order of the turns' ends. A recording that was cut off by a kill has half a line at
its end, which is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cache_tiers.recording import SERVICE_S_MAX, RecordedRow, RecordingError, read_header, read_row
from cluster.trace import SessionChains, Tally, Trace, TraceTurn
from cluster.trace_file import Row, TraceError, in_time_order, lines, parse_object

_JITTER_S = 60.0  # rows may change places on the way to the file


def recorded(path: Path) -> Trace:
    """Raises `TraceError` where the header cannot be read."""
    block_tokens = _header(path)

    def read(tally: Tally) -> Iterator[TraceTurn]:
        chains = SessionChains()
        first_s: float | None = None
        for at_s, row in in_time_order(_rows(path, tally), SERVICE_S_MAX + _JITTER_S):
            first_s = at_s if first_s is None else first_s
            yield _turn(chains, at_s - first_s, _parsed(row, block_tokens), block_tokens)

    return Trace(path.name, "samovar", block_tokens, read)


def _header(path: Path) -> int:
    for number, line in lines(path):
        try:
            return read_header(parse_object(path, number, line))
        except RecordingError as error:
            raise TraceError(str(path), number, error.field, error.reason) from error
    raise TraceError(str(path), 0, "", "the file is empty")


def _rows(path: Path, tally: Tally) -> Iterator[tuple[float, Row]]:
    for number, line in lines(path):
        if number == 1:
            continue
        try:
            row = Row(str(path), number, parse_object(path, number, line))
        except TraceError:
            if line.endswith(b"\n"):
                raise
            tally.skipped += 1  # cut off: it can only be the last one
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


def _turn(chains: SessionChains, started_s: float, row: RecordedRow, block_tokens: int) -> TraceTurn:
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
    )
