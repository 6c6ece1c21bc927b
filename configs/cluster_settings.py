"""The Ray cluster under it, and how many replicas there are.

Where the machines come from is `launch_settings.py`'s.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from configs.section import MIB, Section

RayAddress = Annotated[str, StringConstraints(pattern=r"^(local|auto|[A-Za-z0-9._-]{1,253}:[0-9]{1,5})$")]


class AutoscalingSettings(Section):
    """How many replicas: between two numbers, by load, KV pressure and who is expected back."""

    enabled: bool = Field(False, description="false = cluster.replicas, always")
    replicas_min: int = Field(1, ge=0, le=1000, description="never fewer; 0 = none while nobody is there")
    replicas_max: int = Field(4, ge=1, le=1000, description="never more")
    busy_share: float = Field(
        0.7,
        gt=0,
        le=1,
        description="a replica is full at this share of its sequences, or of its pool held by running ones",
    )
    queue_wait_s: float = Field(
        2.0, gt=0, le=600, description="prompts waiting this long to be computed are one replica too few"
    )
    horizon_s: float = Field(
        60.0, gt=0, le=3600, description="who is expected back within this time counts as load"
    )
    return_weight: float = Field(
        0.5, ge=0, le=1, description="... by this much of what a running sequence counts; 0 = not at all"
    )
    upscale_delay_s: float = Field(10.0, ge=0, le=3600, description="more are wanted for so long before")
    downscale_delay_s: float = Field(300.0, ge=0, le=86400, description="fewer are wanted for so long before")
    to_zero_delay_s: float = Field(
        1800.0, ge=0, le=86400, description="nobody was there for so long before the last one goes"
    )
    report_s: float = Field(5.0, ge=0.5, le=600, description="how often replicas tell their load")

    @model_validator(mode="after")
    def _range(self) -> AutoscalingSettings:
        if self.replicas_min > self.replicas_max:
            raise ValueError(
                f"cluster.autoscaling.replicas_min={self.replicas_min} is more than "
                f"cluster.autoscaling.replicas_max={self.replicas_max}. Raise the second or lower the first"
            )
        return self


class ClusterSettings(Section):
    """The Ray cluster under it."""

    replicas: int = Field(1, ge=1, le=1000, description="model replicas; the first number, with autoscaling")
    replicas_per_node_max: int | None = Field(
        None, ge=1, le=100, description="model replicas on one node; empty = as many as fit"
    )
    replica_cpus: float = Field(
        0.0, ge=0, le=1024, description="Ray's CPUs that a replica takes; a cluster grows by them, or by GPUs"
    )
    replica_resources: dict[str, float] = Field(
        default_factory=dict, max_length=16, description="other resources of Ray's that a replica takes"
    )
    ray_address: RayAddress = Field(
        "local", description="`local` starts a private cluster; `auto` or HOST:PORT joins the one that runs"
    )
    dashboard: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")] = Field(
        "http://127.0.0.1:8265", description="Ray's dashboard, to which `samovar deploy` sends"
    )
    object_store_bytes: int | None = Field(
        None,
        ge=80 * MIB,
        description="Ray object store of a `local` cluster; empty = tiers.cpu.bytes_max / 0.6 + 256 MiB",
    )
    autoscaling: AutoscalingSettings = AutoscalingSettings()

    @property
    def replicas_first(self) -> int:
        """How many are started."""
        scaling = self.autoscaling
        if not scaling.enabled:
            return self.replicas
        return min(max(self.replicas, scaling.replicas_min, 1), scaling.replicas_max)

    @property
    def replicas_ready(self) -> int:
        """So many must answer before the service is ready; with autoscaling others may have gone by then."""
        return max(1, self.autoscaling.replicas_min) if self.autoscaling.enabled else self.replicas

    def sharing_node(self, cores: int) -> int:
        """How many replicas may have to share the memory and the `cores` of one node."""
        if self.replicas_per_node_max is not None:
            return self.replicas_per_node_max
        if self.replica_cpus > 0:
            return max(1, int(cores / self.replica_cpus))
        return self.autoscaling.replicas_max if self.autoscaling.enabled else self.replicas
