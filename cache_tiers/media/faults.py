"""A tier wrapper that injects faults, for tests and to see what a bad disk does to a service.

Read data is corrupted in a copy, at a random place; stored bytes are never changed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from samovar.cache_tiers.blocks import Address, Bytes, Clear, Record, TierError, TierFull
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier, TierAround
from samovar.configs.sections import FaultSettings


@dataclass(frozen=True, slots=True)
class _Dice:
    """Random numbers in [0, 1) for one call; all are always drawn, so rates do not shift each other."""

    delay: float
    hang: float
    error: float
    full: float
    truncate: float
    flip: float
    where: float


class FaultyTier(TierAround):
    """Wraps `inner` with the faults of `settings`; with all rates and `delay_s` at 0 it behaves as `inner`.

    Faults strike every call that moves, scans or deletes records (a scan at its start), but not `warm`, no
    call of a request; a failed call never reached `inner`. Nothing is handed out by `ref`, which could not
    be corrupted: it is read instead. A call hangs for `hang_s` and then fails; `release` ends the calls
    hanging now, `close` all of them for good. `sleep` replaces the delay; the default one is cut short by
    `close`.
    """

    def __init__(
        self, inner: Tier, settings: FaultSettings, *, sleep: Callable[[float], None] | None = None
    ) -> None:
        super().__init__(inner)
        self.takes_room = False  # what it hands out it may change
        self._lock = threading.Lock()
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._awake = threading.Event()
        self._closed = threading.Event()
        self._sleep = sleep or self._sleep_until_closed
        self._calls: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()

    @property
    def calls(self) -> Counter[str]:
        """Return a copy of the call counts by method name, failed calls included."""
        with self._lock:
            return Counter(self._calls)

    @property
    def struck(self) -> Counter[str]:
        """Return a copy of the injected-fault counts: delay, hang, error, full, truncate, flip."""
        with self._lock:
            return Counter(self._struck)

    def update(self, settings: FaultSettings) -> None:
        """Replace the settings; a different seed restarts the random sequence."""
        with self._lock:
            if settings.seed != self._settings.seed:
                self._rng = random.Random(settings.seed)
            self._settings = settings

    def release(self) -> None:
        """End the calls hanging now; later ones hang again."""
        with self._lock:
            self._awake.set()
            if not self._closed.is_set():
                self._awake = threading.Event()

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        settings, dice = self._begin("put")
        if dice.full < settings.full_rate:
            self._strike("full")
            raise TierFull(f"{self.name}: injected: no room")
        self.inner.put(address, record, deadline=deadline)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        settings, dice = self._begin("read")
        data = self.inner.read(address, start, nbytes, deadline=deadline)
        if data.nbytes and dice.truncate < settings.truncate_rate:
            self._strike("truncate")
            data = data[: int(dice.where * data.nbytes)]
        if data.nbytes and dice.flip < settings.flip_rate:
            self._strike("flip")
            data = data.copy()
            bit = int(dice.where * data.nbytes * 8)
            data[bit // 8] ^= 1 << bit % 8
        return data

    def delete(self, address: Address, unused_s: float = 0.0) -> None:
        self._begin("delete")
        super().delete(address, unused_s)

    def quarantine(self, address: Address) -> None:
        self._begin("quarantine")
        self.inner.quarantine(address)

    def scan(self) -> Iterator[Scanned]:
        self._begin("scan")
        yield from self.inner.scan()

    def purge_quarantine(self, tenant: bytes) -> int:
        self._begin("purge_quarantine")
        return self.inner.purge_quarantine(tenant)

    def mark_cleared(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        self._begin("mark_cleared")
        self.inner.mark_cleared(clears, deadline)

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline: Deadline) -> bool:
        self._begin("purge")
        return self.inner.purge(tenant, is_known, deadline)

    def is_marked(self, address: Address, session: bytes, deadline: Deadline) -> bool:
        self._begin("is_marked")
        return self.inner.is_marked(address, session, deadline)

    def settle(self) -> bool:
        self._begin("settle")
        return self.inner.settle()

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        self._begin("rescan")
        yield from self.inner.rescan(is_known)

    def probe(self) -> None:
        self._begin("probe")
        self.inner.probe()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._awake.set()
        self.inner.close()

    def _begin(self, method: str) -> tuple[FaultSettings, _Dice]:
        """Apply the faults common to all calls; raises `TierError` after a hang and for an error."""
        with self._lock:
            self._calls[method] += 1
            dice = _Dice(*(self._rng.random() for _ in range(7)))
            settings = self._settings
            awake = self._awake
        if settings.delay_s > 0 and dice.delay < settings.delay_rate:
            self._strike("delay")
            self._sleep(settings.delay_s)
        if dice.hang < settings.hang_rate:
            self._strike("hang")
            awake.wait(settings.hang_s)
            raise TierError(f"{self.name}: injected: {method} hung")
        if dice.error < settings.error_rate:
            self._strike("error")
            raise TierError(f"{self.name}: injected: {method} failed")
        return settings, dice

    def _strike(self, fault: str) -> None:
        with self._lock:
            self._struck[fault] += 1

    def _sleep_until_closed(self, seconds: float) -> None:
        self._closed.wait(seconds)
