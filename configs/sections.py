"""Settings of the cache tiers and their policies; base class of all sections, and size units."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, model_validator

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

TenantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Section(BaseModel):
    """Base class of all sections: frozen, and unknown keys are refused.

    `FORMER`: former name -> name, of settings or of sections below, accepted for one release. `load` warns;
    trees saved before are just read.
    A `ClassVar` in lower case was a setting that no operator had to set for a machine, a workload or a rule,
    and is a constant: what is given for it is not used, and `load` says so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    FORMER: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _current_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if fixed := cls.fixed().keys() & given.keys():
            given = {key: value for key, value in given.items() if key not in fixed}
        if cls.FORMER.keys().isdisjoint(given):
            return given
        for former, name in cls.FORMER.items():
            if former in given and name in given:
                raise ValueError(
                    f"{former} is the former name of {name}, and both are given. Leave {former} out"
                )
        return {cls.FORMER.get(key, key): value for key, value in given.items()}

    @classmethod
    def fixed(cls) -> dict[str, Any]:
        """Return the constants that were settings, by name, and by the name that they had before."""
        names = sorted(name for name in cls.__class_vars__ if name.islower() and name[0] != "_")
        found = {name: getattr(cls, name) for name in names}
        return found | {former: found[name] for former, name in cls.FORMER.items() if name in found}


PolicyName = Literal["lru", "t-lru", "ttl", "type-km", "learned"]


class PredictorSettings(Section):
    """The resumption predictor, which learns online from the turns that a node serves."""

    sessions_max: int = Field(
        100_000, ge=1, le=10_000_000, description="sessions with a history; the longest idle are dropped"
    )
    # Lineages of a session (conversation, titles, sub-agents) that are followed; those never extended and
    # longest idle are dropped.
    lineages_max: ClassVar[int] = 32
    roots_max: ClassVar[int] = 4096  # beginnings of prompts by which one-shots are recognised
    followed_max: ClassVar[int] = 20_000  # idle lineages observed at a time: which are extended
    replay_turns: ClassVar[int] = 8000  # latest turns that are learned from
    saved_turns: ClassVar[int] = 8000  # of these, saved with the predictor; 350 bytes each
    learning_turns_min: ClassVar[int] = 1000  # learning resumes with so many turns after a restart with fewer
    batch_turns: ClassVar[int] = 32  # turns per learning step, one step per arrival
    learning_rate: ClassVar[float] = 3e-3  # step size (Adam)
    guard_outcomes: ClassVar[int] = 2000  # latest outcomes that judge the model and its fallback
    queue_max: ClassVar[int] = 4096  # turns that may wait for learning; further ones are dropped
    save_s: ClassVar[float] = 60.0  # how often the predictor is saved
    file: Path | None = Field(None, description="path of that file; empty = beside the nvme tier's files")
    clock_rate: float = Field(
        1.0, gt=0, le=10_000, description="seconds that count as one; above 1 to replay a recording faster"
    )


class PolicySettings(Section):
    """The eviction policy: which blocks stay in which tier."""

    name: PolicyName = Field(
        "learned",
        description="learned = by the predicted resumption; type-km = by kind of turn; lru = by last use; "
        "ttl, t-lru = lru, but blocks older, or deeper, than needed go first",
    )
    cost_weighting: bool = Field(
        False,
        description="value a token by the time to compute it, which grows with its depth: for contexts "
        "beyond about 32k tokens",
    )
    rerank_s: ClassVar[float] = 1.0  # how often idle sessions are ranked again
    horizon_s_min: ClassVar[float] = 30.0  # shortest horizon of P(resumes)
    horizon_s_max: ClassVar[float] = 3600.0  # longest horizon of P(resumes) for guesses
    # The same for what is evicted. Where blocks stay for days, those who come back tomorrow count.
    residence_s_max: ClassVar[float] = 86_400.0
    # What resumes less likely than this is copied to slower tiers only if there is nothing better to do, and
    # no profile's min_ttl_s keeps it.
    copied_probability_min: ClassVar[float] = 0.02
    ttl_s: float = Field(300.0, ge=0, le=86400, description="policy ttl: kept this long after a turn")
    ttl_tool_s: ClassVar[float] = 120.0  # policy ttl: the same after a tool call
    remembered_blocks_max: int = Field(
        200_000,
        ge=2,
        le=100_000_000,
        description="blocks of which a node, and each replica, remembers why no tier has them: 100 bytes",
    )
    slo_tokens: int = Field(
        4096, ge=0, le=10_000_000, description="policy t-lru: prompt tokens computed within the target TTFT"
    )


