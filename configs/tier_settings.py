"""Settings of the cache tiers: sizes, limits, prices, use-case profiles and faults to inject.

A part of the tree in `settings.py`; the same rules hold: frozen, bounds and units in the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, StringConstraints, model_validator

from configs.predict_settings import PolicySettings, PredictorSettings, PrefetchSettings
from configs.section import GIB, KIB, MIB, TIB, Section

Tier = Literal["cpu", "nvme", "s3"]
ProfileName = Literal["chat", "documents", "code", "batch"]
Text = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class CpuTierSettings(Section):
    """Main memory: Ray's object store."""

    bytes_max: int = Field(2 * GIB, ge=0, le=TIB, description="bytes this tier may hold on a node; 0 = off")


class NvmeTierSettings(Section):
    """Local files."""

    bytes_max: int = Field(
        8 * GIB, ge=0, le=1024 * TIB, description="bytes this tier may hold on a node; 0 = off"
    )
    dir: Path | None = Field(None, description="where; empty = `kv` in model.cache_dir. Private: 0700")
    durability: Literal["crash", "none"] = Field(
        "crash", description="crash = fsync before publishing; none = faster, a power cut may lose blocks"
    )
    direct_io: bool | None = Field(
        None, description="read and write past the page cache; empty = where a measurement at start is faster"
    )
    quarantine_bytes_max: int = Field(
        64 * MIB, ge=0, le=TIB, description="bad records kept for a look, the oldest go first"
    )


class S3TierSettings(Section):
    """An S3 bucket, of AWS or of any server that speaks its protocol. Off without `bucket`."""

    bucket: Text | None = Field(None, description="the bucket; empty = this tier is off")
    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{0,256}$")] = Field(
        "samovar/kv", description="object keys begin with it; put a lifecycle rule on it"
    )
    endpoint: Text | None = Field(None, description="URL of a server that is not AWS; empty = AWS")
    region: Text = Field("us-east-1", description="region of the bucket")
    access_key_id: SecretStr | None = Field(None, description="empty = the usual AWS chain (role, env, file)")
    secret_access_key: SecretStr | None = Field(None, description="belongs to access_key_id")
    bytes_max: int = Field(64 * GIB, ge=0, le=1024 * TIB, description="bytes this node may hold there")
    connect_s: float = Field(1.0, gt=0, le=60, description="time to connect")
    read_s_max: float = Field(10.0, gt=0, le=600, description="upper bound of the wait for an answer")
    attempts_max: int = Field(2, ge=1, le=10, description="tries of one call, the first included")
    connections: int = Field(8, ge=1, le=256, description="calls at the same time")
    index_objects_max: int = Field(
        100_000, ge=0, le=10_000_000, description="objects whose headers are read at start, the newest"
    )
    rescan_s: float = Field(
        300.0,
        gt=0,
        le=86400,
        description="how often the bucket is looked through for what other nodes put there",
    )
    clears_keep_s: float = Field(
        3600.0,
        gt=0,
        le=30 * 86400,
        description="a clear stays marked in the bucket for so long at least, for nodes that were away",
    )
    clears_max: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="sessions so marked that count one by one; of more, their tenant is cleared as a whole",
    )

    # Of the section, not of the field: a field's problem shows its value.
    @model_validator(mode="after")
    def _endpoint_is_no_secret(self) -> S3TierSettings:
        if "@" in (self.endpoint or ""):
            raise ValueError(
                "tiers.s3.endpoint holds a user or a password before an @, and it is shown, as no secret is. "
                "Give them as tiers.s3.access_key_id and tiers.s3.secret_access_key"
            )
        return self


class FaultSettings(Section):
    """Faults to inject into one tier: for tests and for seeing what a bad disk does. All off."""

    seed: int = Field(0, ge=0, description="the same seed gives the same faults")
    delay_s: float = Field(0.0, ge=0, le=600, description="each call sleeps this long")
    delay_rate: float = Field(1.0, ge=0, le=1, description="share of calls that sleep `delay_s`")
    error_rate: float = Field(0.0, ge=0, le=1, description="share of calls that fail")
    flip_rate: float = Field(0.0, ge=0, le=1, description="share of reads with one bit flipped")
    truncate_rate: float = Field(0.0, ge=0, le=1, description="share of reads that come short")
    full_rate: float = Field(0.0, ge=0, le=1, description="share of writes that find no room")
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
    kill_after: int = Field(1, ge=1, description="... for the n-th time since the actor's start")
    kill_starts: int = Field(1, ge=1, description="... in its first n starts only, so that it recovers")


class PeerSettings(Section):
    """Blocks that come from other nodes' tiers, over NIXL or Ray."""

    enabled: bool = Field(True, description="false = what another node holds is computed again")
    transport: Literal["nixl", "ray"] = Field(
        "nixl", description="nixl = UCX, with Ray's object transfer as the fallback; ray = only that"
    )
    arena_bytes: int = Field(
        64 * MIB, ge=MIB, le=TIB, description="registered memory of a node for blocks that come and go"
    )
    lookup_s_max: float = Field(0.1, gt=0, le=60, description="a peer that takes longer has nothing")
    pull_s_max: float = Field(
        10.0, gt=0, le=600, description="one extent takes longer: the next way is tried"
    )
    lease_s: float = Field(15.0, gt=0, le=600, description="exported memory is kept for a peer this long")
    breaker_failures: int = Field(2, ge=1, le=1000, description="failures in a row that shut a peer out")
    breaker_open_s: float = Field(2.0, gt=0, le=3600, description="... for so long, doubling up to 30 times")
    drain_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        description="longest push of a node's blocks when it is drained without a deadline",
    )


