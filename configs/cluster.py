"""Settings of the cluster, its launch on machines and its scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, StringConstraints, model_validator

from samovar.configs.optional_sections import MonitoringSettings
from samovar.configs.sections import MIB, Section
from samovar.configs.tls import NodeTls, tls_in

RayAddress = Annotated[str, StringConstraints(pattern=r"^(local|auto|[A-Za-z0-9._-]{1,253}:[0-9]{1,5})$")]


class AutoscalingSettings(Section):
    """Number of replicas between two bounds, by load, KV pressure and expected resumptions."""

    FORMER = {
        "busy_share": "target_utilization",
        "return_weight": "resumption_weight",
        "to_zero_delay_s": "downscale_to_zero_delay_s",
        "report_s": "metrics_interval_s",
    }

    enabled: bool = Field(False, description="false = cluster.replicas, always")
    replicas_min: int = Field(1, ge=0, le=1000, description="lower bound; 0 = none while there is no load")
    replicas_max: int = Field(
        4, ge=1, le=1000, description="upper bound; each takes engine.tensor_parallel GPUs"
    )
    target_utilization: float = Field(
        0.7,
        gt=0,
        le=1,
        description="a replica is full at this share of its sequences, or of its pool held by running ones",
    )
    queue_wait_s: float = Field(
        2.0, gt=0, le=600, description="add a replica when prompts wait this long to be computed"
    )
    horizon_s: float = Field(
        60.0, gt=0, le=3600, description="sessions expected to resume within this time count as load"
    )
    resumption_weight: float = Field(
        0.5, ge=0, le=1, description="weight of such a session, relative to a running sequence; 0 = ignored"
    )
    upscale_delay_s: float = Field(10.0, ge=0, le=3600, description="more must be wanted for this long")
    downscale_delay_s: float = Field(300.0, ge=0, le=86400, description="fewer must be wanted for this long")
    downscale_to_zero_delay_s: float = Field(
        1800.0, ge=0, le=86400, description="no load for this long before the last replica stops"
    )
    metrics_interval_s: float = Field(5.0, ge=0.5, le=600, description="how often replicas report their load")

    @model_validator(mode="after")
    def _range(self) -> AutoscalingSettings:
        if self.replicas_min > self.replicas_max:
            raise ValueError(
                f"cluster.autoscaling.replicas_min={self.replicas_min} is more than "
                f"cluster.autoscaling.replicas_max={self.replicas_max}. Raise the second or lower the first"
            )
        return self


class LinkSettings(Section):
    """Connections that carry streamed answers, beside Ray Serve's calls: replica, ingress, proxy."""

    enabled: bool = Field(
        True,
        description="false = every token is a message of Ray Serve, about a CPU-ms at each end",
    )
    connect_s: float = Field(
        0.5, gt=0, le=60, description="a process not reached within this time is answered through Ray Serve"
    )
    links_max: ClassVar[int] = 1024  # connections that a process accepts, one for each that sends to it
    # Calls that a process serves at a time of those that come over links; Ray Serve carries more.
    calls_max: ClassVar[int] = 4096
    # A request to a replica up to this size goes over a link; Ray Serve carries a larger one.
    call_bytes_max: ClassVar[int] = 4 * MIB
    # After this silence a connection is probed, and ended if the other machine is gone.
    keepalive_s: ClassVar[int] = 5
    # A connection with more unread bytes is closed, and its answers are resumed.
    unread_bytes_max: ClassVar[int] = 64 * MIB
    # The writer waits while a client leaves this many bytes of its answer unread.
    stream_bytes_max: ClassVar[int] = 256 * 1024
    # So much of a request's body goes to the ingress with the request; the rest follows when an ingress
    # has taken it. 0 = all of it follows.
    body_bytes_max: ClassVar[int] = 16 * 1024


