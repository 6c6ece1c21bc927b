"""What a chat needs of a terminal: answers shown as Markdown while they arrive, and keys that wait unseen."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

FENCES = ("```", "~~~")


class AnswerView(Protocol):
    """Shows one answer as it arrives. `close` comes last, also after a failure."""

    def add(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """Prints an answer's text as it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_at_line_start = True

    def add(self, text: str) -> None:
        """Print more of the answer."""
        if text:
            self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            self._is_at_line_start = text.endswith("\n")

    def close(self) -> None:
        """End the last line."""
        if not self._is_at_line_start:
            self._console.print()


class MarkdownView:
    """Prints an answer as Markdown: each block once it is whole, the one that grows below them until then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._live: Live | None = None

    def add(self, text: str) -> None:
        """Show more of the answer."""
        self._rest += text
        whole = whole_blocks(self._rest)
        if whole:
            block, self._rest = self._rest[:whole], self._rest[whole:]
            self._stop()
            self._print(block)
        if self._rest.strip():
            if self._live is None:
                # Longer than the screen, a growing block is cut until it is printed.
                self._live = Live(console=self._console, transient=True, vertical_overflow="ellipsis")
                self._live.start()
            self._live.update(Markdown(self._rest))

    def close(self) -> None:
        """Print what is left."""
        self._stop()
        if self._rest.strip():
            self._print(self._rest, is_last=True)
        self._rest = ""

    def _print(self, block: str, *, is_last: bool = False) -> None:
        if block.strip():
            self._console.print(Markdown(block))
            if not is_last:
                self._console.print()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def whole_blocks(text: str) -> int:
    """Return the length of the beginning of `text` that later text cannot change: up to its last empty line.

    An empty line inside a code fence ends nothing.
    """
    whole, at, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) else fence
        elif stripped.startswith(FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n"):
            whole = at
    return whole


@contextmanager
def unseen_keys(fd: int | None = None) -> Iterator[None]:
    """Do not show keys that are typed meanwhile; they wait for the next prompt. Ctrl-C works as ever.

    `fd`: of the terminal; None: standard input. Nothing happens where it is no terminal.
    """
    try:
        number = sys.stdin.fileno() if fd is None else fd
        before = termios.tcgetattr(number)
    except (OSError, ValueError, AttributeError, termios.error):  # no terminal
        yield
        return
    quiet = termios.tcgetattr(number)
    # Without canonical mode too: an editing key would be left of it in the terminal's own line.
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)
