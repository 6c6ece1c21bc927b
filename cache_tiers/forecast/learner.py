"""The predictor in its own thread, fed through a bounded queue, so that no caller waits while it learns.

A failure in it is logged and counted, and costs forecasts, never a request: a predictor that raises is
replaced by a new one, and one that keeps raising is switched off.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from samovar.cache_tiers.blocks import BadRecord, TierError
from samovar.cache_tiers.forecast.predictor import JUDGED_MIN, Predictor, State, with_later_bins
from samovar.cache_tiers.forecast.turns import EDGES_S, Curves, Forecast, Hint, Opening, SessionKey, Turn
from samovar.cache_tiers.media import Deadline, Syscalls, files
from samovar.configs.atomic_file import DRAFT, atomic_write

logger = logging.getLogger(__name__)

NO_FILE = "no file"
CHECK_S_MAX = 1.0
FAILURES_MAX = 8
"""After this many failures in a row the predictor is off until the next start."""


class Forecaster(Protocol):
    """Interface of `predictor.Predictor` and `kaplan_meier.TypeKm`."""

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None: ...

    def ended(self, turn: Turn) -> Curves: ...

    def others(self, session: SessionKey, at_s: float) -> tuple[tuple[SessionKey, Curves], ...]: ...

    @property
    def left_share(self) -> float | None: ...

    def hint(self, hint: Hint) -> Curves | None: ...

    def forget(self, session: SessionKey) -> None: ...

    def check_integrity(self) -> None: ...


def forecast(forecaster: Forecaster, turn: Turn) -> Forecast:
    """Record a finished turn; return all that follows from it."""
    curve = forecaster.ended(turn)
    return Forecast(curve, forecaster.others(turn.session, turn.ended_s), forecaster.left_share)


@dataclass(frozen=True, slots=True)
class PredictorFile:
    """Persistence callbacks. `restore`: into a new predictor; None, or why not. `save`: may raise."""

    restore: Callable[[Forecaster], str | None]
    save: Callable[[Forecaster], None]
    save_s: float


Answer = Future[Forecast | None]
Task = Callable[[Forecaster], Forecast | None]


class TurnLearner:
    """Runs a predictor in a thread, fed by a bounded queue; without `start`, `work` does all that waits.

    `make`: returns a new predictor. `clock`: seconds, for saving.
    """

    def __init__(
        self,
        make: Callable[[], Forecaster],
        *,
        queue_max: int,
        clock: Callable[[], float],
        file: PredictorFile | None = None,
    ) -> None:
        self._make = make
        self._queue_max = queue_max
        self._clock = clock
        self._file = file
        self._predictor: Forecaster | None = None
        self._tasks: deque[tuple[Task, Answer | None]] = deque()
        self._wake = threading.Condition()
        self._working = threading.Lock()  # held by the one thread that uses the predictor
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
    def predictor(self) -> Forecaster | None:
        """The predictor, to inspect, not to call. None: not started, or off."""
        return self._predictor

    def start(self) -> None:
        """Start the learner thread."""
        self._thread = threading.Thread(target=self._run, name="tiers-returns", daemon=True)
        self._thread.start()
        self._put(_nothing, None)  # makes the thread read the file

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
        """Queue that a turn of the session begins. Does not block; dropped when the queue is full."""
        self._put(lambda predictor: predictor.arrived(session, at_s, opening), None)

    def forget(self, session: SessionKey) -> None:
        self._put(lambda predictor: predictor.forget(session), None)

    def ended(self, turn: Turn, wait_s: float) -> Forecast | None:
        """Learn a turn and return its forecast; None: there is none, or not within `wait_s`."""
        return self._ask(lambda predictor: forecast(predictor, turn), wait_s)

    def hint(self, hint: Hint, wait_s: float) -> Curves | None:
        """Apply a hint and return its forecast as `ended` does; None also for an unknown session."""

        def apply(predictor: Forecaster) -> Forecast | None:
            curve = predictor.hint(hint)
            return None if curve is None else Forecast(curve)

        told = self._ask(apply, wait_s)
        return None if told is None else told.curve

    def history(self, session: SessionKey, now_s: float) -> bytes:
        """Return `Predictor.history`, at once, from any thread."""
        predictor = self._predictor
        return predictor.history(session, now_s) if isinstance(predictor, Predictor) else b""

    def moved_here(self, session: SessionKey, history: bytes, now_s: float) -> None:
        """Queue `Predictor.moved_here`."""

        def apply(predictor: Forecaster) -> None:
            if isinstance(predictor, Predictor):
                predictor.moved_here(session, history, now_s)

        self._put(apply, None)

    def learned(self, wait_s: float) -> bytes:
        """Return what was learned, as `encode` does, for a node that joins; empty: too little, or late."""
        found: list[bytes] = []

        def apply(predictor: Forecaster) -> None:
            if isinstance(predictor, Predictor) and not is_young(predictor):
                found.append(encode(predictor))

        self._ask(apply, wait_s)
        return found[0] if found else b""

    def start_from(self, model: bytes) -> None:
        """Queue that a young predictor goes on from a peer's `learned`; else, or if it is bad, no-op."""

        def apply(predictor: Forecaster) -> None:
            if isinstance(predictor, Predictor) and is_young(predictor):
                try:
                    predictor.restore(decode(model))
                except (BadState, ValueError) as error:
                    logger.warning("a peer's predictor is not used: %s", error)
                    return
                self.restored = "from a peer"

        self._put(apply, None)

    def work(self) -> None:
        """Do all queued tasks in this thread; save if due."""
        with self._working:
            while True:
                with self._wake:
                    if not self._tasks:
                        break
                    task, answer = self._tasks.popleft()
                told = self._do(task)
                if answer is not None:
                    answer.set_result(told)
            if self._till_save_s() == 0.0:
                self._save()

    def close(self, wait_s: float) -> None:
        """Stop the thread within `wait_s`, learn what is queued, and save."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                logger.warning("the predictor is stuck: its latest state is not saved")
                return
        self.work()
        with self._working:
            self._save()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong. A stuck predictor is not checked."""
        with self._wake:
            assert len(self._tasks) <= self._queue_max, "too many turns wait"
        if self._working.acquire(timeout=CHECK_S_MAX):
            try:
                if self._predictor is not None:
                    self._predictor.check_integrity()
            finally:
                self._working.release()

    def _put(self, task: Task | Callable[[Forecaster], None], answer: Answer | None) -> bool:
        with self._wake:
            if self._is_stopped or self.off or len(self._tasks) >= self._queue_max:
                self.dropped += 1
                return False
            self._tasks.append((task, answer))
            self._wake.notify()
            return True

    def _ask(self, task: Task | Callable[[Forecaster], None], wait_s: float) -> Forecast | None:
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

    def _do(self, task: Task) -> Forecast | None:
        if self.off:
            return None
        try:
            if self._predictor is None:
                self._predictor = self._begin()
            told = task(self._predictor)
        except Exception:  # any failure may only cost a forecast
            logger.exception("the predictor failed and starts again without data")
            self.failures += 1
            self._failed_in_a_row += 1
            self._predictor = None
            if self._failed_in_a_row >= FAILURES_MAX:
                self.off = f"failed {FAILURES_MAX} times in a row"
                logger.error("the predictor is off until the next start")
            return None
        self._failed_in_a_row = 0
        self._is_saved = False
        self.turns += told is not None
        return told

    def _begin(self) -> Forecaster:
        predictor = self._make()
        if self._file is None or self.restored:  # read once: the file may be what makes it fail
            return predictor
        reason: str | None = "rejected"
        try:
            reason = self._file.restore(predictor)
        finally:
            self.restored = reason or "restored"  # not before: who joins asks whether anything was there
        if reason not in (None, NO_FILE):
            logger.warning("the predictor's file is not used, it starts without data: %s", reason)
            self.failures += 1
        return predictor

    def _save(self) -> None:
        self._saved_s, self._is_saved = self._clock(), True
        if self._file is None or self._predictor is None:
            return
        try:
            self._file.save(self._predictor)
        except Exception:  # as above; the next save may succeed
            logger.exception("the predictor could not be saved")
            self._is_saved = False
            self.failures += 1
            return
        self.saves += 1