class ClusterSettings(Section):
    """The Ray cluster below the service, and its number of replicas."""

    replicas: int = Field(1, ge=1, le=1000, description="replicas; with autoscaling: at start")
    replicas_per_node_max: int | None = Field(
        None,
        ge=1,
        le=100,
        description="model replicas on one node; empty = as many as fit. With engine.tensor_parallel "
        "above 1 Ray places by GPUs alone, and this only says how many share a node",
    )
    replica_cpus: float = Field(
        0.0,
        ge=0,
        le=1024,
        description="Ray CPUs that a replica reserves; Ray adds nodes for these or for GPUs",
    )
    replica_resources: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default_factory=dict, max_length=16, description="other Ray resources that a replica reserves"
    )
    ray_address: RayAddress = Field(
        "local", description="`local` starts a private cluster; `auto` or HOST:PORT joins a running one"
    )
    dashboard: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")] = Field(
        "http://127.0.0.1:8265", description="Ray's dashboard, used by `samovar deploy`"
    )
    object_store_bytes: int | None = Field(
        None,
        ge=80 * MIB,
        description="Ray object store of a `local` cluster; empty = tiers.cpu.bytes_max / 0.6 + 256 MiB",
    )
    tls_dir: Path | None = Field(
        None,
        description="directory on every node with ca.crt, tls.crt and tls.key (PEM): Ray and our connections "
        "between processes speak TLS alone, and both ends show a certificate of that authority; `samovar up` "
        "makes these files on a rack if it is ~/samovar-tls; empty = no TLS, but for server.tls_certificate",
    )
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    links: LinkSettings = LinkSettings()
    _others: int = PrivateAttr(0)

    @property
    def tls(self) -> NodeTls | None:
        """The files of `tls_dir`, on a node."""
        return None if self.tls_dir is None else tls_in(self.tls_dir.expanduser())

    @property
    def replicas_first(self) -> int:
        """Number of replicas to start."""
        scaling = self.autoscaling
        if not scaling.enabled:
            return self.replicas
        return min(max(self.replicas, scaling.replicas_min, 1), scaling.replicas_max)

    @property
    def replicas_ready(self) -> int:
        """Replicas that must answer before the service is ready.

        With autoscaling, others may have gone by then.
        """
        return max(1, self.autoscaling.replicas_min) if self.autoscaling.enabled else self.replicas

    def sharing_node(self, cores: int) -> int:
        """Return how many replicas may have to share the memory and the `cores` of one node."""
        if self.replicas_per_node_max is None and self.replica_cpus > 0:
            return max(1, int(cores / self.replica_cpus))  # of all models: Ray counts them together
        return self.replicas_on_node + self._others

    @property
    def replicas_on_node(self) -> int:
        """Replicas of one model that may be on one node, if Ray does not count its cores."""
        if self.replicas_per_node_max is not None:
            return self.replicas_per_node_max
        return self.autoscaling.replicas_max if self.autoscaling.enabled else self.replicas

    def beside(self, others: int) -> ClusterSettings:
        """Return these settings of a model that shares its nodes with so many replicas of other models.

        That is no setting: another number of theirs restarts no replica of this model.
        """
        found = self.model_copy()
        found._others = others
        return found


ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,30}[a-z0-9]$")]
HostAddress = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?$")]
ImageDigest = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._/:-]{0,254}@sha256:[0-9a-f]{64}$")]
Command = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class RackSettings(Section):
    """Existing machines, reached by SSH."""

    head: HostAddress | None = Field(None, description="address of the head node; empty = no rack")
    workers: tuple[HostAddress, ...] = Field((), max_length=1000, description="addresses of the other nodes")
    workers_min: int | None = Field(None, ge=0, le=1000, description="workers always up; empty = all")
    gpus: int = Field(0, ge=0, le=64, description="GPUs of each worker")
    spare_cpus_head: bool = Field(
        False, description="true = replicas may also run on the head node (a rack of one or two machines)"
    )


class SshSettings(Section):
    """SSH from here to the head, and from the head to the workers, as `ray up` uses it."""

    user: str = Field("ubuntu", pattern=r"^[a-z_][a-z0-9_-]{0,31}$", description="login on every node")
    private_key: Path | None = Field(None, description="file with the private key that opens all nodes")
    proxy_command: Command | None = Field(
        None, description="ProxyCommand of ssh, such as one over AWS Session Manager"
    )
    proxy_by_id: bool = Field(
        False, description="the proxy takes an instance's id, as Session Manager does, instead of its address"
    )

    @model_validator(mode="after")
    def _an_id_needs_a_proxy(self) -> SshSettings:
        if self.proxy_by_id and self.proxy_command is None:
            raise ValueError(
                "launch.ssh.proxy_by_id=true needs launch.ssh.proxy_command: ssh itself cannot find an "
                "instance by its id. Set the second or leave out the first"
            )
        return self


class HealthSettings(Section):
    """Health checks after which a silent node counts as dead. Ray's own defaults need 65 s."""

    initial_delay_ms: int = Field(5000, ge=100, le=600_000, description="delay after a node has joined")
    period_ms: int = Field(1000, ge=100, le=600_000, description="time between two checks")
    timeout_ms: int = Field(2000, ge=100, le=600_000, description="a check that takes longer has failed")
    failures: int = Field(4, ge=1, le=100, description="failed checks in a row that make a node dead")


