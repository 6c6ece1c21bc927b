"""One AWS call for each action our policies speak of, and whether the one who asks may make it.

It knows no policy. The calls go to moto; what an instance, a bucket or a parameter needs is made beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

REGION = "us-east-1"
DENIED_STATUS = 403
ALLOWED = {"DryRunOperation", "InvalidTarget"}
"""Errors that only one who is allowed sees: of a dry run, and of a target that has left already."""

TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}],
}

Keys = dict[str, str]
Client = Callable[[str], Any]
NOBODY: Keys = {"aws_access_key_id": "setup", "aws_secret_access_key": "setup"}


def clients(url: str, keys: Keys) -> Client:
    """service -> boto3 client of whoever has `keys`; no retries, so that a refusal is quick."""
    session = boto3.Session(region_name=REGION, **keys)
    settings = Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"})
    made: dict[str, Any] = {}

    def client(service: str) -> Any:
        if service not in made:
            made[service] = session.client(service, endpoint_url=url, config=settings)
        return made[service]

    return client


@dataclass(frozen=True, slots=True)
class World:
    """What stands in moto for the probes to act on."""

    bucket: str
    prefix: str
    image: str
    subnet: str
    instance: str
    template: str
    parameter: str
    target_group: str


def build(client: Client, bucket: str, prefix: str, parameter: str) -> World:
    """Makes it, as the one to whom everything is allowed."""
    ec2, s3 = client("ec2"), client("s3")
    for name in (bucket, f"{bucket}-other"):
        s3.create_bucket(Bucket=name)
        for folder in (prefix, "other"):
            s3.put_object(Bucket=name, Key=f"{folder}/there", Body=b"x")
    client("ssm").put_parameter(Name=parameter, Value="x", Type="SecureString")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    subnet = ec2.describe_subnets()["Subnets"][0]
    data = {"ImageId": image, "InstanceType": "g6.xlarge"}
    template = ec2.create_launch_template(LaunchTemplateName="pool", LaunchTemplateData=data)
    instance = ec2.run_instances(ImageId=image, InstanceType="g6.xlarge", MinCount=1, MaxCount=1)
    group = client("elbv2").create_target_group(
        Name="samovar", Protocol="HTTP", Port=8000, VpcId=subnet["VpcId"], TargetType="ip"
    )
    return World(
        *(bucket, prefix, image, subnet["SubnetId"], instance["Instances"][0]["InstanceId"]),
        template["LaunchTemplate"]["LaunchTemplateId"],
        parameter,
        group["TargetGroups"][0]["TargetGroupArn"],
    )


def role_with(client: Client, name: str) -> tuple[Keys, Callable[[dict[str, Any]], None]]:
    """Temporary keys of a new role, and a function that gives the role another policy."""
    iam = client("iam")
    arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))["Role"]["Arn"]
    found = client("sts").assume_role(RoleArn=arn, RoleSessionName="probe")["Credentials"]
    keys = {
        "aws_access_key_id": found["AccessKeyId"],
        "aws_secret_access_key": found["SecretAccessKey"],
        "aws_session_token": found["SessionToken"],
    }

    def give(policy: dict[str, Any]) -> None:
        iam.put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=json.dumps(policy))

    return keys, give


def probes(client: Client, world: World) -> dict[str, Callable[[], Any]]:
    """Action -> a call that needs it and nothing else."""
    ec2, s3 = client("ec2"), client("s3")
    inside = {"Bucket": world.bucket, "Key": f"{world.prefix}/there"}
    target = {"TargetGroupArn": world.target_group, "Targets": [{"Id": "10.0.0.9"}]}
    machine = {
        "ImageId": world.image,
        "InstanceType": "g6.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "DryRun": True,
    }
    tags = [{"Key": "ray-node-status", "Value": "up-to-date"}]
    return {
        "ec2:RunInstances": lambda: ec2.run_instances(**machine),
        "ec2:CreateTags": lambda: ec2.create_tags(Resources=[world.instance], Tags=tags),
        "ec2:DescribeInstances": lambda: ec2.describe_instances(),
        "ec2:TerminateInstances": lambda: ec2.terminate_instances(InstanceIds=[world.instance]),
        "ec2:DescribeInstanceTypes": lambda: ec2.describe_instance_types(InstanceTypes=["g6.xlarge"]),
        "ec2:DescribeSubnets": lambda: ec2.describe_subnets(),
        "ec2:DescribeSecurityGroups": lambda: ec2.describe_security_groups(),
        "ec2:DescribeLaunchTemplateVersions": lambda: ec2.describe_launch_template_versions(
            LaunchTemplateId=world.template
        ),
        "s3:PutObject": lambda: s3.put_object(Body=b"x", **inside),
        "s3:GetObject": lambda: s3.get_object(**inside),
        "s3:DeleteObject": lambda: s3.delete_object(Bucket=world.bucket, Key=f"{world.prefix}/gone"),
        "s3:ListBucket": lambda: s3.list_objects_v2(Bucket=world.bucket, Prefix=world.prefix),
        "ssm:GetParameter": lambda: client("ssm").get_parameter(Name=world.parameter),
        "elasticloadbalancing:RegisterTargets": lambda: client("elbv2").register_targets(**target),
        "elasticloadbalancing:DeregisterTargets": lambda: client("elbv2").deregister_targets(**target),
    }


def never_allowed(client: Client, world: World) -> dict[str, Callable[[], Any]]:
    """Calls that no node of ours may make."""
    ec2, s3, iam = client("ec2"), client("s3"), client("iam")
    outside = {"Bucket": world.bucket, "Key": "other/there"}
    elsewhere = {"Bucket": f"{world.bucket}-other", "Key": f"{world.prefix}/there"}
    return {
        "CreateVpc": lambda: ec2.create_vpc(CidrBlock="10.9.0.0/16"),
        "StopInstances": lambda: ec2.stop_instances(InstanceIds=[world.instance]),
        "AuthorizeSecurityGroupIngress": lambda: ec2.authorize_security_group_ingress(
            GroupName="default", IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="10.0.0.0/8"
        ),
        "CreateRole": lambda: iam.create_role(RoleName="own", AssumeRolePolicyDocument=json.dumps(TRUST)),
        "PutParameter": lambda: client("ssm").put_parameter(Name="/own", Value="x", Type="String"),
        "DeleteBucket": lambda: s3.delete_bucket(Bucket=world.bucket),
        "PutObject outside the prefix": lambda: s3.put_object(Body=b"x", **outside),
        "GetObject outside the prefix": lambda: s3.get_object(**outside),
        "PutObject in another bucket": lambda: s3.put_object(Body=b"x", **elsewhere),
        "GetObject in another bucket": lambda: s3.get_object(**elsewhere),
        "ListBucket of another bucket": lambda: s3.list_objects_v2(Bucket=elsewhere["Bucket"]),
    }


def refused(calls: dict[str, Callable[[], Any]]) -> set[str]:
    """Which of `calls` were denied. Other errors of AWS are raised: the probe itself would be wrong."""
    found = set()
    for name, call in calls.items():
        try:
            call()
        except ClientError as problem:
            if problem.response["ResponseMetadata"]["HTTPStatusCode"] == DENIED_STATUS:
                found.add(name)
            elif problem.response["Error"]["Code"] not in ALLOWED:
                raise
    return found
