"""Messages between a replica and its node's cache tiers. Plain frozen data.

`session` is a lineage's tag throughout (`blocks/extent.py`), unless it says "whole session".

Times are seconds, sizes bytes. `keys` are block keys of one chain from its first block, joined to one
`bytes` (32 per block), full blocks only. "Chain index" counts blocks from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from samovar.cache_tiers.blocks import (
    Address,
    BlockShape,
    Bytes,
    ChainMarks,
    ExtentHeader,
    LoadSource,
    TierName,
)
from samovar.cache_tiers.forecast import Role, Stop
from samovar.cache_tiers.pricing import TierPrice


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Prefetched bytes since the start. `started`: by reason. `used` + `late` + `wasted`: judged guesses.

    `late`: still in flight when requested. `precision`: used share of what was judged. `is_on`: whether
    guesses of a kind are made. Regrets: see `PrefetchRegret`.
    """

    started: dict[str, int] = field(default_factory=dict)
    used: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0
    guesses: int = 0
    moving: int = 0
    is_on: dict[str, bool] = field(default_factory=dict)
    regret_demand: float | None = None
    regret_pause: float | None = None

    @property
    def precision(self) -> float | None:
        judged = self.used + self.late + self.wasted
        return self.used / judged if judged else None


@dataclass(frozen=True, slots=True)
class Lookup:
    """Asks which of these blocks the tiers hold. Also a use: all that are held become recent.

    `peers`: other nodes whose tiers may hold what this node's do not, likeliest first. `starts_turn`: a
    turn of the session begins with this, and its `TurnEnded` will follow. `is_queued`: it cannot be
    admitted at once, so there is time to promote what is in lower tiers. `wait_s`: how long the answer is
    waited for. `trace`: context of the request's span, here and in other messages; empty: not traced.
    """

    namespace: bytes
    keys: bytes
    tenant: bytes
    session: bytes
    peers: tuple[str, ...] = ()
    starts_turn: bool = False
    is_queued: bool = False
    wait_s: float = 0.25
    trace: str = ""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Reports that a turn ended, `ago_s` before this was sent; answered by the session's survival curve.

    `service_s`: since its request's arrival at the replica, queueing included. Tokens and `tool`: see
    `turns.Turn`.
    `marks`: of the session's chain now, from which the next lookup derives how much of it was kept.
    `returns_s`: the next turn follows after so long, its client says; `is_final`: none does.
    """

    tenant: bytes
    session: bytes
    service_s: float
    input_tokens: int
    output_tokens: int
    marks: ChainMarks
    block_tokens: int
    stop: Stop = "stop"
    role: Role = "user"
    tool: str = ""
    profile: str = "chat"
    ago_s: float = 0.0
    returns_s: float | None = None
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks `[first, first + blocks)` of the chain, which are `[offset, offset + blocks)` of an extent.

    `tier`: the cheapest that has it and is up; `peer`: a tier of node `node`. `nbytes`: what a fetch of
    just these blocks moves.
    """

    extent_id: bytes
    tenant: bytes
    first: int
    offset: int
    blocks: int
    tier: LoadSource
    nbytes: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A partial block behind chain index `first - 1` (`span.first`, `span.blocks == 1`).

    It is in the caller's prompt if `block_key(namespace, parent, its next `tokens` ids) == key`.
    """

    key: bytes
    tokens: int
    span: BlockRange


@dataclass(frozen=True, slots=True)
class AbsentRun:
    """Blocks `[first, first + blocks)` of the chain that the node had or was given, and why they are missing.

    `reason`: evicted | expired | lost (gone from its tier, or bad) | not written | being stored | down.
    """

    first: int
    blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Answer to `Lookup`. `spans` in chain order, without overlap, possibly with gaps.

    `incarnation` and `clear_seq` return with the turn's `StoreRequest`: what was cleared in between stays
    cleared, and a tier actor does not take what was promised to its predecessor. `unlisted`: tiers that are
    being listed for the first time and may hold what is missing: ask again. `seconds`: spent on waiting for
    others, by source. `absent`: what is known of blocks in none of the spans, in chain order.
    `has_silent_peer`: a node that may hold them did not answer. `history`: what the node knows of the
    session's turns (`Predictor.history`), for the node that asks.
    """

    incarnation: str
    clear_seq: int
    spans: tuple[BlockRange, ...] = ()
    tails: tuple[PartialBlock, ...] = ()
    prices: dict[LoadSource, TierPrice] = field(default_factory=dict)
    unlisted: tuple[TierName, ...] = ()
    seconds: dict[LoadSource, float] = field(default_factory=dict)
    absent: tuple[AbsentRun, ...] = ()
    has_silent_peer: bool = False
    history: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Requests blocks `[offset, offset + blocks)` of an extent from `tier`, within `deadline_s`.

    `node`: the peer that has it, if `tier` is `peer`.
    """

    namespace: bytes
    tenant: bytes
    extent_id: bytes
    offset: int
    blocks: int
    tier: LoadSource
    deadline_s: float
    node: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Fetched blocks. `data`: u8, the extent's header, then the payload of blocks `[first, ...)`.

    In Ray, `ref` (a list of one, so that Ray passes it on as it is) replaces `data`. Nothing is verified:
    the receiver does that (`record.decode_header`, `record.good_blocks`). `tier`: the actual source, if
    the requested tier could not. `is_kept`: it came from another node, and a tier of this node now has
    the whole extent. `is_placed`: `data` is in the room that the caller has lent.
    """

    first: int
    data: Bytes | None = None
    ref: list[object] = field(default_factory=list)
    tier: LoadSource | None = None
    is_kept: bool = False
    is_placed: bool = False


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A miss. `reason`: gone | error | timeout | down | refused (too many fetches in flight)."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ExtentRequest:
    """Requests a whole extent from another node, within `deadline_s`.

    `reads_s3`: the requester can read S3 itself, so what is only there need not be sent.
    """

    address: Address
    deadline_s: float
    reads_s3: bool = False


