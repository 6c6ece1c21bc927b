"""One check of a machine: its result, and the runner that bounds its time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CheckState = Literal["ok", "warning", "error"]
"""ok; warning: it serves, less well; error: it does not start, or is not safe."""


Result = tuple[CheckState, str, str]
"""(state, what was found in numbers, what to do about it)"""
"""Where our packages lie."""


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
