"""The predictor, in a thread of its own: fed through a bounded queue, so that nobody waits while it learns.

Whatever goes wrong in it is logged and counted, and costs forecasts, never a request: a predictor that
raises is replaced by a new one, and one that keeps raising is switched off. Knows no tiers and no sessions'
blocks; where its file lies it is told.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cache_tiers.survival import Curves
from cache_tiers.turns import Hint, SessionKey, Turn

logger = logging.getLogger("samovar.tiers")

NO_FILE = "no file"
CHECK_S_MAX = 1.0
FAILURES_MAX = 8
"""So many in a row, and it is off until the next start."""


class Forecasts(Protocol):
    """`predictor.Predictor`, or `kaplan_meier.TypeKm`."""

    def arrived(self, session: SessionKey, at_s: float) -> None: ...

    def ended(self, turn: Turn) -> Curves: ...

    def hint(self, hint: Hint) -> Curves | None: ...

    def forget(self, session: SessionKey) -> None: ...

    def check_integrity(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PredictorFile:
    """How what was learned is kept. `restore`: into a new predictor; None, or why not. `save`: may raise."""

    restore: Callable[[Forecasts], str | None]
    save: Callable[[Forecasts], None]
    save_s: float


Answer = Future[Curves | None]
Task = Callable[[Forecasts], Curves | None]


class TurnLearner:
    """`make`: a new predictor. `clock`: seconds, for saving. Without `start`, `work` does all that waits."""

    def __init__(
        self,
        make: Callable[[], Forecasts],
        *,
        queue_max: int,
        clock: Callable[[], float],
        file: PredictorFile | None = None,
    ) -> None:
        self._make = make
        self._queue_max = queue_max
        self._clock = clock
        self._file = file
        self._predictor: Forecasts | None = None
        self._tasks: deque[tuple[Task, Answer | None]] = deque()
        self._wake = threading.Condition()
        self._working = threading.Lock()  # one thread at a time has the predictor
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._failed_in_a_row = 0
        self._saved_s = clock()
        self._is_saved = True
        self.turns = 0
        self.dropped = 0
        self.failures = 0
        self.saves = 0
        self.restored = ""
        self.off = ""

    @property
    def predictor(self) -> Forecasts | None:
        """To be looked at, not to be called. None: not begun, or off."""
        return self._predictor

    def start(self) -> None:
        """Begin to learn in a thread."""
        self._thread = threading.Thread(target=self._run, name="tiers-returns", daemon=True)
        self._thread.start()
        self._put(_nothing, None)  # have the file read

    def arrived(self, session: SessionKey, at_s: float) -> None:
        """A turn of the session begins. At once; dropped when too many wait."""
        self._put(lambda predictor: predictor.arrived(session, at_s), None)

    def forget(self, session: SessionKey) -> None:
        self._put(lambda predictor: predictor.forget(session), None)

    def ended(self, turn: Turn, wait_s: float) -> Curves | None:
        """Its forecast; None: there is none, or not in time."""
        curve = self._ask(lambda predictor: predictor.ended(turn), wait_s)
        return curve

    def hint(self, hint: Hint, wait_s: float) -> Curves | None:
        """As `ended`; None also for a session that is not known."""
        return self._ask(lambda predictor: predictor.hint(hint), wait_s)

    def work(self) -> None:
        """Do all that waits, in this thread; save, if it is time."""
        with self._working:
            while True:
                with self._wake:
                    if not self._tasks:
                        break
                    task, answer = self._tasks.popleft()
                curve = self._do(task)
                if answer is not None:
                    answer.set_result(curve)
            if self._till_save_s() == 0.0:
                self._save()

    def close(self, wait_s: float) -> None:
        """Learn what waits, and save."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                logger.warning("the predictor is stuck: what it learned last is not saved")
                return
        self.work()
        with self._working:
            self._save()

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong. A predictor that is stuck is not looked into."""
        with self._wake:
            assert len(self._tasks) <= self._queue_max, "too many turns wait"
        if self._working.acquire(timeout=CHECK_S_MAX):
            try:
                if self._predictor is not None:
                    self._predictor.check_integrity()
            finally:
                self._working.release()

    def _put(self, task: Task | Callable[[Forecasts], None], answer: Answer | None) -> bool:
        with self._wake:
            if self._is_stopped or self.off or len(self._tasks) >= self._queue_max:
                self.dropped += 1
                return False
            self._tasks.append((task, answer))
            self._wake.notify()
            return True

    def _ask(self, task: Task, wait_s: float) -> Curves | None:
        answer: Answer = Future()
        if not self._put(task, answer):
            return None
        if self._thread is None:
            self.work()
        try:
            return answer.result(wait_s)
        except TimeoutError:
            logger.info("no forecast within %g s", wait_s)
            return None

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._tasks or self._is_stopped, self._till_save_s())
                if self._is_stopped:
                    return
            self.work()

    def _till_save_s(self) -> float | None:
        if self._file is None or self._is_saved:
            return None
        return max(0.0, self._saved_s + self._file.save_s - self._clock())

    def _do(self, task: Task) -> Curves | None:
        if self.off:
            return None
        try:
            if self._predictor is None:
                self._predictor = self._begin()
            curve = task(self._predictor)
        except Exception:  # whatever it is, it must not cost more than a forecast
            logger.exception("the predictor failed, it starts anew")
            self.failures += 1
            self._failed_in_a_row += 1
            self._predictor = None
            if self._failed_in_a_row >= FAILURES_MAX:
                self.off = f"failed {FAILURES_MAX} times in a row"
                logger.error("the predictor is off until the next start")
            return None
        self._failed_in_a_row = 0
        self._is_saved = False
        self.turns += curve is not None
        return curve

    def _begin(self) -> Forecasts:
        predictor = self._make()
        if self._file is None or self.restored:  # once: what is in the file may be what makes it fail
            return predictor
        self.restored = "rejected"
        reason = self._file.restore(predictor)
        self.restored = reason or "restored"
        if reason not in (None, NO_FILE):
            logger.warning("the predictor's file is not used, it starts cold: %s", reason)
            self.failures += 1
        return predictor

    def _save(self) -> None:
        self._saved_s, self._is_saved = self._clock(), True
        if self._file is None or self._predictor is None:
            return
        try:
            self._file.save(self._predictor)
        except Exception:  # as above; the next time may go better
            logger.exception("what the predictor has learned could not be saved")
            self._is_saved = False
            self.failures += 1
            return
        self.saves += 1


def _nothing(predictor: Forecasts) -> None:
    """There is nothing to learn."""