@dataclass(frozen=True, slots=True)
class PushRequest:
    """A draining node's request that another fetches an extent from it (`node`) and keeps it."""

    address: Address
    node: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """Offers an extent that a replica can hand over: its header, and the ticket under which it waits there.

    `recompute_s`: seconds to compute these blocks again (the value of keeping them).
    """

    ticket: int
    header: ExtentHeader
    nbytes: int
    incarnation: str
    clear_seq: int
    recompute_s: float = 0.0
    trace: str = ""


@dataclass(frozen=True, slots=True)
class StoreReply:
    """One outcome per offer, in order: taken | held (already there) | refused:REASON.

    A ticket that was taken will be fetched; the replica drops all others now.
    """

    outcomes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BadReport:
    """Reports that an extent read from `tier` is not what it should be."""

    namespace: bytes
    tenant: bytes
    extent_id: bytes
    tier: LoadSource
    kind: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Reports how long a load took until its bytes were in the pool's pages, for the price of the tier.

    Of fetches that ran at the same time; of a load of several rounds of them, what one round took.
    """

    tier: LoadSource
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Asks for `count` records of `blocks` random blocks each in `tier`, to measure a load with."""

    tier: TierName
    shape: BlockShape
    blocks: int
    count: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Result of a clear: `extents` forgotten; `unreachable` tiers delete their records once they answer.

    `is_noted`: what is left is written down; False: a restart forgets it, and the clear has to be repeated.
    """

    extents: int
    nbytes: int
    unreachable: tuple[TierName, ...] = ()
    is_noted: bool = True


@dataclass(frozen=True, slots=True)
class TierStats:
    """One row of the tiers table. Counters since the actor's start.

    `bytes_max`: as it is set up; 0: it is not to be there.
    `listed_ago_s`: since the last listing that read all of a tier that other nodes write to began; None: it
    has none yet, or needs none. `medium_free_bytes`: what the disk has left, as of the last write; None: not
    known.
    """

    name: TierName
    state: str  # up | open (breaker) | read-only | off: REASON
    bytes_held: int = 0
    bytes_max: int = 0
    extents: int = 0
    blocks: int = 0
    tokens: int = 0
    hits_blocks: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_errors: int = 0
    write_errors: int = 0
    verify_failures: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    evicted_extents: int = 0
    breaker_opened: int = 0
    price: TierPrice | None = None
    listed_ago_s: float | None = None
    medium_free_bytes: int | None = None

    @property
    def is_off(self) -> bool:
        """Whether nothing goes there: not set up, or it could not be opened, or another service has it."""
        return self.state.startswith("off")


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What came from one other node: `pulls`, `nbytes` and `seconds` by way (nixl | tls | ray | s3).

    `failures`: by way and reason; `bad`: invalid records, by kind. Neither was served.
    """

    state: str  # up | open (breaker)
    pulls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LruStats:
    """What least recently used would have had, beside what the tiers had, at lookups that began turns.

    Tokens of full blocks, from a prompt's first on without a gap. `gained_tokens`: the tiers had them, it
    would not. `regretted_tokens`: it would still have had what the tiers have evicted; `regrets`: lookups
    with some. `found_tokens`, `lru_tokens`: by the cheapest tier that had them.
    """

    lookups: int = 0
    asked_tokens: int = 0
    gained_tokens: int = 0
    regretted_tokens: int = 0
    regrets: int = 0
    found_tokens: dict[str, int] = field(default_factory=dict)
    lru_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """Return the share of asked tokens by which the policy finds more; None: nothing was asked."""
        if not self.asked_tokens:
            return None
        return (self.gained_tokens - self.regretted_tokens) / self.asked_tokens


