"""What `ray down` leaves in AWS: instances that live, and a load balancer's targets. Knows no files."""

from __future__ import annotations

from typing import Any

from cluster.ssm_parameters import asked

CLUSTER_TAG = "ray-cluster-name"
LIVE_STATES = ["pending", "running", "stopping", "stopped"]


def live_instances(ec2: Any, cluster_name: str) -> list[str]:
    """One line for each. `ec2`: a client of boto3's. Raises `AwsRefused`."""
    filters = [
        {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster_name]},
        {"Name": "instance-state-name", "Values": LIVE_STATES},
    ]
    pages = asked(
        lambda: list(ec2.get_paginator("describe_instances").paginate(Filters=filters)),
        f"list the instances of the cluster {cluster_name}",
        "ec2:DescribeInstances",
    )
    return [
        f"instance {instance['InstanceId']} is {instance['State']['Name']}"
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    ]


def leave_targets(elb: Any, target_group_arn: str) -> None:
    """Addresses of nodes that are gone: others may get them one day. Raises `AwsRefused`."""
    health = asked(
        lambda: elb.describe_target_health(TargetGroupArn=target_group_arn),
        f"list the targets of {target_group_arn}",
        "elasticloadbalancing:DescribeTargetHealth",
    )
    targets = [row["Target"] for row in health["TargetHealthDescriptions"]]
    if targets:
        asked(
            lambda: elb.deregister_targets(TargetGroupArn=target_group_arn, Targets=targets),
            f"remove the targets of {target_group_arn}",
            "elasticloadbalancing:DeregisterTargets on it",
        )
