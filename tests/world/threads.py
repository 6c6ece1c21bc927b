"""The world's threads, locks, futures, clock and tokens: what modules of the product get for their own."""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.world.scheduler import Scheduler, Task

_now: list[Scheduler] = []
"""The scheduler of the world that runs; one at a time in a process."""

WALL_S = 1_500_000_000.0
"""Unix seconds at the beginning: before any file of today was made."""


def scheduler() -> Scheduler:
    return _now[0]


class Lock:
    """As `threading.Lock`, and with `is_mutual` `RLock`."""

    is_mutual = False

    def __init__(self) -> None:
        self.owner: Task | None = None
        self.depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        here = scheduler()
        task = here.current
        if self.is_mutual and self.owner is task:
            self.depth += 1
            return True
        here.checkpoint()
        ends_s = None if timeout < 0 else here.now_s + timeout
        while self.owner is not None and not self.owner.process.is_dead:
            if not blocking or (ends_s is not None and here.now_s >= ends_s):
                return False
            here.wait(self._waiting, None if ends_s is None else ends_s - here.now_s)
        self.owner, self.depth = task, 1
        return True

    def release(self) -> None:
        task = scheduler().current
        if self.owner is not task:
            assert task.process.is_dead, "a lock is released by who does not hold it"
            return
        self.depth -= 1
        if not self.depth:
            self.owner = None
            for other in self._waiting:
                scheduler().wake(other)

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    is_mutual = True


class Condition:
    """As `threading.Condition`; who is notified is not the first in line, but anyone."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.depth
        self._lock.depth = 1
        self._lock.release()
        is_woken = scheduler().wait(self._waiting, timeout)
        self._lock.acquire()
        self._lock.depth = depth
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        here = scheduler()
        ends_s = None if timeout is None else here.now_s + timeout
        while not (found := predicate()):
            if ends_s is not None and here.now_s >= ends_s:
                break
            self.wait(None if ends_s is None else ends_s - here.now_s)
        return found

    def notify(self, n: int = 1) -> None:
        asleep = [task for task in self._waiting if not task.is_woken]
        for task in scheduler().rng.sample(asleep, min(n, len(asleep))):
            scheduler().wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in list(self._waiting):
            scheduler().wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        here = scheduler()
        here.checkpoint()
        ends_s = None if timeout is None else here.now_s + timeout
        while not self._is_set and (ends_s is None or here.now_s < ends_s):
            here.wait(self._waiting, None if ends_s is None else ends_s - here.now_s)
        return self._is_set


class Semaphore:
    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        here = scheduler()
        here.checkpoint()
        ends_s = None if timeout is None else here.now_s + timeout
        while not self._value:
            if not blocking or (ends_s is not None and here.now_s >= ends_s):
                return False
            here.wait(self._waiting, None if ends_s is None else ends_s - here.now_s)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        for task in self._waiting:
            scheduler().wake(task)


class Thread:
    """As `threading.Thread`; it belongs to the process of who makes it."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool | None = None,
    ) -> None:
        self._run = lambda: target(*args)
        self.name = name
        self._task: Task | None = None

    def start(self) -> None:
        here = scheduler()
        self._task = here.spawn(here.current.process, self.name, self._run)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        here, task = scheduler(), self._task
        assert task is not None, "a thread is joined that never began"
        ends_s = None if timeout is None else here.now_s + timeout
        while not task.is_done and (ends_s is None or here.now_s < ends_s):
            here.wait(task.joined, None if ends_s is None else ends_s - here.now_s)


class Promise:
    """As `concurrent.futures.Future`, as far as the product uses it."""

    def __init__(self) -> None:
        self._ended = Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_begun = False
        self._callbacks: list[Callable[[Promise], object]] = []

    def done(self) -> bool:
        return self._ended.is_set()

    def set_result(self, value: Any) -> None:
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> bool:
        """As long as it has not begun; here only who closes a pool does so."""
        if self.done() or self._is_begun:
            return False
        self._end(None, CancelledError())
        return True

    def cancelled(self) -> bool:
        return isinstance(self._error, CancelledError) and not self._is_begun

    def set_running_or_notify_cancel(self) -> bool:
        self._is_begun = not self.cancelled()
        return self._is_begun

    def add_done_callback(self, call: Callable[[Promise], object]) -> None:
        if self.done():
            call(self)
        else:
            self._callbacks.append(call)

    def _end(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._ended.set()
        for call in self._callbacks:
            call(self)


class Pool:
    """As `concurrent.futures.ThreadPoolExecutor`; what begins is never more than its owner hands out."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._name = thread_name_prefix

    def submit(self, work: Callable[..., Any], *args: Any) -> None:
        Thread(work, args, self._name).start()

    def shutdown(self, wait: bool = True) -> None:
        """There is nothing to stop: a thread ends with its work."""


class Local:
    """As `threading.local`: of a virtual thread."""

    def __getattr__(self, name: str) -> Any:
        try:
            return scheduler().current.local[self, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        scheduler().current.local[self, name] = value


THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    Thread=Thread,
    local=Local,
    TIMEOUT_MAX=threading.TIMEOUT_MAX,
)
TIME = SimpleNamespace(
    monotonic=lambda: scheduler().now_s,
    perf_counter=lambda: scheduler().now_s,
    time=lambda: WALL_S + scheduler().now_s,
    sleep=lambda seconds: scheduler().sleep(seconds),
)
PREFIXES = (
    "samovar.cache_tiers.",
    "samovar.cluster.serve.rollout",
    "samovar.configs.atomic_file",
    "samovar.replicas.turns.",
)


@contextmanager
def inhabited(here: Scheduler, seed: int) -> Iterator[None]:
    """Give the product's modules the world's threads, clock and tokens while a world runs."""
    tokens = random.Random(f"tokens {seed}")
    own_secrets = SimpleNamespace(
        token_hex=lambda nbytes: tokens.randbytes(nbytes).hex(), token_bytes=tokens.randbytes
    )
    given: dict[str, tuple[object, object]] = {
        "threading": (threading, THREADING),
        "time": (time, TIME),
        "secrets": (secrets, own_secrets),
        "Future": (Future, Promise),
        "ThreadPoolExecutor": (ThreadPoolExecutor, Pool),
    }
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(PREFIXES)]
    undo: list[tuple[object, str, object]] = []
    for module in modules:
        for name, (theirs, ours) in given.items():
            if getattr(module, name, None) is theirs:
                undo.append((module, name, theirs))
                setattr(module, name, ours)
        for made in [one for one in vars(module).values() if isinstance(one, type)]:
            begin = vars(made).get("__init__")
            defaults = getattr(begin, "__defaults__", None)
            if defaults and time.monotonic in defaults:  # bound when the class was made
                undo.append((begin, "__defaults__", defaults))
                virtual = tuple(TIME.monotonic if one is time.monotonic else one for one in defaults)
                begin.__defaults__ = virtual  # type: ignore[union-attr]
    _now.append(here)
    try:
        yield
    finally:
        _now.clear()
        for of, name, before in undo:
            setattr(of, name, before)
