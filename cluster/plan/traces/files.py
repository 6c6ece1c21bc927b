"""Reads the lines of a trace file, plain or gz, one at a time; any defect raises `TraceError`.

Independent of the schema. Line length and number of lines are bounded, because files are untrusted.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any, cast

from samovar.configs.json_text import parse_json

LINE_BYTES_MAX = 4 << 20
LINES_MAX = 100_000_000
_GZIP = b"\x1f\x8b"
_SHOWN = 60


class TraceError(Exception):
    """A trace cannot be read: file, line (from 1; 0: the file itself), field, and reason."""

    def __init__(self, file: str, line: int, field: str, reason: str) -> None:
        super().__init__(file, line, field, reason)
        self.file = file
        self.line = line
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{place}, field {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


class Row:
    """Holds one line's fields by name, with checked access. The getters raise `TraceError`.

    By hand, not by pydantic: values are JSON or CSV text, and most of a trace's reading is `number` and
    `whole`; a `TypeAdapter` takes 0.25 us where `float` takes 0.05, and needs as many lines.
    """

    __slots__ = ("file", "line", "values")

    def __init__(self, file: str, line: int, values: dict[str, Any]) -> None:
        self.file = file
        self.line = line
        self.values = values

    def error(self, field: str, reason: str) -> TraceError:
        return TraceError(self.file, self.line, field, reason)

    def get(self, field: str) -> Any:
        """Return a field's raw value. Raises `TraceError` if it is missing."""
        try:
            return self.values[field]
        except KeyError:
            raise self.error(field, "is missing") from None

    def text(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str):
            raise self.error(field, f"{_shown(value)} is not text")
        return value

    def number(self, field: str, *, least: float = -math.inf) -> float:
        """Return a finite number, from a JSON number or CSV text."""
        value = self.get(field)
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise self.error(field, f"{_shown(value)} is not a number")
        if found < least:
            raise self.error(field, f"{_shown(value)} is less than {least:g}")
        return found

    def whole(self, field: str, *, least: int = 0) -> int:
        """Return a whole number, at most 2^53 (what a JSON number can hold)."""
        value = self.get(field)
        if type(value) is not int:
            found = self.number(field)
            if found != int(found):
                raise self.error(field, f"{_shown(value)} is not a whole number")
            value = int(found)
        if not least <= value <= 1 << 53:
            raise self.error(field, f"{_shown(value)} is not between {least} and 2^53")
        return int(value)

    def optional(self, field: str, *, least: float = -math.inf) -> float | None:
        """Return a number; None if the CSV field is empty."""
        return None if self.get(field) in ("", None) else self.number(field, least=least)

    def ids(self, field: str) -> tuple[int, ...]:
        """Return a list of block ids."""
        value = self.get(field)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.error(field, f"{_shown(value)} is not a list of whole numbers")
        return tuple(value)


def json_rows(path: Path) -> Iterator[Row]:
    """Yield one row per line with a JSON object; empty lines are skipped."""
    for number, line in lines(path):
        if line.strip():
            yield Row(str(path), number, parse_object(path, number, line))


def csv_rows(path: Path, *, needed: frozenset[str]) -> Iterator[Row]:
    """Yield rows by the names in the first line. A quoted value ends on its line."""
    names: list[str] = []
    for number, line in lines(path):
        text = _text(path, number, line).strip()
        if not text:
            continue
        try:
            values = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise TraceError(str(path), number, "", f"is not CSV ({error})") from error
        if not names:
            names = values
            if missing := sorted(needed - set(names)):
                raise TraceError(str(path), number, missing[0], "this column is missing")
            continue
        if len(values) != len(names):
            raise TraceError(
                str(path), number, "", f"{len(values)} values for the {len(names)} columns of the first line"
            )
        yield Row(str(path), number, dict(zip(names, values, strict=True)))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, raw line with its end). Raises `TraceError`."""
    name = str(path)
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(name, number, "", f"the line is longer than {LINE_BYTES_MAX} bytes")
                if number > LINES_MAX:
                    raise TraceError(name, number, "", f"there are more than {LINES_MAX} lines")
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(name, number + 1, "", f"the gz file is damaged or cut off ({error})") from error
    except OSError as error:
        raise TraceError(name, 0, "", error.strerror or str(error)) from error


def parse_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return a line's JSON object. Raises `TraceError` if it is none."""
    try:
        value = parse_json(_text(path, number, line))
    except ValueError as error:
        raise TraceError(str(path), number, "", f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise TraceError(str(path), number, "", f"is a JSON {type(value).__name__}, not an object")
    return value


def in_time_order(rows: Iterator[tuple[float, Row]], slack_s: float) -> Iterator[tuple[float, Row]]:
    """Yield rows in time order, equal times in file order.

    Raises `TraceError` if a row is more than `slack_s` late.
    """
    heap: list[tuple[float, int, Row]] = []
    latest_s, given_s = -math.inf, -math.inf
    for count, (at_s, row) in enumerate(rows):
        latest_s = max(latest_s, at_s)
        if at_s < given_s:
            raise row.error(
                "", f"is {latest_s - at_s:.0f} s earlier than a line before it: sort the file by time"
            )
        heappush(heap, (at_s, count, row))
        while heap and heap[0][0] <= latest_s - slack_s:
            given_s, _, row = heappop(heap)
            yield given_s, row
    while heap:
        given_s, _, row = heappop(heap)
        yield given_s, row


def _open(path: Path) -> IO[bytes]:
    file = path.open("rb")
    beginning = file.read(2)
    file.close()
    return cast(IO[bytes], gzip.open(path, "rb")) if beginning == _GZIP else path.open("rb")


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(str(path), number, "", f"is not UTF-8 ({error.reason})") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
