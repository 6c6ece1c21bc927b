"""What other threads have ended for an engine's loop, which waits here while it has nothing to compute.

vLLM asks again and again, a millisecond apart, and each time makes an empty step: on a machine of few cores
that takes a third of what the loads it waits for could use.
"""

from __future__ import annotations

import threading

IDLE_S = 0.003
"""So long at most an engine's loop that computes nothing is held: what arrives meanwhile is not noticed."""


class IdleWait:
    """Counts what has ended. Thread-safe; one thread waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = 0
        self._seen = 0

    def ended(self) -> None:
        """Wake who waits, or have the next wait return at once."""
        with self._changed:
            self._ended += 1
            self._changed.notify()

    def wait(self) -> None:
        """Return when something has ended since the last call, after `IDLE_S` at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended != self._seen, IDLE_S)
            self._seen = self._ended
