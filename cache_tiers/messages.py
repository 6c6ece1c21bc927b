"""What a replica and its node's cache tiers say to each other. Plain frozen data.

Times are seconds, sizes bytes. `keys` are block keys of one chain from its very beginning, joined to one
`bytes` (32 a block), full blocks only. "Chain index" counts blocks from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_tiers.blocks import Address, Bytes, ChainMarks, ExtentHeader, LoadSource, TierName
from cache_tiers.forecast import Role, Stop
from cache_tiers.pricing import TierPrice

# What prefetching has done so far, in bytes. Plain data.


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Bytes since the start. `started`: by why. `used` + `late` + `wasted`: of guesses that were judged.

    `late`: still on their way when they were asked for. `precision`: used share of what was judged.
    `is_on`: whether guesses of a kind are made. Regrets: see `PrefetchRegret`.
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
    """Which of these blocks do the tiers hold? Also a sign of use: all that are held become recent.

    `peers`: other nodes whose tiers may hold what this node's do not, the likeliest first. `starts_turn`: a
    turn of the session begins with this, its `TurnEnded` will follow. `is_queued`: it cannot be admitted at
    once, so that there is time to bring up what lies low.
    """

    namespace: bytes
    keys: bytes
    tenant: bytes
    session: bytes
    peers: tuple[str, ...] = ()
    starts_turn: bool = False
    is_queued: bool = False


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn has ended, `ago_s` before this was sent. The answer is the session's survival curve.

    `service_s`: from its request's arrival at the replica, the time it queued included. Tokens: see
    `turns.Turn`. `marks`: of the session's chain now, by which the next lookup tells what was kept of it.
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


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks `[first, first + blocks)` of the chain are `[offset, offset + blocks)` of an extent.

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

    The asker has it in its prompt when `block_key(namespace, parent, its next `tokens` ids) == key`.
    """

    key: bytes
    tokens: int
    span: BlockRange


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Answer to `Lookup`. `spans` in chain order, without overlap, not necessarily without gaps.

    `incarnation` and `clear_seq` go back with the turn's `StoreRequest`: what was cleared in between stays
    cleared, and a tier actor does not take what was promised to the one before it.
    """

    incarnation: str
    clear_seq: int
    spans: tuple[BlockRange, ...] = ()
    tails: tuple[PartialBlock, ...] = ()
    prices: dict[LoadSource, TierPrice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring blocks `[offset, offset + blocks)` of an extent from `tier`, within `deadline_s`.

    `node`: the peer that has it, when `tier` is `peer`.
    """

    namespace: bytes
    tenant: bytes
    extent_id: bytes
    offset: int
    blocks: int
    tier: LoadSource
    deadline_s: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    """`data`: u8, the extent's header followed by the payload of blocks `[first, ...)`.

    In Ray, `ref` (a list of one, so that Ray hands it on as it is) stands for `data`. Nothing of it
    is verified: whoever uses it does that (`codec.decode_header`, `codec.good_blocks`). `tier`: where it
    came from after all, when the tier that was asked for could not. `is_kept`: it came from another node,
    and a tier of this one has the whole extent now.
    """

    first: int
    data: Bytes | None = None
    ref: list[object] = field(default_factory=list)
    tier: LoadSource | None = None
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A miss. `reason`: gone | error | timeout | down | refused (too many fetches are under way)."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ExtentRequest:
    """One node asks another for a whole extent, within `deadline_s`.

    `reads_s3`: the asker reaches S3 itself, so what lies only there need not be sent.
    """

    address: Address
    deadline_s: float
    reads_s3: bool = False


@dataclass(frozen=True, slots=True)
class PushRequest:
    """A node that is going away asks another to fetch an extent from it (`node`) and to keep it."""

    address: Address
    node: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """An extent that a replica could hand over: its header, and the ticket under which it waits there.

    `recompute_s`: seconds it would take to compute these blocks again (what keeping them is worth).
    """

    ticket: int
    header: ExtentHeader
    nbytes: int
    incarnation: str
    clear_seq: int
    recompute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreReply:
    """One outcome an offer, in order: taken | held (is there already) | refused:REASON.

    A ticket that was taken will be called for; all others are the replica's to drop now.
    """

    outcomes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BadReport:
    """A replica found that an extent read from `tier` is not what it should be."""

    namespace: bytes
    tenant: bytes
    extent_id: bytes
    tier: LoadSource
    kind: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a fetch went, for the price of the tier."""

    tier: LoadSource
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cleared:
    """`extents` were forgotten; in `unreachable` tiers their records are deleted as soon as those answer."""

    extents: int
    nbytes: int
    unreachable: tuple[TierName, ...] = ()


@dataclass(frozen=True, slots=True)
class TierStats:
    """One row of the tiers table. Counters since the actor's start."""

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


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What came from one other node: `pulls`, `nbytes` and `seconds` by way (nixl | ray | s3).

    `failures`: by way and reason, `bad`: records that were not what they should be, by kind. Neither was
    served.
    """

    state: str  # up | open (breaker)
    pulls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResumptionStats:
    """What a node knows of who comes back.

    `predictor`: whose forecasts are used: learned | km | cold (by recency) | off: REASON. `turns`: learned
    from, `dropped`: not, because too many waited. `restored`: what came of the file at the start.
    `model_loss`, `fallback_loss`: mean log loss over the latest turns, by which the guard decides.
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


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One node's cache tiers.

    `peers`: other nodes it has dealt with, `transport`: how their blocks come here (nixl | ray: REASON |
    off). `drained`: extents by outcome, once the node is `draining`. `bad_files`: of its own books, which
    could not be read at its start and were put aside.
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
    returns: ResumptionStats = ResumptionStats()
    bad_files: int = 0
