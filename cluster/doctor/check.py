"""One check of a machine: its result, the runner that bounds its time; how checks and findings are shown."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samovar.router.observe.diagnosis import BY_NAME, Diagnosis, Finding

CheckState = Literal["ok", "warning", "error"]
"""ok; warning: it serves, less well; error: it does not start, or is not safe."""


Result = tuple[CheckState, str, str]
"""(state, what was found in numbers, what to do about it)"""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check. `says`: what was found, in numbers; `fix`: what to do about it."""

    name: str
    title: str
    state: CheckState
    says: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """A check that can be run. `run` returns (state, says, fix); it may block, and gets `s_max` seconds.

    Whatever it raises is a warning: a check must not be the reason why the others are not seen.
    """

    name: str
    title: str
    run: Callable[[], Result]
    s_max: float = 10.0


def run_checks(checks: Iterable[MachineCheck]) -> Iterator[Checked]:
    """Run one check after the other, so that none slows what another measures; yield each result."""
    for check in checks:
        yield run_check(check)


def run_check(check: MachineCheck) -> Checked:
    """Run a check in a thread of its own; what does not end in time is left there, as it cannot be ended."""
    done: queue.SimpleQueue[Result] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put(check.run())
        except Exception as error:  # noqa: BLE001 - any fault of a check is its result
            text = str(error).strip().splitlines()
            done.put(("warning", f"cannot be checked: {type(error).__name__}: {text[0] if text else ''}", ""))

    threading.Thread(target=work, name=f"check-{check.name}", daemon=True).start()
    try:
        state, says, fix = done.get(timeout=check.s_max)
    except queue.Empty:
        return Checked(check.name, check.title, "warning", f"did not end within {check.s_max:g} s", "")
    return Checked(check.name, check.title, state, says, fix)


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


MARKS = {"holds": ("✗", "bold red"), "clear": ("✓", "green"), "unknown": ("?", "yellow")}
CHECK_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "bold red")}


def diagnosis_view(found: Diagnosis, url: str, *, every: bool = False) -> RenderableType:
    """Return what is wrong and what to change; with `every`, also what is not."""
    since = "since the start" if found.period_s is None else f"in the last {found.period_s:,.3g} s"
    answers = f"{found.turns:,} answer" + "s" * (found.turns != 1)
    parts: list[RenderableType] = [Text(f"{url}: {answers} {since}"), Text("")]
    for finding in found.findings:
        if finding.state == "holds":
            parts += [*_held(finding), Text("")]
    if every:
        rest = [finding for finding in found.findings if finding.state != "holds"]
        parts += [_others(rest), Text("")]
    parts.append(_summary(found, every=every))
    return Group(*parts)


def _held(finding: Finding) -> list[RenderableType]:
    mark, style = MARKS[finding.state]
    of = f" ({finding.cause})" if finding.cause else ""
    parts: list[RenderableType] = [
        Text.assemble((f"{mark} {BY_NAME[finding.condition].title}", style), (of, "dim")),
        Padding(Text(_begun(finding.evidence)), (0, 0, 0, 4)),
    ]
    changes = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    changes.add_column(width=1)
    changes.add_column(overflow="fold")
    for change in finding.changes:
        what, brings = str(change).removesuffix(change.brings), change.brings
        changes.add_row("→", Text.assemble((what.rstrip(" .") + ".", "bold"), f" {_begun(brings)}"))
    parts.append(Padding(changes, (0, 0, 0, 4)))
    return parts


def _begun(text: str) -> str:
    """Return a clause as a sentence."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _others(findings: Sequence[Finding]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold", style="dim")
    for finding in findings:
        mark, style = MARKS[finding.state]
        table.add_row(Text(mark, style), finding.condition, Text(_begun(finding.evidence)))
    return table


def _summary(found: Diagnosis, *, every: bool) -> Text:
    held, unknown = len(found.holding), sum(one.state == "unknown" for one in found.findings)
    text = (
        f"{held} of {len(found.findings)} conditions hold{'s' * (held == 1)}" if held else "Nothing is wrong"
    )
    text += f": none of {len(found.findings)} conditions holds" if not held and not unknown else ""
    text += f", {unknown} cannot be judged yet" if unknown else ""
    text += (
        "" if every else "; --all shows the numbers behind each" if not held else "; --all shows the others"
    )
    return Text(text + ".", style="bold" if held else "green")


def doctor_view(checks: Sequence[Checked]) -> RenderableType:
    """Return the table of checks, each with what to do about it, and the summary."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold", ratio=1)
    for one in checks:
        word, style = CHECK_MARKS[one.state]
        says = Text(one.says)
        if one.fix:
            says.append(f"\n→ {one.fix}", style="default" if one.state == "ok" else "bold")
        table.add_row(Text(word, style), one.title, says)
    errors, warnings = (sum(one.state == state for one in checks) for state in ("error", "warning"))
    words = [f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((errors, "error"), (warnings, "warning")) if n]
    total = f"{len(checks)} checks: " + (", ".join(words) if words else "all is well")
    style = "bold red" if errors else "yellow" if warnings else "green"
    return Group(table, Text(""), Text(total + ".", style=style))
