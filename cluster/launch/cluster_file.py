"""Models the file that `ray up` reads: exactly Ray's schema, and the part of EC2's that we use.

Ray itself accepts misspelled keys below `provider` and `node_config`; here they are refused. `render.py`
fills it in.
"""

from __future__ import annotations

from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_pascal

from samovar.configs.sections import Section


class Ec2Section(BaseModel):
    """The base of EC2 sections: keys of RunInstances are in PascalCase."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_pascal, validate_by_name=True, validate_by_alias=True
    )


class Profile(Ec2Section):
    arn: str


class LaunchTemplate(Ec2Section):
    launch_template_id: str
    version: str


class Ebs(Ec2Section):
    volume_size: int
    volume_type: Literal["gp3"] = "gp3"
    encrypted: Literal[True] = True
    delete_on_termination: Literal[True] = True


class Disk(Ec2Section):
    device_name: str
    ebs: Ebs


class Metadata(Ec2Section):
    """Metadata options: IMDSv2 only; two hops, because a container is one hop further away."""

    http_tokens: Literal["required"] = "required"
    http_endpoint: Literal["enabled"] = "enabled"
    http_put_response_hop_limit: int = 2


class Market(Ec2Section):
    market_type: Literal["spot"] = "spot"


class Ec2Node(Ec2Section):
    """Arguments of RunInstances, and `SubnetIds`, which Ray turns into one `SubnetId` with capacity.

    There is no UserData: Ray encodes that of a launch template twice. Values here override a template's.
    """

    instance_type: str
    key_name: str
    iam_instance_profile: Profile
    image_id: str | None = None
    launch_template: LaunchTemplate | None = None
    subnet_ids: tuple[str, ...] | None = None
    security_group_ids: tuple[str, ...] | None = None
    instance_market_options: Market | None = None
    block_device_mappings: tuple[Disk, ...] | None = None
    metadata_options: Metadata | None = None


class NodeDocker(Section):
    worker_run_options: tuple[str, ...] = ()


class NodeType(Section):
    """One kind of node. `resources`: those that Ray does not derive from the instance type."""

    resources: dict[str, int] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    min_workers: int
    max_workers: int
    idle_timeout_s: float | None = None
    initialization_commands: tuple[str, ...] | None = None
    docker: NodeDocker | None = None
    node_config: Ec2Node


class AwsProvider(Section):
    """The AWS provider. Stopped instances lose their NVMe, so none is kept. All addresses are private."""

    type: Literal["aws"] = "aws"
    region: str
    cache_stopped_nodes: Literal[False] = False
    use_internal_ips: Literal[True] = True


class RackProvider(Section):
    type: Literal["local"] = "local"
    head_ip: str
    worker_ips: tuple[str, ...]


class Auth(Section):
    ssh_user: str
    ssh_private_key: str | None = None
    ssh_proxy_command: str | None = None
    ssh_proxy_use_node_id: Literal[True] | None = None


CONTAINER = "samovar"


class Docker(Section):
    image: str
    container_name: str = CONTAINER
    pull_before_run: bool = True
    run_options: tuple[str, ...]
    disable_shm_size_detection: Literal[True] = True


class ClusterFile(Section):
    """The cluster file. All command lists are given, even empty: Ray fills in its own for missing ones."""

    cluster_name: str
    min_workers: int | None = None
    max_workers: int
    upscaling_speed: float
    idle_timeout_minutes: float
    provider: AwsProvider | RackProvider
    auth: Auth
    docker: Docker | None = None
    head_node_type: str | None = None
    available_node_types: dict[str, NodeType] | None = None
    file_mounts: dict[str, str]
    cluster_synced_files: tuple[str, ...] = ()
    file_mounts_sync_continuously: Literal[False] = False
    rsync_exclude: tuple[str, ...] = ()
    rsync_filter: tuple[str, ...] = ()
    initialization_commands: tuple[str, ...]
    setup_commands: tuple[str, ...]
    head_setup_commands: tuple[str, ...] = ()
    worker_setup_commands: tuple[str, ...] = ()
    head_start_ray_commands: tuple[str, ...]
    worker_start_ray_commands: tuple[str, ...]

    def tree(self) -> dict[str, Any]:
        """Return the file as plain data, as Ray reads it."""
        found: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return found

    def text(self, header: str) -> str:
        """Return the file as YAML, below `header` as a comment."""
        comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
        return comment + "\n" + yaml.safe_dump(self.tree(), sort_keys=False, width=1000, allow_unicode=True)
