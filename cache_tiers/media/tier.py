"""The contract of a tier: a store of whole extent records, and the errors it may raise.

A record is the bytes that `codec.seal` makes: header, then payload. A tier moves and counts bytes; which
block is worth keeping is decided in `catalog/catalog.py` and `policy/policies.py`, and whether the tier
is trusted at the moment in `guard.py`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal, Protocol

from samovar.cache_tiers.blocks import (
    Address,
    Bytes,
    Clear,
    ExtentHeader,
    Record,
    TierError,
    TierName,
    record,
)
from samovar.configs.sections import FurtherTierSettings


class Deadline:
    """The end of one call, `seconds` from now, and whether its caller still waits for it.

    A call is either committed or given up, whichever comes first. `clock`: monotonic seconds. Thread-safe.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._ends_s = clock() + seconds
        self._lock = threading.Lock()
        self._outcome: Literal["committed", "given up"] | None = None

    def left_s(self) -> float:
        """Return the seconds left, between 0 and the longest possible lock wait."""
        return min(max(self._ends_s - self._clock(), 0.0), threading.TIMEOUT_MAX)

    def check(self) -> None:
        """Raise `TierError` if the call is late or given up; to be called between its steps."""
        if self._outcome == "given up" or self._clock() >= self._ends_s:
            raise TierError("the deadline has passed")

    def commit(self) -> bool:
        """Settle the call as its last step; False: it was given up and has to undo what it did.

        After True the caller takes the result, whatever the clock says.
        """
        return self._settle("committed")

    def give_up(self) -> bool:
        """Stop waiting for the call; False: it is committed, and about to end."""
        return self._settle("given up")

    def _settle(self, outcome: Literal["committed", "given up"]) -> bool:
        with self._lock:
            self._outcome = self._outcome or outcome
            return self._outcome == outcome


@dataclass(frozen=True, slots=True)
class Scanned:
    """A record found at start: a complete, decodable header and the record's size."""

    header: ExtentHeader
    nbytes: int
    last_used_unix_s: float
    is_cleared: bool = False
    """A node has marked in the tier itself that this was cleared after it was put there."""


@dataclass(slots=True)
class BadFound:
    """Bad records that a tier's scans have found: counts by kind, and how many were quarantined.

    `gone`: what was in a shared tier, and is not there any more according to its last scan.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0
    gone: tuple[Address, ...] = ()

    def copy(self) -> BadFound:
        return BadFound(Counter(self.kinds), self.quarantined, self.gone)


class RecordFormat(Protocol):
    """What a scan reads of a record: see the functions of `blocks/record.py`, which are one."""

    def read_header_bytes(self, prefix: Bytes, /) -> int: ...
    def decode_header(self, data: Bytes, /, *, record_bytes: int | None = None) -> ExtentHeader: ...


class Tier(ABC):
    """One store of records. Thread-safe; every method may block.

    Only `TierError` and `BadRecord` come out; an error leaves the tier unchanged, or the extent gone. A call
    that cannot end by its `deadline` raises `TierError`, as well as the medium allows (see `guard.py`).
    """

    name: TierName
    # Other nodes put records there, too: it has marks of clears, and is rescanned. `delete` takes `unused_s`:
    # only what no node has put there, or used (`touch`), for so long is deleted.
    is_shared = False
    keeps_bad = False  # quarantined records are kept for inspection
    format: RecordFormat = record  # how `scan` reads what records say of themselves
    takes_room = False  # `read` takes `room`, u8 of whole pages, and returns what is at its front then

    @abstractmethod
    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        """Store the record: afterwards `read` finds all of it, or (on `TierFull`, `TierError`) nothing.

        Idempotent. After an error it has to be deleted: a restart may find it.
        """

    @abstractmethod
    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        """Return exactly the bytes `[start, start + nbytes)` of the record.

        Raises `TierMiss`, `TierError`; `BadRecord("truncated"|"oversized")` if the record is shorter than
        that or (where the tier can tell) of another size than was put. The result may be read-only.
        """

    @abstractmethod
    def delete(self, address: Address) -> None:
        """Remove the record, now and after a restart; no effect if it is not there. Raises `TierError`."""

    @abstractmethod
    def quarantine(self, address: Address) -> None:
        """Never find the record again; keep it for inspection if possible (`*.bad`, bounded)."""

    @abstractmethod
    def scan(self) -> Iterator[Scanned]:
        """Yield what is stored at start, after sweeping torn files; quarantines bad records on the way."""

    def why_not_ours(self) -> str:
        """Return who holds the medium, while this process waits for it; "" otherwise."""
        return ""

    def take(self) -> bool:
        """Take the medium if it was waited for and is free; True: it is ours since this call.

        Raises `TierError` while another process holds it.
        """
        return False

    def warm(self) -> float | None:
        """Connect ahead of the first use; return the seconds of one small call, or None if unknown.

        Blocks for a bounded time. Raises `TierError`.
        """
        return None

    def ref(self, address: Address) -> object | None:
        """Return the whole record as an object that other processes of the node can read.

        None if the medium cannot. Raises `TierMiss`.
        """
        return None

    def purge_quarantine(self, tenant: bytes) -> int:
        """Delete a tenant's bad records if the tier `keeps_bad`; return how many. Raises `TierError`."""
        return 0

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:  # noqa: B027 - optional
        """Make every scan of a shared tier first call `heed` with what is marked as cleared."""

    def mark_cleared(self, clears: Sequence[Clear], deadline: Deadline) -> None:  # noqa: B027 - optional
        """Mark these as cleared in a shared tier. Raises `TierError`.

        Scans yield what was put there before only with `Scanned.is_cleared`.
        """

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline: Deadline) -> bool:
        """Delete what a tenant had in a shared tier when it was marked, except what `is_known`.

        Returns False if some is left. Raises `TierError`.
        """
        return True

    def is_marked(self, address: Address, session: bytes, deadline: Deadline) -> bool:
        """Return whether what a shared tier holds at `address` was put there before a clear that it marks.

        Asks the medium: for a record that no scan of this node has judged. Raises `TierError`.
        """
        return False

    def settle(self) -> bool:
        """Drop the marks of a shared tier that are not needed. False: its last scan could not read all.

        Precondition: what it found is taken in, and what was cleared is deleted. Raises `TierError`.
        """
        return True

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        """Scan a shared tier again, for what is not known."""
        return iter(())

    def bad_found(self) -> BadFound:
        """Return a copy of what scans found since creation; cheap, never raises. Reported nowhere else."""
        return BadFound()

    @abstractmethod
    def touch(self, address: Address) -> None:
        """Mark as used now, across a restart if the medium can (mtime). Cheap, never raises."""

    def drop_cache(self, address: Address) -> None:  # noqa: B027 - optional
        """Make the next read of a record come from the medium, to measure that. Raises `TierError`."""

    @abstractmethod
    def bytes_held(self) -> int:
        """Return the bytes the tier really takes up, quarantine included. Raises `TierError` if unknown."""

    def medium_free_bytes(self) -> int | None:
        """Return the bytes that the medium has left as last seen, None if it does not tell; never blocks."""
        return None

    @abstractmethod
    def probe(self) -> None:
        """Check that the tier works by a small write, read and delete. Raises `TierError`."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and handles. Called once, last."""


