"""Waits for signals so that none is lost, whichever thread the kernel hands it to.

Python runs its handlers in the main thread only, between two bytecodes. A signal that another thread takes
(Ray has dozens, C++'s) leaves a main thread that waits for a lock asleep: `queue.get()` stood for minutes
beside a SIGINT that had come. Here the part of the handler that is C's writes the signal's number to a pipe,
in whichever thread, and the main thread reads the pipe.

Knows nothing of what the signals mean.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType


class Signals:
    """Notes `numbers` from `with` to its end. For the main thread, as all of `signal` is.

    Their handlers are not put back at the end: who goes on decides what a signal means then.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = frozenset(int(number) for number in numbers)
        self._reader = self._writer = self._before = -1

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # a full pipe (65,536 signals that nobody has read) loses more
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, _nothing)
        return self

    def wait(self) -> int:
        """The next one, in the order they came; blocks until there is one."""
        while (number := os.read(self._reader, 1)[0]) not in self._numbers:
            pass  # somebody else's handler shares the pipe
        return number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        os.close(self._reader)


def interrupt_on_signals() -> None:
    """SIGINT and SIGTERM raise `KeyboardInterrupt` from here on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Without a handler of Python's, C's part would not write to the pipe."""