class GcsSettings(Section):
    """Storage of the Ray head's state. In memory, the cluster is lost with the head."""

    storage: Literal["memory", "rocksdb", "redis"] = Field(
        "rocksdb", description="rocksdb = a directory on the head; redis = your own server"
    )
    dir: Path = Field(Path("~/samovar-gcs"), description="directory of rocksdb, on the head node")
    redis_address: HostAddress | None = Field(None, description="HOST:PORT of the redis server")
    away_s_max: int = Field(
        600,
        ge=60,
        le=86400,
        description="how long nodes go on without the head (Ray's own: 60)",
    )

    @model_validator(mode="after")
    def _redis_is_somewhere(self) -> GcsSettings:
        if self.storage == "redis" and self.redis_address is None:
            raise ValueError("launch.gcs.storage=redis needs launch.gcs.redis_address=HOST:PORT")
        return self


class KubeSettings(Section):
    """Pods of the RayService that `samovar render --kuberay` writes. One worker pod holds a node's tiers."""

    worker_cpus: float = Field(4.0, ge=0.5, le=1024, description="CPUs of a worker pod")
    worker_memory_bytes: int = Field(
        16 * 1024 * MIB, ge=1024 * MIB, description="memory of a worker pod, with its part in /dev/shm"
    )
    worker_gpus: int = Field(0, ge=0, le=64, description="GPUs (nvidia.com/gpu) of a worker pod")
    workers_min: int = Field(1, ge=0, le=1000, description="worker pods that are always there")
    workers_max: int = Field(4, ge=1, le=1000, description="worker pods that Ray's autoscaler may ask for")
    head_cpus: float = Field(2.0, ge=0.5, le=1024, description="CPUs of the head pod; no replica runs there")
    head_memory_bytes: int = Field(8 * 1024 * MIB, ge=1024 * MIB, description="memory of the head pod")
    secret: ClusterName = Field(
        "samovar-secrets", description="Kubernetes Secret with the secrets, under the key secrets.yaml"
    )
    model_claim: ClusterName | None = Field(
        None, description="PersistentVolumeClaim with weights, mounted read-only at /models; empty = none"
    )

    @model_validator(mode="after")
    def _range(self) -> KubeSettings:
        if self.workers_min > self.workers_max:
            raise ValueError(
                f"launch.kube.workers_min={self.workers_min} is more than "
                f"launch.kube.workers_max={self.workers_max}. Raise the second or lower the first"
            )
        return self


class LaunchSettings(Section):
    """How `samovar up` starts a Ray cluster, and what its nodes run.

    Cloud machines come from Terraform's outputs (`cluster/launch/terraform.py`): types, numbers and
    networks are defined only there. Rack machines are named in `rack`.
    """

    name: ClusterName = Field("samovar", description="name of the cluster, in tags and in Ray")
    provider: Literal["aws", "rack"] = Field(
        "aws", description="aws = machines from Terraform's outputs; rack = those of launch.rack"
    )
    rack: RackSettings = RackSettings()
    kube: KubeSettings = KubeSettings()
    ssh: SshSettings = SshSettings()
    health: HealthSettings = HealthSettings()
    gcs: GcsSettings = GcsSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    image: ImageDigest | None = Field(
        None, description="docker image NAME@sha256:DIGEST that contains Samovar; empty = no docker"
    )
    setup_commands: tuple[Command, ...] = Field(
        (), max_length=64, description="run on every node before Ray starts, such as `pip install samovar`"
    )
    venv: str | None = Field(
        None,
        max_length=512,
        description="directory on every node, with bin/ray and bin/samovar; empty = PATH",
    )
    wheel: Path | None = Field(
        None,
        description="path of Samovar's wheel (`pip wheel --no-deps .` makes it), installed into "
        "launch.venv on every node; empty = already installed",
    )
    kv_dir: Path = Field(Path("/mnt/kv"), description="where the nodes' NVMe is mounted")
    gcs_port: int = Field(6379, ge=1024, le=65535, description="port of Ray's head")
    dashboard_port: int = Field(8265, ge=1024, le=65535, description="port of the dashboard, on loopback")
    object_manager_port: int = Field(8076, ge=1024, le=65535, description="port between nodes")
    node_manager_port: int = Field(8077, ge=1024, le=65535, description="port between nodes")
    metrics_port: int = Field(8080, ge=1024, le=65535, description="port of Ray's metrics, on every node")
    object_store_bytes: int | None = Field(
        None, ge=80 * MIB, description="Ray's object store of a worker; empty = by tiers.cpu.bytes_max"
    )
    idle_timeout_min: float = Field(
        5.0,
        gt=0,
        le=1440,
        description="idle time before a rack's worker is stopped; AWS pools have their own",
    )
    upscaling_speed: ClassVar[float] = 1.0  # as in Ray's cluster file
    up_timeout_s: float = Field(
        1800.0, ge=30, le=86400, description="how long nodes and replicas may take until the cluster serves"
    )
