"""The contract of a tier: a place where whole extent records lie, and what may go wrong with it.

A record is the bytes that `codec.seal` makes: header, then payload. A tier moves bytes and counts
them; it does not know which block is worth keeping (`directory/directory.py`, `policy/policies.py`), nor
whether it is trusted at the moment (`guard.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cache_tiers.blocks import Address, Bytes, Clear, ExtentHeader, Record, TierName


@dataclass(frozen=True, slots=True)
class Scanned:
    """What was found at start: a whole, decodable header and the record's size."""

    header: ExtentHeader
    nbytes: int
    last_used_unix_s: float
    is_cleared: bool = False
    """A node has marked in the tier itself that this was cleared after it was put there."""


@dataclass(slots=True)
class BadFound:
    """Bad records that a tier's scans have found: by kind, and how many of them are not found any more."""

    kinds: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0

    def copy(self) -> BadFound:
        return BadFound(Counter(self.kinds), self.quarantined)


class Tier(ABC):
    """One place. Every method may be called from several threads at once and may block.

    Nothing but `TierError` and `BadRecord` comes out of a tier; an error leaves the tier as it was, or
    the extent gone. `deadline_s` are seconds from now: a call that cannot end by then raises
    `TierError` (as good as the medium lets it; the caller does not rely on that alone).
    """

    name: TierName
    is_shared: bool = False
    """Other nodes put records there, too: clears are marked in it, and it is scanned again during use."""
    keeps_bad: bool = False
    """Quarantined records stay for a look."""

    @abstractmethod
    def put(self, address: Address, record: Record, *, deadline_s: float) -> None:
        """Afterwards `read` finds the whole record, or (on `TierFull`, `TierError`) nothing. Idempotent."""

    @abstractmethod
    def read(self, address: Address, start: int, nbytes: int, *, deadline_s: float) -> Bytes:
        """Bytes `[start, start + nbytes)` of the record, exactly. Raises `TierMiss`, `TierError`.

        A record shorter than that, or (where the tier can tell) of another size than was put, raises
        `BadRecord("truncated"|"oversized")`. The result may be read-only.
        """

    @abstractmethod
    def delete(self, address: Address) -> None:
        """Gone, now and after a restart; nothing when it is not there. Raises `TierError`."""

    @abstractmethod
    def quarantine(self, address: Address) -> None:
        """Never found again, but kept for a look where that is possible (`*.bad`, bounded)."""

    @abstractmethod
    def scan(self) -> Iterator[Scanned]:
        """What lies there at start, after sweeping what is torn. Bad records are quarantined on the way."""

    def ref(self, address: Address) -> object | None:
        """Hand out the whole record as an object that other processes of the node can read.

        None where the medium cannot. Raises `TierMiss`.
        """
        return None

    def purge_quarantine(self, tenant: bytes) -> int:
        """Delete the bad records of a tenant that `keeps_bad`; how many. Raises `TierError`."""
        return 0

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:  # noqa: B027 - optional
        """Have every scan of a shared tier first call `heed` with what is marked as cleared."""

    def mark_cleared(self, clears: Sequence[Clear], deadline_s: float) -> None:  # noqa: B027 - optional
        """Mark in a shared tier that these were cleared. Raises `TierError`.

        What was put there before comes out of no scan but with `Scanned.is_cleared`.
        """

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline_s: float) -> bool:
        """Delete what a tenant had in a shared tier when it was marked, but for what `is_known`.

        False: not all of it yet. Raises `TierError`.
        """
        return True

    def settle(self) -> None:  # noqa: B027 - optional
        """Drop the marks of a shared tier that nothing needs any more. Raises `TierError`.

        All that the last scan found was taken in, and what was cleared is deleted.
        """

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        """Scan a shared tier again, for what is not known."""
        return iter(())

    def bad_found(self) -> BadFound:
        """What scans found since this was made, a copy: nobody else hears of it. Cheap, never raises."""
        return BadFound()

    @abstractmethod
    def touch(self, address: Address) -> None:
        """Used now: remembered across a restart where the medium can (mtime). Cheap, never raises."""

    @abstractmethod
    def bytes_held(self) -> int:
        """What the tier really takes up, quarantine and all. Raises `TierError` when that cannot be told."""

    @abstractmethod
    def probe(self) -> None:
        """A small write, read and delete to see whether it works. Raises `TierError`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and handles. Called once, last."""