class PrefetchSettings(Section):
    """Prefetching: promoting blocks before they are requested. Demand always goes first."""

    FORMER = {"useful_share_min": "accuracy_min", "useful_guesses": "accuracy_window"}

    at_queue: bool = Field(True, description="prefetch for requests that wait for admission")
    at_hint: bool = Field(True, description="prefetch when a client's hint says that it will return")
    at_pause: bool = Field(True, description="prefetch after a turn, while the upper tier has room")
    by_hazard: bool = Field(
        False, description="prefetch when the predictor expects a session; wasted 91 % on a recorded chat"
    )
    bytes_per_s_max: int = Field(256 * MIB, ge=0, le=TIB, description="budget of prefetches; 0 = none")
    inflight_bytes_max: int = Field(256 * MIB, ge=0, le=TIB, description="speculative prefetches in flight")
    burst_s: ClassVar[float] = 2.0  # how long unused budget is kept
    probability_min: ClassVar[float] = 0.3  # least P(resumes soon) for a prefetch
    accuracy_min: float = Field(
        0.25, ge=0, le=1, description="speculative prefetching pauses below this share of used bytes"
    )
    accuracy_window: ClassVar[int] = 50  # latest prefetches over which that is measured
    probe_share: ClassVar[float] = 0.02  # share of prefetches that still run then, to detect recovery
    holdout_share: ClassVar[float] = 0.05  # share of sessions without speculative prefetch, for comparison
    pending_max: ClassVar[int] = 10_000  # prefetches with an open outcome


Tier = Literal["cpu", "nvme", "s3"]
ProfileName = Literal["chat", "documents", "code", "batch"]
Text = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class CpuTierSettings(Section):
    """The main-memory tier: Ray's object store."""

    bytes_max: int | None = Field(
        None,
        ge=0,
        le=TIB,
        description="bytes this tier may hold on a node; 0 = off; empty = half of what `samovar serve` finds "
        "free beside weights and pools, as far as /dev/shm holds it; on a cluster 2 GiB",
    )

    @property
    def bytes_planned(self) -> int:
        """The bytes that the tier may hold, where the machine was not looked at."""
        return UNMEASURED_BYTES if self.bytes_max is None else self.bytes_max


UNMEASURED_BYTES = 2 * GIB


class NvmeTierSettings(Section):
    """The local-file tier."""

    bytes_max: int = Field(
        8 * GIB, ge=0, le=1024 * TIB, description="bytes this tier may hold on a node; 0 = off"
    )
    dir: Path | None = Field(None, description="directory (mode 0700); empty = `kv` in model.cache_dir")
    durability: Literal["crash", "none"] = Field(
        "crash", description="crash = fsync before publishing; none = faster, a power cut may lose blocks"
    )
    direct_io: bool | None = Field(
        None, description="bypass the page cache; empty = if a measurement at start finds it faster"
    )
    quarantine_bytes_max: int = Field(
        64 * MIB, ge=0, le=TIB, description="bad records kept for inspection; the oldest are deleted first"
    )


class S3TierSettings(Section):
    """The S3 tier: a bucket of AWS or of any server with its protocol. Off without `bucket`."""

    FORMER = {"clears_keep_s": "clears_retention_s"}

    bucket: Text | None = Field(None, description="the bucket; empty = this tier is off")
    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{0,256}$")] = Field(
        "samovar/kv", description="object keys begin with it; put a lifecycle rule on it"
    )
    endpoint: Text | None = Field(None, description="URL of an S3 server other than AWS; empty = AWS")
    region: Text = Field("us-east-1", description="region of the bucket")
    access_key_id: SecretStr | None = Field(None, description="empty = the usual AWS chain (role, env, file)")
    secret_access_key: SecretStr | None = Field(None, description="secret of access_key_id")
    bytes_max: int = Field(
        64 * GIB, ge=0, le=1024 * TIB, description="bytes of the prefix, all nodes together"
    )
    connect_s: float = Field(1.0, gt=0, le=60, description="time to connect")
    read_s_max: float = Field(10.0, gt=0, le=600, description="upper bound of the wait for an answer")
    attempts_max: int = Field(2, ge=1, le=10, description="attempts per call, including the first")
    connections: int = Field(8, ge=1, le=256, description="concurrent calls")
    warm_connections: int = Field(4, ge=0, le=256, description="connections opened at start, of these")
    index_objects_max: int = Field(
        100_000, ge=0, le=10_000_000, description="objects whose headers are read at start, the newest"
    )
    rescan_s: float = Field(
        300.0, gt=0, le=86400, description="how often the bucket is scanned for objects of other nodes"
    )
    clears_retention_s: float = Field(
        3600.0,
        gt=0,
        le=30 * 86400,
        description="how long the bucket keeps a clear's mark for nodes that were down",
    )
    clears_max: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="sessions marked one by one; beyond, their tenant is cleared",
    )

    # On the section, not on the field: a field's problem shows its value.
    @model_validator(mode="after")
    def _endpoint_is_no_secret(self) -> S3TierSettings:
        if "@" in (self.endpoint or ""):
            raise ValueError(
                "tiers.s3.endpoint holds a user or a password before an @, and the endpoint is not hidden "
                "like a secret. Give them as tiers.s3.access_key_id and tiers.s3.secret_access_key"
            )
        return self


