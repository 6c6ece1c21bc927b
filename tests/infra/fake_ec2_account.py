"""What Terraform would have made in the one-machine EC2, and what `terraform output -json` would then say.

By hand and small: the real module is tested against the provider's schema, not here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tests.infra.fake_ec2 import CLOUD_IP, REGION, FakeEc2

VPC_CIDR = "10.77.0.0/16"
SUBNET_CIDRS = ("10.77.1.0/24", "10.77.2.0/24")
KEY_NAME = "netlab"
BUCKET = "samovar-kv-netlab"
TRUST = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}
    ],
}


@dataclass(frozen=True)
class Pool:
    """A pool as in `envs/*.tfvars`."""

    instance_type: str
    market: Literal["on-demand", "spot"]
    min_workers: int
    max_workers: int
    idle_timeout_min: float = 5.0
    gpus: int = 0
    nvme_disks: int = 0


def make_account(
    ec2: FakeEc2, cluster_name: str, public_key: str, pools: dict[str, Pool], *, port: int
) -> dict[str, Any]:
    """Makes it all; the outputs. `port`: of Serve, and of the load balancer before it, which runs then."""
    api = ec2.client("ec2")
    vpc_id = api.create_vpc(CidrBlock=VPC_CIDR)["Vpc"]["VpcId"]
    zones = [zone["ZoneName"] for zone in api.describe_availability_zones()["AvailabilityZones"]]
    subnet_ids = [
        api.create_subnet(VpcId=vpc_id, CidrBlock=cidr, AvailabilityZone=zone)["Subnet"]["SubnetId"]
        for cidr, zone in zip(SUBNET_CIDRS, zones, strict=False)
    ]
    group_id = api.create_security_group(VpcId=vpc_id, GroupName=cluster_name, Description="nodes")["GroupId"]
    api.import_key_pair(KeyName=KEY_NAME, PublicKeyMaterial=public_key.encode())
    image_id = api.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    profiles = {role: _profile(ec2, f"{cluster_name}-{role}") for role in ("head", "worker")}
    ec2.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    target_group_arn = ec2.client("elbv2").create_target_group(
        Name=cluster_name, Protocol="HTTP", Port=port, VpcId=vpc_id, TargetType="ip"
    )["TargetGroups"][0]["TargetGroupArn"]
    ec2.balance(target_group_arn, port)
    value = {
        "cluster_name": cluster_name,
        "region": REGION,
        "key_name": KEY_NAME,
        "head": {
            "instance_type": "m6i.large",
            "ami_id": image_id,
            "instance_profile_arn": profiles["head"],
            "subnet_id": subnet_ids[0],
            "disk_gib": 32,
        },
        "worker_instance_profile_arn": profiles["worker"],
        "security_group_id": group_id,
        "subnet_ids": subnet_ids,
        "pools": {
            name: _pool(api, f"{cluster_name}-{name}", image_id, subnet_ids, pool)
            for name, pool in pools.items()
        },
        "kv": {"bucket": BUCKET, "prefix": "kv", "region": REGION},
        "kms_key_arn": ec2.client("kms").create_key()["KeyMetadata"]["Arn"],
        "ssm_prefix": f"/samovar/{cluster_name}",
        "target_group_arn": target_group_arn,
        "endpoint_url": f"http://{CLOUD_IP}:{port}",
        "log_group": f"/samovar/{cluster_name}",
    }
    return {"samovar": {"value": value, "type": "dynamic", "sensitive": False}}


def _profile(ec2: FakeEc2, name: str) -> str:
    iam = ec2.client("iam")
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))
    arn = iam.create_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Arn"]
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return str(arn)


def _pool(api: Any, name: str, image_id: str, subnet_ids: list[str], pool: Pool) -> dict[str, Any]:
    template = api.create_launch_template(
        LaunchTemplateName=name,
        LaunchTemplateData={
            "ImageId": image_id,
            "InstanceType": pool.instance_type,
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        },
    )["LaunchTemplate"]
    return {
        "launch_template_id": template["LaunchTemplateId"],
        "launch_template_version": str(template["LatestVersionNumber"]),
        "instance_type": pool.instance_type,
        "market": pool.market,
        "min_workers": pool.min_workers,
        "max_workers": pool.max_workers,
        "idle_timeout_min": pool.idle_timeout_min,
        "gpus": pool.gpus,
        "nvme_disks": pool.nvme_disks,
        "efa_interfaces": 0,
        "subnet_ids": subnet_ids,
        "has_own_network": False,
    }
