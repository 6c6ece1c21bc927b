"""A chain of blocks that is in the pool and may be handed to the tiers. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_tiers.extent import Placement


@dataclass(frozen=True, slots=True)
class Provenance:
    """Whose a session's blocks are, and what the tiers said when its last turn began.

    `incarnation`, `clear_seq`: as in `Found`. With them an offer is refused that a clear has overtaken, even
    one that this replica was not told of any more.
    """

    namespace: bytes
    owner: bytes
    placement: Placement
    incarnation: str
    clear_seq: int


@dataclass(frozen=True, slots=True)
class StoredChain:
    """`pages` hold the blocks with these `keys`, from the chain's beginning; a partial block may follow."""

    provenance: Provenance
    keys: Sequence[bytes]
    pages: Sequence[int]