TIER_NAME = "[a-z][a-z0-9_]{0,31}"


class FurtherTierSettings(Section):
    """A tier on a medium of your own: one node's, kept over restarts. Off without `medium`."""

    medium: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = Field(
        None,
        description="`package.module:function` that makes the tier of its name, bytes_max and options; it "
        "must be importable on every node; empty = this tier is off",
    )
    name: Annotated[str, StringConstraints(pattern=f"^{TIER_NAME}$")] = Field(
        "more", description="what receipts, metrics and the API call it"
    )
    after: Literal["cpu", "nvme"] = Field("nvme", description="tier whose blocks are demoted to it")
    bytes_max: int = Field(8 * GIB, ge=1, le=1024 * TIB, description="bytes it may hold on a node")
    options: dict[str, str] = Field(default_factory=dict, description="what the function is given by name")

    @model_validator(mode="after")
    def _name_is_free(self) -> FurtherTierSettings:
        if self.name in TAKEN:
            raise ValueError(
                f"tiers.more.name {self.name} means another place. Choose none of {', '.join(TAKEN)}"
            )
        return self


TAKEN = ("gpu", "cpu", "nvme", "s3", "peer", "compute", "replica")
"""Names of places and sources of blocks."""


class FaultSettings(Section):
    """Faults to inject into one tier, for tests and for seeing the effect of a bad disk. All off."""

    seed: int = Field(0, ge=0, description="the same seed gives the same faults")
    delay_s: float = Field(0.0, ge=0, le=600, description="each call sleeps this long")
    delay_rate: float = Field(1.0, ge=0, le=1, description="share of calls that sleep `delay_s`")
    error_rate: float = Field(0.0, ge=0, le=1, description="share of calls that fail")
    flip_rate: float = Field(0.0, ge=0, le=1, description="share of reads with one bit flipped")
    truncate_rate: float = Field(0.0, ge=0, le=1, description="share of reads that return too few bytes")
    full_rate: float = Field(0.0, ge=0, le=1, description="share of writes that fail for lack of room")
    hang_rate: float = Field(0.0, ge=0, le=1, description="share of calls that hang for `hang_s`")
    hang_s: float = Field(60.0, gt=0, le=3600, description="how long a hanging call hangs")


class FaultsSettings(Section):
    """Faults to inject, by tier, and into the mover."""

    cpu: FaultSettings = FaultSettings()
    nvme: FaultSettings = FaultSettings()
    s3: FaultSettings = FaultSettings()
    kill_at: Literal["planned", "reserved", "copying", "verified", "committed", "dropping"] | None = Field(
        None, description="the tier actor kills itself (SIGKILL) when a move reaches this state"
    )
    kill_after: int = Field(1, ge=1, description="which occurrence since the actor's start")
    kill_starts: ClassVar[int] = 1  # only in so many of the actor's starts, so that it recovers


