"""Keeps a cluster's two secrets in AWS, and finds what `ray down` leaves there.

The secrets are SSM SecureStrings below the cluster's prefix, written by `samovar up` and read by the nodes.
Values are never part of an error's text.
"""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Callable
from typing import Any, TypeVar

import yaml

from samovar.cluster.launch.settings import RenderFailed
from samovar.configs.fields import Tree, overlaid

TOKEN = "ray-token"
SECRETS = "secrets"
SECRETS_BYTES_MAX = 8192
"""SSM's bound for a parameter of its advanced tier; those of the standard one have half of it."""
NOT_FOUND = "ParameterNotFound"
DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")

T = TypeVar("T")


class AwsRefused(Exception):
    """An AWS call failed; the message names the action, and the permission that may be missing."""


def get_parameter(ssm: Any, name: str) -> str | None:
    """Return the parameter's value; None if there is none. Raises `AwsRefused`."""
    try:
        answer = asked(
            lambda: ssm.get_parameter(Name=name, WithDecryption=True),
            f"read the SSM parameter {name}",
            f"ssm:GetParameter on parameter{name} and kms:Decrypt on its key",
        )
    except AwsRefused as error:
        if _code(error.__cause__) == NOT_FOUND:
            return None
        raise
    return str(answer["Parameter"]["Value"])


def put_parameter(ssm: Any, name: str, value: str, kms_key_arn: str) -> None:
    """Write or replace the parameter, encrypted with the key. Raises `AwsRefused`."""
    asked(
        lambda: ssm.put_parameter(
            Name=name,
            Value=value,
            Type="SecureString",
            KeyId=kms_key_arn,
            Tier="Intelligent-Tiering",  # the advanced tier, which costs money, only for what needs it
            Overwrite=True,
        ),
        f"write the SSM parameter {name}",
        f"ssm:PutParameter on parameter{name}, and kms:Encrypt and kms:GenerateDataKey on {kms_key_arn}",
    )


def asked(call: Callable[[], T], what: str, permission: str) -> T:
    """Return the call's result. Raises `AwsRefused`, with boto3's error as its cause."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        code = _code(error)
        hint = f". Its role needs {permission}" if code in DENIED else ""
        raise AwsRefused(f"cannot {what}: {code}{hint}") from error
    except BotoCoreError as error:
        raise AwsRefused(f"cannot {what}: {error}") from error


def _code(error: BaseException | None) -> str:
    from botocore.exceptions import ClientError

    if not isinstance(error, ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


TOKEN_BYTES = 32


def new_token() -> str:
    """Return 256 random bits in hex."""
    return random_secrets.token_hex(TOKEN_BYTES)


def cloud_secrets(ssm: Any, prefix: str, given: Tree) -> Tree:
    """Return the secrets that the nodes shall read: those kept in SSM, and over them the `given` settings.

    Once given they stay in SSM: the next `samovar up` needs none. Writes nothing. `ssm`: a boto3 client.
    Raises `RenderFailed` if there are none, `AwsRefused`.
    """
    kept = _kept(ssm, prefix)
    if not given and not kept:
        raise RenderFailed(
            f"the cluster has no secrets yet: there is no SSM parameter {prefix}/{SECRETS}. Give them once, "
            "with --secrets FILE (YAML: `auth:`, below it `api_keys:`, below it `my-team: <a key>`)"
        )
    return with_server_secret(overlaid(kept, given), new_token)


def keep_in_cloud(ssm: Any, prefix: str, kms_key_arn: str, secrets: Tree) -> None:
    """Write the secrets to SSM if they have changed, and Ray's token if there is none.

    `ssm`: a boto3 client. Raises `RenderFailed` if SSM would not take so many, `AwsRefused`.
    """
    token_name, secrets_name = f"{prefix}/{TOKEN}", f"{prefix}/{SECRETS}"
    text = yaml.safe_dump(secrets, sort_keys=True)
    if (nbytes := len(text.encode())) > SECRETS_BYTES_MAX:
        raise RenderFailed(
            f"the secrets are {nbytes:,} bytes, and an SSM parameter takes {SECRETS_BYTES_MAX:,}. Keep most "
            "API keys elsewhere than in auth.api_keys: auth.keys_file, such as `postgres:`, has no such bound"
        )
    if secrets != _kept(ssm, prefix):
        put_parameter(ssm, secrets_name, text, kms_key_arn)
    if get_parameter(ssm, token_name) is None:
        put_parameter(ssm, token_name, new_token(), kms_key_arn)


def _kept(ssm: Any, prefix: str) -> Tree:
    name = f"{prefix}/{SECRETS}"
    text = get_parameter(ssm, name)
    return {} if text is None else _parsed(text, name)


def with_server_secret(secrets: Tree, draw: Callable[[], str]) -> Tree:
    """Return the secrets with a server secret, drawn if not given: all nodes must use the same salt."""
    auth = secrets.get("auth", {})
    if auth.get("server_secret"):
        return secrets
    return secrets | {"auth": auth | {"server_secret": draw()}}


def _parsed(text: str, name: str) -> Tree:
    try:
        found: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RenderFailed(f"the SSM parameter {name} is no YAML") from None  # the error quotes secrets
    auth = found.get("auth", {}) if isinstance(found, dict) else None
    if not isinstance(auth, dict):
        raise RenderFailed(
            f"the SSM parameter {name} does not hold settings such as `auth:`. Delete it, and write it again "
            "with --secrets FILE"
        )
    return dict(found)


CLUSTER_TAG = "ray-cluster-name"
LIVE_STATES = ["pending", "running", "stopping", "stopped"]


def live_instances(ec2: Any, cluster_name: str) -> list[str]:
    """Return one line per instance of the cluster that is not terminated. Raises `AwsRefused`.

    `ec2`: a boto3 client.
    """
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
    """Deregister all targets: the addresses of removed nodes may be reused. Raises `AwsRefused`."""
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