class TierAround(Tier):
    """A tier around another, `inner`: passes on all but what moves records or looks for them."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.is_shared = inner.is_shared
        self.keeps_bad = inner.keeps_bad
        self.takes_room = inner.takes_room

    def delete(self, address: Address, unused_s: float = 0.0) -> None:
        if unused_s:
            self.inner.delete(address, unused_s)  # type: ignore[call-arg]
        else:
            self.inner.delete(address)

    def quarantine(self, address: Address) -> None:
        self.inner.quarantine(address)

    def why_not_ours(self) -> str:
        return self.inner.why_not_ours()

    def take(self) -> bool:
        return self.inner.take()

    def warm(self) -> float | None:
        return self.inner.warm()

    def purge_quarantine(self, tenant: bytes) -> int:
        return self.inner.purge_quarantine(tenant)

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:
        self.inner.on_marks(heed)

    def mark_cleared(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        self.inner.mark_cleared(clears, deadline)

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline: Deadline) -> bool:
        return self.inner.purge(tenant, is_known, deadline)

    def is_marked(self, address: Address, session: bytes, deadline: Deadline) -> bool:
        return self.inner.is_marked(address, session, deadline)

    def settle(self) -> bool:
        return self.inner.settle()

    def bad_found(self) -> BadFound:
        return self.inner.bad_found()

    def touch(self, address: Address) -> None:
        self.inner.touch(address)

    def drop_cache(self, address: Address) -> None:
        self.inner.drop_cache(address)

    def bytes_held(self) -> int:
        return self.inner.bytes_held()

    def medium_free_bytes(self) -> int | None:
        return self.inner.medium_free_bytes()

    def close(self) -> None:
        self.inner.close()


def open_medium(more: FurtherTierSettings) -> Tier:
    """Import the function that `tiers.more.medium` names and return the tier that it makes.

    It is called with the tier's name, `bytes_max` and `options` by their names. Raises `TierError` if it
    cannot be imported or refuses, or if what it makes is no tier of that name, or one that others write to.
    """
    module, _, function = (more.medium or "").partition(":")
    try:
        made = getattr(import_module(module), function)(more.name, more.bytes_max, **more.options)
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise TierError(f"tiers.more.medium {more.medium}: {error}") from error
    if not isinstance(made, Tier) or made.name != more.name or made.is_shared:
        raise TierError(f"tiers.more.medium {more.medium} made no tier named {more.name} of this node alone")
    return made