class PeerSettings(Section):
    """Transfer of blocks from other nodes' tiers, over NIXL, TLS or Ray."""

    enabled: bool = Field(True, description="false = blocks held by another node are recomputed")
    transport: Literal["nixl", "ray"] = Field(
        "nixl",
        description="nixl = UCX (with cluster.tls_dir TLS), and Ray's object transfer as the fallback; "
        "ray = only Ray's",
    )
    arena_bytes: int = Field(64 * MIB, ge=MIB, le=TIB, description="memory for blocks in transfer")
    lookup_s_max: float = Field(0.1, gt=0, le=60, description="timeout of a peer's lookup, then a miss")
    pull_s_max: float = Field(
        10.0, gt=0, le=600, description="timeout of one extent, then the next transport"
    )
    lease_s: ClassVar[float] = 15.0  # how long exported memory is kept for a peer
    breaker_failures: ClassVar[int] = 2  # failures in a row after which a peer is skipped
    breaker_open_s: ClassVar[float] = 2.0  # skip time; doubles up to 30 times
    drain_s: float = Field(
        20.0, ge=0, le=3600, description="longest push of a node's blocks in a drain without a deadline"
    )


class NodeSettings(Section):
    """How a node's tiers start, drain and end with the node."""

    FORMER = {"leave_s": "idle_timeout_s", "remake_s_max": "restart_backoff_s_max"}

    idle_timeout_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="without a replica for this long (up to twice that), a node's tiers move their blocks to "
        "other nodes and end, so that Ray can remove the node; never on the head, nor without another place "
        "for the blocks; 0 = never",
    )
    # Longest backoff (1 s, 2 s, 4 s, ...) before a node's tier actor that keeps failing at start is
    # restarted.
    restart_backoff_s_max: ClassVar[float] = 60.0
    spot_notice: Literal["off", "aws"] = Field(
        "off", description="aws = poll the instance metadata for this machine's interruption notice"
    )
    spot_notice_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")] = Field(
        "http://169.254.169.254", description="URL of the instance metadata"
    )
    spot_poll_s: float = Field(5.0, gt=0, le=120, description="how often the metadata are polled")
    spot_answer_s_max: ClassVar[float] = 2.0  # timeout of one poll


class ProfileSettings(Section):
    """Placement and lifetime of the blocks of one use case."""

    FORMER = {"behind": "write_behind", "keep_s": "min_ttl_s", "expire_s": "ttl_s"}

    first: Tier = Field("cpu", description="tier that a turn's blocks are written to first")
    write_behind: tuple[Tier, ...] = Field(
        (), max_length=2, description="tiers that blocks are copied to next"
    )
    lowest: Tier = Field("s3", description="lowest tier that blocks are demoted to")
    min_ttl_s: float = Field(
        1800.0,
        ge=0,
        le=30 * 86400,
        description="extents used within this time are evicted after all others, unless their session is "
        "closed, a one-shot, or has left them behind",
    )
    ttl_s: float = Field(
        86400.0, gt=0, le=365 * 86400, description="extents unused for this long are deleted from all tiers"
    )


class ProfilesSettings(Section):
    """The use-case profiles. A request names its profile, else its tenant's applies, else the default."""

    chat: ProfileSettings = ProfileSettings(write_behind=("nvme",))
    documents: ProfileSettings = ProfileSettings(write_behind=("nvme", "s3"))
    code: ProfileSettings = ProfileSettings(first="nvme", write_behind=("cpu",))
    batch: ProfileSettings = ProfileSettings(first="nvme", write_behind=(), min_ttl_s=0.0)
    default: ProfileName = Field("chat", description="profile of requests and tenants that name none")
    of_tenant: dict[TenantName, ProfileName] = Field(default_factory=dict, description="tenant -> profile")

    def named(self, name: str) -> ProfileSettings:
        """Return the profile `name`, or the default one if there is none of that name."""
        found: ProfileSettings = getattr(self, name if name in get_args(ProfileName) else self.default)
        return found


