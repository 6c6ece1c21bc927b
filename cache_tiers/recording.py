"""The recording of `samovar serve --record FILE`: one JSON object per turn, of lengths, times and numbers.

The first line is a header, the last one says why the recording ended and what is missing. Nothing that
users wrote can be derived from it: sessions are random numbers; blocks, tools and profiles are numbered in
order of first appearance, separately in each recording; times count from the first turn's beginning. A thread
writes the rows in order of the turns' ends: `turn` never waits.

A row's `blocks` are runs: `[first, count, first, count, ...]`; new blocks have consecutive numbers. `lineage`
numbers a session's chains of prompts in order of first appearance, and is left out where it is 0.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, SkipValidation, TypeAdapter, ValidationError

from samovar.cache_tiers.forecast import Role, SessionKey, Stop

logger = logging.getLogger(__name__)

T = TypeVar("T")
VERSION: Final = 1
SERVICE_S_MAX: Final = 3600.0
"""Longer turns are left out: a reader sorts turns by start, and keeps this time span in memory."""
BLOCKS_MAX: Final = 1 << 22
LINEAGES_MAX: Final = 1 << 20
"""A larger number of a session's lineage is not read."""
_END_BYTES = 256  # reserved for the last line


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A finished turn.

    `block_keys`: of the prompt's full blocks (more are ignored); a key commits to all before it too.
    `lineage`: its number within the session.
    """

    session: SessionKey
    started_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    kept_tokens: int
    block_keys: Sequence[bytes]
    stop: Stop = "stop"
    role: Role = "user"
    tool: str = ""
    profile: str = "chat"
    lineage: int = 0


_Whole = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A turn as stored in a recording. `tool`, `profile`: 0 = none, and chat."""

    session: _Whole
    started_s: Annotated[float, Field(strict=True, ge=-1e9, le=1e12)]
    service_s: Annotated[float, Field(strict=True, ge=0.0, le=SERVICE_S_MAX)]
    input_tokens: _Whole
    output_tokens: _Whole
    kept_tokens: _Whole
    blocks: SkipValidation[tuple[int, ...]]  # stored as runs: `_unrolled` checks them
    stop: Stop
    role: Role
    tool: _Whole
    profile: _Whole
    lineage: Annotated[int, Field(strict=True, ge=0, le=LINEAGES_MAX)] = 0


_ROW = TypeAdapter(RecordedRow)
_BLOCK_TOKENS = TypeAdapter(Annotated[int, Field(strict=True, ge=1, le=1 << 53)])