class NodeSettings(Section):
    """How the tiers of a node come and go with it."""

    leave_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="without a replica for this long (up to twice that), a node's tiers bring what they hold "
        "to others and end, so that Ray can let the node go; never on the head, nor while there is no other "
        "place; 0 = they stay",
    )
    remake_s_max: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="a node's tiers that die as soon as they are started are started again after 1 s, 2 s, "
        "4 s and so on, at most this much later",
    )
    spot_notice: Literal["off", "aws"] = Field(
        "off", description="aws = ask the instance metadata whether this machine is about to be taken away"
    )
    spot_notice_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")] = Field(
        "http://169.254.169.254", description="where the instance metadata are"
    )
    spot_poll_s: float = Field(5.0, gt=0, le=120, description="how often they are asked")
    spot_answer_s_max: float = Field(2.0, gt=0, le=60, description="no answer within this time is none")


class ProfileSettings(Section):
    """Where the blocks of one use go."""

    first: Tier = Field("cpu", description="written at the end of a turn")
    behind: tuple[Tier, ...] = Field((), max_length=2, description="copied there soon after")
    lowest: Tier = Field("s3", description="blocks never sink below")
    keep_s: float = Field(
        1800.0, ge=0, le=30 * 86400, description="used within this time, an extent goes after the others"
    )
    expire_s: float = Field(
        86400.0, gt=0, le=365 * 86400, description="not used for this long, it is forgotten everywhere"
    )


class ProfilesSettings(Section):
    """The use cases. A request names its profile, or its tenant's holds, or the default."""

    chat: ProfileSettings = ProfileSettings(behind=("nvme",))
    documents: ProfileSettings = ProfileSettings(behind=("nvme", "s3"))
    code: ProfileSettings = ProfileSettings(first="nvme", behind=("cpu",))
    batch: ProfileSettings = ProfileSettings(first="nvme", behind=(), keep_s=0.0)
    default: ProfileName = Field("chat", description="for requests and tenants that name none")
    of_tenant: dict[str, ProfileName] = Field(default_factory=dict, description="tenant -> profile")


class TierSettings(Section):
    """Blocks outside the GPU's pool."""

    enabled: bool = Field(True, description="false = a block lives in its replica's pool or nowhere")
    cpu: CpuTierSettings = CpuTierSettings()
    nvme: NvmeTierSettings = NvmeTierSettings()
    s3: S3TierSettings = S3TierSettings()
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
        description="share of each tier that one tenant may take; more evicts its own. Empty = half where "
        "there are several API keys, else all",
    )
    tenant_shares: dict[str, float] = Field(
        default_factory=dict, description="tenant -> share of each tier, where it differs"
    )
    io_threads: int = Field(4, ge=1, le=64, description="reads and writes at the same time, a node")
    lookup_threads: int = Field(2, ge=1, le=16, description="lookups at the same time, a node")
    store_queue_max: int = Field(64, ge=1, le=65536, description="stores that may wait; more are dropped")
    move_queue_max: int = Field(1024, ge=1, le=65536, description="copies to lower tiers that may wait")
    fetch_max: int = Field(64, ge=1, le=4096, description="fetches under way on a node; more are misses")
    staged_bytes_max: int = Field(
        256 * MIB, ge=MIB, le=TIB, description="bytes one replica keeps ready for the tier actor to call for"
    )
    lookup_s_max: float = Field(0.25, gt=0, le=60, description="a lookup that takes longer is a miss")
    load_s_max: float = Field(30.0, gt=0, le=600, description="a load that takes longer is a miss")
    store_s_max: float = Field(60.0, gt=0, le=3600, description="a store that takes longer is given up")
    hedge_factor: float = Field(
        1.5, ge=1, le=100, description="computing begins when a load takes this many times its predicted time"
    )
    hedge_slack_s: float = Field(0.05, ge=0, le=60, description="... and this much more")
    breaker_failures: int = Field(3, ge=1, le=1000, description="failures in a row that open a breaker")
    breaker_open_s: float = Field(2.0, gt=0, le=3600, description="first time an open breaker stays open")
    breaker_open_s_max: float = Field(60.0, gt=0, le=3600, description="longest: it doubles each time")
    tombstones_max: int = Field(100_000, ge=1, description="cleared sessions and tenants that are remembered")
    settle_s: float = Field(
        5.0, ge=0, le=3600, description="time a replica that goes may take to hand its last turns over"
    )
    flush_s: float = Field(20.0, ge=0, le=3600, description="time a stop may take to write RAM down")
    swap_bytes_max: int = Field(
        256 * MIB, ge=0, le=TIB, description="blocks of preempted sequences one replica keeps aside; 0 = drop"
    )
    audit_share: float = Field(
        0.01, ge=0, le=1, description="share of restored prompts that is computed again and compared"
    )
    audit_tokens_max: int = Field(2048, ge=16, description="tokens of a restored prompt that are audited")
    audit_step_tokens: int = Field(64, ge=16, le=4096, description="tokens of one audit step, while idle")
