"""How `samovar up` starts a Ray cluster: what `ray up` needs beside what Terraform, or a rack, says.

Machines in a cloud come from Terraform's outputs (`cluster/terraform_outputs.py`): their types, numbers and
networks are decided there and nowhere else. Those in a rack are named here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from configs.section import MIB, Section

ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,30}[a-z0-9]$")]
HostAddress = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?$")]
ImageDigest = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._/:-]{0,254}@sha256:[0-9a-f]{64}$")]
Command = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class RackSettings(Section):
    """Machines that are there already, reached by SSH."""

    head: HostAddress | None = Field(None, description="address of the head node; empty = no rack")
    workers: tuple[HostAddress, ...] = Field((), max_length=1000, description="addresses of the other nodes")
    workers_min: int | None = Field(None, ge=0, le=1000, description="always up; empty = all of them")
    gpus: int = Field(0, ge=0, le=64, description="GPUs of each worker")
    spare_cpus_head: bool = Field(
        False, description="true = replicas may run on the head node, too (a rack of one or two machines)"
    )


class SshSettings(Section):
    """How `ray up` reaches the head, and the head the workers."""

    user: str = Field("ubuntu", pattern=r"^[a-z_][a-z0-9_-]{0,31}$", description="login on every node")
    private_key: Path | None = Field(None, description="file with the private key that opens all nodes")
    proxy_command: Command | None = Field(
        None, description="ProxyCommand of ssh, such as one over AWS Session Manager"
    )
    proxy_by_id: bool = Field(
        False, description="the proxy asks for an instance's id, as Session Manager does, not its address"
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
    """When a silent node counts as dead. Ray's own defaults need 65 s."""

    initial_delay_ms: int = Field(5000, ge=100, le=600_000, description="after a node has joined")
    period_ms: int = Field(1000, ge=100, le=600_000, description="between two checks")
    timeout_ms: int = Field(2000, ge=100, le=600_000, description="a check that takes longer has failed")
    failures: int = Field(4, ge=1, le=100, description="failed checks in a row that make a node dead")


class GcsSettings(Section):
    """Where Ray's head keeps what it knows. In memory, a head that ends takes the cluster with it."""

    storage: Literal["memory", "rocksdb", "redis"] = Field(
        "rocksdb", description="rocksdb = a directory on the head; redis = a server of yours"
    )
    dir: Path = Field(Path("~/samovar-gcs"), description="of rocksdb, on the head node")
    redis_address: HostAddress | None = Field(None, description="HOST:PORT of redis")

    @model_validator(mode="after")
    def _redis_is_somewhere(self) -> GcsSettings:
        if self.storage == "redis" and self.redis_address is None:
            raise ValueError("launch.gcs.storage=redis needs launch.gcs.redis_address=HOST:PORT")
        return self


class LaunchSettings(Section):
    """The cluster file, and what its nodes run."""

    name: ClusterName = Field("samovar", description="of the cluster, in tags and in Ray")
    provider: Literal["aws", "rack"] = Field(
        "aws", description="aws = machines from Terraform's outputs; rack = those of launch.rack"
    )
    rack: RackSettings = RackSettings()
    ssh: SshSettings = SshSettings()
    health: HealthSettings = HealthSettings()
    gcs: GcsSettings = GcsSettings()
    image: ImageDigest | None = Field(
        None,
        description="docker image NAME@sha256:DIGEST that has Samovar; empty = no docker",
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
        description="Samovar's wheel on your disk (`pip wheel --no-deps .` makes it): goes to every node, "
        "into launch.venv; empty = it is there already",
    )
    kv_dir: Path = Field(Path("/mnt/kv"), description="where the nodes' NVMe is mounted")
    gcs_port: int = Field(6379, ge=1024, le=65535, description="of Ray's head")
    dashboard_port: int = Field(8265, ge=1024, le=65535, description="of Ray's dashboard, on loopback only")
    object_manager_port: int = Field(8076, ge=1024, le=65535, description="between nodes")
    node_manager_port: int = Field(8077, ge=1024, le=65535, description="between nodes")
    metrics_port: int = Field(8080, ge=1024, le=65535, description="Ray's metrics, on every node")
    object_store_bytes: int | None = Field(
        None,
        ge=80 * MIB,
        description="Ray's object store of a worker; empty = by tiers.cpu.bytes_max",
    )
    idle_timeout_min: float = Field(
        5.0,
        gt=0,
        le=1440,
        description="an idle worker of a rack is let go after this; AWS pools have their own",
    )
    upscaling_speed: float = Field(1.0, gt=0, le=100, description="as in Ray's cluster file")
    up_timeout_s: float = Field(
        1800.0, ge=30, le=86400, description="how long nodes and replicas may take until the cluster serves"
    )
