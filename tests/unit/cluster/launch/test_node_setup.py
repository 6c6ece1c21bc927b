"""What a node does before Ray starts: secrets from SSM or from files, and the load balancer's targets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError, NoCredentialsError
from moto import mock_aws

from samovar.cluster.launch import node_setup
from samovar.cluster.launch.aws import AwsRefused, cloud_secrets, keep_in_cloud, leave_targets, live_instances
from samovar.cluster.launch.node_setup import (
    NodeSetupFailed,
    join_targets,
    own_address,
    setup_from_file,
    setup_from_ssm,
)
from samovar.cluster.launch.settings import RenderFailed
from samovar.cluster.serve.secrets import write_private

REGION = "us-east-1"
PREFIX = "/samovar/test"
TOKEN = "0123456789abcdef" * 4
SECRETS: dict[str, Any] = {"auth": {"api_keys": {"my-team": "a-key-of-sixteen-characters"}}}


@pytest.fixture
def ssm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with mock_aws():
        yield boto3.client("ssm", region_name=REGION)  # type: ignore[call-overload]


def put(ssm: Any, name: str, value: str) -> None:
    ssm.put_parameter(Name=f"{PREFIX}/{name}", Value=value, Type="SecureString")


def value(ssm: Any, name: str) -> str:
    return str(ssm.get_parameter(Name=f"{PREFIX}/{name}", WithDecryption=True)["Parameter"]["Value"])


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_secrets_come_from_ssm_for_the_owner_only(ssm: Any, tmp_path: Path) -> None:
    put(ssm, "ray-token", TOKEN + "\n")
    put(ssm, "secrets", yaml.safe_dump(SECRETS))
    for _ in range(2):
        setup_from_ssm(ssm, PREFIX, tmp_path)
    token, secrets = tmp_path / ".ray/auth_token", tmp_path / "samovar/secrets.yaml"
    assert token.read_text() == TOKEN
    assert yaml.safe_load(secrets.read_text()) == SECRETS
    assert (mode(token), mode(secrets)) == (0o600, 0o600)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        ".ray",
        "auth_token",
        "samovar",
        "secrets.yaml",
    ]


@pytest.mark.parametrize("missing", ["ray-token", "secrets"])
def test_a_missing_parameter_is_named(ssm: Any, tmp_path: Path, missing: str) -> None:
    for name, text in (("ray-token", TOKEN), ("secrets", "auth: {}")):
        if name != missing:
            put(ssm, name, text)
    with pytest.raises(NodeSetupFailed, match=f"no SSM parameter {PREFIX}/{missing}"):
        setup_from_ssm(ssm, PREFIX, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("token", "secrets", "text"),
    [
        ("short", "auth: {}", "is not a token"),
        ("two words " * 8, "auth: {}", "is not a token"),
        (TOKEN, "- a-key-of-sixteen-characters", "does not hold settings"),
        (TOKEN, "a-key-of-sixteen-characters: [", "is no YAML"),
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(
    ssm: Any, tmp_path: Path, token: str, secrets: str, text: str
) -> None:
    put(ssm, "ray-token", token)
    put(ssm, "secrets", secrets)
    with pytest.raises(NodeSetupFailed, match=text) as failed:
        setup_from_ssm(ssm, PREFIX, tmp_path)
    assert "a-key" not in str(failed.value)
    assert token.strip() not in str(failed.value)


class Refusing:
    """A client whose calls all fail alike."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(**_: Any) -> Any:
            raise self._error

        return call


def denied(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "user x may not"}}, "GetParameter")


def test_a_missing_permission_is_named(tmp_path: Path) -> None:
    with pytest.raises(AwsRefused, match=r"needs ssm:GetParameter on parameter/samovar/test/ray-token"):
        setup_from_ssm(Refusing(denied("AccessDeniedException")), PREFIX, tmp_path)
    with pytest.raises(AwsRefused, match=r"cannot read the SSM parameter .*: ThrottlingException$"):
        setup_from_ssm(Refusing(denied("ThrottlingException")), PREFIX, tmp_path)
    with pytest.raises(AwsRefused, match="Unable to locate credentials"):
        setup_from_ssm(Refusing(NoCredentialsError()), PREFIX, tmp_path)
    with pytest.raises(AwsRefused, match="elasticloadbalancing:RegisterTargets"):
        join_targets(Refusing(denied("AccessDenied")), "arn:x", 8000, "10.0.0.1")