def is_young(predictor: Predictor) -> bool:
    """Return whether it has learned from too few turns to be worth more than a peer's."""
    return predictor.busiest.turns.added < JUDGED_MIN


def _nothing(predictor: Forecaster) -> None:
    """Learn nothing."""


# The predictor's file, written atomically and used only if all of it is valid.
#
# Holds weights, standardisation, counts, whether the model was trusted, the latest turns (each with its
# numbers of `features.py`) to go on learning from, and how often lineages were extended, by digests of the
# blocks that they began with; no session, no text. The payload is safetensors (arrays, nothing executable)
# behind a magic word, a version and a SHA-256. These are not in the safetensors' own metadata: only
# `safe_open` returns that, which takes a path and would bypass `Syscalls`, and safetensors loads changed
# numbers without complaint. If the file is rejected, the reason is reported and the predictor stays as it
# was: cold at a start.

VERSION: Final = 5
"""Of the layout and the meaning of the numbers: features, their order, kinds of turns, network shape."""
VERSION_OF_ONE_NETWORK: Final = 4
VERSION_WITHOUT_LINEAGES: Final = 3
VERSION_WITHOUT_TURNS: Final = 2
"""Still readable, as are the two above."""
READABLE: Final = (VERSION_WITHOUT_TURNS, VERSION_WITHOUT_LINEAGES, VERSION_OF_ONE_NETWORK, VERSION)

