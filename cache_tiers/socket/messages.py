"""What is said over the socket besides `cache_tiers/messages.py`, and what each call takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.cache_tiers.blocks import Clear, LoadSource
from samovar.cache_tiers.messages import (
    BadReport,
    Cleared,
    Fetch,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    NodeStats,
    TurnEnded,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first call of a connection. `client`: a name for people; `protocol`: see `wire.PROTOCOL`."""

    protocol: int
    client: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """`records`: the versions of records that this node reads; `incarnation`: of this node."""

    protocol: int
    incarnation: str
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A sealed record that comes with the call as a memory file. See `StoreRequest`."""

    nbytes: int
    incarnation: str
    clear_seq: int
    recompute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchReply:
    """The answer to a `Fetch`, see `Fetched`; a memory file of `nbytes` comes along, unless it has failed."""

    first: int
    tier: LoadSource | None
    nbytes: int
    failed: FetchFailed | None = None


@dataclass(frozen=True, slots=True)
class Reports:
    bad: tuple[BadReport, ...] = ()
    loads: tuple[LoadReport, ...] = ()


NOTHING = type(None)

CALLS: dict[str, tuple[type, object]] = {
    "hello": (Hello, Welcome),
    "lookup": (Lookup, LookupResult),
    "fetch": (Fetch, FetchReply),
    "offer": (tuple[Offer, ...], tuple[str, ...]),
    "report": (Reports, NOTHING),
    "turn_over": (TurnEnded, NOTHING),
    "clear": (Clear, Cleared),
    "stats": (NOTHING, NodeStats),
    "ping": (NOTHING, str),
}
"""Method -> type of its one argument, type of its result."""
