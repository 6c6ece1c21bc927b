"""What kinds of tiers there are, in order of cost, and what the rest of the code may ask of one.

A tier's name says nothing: who has to know whether others see it, or what a restart leaves of it, asks its
kind. Names are spelt in settings, metrics, receipts and the API; those strings are made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

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


BUILT_IN = (CPU, NVME, S3)
TIERS = TierTable(BUILT_IN)
