"""What kinds of tiers there are, in order of cost, and what the rest of the code may ask of one.

A tier's name says nothing: who has to know whether others see it, or what a restart leaves of it, asks its
kind. Names are spelt in settings, metrics, receipts and the API; those strings are made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, overload

if TYPE_CHECKING:
    from samovar.configs.sections import FurtherTierSettings

TierName: TypeAlias = str
"""The name of a kind in `TIERS`. A plain `str`, not a `Literal`: settings may name further tiers.

What comes from outside is compared with `TIERS`: settings by their section, spans of other nodes by
`node/peers.py`, records by `record.py`.
"""

LoadSource: TypeAlias = str
"""Where a block can be loaded from: a tier of this node, or any tier of another node (`PEER`)."""

PEER: LoadSource = "peer"


@dataclass(frozen=True, slots=True)
class TierKind:
    """What is true of a tier, whichever medium is behind it.

    `is_shared`: all nodes see its records, so that its copies count once, it outlives the node, and a scan
    takes long. `survives_process`: its records are there after a restart of the tier actor. `verify_writes`:
    what was written is read back, because the medium has not checked it itself and may rot.
    """

    name: TierName
    is_shared: bool
    survives_process: bool
    verify_writes: bool


CPU = TierKind("cpu", is_shared=False, survives_process=False, verify_writes=False)
NVME = TierKind("nvme", is_shared=False, survives_process=True, verify_writes=True)
S3 = TierKind("s3", is_shared=True, survives_process=True, verify_writes=False)

TOP_TIER: TierName = CPU.name
"""The tier that loads are promoted into, and that other processes of the node read without a copy."""

SHARED_TIER: TierName = S3.name
"""The tier that is read by address, whether or not this node knows of the record."""


class TierTable(Sequence[TierName]):
    """The names of all kinds in order of cost: a block is demoted from left to right."""

    def __init__(self, kinds: Sequence[TierKind]) -> None:
        self._set(kinds)

    def take_up(self, more: FurtherTierSettings) -> None:
        """Add the tier of `tiers.more`, if there is one; a second time has no effect.

        To be called at the start of each process that builds tiers or counts by them.
        """
        if more.medium is None or more.name in self:
            return
        # What is not known of a medium is taken at its worst: its writes are read back.
        kind = TierKind(more.name, is_shared=False, survives_process=True, verify_writes=True)
        at = self.index(more.after) + 1
        self._set([*map(self.kind, self[:at]), kind, *map(self.kind, self[at:])])

    def kind(self, name: TierName) -> TierKind:
        """Return the kind of a tier. Raises `KeyError` for a name that is not in the table."""
        return self._kinds[name]

    @property
    def local(self) -> tuple[TierName, ...]:
        """The tiers that end with their node."""
        return tuple(name for name, kind in self._kinds.items() if not kind.is_shared)

    @property
    def shared(self) -> tuple[TierName, ...]:
        """The tiers that all nodes see."""
        return tuple(name for name, kind in self._kinds.items() if kind.is_shared)

    def index(self, value: TierName, start: int = 0, stop: int | None = None) -> int:
        """Return a tier's place in the order. Raises `ValueError` for a name that is not in the table."""
        return self._names.index(value, start, len(self._names) if stop is None else stop)

    def __contains__(self, value: object) -> bool:
        return value in self._kinds

    def __iter__(self) -> Iterator[TierName]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> TierName: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TierName, ...]: ...
    def __getitem__(self, at: int | slice) -> TierName | tuple[TierName, ...]:
        return self._names[at]

    def _set(self, kinds: Sequence[TierKind]) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._names = tuple(self._kinds)


TIERS = TierTable((CPU, NVME, S3))

PLACED: tuple[TierName, ...] = (CPU.name, NVME.name, S3.name)
"""The tiers that a placement may name, by their numbers in records: the order is the format's.

No further tier is among them: a record found by a process without that tier would say where nothing is.
"""


def sources() -> tuple[str, ...]:
    """Return what a receipt counts tokens by: computed, in an engine's pool, loaded from a tier or a peer."""
    return ("compute", "gpu", *TIERS, PEER)
