"""The one clock of the tests."""

from __future__ import annotations


class Clock:
    """Seconds that pass when a test moves `now_s`; forward, or back as a wall clock may."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
