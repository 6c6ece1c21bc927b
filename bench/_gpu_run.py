"""One run of `bench.gpu`: sections within a time limit, rows with bars, the document and the table.

A section that begins after the limit is skipped; one that raises is a failed row, and the rest goes on. The
document is written after every section, so that a run that is cut off leaves what it has.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from samovar.configs.atomic_file import atomic_write

logger = logging.getLogger(__name__)

COLUMNS = ("name", "shape", "value", "unit", "bar", "ok")
VALUE = COLUMNS.index("value")


@dataclass(frozen=True, slots=True)
class Bar:
    """What a value must reach. `is_speed`: it is about the machine: tiny shapes are not judged."""

    relation: Literal[">=", "<="]
    limit: float
    is_speed: bool = True

    def holds(self, value: float) -> bool:
        """Return whether `value` reaches the bar; NaN never does."""
        return value >= self.limit if self.relation == ">=" else value <= self.limit

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


def at_least(limit: float) -> Bar:
    return Bar(">=", limit)


def at_most(limit: float) -> Bar:
    return Bar("<=", limit)


def must_be(relation: Literal[">=", "<="], limit: float) -> Bar:
    """Return a bar of correctness, which holds for every shape on every device."""
    return Bar(relation, limit, is_speed=False)


@dataclass(slots=True)
class Rows:
    """The rows measured so far. `judges_speed`: False for tiny shapes, whose speed says nothing."""

    judges_speed: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, shape: str, value: float | None, unit: str, bar: Bar | None = None) -> None:
        """Add one row. `value` None: it cannot be told here, and is not judged."""
        is_judged = value is not None and bar is not None and (self.judges_speed or not bar.is_speed)
        ok = bar.holds(value) if is_judged and bar is not None and value is not None else None
        number = None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
        self._append(name, shape, number, unit, "" if bar is None else str(bar), ok)

    def note(self, name: str, why: str, *, ok: bool | None) -> None:
        """Add the row of a section that has no value; `why` stands in the place of the bar."""
        self._append(name, "", None, "", why, ok)

    def _append(self, *cells: Any) -> None:
        self.rows.append(dict(zip(COLUMNS, cells, strict=True)))

    @property
    def are_good(self) -> bool:
        return all(row["ok"] is not False for row in self.rows)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run by itself. `run` adds its rows, and may raise anything."""

    name: str
    run: Callable[[], None]


class GpuRun:
    """Runs sections one after the other and keeps the document up to date.

    `settle` is called after each section: it frees what the section left, and raises if the device cannot be
    used any more (a CUDA error ends its context); what follows then fails without being begun. `begun_s`:
    what the process has taken before this.
    """

    def __init__(
        self,
        rows: Rows,
        out: Path,
        facts: Mapping[str, Any],
        *,
        limit_s: float,
        settle: Callable[[], None],
        screen: TextIO,
        begun_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = rows
        self._out = out
        self._facts = dict(facts)
        self._limit_s = limit_s
        self._settle = settle
        self._screen = screen
        self._clock = clock
        self._started_s = clock() - begun_s
        self._errors: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._running = ""
        self._lost = ""
        self._ended = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def run(self, sections: Sequence[Section]) -> None:
        """Run what there is time for."""
        for section in sections:
            if self.elapsed_s >= self._limit_s:
                self.rows.note(section.name, f"skipped: {self._limit_s:.0f} s are over", ok=None)
            elif self._lost:
                self.rows.note(section.name, f"not run: the device was lost in {self._lost}", ok=False)
            else:
                self._run(section)
            self._write()

    def _run(self, section: Section) -> None:
        begun_s, first = self.elapsed_s, len(self.rows.rows)
        self._running = section.name
        self._say(f"[{begun_s:5.1f} s] {section.name}")
        try:
            section.run()
        except Exception as error:
            logger.exception("the section %s failed", section.name)
            self._fail(section.name, error)
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        try:
            self._settle()
        except Exception as error:
            logger.exception("the device cannot be used after the section %s", section.name)
            self._fail(f"{section.name}: after it", error)
            self._lost = section.name
        self._seconds[section.name] = round(self.elapsed_s - begun_s, 2)
        self._running = ""
        for row in self.rows.rows[first:]:
            self._say("    " + line_of(row))

    def _fail(self, name: str, error: BaseException) -> None:
        self._errors[name] = "".join(traceback.format_exception(error))
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self.rows.note(name, f"failed: {said[:160]}", ok=False)

    def cut_off(self) -> None:
        """Name the section that still runs, then write and print what there is: the process ends now."""
        self.rows.note(self._running or "run", f"cut off after {self.elapsed_s:.0f} s", ok=False)
        self.finish()

    def finish(self) -> None:
        """Write the document and print the table. Does nothing when called again."""
        if self._ended.acquire(blocking=False):
            self._write()
            self._say("\n" + table_of(self.rows.rows) + f"\nwritten: {self._out} ({self.elapsed_s:.0f} s)")

    def _write(self) -> None:
        document = {
            **self._facts,
            "rows": self.rows.rows,
            "errors": self._errors,
            "section_s": self._seconds,
            "elapsed_s": round(self.elapsed_s, 1),
        }
        self._out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self._out, (json.dumps(document, indent=1) + "\n").encode(), durable=False)

    def _say(self, text: str) -> None:
        print(text, file=self._screen, flush=True)


_VERDICTS = {True: "ok", False: "NO", None: ""}


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row as one line of text."""
    return "  ".join(cell for cell in cells_of(row) if cell)


def cells_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's cells as text; the last one is the verdict."""
    value = "" if row["value"] is None else f"{row['value']:.4g}"
    return row["name"], row["shape"], value, row["unit"], row["bar"], _VERDICTS[row["ok"]]


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table of plain text. Rows without a value are not put into columns."""
    aligned = [COLUMNS, *(cells_of(row) for row in rows if row["shape"])]
    widths = [max(len(line[column]) for line in aligned) for column in range(len(COLUMNS))]

    def text(cells: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[VALUE] = cells[VALUE].rjust(widths[VALUE])
        return "  ".join(padded).rstrip()

    return "\n".join(
        [text(COLUMNS), *(text(cells_of(row)) if row["shape"] else line_of(row) for row in rows)]
    )
