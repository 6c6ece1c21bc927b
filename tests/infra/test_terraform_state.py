"""Remote state: kept in a bucket, locked by a file beside it; nobody writes while another holds the lock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.infra.conftest import bench_or_fail
from tests.infra.mirror import TREE, Bench, kept_running
from tests.infra.moto_process import KEYS
from tests.infra.needs import needs_infra

pytestmark = [needs_infra, pytest.mark.timeout(170)]

BACKEND = TREE / "envs" / "dev.s3.tfbackend"
VARIABLES = "-var-file=envs/dev.tfvars"


def setting(name: str) -> str:
    """A setting of the shipped backend file."""
    (line,) = [one for one in BACKEND.read_text().splitlines() if one.split("=")[0].strip() == name]
    return line.split("=")[1].strip().strip('"')


@pytest.fixture(scope="module")
def bucket(moto_url: str) -> Any:
    """The state bucket, as the bootstrap makes it, on our own AWS."""
    s3 = boto3.resource(
        "s3",
        endpoint_url=moto_url,
        region_name=setting("region"),
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    return s3.create_bucket(Bucket=setting("bucket"))


@pytest.fixture(scope="module")
def remote(moto_url: str, bucket: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """terraform/ with the state that envs/dev.s3.tfbackend names; only where S3 is was added."""
    made = bench_or_fail(tmp_path_factory.mktemp("remote"), local_state=False)
    here = made.tree.parent / "here.s3.tfbackend"
    here.write_text(
        f'endpoints = {{ s3 = "{moto_url}" }}\nuse_path_style = true\nskip_credentials_validation = true\n'
        "skip_requesting_account_id = true\nskip_metadata_api_check = true\nskip_region_validation = true\n"
    )
    env = {**made.env, **KEYS, "AWS_EC2_METADATA_DISABLED": "true"}
    with kept_running(Bench(made.tree, env)) as quick:
        quick.run("init", f"-backend-config={_in_tree(BACKEND)}", f"-backend-config={here}")
        yield quick


def _in_tree(file: Path) -> str:
    return str(file.relative_to(TREE))


def keys(bucket: Any) -> set[str]:
    return {one.key for one in bucket.objects.all()}


def test_the_state_is_written_and_read_again(remote: Bench, bucket: Any) -> None:
    key = setting("key")
    remote.run("apply", "-auto-approve", VARIABLES)
    assert keys(bucket) == {key}, "the state and no lock left behind"
    state = json.loads(bucket.Object(key).get()["Body"].read())
    assert len(state["resources"]) > 20
    assert bucket.Object(key).server_side_encryption is not None
    remote.run("plan", "-detailed-exitcode", VARIABLES)


def test_nobody_writes_while_another_holds_the_lock(remote: Bench, bucket: Any) -> None:
    lock = bucket.Object(f"{setting('key')}.tflock")
    held = {
        "ID": "11111111-2222",
        "Operation": "OperationTypeApply",
        "Who": "ann@laptop",
        "Version": "1.11.4",
    }
    lock.put(Body=json.dumps(held).encode())
    for command in (["plan"], ["apply", "-auto-approve"]):
        done = remote.run(*command, VARIABLES, expect=1)
        assert "Error acquiring the state lock" in done.stderr
        assert "ann@laptop" in done.stderr
    assert lock.key in keys(bucket), "a foreign lock is not taken away"
    lock.delete()
    remote.run("plan", "-detailed-exitcode", VARIABLES)


def test_destroy_leaves_an_empty_state(remote: Bench, bucket: Any) -> None:
    remote.run("destroy", "-auto-approve", VARIABLES)
    state = json.loads(bucket.Object(setting("key")).get()["Body"].read())
    assert state["resources"] == []
    assert keys(bucket) == {setting("key")}
