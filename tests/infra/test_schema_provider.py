"""The stand-in provider itself: it takes what is right, and Terraform refuses what is wrong by its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.awsschema.data_sources import SECRET_MARK
from tests.infra.awsschema.package import PROVIDER_VERSION
from tests.infra.conftest import bench_or_fail
from tests.infra.mirror import Bench, TerraformFailed, kept_running
from tests.infra.needs import needs_infra
from tests.infra.secret_scan import secrets_in_state, secrets_in_text

pytestmark = [needs_infra, pytest.mark.timeout(170)]

SMALL = Path(__file__).parent / "small_stack"

ERRORS = {
    "wrong argument": (
        "bucket_prefix =",
        "bucket_prefiks =",
        'argument named "bucket_prefiks" is not expected',
    ),
    "missing required argument": (
        "device_index   = 0",
        "device_index = 0\n    count = 1",
        '"count" is not expected here',
    ),
    "required argument left out": (
        'name             = "/small/token"',
        "",
        'The argument "name" is required',
    ),
    "wrong nested argument": (
        "http_tokens =",
        "http_tokenz =",
        'argument named "http_tokenz" is not expected',
    ),
    "wrong nested block": ("expiration {", "expiry {", 'Blocks of type "expiry" are not expected'),
    "one block too many": (
        "metadata_options {",
        'metadata_options {\n    http_endpoint = "enabled"\n  }\n  metadata_options {',
        "Too many metadata_options blocks",
    ),
    "wrong type": ("days = 7", 'days = "a week"', "a number is required"),
    "unknown attribute": (
        "aws_launch_template.gpu.id",
        "aws_launch_template.gpu.ident",
        "Unsupported attribute",
    ),
    "unknown resource": ("aws_vpc.main.id", "aws_vpc.other.id", "Reference to undeclared resource"),
    "computed attribute set": (
        "tags       = {",
        'arn = "x"\n  tags = {',
        "Value for unconfigurable attribute",
    ),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kept_running(bench_or_fail(tmp_path_factory.mktemp("small"), SMALL)) as made:
        made.run("init")
        yield made


@pytest.fixture
def main(small: Bench) -> Iterator[Path]:
    """The file errors are planted into; as it was afterwards."""
    file = small.tree / "main.tf"
    text = file.read_text()
    yield file
    file.write_text(text)


def plant(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"nothing to plant into: {old!r} is not in {file.name}"
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_refused(small: Bench, main: Path, error: str) -> None:
    old, new, words = ERRORS[error]
    plant(main, old, new)
    done = small.run("validate", expect=None)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, f"{error} was accepted"
    assert words in said


def test_a_sensitive_output_is_refused(small: Bench, main: Path) -> None:
    """As the real provider marks it; only a plan sees that."""
    plant(main, "latest_version }", "latest_version, token = aws_ssm_parameter.token.value }")
    done = small.run("plan", expect=1)
    assert "Output refers to sensitive values" in done.stderr


def test_a_whole_life(tmp_path: Path) -> None:
    """Init from the mirror, apply, read, plan again, destroy: as with the real provider, all by Terraform."""
    small = bench_or_fail(tmp_path, SMALL)
    small.run("init")
    assert f'version     = "{PROVIDER_VERSION}"' in (small.tree / ".terraform.lock.hcl").read_text()
    small.run("apply", "-auto-approve")
    small.run("plan", "-detailed-exitcode")
    outputs = small.outputs()
    policy = json.loads(outputs["policy"]["value"])
    assert policy["Statement"] == [
        {
            "Sid": "ReadKv",
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": policy["Statement"][0]["Resource"],
            "Condition": {"Bool": {"aws:SecureTransport": "true"}},
        }
    ]
    assert policy["Statement"][0]["Resource"].startswith("arn:aws:s3:::kv-")
    assert outputs["launch_template"]["value"]["id"].startswith("lt-")
    instances = {one["type"]: one["instances"][0]["attributes"] for one in small.state()["resources"]}
    assert instances["aws_vpc"]["tags_all"] == {"Name": "small", "project": "samovar"}
    assert instances["aws_subnet"]["availability_zone"] == "eu-west-1a"
    assert instances["aws_ssm_parameter"]["value_wo"] is None
    small.run("destroy", "-auto-approve")
    assert small.state()["resources"] == []


def test_a_change_is_planned(small: Bench, main: Path) -> None:
    small.run("apply", "-auto-approve")
    plant(main, "days = 7", "days = 8")
    assert "0 to add, 1 to change" in small.run("plan", "-detailed-exitcode", expect=2).stdout
    small.run("apply", "-auto-approve")
    small.run("plan", "-detailed-exitcode")
    small.run("destroy", "-auto-approve")


def test_a_secret_in_the_state_is_found(small: Bench, main: Path) -> None:
    """The scan of the real tree would be blind if this were not found."""
    small.run("apply", "-auto-approve")
    assert secrets_in_state(small.state()) == []
    plant(main, "value_wo         = ephemeral.aws_secretsmanager_random_password.token.random_password", "")
    plant(main, "value_wo_version = 1", f'value = "{SECRET_MARK}0"')
    small.run("apply", "-auto-approve")
    assert secrets_in_state(small.state())[0] == "aws_ssm_parameter.token: value"
    plant(main, "latest_version }", f'latest_version, token = "{SECRET_MARK}1" }}')
    said = small.run("apply", "-auto-approve").stdout
    assert set(secrets_in_text(said)) == {f"{SECRET_MARK}1"}
    assert "output launch_template.value.token" in secrets_in_state(small.state())
    small.run("destroy", "-auto-approve")


def test_an_unexpected_status_is_told_with_the_output(small: Bench) -> None:
    with pytest.raises(TerraformFailed, match="terraform nonsense: exit 1, expected 0"):
        small.run("nonsense")
