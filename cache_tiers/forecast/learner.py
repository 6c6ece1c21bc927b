"""The predictor, in a thread of its own: fed through a bounded queue, so that nobody waits while it learns.

Whatever goes wrong in it is logged and counted, and costs forecasts, never a request: a predictor that
raises is replaced by a new one, and one that keeps raising is switched off. Knows no tiers and no sessions'
blocks; where its file lies it is told.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
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

from cache_tiers.blocks import BadRecord, TierError
from cache_tiers.forecast.predictor import Predictor, State
from cache_tiers.forecast.survival import EDGES_S, Curves
from cache_tiers.forecast.turns import Hint, SessionKey, Turn
from cache_tiers.media import Deadline, Syscalls, files

logger = logging.getLogger(__name__)

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


# What the predictor has learned, in a file: written whole or not at all, believed only if all of it is sane.
#
# Weights, standardisation, counts, whether the model was trusted, and the latest turns (`features.py`'s
# numbers of each) that it goes on learning from; no session, no text. The payload is safetensors (arrays,
# nothing that could run) behind a magic word, a version and a SHA-256. Of a file that is not believed the
# reason is told, and the predictor stays as it was: cold at a start.

VERSION: Final = 3
"""Of the layout and of what the numbers mean: features, their order, kinds of turns, the network's shape."""
VERSION_WITHOUT_TURNS: Final = 2
"""It is still read."""

FILE_NAME: Final = "predictor.bin"
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_MAGIC: Final = b"smvrpred"
_HEADER: Final = struct.Struct("<8sIQ32s")
_TEMPORARY: Final = ".tmp"


class BadState(Exception):
    """Not what a predictor of this version has learned; says why."""


def encode(predictor: Predictor) -> bytes:
    """What it has learned. Quick: the writing may then be another thread's."""
    state = {**predictor.state(), "edges_s": EDGES_S}
    payload = save_tensors({name: np.ascontiguousarray(array) for name, array in state.items()})
    return _HEADER.pack(_MAGIC, VERSION, len(payload), hashlib.sha256(payload).digest()) + payload


def decode(data: bytes) -> State:
    """What `encode` was given, shapes and numbers unchecked. Raises `BadState`."""
    if len(data) < _HEADER.size:
        raise BadState(f"truncated: {len(data)} bytes")
    magic, version, length, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BadState("another kind of file")
    if version not in (VERSION, VERSION_WITHOUT_TURNS):
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
    if edges_s is None or not np.array_equal(edges_s, EDGES_S):
        raise BadState("other bins of idle time")
    return state


def write(path: Path, data: bytes, calls: Syscalls | None = None) -> None:
    """Puts `data` at `path`; a crash at any point leaves the old file or the new one. Raises `OSError`.

    Makes no directory: one that was removed is the nvme tier's, which is to notice that it is gone.
    """
    calls = calls or Syscalls()
    temporary = f"{path}.{secrets.token_hex(4)}{_TEMPORARY}"
    deadline = Deadline(calls, float("inf"))
    try:
        fd = files.open_new(calls, temporary, align=1)
        try:
            files.write_all(calls, fd, np.frombuffer(data, dtype=np.uint8), align=1, deadline=deadline)
            calls.fsync(fd)
        finally:
            calls.close(fd)
        calls.rename(temporary, str(path))
    except BaseException:
        with suppress(OSError):
            calls.unlink(temporary)
        raise
    files.sync_dir(calls, str(path.parent))


def save(path: Path, predictor: Predictor, calls: Syscalls | None = None) -> None:
    """`encode` and `write`. Raises `OSError`."""
    write(path, encode(predictor), calls)


def restore(path: Path, predictor: Predictor, calls: Syscalls | None = None) -> str | None:
    """None: it goes on with what the file says. Else why not; the predictor is then unchanged.

    For a start: what a write that was cut off has left beside the file is removed.
    """
    calls = calls or Syscalls()
    with suppress(OSError):  # it only takes room
        _sweep(path, calls)
    try:
        predictor.restore(decode(_read(path, calls)))
    except FileNotFoundError:
        return "no file"
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
        return files.read_range(
            calls, fd, 0, nbytes, align=1, deadline=Deadline(calls, float("inf"))
        ).tobytes()
    finally:
        calls.close(fd)


def _sweep(path: Path, calls: Syscalls) -> None:
    for name in calls.listdir(str(path.parent)):
        if name.startswith(f"{path.name}.") and name.endswith(_TEMPORARY):
            calls.unlink(os.path.join(path.parent, name))