class TierSettings(Section):
    """The cache tiers: blocks outside the GPU's pool."""

    FORMER = {"move_queue_max": "transfer_queue_max"}

    enabled: bool = Field(True, description="false = blocks are kept in their replica's pool only")
    socket: Path | None = Field(
        None,
        description="path of a Unix socket by which vLLM on this machine uses the same tiers; empty = none",
    )
    cpu: CpuTierSettings = CpuTierSettings()
    nvme: NvmeTierSettings = NvmeTierSettings()
    s3: S3TierSettings = S3TierSettings()
    more: FurtherTierSettings = FurtherTierSettings()
    encryption_key_file: Path | None = Field(
        None,
        description="file of the key that records in nvme and S3, and texts on disk, are encrypted with, 64 "
        "hexadecimal digits; or kms:ARN of a key of AWS KMS; empty = they are not encrypted",
    )
    profiles: ProfilesSettings = ProfilesSettings()
    peer: PeerSettings = PeerSettings()
    node: NodeSettings = NodeSettings()
    faults: FaultsSettings = FaultsSettings()
    policy: PolicySettings = PolicySettings()
    predictor: PredictorSettings = PredictorSettings()
    prefetch: PrefetchSettings = PrefetchSettings()
    extent_bytes_max: int = Field(
        16 * MIB, ge=64 * KIB, le=GIB, description="longer turns are stored as several extents"
    )
    tenant_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of each tier that one tenant may use; beyond it, the tenant's own blocks are "
        "evicted. Empty = half with several API keys, else all",
    )
    tenant_shares: dict[TenantName, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=dict, description="tenant -> share of each tier, if different"
    )
    io_threads: int = Field(4, ge=1, le=64, description="concurrent reads and writes per node")
    # Threads that seal or check one extent; never more than half of the cores.
    check_threads: ClassVar[int] = 4
    lookup_threads: ClassVar[int] = 2  # concurrent lookups per node
    store_queue_max: int = Field(
        64, ge=1, le=65536, description="waiting stores of a replica; more are dropped"
    )
    transfer_queue_max: ClassVar[int] = 1024  # copies to lower tiers that may wait
    fetch_max: int = Field(
        64,
        ge=1,
        le=4096,
        description="fetches in flight on a node, more are misses; and of a replica, whose others wait",
    )
    staged_bytes_max: int = Field(
        256 * MIB, ge=MIB, le=TIB, description="bytes one replica stages until they are pulled; others wait"
    )
    lookup_s_max: float = Field(4.0, gt=0, le=60, description="longest wait of a prompt for its lookup")
    lookup_share: float = Field(
        0.5,
        gt=0,
        le=100,
        description="share of the saving that a lookup is awaited for; over 1, lookup and load together may "
        "take that many times as long as computing",
    )
    lookup_idle_share: float = Field(
        0.2, ge=0, le=1, description="share of that wait after which an idle engine computes; 1 = never"
    )
    load_s_max: float = Field(30.0, gt=0, le=600, description="a load that takes longer is a miss")
    store_s_max: float = Field(60.0, gt=0, le=3600, description="a store that takes longer is aborted")
    hedge_factor: ClassVar[float] = 1.5  # recomputing starts at this many times a load's predicted time
    hedge_slack_s: float = Field(0.05, ge=0, le=60, description="constant added to that time")
    breaker_failures: ClassVar[int] = 3  # failures in a row that open a breaker
    breaker_open_s: float = Field(2.0, gt=0, le=3600, description="how long a breaker stays open at first")
    breaker_open_s_max: ClassVar[float] = 60.0  # longest time; it doubles each time
    tombstones_max: int = Field(100_000, ge=1, description="cleared sessions and tenants that are tracked")
    settle_s: float = Field(
        5.0, ge=0, le=3600, description="how long a stopping replica may take to hand over its last turns"
    )
    flush_s: float = Field(
        20.0, ge=0, le=3600, description="how long a stop may take to write the cpu tier to disk"
    )
    swap_bytes_max: int = Field(
        256 * MIB, ge=0, le=TIB, description="bytes of preempted sequences' blocks per replica; 0 = drop"
    )
    audit_share: float = Field(
        0.01, ge=0, le=1, description="share of restored prompts that are recomputed and compared"
    )
    audit_tokens_max: ClassVar[int] = 2048  # audited tokens of a restored prompt
    audit_step_tokens: ClassVar[int] = 64  # tokens of one audit step, while idle

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes that each tier may hold on a node, by name; 0 = off."""
        s3_bytes = self.s3.bytes_max if self.s3.bucket else 0
        built_in = {"cpu": self.cpu.bytes_planned, "nvme": self.nvme.bytes_max, "s3": s3_bytes}
        return built_in | ({} if self.more.medium is None else {self.more.name: self.more.bytes_max})


class GrammarSettings(Section):
    """Grammars that an answer is to follow: JSON schemas, regexes, choices."""

    spec_bytes_max: int = Field(
        64 * KIB,
        ge=KIB,
        le=256 * KIB,
        description="a schema, regex, list of choices or grammar, as text; compiling it takes a thread with "
        "a stack of up to 4 KiB a byte",
    )
    gbnf_bytes_max: int = Field(
        16 * KIB, ge=KIB, le=64 * KIB, description="a grammar in GBNF, whose translation to Lark is slow"
    )
    compile_s_max: float = Field(
        1.0,
        gt=0,
        le=60,
        description="CPU time in which an ingress must compile a grammar and find its first tokens; else 400",
    )
    mask_s_max: float = Field(
        5.0,
        gt=0,
        le=120,
        description="how long a token waits for its grammar; then the request ends with an error",
    )
    lexer_states_max: int = Field(
        10_000, ge=1000, le=1_000_000, description="states of one grammar's automaton, up to 2 KiB each"
    )
    symbols_max: int = Field(
        100_000, ge=1000, le=10_000_000, description="symbols in the productions of one compiled grammar"
    )
    kept_max: int = Field(
        32,
        ge=1,
        le=4096,
        description="compiled grammars that each replica, and each ingress, keeps; it bounds their memory",
    )
    threads: int = Field(
        1, ge=1, le=64, description="threads of a replica that find the allowed tokens beside its steps"
    )


class DraftSettings(Section):
    """How many tokens a step guesses and checks; a base of the section `engine`."""

    draft_tokens_max: int = Field(
        7,
        ge=0,
        le=64,
        description="tokens of an answer that one step guesses from its own text and checks, where guesses "
        "were right so far and engine.exact holds: the same answer in fewer steps; 0 = one token a step",
    )
    draft_rows_max: ClassVar[int] = 32  # tokens of a step with guesses, those of all its answers together


class SplitSettings(DraftSettings):
    """How a replica is split over GPUs, and its blocks into groups of heads."""

    kv_groups: int = Field(
        1,
        ge=1,
        le=128,
        description="runs of KV heads that a block consists of; must divide the model's KV heads. GPUs that "
        "share a replica hold whole groups each; with another number, stored blocks are not found",
    )
    tensor_parallel: Literal[1, 2, 4, 8] = Field(
        1,
        description="GPUs of one node that share a replica; engine.kv_groups must be a multiple of it",
    )
    rank_wait_s: float = Field(
        60.0,
        ge=0.1,
        le=3600,
        description="with engine.tensor_parallel: how long a GPU's process may take to copy a run of "
        "blocks, or to have room for the next step, before the replica counts as dead",
    )
    rank_staging_bytes: int = Field(
        32 * MIB,
        ge=MIB,
        le=16 * GIB,
        description="with engine.tensor_parallel: memory of a replica through which the blocks of all its "
        "GPUs move",
    )


VOLATILE_LINES = ("x-anthropic-billing-header",)
LineName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?$", to_lower=True)
]


PRIORITY_MAX = 100
"""The largest number, up or down, that a request's priority may have."""
Priority = Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
BODY_IDS = ("session_id", "prompt_cache_key", "user")
"""Fields of a request's body that may name its conversation; `METADATA` + key is a field of `metadata`."""
METADATA = "metadata."
SESSION_IDS = (
    "x-session-id",
    "x-session-affinity",
    "session_id",
    "prompt_cache_key",
    "x-openwebui-chat-id",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "metadata.user_id",
    "any-session-header",
    "user",
    "x-user-id",
)


