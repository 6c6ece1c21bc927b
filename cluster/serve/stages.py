"""Shows the stages of a start with their seconds, on stderr: the results alone go to stdout."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

IN_WORDS = {
    "libraries": "loading libraries (Ray, Serve)",
    "model": "reading the model",
    "digest": "hashing the weights, once a file",
    "ray": "starting Ray",
    "process": "starting the replica's process",
    "tiers": "opening the cache tiers",
    "weights": "loading the weights",
    "probe": "checking that cached answers are equal bit for bit",
    "kernels": "compiling the GPU's kernels and comparing them",
    "graphs": "recording steps as CUDA graphs",
    "memory": "registering the RAM tier with the GPU",
    "measure": "measuring this machine's speed",
    "engine": "building the engine",
    "ingress": "opening the ingress",
    "environment": "making an environment",
    "torch": "installing torch",
    "packages": "installing the engine, as it is locked",
}
NAME_COLUMNS = 12


def console_of(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console for this process's output that prints text as it is.

    Rich takes what is in brackets for markup, and `:key:` for an emoji: of `samovar[s3]` and
    `http://[fd00::5]:8000` half is lost, `[/x]` raises.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False)


class StartStages:
    """Prints a line for each stage that is over; on a terminal with a spinner for the one that lasts.

    A context manager: leaving it ends the spinner, after a failure too. One at a time, one thread.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._started_s = clock()
        self._stage = ""
        self._began_s = 0.0
        self._spinner: Status | None = None

    def __enter__(self) -> StartStages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_spinner()

    @property
    def total_s(self) -> float:
        """The seconds since the start."""
        return self._clock() - self._started_s

    def say(self, text: str | Text) -> None:
        """Print a line of its own, without markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, stage: str, *, has_own_progress: bool = False) -> None:
        """End the stage before and begin this one; nothing happens if it is the one that lasts.

        `has_own_progress`: it draws on stderr itself, so there is no spinner.
        """
        if stage == self._stage:
            return
        self.end()
        self._stage, self._began_s = stage, self._clock()
        if self.console.is_terminal and not has_own_progress:
            self._spinner = self.console.status(f"{IN_WORDS.get(stage, stage)} ...")
            self._spinner.start()

    def note(self, text: str) -> None:
        """Show on a terminal what the stage that lasts does now; without markup."""
        if self._spinner is not None:
            self._spinner.update(Text(f"{IN_WORDS.get(self._stage, self._stage)} ... {text}"))

    def end(self) -> None:
        """Print the line of the stage that lasts, if there is one."""
        self._stop_spinner()
        if self._stage:
            taken_s = self._clock() - self._began_s
            words = IN_WORDS.get(self._stage, "")
            self.say(Text.assemble(f"  {self._stage:<{NAME_COLUMNS}}{taken_s:6.1f} s  ", (words, "dim")))
            self._stage = ""

    def _stop_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
