"""What AWS allows and what its machines have, from botocore's and moto's tables: gaps of a schema closed.

It knows no Terraform but the form of its state.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

import botocore.session

ENUMS: dict[str, dict[str, tuple[str, str]]] = {
    "aws_launch_template": {
        "instance_type": ("ec2", "InstanceType"),
        "instance_initiated_shutdown_behavior": ("ec2", "ShutdownBehavior"),
        "block_device_mappings.ebs.volume_type": ("ec2", "VolumeType"),
        "instance_market_options.market_type": ("ec2", "MarketType"),
        "instance_market_options.spot_options.spot_instance_type": ("ec2", "SpotInstanceType"),
        "instance_market_options.spot_options.instance_interruption_behavior": (
            "ec2",
            "InstanceInterruptionBehavior",
        ),
        "metadata_options.http_tokens": ("ec2", "LaunchTemplateHttpTokensState"),
        "metadata_options.http_endpoint": ("ec2", "LaunchTemplateInstanceMetadataEndpointState"),
        "network_interfaces.interface_type": ("ec2", "NetworkInterfaceType"),
    },
    "aws_placement_group": {"strategy": ("ec2", "PlacementStrategy")},
    "aws_vpc_endpoint": {"vpc_endpoint_type": ("ec2", "VpcEndpointType")},
    "aws_flow_log": {
        "traffic_type": ("ec2", "TrafficType"),
        "log_destination_type": ("ec2", "LogDestinationType"),
    },
    "aws_lb": {"load_balancer_type": ("elbv2", "LoadBalancerTypeEnum")},
    "aws_lb_listener": {
        "protocol": ("elbv2", "ProtocolEnum"),
        "default_action.type": ("elbv2", "ActionTypeEnum"),
    },
    "aws_lb_target_group": {
        "protocol": ("elbv2", "ProtocolEnum"),
        "target_type": ("elbv2", "TargetTypeEnum"),
        "health_check.protocol": ("elbv2", "ProtocolEnum"),
    },
    "aws_cloudwatch_metric_alarm": {
        "comparison_operator": ("cloudwatch", "ComparisonOperator"),
        "statistic": ("cloudwatch", "Statistic"),
    },
    "aws_s3_bucket_ownership_controls": {"rule.object_ownership": ("s3", "ObjectOwnership")},
    "aws_s3_bucket_server_side_encryption_configuration": {
        "rule.apply_server_side_encryption_by_default.sse_algorithm": ("s3", "ServerSideEncryption"),
    },
    "aws_s3_bucket_lifecycle_configuration": {"rule.status": ("s3", "ExpirationStatus")},
    "aws_budgets_budget": {
        "budget_type": ("budgets", "BudgetType"),
        "time_unit": ("budgets", "TimeUnit"),
        "notification.comparison_operator": ("budgets", "ComparisonOperator"),
        "notification.threshold_type": ("budgets", "ThresholdType"),
        "notification.notification_type": ("budgets", "NotificationType"),
    },
}
"""Resource type -> attribute path -> the shape of botocore (service, name) that lists what is allowed."""


class Found(NamedTuple):
    """A value somewhere in a state that must be one of a list."""

    path: str  # "aws_lb.edge: load_balancer_type", without index
    kind: str  # "aws_lb.load_balancer_type"
    value: str
    allowed: bool


def enum_values(state: dict[str, Any]) -> list[Found]:
    """Every value of ENUMS in a state; those with `allowed` False are what AWS would refuse."""
    found = []
    for resource in state["resources"]:
        for path, shape in ENUMS.get(resource["type"], {}).items():
            for instance in resource["instances"]:
                for value in _at(instance["attributes"], path.split(".")):
                    where = f"{resource['type']}.{resource['name']}: {path}"
                    allowed = value in _allowed(*shape)
                    found.append(Found(where, f"{resource['type']}.{path}", value, allowed))
    return found


def _at(value: Any, path: list[str]) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _at(one, path)
    elif not path:
        if value not in (None, ""):
            yield value
    elif isinstance(value, dict):
        yield from _at(value.get(path[0]), path[1:])


@functools.cache
def _allowed(service: str, shape: str) -> frozenset[str]:
    session = botocore.session.get_session()
    return frozenset(session.get_service_model(service).shape_for(shape).enum)


class Machine(NamedTuple):
    """What a pool declares and its instance type has."""

    gpus: int
    nvme_disks: int
    efa_interfaces: int


def machine(instance_type: str) -> Machine:
    """The facts of a type, from AWS's own DescribeInstanceTypes as moto keeps it. Raises KeyError."""
    facts = _machines()[instance_type]
    return Machine(
        sum(one["Count"] for one in facts.get("GpuInfo", {}).get("Gpus", [])),
        sum(one["Count"] for one in facts.get("InstanceStorageInfo", {}).get("Disks", [])),
        facts["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
    )


@functools.cache
def _machines() -> dict[str, Any]:
    packed = files("moto.ec2").joinpath("resources/instance_types.json.gz").read_bytes()
    return json.loads(gzip.decompress(packed))


def wrong_pools(pools: dict[str, Any]) -> list[str]:
    """What pools (of the output `samovar`) declare and their instance types do not have.

    A pool may leave EFA unused (0), but not use more interfaces than there are.
    """
    wrong = []
    for name, pool in sorted(pools.items()):
        kind = pool["instance_type"]
        if kind not in _machines():
            wrong.append(f"{name}: no instance type {kind}")
            continue
        has = machine(kind)
        for field in ("gpus", "nvme_disks"):
            if pool[field] != getattr(has, field):
                wrong.append(f"{name}: {field} = {pool[field]}, {kind} has {getattr(has, field)}")
        if pool["efa_interfaces"] > has.efa_interfaces:
            wrong.append(
                f"{name}: efa_interfaces = {pool['efa_interfaces']}, {kind} has {has.efa_interfaces}"
            )
    return wrong
