"""When kept answers are swept: as soon as the first of them is due. Pure, but for the given timer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from samovar.replicas.answers.answer_log import AnswerLogs


class Timer(Protocol):
    """What `call_later` of an event loop returns."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class SweepTimer:
    """Sweeps kept answers in time. `call_later`: of an event loop; `clock`: seconds, as the answers have it.

    An answer that is due before all others moves the timer forward.
    """

    def __init__(self, kept: AnswerLogs, call_later: CallLater, clock: Callable[[], float]) -> None:
        self._kept = kept
        self._call_later = call_later
        self._clock = clock
        self._timer: Timer | None = None
        self._at_s = 0.0

    def set(self) -> None:
        """Set the timer again; call it when an answer has ended or its last reader has left."""
        due_in_s = self._kept.due_in_s
        if due_in_s is None:
            return
        at_s = self._clock() + due_in_s
        if self._timer is not None:
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._call_later(due_in_s, self._sweep)

    def stop(self) -> None:
        """Sweep no more by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        self._kept.sweep()
        self.set()