class PrefixSettings(Section):
    """What keeps a prompt's beginning equal to that of the prompt before, and says where it is not."""

    volatile: Literal["drop", "behind", "keep"] = Field(
        "drop",
        description="volatile lines at the front of the system prompt: drop = leave them out of the prompt, "
        "behind = put them at the system prompt's end, keep = leave them, and lose what lies behind them",
    )
    volatile_lines: tuple[LineName, ...] = Field(
        VOLATILE_LINES,
        max_length=32,
        description="names (`NAME: ...`) of the lines that clients put in front of a system prompt and that "
        "change between conversations or requests; Claude Code's by default",
    )
    tools: Literal["ordered", "as_sent"] = Field(
        "ordered",
        description="tools that a client sends in another order than in the turn before, or as other JSON "
        "of the same meaning: ordered = written as they were, which keeps the prompt's beginning equal; "
        "as_sent = leave them, and lose the prefix",
    )
    prompts_max: int = Field(
        8,
        ge=0,
        le=64,
        description="last prompts of a session with which a new one is compared, so that its receipt says "
        "where it left their prefix; 0 = off",
    )
    memory_bytes_max: int = Field(
        32 * MIB,
        ge=0,
        le=TIB,
        description="digests of such prompts, of all sessions, and as much again for how their tools and "
        "calls are written; no other text is kept",
    )