FILE_NAME: Final = "predictor.bin"
FILE_BYTES_MAX: Final = 24 * 1024 * 1024
_MAGIC: Final = b"smvrpred"
_HEADER: Final = struct.Struct("<8sIQ32s")


class BadState(Exception):
    """Not the learned state of a predictor of this version; the message says why."""


def encode(predictor: Predictor) -> bytes:
    """Return the predictor's learned state as bytes. Quick, so that another thread can do the writing."""
    state = {**predictor.state(), "edges_s": EDGES_S}
    payload = save_tensors({name: np.ascontiguousarray(array) for name, array in state.items()})
    return _HEADER.pack(_MAGIC, VERSION, len(payload), hashlib.sha256(payload).digest()) + payload


def decode(data: bytes) -> State:
    """Decode what `encode` returned, shapes and numbers unchecked. Raises `BadState`.

    Where the bins of idle time end sooner than ours, so did those of an earlier version.
    """
    if len(data) < _HEADER.size:
        raise BadState(f"truncated: {len(data)} bytes")
    magic, version, length, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BadState("another kind of file")
    if version not in READABLE:
        raise BadState(f"version {version}, ours is {VERSION}")
    payload = data[_HEADER.size :]
    if len(payload) != length:
        raise BadState(f"truncated or too long: {len(payload)} bytes, not {length}")
    if hashlib.sha256(payload).digest() != digest:
        raise BadState("the checksum is wrong")
    try:
        state: State = load_tensors(payload)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadState(f"no tensors: {error}") from error
    edges_s = state.pop("edges_s", None)
    if edges_s is None or edges_s.ndim != 1 or not np.array_equal(edges_s, EDGES_S[: len(edges_s)]):
        raise BadState("other bins of idle time")
    return with_later_bins(state, len(EDGES_S) - len(edges_s))


def save(path: Path, predictor: Predictor, calls: Syscalls | None = None) -> None:
    """Write the predictor's learned state to `path`. Raises `OSError`.

    Creates no directory: a removed one is the nvme tier's, which must notice that it is gone. Removes what
    earlier writes have left that failed, on a disk that did not remove it either.
    """
    calls = calls or Syscalls()
    with suppress(OSError):  # leftovers only take space
        _sweep(path, calls)
    atomic_write(path, encode(predictor), calls=calls)


def restore(path: Path, predictor: Predictor, calls: Syscalls | None = None) -> str | None:
    """Restore the predictor from `path`. Returns None, or why not; the predictor is then unchanged.

    For startup: removes what an interrupted write has left beside the file.
    """
    calls = calls or Syscalls()
    with suppress(OSError):  # leftovers only take space
        _sweep(path, calls)
    try:
        predictor.restore(decode(_read(path, calls)))
    except FileNotFoundError:
        return NO_FILE
    except (OSError, BadRecord, TierError) as error:
        return f"cannot be read: {error}"
    except (BadState, ValueError) as error:
        return str(error)
    return None


def _read(path: Path, calls: Syscalls) -> bytes:
    fd = files.open_old(calls, str(path), align=1)
    try:
        nbytes = calls.fstat(fd).st_size
        if nbytes > FILE_BYTES_MAX:
            raise BadState(f"too large: {nbytes} bytes")
        return files.read_range(calls, fd, 0, nbytes, align=1, deadline=Deadline(float("inf"))).tobytes()
    finally:
        calls.close(fd)


def _sweep(path: Path, calls: Syscalls) -> None:
    for name in calls.listdir(str(path.parent)):
        if name.startswith(f"{path.name}.") and name.endswith(DRAFT):
            calls.unlink(os.path.join(path.parent, name))