class RecordingError(Exception):
    """An invalid line: which field, and why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"field {self.field}: {self.reason}"


class Numbers:
    """Numbers for things, at most `kept_max` of them remembered: the longest unseen are dropped first.

    A dropped thing that reappears gets another number. Not thread-safe.
    """

    def __init__(self, kept_max: int, new: Callable[[], int]) -> None:
        self._half = max(1, kept_max // 2)
        self._new = new
        self._young: dict[Hashable, int] = {}
        self._old: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def of(self, thing: Hashable) -> int:
        """Return the number of a thing."""
        number = self._young.get(thing)
        if number is None:
            number = self._old.pop(thing, None)
            if number is None:
                number = self._new()
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            self._young[thing] = number
        return number

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._young) <= self._half, "too many are remembered"
        assert len(self._old) <= self._half, "too many are remembered"
        assert not self._young.keys() & self._old.keys(), "something has two numbers"


class TurnRecorder:
    """Writes turns to a new file until `bytes_max`, then says so and writes no more.

    `keys_max`: blocks (and sessions) whose numbers are remembered, some 150 bytes each; a forgotten block
    that reappears counts as a new one. `queue_max`: turns that may wait for the disk; more are left out,
    and counted. Raises `FileExistsError`, `OSError`.
    """

    def __init__(
        self,
        path: Path,
        block_tokens: int,
        bytes_max: int,
        *,
        keys_max: int = 1_000_000,
        queue_max: int = 1024,
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
        self._path = path
        self._bytes_max = bytes_max
        self._nbytes = 0
        self._rows = _RowMaker(block_tokens, keys_max)
        self._waiting: queue.Queue[RecordedTurn | None] = queue.Queue(queue_max)
        self._lock = threading.Lock()
        self._recorded = 0
        self._dropped = 0
        self._stopped: str | None = None
        self._write({"samovar_trace": VERSION, "block_tokens": block_tokens})
        self._thread = threading.Thread(target=self._run, name="turn-recorder", daemon=True)
        self._thread.start()

    @property
    def recorded(self) -> int:
        """Number of turns in the file."""
        with self._lock:
            return self._recorded

    @property
    def dropped(self) -> int:
        """Number of turns left out."""
        with self._lock:
            return self._dropped

    @property
    def stopped(self) -> str | None:
        """Why nothing more is written, else None."""
        with self._lock:
            return self._stopped

    def turn(self, turn: RecordedTurn) -> None:
        """Record a turn. Thread-safe, does not block; left out and counted if stopped or full."""
        with self._lock:
            if self._stopped is not None or not 0 <= turn.ended_s - turn.started_s <= SERVICE_S_MAX:
                self._dropped += 1
                return
            try:
                self._waiting.put_nowait(turn)
            except queue.Full:
                self._dropped += 1

    def close(self) -> None:
        """Write the queued turns and the last line. Idempotent."""
        with self._lock:
            if self._stopped is None:
                self._stopped = "closed"
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._nbytes <= self._bytes_max or not self._recorded, "the file is longer than it may be"
        self._rows.check_integrity()

    def _run(self) -> None:
        """Run the writer thread. It keeps emptying the queue when nothing more can be written."""
        while (turn := self._waiting.get()) is not None:
            try:
                self._record(turn)
            except OSError as error:
                self._stop(error.strerror or str(error))
        with self._file:
            try:
                self._write({"ended": self.stopped, "turns": self.recorded, "dropped": self.dropped})
            except OSError as error:
                logger.error("the recording %s has no last line: %s", self._path, error)

    def _record(self, turn: RecordedTurn) -> None:
        fits = False
        try:
            if self.stopped in (None, "closed"):
                fits = self._write(self._rows.row(turn), _END_BYTES)
                if not fits:
                    self._stop("bytes_max")
        finally:
            with self._lock:
                self._recorded += fits
                self._dropped += not fits

    def _write(self, values: Mapping[str, object], spare: int = 0) -> bool:
        """Write a line, whole or not at all. False: there is no room for it. Raises `OSError`."""
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        if spare and self._nbytes + len(line) + spare > self._bytes_max:
            return False
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._nbytes)
            raise
        self._nbytes += len(line)
        return True

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._stopped not in (None, "closed"):
                return
            self._stopped = reason
        logger.warning("the recording %s has ended: %s", self._path, reason)


class _RowMaker:
    """Makes the rows of turns, with numbers for everything that could reveal content."""

    def __init__(self, block_tokens: int, keys_max: int) -> None:
        self._block_tokens = block_tokens
        self._sessions = Numbers(keys_max, lambda: secrets.randbits(53))
        self._blocks = Numbers(keys_max, _counter(0))
        self._tools = Numbers(min(keys_max, 4096), _counter(1))
        self._profiles = Numbers(min(keys_max, 4096), _counter(1))
        self._first_s: float | None = None

    def row(self, turn: RecordedTurn) -> dict[str, object]:
        first_s = self._first_s = turn.started_s if self._first_s is None else self._first_s
        full = turn.input_tokens // self._block_tokens
        blocks = [self._blocks.of(bytes(key)) for key in turn.block_keys[:full]]
        return {
            "session": self._sessions.of(turn.session),
            "started_s": round(turn.started_s - first_s, 3),
            "service_s": round(max(0.0, turn.ended_s - turn.started_s), 3),
            "input_tokens": turn.input_tokens,
            "output_tokens": turn.output_tokens,
            "kept_tokens": min(turn.kept_tokens, turn.input_tokens),
            "blocks": list(runs(blocks)),
            "stop": turn.stop,
            "role": turn.role,
            "tool": self._tools.of(turn.tool) if turn.tool else 0,
            "profile": self._profiles.of(turn.profile) if turn.profile not in ("", "chat") else 0,
            **({"lineage": turn.lineage} if turn.lineage else {}),
        }

    def check_integrity(self) -> None:
        for numbers in (self._sessions, self._blocks, self._tools, self._profiles):
            numbers.check_integrity()


def runs(numbers: Sequence[int]) -> Iterator[int]:
    """Yield first and count of each run of consecutive numbers."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield numbers[start]
            yield end - start
            start = end


def read_header(values: Mapping[str, Any]) -> int:
    """Return `block_tokens` of the header. Raises `RecordingError`."""
    version = values.get("samovar_trace")
    if version != VERSION:
        raise RecordingError("samovar_trace", f"version {version!r} is not known, only {VERSION}")
    return _checked(_BLOCK_TOKENS, values.get("block_tokens"), "block_tokens")


def read_row(values: Mapping[str, Any], block_tokens: int) -> RecordedRow | None:
    """Return a turn; None for the last line. Raises `RecordingError`."""
    if "ended" in values:
        return None
    row = _checked(_ROW, values)
    if row.kept_tokens > row.input_tokens:
        raise RecordingError("kept_tokens", f"{row.kept_tokens} of {row.input_tokens} tokens of the prompt")
    return replace(row, blocks=_unrolled(row.blocks, row.input_tokens // block_tokens))


def _checked(kind: TypeAdapter[T], value: object, name: str = "") -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else name
        if first["type"] == "missing":
            raise RecordingError(field, "is missing") from None
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise RecordingError(field, f"{first['input']!r:.60}: {message}") from None


def _unrolled(value: object, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) % 2 or any(type(one) is not int for one in value):
        raise RecordingError("blocks", "is not a list of runs")
    blocks: list[int] = []
    for first, count in zip(value[::2], value[1::2], strict=True):
        if not 0 <= first <= 1 << 53 or not 1 <= count <= min(most, BLOCKS_MAX) - len(blocks):
            raise RecordingError(
                "blocks", f"the run {first}, {count} is not of a prompt of {most} full blocks"
            )
        blocks.extend(range(first, first + count))
    return tuple(blocks)


def _counter(first: int) -> Callable[[], int]:
    numbers = iter(range(first, 1 << 53))
    return lambda: next(numbers)