def test_a_rack_brings_them_as_files(tmp_path: Path) -> None:
    folder = tmp_path / "samovar"
    folder.mkdir()
    with pytest.raises(NodeSetupFailed, match="ray-token: No such file"):
        setup_from_file(folder / "ray-token", tmp_path)
    (folder / "ray-token").write_text(TOKEN + "\n")
    (folder / "secrets.yaml").write_text("auth: {}\n")
    (folder / "secrets.yaml").chmod(0o644)
    setup_from_file(folder / "ray-token", tmp_path)
    assert (tmp_path / ".ray/auth_token").read_text() == TOKEN
    assert [mode(folder / name) for name in ("ray-token", "secrets.yaml")] == [0o600, 0o600]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    write_private(path, "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_private(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_nodes_address_is_that_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setattr(node_setup, "SOMEWHERE", listener.getsockname())
        assert own_address() == "127.0.0.1"
    monkeypatch.setattr(node_setup, "SOMEWHERE", ("255.255.255.255", 80))
    with pytest.raises(NodeSetupFailed, match="no default route"):
        own_address()


def test_a_node_joins_the_targets_and_leaves_them_with_the_cluster(ssm: Any) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)  # type: ignore[call-overload]
    elb = boto3.client("elbv2", region_name=REGION)  # type: ignore[call-overload]
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    group = elb.create_target_group(Name="samovar", Protocol="HTTP", Port=8000, VpcId=vpc, TargetType="ip")[
        "TargetGroups"
    ][0]["TargetGroupArn"]
    for _ in range(2):
        join_targets(elb, group, 8000, "10.0.0.7")
    (row,) = elb.describe_target_health(TargetGroupArn=group)["TargetHealthDescriptions"]
    assert (row["Target"]["Id"], row["Target"]["Port"]) == ("10.0.0.7", 8000)
    leave_targets(elb, group)
    assert elb.describe_target_health(TargetGroupArn=group)["TargetHealthDescriptions"] == []
    leave_targets(elb, group)


def test_instances_that_still_live_are_named(ssm: Any) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)  # type: ignore[call-overload]
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "ray-cluster-name", "Value": "test"}]}]
    image = ec2.describe_images()["Images"][0]["ImageId"]
    made = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, TagSpecifications=tags)
    name = made["Instances"][0]["InstanceId"]
    assert live_instances(ec2, "test") == [f"instance {name} is running"]
    assert live_instances(ec2, "other") == []
    ec2.terminate_instances(InstanceIds=[name])
    assert live_instances(ec2, "test") == []


KMS_KEY = "arn:aws:kms:us-east-1:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"


def kept(ssm: Any, given: dict[str, Any]) -> dict[str, Any]:
    secrets = cloud_secrets(ssm, PREFIX, given)
    keep_in_cloud(ssm, PREFIX, KMS_KEY, secrets)
    return secrets


def test_secrets_are_given_once_and_then_kept_in_the_cloud(ssm: Any) -> None:
    with pytest.raises(RenderFailed, match="no secrets yet"):
        kept(ssm, {})
    first = kept(ssm, SECRETS)
    assert len(first["auth"]["server_secret"]) == 64
    token = value(ssm, "ray-token")
    assert len(token) == 64
    assert yaml.safe_load(value(ssm, "secrets")) == first
    assert kept(ssm, {}) == first
    other = {"auth": {"api_keys": {"other": "another-key-of-sixteen"}}}
    second = kept(ssm, other)
    assert second["auth"]["api_keys"] == other["auth"]["api_keys"]
    assert second["auth"]["server_secret"] == first["auth"]["server_secret"]  # blocks are found again
    assert value(ssm, "ray-token") == token


def test_secrets_in_the_cloud_have_the_clusters_key(ssm: Any) -> None:
    kept(ssm, SECRETS)
    found = {row["Name"]: (row["Type"], row["KeyId"]) for row in ssm.describe_parameters()["Parameters"]}
    names = (f"{PREFIX}/secrets", f"{PREFIX}/ray-token")
    assert found == dict.fromkeys(names, ("SecureString", KMS_KEY))


def test_more_secrets_than_a_parameter_takes_are_refused_and_what_does(ssm: Any) -> None:
    def keys(count: int) -> dict[str, Any]:
        return {"auth": {"api_keys": {f"team-{at:04}": f"a-key-of-a-team-{at:032}" for at in range(count)}}}

    kept(ssm, keys(100))  # more than the standard tier's 4 KiB
    (row,) = (r for r in ssm.describe_parameters()["Parameters"] if r["Name"] == f"{PREFIX}/secrets")
    assert row["Tier"] == "Intelligent-Tiering"
    before = value(ssm, "secrets")
    with pytest.raises(RenderFailed, match=r"SSM parameter takes 8,192\. .* auth\.keys_file") as failed:
        kept(ssm, keys(200))
    assert "a-key" not in str(failed.value)
    assert value(ssm, "secrets") == before


def test_secrets_in_the_cloud_that_are_none_are_refused_and_not_shown(ssm: Any) -> None:
    put(ssm, "secrets", "a-key-of-sixteen-characters")
    with pytest.raises(RenderFailed, match="does not hold settings") as failed:
        kept(ssm, {})
    assert "a-key" not in str(failed.value)
