"""Reads and checks `terraform output -json`, which describes the cloud resources of a cluster.

It is the contract between `terraform/outputs.tf` and the renderer. It holds no secrets: those are in SSM,
below `ssm_prefix`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from samovar.configs.cluster import ClusterName
from samovar.configs.json_text import parse_json
from samovar.configs.sections import Section

OUTPUT = "samovar"

Text = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
PoolName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
Count = Annotated[int, Field(ge=0, le=1000)]


class OutputsRefused(Exception):
    """The file is not the `terraform output -json` of our root module; the message says why."""


class HeadOutputs(Section):
    """The machine of Ray's head node."""

    instance_type: Text
    ami_id: Text
    instance_profile_arn: Text
    subnet_id: Text
    disk_gib: int = Field(ge=8, le=16384)


class PoolOutputs(Section):
    """Workers of one kind. `has_own_network`: the launch template carries the network interfaces (EFA)."""

    launch_template_id: Text
    launch_template_version: Text
    instance_type: Text
    market: Literal["on-demand", "spot"]
    min_workers: Count
    max_workers: Count
    idle_timeout_min: float = Field(gt=0, le=1440)
    gpus: Count
    nvme_disks: Count
    efa_interfaces: Count
    subnet_ids: tuple[Text, ...] = Field(min_length=1)
    has_own_network: bool


class KvOutputs(Section):
    """The bucket of the s3 tier."""

    bucket: Text
    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{0,256}$")]
    region: Text


class CloudOutputs(Section):
    """The value of the output `samovar`."""

    cluster_name: ClusterName
    region: Text
    key_name: Text | None
    head: HeadOutputs
    worker_instance_profile_arn: Text
    security_group_id: Text
    subnet_ids: tuple[Text, ...] = Field(min_length=1)
    pools: dict[PoolName, PoolOutputs] = Field(min_length=1)
    kv: KvOutputs
    kms_key_arn: Text | None = None  # `down` needs none, and outputs of before it have none
    ssm_prefix: Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9_.-]+){1,14}$")]
    target_group_arn: Text | None
    endpoint_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s]+$")]
    log_group: Text


def read_outputs(path: Path) -> CloudOutputs:
    """Return the outputs in a file. Raises `OutputsRefused`."""
    try:
        found = parse_json(path.read_text())
    except OSError as error:
        raise OutputsRefused(f"{path} cannot be read: {error.strerror}. {_make(path)}") from error
    except ValueError as error:
        raise OutputsRefused(f"{path} is no JSON ({error}). {_make(path)}") from error
    return parse_outputs(found, str(path))


def parse_outputs(found: Any, place: str) -> CloudOutputs:
    """Parse the output of `terraform output -json`, as plain data. Raises `OutputsRefused`."""
    output = found.get(OUTPUT) if isinstance(found, dict) else None
    if not isinstance(output, dict) or "value" not in output:
        raise OutputsRefused(f"{place} has no output `{OUTPUT}`. {_make(Path(place))}")
    try:
        return CloudOutputs.model_validate(output["value"])
    except ValidationError as error:
        details = [
            f"  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)
        ]
        raise OutputsRefused(
            f"the output `{OUTPUT}` in {place} is not what this version of Samovar reads:\n"
            + "\n".join(details)
            + "\n  Apply the terraform/ of the same version again"
        ) from None


def _make(path: Path) -> str:
    return f"Make it with `terraform -chdir=terraform output -json > {path.name}`, after `terraform apply`"