@dataclass(frozen=True, slots=True)
class ResumptionStats:
    """What a node knows of resumptions.

    `predictor`: whose forecasts are used: learned | km | cold (by recency) | off: REASON. `turns`: learned
    from; `dropped`: not learned from, because the queue was full. `restored`: result of reading the file
    at the start. `model_loss`, `fallback_loss`: mean log loss over the latest turns, which the guard uses.
    `calibration`: see `forecast.CALIBRATION_S` and `predictor.Calibration`. `hints`: clients' hints by
    `kind:outcome`, of which those `received` are judged `true` or `false` later. `lru`: the policy beside
    least recently used.
    """

    predictor: str = "cold"
    sessions: int = 0
    turns: int = 0
    dropped: int = 0
    failures: int = 0
    saves: int = 0
    restored: str = ""
    model_loss: float = 0.0
    fallback_loss: float = 0.0
    prefetch: PrefetchStats = field(default_factory=PrefetchStats)
    calibration: tuple[tuple[float, float, int], ...] = ()
    hints: dict[str, int] = field(default_factory=dict)
    lru: LruStats = LruStats()

    @property
    def calibration_error(self) -> float | None:
        """Return the mean distance between what was forecast and what happened; None: not known yet."""
        turns = sum(one[2] for one in self.calibration)
        return sum(abs(said - true) * n for said, true, n in self.calibration) / turns if turns else None


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One node's cache tiers.

    `peers`: other nodes it has dealt with; `transport`: how their blocks come here (nixl | tls |
    ray: REASON | off). `drained`: extents by outcome, once the node is `draining`; `unsaved`: those that it
    has still to save. `bad_files`: its own state files that could not be read at its start and were put
    aside. `pending_deletes`: deletes that failed and are retried;
    `forgotten_deletes`: those there was no room to remember, whose bytes stay accounted until a restart.
    """

    node_id: str
    incarnation: str
    restarts: int
    tiers: tuple[TierStats, ...]
    moves: dict[str, int] = field(default_factory=dict)  # "cpu>nvme:committed" -> count
    stores: dict[str, int] = field(default_factory=dict)  # taken, held, refused:queue, ...
    misses: dict[str, int] = field(default_factory=dict)  # reason -> blocks
    queue: int = 0
    peers: dict[str, PeerStats] = field(default_factory=dict)
    transport: str = "off"
    draining: bool = False
    drained: dict[str, int] = field(default_factory=dict)
    unsaved: int = 0
    returns: ResumptionStats = ResumptionStats()
    bad_files: int = 0
    pending_deletes: int = 0
    forgotten_deletes: int = 0


@dataclass(frozen=True, slots=True)
class LineageGlance:
    """What one node knows of one lineage, for people who watch.

    `nbytes`, `blocks`: of the copies in each tier. `runs`: its chain in order, in runs of blocks of the same
    cheapest tier; `none`: blocks that no tier holds before others that one does. `survival`: P(still idle) at
    the times that were asked for, counted from `since_ago_s` ago; empty: no turn of it was seen here.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    runs: tuple[tuple[str, int], ...] = ()
    survival: tuple[float, ...] = ()
    since_ago_s: float = 0.0
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class NodeGlance:
    """What one node shows to people who watch: lineages by owner (tags of tenant and lineage), counters."""

    lineages: dict[bytes, LineageGlance] = field(default_factory=dict)
    stats: NodeStats | None = None


@dataclass(frozen=True, slots=True)
class SessionHeld:
    """What a node's tiers hold of one lineage; `nbytes` by tier. `idle_s`: since its last use there."""

    tenant: bytes
    session: bytes
    nbytes: dict[str, int]
    blocks: int
    tokens: int
    idle_s: float


def as_json(value: Any) -> Any:
    """Return a message, or what it holds, as JSON can hold it: infinities and NaN become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
