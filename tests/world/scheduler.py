"""One seeded scheduler: real threads that hand on a baton, a clock that moves when all of them wait."""

from __future__ import annotations

import _thread
import hashlib
import heapq
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.world.laws import LAWS

STEPS_MAX = 3_000_000
STACK_BYTES = 512 * 1024
TOLD_MAX = 400


class Killed(BaseException):
    """The process that this ran in is gone: nobody catches it, nothing that follows reaches a medium."""


class Violation(Exception):
    """Something that must never be so. `kind`: which law, the same for the same fault."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Process:
    """What dies at once: a node's life, a door's, the clients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.tasks: dict[Task, None] = {}
        self.at_death: list[Callable[[], None]] = []


class Task:
    """A virtual thread."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ident = 0
        self.is_done = False
        self.is_woken = False
        self.is_ready = False
        self.waits = 0  # how often it has waited: a timer of an earlier wait is void
        self.joined: list[Task] = []
        self.local: dict[tuple[object, str], Any] = {}


class Scheduler:
    """Picks who runs. `preempt_rate`: how often a task stands aside where it takes a lock that is free."""

    def __init__(self, seed: int, preempt_rate: float) -> None:
        self.rng = random.Random(f"order {seed}")
        self.now_s = 0.0
        self.steps, self.steps_max = 0, STEPS_MAX
        self.told: deque[str] = deque(maxlen=TOLD_MAX)
        self.violations: list[Violation] = []
        self.processes: list[Process] = []
        self._preempt_rate = preempt_rate
        self._digest = hashlib.blake2b(digest_size=16)
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._numbers = 0
        self.world = self.process("world")
        self.main = self.current = Task("main", self.world)
        self.main.ident = _thread.get_ident()

    # -- what is said -----------------------------------------------------------------------

    def tell(self, what: str) -> None:
        """Write an event down: into the digest, and for whoever reads about a failing seed."""
        self._digest.update(f"{self.now_s:.6f} {self.current.name} {what}\n".encode())
        self.told.append(f"{self.now_s:10.3f}  {self.current.process.name:9} {self.current.name:12} {what}")

    def violate(self, kind: str, what: str) -> None:
        """Note that something was seen which must never be, one of `LAWS`."""
        assert kind in LAWS, kind
        self.tell(f"VIOLATION {kind}: {what}")
        self.violations.append(Violation(kind, what))

    @property
    def digest(self) -> str:
        """The digest of all that happened, in order: who ran when, and what was told."""
        return self._digest.hexdigest()

    # -- processes and tasks ----------------------------------------------------------------

    def process(self, name: str) -> Process:
        made = Process(name)
        self.processes.append(made)
        return made

    def spawn(self, process: Process, name: str, run: Callable[[], Any]) -> Task:
        """Start a virtual thread; in a process that is dead it never runs."""
        task = Task(name, process)
        if process.is_dead:
            task.is_done = True
            return task
        process.tasks[task] = None
        _thread.stack_size(STACK_BYTES)
        _thread.start_new_thread(self._body, (task, run))
        self._make_ready(task)
        return task

    def _body(self, task: Task, run: Callable[[], Any]) -> None:
        task.baton.acquire()
        task.ident = _thread.get_ident()
        try:
            if not task.process.is_dead:
                run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread that ends so is a bug of its own
            if not task.process.is_dead:
                at = traceback.extract_tb(error.__traceback__)[-1]
                self.violate("a thread died", f"{task.name}: {error!r} at {at.filename}:{at.lineno}")
                self.told.append("".join(traceback.format_exception(error)))
        task.is_done = True
        task.process.tasks.pop(task, None)
        for other in task.joined:
            self.wake(other)
        following = self._next()
        self.current = following
        following.baton.release()

    def kill(self, process: Process) -> None:
        """End a process at this very point: each of its tasks ends where it stands."""
        process.is_dead = True
        for task in list(process.tasks):
            if task is not self.current and not task.is_ready:
                self._make_ready(task)
        for ended in process.at_death:
            ended()

    # -- waiting ----------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """A point where another may go first, and where the dead end."""
        task = self.current
        if task.process.is_dead:
            raise Killed
        if self._ready and self.rng.random() < self._preempt_rate:
            self._make_ready(task)
            self._switch()

    def wait(self, queue: list[Task], timeout_s: float | None) -> bool:
        """Wait in `queue` to be woken; False: it took too long."""
        task = self.current
        if task.process.is_dead:
            raise Killed
        task.is_woken = False
        task.waits += 1
        queue.append(task)
        if timeout_s is not None:
            self._numbers += 1
            at_s = self.now_s + max(0.0, timeout_s)
            heapq.heappush(self._timers, (at_s, self._numbers, task, task.waits))
        try:
            self._switch()
        finally:
            task.waits += 1
            if task in queue:
                queue.remove(task)
        return task.is_woken

    def sleep(self, seconds: float) -> None:
        self.wait([], seconds)

    def wake(self, task: Task) -> None:
        """Wake a task that waits; it leaves its queue itself."""
        if not task.is_woken and not task.is_ready and not task.is_done:
            task.is_woken = True
            self._make_ready(task)

    def _make_ready(self, task: Task) -> None:
        task.is_ready = True
        self._ready.append(task)

    def _switch(self) -> None:
        task = self.current
        following = self._next()
        if following is not task:
            self.current = following
            following.baton.release()
            task.baton.acquire()
        if task.process.is_dead:
            raise Killed

    def _next(self) -> Task:
        self.steps += 1
        if self.steps > self.steps_max and not self.main.is_ready:
            self.violate("livelock", f"{self.steps_max} steps")
            self.steps = 0
            return self._given(self.main)
        if not self._ready:
            self._tick()
        at = self.rng.randrange(len(self._ready))
        task = self._ready[at]
        self._ready[at] = self._ready[-1]
        self._ready.pop()
        return self._given(task)

    def _given(self, task: Task) -> Task:
        task.is_ready = False
        self._digest.update(task.name.encode())
        return task

    def _tick(self) -> None:
        """Move the clock to the next timer; without one, everything waits for ever."""
        while self._timers:
            at_s, _, task, waits = heapq.heappop(self._timers)
            if task.waits == waits and not task.is_done and not task.is_ready:
                self.now_s = max(self.now_s, at_s)
                self._make_ready(task)
                return
        self.violate("deadlock", "nothing is ready, and no timer runs")
        self._make_ready(self.main)

    def stack_of(self, task: Task) -> str:
        """The calls of the product that a task stands in."""
        frame = sys._current_frames().get(task.ident)
        calls = traceback.extract_stack(frame) if frame is not None else []
        product = [one for one in calls if "/tests/" not in one.filename and "samovar" in one.filename]
        return "\n".join(
            f"    {one.name} {one.filename.split('samovar/')[-1]}:{one.lineno}" for one in product
        )
